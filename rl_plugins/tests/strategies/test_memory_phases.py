"""The order of the memory phases, the freed memory of each, and the checks of weights: without any model."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from typing_extensions import override

from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.errors import EngineLost
from rl_plugins.memory import MemoryChange, MemoryNotFreed
from rl_plugins.ranks import Ranks
from rl_plugins.rollout.engine import Generations, RolloutEngine
from rl_plugins.rollout.transformers_engine import SynchronousGroups
from rl_plugins.strategies import memory
from rl_plugins.strategies.memory import TrainingMemory
from rl_plugins.strategies.phase_log import PhaseLog
from rl_plugins.strategies.rollout_phases import RolloutPhases
from rl_plugins.tests.ranks import run_ranks
from rl_plugins.weights.check import PROBE, WeightsDiffer
from rl_plugins.weights.source import WeightSource

GIB = 2**30
SAMPLING = SamplingConfig(max_tokens=1)


class RecordingEngine(SynchronousGroups):
    """An engine that records every call in a list shared with the strategy."""

    log_prob_tolerance = 1e-3

    def __init__(
        self,
        *,
        keeps_weights: bool = True,
        check_updates: int = 0,
        slept: MemoryChange | None = None,
        sleeps: bool = True,
        shares_gpus: bool = False,
    ) -> None:
        super().__init__()
        self.sleeps, self.shares_gpus = sleeps, shares_gpus
        self.calls: list[str] = []
        self.keeps_weights, self.check_updates, self.slept = keeps_weights, check_updates, slept
        self.gap = 0.0

    def prepare(self, ranks: Ranks) -> None:
        self.calls.append("prepare")

    def connect(self, rank: int, world_size: int) -> None:
        self.calls.append("connect")

    @override
    def generate(self, prompts: list[list[int]], sampling: SamplingConfig, seeds: list[int] | None) -> Generations:
        self.calls.append("generate")
        return Generations.from_responses([], [], [], 0)

    def update_weights(self, source: WeightSource, version: int) -> None:
        self.calls.append(f"update_weights {version}")

    def check_weights(self, source: WeightSource) -> None:
        self.calls.append("check_weights")

    def prompt_log_probs(self, prompt: list[int]) -> list[float]:
        self.calls.append("prompt_log_probs")
        # The model `Policy` returns the same for every token.
        return [-(torch.tensor(10.0).log().item()) + self.gap for _ in prompt[1:]]

    def sleep(self) -> MemoryChange | None:
        self.calls.append("sleep")
        return self.slept

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        self.calls.append(f"wake_up {','.join(tags or [])}")

    def close(self) -> None:
        self.calls.append("close")


class Memory(PhaseLog):
    """A device whose memory in use is a number."""

    in_use = 10 * GIB

    @override
    def bytes_in_use(self) -> int:
        return self.in_use


class NotingRanks(Ranks):
    """One rank, which records the agreements of ranks."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        object.__setattr__(self, "calls", calls)

    @override
    def any(self, flag: bool) -> bool:
        self.calls.append("agree")  # type: ignore[attr-defined]
        return flag


