"""Temporary folders of killed processes are removed by the next process."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl_plugins.owned_folder import owned_folder, owned_in_context, remove_ownerless

OWNER = """
import os, sys
from pathlib import Path
from rl_plugins.owned_folder import owned_folder
folder = owned_folder("engine-", Path(sys.argv[1]))
(folder / "socket").touch()
forked, runs = os.pipe()
child = os.fork()
if child == 0:
    os.write(runs, b"x")
    os.read(0, 1)
    os._exit(0)
os.read(forked, 1)
print(folder, flush=True)
os.read(0, 1)
"""


@pytest.fixture
def owner(tmp_path: Path) -> subprocess.Popen[str]:
    """Process that owns a folder, with a forked process."""
    return subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_owned_folder_of_a_killed_process_is_removed_by_the_next_one(
    owner: subprocess.Popen[str], tmp_path: Path
) -> None:
    """The forked process lives on, and keeps no lock."""
    with owner:
        assert owner.stdout is not None
        first = Path(owner.stdout.readline().strip())
        (tmp_path / "other").mkdir()
        (tmp_path / "engine-link").symlink_to(tmp_path / "other")
        mine = owned_folder("engine-", tmp_path)
        assert mine != first and mine.is_dir() and mine.stat().st_mode & 0o777 == 0o700
        assert (first / "socket").exists()
        owner.kill()
        owner.wait()
        remove_ownerless("engine-", tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["engine-link", mine.name, "other"])


def test_owned_folder_is_removed_at_the_exit_of_the_process(owner: subprocess.Popen[str]) -> None:
    folder, _ = owner.communicate("xx")
    assert owner.returncode == 0 and not Path(folder.strip()).exists()


def test_owned_in_context_has_an_owner_until_the_end_of_the_context(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), owned_in_context("[a].", tmp_path) as folder:
        (folder / "half").touch()
        remove_ownerless("[a].", tmp_path)
        assert list(tmp_path.rglob("*")) == [folder, folder / "half"]
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_owned_folder_works_on_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr("fcntl.flock", refuse)
    folder = owned_folder("engine-", tmp_path)
    remove_ownerless("engine-", tmp_path)
    assert folder.is_dir() and os.listdir(tmp_path) == [folder.name]
