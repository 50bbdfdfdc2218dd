from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rl_plugins.launch.preflight import slow_here
from rl_plugins.tests.launch.configurations import configured


@pytest.fixture(autouse=True)
def _processor_without_bfloat16(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    yield


def warning(*overrides: str) -> str | None:
    """Return `slow_here` of the GRPO recipe."""
    return slow_here(configured("grpo", "model.path=model", "placement.device=cpu", *overrides))


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
def test_slow_here_names_the_faster_options_on_a_cpu_without_bfloat16(overrides: list[str], faster: str) -> None:
    text = warning(*overrides)
    assert text is not None and faster in text


def test_slow_here_is_none_for_float32_a_gpu_a_cluster_or_a_cpu_with_bfloat16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert warning() is None
    assert warning("model.precision=bf16-true", "placement.device=cuda") is None
    with monkeypatch.context() as cluster:
        # The processors of a cluster are not known here.
        cluster.setenv("RAY_ADDRESS", "auto")
        assert warning("model.precision=bf16-true") is None
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert warning("model.precision=bf16-true") is None
