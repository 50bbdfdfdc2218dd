"""Folder and token of a run's own Ray are for one user, and its object store has room for the samples."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from unittest import mock

import psutil
import pytest

from rl_plugins.errors import ConfigError, RayLost
from rl_plugins.launch.own_ray import (
    GCS_WAIT,
    LEAST_BYTES,
    TASK_REPORTS,
    object_store_bytes,
    path_of_sessions,
    protect_token,
    remove_left_folders,
    session_folder,
    set_own_ray_up,
    start_own_ray,
)
from rl_plugins.tests.launch.configurations import configured
from rl_plugins.tests.other_user import OTHER_USER, needs_root, run_as_other_user

READ = """
try:
    print(open(sys.argv[1]).read())
except PermissionError:
    print("refused")
"""
LARGE = [
    "model.path=model", "batch.prompts_per_step=1024", "batch.samples_per_prompt=16", "data.max_prompt_tokens=1024",
    "sampling.max_tokens=8192",
]  # fmt: skip
SAMPLES = 1024 * 16 * (1024 + 8192)


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give the test a home that all users can enter, as on many machines."""
    with TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        monkeypatch.setenv("HOME", folder)
        monkeypatch.setenv("RAY_TMPDIR", folder)
        for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
            monkeypatch.delenv(name, raising=False)
        yield Path(folder)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_session_folder_is_in_a_folder_of_one_user(home: Path) -> None:
    folder = session_folder()
    assert folder == session_folder() == home / f"ray-{os.geteuid()}" / "ray"
    assert mode(folder.parent) == 0o700
    folder.parent.chmod(0o777)
    session_folder()
    assert mode(folder.parent) == 0o700


def test_session_folder_refuses_a_link_and_a_folder_that_cannot_be_made(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "elsewhere").mkdir()
    link = home / f"ray-{os.geteuid()}"
    link.symlink_to(home / "elsewhere")
    with pytest.raises(ConfigError, match=f"{link} is a link or belongs to another user .* set RAY_TMPDIR"):
        session_folder()
    (home / "file").touch()
    monkeypatch.setenv("RAY_TMPDIR", str(home / "file"))
    with pytest.raises(ConfigError, match=r"cannot be made .*: set RAY_TMPDIR"):
        session_folder()


