from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rl_plugins.launch import fetch, preflight
from rl_plugins.launch.compose import override
from rl_plugins.launch.mlflow_run import describe_run
from rl_plugins.launch.pinned_versions import PinnedVersions
from rl_plugins.launch.preflight import slow_here
from rl_plugins.run_folder import RunFolder
from rl_plugins.tests.launch.configurations import configured


@pytest.fixture(autouse=True)
def _processor_without_bfloat16(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr("rl_plugins.cpu_instructions.multiplies_float16", lambda: False)
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
        (["model.precision=16-mixed"], "no instructions for float16, which may take many times as long: model.prec"),
        (["model.precision=16-mixed", "rollout.dtype=bfloat16"], "for bfloat16 and float16, which"),
    ],
)
def test_slow_here_names_the_faster_options_on_a_cpu_without_numbers_of_16_bits(
    overrides: list[str], faster: str
) -> None:
    text = warning(*overrides)
    assert text is not None and faster in text


def test_slow_here_is_none_for_float32_a_gpu_a_cluster_or_a_cpu_with_numbers_of_16_bits(
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
    assert warning("model.precision=16-mixed") is not None
    monkeypatch.setattr("rl_plugins.cpu_instructions.multiplies_float16", lambda: True)
    assert warning("model.precision=16-mixed") is None


def test_files_that_a_data_set_replaces_are_neither_fetched_nor_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = ["s3://bucket/a.parquet", "hf://datasets/owner/name/b.parquet", "https://host/c.parquet"]
    fetched = list[str]()

    def record(_: object, path: str, *__: object) -> str:
        fetched.append(path)
        return path

    monkeypatch.setattr(fetch, "fetch_copy", record)
    monkeypatch.setattr(fetch, "fetch_data_files", lambda _, option, path, __: [record(option, path)])
    monkeypatch.setattr(fetch, "is_data_address", lambda path: path.startswith("hf:"))
    options = ["model.path=model", f"run.output_dir={tmp_path}", "run.name=one"]
    named = configured("grpo", *options, override("data.train_files", addresses))
    fetch.fetch_data(named, PinnedVersions())
    assert fetched == named.data.training_files == addresses
    fetched.clear()
    own = override("data.dataset", {"path": "rows.py", "name": "rows"})
    replaced = configured("grpo", *options, override("data.train_files", addresses), own)
    fetch.fetch_data(replaced, PinnedVersions())
    preflight._check_data_files(replaced, lambda _: False)
    assert fetched == replaced.data.training_files == []
    assert describe_run(replaced, RunFolder(tmp_path)).data["training"] == []
    mixed = configured("grpo", *options, "data.mixture={a: {files: [/a.parquet]}, b: {files: /b.parquet}}")
    assert mixed.data.training_files == ["/a.parquet", "/b.parquet"]
