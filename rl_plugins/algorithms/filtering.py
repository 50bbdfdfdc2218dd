"""Filtering: which samples of a step to train on, by their rewards.

`GroupFilter` (dynamic sampling) keeps the groups whose samples differ in score. `Resampling` (policy filtration) draws
samples with a probability that depends on their reward. Drawing is over the whole batch: pass the rewards of all ranks
(gathered); with generators of the same seed, every rank draws the same samples and takes its share of them. A sample
drawn twice is trained on twice, so groups do not stay whole: `Algorithm` refuses advantages that compare groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from rl_plugins.algorithms.masked import group_numbers, group_statistics
from rl_plugins.config.settings import AT_LEAST_1, NOT_NEGATIVE, Settings, one_of
from rl_plugins.errors import ConfigError

_NEVER_ZERO = 1e-8
_WEIGHT_OF_BEST, _WEIGHT_OF_REST = 0.4, 0.1


@dataclass(frozen=True)
class GroupFilter(Settings):
    """Dynamic sampling: more prompts are sampled until enough groups have samples with different scores.

    Attributes:
        low: smallest mean score of a kept group; None for no bound.
        high: largest mean score of a kept group; None for no bound.
        metric: number that must differ within a group: None for the reward before shaping and penalties, or the name of
            a number that the reward function returns beside its score.
        drop_truncated: drop a group if one of its responses was cut off at the length limit.
        max_batches: largest number of generation batches in a step; the run stops if these do not give enough groups.
        oversampling: number of prompts in a generation batch, as a multiple of the prompts that a step trains on.

    Source: DAPO, https://arxiv.org/abs/2503.14476, eq. 11; the bounds on the mean and `drop_truncated` as in PRIME,
    https://arxiv.org/abs/2502.01456.
    """

    low: float | None = None
    high: float | None = None
    metric: str | None = None
    drop_truncated: bool = False
    max_batches: Annotated[int, AT_LEAST_1] = 10
    oversampling: Annotated[int, AT_LEAST_1] = 1

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ConfigError: `low` is above `high`, or a number is out of its range.
        """
        super().__post_init__()
        if self.low is not None and self.high is not None and not self.low <= self.high:
            raise ConfigError(f"low={self.low} is above high={self.high}")

    def informative(self, *, scores_B: Tensor, groups_B: Tensor, valid_B: Tensor, truncated_B: Tensor) -> Tensor:
        """Return True for the samples of groups to train on, bool [B].

        Args:
            scores_B: score, or other number (`metric`), of each sample.
            groups_B: number of the prompt that each sample answers; the batch must hold all samples of each group.
            valid_B: False for samples to leave out. A group with one valid sample is kept, without one it is dropped.
            truncated_B: True for responses cut off at the length limit.
        """
        scores_B = torch.where(valid_B, scores_B.double(), 0)
        groups = group_statistics(scores_B, groups_B, valid_B)
        group_of_B, num_groups = group_numbers(groups_B)
        # The mean of `group_statistics` is 0 for a group with a single valid sample.
        total_G = scores_B.new_zeros(num_groups).index_add_(0, group_of_B, scores_B)
        mean_B = total_G[group_of_B] / groups.count_B
        kept_B = (groups.count_B >= 1) & (groups.std_B > 0)
        if self.low is not None:
            kept_B = kept_B & (mean_B >= self.low)
        if self.high is not None:
            kept_B = kept_B & (mean_B <= self.high)
        if self.drop_truncated:
            truncated_G = scores_B.new_zeros(num_groups).index_add_(0, group_of_B, truncated_B.to(scores_B))
            kept_B = kept_B & (truncated_G[group_of_B] == 0)
        return kept_B


@dataclass(frozen=True)
class Resampling(Settings):
    """Policy filtration: draw the samples to train on by their rewards; see `resampling_weights`.

    Attributes:
        kind: kind of the weights: `power`, `extremes` or `best`.
        power: exponent of the kind `power`, 0 or more.

    Source: PF-PPO, https://arxiv.org/abs/2409.06957.
    """

    kind: Annotated[Literal["power", "extremes", "best"], one_of("power", "extremes", "best")] = "power"
    power: Annotated[float, NOT_NEGATIVE] = 2.0


def resampling_weights(
    *,
    rewards_B: Tensor,
    valid_B: Tensor | None = None,
    kind: Literal["power", "extremes", "best"] = "power",
    power: float = 2.0,
) -> Tensor:
    """Compute the probability of each sample to be drawn, up to a common factor.

    | kind | weight |
    |---|---|
    | power | abs(R)^power |
    | extremes | 1 for the largest and the smallest reward of the batch, else 0 |
    | best | 0.4 for the largest reward of the batch, else 0.1 |

    1e-8 is added to each weight, so that all samples are equally likely in a batch of zeros.

    Args:
        rewards_B: reward of each sample of all ranks.
        valid_B: False for samples that must not be drawn; the reward of such a sample may hold anything.
        kind: kind of the weights.
        power: exponent of the kind `power`, 0 or more.

    Returns:
        Weights [B], at least 0; exactly 0 for invalid samples.

    Raises:
        ValueError: `kind` is unknown, or `power` is negative.

    Source: PF-PPO, https://arxiv.org/abs/2409.06957.
    """
    if kind not in ("power", "extremes", "best"):
        raise ValueError(f"kind={kind!r}: use 'power', 'extremes' or 'best'")
    if power < 0:
        raise ValueError(f"power={power}: use 0 or more")
    valid_B = torch.ones_like(rewards_B, dtype=torch.bool) if valid_B is None else valid_B
    rewards_B = torch.where(valid_B, rewards_B, 0)
    if not valid_B.any():
        return torch.zeros_like(rewards_B)
    is_largest_B = rewards_B == rewards_B[valid_B].max()
    if kind == "power":
        weights_B = rewards_B.abs() ** power
    elif kind == "extremes":
        weights_B = (is_largest_B | (rewards_B == rewards_B[valid_B].min())).to(rewards_B.dtype)
    else:
        weights_B = torch.full_like(rewards_B, _WEIGHT_OF_REST).masked_fill(is_largest_B, _WEIGHT_OF_BEST)
    return torch.where(valid_B, weights_B + _NEVER_ZERO, 0)


def resample(*, weights_B: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draw as many samples as the batch has, with replacement, with probability proportional to their weight.

    Args:
        weights_B: weights from `resampling_weights`.
        generator: random generator on the device of the weights; None for the global generator.

    Returns:
        Indices of the drawn samples, int64 [B].

    Raises:
        ValueError: every weight is 0, because no sample is valid.
    """
    if not len(weights_B):
        return torch.empty(0, dtype=torch.long, device=weights_B.device)
    if not (weights_B > 0).any():
        raise ValueError("no sample can be drawn: every weight is 0, so no sample is valid; skip this batch")
    return torch.multinomial(weights_B.double(), len(weights_B), replacement=True, generator=generator)
