"""What this machine computes much slower than it might is said before a run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rl_plugins.launch.command_line import compose_config
from rl_plugins.launch.config import parse_config
from rl_plugins.launch.resources import slow_here


@pytest.fixture(autouse=True)
def _processor_without_bfloat16(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    yield


def said(*overrides: str) -> str | None:
    """Of the GRPO recipe."""
    return slow_here(parse_config(compose_config("grpo", ["model.path=model", "placement.device=cpu", *overrides])))


@pytest.mark.parametrize(
    ("overrides", "faster"),
    [
        (["model.precision=bf16-true"], "model.precision=32-true is faster"),
        (["model.precision=bf16-mixed"], "model.precision=32-true is faster"),
        (["rollout.dtype=bfloat16"], "rollout.dtype=float32 is faster"),
        (
            ["model.precision=bf16-true", "rollout.dtype=bfloat16"],
            "model.precision=32-true rollout.dtype=float32 is faster",
        ),
    ],
)
def test_bfloat16_without_instructions_for_it(overrides: list[str], faster: str) -> None:
    words = said(*overrides)
    assert words is not None and faster in words


def test_nothing_is_said_where_nothing_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    assert said() is None
    assert said("model.precision=bf16-true", "placement.device=cuda") is None
    with monkeypatch.context() as there:
        # What another cluster's processors can do is not known here.
        there.setenv("RAY_ADDRESS", "auto")
        assert said("model.precision=bf16-true") is None
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert said("model.precision=bf16-true") is None
