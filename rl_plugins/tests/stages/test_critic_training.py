"""A critic in separate processes learns the same as a critic in the training workers from the same samples."""

from __future__ import annotations

import asyncio
import errno
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from torch import Tensor, nn

from rl_plugins.algorithms.aggregation import GlobalCounts, local_counts
from rl_plugins.config.models import CriticConfig, LoraConfig, OptimizerConfig
from rl_plugins.data.experience import Experience
from rl_plugins.errors import CheckpointError
from rl_plugins.manifest import CheckpointWriter
from rl_plugins.models.pool_actor import PoolConfig
from rl_plugins.stages.critic_pool import CriticActor, CriticLost, CriticPool
from rl_plugins.stages.critic_training import CriticLearner, CriticTraining, Learnt, ValueObjective
from rl_plugins.strategies.checkpoint_folder import save_learner
from rl_plugins.strategies.loss_scale import LossScale
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.tests.ranks import run_ranks
from rl_plugins.tests.stages import canned

STEPS, UPDATES, CLIP = 3, 2, 0.1
# Half of the rate in the first step: the schedule goes by steps, not by updates.
OPTIMIZER = OptimizerConfig(lr=0.02, warmup_steps=1, gradient_clip=CLIP)


@cache
def trained_in_workers() -> canned.Keeping:
    """A stage after training of a critic beside a policy, with the samples of each step."""
    stage: canned.Keeping = canned.ppo(canned.Keeping, critic=CriticConfig(canned.other_model(), OPTIMIZER))
    strategy = SingleDeviceRolloutStrategy(rollout=canned.CannedRollout())
    trainer = canned.quiet_trainer(strategy, precision="64-true")
    trainer.fit(stage, canned.loader([canned.prompt_batch(canned.PROMPTS)] * STEPS))
    return stage


def training(**changes: Any) -> CriticTraining:
    settings: dict[str, Any] = {
        "path": canned.other_model(),
        "config": CriticConfig(optimizer=OPTIMIZER),
        "gradient_clip": CLIP,
        "objective": ValueObjective(0.02, "token-mean", None, UPDATES),
        "computes_in": torch.float64,
        "loading": {},
        "tokens_per_micro_batch": 40,
        "packing": True,
        "seed": 0,
    }
    return CriticTraining(**(settings | changes))


