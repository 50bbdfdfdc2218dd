"""Short runs of canned steps with callbacks around them, on one device or on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from typing_extensions import override

from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.config.models import OptimizerConfig
from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.data.loaders import StepLoader
from rl_plugins.models.tiny import build_model
from rl_plugins.stages.policy_optimization import PolicyOptimization
from rl_plugins.strategies.fsdp import FSDPStrategy
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.strategies.zero import ZeroStrategy
from rl_plugins.tests.patience import patient
from rl_plugins.tests.stages import canned
from rl_plugins.tests.stages.test_stage import Log


class AfterStep(Callback):
    """Callback with a call of `act(trainer, stage)` after certain steps."""

    def __init__(self, steps: Sequence[int], act: Callable[[Trainer, Any], object]) -> None:
        self.steps, self.act = steps, act

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *arguments: Any) -> None:
        if pl_module.step in self.steps:
            self.act(trainer, pl_module)


def alter(stage: Any, values: Mapping[int, Mapping[str, float]]) -> None:
    """Replace metrics of a stage at the first end of each step."""
    left = dict(values)
    stage.further_metrics.append(lambda metrics: left.pop(stage.step, {}))


def build_policy(seed: int = 5) -> nn.Module:
    return build_model(hidden_size=32, intermediate_size=48, initializer_range=0.2, seed=seed)


def build_stage(steps: int, seed: int = 5, policy: Any = None, **options: Any) -> PolicyOptimization:
    arguments: dict[str, Any] = {
        "tokenizer": canned.tokenizer,
        "scorer": canned.CannedScorer(),
        "sampling": SamplingConfig(max_tokens=20, num_samples=3),
        "optimizer": OptimizerConfig(lr=0.01, warmup_steps=3),
        "max_steps": steps,
    }
    return PolicyOptimization(policy or build_policy(seed), **{"algorithm": Algorithm(), **arguments, **options})


def train(
    stage: PolicyOptimization,
    callbacks: list[Callback],
    *,
    strategy: Any = None,
    resume: Path | None = None,
    loggers: Sequence[Any] = (),
    **flags: Any,
) -> tuple[Trainer, Log]:
    """Train; return the trainer and the log."""
    log = Log()
    trainer = canned.quiet_trainer(
        strategy or SingleDeviceRolloutStrategy(rollout=canned.CannedRollout()),
        callbacks=callbacks,
        logger=[log, *loggers],
        log_every_n_steps=1,
        **({"max_epochs": -1} | flags),
    )
    loader = StepLoader(
        canned.Prompts(), prompts_per_step=2, seed=3, rank=trainer.global_rank, world_size=trainer.world_size
    )
    trainer.fit(stage, loader, ckpt_path=None if resume is None else resume / "state", weights_only=True)
    return trainer, log


def sharded(name: str) -> Any:
    """The strategy `zero-2`, `zero-3` or `fsdp`."""
    options: dict[str, Any] = {"timeout_s": patient(100), "rollout": canned.CannedRollout()}
    return FSDPStrategy(**options) if name == "fsdp" else ZeroStrategy(stage=int(name[-1]), **options)


def weights(stage: PolicyOptimization) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in stage.policy.parameters()]
