"""A replay of dumped samples repeats the run without an engine, also on another number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.algorithms.constraint import CostConstraint
from rl_plugins.algorithms.filtering import GroupFilter
from rl_plugins.callbacks.checkpoint import PolicyCheckpoint
from rl_plugins.callbacks.rollout_dump import RolloutDump, RolloutReplay
from rl_plugins.config.models import RewardModelConfig
from rl_plugins.data.experience import Experience
from rl_plugins.errors import CheckpointError, ConfigError, DataError
from rl_plugins.rewards.trajectory import RECORDS
from rl_plugins.run_folder import RunFolder
from rl_plugins.stages.sft import SFT
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.tests.callbacks.training import build_policy, build_stage, train, weights
from rl_plugins.tests.files import Command
from rl_plugins.tests.ranks import run_ranks
from rl_plugins.tests.stages import canned
from rl_plugins.tests.stages.test_experience_maker import save_reward_model

STEPS = 4
ALGORITHMS = {
    "grpo": Algorithm(),
    "a greedy baseline": Algorithm(advantage="remax"),
    "dynamic sampling": Algorithm(group_filter=GroupFilter(max_batches=9, oversampling=1)),
}


def same_weights(one: Any, other: Any) -> bool:
    return all(torch.equal(*pair) for pair in zip(weights(one), weights(other), strict=True))


def no_engine() -> SingleDeviceRolloutStrategy:
    return SingleDeviceRolloutStrategy()


@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=list(ALGORITHMS))
def test_rollout_replay_repeats_the_run_bit_for_bit(tmp_path: Path, algorithm: Algorithm) -> None:
    run = build_stage(STEPS, algorithm=algorithm, updates_per_step=2)
    _, log = train(run, [RolloutDump(tmp_path, keep_last=9)])
    replay = build_stage(STEPS, algorithm=algorithm, updates_per_step=2)
    _, again = train(replay, [RolloutReplay(tmp_path)], strategy=no_engine())
    assert replay.step == STEPS and same_weights(run, replay)
    assert not torch.equal(weights(run)[0], next(build_policy().parameters()))
    for (step, row), (same_step, other) in zip(log.rows, again.rows, strict=True):
        assert step == same_step
        for name in ("train/reward", "train/loss", "train/truncated", "train/reward_raised"):
            assert row[name] == other[name], (step, name)


@pytest.mark.parametrize(
    "options",
    [
        {"advantage": "gdpo", "reward_components": ["format", "correct"]},
        {"constraint": CostConstraint("format", threshold=0.2)},
        {"group_filter": GroupFilter(metric="correct", oversampling=2)},
    ],
    ids=["components", "cost", "metric of the filter"],
)
def test_rollout_replay_with_another_algorithm_learns_as_after_sampling(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    algorithm = Algorithm(**options)
    train(build_stage(STEPS), [RolloutDump(tmp_path, keep_last=9)])
    run = build_stage(STEPS, algorithm=algorithm)
    train(run, [])
    replay = build_stage(STEPS, algorithm=algorithm)
    train(replay, [RolloutReplay(tmp_path)], strategy=no_engine())
    assert same_weights(run, replay)
    assert not torch.equal(weights(run)[0], next(build_policy().parameters()))


def test_rollout_replay_refuses_a_dump_without_the_numbers_of_sampling(tmp_path: Path) -> None:
    dump, model = tmp_path / "rollouts", tmp_path / "model"
    save_reward_model(model)
    train(build_stage(1), [RolloutDump(dump, keep_last=1)])
    bounded: dict[str, Any] = {"algorithm": Algorithm(constraint=CostConstraint("format"))}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"algorithm": Algorithm(advantage="remax")}, "the dump has no greedy responses, which the advantage needs"),
        ({**bounded, "cost_model": RewardModelConfig(str(model))}, "the dump has no scores of the cost model"),
    ]
    for options, said in cases:
        with pytest.raises(DataError, match=said):
            train(build_stage(1, **options), [RolloutReplay(dump)], strategy=no_engine())


def test_rollout_replay_keeps_the_costs_of_a_cost_model(tmp_path: Path) -> None:
    dump, model = tmp_path / "rollouts", tmp_path / "model"
    save_reward_model(model)
    options: dict[str, Any] = {
        "algorithm": Algorithm(constraint=CostConstraint("format", threshold=0.2)),
        "cost_model": RewardModelConfig(str(model)),
    }
    run, replay = build_stage(2, **options), build_stage(2, **options)
    train(run, [RolloutDump(dump, keep_last=2)])
    train(replay, [RolloutReplay(dump)], strategy=no_engine())
    assert same_weights(run, replay)


def test_rollout_replay_of_one_step_and_retention_of_rollout_dump(tmp_path: Path) -> None:
    run, folder = build_stage(STEPS), RunFolder(tmp_path)
    train(run, [RolloutDump(folder.rollouts, keep_last=2), PolicyCheckpoint(tmp_path, every=1, keep_last=9)])
    assert [path.name for path in sorted(folder.rollouts.iterdir())] == ["step_00000003", "step_00000004"]
    replay = build_stage(STEPS, seed=9)
    train(replay, [RolloutReplay(folder.rollouts)], strategy=no_engine(), resume=folder.checkpoint(3))
    assert same_weights(run, replay)
    message = r"step_00000001 does not hold .*rollouts has the steps 3, 4\. Start from the checkpoint"
    with pytest.raises(DataError, match=message):
        train(build_stage(STEPS), [RolloutReplay(folder.rollouts)], strategy=no_engine())


def test_rollout_dump_removes_later_steps_of_a_killed_run(tmp_path: Path) -> None:
    for step in range(5, 9):
        (tmp_path / f"step_{step:08d}").mkdir()
    train(build_stage(STEPS), [RolloutDump(tmp_path, keep_last=3)])
    assert [path.name for path in sorted(tmp_path.iterdir())] == [f"step_0000000{step}" for step in (2, 3, 4)]


def test_rollout_dump_file_holds_texts_scores_and_versions(tmp_path: Path) -> None:
    train(build_stage(1), [RolloutDump(tmp_path, keep_last=1)])
    experience = Experience.load(tmp_path / "step_00000001" / "draw_0_rank_0_of_1.pt", RECORDS)
    assert set(experience.columns["response"]) <= {text for texts in canned.RESPONSES.values() for text in texts}
    assert {score.failure for score in experience.columns["scored"]} <= {None, "raised"}
    assert not experience.policy_versions.any()
    # The dump is taken before anything is computed.
    assert experience.advantages is None and experience.old_log_probs is None


def test_rollout_replay_never_runs_code_of_a_dump(tmp_path: Path) -> None:
    dump, mark = tmp_path / "rollouts", tmp_path / "mark"
    train(build_stage(1), [RolloutDump(dump, keep_last=1)])
    torch.save(Command(f"touch {mark}"), dump / "step_00000001" / "draw_0_rank_0_of_1.pt")
    with pytest.raises(CheckpointError, match="it holds code"):
        train(build_stage(1), [RolloutReplay(dump)], strategy=no_engine())
    assert not mark.exists()


def test_rollout_dump_refuses_a_stage_without_experience(tmp_path: Path) -> None:
    stage = build_stage(1)
    sft = SFT(build_policy(), tokenizer=canned.tokenizer, scorer=canned.CannedScorer(), eval_sampling=stage.sampling)
    with pytest.raises(ConfigError, match="SFT collects no experience"):
        train(sft, [RolloutDump(tmp_path, keep_last=1)])  # type: ignore[arg-type]


def dump_on_ranks(rank: int, folder: Path) -> list[Any]:
    stage = build_stage(STEPS)
    strategy = canned.AllReduceStrategy(rank, 2, rollout=canned.CannedRollout())
    train(stage, [RolloutDump(folder, keep_last=9)], strategy=strategy)
    return weights(stage)


def test_rollout_replay_on_one_rank_of_a_dump_of_two_ranks(tmp_path: Path) -> None:
    dumped, _ = run_ranks(dump_on_ranks, tmp_path)[0]
    replay = build_stage(STEPS)
    train(replay, [RolloutReplay(tmp_path)], strategy=no_engine())
    for one, other in zip(dumped, weights(replay), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
