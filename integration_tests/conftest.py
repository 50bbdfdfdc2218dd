"""Recipes as a user runs them: in separate processes, with a tiny policy and addition data."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from integration_tests import command_server
from integration_tests.command_server import ForkedCommand, start_command
from integration_tests.fork_server import take_signals
from integration_tests.ray_workers import descendants, fork_workers
from integration_tests.resident import (  # noqa: F401
    adapter_engine,
    bfloat16_engine,
    float32_engine,
    pytest_collection_modifyitems,
    pytest_runtest_protocol,
    running_ray,
)
from integration_tests.worker_start.sitecustomize import VARIABLE
from rl_plugins.data.prepare.files import write_splits
from rl_plugins.data.prepare.tasks import addition_rows
from rl_plugins.run_folder import metric_rows
from rl_plugins.tests.patience import patient, wait_until

if TYPE_CHECKING:
    from integration_tests.mlflow_server import Server

# The processes of tests and Ray's workers find the rewards of this folder by the name of the module.
ROOT = Path(__file__).parent.parent
RUN_DEADLINE_S = 900.0
"""Deadline of a run or of one of its steps, for a run that hangs. On busy cores, a run of 67 s took over 420 s."""
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let the servers of forks import their libraries while the first tests run."""
    if not session.config.option.collectonly and any("integration_tests" in item.path.parts for item in session.items):
        fork_workers(os.environ)
        command_server.SERVER.start()


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `data/{train,test}.parquet` and a tiny policy in `tiny/`."""
    folder = tmp_path_factory.mktemp("workplace")
    save_workplace(folder)
    return folder


def save_workplace(folder: Path) -> None:
    """Write the data and the policy of `workplace`."""
    from rl_plugins.models.tiny import save_tiny_policy

    write_splits(addition_rows(below=100, num_train=512, num_test=64, seed=0), folder / "data")
    save_tiny_policy(folder / "tiny")


@dataclass
class Recipe:
    """A recipe in its own process."""

    folder: Path
    process: ForkedCommand | subprocess.Popen[Any]
    log: Path
    name: str

    @property
    def run(self) -> Path:
        return self.folder / "outputs" / self.name

    def metrics(self) -> list[dict[str, float]]:
        return metric_rows(self.run / "metrics.jsonl")

    def trained(self) -> list[dict[str, float]]:
        """The rows of training steps."""
        return [row for row in self.metrics() if "train/loss" in row]

    def wait(self, timeout_s: float = RUN_DEADLINE_S) -> int:
        """Wait for the exit status."""
        try:
            return self.process.wait(patient(timeout_s))
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"{self.name} did not end in {patient(timeout_s):g} s:\n{self.tail()}") from None

    def wait_until(self, holds: Callable[[], object], awaited: str, timeout_s: float = RUN_DEADLINE_S) -> None:
        """Wait until the recipe fulfils a condition; fail if the recipe ends before."""

        def held() -> bool:
            # The condition comes first: a recipe may fulfil the condition and end.
            ended = self.process.poll() is not None
            if holds():
                return True
            assert not ended, f"{self.name} ended before {awaited}:\n{self.tail()}"
            return False

        wait_until(held, awaited, timeout_s, self.tail)

    def wait_for_step(self, step: int, timeout_s: float = RUN_DEADLINE_S) -> None:
        self.wait_until(lambda: any(row["step"] >= step for row in self.trained()), f"step {step}", timeout_s)

    def wait_for_words(self, words: str, timeout_s: float = RUN_DEADLINE_S) -> None:
        self.wait_until(lambda: words in self.tail(1_000_000), f"the words {words!r}", timeout_s)

    def processes(self, name: str = "") -> list[psutil.Process]:
        """Return the descendants with `name` in their title."""
        found = []
        for process in descendants(self.process.pid):
            with suppress(psutil.NoSuchProcess):
                if name in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def kill_one(self, name: str) -> None:
        """Kill one process with `name` in its title with SIGKILL."""
        found = self.processes(name)
        assert found, f"no process {name!r} among {[p.cmdline()[:2] for p in self.processes()]}"
        found[0].kill()

    def kill(self) -> None:
        """Kill all processes of the recipe with SIGKILL."""
        processes = self.processes()
        self.process.kill()
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=patient(30))
        self.process.wait(patient(30))

    def tail(self, characters: int = 6000) -> str:
        return self.log.read_text(errors="replace")[-characters:]


@contextmanager
def recipes_in(folder: Path, workplace: Path, address: str | None = None) -> Iterator[Callable[..., Recipe]]:
    """Start `python -m rl_plugins.recipes.<recipe>` with overrides, and kill at the end the recipes that still run.

    Args:
        folder: folder for the runs.
        workplace: folder with data and model.
        address: address of a Ray cluster; by default each recipe starts a Ray cluster.
    """
    recipes: list[Recipe] = []

    def start(
        recipe: str, name: str, *overrides: str, typed: str = "", new_interpreter: bool = False, **variables: str
    ) -> Recipe:
        """Start a recipe.

        Args:
            recipe: name of the recipe.
            name: name of the run.
            overrides: options after the common options of all recipes here.
            typed: text from the keyboard.
            new_interpreter: start new interpreters for the recipe and its workers, as a user does, and not forks with
                imported libraries.
            variables: environment variables.
        """
        log = folder / f"{name}-{len(recipes)}.log"
        command = [
            sys.executable, "-m", f"rl_plugins.recipes.{recipe}",
            f"run.name={name}", f"run.output_dir={folder}/outputs", f"model.path={workplace}/tiny",
            f"data.train_files=[{workplace}/data/train.parquet]", f"data.val_files=[{workplace}/data/test.parquet]",
            "data.max_prompt_tokens=26", "sampling.max_tokens=6", *overrides,
        ]  # fmt: skip
        # A test with Ray has variables of Ray in its process. A user's command must not inherit the variables.
        of_ray = ("RAY_ADDRESS", "PYTHONBREAKPOINT")
        environment = {key: value for key, value in os.environ.items() if key not in of_ray} | variables
        environment |= {"RAY_ADDRESS": address} if address else {}
        environment |= {VARIABLE: ""} if new_interpreter else {}
        keyboard = folder / "typed"
        keyboard.write_text(typed)
        with log.open("w") as output, keyboard.open() as keys:
            begin: Callable[..., ForkedCommand | subprocess.Popen[Any]] = start_command
            if new_interpreter:
                begin = partial(subprocess.Popen, preexec_fn=take_signals)
            process = begin(command, cwd=folder, stdin=keys, stdout=output, stderr=output, env=environment)
        recipes.append(Recipe(folder, process, log, name))
        return recipes[-1]

    try:
        yield start
    finally:
        for recipe in recipes:
            if recipe.process.poll() is None:
                recipe.kill()


@pytest.fixture
def start_recipe(workplace: Path, tmp_path: Path) -> Iterator[Callable[..., Recipe]]:
    """Recipes in the folder of the test."""
    with recipes_in(tmp_path, workplace) as start:
        yield start


@pytest.fixture(scope="session")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    from integration_tests.mlflow_server import Server

    server = Server(tmp_path_factory.mktemp("mlflow"))
    yield server
    server.close()


@pytest.fixture
def server(mlflow_server: Server) -> Server:
    """A running tracking server, also after a test that stopped the server."""
    mlflow_server.start()
    return mlflow_server
