"""Steps of GRPO with a tiny model of a family, on one device or by two ranks, for `test_families.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.config.models import OptimizerConfig
from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.rollout.transformers_engine import TransformersRollout
from rl_plugins.strategies.fsdp import FSDPStrategy
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.strategies.zero import ZeroStrategy
from rl_plugins.tests.stages import canned


def train(rank: int, strategy: str, folder: Path, options: dict[str, Any]) -> list[dict[str, float]]:
    """Take two steps with samples of the model in `base`, and export the policy; return the metrics of each step.

    Args:
        rank: rank of this process.
        strategy: `single`, or `zero` or `fsdp` for two ranks.
        folder: folder of `base`, and of the export, which has the name of the strategy.
        options: options of the stage.
    """
    rollout = TransformersRollout(str(folder / "base"), check_updates=1)
    stage = canned.Keeping(
        str(folder / "base"),
        tokenizer=canned.tokenizer,
        scorer=canned.CannedScorer(),
        # Longer than the windows of attention.
        sampling=SamplingConfig(max_tokens=20, num_samples=3),
        algorithm=Algorithm(),
        optimizer=OptimizerConfig(lr=1e-3),
        **options,
    )
    ranks = 1 if strategy == "single" else 2
    strategies: dict[str, Any] = {
        "single": lambda: SingleDeviceRolloutStrategy(rollout=rollout),
        "zero": lambda: ZeroStrategy(stage=3, rollout=rollout, timeout_s=100),
        "fsdp": lambda: FSDPStrategy(rollout=rollout, timeout_s=100),
    }
    trainer = canned.quiet_trainer(strategies[strategy](), accelerator="cpu", num_nodes=ranks, devices=1)
    trainer.fit(stage, canned.loader([canned.prompt_batch(canned.PROMPTS[rank::ranks])] * 2))
    stage.export(folder / strategy)
    return stage.metrics
