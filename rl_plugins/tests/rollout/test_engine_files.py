"""Files of a vLLM engine do not stay after the engine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl_plugins.rollout.vllm.engine_files import ENGINE_FOLDERS, make_engine_folder, meeting_in_engine_folder

SHARED = """
from multiprocessing import get_context, shared_memory
from pathlib import Path
from rl_plugins.rollout.vllm.engine_files import remove_names_of_shared_memory

def share(pipe):
    memory = shared_memory.SharedMemory(create=True, size=64)
    memory.buf[0] = 7
    pipe.send(memory.name)
    pipe.recv()

if __name__ == "__main__":
    here, there = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=share, args=(there,))
    process.start()
    name = here.recv()
    memory = shared_memory.SharedMemory(name)
    own = Path("/dev/shm/other-" + name)
    own.touch()
    remove_names_of_shared_memory()
    assert memory.buf[0] == 7 and own.exists() and not Path("/dev/shm", name).exists()
    own.unlink()
    process.kill()
    process.join()
"""

PROGRESS = """
from threading import RLock
from rl_plugins.rollout.vllm.engine_files import use_nameless_lock_of_progress_bars
use_nameless_lock_of_progress_bars()
from tqdm.auto import tqdm
assert list(tqdm(range(3), disable=True)) == [0, 1, 2]
assert isinstance(tqdm.get_lock(), type(RLock()))
"""


def assert_runs(script: str, folder: Path) -> None:
    """Run a program in a process of its own."""
    (folder / "script.py").write_text(script)
    ended = subprocess.run([sys.executable, folder / "script.py"], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.skipif(sys.platform != "linux", reason="names of shared memory are files on Linux alone")
def test_shared_memory_of_an_engine_has_no_name(tmp_path: Path) -> None:
    assert_runs(SHARED, tmp_path)


def test_lock_of_progress_bars_has_no_name(tmp_path: Path) -> None:
    assert_runs(PROGRESS, tmp_path)


def test_engine_folder_has_the_sockets_and_the_meeting_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tempfile

    monkeypatch.setenv("VLLM_RPC_BASE_PATH", "")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    make_engine_folder()
    (folder,) = tmp_path.glob(f"{ENGINE_FOLDERS}*")
    assert os.environ["VLLM_RPC_BASE_PATH"] == str(folder)
    with meeting_in_engine_folder():
        assert tempfile.gettempdir() == str(folder)
    assert tempfile.gettempdir() == str(tmp_path)