def learn(learner: CriticLearner, steps: list[Experience], rank: int = 0, ranks: int = 1) -> list[Learnt]:
    """Return the updates of a process with every `ranks`-th row of the samples."""
    learnt = []
    for experience in steps:
        for number, mini_batch in enumerate(experience.chunk(UPDATES), 1):
            counts = GlobalCounts(*local_counts(mini_batch.response_mask).tolist())
            own = mini_batch[rank::ranks]
            # Two workers have sent rows; the second sent none.
            learnt.append(learner.update([own, own[:0]], counts, last=number == UPDATES))
    return learnt


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def gap(weights: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    assert weights.keys() == others.keys()
    return max(float((weights[name] - others[name]).abs().max()) for name in weights)


def distance(weights: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    return sum(float((weights[name] - others[name]).square().sum()) for name in weights) ** 0.5


def test_critic_learner_gets_the_weights_of_the_critic_trained_in_workers() -> None:
    stage = trained_in_workers()
    learner = CriticLearner(training())
    start = {name: weight.clone() for name, weight in learner.weights.items()}
    learnt = learn(learner, stage.trained_on)
    assert gap(learner.weights, weights_of(stage.critic)) < 1e-12 < 0.01 < gap(learner.weights, start)
    assert (
        [one.lr for one in learnt[::UPDATES]] == [row["train/critic/lr"] for row in stage.metrics] == [0.01, 0.02, 0.02]
    )
    for step, row in enumerate(stage.metrics):
        newest = learnt[step * UPDATES + UPDATES - 1]
        assert newest.gradient_norm == pytest.approx(row["train/critic/gradient_norm"])
    assert max(row["train/critic/gradient_norm"] for row in stage.metrics) > CLIP, "no gradient was clipped"


def test_critic_learner_continues_a_checkpoint_with_the_rate_of_the_run(tmp_path: Path) -> None:
    steps = trained_in_workers().trained_on[:1]
    learner = CriticLearner(training())
    learn(learner, steps)
    learner.save(tmp_path)
    faster = CriticLearner(training(config=CriticConfig(optimizer=replace(OPTIMIZER, lr=0.5))))
    faster.load(tmp_path)
    assert {one.lr for one in learn(faster, steps)} == {0.5}


def rank_of_two(rank: int, path: str, steps: list[Experience]) -> tuple[dict[str, Tensor], list[float | None]]:
    # New adapters are random numbers; all processes take the adapter of the first.
    adapted = CriticLearner(training(path=path, config=CriticConfig(lora=LoraConfig(rank=2)), seed=rank))
    learner = CriticLearner(training(path=path))
    norms = [one.gradient_norm for one in learn(learner, steps, rank, 2)]
    # More processes than rows.
    learner.update([steps[0][:1] if rank else steps[0][:0]], GlobalCounts(9, 1), last=True)
    return {**learner.weights, **adapted.weights}, norms


def test_two_critic_learners_get_the_weights_of_one() -> None:
    steps = trained_in_workers().trained_on
    (first, norms), (second, _) = (result for result, _ in run_ranks(rank_of_two, canned.other_model(), steps))
    assert gap(first, second) == 0
    learner = CriticLearner(training())
    expected = [one.gradient_norm for one in learn(learner, steps)]
    assert norms == pytest.approx(expected)
    learner.update([steps[0][:1]], GlobalCounts(9, 1), last=True)
    assert gap({name: first[name] for name in learner.weights}, learner.weights) < 1e-12


def test_critic_actor_learn_waits_for_all_ranks_and_updates_in_order(tmp_path: Path) -> None:
    steps = [step.clone() for step in trained_in_workers().trained_on]
    settings = training(computes_in=torch.float32)
    # Equal bits need an equal number of threads.
    pool = PoolConfig("critic", "", "scalar", threads=torch.get_num_threads())
    # Not at the same time: while the actor loads in a thread, transformers ties no weights in this process.
    learner = CriticLearner(settings)
    actor = CriticActor(pool, settings, 0)
    counts = [GlobalCounts(*local_counts(step.response_mask).tolist()) for step in steps[:2]]
    expected = [
        learner.update([step[:5], step[5:]], count, last=True) for step, count in zip(steps[:2], counts, strict=True)
    ]

    async def updates_that_began_are_done() -> None:
        # New tasks send their rows.
        await asyncio.sleep(0)
        # The actor works in the order of its calls: a save comes after every started update.
        await actor.save(tmp_path)

    async def ranks() -> list[Learnt]:
        # The second rank is two mini-batches ahead.
        early = [asyncio.create_task(actor.learn(n, 1, 2, steps[n][5:], counts[n], True)) for n in range(2)]
        await updates_that_began_are_done()
        assert not any(task.done() for task in early)
        # Ray delivers calls in any order: the second mini-batch is complete first.
        second = asyncio.create_task(actor.learn(1, 0, 2, steps[1][:5], counts[1], True))
        await updates_that_began_are_done()
        assert not second.done()
        late = [await actor.learn(0, 0, 2, steps[0][:5], counts[0], True), await second]
        assert [await task for task in early] == late
        # A failing update fails for all ranks.
        steps[0].returns = None
        both = [actor.learn(2, rank, 2, steps[0], counts[0], True) for rank in range(2)]
        failures = await asyncio.gather(*both, return_exceptions=True)
        assert [type(one) for one in failures] == [AssertionError] * 2
        return late

    learnt = asyncio.run(ranks())
    assert [one.gradient_norm for one in learnt] == [one.gradient_norm for one in expected]
    assert gap(actor._learner.result().weights, learner.weights) == 0


def test_critic_actor_has_finite_weights_until_one_weight_is_nan() -> None:
    actor = CriticActor(PoolConfig("critic", "", "scalar", threads=torch.get_num_threads()), training(), 0)
    assert asyncio.run(actor.has_finite_weights())
    next(iter(actor._learner.result().weights.values())).view(-1)[0] = torch.nan
    assert not asyncio.run(actor.has_finite_weights())


@pytest.mark.parametrize("lora", [LoraConfig(rank=0), LoraConfig(rank=2)], ids=["all weights", "adapter"])
def test_critic_learner_load_continues_from_save(tmp_path: Path, lora: LoraConfig) -> None:
    steps = trained_in_workers().trained_on
    settings = training(config=CriticConfig(optimizer=OPTIMIZER, lora=lora))
    whole, saved, resumed = (CriticLearner(settings) for _ in range(3))
    learn(whole, steps)
    learn(saved, steps[:1])
    saved.save(tmp_path / "critic")
    learn(resumed, steps[2:])
    resumed.load(tmp_path / "critic")
    assert gap(saved.weights, resumed.weights) == 0
    learn(resumed, steps[1:])
    assert gap(whole.weights, resumed.weights) == 0 < gap(whole.weights, saved.weights)
    if lora.rank:
        assert all("lora_" in name or "score" in name for name in whole.weights)


def test_critic_learner_load_refuses_a_checkpoint_without_this_critic(tmp_path: Path) -> None:
    learner = CriticLearner(training())
    with pytest.raises(CheckpointError, match=r"holds no critic .* pool of its own: .*placement\.critic\.actors=0"):
        learner.load(tmp_path)
    with pytest.raises(CheckpointError, match=r"keep_models .*critic\.keep_checkpoints\), resume from a newer"):
        learner.load(tmp_path)
    learner.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"not of this critic: .*lora_A"):
        CriticLearner(training(config=CriticConfig(lora=LoraConfig(rank=2)))).load(tmp_path)


def test_critic_learner_in_bfloat16_applies_small_steps_to_float32_weights() -> None:
    steps = trained_in_workers().trained_on
    tiny = CriticConfig(optimizer=OptimizerConfig(lr=1e-6, gradient_clip=0.0))
    learner, exact = (CriticLearner(training(config=tiny, computes_in=d)) for d in (torch.bfloat16, torch.float32))
    start = {name: weight.clone() for name, weight in learner.weights.items()}
    norms = [[one.gradient_norm for one in learn(one, steps)] for one in (learner, exact)]
    assert norms[0] == pytest.approx(norms[1], rel=0.05) and norms[0] != norms[1]
    moved = [
        name
        for name, weight in learner.weights.items()
        if weight.dtype == torch.float32 and gap({name: weight}, {name: start[name]}) > 1e-7
    ]
    assert len(moved) == len(start)


def test_critic_learner_in_float16_leaves_out_a_step_and_continues_with_the_saved_scale(tmp_path: Path) -> None:
    steps = trained_in_workers().trained_on
    settings = {"config": CriticConfig(optimizer=replace(OPTIMIZER, lr=1e-3))}
    learner, exact = (CriticLearner(training(**settings, computes_in=d)) for d in (torch.float16, torch.float32))
    start = {name: weight.clone() for name, weight in learner.weights.items()}
    learner._loss_scale = LossScale(2.0**9)
    expected = [one.gradient_norm for one in learn(exact, steps)]
    assert [one.gradient_norm for one in learn(learner, steps)] == pytest.approx(expected, rel=0.02)
    # Not of single weights: Adam's first steps are signs, and for a gradient near 0 rounding decides.
    assert distance(learner.weights, exact.weights) < 0.05 * distance(learner.weights, start)
    # A scale at which the gradients overflow, also the head's, which are in float32.
    too_large = CriticLearner(training(**settings, computes_in=torch.float16))
    too_large._loss_scale = LossScale(2.0**140)
    left_out = [(one.gradient_norm, one.loss_scale) for one in learn(too_large, steps[:1])]
    assert left_out == [(None, LossScale(2.0**139, skipped=1)), (None, LossScale(2.0**138, skipped=2))]
    assert gap(too_large.weights, start) == 0
    learner.save(tmp_path)
    too_large.load(tmp_path)
    assert learn(too_large, steps[:1])[0].loss_scale == LossScale(2.0**9, STEPS * UPDATES + 1)


def test_critic_learner_reports_an_overflow_of_a_step_at_the_smallest_scale_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = trained_in_workers().trained_on[:1]
    learner = CriticLearner(training(computes_in=torch.float16))
    learner._loss_scale = LossScale(2.0)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda parameters, limit: torch.tensor(torch.inf))
    left_out = [(one.gradient_norm, one.loss_scale) for one in learn(learner, steps)]
    assert left_out == [(None, LossScale(1.0, skipped=1)), (torch.inf, LossScale(1.0, skipped=2))]


def test_save_of_a_critic_pool_with_a_full_disk_is_a_failure_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("a bug")]

    def get(calls: list[None], timeout: float) -> None:
        raise ray.exceptions.RayTaskError("save", "Traceback", errors.pop(0)).as_instanceof_cause()

    monkeypatch.setattr(ray, "get", get)
    pool, writer = CriticPool(PoolConfig("critic", "model", "scalar"), []), CheckpointWriter(tmp_path)
    pool._actors = [SimpleNamespace(save=SimpleNamespace(remote=lambda folder: None))]
    save_learner(writer, pool, tmp_path / "critic")
    said = f"{tmp_path / 'critic'} cannot be written (No space left on device): make room on its disk"
    assert str(writer.failure).startswith(said)
    with pytest.raises(CriticLost, match="failed to write"):
        pool.save(tmp_path)
