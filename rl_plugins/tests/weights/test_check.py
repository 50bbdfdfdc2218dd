"""tolerance_of and check_log_probs: wrong log-probs are refused, rounding is not."""

from __future__ import annotations

import pytest
import torch

from rl_plugins.weights.check import WeightsDiffer, check_log_probs, tolerance_of


def test_tolerance_of_float32_on_gpus_allows_the_rounding_of_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert tolerance_of(torch.float32, "cuda") == tolerance_of(torch.float16)
    assert tolerance_of(torch.float32) < tolerance_of(torch.float16)
    assert tolerance_of(torch.bfloat16, "cuda") == tolerance_of(torch.bfloat16)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "highest")
    assert tolerance_of(torch.float32, "cuda") == tolerance_of(torch.float32)


def test_tolerances_of_float16_and_bfloat16_are_in_proportion_to_the_rounding() -> None:
    roundings = torch.finfo(torch.float16).eps / torch.finfo(torch.bfloat16).eps
    assert tolerance_of(torch.float16) / tolerance_of(torch.bfloat16) == roundings


@pytest.mark.parametrize("engine", [[-1.0, -2.1], [-1.0, float("nan")]])
def test_check_log_probs_refuses_a_gap_above_the_tolerance(engine: list[float]) -> None:
    check_log_probs([-1.0, -2.0], [-1.0, -2.01], 0.01)
    with pytest.raises(WeightsDiffer, match="after a weight update"):
        check_log_probs([-1.0, -2.0], engine, 0.01)
