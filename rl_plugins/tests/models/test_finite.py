from __future__ import annotations

import pytest
import torch

from rl_plugins.models.finite import not_finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_not_finite_names_each_weight_with_a_bad_number(dtype: torch.dtype, bad: float) -> None:
    weights = {name: torch.ones(3, 4, dtype=dtype) for name in ("good", "first", "second")}
    weights["first"][2, 1] = bad
    weights["second"][0, 0] = bad
    assert not_finite(weights.items()) == ["first", "second"]


def test_not_finite_leaves_out_weights_without_numbers_or_values() -> None:
    left_out = [
        ("empty", torch.zeros(0)),
        ("integers", torch.ones(3, dtype=torch.long)),
        ("8 bits", torch.full((3,), float("nan")).to(torch.float8_e4m3fn)),
        ("meta", torch.ones(3, device="meta")),
    ]
    assert not_finite(left_out) == [] == not_finite([])
