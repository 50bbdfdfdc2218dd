"""Precision of training: Lightning's flags, the dtype of forward and backward passes, and 8-bit products."""

from __future__ import annotations

_DTYPES = {"32-true": "float32", "bf16-true": "bfloat16", "bf16-mixed": "bfloat16", "16-mixed": "float16"}
PRECISIONS = tuple(_DTYPES)
"""Values of the option `model.precision`."""
MIXED = ("bf16-mixed", "16-mixed")
"""Precisions with passes in 16 bits and float32 weights of the trained models."""
FLOAT16 = "16-mixed"
"""Precision whose small range of numbers needs a scaled loss."""
FLOAT8_SCALES = ("tensorwise", "rowwise")
"""Values of the option `model.float8`."""
_ONLY_LIGHTNING = {"64-true": "float64", "16-true": "float16"}


def dtype_of_passes(precision: str) -> str:
    """Return the name of the dtype of forward and backward passes, also for precisions that recipes do not have."""
    return {**_DTYPES, **_ONLY_LIGHTNING}.get(precision, "bfloat16")
