"""Equality of nested values with tensors and arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor


def same(a: Any, b: Any) -> bool:
    """Return True if two nested values are equal; compares tensors and arrays too, and NaN equals NaN."""
    if a is b:
        return True
    if isinstance(a, Tensor | np.ndarray | np.generic) or isinstance(b, Tensor | np.ndarray | np.generic):
        if type(a) is not type(b) or a.shape != b.shape or a.dtype != b.dtype:
            return False
        return bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(value, b[key]) for key, value in a.items())
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b) or (a != a and b != b)
