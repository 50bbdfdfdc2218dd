"""Lock on the folder of a run: a second process, forks, and the end of the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rl_plugins.errors import ConfigError
from rl_plugins.run_folder import RunFolder
from rl_plugins.run_lock import owned

# Holds the lock, with a forked child that lives on, as a reward can leave behind.
HOLDER = """
import os, sys, time
from pathlib import Path
from rl_plugins.run_folder import RunFolder
from rl_plugins.run_lock import owned

with owned(RunFolder(sys.argv[1])):
    if os.fork() == 0:
        # The child has closed its copy of the lock's file.
        print(os.getpid(), flush=True)
    sys.stdin.read()
"""


def test_owned_refuses_a_second_process_until_the_first_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        lock = RunFolder(tmp_path).lock
        expected = rf"^{tmp_path} belongs to a running run \(process {holder.pid} on \S+\): wait .*, remove {lock}$"
        with pytest.raises(ConfigError, match=expected), owned(RunFolder(tmp_path)):
            pass
        holder.kill()
        holder.wait()
        os.kill(child, 0)
        with owned(RunFolder(tmp_path)):
            os.kill(child, signal.SIGKILL)
    with owned(RunFolder(tmp_path)):
        assert f"process {os.getpid()} on" in RunFolder(tmp_path).lock.read_text()
