"""Whether an engine really has the policy's weights: a checksum of every tensor, and the log-probs of a short prompt.

Checksums are of the bytes in the engine's dtype, so a single wrong bit is found and named. The prompt finds what they
cannot see: an output head that is no longer tied, a weight that arrived and is not used.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from statistics import fmean

import torch
from torch import Tensor

PROBE = [1, 2, 3, 4, 5, 6]
"""The prompt; every vocabulary has these tokens."""
_TOLERANCES = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.5}


class WeightsDiffer(RuntimeError):
    """The engine does not sample from the policy's weights."""


def checksum(parts: Iterable[Tensor]) -> int:
    """CRC-32 of the bytes of flat CPU tensors, one after the other."""
    value = 0
    for part in parts:
        value = zlib.crc32(part.contiguous().view(torch.uint8).numpy().data, value)
    return value


def tolerance_of(dtype: torch.dtype) -> float:
    """How far the mean log-prob of the probe may be off in a dtype; other weights are off by several nats."""
    return _TOLERANCES[dtype]


def check_log_probs(policy: Sequence[float], engine: Sequence[float], tolerance: float) -> None:
    """Compare the log-probs of the probe's tokens, on average.

    Raises:
        WeightsDiffer: they are further apart than the tolerance, or not numbers.
    """
    gap = fmean(abs(mine - theirs) for mine, theirs in zip(policy, engine, strict=True))
    if not gap <= tolerance:
        raise WeightsDiffer(
            f"after a weight update the log-probs of policy and rollout engine differ by {gap:.3g} on average "
            f"(allowed: {tolerance:g}) on the prompt {PROBE}: policy {_rounded(policy)}, engine {_rounded(engine)}"
        )


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 4) for value in values]
