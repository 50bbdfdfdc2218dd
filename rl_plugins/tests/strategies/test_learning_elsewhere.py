"""Checkpoints hold what engines have become that learn in other processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rl_plugins.callbacks.checkpoint import PolicyCheckpoint
from rl_plugins.data.sampler import StepLoader
from rl_plugins.models.remote import RemoteLearner
from rl_plugins.rollout.engine import SamplingConfig
from rl_plugins.run_folder import RunFolder
from rl_plugins.stages.policy_optimization import PolicyOptimization
from rl_plugins.strategies.fsdp import FSDPStrategy
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.strategies.zero import ZeroStrategy
from rl_plugins.tests.ranks import run_ranks
from rl_plugins.tests.stages import canned

STRATEGIES: dict[str, Any] = {
    "zero": lambda: ZeroStrategy(stage=3, timeout_s=100, rollout=canned.CannedRollout()),
    "fsdp": lambda: FSDPStrategy(timeout_s=100, rollout=canned.CannedRollout()),
    "single": lambda: SingleDeviceRolloutStrategy(rollout=canned.CannedRollout()),
}


class Elsewhere(RemoteLearner):
    """Nobody asks it for numbers."""

    def __init__(self, learnt: str) -> None:
        super().__init__()
        self.learnt = learnt

    def position_scores(self, **_: Any) -> Any:
        raise AssertionError("nobody asks")

    def response_log_probs(self, **_: Any) -> Any:
        raise AssertionError("nobody asks")

    def save(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "learnt").write_text(self.learnt)

    def load(self, folder: Path) -> None:
        self.learnt = (folder / "learnt").read_text()


def train(name: str, ranks: int, run: Path, policy: str, learnt: str, resume: Path | None = None) -> tuple[str, str]:
    """What the engine has learnt after a step, and what the strategy says of it."""
    stage = PolicyOptimization(
        policy,
        tokenizer=canned.tokenizer,
        scorer=canned.CannedScorer(),
        sampling=SamplingConfig(max_tokens=20, num_samples=3),
        max_steps=1 if resume is None else 2,
    )
    # The strategies do not ask which engine it is.
    stage.reward_model = Elsewhere(learnt)
    strategy = STRATEGIES[name]()
    trainer = canned.quiet_trainer(
        strategy,
        accelerator="cpu",
        devices=1,
        num_nodes=ranks,
        callbacks=[PolicyCheckpoint(run, every=1, keep_last=9)],
    )
    loader = StepLoader(
        canned.Prompts(), prompts_per_step=4, seed=3, rank=trainer.global_rank, world_size=trainer.world_size
    )
    trainer.fit(stage, loader, ckpt_path=None if resume is None else resume / "state", weights_only=False)
    return stage.reward_model.learnt, strategy.restored.get("reward_model", "nothing")


def goes_on(rank: int, name: str, ranks: int, run: Path, policy: str) -> list[tuple[str, str]]:
    first = train(name, ranks, run, policy, f"much, says rank {rank}")
    return [first, train(name, ranks, run, policy, "nothing", RunFolder(run).checkpoint(1))]


@pytest.mark.parametrize(("name", "ranks"), [("single", 1), ("zero", 2), ("fsdp", 2)])
def test_checkpoint_restores_a_remote_learner(tmp_path: Path, name: str, ranks: int) -> None:
    results = run_ranks(goes_on, name, ranks, tmp_path, canned.other_model(), world_size=ranks)
    for rank, ((first, again), _) in enumerate(results):
        assert first == (f"much, says rank {rank}", "nothing")
        # The first rank alone asks for it: what others hold is nobody's.
        assert again == ("nothing" if rank else "much, says rank 0", "weights, optimizer, schedule")
