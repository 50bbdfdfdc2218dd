"""Checkpoints contain the state of models with training in other processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rl_plugins.callbacks.checkpoint import PolicyCheckpoint
from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.data.loaders import StepLoader
from rl_plugins.models.remote import RemoteLearner
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


class Learner(torch.nn.Module, RemoteLearner):
    """A learner with a text as its state; the learner never runs."""

    def __init__(self, learnt: str, *, is_finite: bool = True) -> None:
        super().__init__()
        self.learnt, self.is_finite = learnt, is_finite

    def position_scores(self, **_: Any) -> Any:
        raise AssertionError("the learner is not run")

    def response_log_probs(self, **_: Any) -> Any:
        raise AssertionError("the learner is not run")

    def has_finite_weights(self) -> bool:
        return self.is_finite

    def save(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "learnt").write_text(self.learnt)

    def load(self, folder: Path) -> None:
        self.learnt = (folder / "learnt").read_text()


def train(name: str, ranks: int, run: Path, policy: str, learnt: str, resume: Path | None = None) -> tuple[str, str]:
    """Return the learner's state after a step, and the entry of the strategy about the restored state."""
    stage = PolicyOptimization(
        policy,
        tokenizer=canned.tokenizer,
        scorer=canned.CannedScorer(),
        sampling=SamplingConfig(max_tokens=20, num_samples=3),
        max_steps=1 if resume is None else 2,
    )
    # For a strategy one engine is like another.
    stage.reward_model = Learner(learnt)
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
    trainer.fit(stage, loader, ckpt_path=None if resume is None else resume / "state", weights_only=True)
    return stage.reward_model.learnt, strategy.restored.get("reward_model", "nothing")


def train_and_resume(rank: int, name: str, ranks: int, run: Path, policy: str) -> list[tuple[str, str]]:
    first = train(name, ranks, run, policy, f"state of rank {rank}")
    return [first, train(name, ranks, run, policy, "new", RunFolder(run).checkpoint(1))]


@pytest.mark.parametrize(("name", "ranks"), [("single", 1), ("zero", 2), ("fsdp", 2)])
def test_checkpoint_restores_a_remote_learner(tmp_path: Path, name: str, ranks: int) -> None:
    results = run_ranks(train_and_resume, name, ranks, tmp_path, canned.other_model(), world_size=ranks)
    for rank, ((first, again), _) in enumerate(results):
        assert first == (f"state of rank {rank}", "nothing")
        # Only rank 0 saves and loads the learner.
        assert again == ("new" if rank else "state of rank 0", "weights, optimizer, schedule")
