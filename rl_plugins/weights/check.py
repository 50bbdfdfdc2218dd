"""Check an engine's weights: compare checksums of all tensors, and the log-probs of a short prompt.

Checksums cover the bytes in the engine's dtype, so a check finds a single wrong bit and names the tensor. The prompt
finds faults without a wrong bit: an output head that is no longer tied, or a weight without use in the engine.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from statistics import fmean

import torch
from torch import Tensor

PROBE = [1, 2, 3, 4, 5, 6]
"""Token ids of the prompt; every vocabulary has these tokens."""
# Float16 has three more bits in the mantissa than bfloat16, so its rounding is an eighth.
_TOLERANCES = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.5 / 8, torch.bfloat16: 0.5}


class WeightsDiffer(RuntimeError):
    """The weights of a rollout engine and of the policy differ."""


def checksum(parts: Iterable[Tensor]) -> int:
    """Return the CRC-32 of the concatenated bytes of flat CPU tensors."""
    value = 0
    for part in parts:
        value = zlib.crc32(part.contiguous().view(torch.uint8).numpy().data, value)
    return value


def tolerance_of(dtype: torch.dtype, device_type: str = "cpu") -> float:
    """Return the allowed mean error of the log-probs of `PROBE` in nats; wrong weights differ by several nats.

    Args:
        dtype: dtype of the weights.
        device_type: `cpu` or `cuda`. On CUDA, products of float32 numbers may be in TF32, which has float16's mantissa.
    """
    in_tf32 = device_type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return _TOLERANCES[torch.float16 if in_tf32 and dtype == torch.float32 else dtype]


def check_log_probs(policy: Sequence[float], engine: Sequence[float], tolerance: float) -> None:
    """Compare the log-probs of the tokens of `PROBE`.

    Args:
        policy: log-probs computed by the trainer.
        engine: log-probs computed by the rollout engine.
        tolerance: largest allowed mean absolute difference, in nats.

    Raises:
        WeightsDiffer: the mean difference exceeds `tolerance`, or is not a number.
    """
    gap = fmean(abs(expected - found) for expected, found in zip(policy, engine, strict=True))
    if not gap <= tolerance:
        raise WeightsDiffer(
            f"after a weight update the log-probs of policy and rollout engine differ by {gap:.3g} on average "
            f"(allowed: {tolerance:g}) on the prompt {PROBE}: policy {_rounded(policy)}, engine {_rounded(engine)}"
        )


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 4) for value in values]
