"""Live vLLM engines with processes that end or hang: weight updates and samples report this, and the engines return.

The tests use two engines with gloo, as on other machines, and then one engine of two processes.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from torch import Tensor

from integration_tests.resident import change, inside, load_policy, log_probs_of
from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.errors import EngineLost
from rl_plugins.rollout.engine import GroupRequest
from rl_plugins.rollout.vllm.client import VLLMRollout
from rl_plugins.rollout.vllm.config import VLLMConfig
from rl_plugins.rollout.vllm.engine_files import ENGINE_FOLDERS
from rl_plugins.tests.patience import patient, wait_until
from rl_plugins.weights.check import PROBE
from rl_plugins.weights.source import ModuleWeightSource

pytestmark = [pytest.mark.extended, pytest.mark.usefixtures("running_ray")]

STALL_S = patient(10)
SHORT = SamplingConfig(num_samples=2, max_tokens=3)


class Source(ModuleWeightSource):
    """Weights of a policy; an optional function runs after half of the weights."""

    happens: Callable[[], None] | None = None

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        weights = list(super().__iter__())
        for number, weight in enumerate(weights):
            if number == len(weights) // 2 and self.happens:
                self.happens()
            yield weight


@pytest.fixture
def policy(workplace: Path) -> Any:
    return load_policy(workplace)


@pytest.fixture(scope="module")
def engines(running_ray: Any, workplace: Path) -> Iterator[VLLMRollout]:
    """Two engines. Tests may end the processes, and Ray starts new engines."""
    config = VLLMConfig(str(workplace / "tiny"), max_model_len=64, transport="gloo", bucket_mb=1)
    rollout = VLLMRollout(config, num_engines=2)
    rollout.start()
    yield rollout
    rollout.stop()


@pytest.fixture(scope="module")
def tensor_parallel_engines(running_ray: Any, workplace: Path) -> Iterator[dict[str, VLLMRollout]]:
    """An engine of two processes for each transport. Tests may end the processes."""
    config = VLLMConfig(str(workplace / "tiny"), max_model_len=64, tensor_parallel_size=2, bucket_mb=1)
    rollouts = {
        "gloo": VLLMRollout(replace(config, transport="gloo")),
        "shared_memory": VLLMRollout(replace(config, transport="shared_memory")),
    }
    for rollout in rollouts.values():
        rollout.start()
    yield rollouts
    for rollout in rollouts.values():
        rollout.stop()


@pytest.fixture
def connect(engines: VLLMRollout) -> Iterator[Callable[..., VLLMRollout]]:
    """Make clients of both engines, or of the first engine. The engines run, without earlier clients."""
    clients: list[VLLMRollout] = []

    def connect(num_engines: int = 2, stall_timeout_s: float = patient(60)) -> VLLMRollout:
        config = replace(engines.config, stall_timeout_s=stall_timeout_s)
        clients.append(VLLMRollout(config, name=engines.name, num_engines=num_engines))
        clients[-1].connect(0, 1)
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


def assert_engines_have(policy: Any, rollout: VLLMRollout, *engines: int) -> None:
    assert rollout._fleet.living == list(engines)
    for engine in engines:
        ask = rollout._fleet.begin(engine, "prompt_log_probs", PROBE, timeout_s=patient(60), phase="test")
        assert ask() == pytest.approx(log_probs_of(policy, PROBE), abs=1e-4)


def process_of(rollout: VLLMRollout, engine: int) -> psutil.Process:
    return psutil.Process(int(inside(rollout, lambda _: os.getpid(), engine)))


def kill_and_wait_until_ray_has_started_another(rollout: VLLMRollout, engine: int) -> None:
    before = process_of(rollout, engine)
    before.kill()

    def another() -> bool:
        try:
            return process_of(rollout, engine) != before
        except ray.exceptions.RayActorError:
            return False

    wait_until(another, "another process of the engine", 120)


def update_until_both_have(policy: Any, rollout: VLLMRollout) -> None:
    """Update until the returning engine has the weights, too."""

    def updated() -> bool:
        # Superfluous updates would slow down the starting engine.
        ray.wait(list(rollout._fleet.returning.values()), timeout=2)
        rollout.update_weights(ModuleWeightSource(policy), 3)
        return rollout.num_living == 2

    wait_until(updated, "the lost engine to come back", 120)
    assert_engines_have(policy, rollout, 0, 1)


def test_update_weights_over_gloo_gives_both_engines_the_weights(
    connect: Callable[..., VLLMRollout], policy: Any
) -> None:
    rollout, source = connect(), ModuleWeightSource(policy)
    for version in (1, 2):
        change(policy, seed=version)
        rollout.update_weights(source, version)
        assert_engines_have(policy, rollout, 0, 1)


# Engines of several processes start while these tests wait for deadlines.
@pytest.mark.usefixtures("tensor_parallel_engines")
@pytest.mark.parametrize(
    ("what", "stall_timeout_s", "lost"),
    # Only the deadline ends the wait for a hanging process; the end of a process is noticed at once.
    [(signal.SIGKILL, patient(200), 0), (signal.SIGSTOP, STALL_S, 1)],
    ids=["first-dies", "second-hangs"],
)
def test_engine_lost_in_a_weight_update_is_replaced_while_the_other_samples(
    connect: Callable[..., VLLMRollout], policy: Any, what: signal.Signals, stall_timeout_s: float, lost: int
) -> None:
    rollout, source = connect(stall_timeout_s=stall_timeout_s), Source(policy)
    process = process_of(rollout, lost)
    rollout.update_weights(source, 1)
    change(policy, seed=2)
    source.happens = lambda: process.send_signal(what)
    try:
        with pytest.raises(EngineLost):
            rollout.update_weights(source, 2)
        assert rollout.drop_lost_engines() == 1
        rollout.update_weights(ModuleWeightSource(policy), 2)
        assert_engines_have(policy, rollout, 1 - lost)
        sampled = rollout.generate([[5, 6], [7, 8]], SamplingConfig(max_tokens=4), [1, 2])
        assert set(sampled.policy_versions) == {2}

        change(policy, seed=3)
        update_until_both_have(policy, rollout)
        assert not process.is_running()
    finally:
        if process.is_running():
            process.kill()


def test_engine_that_ray_has_restarted_is_lost_in_generate_and_in_update_weights(
    connect: Callable[..., VLLMRollout], policy: Any
) -> None:
    rollout = connect()
    rollout.update_weights(ModuleWeightSource(policy), 1)
    kill_and_wait_until_ray_has_started_another(rollout, 0)
    # The new process has the weights of a new engine, and must not sample from these weights.
    with pytest.raises(EngineLost):
        rollout.generate([[5, 6], [7, 8]], SamplingConfig(max_tokens=4), [1, 2])
    assert rollout.drop_lost_engines() == 1
    update_until_both_have(policy, rollout)

    kill_and_wait_until_ray_has_started_another(rollout, 0)
    with pytest.raises(EngineLost):
        rollout.update_weights(ModuleWeightSource(policy), 3)
    assert rollout.drop_lost_engines() == 1
    update_until_both_have(policy, rollout)


def test_fetch_returns_none_for_groups_of_a_lost_engine_and_submit_samples_again(
    connect: Callable[..., VLLMRollout], policy: Any
) -> None:
    rollout, request = connect(num_engines=1), GroupRequest(50, [55, 6, 7], seed=50)
    rollout.update_weights(ModuleWeightSource(policy), 1)
    rollout.submit([request], SHORT)
    held = list(rollout.collect([50], 1).values())
    before = process_of(rollout, 0)
    before.kill()
    before.wait(patient(60))
    assert rollout.fetch(held) == [None]
    assert rollout.drop_lost_engines() == 1
    # The returning engine gets no requests.
    assert rollout.fetch(held) == [None]
    rollout.update_weights(ModuleWeightSource(policy), 9)
    # The new process has never had the groups.
    assert rollout.fetch(held) == [None]
    rollout.submit([request], SHORT)
    (again,) = rollout.fetch(list(rollout.collect([50], 1).values()))
    assert again is not None and again.lengths.tolist() == [3, 3]


def test_tensor_parallel_engine_has_shared_memory_without_names_and_sockets_in_a_folder(
    tensor_parallel_engines: dict[str, VLLMRollout],
) -> None:
    """Nobody removes the files of a killed engine, except for the folder."""
    rollout = tensor_parallel_engines["shared_memory"]
    rollout.connect(0, 1)
    process = process_of(rollout, 0)
    processes = [process, *process.children(recursive=True)]
    maps = "".join(Path(f"/proc/{process.pid}/maps").read_text() for process in processes)
    assert not re.findall(r"/dev/shm/(?:psm_|vllm_dist_).*(?<!\(deleted\))$", maps, re.MULTILINE)
    folder = Path(inside(rollout, lambda _: os.environ["VLLM_RPC_BASE_PATH"]))
    assert folder.name.startswith(ENGINE_FOLDERS) and any(file.is_socket() for file in folder.iterdir())
    assert any(file.name.startswith("vllm_dist_") for file in folder.iterdir())


@pytest.mark.parametrize("transport", ["gloo", "shared_memory"])
def test_update_weights_reaches_and_needs_both_processes_of_a_tensor_parallel_engine(
    tensor_parallel_engines: dict[str, VLLMRollout], policy: Any, transport: str
) -> None:
    rollout = tensor_parallel_engines[transport]
    rollout.connect(0, 1)
    for version in (1, 2):
        change(policy, seed=version)
        rollout.update_weights(ModuleWeightSource(policy), version)
        assert_engines_have(policy, rollout, 0)

    def second() -> list[psutil.Process]:
        processes = process_of(rollout, 0).children(recursive=True)
        return [process for process in processes if "Worker_TP1" in " ".join(process.cmdline())]

    # A process may be missing in a list which psutil makes while other processes start and end.
    wait_until(second, "the second process of the engine")
    second()[0].kill()
    with pytest.raises(EngineLost):
        rollout.update_weights(ModuleWeightSource(policy), 3)
    assert rollout.drop_lost_engines() == 1
    rollout.update_weights(ModuleWeightSource(policy), 3)
    assert_engines_have(policy, rollout, 0)
