"""8-bit products without their kernels, which need a GPU: the same rounding of the factors, and products in float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

from rl_plugins.models import float8


@contextmanager
def emulated_float8() -> Iterator[None]:
    """Let the layers with 8-bit products of models loaded in this context emulate the kernels."""
    real = float8.float8_config
    with mock.patch.object(float8, "float8_config", lambda scales: replace(real(scales), emulate=True)):
        yield