def test_session_folder_refuses_a_path_too_long_for_the_sockets_of_ray(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The names of sockets, with the number of this process.
    most = 107 - len(f"/ray-{os.geteuid()}/ray/session_2026-11-28_01-02-03_123456_{os.getpid()}/sockets/plasma_store")
    # Letters beyond ASCII have several bytes.
    longest = home / ("ä" + "a" * (most - len(f"{home}/ä") - 1))
    for variable in ("RAY_TMPDIR", "TMPDIR"):
        monkeypatch.setenv(variable, str(longest))
        monkeypatch.setattr(tempfile, "tempdir", None)
        longest.mkdir(exist_ok=True)
        assert path_of_sessions() == longest / f"ray-{os.geteuid()}" / "ray"
        too_long = Path(f"{longest}b")
        too_long.mkdir(exist_ok=True)
        monkeypatch.setenv(variable, str(too_long))
        monkeypatch.setattr(tempfile, "tempdir", None)
        message = f"{variable}={too_long}: the path has {most + 1} bytes, and names of Ray's sockets leave {most} bytes"
        with pytest.raises(ConfigError, match=f"{message}: set {variable} to a shorter path"):
            session_folder()
        assert not [*too_long.iterdir()]
        monkeypatch.delenv("RAY_TMPDIR", raising=False)


@needs_root
def test_session_folder_refuses_a_folder_of_another_user(home: Path) -> None:
    squatted = home / f"ray-{os.geteuid()}"
    squatted.mkdir()
    os.chown(squatted, OTHER_USER, OTHER_USER)
    with pytest.raises(ConfigError, match=f"belongs to another user .uid {OTHER_USER}.: delete it"):
        session_folder()


@needs_root
def test_session_folder_keeps_out_another_user() -> None:
    folder = session_folder()
    folder.mkdir(mode=0o777)
    (folder / "log").touch()
    assert run_as_other_user(READ, str(folder / "log")) == "refused\n"


def test_protect_token_makes_one_private_token(home: Path) -> None:
    protect_token()
    token = home / ".ray" / "auth_token"
    first = token.read_text()
    assert len(first) == 64 and mode(token) == 0o600
    protect_token()
    assert token.read_text() == first and list(token.parent.iterdir()) == [token]


@needs_root
def test_protect_token_hides_a_token_that_ray_has_made(home: Path) -> None:
    token = home / ".ray" / "auth_token"
    token.parent.mkdir()
    token.write_text("secret")
    token.chmod(0o644)
    assert run_as_other_user(READ, str(token)) == "secret\n"
    protect_token()
    assert run_as_other_user(READ, str(token)) == "refused\n"
    assert token.read_text() == "secret"


def test_protect_token_leaves_the_token_of_the_environment(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of the cluster")
    protect_token()
    assert not (home / ".ray").exists()


def test_protect_token_names_a_token_that_cannot_be_written(home: Path) -> None:
    (home / ".ray").touch()
    with pytest.raises(ConfigError, match=f"token {home}/.ray/auth_token cannot be made private"):
        protect_token()


def test_start_own_ray_tells_in_one_line_that_ray_did_not_start(home: Path) -> None:
    """Ray's own error of a machine that is too busy."""
    slow = Exception("The current node timed out during startup.\nThe GCS may be overloaded.")
    with mock.patch.dict(os.environ), mock.patch("ray.init", side_effect=slow):
        message = r"Ray did not start \(The current node timed out .*\): end other programs .*/session_latest/logs"
        with pytest.raises(RayLost, match=message):
            start_own_ray()


def test_remove_left_folders_removes_folders_of_engines_of_killed_runs(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(home))
    left, sessions = home / "rl-vllm-x", home / f"ray-{os.geteuid()}" / "ray"
    for folder in (left, sessions):
        folder.mkdir(parents=True)
    remove_left_folders()
    assert not left.exists() and sessions.exists()


def test_set_own_ray_up_bounds_memory_and_wait_of_the_gcs_and_leaves_variables_of_the_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (TASK_REPORTS, GCS_WAIT, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    set_own_ray_up()
    assert os.environ[TASK_REPORTS] == "0" and os.environ[GCS_WAIT] == "10"
    monkeypatch.setenv(TASK_REPORTS, "500")
    set_own_ray_up()
    assert os.environ[TASK_REPORTS] == "500"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine with a terabyte of memory."""
    machine = SimpleNamespace(available=2**40, free=2**40)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)
    monkeypatch.setattr(psutil, "disk_usage", lambda path: machine)
    return machine


@pytest.mark.usefixtures("machine")
def test_object_store_bytes_grow_with_the_samples_in_flight_and_the_pools() -> None:
    assert object_store_bytes(configured("grpo", "model.path=model")) == LEAST_BYTES
    size = object_store_bytes(configured("grpo", *LARGE))
    assert size == 32 * SAMPLES > 4 * 2**30
    assert object_store_bytes(configured("grpo", *LARGE, "schedule.max_staleness=1")) == 2 * size
    teacher = ["placement.teacher.actors=1", "teacher.path=model", "algorithm.teacher_top_k=10"]
    assert object_store_bytes(configured("grpo", *LARGE, *teacher)) == (32 + 48 + 12 * 10) * SAMPLES


@pytest.mark.usefixtures("machine")
def test_object_store_bytes_count_the_experts_of_each_token_from_the_engine(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 24, "num_experts_per_tok": 8}
    options = [*LARGE, f"model.path={tmp_path}", "model.router_replay=rollout"]
    for content, layers_and_experts in (
        (sizes, 24 * 8),
        ({"text_config": sizes, "num_hidden_layers": 3}, 24 * 8),
        ({"num_hidden_layers": 24, "experts_per_token": 4}, 24 * 4),
        # Only the class of the model knows the sizes.
        ({}, 0),
    ):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", **content}))
        assert object_store_bytes(configured("grpo", *options)) == (32 + 2 * layers_and_experts) * SAMPLES
        assert object_store_bytes(configured("grpo", *options[:-1], "model.router_replay=recompute")) == 32 * SAMPLES


def test_object_store_bytes_stay_within_the_memory_of_the_machine(machine: SimpleNamespace) -> None:
    machine.free = 2 * 2**30
    assert object_store_bytes(configured("grpo", *LARGE)) == int(0.8 * machine.free)
    machine.available = 2**30
    assert object_store_bytes(configured("grpo", *LARGE)) == LEAST_BYTES
