"""Recipes as a user runs them: in processes of their own, on a tiny policy and addition data."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from rl_plugins.data.prepare.addition import addition_rows
from rl_plugins.data.prepare.writing import write_splits
from rl_plugins.run_folder import metric_rows

if TYPE_CHECKING:
    from integration_tests.mlflow_server import Server

# The processes that tests start, and Ray's workers, find the rewards of this folder by their module's name.
ROOT = Path(__file__).parent.parent
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `data/{train,test}.parquet` and a tiny policy in `tiny/`."""
    from rl_plugins.models.tiny import save_tiny_policy

    folder = tmp_path_factory.mktemp("workplace")
    write_splits(addition_rows(below=100, num_train=512, num_test=64, seed=0), folder / "data")
    save_tiny_policy(folder / "tiny")
    return folder


@dataclass
class Recipe:
    """A recipe in a process group of its own."""

    folder: Path
    process: subprocess.Popen[str]
    log: Path
    name: str
    started: float = field(default_factory=time.monotonic)

    @property
    def run(self) -> Path:
        return self.folder / "outputs" / self.name

    def metrics(self) -> list[dict[str, float]]:
        return metric_rows(self.run / "metrics.jsonl")

    def wait(self, timeout_s: float = 420) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"{self.name} did not end in {timeout_s} s:\n{self.tail()}") from None

    def wait_for_step(self, step: int, timeout_s: float = 420) -> None:
        deadline = time.monotonic() + timeout_s
        while not any(row["step"] >= step and "train/loss" in row for row in self.metrics()):
            assert self.process.poll() is None, f"{self.name} ended before step {step}:\n{self.tail()}"
            assert time.monotonic() < deadline, f"{self.name} did not reach step {step}:\n{self.tail()}"
            time.sleep(0.05)

    def processes(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def kill_one(self, name: str) -> None:
        """kill -9 one process whose title contains `name`."""
        found = [process for process in self.processes() if name in " ".join(process.cmdline())]
        assert found, f"no process {name!r} among {[p.cmdline()[:2] for p in self.processes()]}"
        found[0].send_signal(signal.SIGKILL)

    def kill(self) -> None:
        """kill -9 everything the recipe started."""
        processes = [*self.processes(), psutil.Process(self.process.pid)]
        for process in processes:
            if process.is_running():
                process.send_signal(signal.SIGKILL)
        psutil.wait_procs(processes, timeout=30)
        self.process.wait(30)

    def tail(self, characters: int = 6000) -> str:
        return self.log.read_text(errors="replace")[-characters:]


@contextmanager
def recipes_in(folder: Path, workplace: Path, address: str | None = None) -> Iterator[Callable[..., Recipe]]:
    """Start `python -m rl_plugins.recipes.<recipe>` with overrides; what still runs at the end is killed.

    Args:
        folder: of the runs.
        workplace: with data and model.
        address: of a Ray cluster; by default each has a Ray of its own.
    """
    recipes: list[Recipe] = []

    def start(recipe: str, name: str, *overrides: str, typed: str = "") -> Recipe:
        log = folder / f"{name}-{len(recipes)}.log"
        command = [
            sys.executable, "-m", f"rl_plugins.recipes.{recipe}",
            f"run.name={name}", f"run.output_dir={folder}/outputs", f"model.path={workplace}/tiny",
            f"data.train_files=[{workplace}/data/train.parquet]", f"data.val_files=[{workplace}/data/test.parquet]",
            "data.max_prompt_tokens=26", "sampling.max_tokens=6", *overrides,
        ]  # fmt: skip
        # What Ray sets in the process of a test that uses it is not for a user's command.
        of_ray = ("RAY_ADDRESS", "PYTHONBREAKPOINT")
        environment = {key: value for key, value in os.environ.items() if key not in of_ray}
        environment |= {"RAY_ADDRESS": address} if address else {}
        keyboard = folder / "typed"
        keyboard.write_text(typed)
        with log.open("w") as output, keyboard.open() as keys:
            process = subprocess.Popen(
                command, cwd=folder, stdin=keys, stdout=output, stderr=subprocess.STDOUT, text=True, env=environment
            )
        recipes.append(Recipe(folder, process, log, name))
        return recipes[-1]

    yield start
    for recipe in recipes:
        if recipe.process.poll() is None:
            recipe.kill()


@pytest.fixture
def start_recipe(workplace: Path, tmp_path: Path) -> Iterator[Callable[..., Recipe]]:
    """Recipes in a folder of the test's own."""
    with recipes_in(tmp_path, workplace) as start:
        yield start


@pytest.fixture(scope="module")
def running_ray() -> Iterator[None]:
    """A Ray of this machine, with two CPUs to give."""
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A tracking server that runs."""
    from integration_tests.mlflow_server import Server

    server = Server(tmp_path_factory.mktemp("mlflow"))
    server.start()
    yield server
    server.kill()


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
