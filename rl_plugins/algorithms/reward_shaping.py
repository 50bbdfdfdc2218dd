"""Reward shaping: changes to the rewards of samples before advantages are computed, each [B]."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from rl_plugins.algorithms.masked import group_numbers
from rl_plugins.config.settings import AT_LEAST_1, NOT_NEGATIVE, Range, Settings, fits, or_null, shown
from rl_plugins.errors import ConfigError

_BOUNDS = Range(
    "must be null, or two finite numbers, the smaller one first",
    lambda value: (
        value is None
        or (
            isinstance(value, list | tuple)
            and len(value) == 2
            and all(fits(bound, float) for bound in value)
            and value[0] <= value[1]
        )
    ),
)


@dataclass(frozen=True)
class OverlongPenalty(Settings):
    """Penalty of responses near the longest allowed length; see `overlong_penalty`.

    Attributes:
        max_tokens: length at which the penalty reaches its maximum, in tokens.
        buffer_tokens: length of the slope before `max_tokens`, in tokens; None for DAPO's share of `max_tokens`, a
            fifth (4096 of 20480).
        factor: largest penalty, 0 or more.
    """

    max_tokens: Annotated[int, AT_LEAST_1]
    buffer_tokens: Annotated[int | None, or_null(AT_LEAST_1)] = None
    factor: Annotated[float, NOT_NEGATIVE] = 1.0

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ConfigError: a number is out of its range, or the slope is longer than the longest response.
        """
        super().__post_init__()
        if self.buffer_tokens is not None and self.buffer_tokens > self.max_tokens:
            raise ConfigError(f"buffer_tokens={self.buffer_tokens}: must be in 1 .. max_tokens={self.max_tokens}")

    @property
    def slope_tokens(self) -> int:
        """Length of the slope, in tokens; at least 1."""
        return math.ceil(self.max_tokens / 5) if self.buffer_tokens is None else self.buffer_tokens


