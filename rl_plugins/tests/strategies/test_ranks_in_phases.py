"""Memory phases of two ranks, one of them late. An engine uses the devices of both ranks, and must wait for both.

The ranks are threads. Rank 1 offloads only after rank 0 has gone on as far as possible, and the engine sleeps after
rank 1 has gone on. Every run then shows a missing wait of the ranks for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event
from typing import Any, cast

from typing_extensions import override

from rl_plugins.memory import MemoryChange
from rl_plugins.ranks import Ranks
from rl_plugins.rollout.engine import RolloutEngine
from rl_plugins.strategies.memory import TrainingMemory
from rl_plugins.strategies.phase_log import PhaseLog
from rl_plugins.strategies.rollout_phases import RolloutPhases
from rl_plugins.tests.patience import patient
from rl_plugins.tests.stages import canned

DEADLINE_S = patient(30)


class Devices:
    """The devices of two ranks, used by one engine, and a log of the errors."""

    def __init__(self) -> None:
        self.meeting = Barrier(2, timeout=DEADLINE_S)
        # Rank 0 has offloaded, and waits for rank 1 or has gone on without a wait.
        self.rank_0_passed = {"optimizer": Event(), "parameters": Event()}
        self.rank_1_passed_sleep = Event()
        self.held_by_rank_1 = {"optimizer", "parameters"}
        self.engine_is_awake = False
        self.log: list[str] = []


class MeetingRank(Ranks):
    """A rank with a meeting of both ranks."""

    def __init__(self, rank: int, meet: Any) -> None:
        super().__init__(rank, 2)
        object.__setattr__(self, "meet", meet)

    @override
    def any(self, flag: bool) -> bool:
        self.meet()  # type: ignore[attr-defined]
        return flag


class Side(canned.CannedRollout):
    """One rank's side of the engine. Only the side of rank 0 calls the engine."""

    def __init__(self, rank: int, devices: Devices) -> None:
        super().__init__()
        self.rank, self.devices, self.asleep = rank, devices, False
        self.memory = LateMemory(rank, devices)

    @override
    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        if self.rank == 0:
            devices = self.devices
            devices.log.append(f"{tags} awake while rank 1 holds {sorted(devices.held_by_rank_1)}")
            devices.engine_is_awake = True
            self.memory.pass_on()

    @override
    def sleep(self) -> MemoryChange | None:
        self.asleep = True
        if self.rank == 0:
            assert self.devices.rank_1_passed_sleep.wait(DEADLINE_S), "rank 1 did not come to the end of the phase"
            self.devices.engine_is_awake = False
        return None

    def meet(self) -> None:
        """Meet the other rank."""
        self.memory.pass_on()
        if self.asleep and self.rank == 1:
            self.devices.rank_1_passed_sleep.set()
        self.devices.meeting.wait()


class LateMemory(TrainingMemory):
    """The memory of a rank. Rank 1 offloads after rank 0 has gone on as far as possible."""

    def __init__(self, rank: int, devices: Devices) -> None:
        super().__init__()
        self._rank, self._devices, self._offloaded = rank, devices, ""

    def pass_on(self) -> None:
        """Record that rank 0 goes on after an offload."""
        if self._rank == 0 and self._offloaded:
            self._devices.rank_0_passed[self._offloaded].set()

    def _offload(self, part: str) -> None:
        self._offloaded = part
        if self._rank == 1:
            assert self._devices.rank_0_passed[part].wait(DEADLINE_S), f"rank 0 did not offload the {part}"
            self._devices.held_by_rank_1.discard(part)

    @override
    def offload_optimizer(self) -> None:
        self._offload("optimizer")

    @override
    def offload_parameters(self) -> None:
        self._offload("parameters")

    @override
    def reload_parameters(self) -> None:
        if self._rank == 1:
            self._devices.log.append(f"rank 1 reloads while the engine is {'awake' * self._devices.engine_is_awake}")
            self._devices.rank_1_passed_sleep.set()


class Strategy:
    """The training side of a rank."""

    def __init__(self, rank: int, devices: Devices) -> None:
        side = Side(rank, devices)
        self.phase_log = PhaseLog()
        self.ranks = MeetingRank(rank, side.meet)
        self.rollout_phases = RolloutPhases(cast(RolloutEngine, side), cast(Any, self), side.memory)

    def weight_source(self, name: str = "policy") -> Any:
        return []


def roll_out(rank: int, devices: Devices) -> None:
    with Strategy(rank, devices).rollout_phases.phase(1):
        pass


def test_engine_and_ranks_wait_until_memory_is_free() -> None:
    devices = Devices()
    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(roll_out, rank, devices) for rank in range(2)]:
            done.result(DEADLINE_S)
    assert devices.log == [
        "['weights'] awake while rank 1 holds ['parameters']",
        "['kv_cache'] awake while rank 1 holds []",
        "rank 1 reloads while the engine is ",
    ]
