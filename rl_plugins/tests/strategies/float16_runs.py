"""Runs of PPO in float16 on CPU, by one process or by the ranks of FSDP2, for `test_float16.py`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rl_plugins.callbacks.divergence_guard import DivergenceGuard
from rl_plugins.config.run import Bounds
from rl_plugins.stages.optimizer import MicroBatchLoss
from rl_plugins.strategies.contract import CRITIC, POLICY
from rl_plugins.strategies.loss_scale import LossScale
from rl_plugins.tests.strategies.fsdp_runs import Course, Layout, Recorded, trained

# Small enough for the gradients of these runs.
SCALE = 2.0**8


@dataclass(frozen=True)
class Result:
    """The course of a run, the scales of policy and critic after each step, and the metrics of the last step."""

    course: Course
    scales: list[tuple[LossScale, LossScale]]
    metrics: dict[str, float]


class InFloat16(Recorded):
    """A stage that records its scales.

    Attributes:
        first_scale: scale of the loss at the start.
        overflows_on: rank whose gradients of the policy overflow in the first update; None for no rank.
    """

    first_scale = SCALE
    overflows_on: int | None = None

    def on_train_start(self) -> None:
        strategy: Any = self.trainer.strategy
        strategy._loss_scales = {name: LossScale(self.first_scale) for name in (POLICY, CRITIC)}
        super().on_train_start()
        self.scales: list[tuple[LossScale, LossScale]] = []
        self.starts_at = self.step

    def optimize(self, losses: Iterable[MicroBatchLoss], name: str | None = None) -> None:
        is_first = name == POLICY and self.step == 0 and not self.policy_updates
        self.policy_updates += name == POLICY
        if is_first and self.overflows_on == self.trainer.global_rank:
            losses = _enlarged(losses)
        super().optimize(losses, name)

    policy_updates = 0

    def end_step(self, metrics: Any) -> None:
        strategy: Any = self.trainer.strategy
        # Before a checkpoint of this step.
        policy, critic = (replace(strategy.scale_of_loss(name)) for name in (POLICY, CRITIC))
        self.scales.append((policy, critic))
        super().end_step(metrics)


def _enlarged(losses: Iterable[MicroBatchLoss]) -> Iterator[MicroBatchLoss]:
    for loss, last in losses:
        yield loss * 1e30, last


def run(rank: int, layout: Layout, folder: Path, stage_values: dict[str, Any], options: dict[str, Any]) -> Result:
    """Train in float16 with the default bounds of the divergence guard."""
    stage = type("Stage", (InFloat16,), stage_values)
    callbacks = [DivergenceGuard(Bounds())]
    module: Any = trained(layout, rank, folder, stage=stage, precision="16-mixed", callbacks=callbacks, **options)
    assert {p.dtype for p in module.policy.parameters() if p.requires_grad} == {torch.float32}
    if layout.strategy is not None:
        assert {meta.dtype for meta in module.strategy.weight_source().metadata()} == {torch.float16}
    metrics = {name: float(value) for name, value in module.trainer.callback_metrics.items()}
    return Result(module.course, module.scales, metrics)
