"""The facts about GPUs come from recorded outputs of nvidia-smi, from files and from variables."""

from __future__ import annotations

import ctypes
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from rl_plugins.launch import gpus
from rl_plugins.launch.gpus import (
    hidden_gpus,
    local_gpus,
    nccl_version,
    nvidia_smi,
    pairs_without_peer_access,
    read_machine,
    visible_places,
)
from rl_plugins.tests.launch import nvidia_smi as recorded
from rl_plugins.tests.launch.nvidia_smi import A100, H100, machine
from rl_plugins.tests.loops import for_each


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (gpus.VISIBLE, *gpus.ALLOCATOR):
        monkeypatch.delenv(name, raising=False)


def test_read_machine_reads_the_outputs_of_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded.answer(monkeypatch, recorded.query(H100, A100, mig="[N/A]"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    read = read_machine()
    assert [(gpu.index, gpu.name, gpu.memory_mib, gpu.free_mib, gpu.driver, gpu.mig) for gpu in read.gpus] == [
        (0, H100, 81559, 81004, "580.95.05", False),
        (1, A100, 81559, 81004, "580.95.05", False),
    ]
    assert [gpu.name for gpu in read.visible] == [A100] and read.counted_by_ray == 1 and read.smi_error == ""
    assert read.variables == {"CUDA_VISIBLE_DEVICES": "1", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert read.shm_bytes > 0


def test_read_machine_reads_mig_and_memory_without_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded.answer(monkeypatch, recorded.query(A100, mig="Enabled").replace("81559, 81004", "[N/A], [N/A]"))
    (gpu,) = read_machine().gpus
    assert gpu.mig and (gpu.memory_mib, gpu.free_mib) == (0, 0)


def test_read_machine_keeps_the_error_of_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded.fail(monkeypatch, recorded.NO_DRIVER, files=2)
    read = read_machine()
    assert read.gpus == () and read.smi_error.startswith("NVIDIA-SMI has failed because")


def test_read_machine_reads_the_build_of_torch_without_an_import(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.13.0+cu130'\ncuda = '13.0'\n")
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path / "torch")])
    monkeypatch.setattr(gpus.importlib.util, "find_spec", lambda name: spec)
    read = read_machine()
    assert (read.torch, read.torch_cuda) == ("2.13.0+cu130", (13, 0))


def test_driver_cuda_asks_libcuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(pointer: Any) -> int:
        pointer._obj.value = 12040
        return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cuDriverGetVersion=answer))
    assert gpus.driver_cuda() == (12, 4)


def test_nvidia_smi_raises_if_the_program_is_missing_or_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="nvidia-smi"):
        nvidia_smi("-L")
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\necho "asked $*"\ntest "$1" = -L\n')
    program.chmod(0o755)
    assert nvidia_smi("-L") == "asked -L\n"
    with pytest.raises(subprocess.CalledProcessError) as failure:
        nvidia_smi("topo")
    assert failure.value.stdout == "asked topo\n"


def test_pairs_without_peer_access_reads_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded.answer(monkeypatch, "", peers=recorded.NO_PEERS)
    assert pairs_without_peer_access() == ["0-1"]
    recorded.answer(monkeypatch, "", peers=recorded.PEERS)
    assert pairs_without_peer_access() == []


UUIDS = ["GPU-aa11", "GPU-aa22", "GPU-bb33"]


@for_each(
    ("variable", "places"),
    [
        (None, [0, 1, 2]), ("2,0", [2, 0]), ("0, 1", [0, 1]), ("GPU-bb,GPU-aa1", [2, 0]),
        # The first wrong entry ends the list.
        ("1,7,0", [1]), ("-1", []), ("", []), ("NoDevFiles", []), ("0,0", [0]), ("GPU-aa", []),
    ],
)  # fmt: skip
def test_visible_places_follows_the_rule_of_cuda(variable: str | None, places: list[int]) -> None:
    assert visible_places(UUIDS, variable) == places


@for_each(
    ("variable", "visible", "hidden"),
    [
        (None, 2, ""), ("0,1", 2, ""), ("1", 1, "CUDA_VISIBLE_DEVICES='1'"), ("", 0, "CUDA_VISIBLE_DEVICES=''"),
        ("-1", 0, "CUDA_VISIBLE_DEVICES='-1'"), ("GPU-aa11", 1, "CUDA_VISIBLE_DEVICES='GPU-aa11'"),
    ],
)  # fmt: skip
def test_local_gpus_and_hidden_gpus_follow_the_variable(variable: str | None, visible: int, hidden: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpus, "_device_files", lambda: 2)
        if variable is not None:
            patch.setenv("CUDA_VISIBLE_DEVICES", variable)
        assert (local_gpus(), hidden_gpus()) == (visible, hidden)


@for_each(("variable", "counted"), [(None, 2), ("1", 1), ("", 0), ("-1", 1), ("0,9", 2), ("0,1,2,3", 2)])
def test_counted_by_ray_is_the_number_of_entries(variable: str | None, counted: int) -> None:
    """`ray._private.resource_and_label_spec` takes the smaller of both numbers."""
    variables = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    assert machine(H100, H100, variables=variables).counted_by_ray == counted


def test_counted_by_ray_is_the_count_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager

    for variable in ("1", "", "-1", "0,9", "0,1,2,3"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
        entries = NvidiaGPUAcceleratorManager.get_current_process_visible_accelerator_ids()
        assert entries is not None
        assert machine(H100, H100, variables={"CUDA_VISIBLE_DEVICES": variable}).counted_by_ray == min(2, len(entries))


def test_nccl_version_is_the_version_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus.importlib.metadata, "version", {"nvidia-nccl-cu13": "2.28.9"}.__getitem__)
    assert nccl_version((13, 0)) == "2.28.9"
    monkeypatch.undo()
    assert nccl_version((1, 0)) is None
