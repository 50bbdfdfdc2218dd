"""PPO under ZeRO by one worker and by two, which go on from each other's checkpoints.

What each run has measured is written to `FOLDER/<name>.pt`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from rl_plugins.algorithms.algorithm import Algorithm, KLConfig
from rl_plugins.callbacks.checkpoint import PolicyCheckpoint
from rl_plugins.data.sampler import StepLoader
from rl_plugins.models.tiny import save_tiny_policy
from rl_plugins.rollout.engine import SamplingConfig
from rl_plugins.run_folder import RunFolder
from rl_plugins.stages.critic import CriticConfig
from rl_plugins.stages.optimizer import OptimizerConfig
from rl_plugins.stages.policy_optimization import PolicyOptimization
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.strategies.zero import ZeroStrategy
from rl_plugins.tests.stages import canned
from rl_plugins.tests.strategies.moving import WatchingRollout, moving

STEPS, SAVED = 4, 2
STAGES = (1, 2, 3)
METRICS = ("loss", "gradient_norm", "critic/loss", "critic/gradient_norm", "kl", "reward", "lr")


class Record(Callback):
    """Metrics after each step, and at the end the weights of all engines, whole."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, float]] = {}
        self.weights: dict[str, dict[str, Tensor]] = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *arguments: Any) -> None:
        self.steps[pl_module.step] = {name: float(trainer.callback_metrics[f"train/{name}"]) for name in METRICS}

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        source: Any = trainer.strategy
        for engine in pl_module.engine_modules():
            self.weights[engine] = {name: tensor.clone() for name, tensor in source.weight_source(engine)}


def train(
    folder: Path, name: str, strategy: Any, *, steps: int, lr: float = 0.01, resume: Path | None = None,
    policy: str = "policy", **options: Any,
) -> None:  # fmt: skip
    """Train in `folder/name`, from a checkpoint if one is given, and write what was measured to `folder/name.pt`."""
    record, run = Record(), folder / name
    run.mkdir(exist_ok=True)
    stage = PolicyOptimization(
        str(folder / policy),
        tokenizer=canned.tokenizer,
        scorer=canned.CannedScorer(),
        sampling=SamplingConfig(max_tokens=20, num_samples=3, temperature=canned.TEMPERATURE),
        algorithm=Algorithm(advantage="gae", kl=KLConfig(0.1)),
        critic=CriticConfig(str(folder / policy), OptimizerConfig(lr=2 * lr, gradient_clip=0.3)),
        optimizer=OptimizerConfig(lr=lr, gradient_clip=0.5, warmup_steps=3),
        tokens_per_micro_batch=50,
        updates_per_step=2,
        max_steps=steps,
    )
    trainer = Trainer(
        strategy=strategy,
        max_epochs=-1,
        accelerator="cpu",
        devices=1,
        callbacks=[record, PolicyCheckpoint(run, every=SAVED, keep_last=9)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **({"precision": "32-true"} | options),
    )
    loader = StepLoader(
        canned.Prompts(), prompts_per_step=4, seed=3, rank=trainer.global_rank, world_size=trainer.world_size
    )
    trainer.fit(stage, loader, ckpt_path=None if resume is None else resume / "state", weights_only=False)
    if trainer.is_global_zero:
        torch.save({"steps": record.steps, "weights": record.weights}, folder / f"{name}.pt")


def zero(stage: int, **options: Any) -> ZeroStrategy:
    return ZeroStrategy(stage=stage, timeout_s=100, **{"rollout": canned.CannedRollout(), **options})


def saved_by(folder: Path, name: str) -> Path:
    """The checkpoint in the middle of a run."""
    return RunFolder(folder / name).checkpoint(SAVED)


def alone(_: int, folder: Path) -> None:
    for stage in STAGES:
        train(folder, f"one-{stage}", zero(stage), steps=SAVED)
    train(folder, "single", SingleDeviceRolloutStrategy(rollout=canned.CannedRollout()), steps=STEPS)
    for stage in STAGES:
        places = {"policy": "cpu", "critic": "stay"} | ({"reference": "cpu"} if stage == 3 else {})
        train(folder, f"host-{stage}", zero(stage, offload=places), steps=STEPS)
        train(folder, f"moved-{stage}", moving(zero(stage, rollout=WatchingRollout())), steps=STEPS)


def files(_: int, folder: Path) -> None:
    places = {"policy": "nvme", "critic": "nvme", "reference": "nvme"}
    train(folder, "files-3", zero(3, offload=places, offload_folder=folder / "files"), steps=STEPS)
    # DeepSpeed leaves weights of less than 1 MB where they are.
    save_tiny_policy(folder / "wide", hidden_size=256, intermediate_size=1100)
    wide: dict[str, Any] = {"steps": 1, "policy": "wide"}
    train(folder, "wide-single", SingleDeviceRolloutStrategy(rollout=canned.CannedRollout()), **wide)
    train(folder, "wide-3", zero(3, offload=places, offload_folder=folder / "wide_files"), **wide)


def pair(_: int, folder: Path) -> None:
    for stage in STAGES:
        train(folder, f"two-{stage}", zero(stage), steps=STEPS, num_nodes=2)
        train(folder, f"sequence-{stage}", zero(stage, sequence_parallel=2), steps=STEPS, num_nodes=2)
        checkpoint = saved_by(folder, f"one-{stage}")
        train(folder, f"one-{stage}-two-{stage}", zero(stage), steps=STEPS, resume=checkpoint, num_nodes=2)
    # Steps that are too small for bfloat16 weights.
    bfloat16: dict[str, Any] = {"steps": STEPS, "num_nodes": 2, "lr": 1e-5, "precision": "bf16-true"}
    train(folder, "bf16-2", zero(2), **bfloat16)
    train(folder, "bf16-2-3", zero(3), resume=saved_by(folder, "bf16-2"), **bfloat16)


def alone_again(_: int, folder: Path) -> None:
    for stage in STAGES:
        # Another number of workers and another stage at once.
        other = stage % 3 + 1
        checkpoint = saved_by(folder, f"two-{stage}")
        train(folder, f"two-{stage}-one-{other}", zero(other), steps=STEPS, resume=checkpoint)