class Policy(torch.nn.Module):
    """A model with the same output for every token."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self.calls = calls

    def forward(self, input_ids: torch.Tensor) -> Any:
        self.calls.append("policy forward")
        return SimpleNamespace(logits=torch.zeros(1, len(PROBE), 10))


class Offloaded(TrainingMemory):
    """Training memory with 4 GiB of optimizer states and 3 of parameters to offload."""

    def __init__(self, device: Memory, calls: list[str], stuck: str) -> None:
        self.crowded_calls: list[bool] = []
        self._device, self._calls, self._stuck = device, calls, stuck

    def _free(self, what: str, nbytes: int) -> None:
        self._calls.append(f"offload {what}")
        self._device.in_use -= 0 if what == self._stuck else nbytes

    @override
    def offload_optimizer(self) -> None:
        self.crowded_calls.append(self.crowded)
        self._free("optimizer", 4 * GIB)

    @override
    def offload_parameters(self) -> None:
        self._free("parameters", 3 * GIB)

    @override
    def release_unused(self, device: torch.device) -> None:
        self._calls.append("release unused")

    @override
    def optimizer_bytes(self) -> int:
        return 4 * GIB

    @override
    def parameter_bytes(self) -> int:
        return 3 * GIB

    @override
    def reload_parameters(self) -> None:
        self._calls.append("reload parameters")
        self._device.in_use += 3 * GIB

    @override
    def reload_optimizer(self) -> None:
        # A measured phase would wait for the copies.
        assert self._device.current is None
        self._calls.append("reload optimizer")
        self._device.in_use = 10 * GIB


class Strategy:
    """The training side of a rollout phase."""

    def __init__(self, engine: RecordingEngine, *, stuck: str = "") -> None:
        self.calls = engine.calls
        self.phase_log: PhaseLog = (device := Memory())
        self.ranks: Ranks = NotingRanks(engine.calls)
        self.rollout_phases = RolloutPhases(engine, cast(Any, self), Offloaded(device, engine.calls, stuck))

    def weight_source(self, name: str = "policy") -> Any:
        return []

    def model_engine(self, name: str) -> torch.nn.Module:
        return Policy(self.calls)


def roll_out(strategy: Strategy, version: int = 1) -> list[str]:
    """Run one rollout; return its calls."""
    strategy.calls.clear()
    with strategy.rollout_phases.phase(version) as engine:
        engine.generate([], SAMPLING, None)
    return list(strategy.calls)


RELOAD = ["reload parameters", "reload optimizer"]
# Ranks agree on the room of all devices, and on the end of each phase: an engine may be on the device of another rank.
FIRST = [
    "agree", "offload optimizer", "release unused", "agree", "wake_up weights", "agree", "update_weights 1", "agree",
]  # fmt: skip
REST = [
    "offload parameters", "release unused", "agree", "wake_up kv_cache", "agree", "generate", "sleep", "agree", *RELOAD,
]  # fmt: skip


def connect(rank: int, shared: bool) -> float:
    """The number of the rank whose engine this rank uses."""
    engine = RecordingEngine()
    engine.gap = rank
    strategy = Strategy(engine)
    for _ in range(2):
        strategy.rollout_phases.prepare(shared=shared)
        strategy.rollout_phases.connect()
    connected = strategy.rollout_phases.engine
    assert isinstance(connected, RecordingEngine) and connected.calls == ["prepare", "connect"]
    return connected.gap


@pytest.mark.parametrize(("shared", "engines"), [(False, [0, 1]), (True, [0, 0])])
def test_connect_shares_the_engine_of_rank_0_if_asked(shared: bool, engines: list[int]) -> None:
    assert [engine for engine, _ in run_ranks(connect, shared)] == engines


def test_run_sampling_lets_the_engine_sleep_after_all_ranks_agree() -> None:
    strategy = Strategy(RecordingEngine())
    strategy.rollout_phases.run_sampling(1, lambda engine: engine.generate([], SAMPLING, None))
    assert strategy.calls[-6:] == ["generate", "agree", "sleep", "agree", *RELOAD]


RESTART = ["offload optimizer", "offload parameters", "release unused", "agree", "prepare", "reload parameters"]
# The optimizer states are still on the host.
FIRST_AFTER_RESTART = FIRST[2:]


def sample_again_after_a_loss(strategy: Strategy) -> None:
    """Sample in two rollout phases. An engine is lost in the first phase."""
    losses = iter([True, False])

    def sample(engine: RolloutEngine) -> None:
        if next(losses):
            raise EngineLost("killed")

    strategy.rollout_phases.run_sampling(1, sample)


@pytest.mark.parametrize("sleeps", [True, False])
def test_run_sampling_starts_lost_engines_on_devices_without_memory_of_training(sleeps: bool) -> None:
    strategy = Strategy(RecordingEngine(sleeps=sleeps, shares_gpus=True))
    sample_again_after_a_loss(strategy)
    again = strategy.calls[strategy.calls.index("prepare") - 4 :]
    started = RESTART + (FIRST_AFTER_RESTART if sleeps else ["reload optimizer"])
    assert again[: len(started)] == started
    assert strategy.calls.count("prepare") == 1


@pytest.mark.parametrize("sleeps", [True, False])
def test_memory_of_training_moves_as_in_each_phase_when_lost_engines_have_separate_gpus(sleeps: bool) -> None:
    strategy = Strategy(RecordingEngine(sleeps=sleeps))
    sample_again_after_a_loss(strategy)
    assert "prepare" not in strategy.calls
    assert strategy.calls.count("offload optimizer") == (2 if sleeps else 0)


def test_lost_engines_start_on_a_crowded_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM needs its share while it starts, and training frees all memory. In a later phase there may be room."""
    shares: list[float] = []

    def has_room(device: torch.device, share: float) -> bool:
        shares.append(share)
        return True

    monkeypatch.setattr(memory, "_has_room", has_room)
    strategy = Strategy(RecordingEngine(shares_gpus=True))
    monkeypatch.setattr(strategy.rollout_phases.engine, "gpu_share", 0.25)
    sample_again_after_a_loss(strategy)
    training: Any = strategy.rollout_phases.memory
    assert training.crowded_calls == [False, True]
    roll_out(strategy)
    assert training.crowded_calls == [False, True, False]
    assert shares == [pytest.approx(0.3)] * 2
    # On another rank there is none.
    monkeypatch.setattr(strategy.ranks, "any", lambda value: True)
    roll_out(strategy)
    assert training.crowded_calls == [False, True, False, True]


