"""The critic's settings, and how well it predicts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rl_plugins.models.lora import LoraConfig
from rl_plugins.stages.optimizer import OptimizerConfig


@dataclass(frozen=True)
class CriticConfig:
    """A critic of its own, trained beside the policy.

    Attributes:
        path: what it starts from: a policy (the head that makes values starts at 0) or a reward model; None is the
            policy's own path.
        optimizer: its own.
        warmup_steps: steps in which it is trained alone, before the policy learns from it.
        lora: train an adapter and the head in place of the whole critic.
    """

    path: str | None = None
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    warmup_steps: int = 0
    lora: LoraConfig | None = None


def explained_variance(
    values_BT: Tensor, returns_BT: Tensor, mask_BT: Tensor, sum_over_ranks: Callable[[Tensor], Tensor]
) -> float:
    """`1 - Var(returns - values) / Var(returns)` over the valid tokens of all ranks; NaN if returns are all equal.

    1 is a perfect critic; 0 one that is no better than a constant. Collective.
    """
    valid_BT = mask_BT.bool()
    returns_N, errors_N = returns_BT[valid_BT].double(), (returns_BT - values_BT)[valid_BT].double()
    sums = [returns_N.new_tensor(len(returns_N))]
    for column_N in (returns_N, errors_N):
        sums += [column_N.sum(), column_N.square().sum()]
    count, total, squares, error, squared_errors = sum_over_ranks(torch.stack(sums)).tolist()
    variance = squares - total * total / max(count, 1)
    if variance <= 1e-12 * squares:
        return float("nan")
    return 1 - (squared_errors - error * error / max(count, 1)) / variance