@dataclass(frozen=True)
class RewardShaping(Settings):
    """Changes to the scores before advantages are computed, in this order; none by default.

    Attributes:
        clip: smallest and largest score; None for no bounds.
        length_factor: weight of `length_penalty`.
        correct_above: score above which a response is correct, for `length_penalty`.
        overlong: penalty of long responses; None for no penalty.
    """

    clip: Annotated[Sequence[float] | None, _BOUNDS] = None
    length_factor: Annotated[float, NOT_NEGATIVE] = 0.0
    correct_above: float = 0.5
    overlong: OverlongPenalty | None = None

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ConfigError: a value is out of its range, or `overlong` is no penalty.
        """
        super().__post_init__()
        if not isinstance(self.overlong, OverlongPenalty | None):
            raise ConfigError(f"overlong={shown(self.overlong)}: must be an OverlongPenalty, or null")

    def shaped(self, *, scores_B: Tensor, response_lengths_B: Tensor, groups_B: Tensor, valid_B: Tensor) -> Tensor:
        """Apply all changes to the scores [B]; the batch must hold all samples of each group."""
        is_correct_B = scores_B > self.correct_above
        if self.clip is not None:
            scores_B = clip_rewards(rewards_B=scores_B, low=self.clip[0], high=self.clip[1])
        if self.length_factor:
            scores_B = scores_B + length_penalty(
                response_lengths_B=response_lengths_B,
                is_correct_B=is_correct_B,
                groups_B=groups_B,
                valid_B=valid_B,
                factor=self.length_factor,
            )
        if self.overlong is not None:
            scores_B = scores_B + overlong_penalty(
                response_lengths_B=response_lengths_B,
                max_tokens=self.overlong.max_tokens,
                buffer_tokens=self.overlong.slope_tokens,
                factor=self.overlong.factor,
            )
        return scores_B


def overlong_penalty(*, response_lengths_B: Tensor, max_tokens: int, buffer_tokens: int, factor: float = 1.0) -> Tensor:
    """Compute a penalty of long responses that falls from 0 to `-factor` over the last `buffer_tokens` tokens.

    `clip(-factor (L - (max_tokens - buffer_tokens)) / buffer_tokens, -factor, 0)`; a response longer than
    `max_tokens` gets `-factor`, too.

    Args:
        response_lengths_B: number of tokens in each response, L.
        max_tokens: length at which the penalty reaches its maximum, in tokens.
        buffer_tokens: length of the slope before `max_tokens`, in tokens.
        factor: largest penalty, 0 or more.

    Returns:
        Penalties to add to the rewards, in [-factor, 0], [B].

    Raises:
        ValueError: `buffer_tokens` is outside 1 .. `max_tokens`, or `factor` is negative.

    Source: DAPO, https://arxiv.org/abs/2503.14476, section 3.4, eq. 13.
    """
    if not 0 < buffer_tokens <= max_tokens:
        raise ValueError(f"buffer_tokens={buffer_tokens}: must be in 1 .. max_tokens={max_tokens}")
    if not factor >= 0:
        raise ValueError(f"factor={factor}: must be at least 0, because the penalty is subtracted")
    excess_B = (response_lengths_B - (max_tokens - buffer_tokens)).clamp(0, buffer_tokens)
    return -factor * (excess_B / buffer_tokens)


def clip_rewards(*, rewards_B: Tensor, low: float, high: float) -> Tensor:
    """Bound rewards to [low, high], so that an outlier does not dominate the statistics of its group.

    NaN stays NaN.

    Raises:
        ValueError: `low` is above `high`.
    """
    if not low <= high:
        raise ValueError(f"low={low} and high={high}: low must not be above high")
    return rewards_B.clamp(low, high)


def length_penalty(
    *,
    response_lengths_B: Tensor,
    is_correct_B: Tensor,
    groups_B: Tensor,
    valid_B: Tensor,
    factor: float = 1.0,
) -> Tensor:
    """Compute terms that favour short responses over long responses to the same prompt (Kimi k1.5).

    With the shortest and longest valid response of the group, `l = 1/2 - (L - shortest) / (longest - shortest)`, from
    1/2 to -1/2: `factor l` for a correct response, `factor min(0, l)` for a wrong response, which gets no bonus. 0 in a
    group whose responses are equally long.

    Args:
        response_lengths_B: number of tokens in each response, L.
        is_correct_B: bool, True if the response solves its task.
        groups_B: number of the prompt that each sample answers; the batch must hold all samples of each group.
        valid_B: False for samples to leave out: such a sample counts in no group and gets 0.
        factor: weight of the term. The paper sets it to 0 in the first phase of training.

    Returns:
        Terms to add to the rewards, in [-factor / 2, factor / 2], [B].

    Raises:
        ValueError: `factor` is negative.

    Source: Kimi k1.5, https://arxiv.org/abs/2501.12599, section 2.3.3.
    """
    if not factor >= 0:
        raise ValueError(f"factor={factor}: must be at least 0; a negative factor would reward length")
    dtype = torch.promote_types(response_lengths_B.dtype, torch.get_default_dtype())
    lengths_B = response_lengths_B.to(dtype)
    group_of_B, num_groups = group_numbers(groups_B)

    def extreme_of_group(reduce: str, missing: float) -> Tensor:
        extreme_G = lengths_B.new_full((num_groups,), missing)
        extreme_G.scatter_reduce_(0, group_of_B, lengths_B.masked_fill(~valid_B, missing), reduce)
        return extreme_G[group_of_B]

    shortest_B = extreme_of_group("amin", torch.inf)
    spread_B = extreme_of_group("amax", -torch.inf) - shortest_B
    differs_B = valid_B & (spread_B > 0)
    position_B = torch.where(differs_B, lengths_B - shortest_B, 0) / torch.where(differs_B, spread_B, 1)
    term_B = factor * (0.5 - position_B)
    term_B = torch.where(is_correct_B.bool(), term_B, term_B.clamp(max=0))
    return torch.where(differs_B, term_B, 0)
