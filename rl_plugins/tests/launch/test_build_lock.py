from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_plugins.errors import ConfigError
from rl_plugins.launch.build_lock import clear_stale_build_locks

# Takes the lock as torch.utils.file_baton.FileBaton does, and keeps the lock until the end of the process.
BUILDER = "import os, sys, time; os.open(sys.argv[1], os.O_CREAT | os.O_EXCL); print(flush=True); time.sleep(600)"


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    folder = tmp_path / "deepspeed_shm_comm"
    folder.mkdir()
    return folder / "lock"


@pytest.fixture
def builder(lock: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", BUILDER, str(lock)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()


def test_clear_stale_build_locks_removes_the_lock_of_a_killed_build(tmp_path, lock, builder):
    builder.kill()
    builder.wait()
    assert lock.exists()
    assert clear_stale_build_locks(tmp_path) == [lock]
    assert not lock.exists()


def test_clear_stale_build_locks_leaves_the_lock_of_a_living_build(tmp_path, lock, builder):
    assert clear_stale_build_locks(tmp_path) == []
    assert lock.exists()


def test_clear_stale_build_locks_names_file_and_process_of_a_hung_build(tmp_path, lock, builder):
    long_ago = time.time() - 7200
    os.utime(lock, (long_ago, long_ago))
    with pytest.raises(ConfigError, match=rf"{builder.pid}.*120 minutes.*{lock}"):
        clear_stale_build_locks(tmp_path)
    assert lock.exists()


def test_clear_stale_build_locks_finds_the_owner_of_a_lock_through_a_link(tmp_path, lock, builder):
    link = tmp_path.with_name(f"{tmp_path.name}-link")
    link.symlink_to(tmp_path)
    assert clear_stale_build_locks(link) == []
    assert lock.exists()


def test_clear_stale_build_locks_leaves_other_files(tmp_path, lock):
    for name in ("build.ninja", "shm.o", "lock.o"):
        lock.with_name(name).touch()
    assert clear_stale_build_locks(tmp_path) == []
    assert len(list(lock.parent.iterdir())) == 3


def test_clear_stale_build_locks_leaves_locks_of_other_programs(tmp_path):
    files = [tmp_path / name for name in ("lock", "program/lock", "program/data/lock", "py311_cpu/own_op/deep/lock")]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    (tmp_path / "py311_cpu" / "own_op" / "build.ninja").touch()
    assert clear_stale_build_locks(tmp_path) == []
    assert all(file.exists() for file in files)


def test_clear_stale_build_locks_removes_the_lock_beside_the_build_of_any_op(tmp_path):
    locks = [tmp_path / name / "lock" for name in ("own_op", "py311_cpu/own_op")]
    for lock in locks:
        lock.parent.mkdir(parents=True)
        lock.touch()
        lock.with_name("build.ninja").touch()
    assert clear_stale_build_locks(tmp_path) == sorted(locks)


def test_clear_stale_build_locks_accepts_a_missing_folder(tmp_path):
    assert clear_stale_build_locks(tmp_path / "absent") == []


def test_clear_stale_build_locks_names_a_lock_that_cannot_be_removed(tmp_path, lock, monkeypatch):
    lock.touch()

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(ConfigError, match=rf"{lock}.*Permission denied"):
        clear_stale_build_locks(tmp_path)


def test_clear_stale_build_locks_names_the_lock_of_another_user(tmp_path, lock, monkeypatch):
    lock.touch()
    monkeypatch.setattr(os, "geteuid", lambda: lock.stat().st_uid + 1)
    with pytest.raises(ConfigError, match=f"{lock} belongs to another user"):
        clear_stale_build_locks(tmp_path)
    assert lock.exists()
