"""Ray of a run's own, and the training workers, are closed to the network; Ray ends with the run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from rl_plugins.tests.patience import patient, wait_until

# Starts Ray, a worker, and an actor that ends and whose process hangs in its exit handlers. Prints the worker's folder
# for temporary files, the id of the hanging process, and all listening sockets of Ray.
START = """
from rl_plugins.launch.own_ray import start_own_ray
start_own_ray(num_cpus=1, include_dashboard=True, object_store_memory=10**8)
import contextlib, ctypes, os, psutil, ray, tempfile
class Hanging:
    def process(self):
        library = ctypes.CDLL(None)  # the C library
        library["__cxa_atexit"](library.pause, None, None)
        return os.getpid()
    def leave(self):
        ray.actor.exit_actor()
print(ray.get(ray.remote(tempfile.gettempdir).remote()))
actor = ray.remote(Hanging).remote()
print(ray.get(actor.process.remote()))
with contextlib.suppress(ray.exceptions.RayActorError):
    ray.get(actor.leave.remote())
for process in psutil.Process().children(recursive=True):
    # Helper processes of Ray end at any time.
    with contextlib.suppress(psutil.NoSuchProcess):
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                print(process.name(), connection.laddr.ip, connection.laddr.port)
"""

LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}

# Two training workers write their listening sockets, after collective calls of two groups.
TRAIN = """
from rl_plugins.launch.own_ray import start_own_ray
start_own_ray(num_cpus=4, include_dashboard=False, object_store_memory=10**8)
import os, sys
from pathlib import Path
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
import rl_plugins as rl
folder = Path(sys.argv[1])
def train():
    import psutil, torch
    from torch import distributed
    total = torch.ones(1)
    distributed.all_reduce(total)
    distributed.all_reduce(total, group=distributed.new_group())
    sockets = [one.laddr.ip for one in psutil.Process().net_connections("inet") if one.status == psutil.CONN_LISTEN]
    (folder / os.environ["RANK"]).write_text(f"{total.item()} {' '.join(sockets)}")
TorchTrainer(
    train, torch_config=rl.PrivateTorchConfig(timeout_s=60), scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(storage_path=str(folder / "runs")),
).fit()
"""


def test_own_ray_listens_on_loopback_in_a_closed_folder_and_ends_hanging_workers() -> None:
    # Paths of Ray's sockets must be short.
    with TemporaryDirectory(dir="/tmp") as folder:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        outcome = subprocess.run(
            [sys.executable, "-c", START],
            env={**environment, "HOME": folder, "RAY_TMPDIR": folder, "TMPDIR": folder},
            capture_output=True,
            text=True,
            timeout=patient(120),
        )
        assert outcome.returncode == 0, outcome.stderr
        temporary, hanging, *sockets = outcome.stdout.splitlines()
        assert temporary == folder
        wait_until(lambda: not psutil.pid_exists(int(hanging)), "the hanging process has gone")
        listening = [line.split() for line in sockets]
        assert len(listening) > 3
        assert [line for line in listening if line[1] not in LOOPBACK] == []
        (closed,) = Path(folder).glob("ray-*")
        assert {path.name for path in (*Path(folder).iterdir(), *closed.iterdir())} == {closed.name, ".ray", "ray"}
        assert closed.stat().st_mode & 0o777 == 0o700 and list(closed.glob("ray/session_*"))
        assert (Path(folder) / ".ray" / "auth_token").stat().st_mode & 0o777 == 0o600


def test_training_workers_listen_on_single_addresses(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    outcome = subprocess.run(
        [sys.executable, "-c", TRAIN, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=patient(120),
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    found = [(tmp_path / rank).read_text().split() for rank in ("0", "1")]
    assert [float(total) for total, *_ in found] == [4.0, 4.0]
    addresses = {address for _, *listening in found for address in listening}
    assert addresses and addresses <= LOOPBACK
