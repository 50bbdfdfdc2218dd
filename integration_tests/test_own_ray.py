"""Ray of a run's own, and the training workers, are closed to the network; Ray ends with the run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest

from integration_tests.worker_start.sitecustomize import VARIABLE
from rl_plugins.tests.patience import patient, wait_until

# Starts Ray, a worker, and an actor that ends and whose process hangs in its exit handlers. Then two training workers
# make collective calls of two groups. Writes files: the worker's folder for temporary files, the id of the hanging
# process, the listening sockets of Ray, and those of each rank.
PROGRAM = """
from rl_plugins.launch.own_ray import start_own_ray
start_own_ray(num_cpus=4, object_store_memory=10**8)
import contextlib, ctypes, os, psutil, ray, sys, tempfile
from pathlib import Path
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
import rl_plugins as rl
folder = Path(sys.argv[1])
class Hanging:
    def process(self):
        library = ctypes.CDLL(None)  # the C library
        library["__cxa_atexit"](library.pause, None, None)
        return os.getpid()
    def leave(self):
        ray.actor.exit_actor()
def train():
    import psutil, torch
    from torch import distributed
    total = torch.ones(1)
    distributed.all_reduce(total)
    distributed.all_reduce(total, group=distributed.new_group())
    sockets = [one.laddr.ip for one in psutil.Process().net_connections("inet") if one.status == psutil.CONN_LISTEN]
    (folder / f"rank-{os.environ['RANK']}").write_text(f"{total.item()} {' '.join(sockets)}")
(folder / "temporary").write_text(ray.get(ray.remote(tempfile.gettempdir).remote()))
actor = ray.remote(Hanging).remote()
(folder / "hanging").write_text(str(ray.get(actor.process.remote())))
with contextlib.suppress(ray.exceptions.RayActorError):
    ray.get(actor.leave.remote())
sockets = []
for process in psutil.Process().children(recursive=True):
    # Helper processes of Ray end at any time.
    with contextlib.suppress(psutil.NoSuchProcess):
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                sockets.append(f"{process.name()} {connection.laddr.ip} {connection.laddr.port}")
(folder / "sockets").write_text("\\n".join(sockets))
TorchTrainer(
    train, torch_config=rl.PrivateTorchConfig(timeout_s=60), scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(storage_path=str(folder / "runs")),
).fit()
"""

LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


@pytest.mark.extended
def test_own_ray_and_training_workers_listen_on_loopback_and_hanging_workers_end(tmp_path: Path) -> None:
    # Paths of Ray's sockets must be short.
    with TemporaryDirectory(dir="/tmp") as folder:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        outcome = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(tmp_path)],
            # The children of this program are its workers, and not their forks.
            env={**environment, VARIABLE: "", "HOME": folder, "RAY_TMPDIR": folder, "TMPDIR": folder},
            capture_output=True,
            text=True,
            timeout=patient(300),
        )
        assert outcome.returncode == 0, outcome.stdout + outcome.stderr
        written = {path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file()}
        assert written["temporary"] == folder
        hanging = int(written["hanging"])
        wait_until(lambda: not psutil.pid_exists(hanging), "the hanging process has gone")
        listening = [line.split() for line in written["sockets"].splitlines()]
        assert len(listening) > 3
        assert [line for line in listening if line[1] not in LOOPBACK] == []
        (closed,) = Path(folder).glob("ray-*")
        assert {path.name for path in (*Path(folder).iterdir(), *closed.iterdir())} == {closed.name, ".ray", "ray"}
        assert closed.stat().st_mode & 0o777 == 0o700 and list(closed.glob("ray/session_*"))
        assert (Path(folder) / ".ray" / "auth_token").stat().st_mode & 0o777 == 0o600
        ranks = [written[f"rank-{rank}"].split() for rank in (0, 1)]
        assert [float(total) for total, *_ in ranks] == [4.0, 4.0]
        addresses = {address for _, *addresses in ranks for address in addresses}
        assert addresses and addresses <= LOOPBACK