def test_rollout_phase_starts_engines_that_are_lost_in_an_update() -> None:
    class Engine(RecordingEngine):
        losses = iter([True, False])

        @override
        def update_weights(self, source: WeightSource, version: int) -> None:
            super().update_weights(source, version)
            if next(self.losses):
                raise EngineLost("killed")

    strategy = Strategy(Engine(shares_gpus=True))
    assert roll_out(strategy) == FIRST + RESTART + FIRST_AFTER_RESTART + REST


def test_rollout_phase_offloads_updates_and_reloads_in_order() -> None:
    strategy = Strategy(RecordingEngine())
    assert roll_out(strategy) == FIRST + REST
    # The weights are still there.
    assert roll_out(strategy) == FIRST[:6] + REST
    strategy.rollout_phases.weights_changed()
    assert roll_out(strategy) == FIRST + REST
    assert set(strategy.phase_log.drain()) == {
        f"{kind}/{phase}" for kind in ("time", "memory") for phase in ("offload", "update_weights", "reload")
    }


def test_rollout_phase_updates_weights_each_time_for_an_engine_without_keeps_weights() -> None:
    strategy = Strategy(RecordingEngine(keeps_weights=False))
    assert roll_out(strategy) == roll_out(strategy) == FIRST + REST


def test_rollout_phase_logs_the_memory_change_of_sleep() -> None:
    strategy = Strategy(RecordingEngine(slept=MemoryChange(3 * GIB, GIB, 2 * GIB)))
    roll_out(strategy)
    metrics = strategy.phase_log.drain()
    assert (metrics["memory/engine_awake"], metrics["memory/engine_asleep"]) == (3, 1)
    assert strategy.phase_log.drain() == {}


@pytest.mark.parametrize("what", ["optimizer", "parameters"])
def test_rollout_phase_raises_when_offload_frees_nothing(what: str) -> None:
    strategy = Strategy(RecordingEngine(), stuck=what)
    with pytest.raises(MemoryNotFreed, match=rf"phase 'offload {what}' freed 0 MiB instead of"):
        roll_out(strategy)
    # The engine does not take memory that was not freed.
    assert "wake_up kv_cache" not in strategy.calls and "generate" not in strategy.calls


def test_rollout_phase_raises_after_reload_when_sleep_frees_nothing() -> None:
    strategy = Strategy(RecordingEngine(slept=MemoryChange(3 * GIB, 3 * GIB, 2 * GIB)))
    with pytest.raises(MemoryNotFreed, match=r"phase 'sleep of the rollout engine' freed 0 MiB instead of 2048 MiB"):
        roll_out(strategy)
    assert strategy.calls[-4:] == ["sleep", "agree", *RELOAD]


def test_check_updates_of_2_checks_each_second_update() -> None:
    strategy = Strategy(RecordingEngine(check_updates=2))
    assert roll_out(strategy) == FIRST + REST
    strategy.rollout_phases.weights_changed()
    checked = [*FIRST, "check_weights", "policy forward", *REST[:5], "prompt_log_probs", *REST[5:]]
    assert roll_out(strategy) == checked
    assert roll_out(strategy) == FIRST[:6] + REST
    strategy.rollout_phases.weights_changed()
    assert roll_out(strategy) == FIRST + REST


@pytest.mark.parametrize("gap", [0.1, float("nan")])
def test_check_updates_raises_when_log_probs_differ(gap: float) -> None:
    engine = RecordingEngine(check_updates=1)
    engine.gap = gap
    with pytest.raises(WeightsDiffer, match=r"log-probs of policy and rollout engine differ by"):
        roll_out(Strategy(engine))
    assert "generate" not in engine.calls
