"""The guard finds a divergence and stops, warns or rolls back, on one device and on several ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from rl_plugins.callbacks.checkpoint import PolicyCheckpoint
from rl_plugins.callbacks.divergence_guard import BestAverage, DivergenceGuard
from rl_plugins.config.run import Bounds
from rl_plugins.errors import TrainingDiverged
from rl_plugins.run_folder import RunFolder
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.tests.callbacks.training import AfterStep, alter, build_stage, sharded, train, weights
from rl_plugins.tests.ranks import run_ranks
from rl_plugins.tests.stages import canned

STEPS = 6


def spoil(trainer: Any, stage: Any) -> None:
    """Make all weights NaN, as one bad update does."""
    with torch.no_grad():
        for parameter in stage.policy.parameters():
            parameter.data.fill_(math.nan)


BAD = {"train/gradient_norm": math.nan}
# The KL divergence of the first update is 0, and no option sets a bound below 0.
BELOW_ANY_KL = Bounds()
BELOW_ANY_KL.ppo_kl = -1.0


def bad_at(*steps: int) -> Any:
    """A stage with a gradient norm of NaN at these steps."""
    stage = build_stage(STEPS)
    alter(stage, dict.fromkeys(steps, BAD))
    return stage


def once(act: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    done: list[bool] = []

    def act_once(trainer: Any, stage: Any) -> None:
        if not done:
            done.append(True)
            act(trainer, stage)

    return act_once


@pytest.mark.parametrize(
    ("bounds", "metric", "bound"),
    [
        (Bounds(entropy_min=99.0), "train/entropy", "entropy_min=99"),
        (Bounds(entropy_max=0.1), "train/entropy", "entropy_max=0.1"),
        (Bounds(rollout_gap=1e-6), "train/rollout_gap", "rollout_gap=1e-06"),
        (Bounds(gradient_norm=1e-6), "train/gradient_norm", "gradient_norm=1e-06"),
        (BELOW_ANY_KL, "train/ppo_kl", "ppo_kl=-1"),
    ],
)
def test_guard_stop_names_step_metric_value_bound_and_the_way_out(bounds: Bounds, metric: str, bound: str) -> None:
    with pytest.raises(
        TrainingDiverged,
        match=rf"diverges at step 1: {metric} is \S+ \({bound}\)\. Lower the learning rate, .*or widen the bound",
    ):
        train(build_stage(STEPS), [DivergenceGuard(bounds)])


def test_guard_finds_nothing_within_the_bounds() -> None:
    bounds = Bounds(1.0, 1.0, 1e-3, 99.0, 99.0, 1e6, reward_drop=1.0, reward_window=2)
    stage = build_stage(STEPS)
    train(stage, [DivergenceGuard(bounds)])
    assert stage.step == STEPS


def test_guard_stops_on_nan_before_a_checkpoint_is_saved(tmp_path: Path) -> None:
    guard = DivergenceGuard(Bounds(), folder=tmp_path)
    callbacks = [guard, PolicyCheckpoint(tmp_path, every=2)]
    newest = RunFolder(tmp_path).checkpoint(2)
    with pytest.raises(TrainingDiverged, match=f"step 4: train/gradient_norm is nan.*newest checkpoint .* is {newest}"):
        train(bad_at(4), callbacks)
    assert RunFolder(tmp_path).checkpoints() == [newest]


def test_guard_judges_a_norm_that_a_callback_logs() -> None:
    stage = build_stage(STEPS)
    log = AfterStep([2], lambda trainer, module: module.log("train/head_gradient_norm", math.inf))
    with pytest.raises(TrainingDiverged, match=r"step 2: train/head_gradient_norm is inf \(finite=True\)"):
        train(stage, [log, DivergenceGuard(Bounds())])


def test_guard_warns_once_for_consecutive_steps(caplog: pytest.LogCaptureFixture) -> None:
    stage = build_stage(STEPS)
    alter(stage, {step: {"train/entropy": 50.0} for step in (2, 3, 5)})
    train(stage, [DivergenceGuard(Bounds(entropy_max=40.0), action="warn")])
    assert stage.step == STEPS
    messages = [record.getMessage() for record in caplog.records if record.name.endswith("divergence_guard")]
    assert messages == [f"step {step}: train/entropy is 50 (entropy_max=40)" for step in (2, 5)]


def test_guard_roll_back_restores_weights_and_optimizer_and_skips_the_data(tmp_path: Path) -> None:
    guard = DivergenceGuard(Bounds(), action="roll_back", folder=tmp_path)
    checkpoint = PolicyCheckpoint(tmp_path, every=2, keep_last=9)
    seen: list[list[int]] = []
    stage = bad_at(3)
    make_parts = stage.make_parts

    def make_watched_parts(strategy: Any) -> None:
        make_parts(strategy)
        offer = stage.rollouts.scheduled_sampler.offer

        def watched(prompts: Any) -> None:
            seen.append(list(prompts.rows))
            offer(prompts)

        stage.rollouts.scheduled_sampler.offer = watched

    stage.make_parts = make_watched_parts
    kept: dict[str, Any] = {}
    look = AfterStep([2], once(lambda _, module: kept.update(weights=weights(module))))

    def check(trainer: Any, module: Any) -> None:
        if guard.rollbacks and "after" not in kept:
            kept["after"], kept["step"] = weights(module), module.step
            kept["rate"] = trainer.optimizers[0].param_groups[0]["lr"]

    _, log = train(stage, [look, AfterStep([3], once(spoil)), guard, AfterStep([2, 3], check), checkpoint])
    assert guard.rollbacks == 1 and stage.step == STEPS
    assert kept["step"] == 2
    for one, other in zip(kept["weights"], kept["after"], strict=True):
        assert torch.equal(one, other)
    assert kept["rate"] == pytest.approx(0.01 * 3 / 4)
    assert all(torch.isfinite(weight).all() for weight in weights(stage))
    # One step more was sampled than there are steps: the bad one, whose prompts do not come again.
    assert len(seen) == STEPS + 1
    epoch = [row for rows in seen[:4] for row in rows]
    assert sorted(epoch) == sorted(2 * list(range(4)))
    assert [row["guard/rollbacks"] for _, row in log.rows if "guard/rollbacks" in row] == [1.0]


def test_guard_keeps_validations_on_the_clock_of_the_stage_after_a_roll_back(tmp_path: Path) -> None:
    class Steps(Callback):
        def __init__(self) -> None:
            self.validated: list[int] = []

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            self.validated.append(pl_module.step)

    guard, steps = DivergenceGuard(Bounds(), action="roll_back", folder=tmp_path), Steps()
    trainer = canned.quiet_trainer(
        SingleDeviceRolloutStrategy(rollout=canned.CannedRollout()), max_epochs=-1,
        callbacks=[guard, PolicyCheckpoint(tmp_path, every=2), steps], val_check_interval=2, limit_val_batches=1,
        check_val_every_n_epoch=None, num_sanity_val_steps=0,
    )  # fmt: skip
    batch = canned.prompt_batch(canned.PROMPTS)
    trainer.fit(bad_at(3), canned.loader([batch] * 9), canned.loader([batch]))
    assert guard.rollbacks == 1 and steps.validated == [2, 4, 6]


def test_guard_rolls_back_a_diverging_last_step(tmp_path: Path) -> None:
    guard, stage = DivergenceGuard(Bounds(), action="roll_back", folder=tmp_path), bad_at(STEPS)
    train(stage, [guard, PolicyCheckpoint(tmp_path, every=2)])
    assert guard.rollbacks == 1 and stage.step == STEPS
    assert RunFolder(tmp_path).latest_checkpoint() == RunFolder(tmp_path).checkpoint(STEPS)


def test_guard_stops_after_max_rollbacks(tmp_path: Path) -> None:
    guard = DivergenceGuard(Bounds(), action="roll_back", folder=tmp_path, max_rollbacks=2)
    stage = bad_at(3, 4, 5)
    with pytest.raises(TrainingDiverged, match=r"step 5: .* It was rolled back 2 times"):
        train(stage, [guard, PolicyCheckpoint(tmp_path, every=2)])


def test_guard_stops_without_a_checkpoint_to_roll_back_to(tmp_path: Path) -> None:
    guard = DivergenceGuard(Bounds(), action="roll_back", folder=tmp_path)
    with pytest.raises(TrainingDiverged, match=r"step 1: .*no checkpoint yet to roll back to"):
        train(bad_at(1), [guard, PolicyCheckpoint(tmp_path, every=2)])


def test_best_average_measures_the_drop_below_the_best_reward() -> None:
    average = BestAverage(window=3)
    # Young, the average forgives everything.
    assert [average.drop_after(value) for value in (1.0, 0.0)] == [0.0, 0.0]
    assert [round(average.drop_after(value), 3) for value in (1.0, 1.0, 0.5, math.nan, 0.0)] == [0, 0, 0.188, 0, 0.531]
    again = BestAverage(window=3)
    again.load_state_dict(average.state_dict())
    assert again.drop_after(0.0) == average.drop_after(0.0)


def roll_back_on_ranks(rank: int, folder: Path, name: str) -> tuple[int, int, bool]:
    # Only one rank finds something, and weights of both are spoilt.
    policy = bad_at(3) if rank == 0 else build_stage(STEPS)
    run = folder / name
    guard = DivergenceGuard(Bounds(), action="roll_back", folder=run)
    strategy = sharded(name)
    train(
        policy,
        [AfterStep([3], once(spoil)), guard, PolicyCheckpoint(run, every=2)],
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        num_nodes=2,
    )
    source = list(strategy.weight_source())
    return policy.step, guard.rollbacks, all(bool(torch.isfinite(tensor).all()) for _, tensor in source)


@pytest.mark.parametrize("name", ["zero-2", "zero-3", "fsdp"])
def test_guard_rolls_all_ranks_back_together(tmp_path: Path, name: str) -> None:
    results = [result for result, _ in run_ranks(roll_back_on_ranks, tmp_path, name)]
    assert results == [(STEPS, 1, True)] * 2
