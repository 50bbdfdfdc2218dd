"""Random batches with every special case."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass
class Batch:
    """Float64 [B, T] unless said otherwise; `mask` is 0 on padding, observations and invalid samples."""

    scores: Tensor  # [B]
    mask: Tensor
    lengths: Tensor  # int64 [B]
    groups: Tensor  # int64 [B]
    valid: Tensor  # bool [B]
    log_probs: Tensor
    old: Tensor
    ref: Tensor
    advantages: Tensor

    def rewards(self) -> Tensor:
        """The score on the last sampled token; without one, on the first position."""
        rewards = torch.zeros_like(self.mask)
        for sample, mask in enumerate(self.mask.tolist()):
            rewards[sample, max((t for t, sampled in enumerate(mask) if sampled), default=0)] = self.scores[sample]
        return rewards

    def ppo_arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Log-probs, old log-probs, advantages and mask."""
        return self.log_probs.numpy(), self.old.numpy(), self.advantages.numpy(), self.mask.numpy()

    def with_garbage(self, garbage: float = torch.nan) -> Batch:
        """The same batch with `garbage` in every masked entry and in the scores of invalid samples."""
        masked = self.mask == 0
        fields = ("log_probs", "old", "ref", "advantages")
        dirty = {name: getattr(self, name).masked_fill(masked, garbage) for name in fields}
        scores = self.scores.masked_fill(~self.valid, garbage)
        return Batch(**{**vars(self), **dirty, "scores": scores})


def make_batch(seed: int, width: int = 12) -> Batch:
    """Groups: two of four, one alone, one all-equal, one with a single valid sample, one with none."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    groups = torch.tensor([5, 5, 5, 5, 2, 2, 2, 2, 90, 7, 7, 7, 1, 1, 3, 3])
    valid = torch.tensor([True] * 4 + [True, True, False, True] + [True] * 5 + [False] + [False] * 2)
    count = len(groups)
    order = torch.randperm(count, generator=generator)
    groups, valid = groups[order], valid[order]
    scores = normal(count)
    scores[groups == 7] = 0.1
    lengths = torch.randint(1, width + 1, (count,), generator=generator)
    samples = valid.nonzero().flatten().tolist()
    lengths[samples[0]] = 0
    lengths[samples[1:4]] = torch.tensor([width, width, 6])
    mask = (torch.arange(width) < lengths[:, None]).double()
    mask[samples[1], 3:6] = 0  # An observation in the middle ...
    mask[samples[2], 8:] = 0  # ... and at the end, at the position of the score.
    mask = mask * valid[:, None]
    log_probs, advantages = -normal(count, width).abs(), normal(count, width)
    # Ratios on both sides of every clip range, and log-ratios beyond +-20.
    old = log_probs - 0.5 * normal(count, width)
    old[samples[3], :4] = log_probs[samples[3], :4] + torch.tensor([25.0, -25.0, 3.0, -3.0])
    advantages[samples[3], :6] = torch.tensor([-1.0, 1.0, 1.0, -1.0, 0.0, -2.0])
    ref = log_probs + 1.5 * normal(count, width)
    ref[samples[3], :3] = log_probs[samples[3], :3] + torch.tensor([25.0, -25.0, 4.0])
    return Batch(scores, mask, lengths, groups, valid, log_probs, old, ref, advantages)
