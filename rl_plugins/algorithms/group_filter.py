"""Dynamic sampling: which groups of samples teach something."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_plugins.algorithms.masked import group_numbers, group_statistics
from rl_plugins.errors import ConfigError


@dataclass(frozen=True)
class GroupFilter:
    """Keeps sampling prompts until enough groups are left whose samples do not all score alike.

    Attributes:
        low: smallest mean score of a group that is kept; None for no bound.
        high: largest mean score; None for no bound.
        metric: the number that is looked at: None is the reward before shaping and penalties, another name one of the
            numbers that the reward function returns beside its score.
        drop_truncated: leave out a group if one of its responses was cut off at the length limit.
        max_batches: generation batches of one step; when they do not yield enough groups, the run stops.
        oversampling: prompts of a generation batch, as a multiple of those that a step trains on.

    Source: DAPO, https://arxiv.org/abs/2503.14476, eq. 11; bounds on the mean, and what is said of truncated responses,
    as in PRIME, https://arxiv.org/abs/2502.01456.
    """

    low: float | None = None
    high: float | None = None
    metric: str | None = None
    drop_truncated: bool = False
    max_batches: int = 10
    oversampling: int = 1

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ConfigError: bounds the wrong way round, or a count below 1.
        """
        for name in ("max_batches", "oversampling"):
            if getattr(self, name) < 1:
                raise ConfigError(f"algorithm.group_filter.{name}={getattr(self, name)}: must be at least 1")
        if self.low is not None and self.high is not None and not self.low <= self.high:
            raise ConfigError(f"algorithm.group_filter.low={self.low} is above high={self.high}")

    def informative(self, *, scores_B: Tensor, groups_B: Tensor, valid_B: Tensor, truncated_B: Tensor) -> Tensor:
        """Which samples belong to a group to train on, bool [B].

        Args:
            scores_B: of each sample.
            groups_B: the prompt that each sample answers; all samples of a group are here.
            valid_B: False for samples to leave out. A group of one valid sample is kept, of none is not.
            truncated_B: whose response was cut off.
        """
        scores_B = torch.where(valid_B, scores_B.double(), 0)
        groups = group_statistics(scores_B, groups_B, valid_B)
        group_of_B, num_groups = group_numbers(groups_B)
        # Not the mean of `group_statistics`, which is 0 for a lone sample.
        total_G = scores_B.new_zeros(num_groups).index_add_(0, group_of_B, scores_B)
        mean_B = total_G[group_of_B] / groups.count_B
        kept_B = (groups.count_B >= 1) & (groups.std_B > 0)
        if self.low is not None:
            kept_B = kept_B & (mean_B >= self.low)
        if self.high is not None:
            kept_B = kept_B & (mean_B <= self.high)
        if self.drop_truncated:
            cut_off_G = scores_B.new_zeros(num_groups).index_add_(0, group_of_B, truncated_B.to(scores_B))
            kept_B = kept_B & (cut_off_G[group_of_B] == 0)
        return kept_B
