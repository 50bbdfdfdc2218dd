"""Rollout phases: training gives the device to the rollout engine for sampling with the policy's weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar
from weakref import WeakMethod

import torch
from typing_extensions import get_protocol_members

from rl_plugins.errors import ConfigError, EngineLost
from rl_plugins.memory import MemoryChange
from rl_plugins.models.float8 import has_float8
from rl_plugins.ranks import broadcast
from rl_plugins.rollout.engine import HasPolicyCheck, RolloutEngine
from rl_plugins.strategies.contract import POLICY, Strategy
from rl_plugins.strategies.memory import TrainingMemory
from rl_plugins.weights.check import PROBE, check_log_probs, tolerance_of

T = TypeVar("T")

MAX_LOSSES = 5
"""A phase fails after this number of losses of rollout engines: then the samples themselves must cause the losses."""


class RolloutPhases:
    """Rollout engine of a strategy, and the phases for sampling.

    In a rollout phase, the device belongs to the rollout engine. The log of phases has the parts of a rollout phase:
    offload, update_weights, check_weights, rollout, reload.

    Args:
        engine: rollout engine; None for stages without sampling.
        strategy: owner of the model engines.
        memory: device memory to free while the rollout engine samples.
        make_engine: function that makes an engine at the first sampling if `engine` is None; None for an error.

    Attributes:
        engines_lost: number of lost and replaced rollout engines.
        on_closed: methods called after the end of a connection: all groups in the rollout engine are gone.

    Raises:
        ConfigError: `engine` is no rollout engine.

    Example:
        >>> responses = strategy.rollout_phases.run_sampling(
        ...     step, lambda engine: engine.generate(prompts, sampling, seeds)
        ... )
    """

    def __init__(
        self,
        engine: RolloutEngine | None,
        strategy: Strategy,
        memory: TrainingMemory,
        make_engine: Callable[[], RolloutEngine] | None = None,
    ) -> None:
        _check_is_engine(engine)
        self._make_engine = make_engine
        self._engine, self._strategy, self.memory = engine, strategy, memory
        self._is_given = engine is not None
        self._connected = False
        # True if the policy has not changed since the last update of the rollout engine's weights.
        self._is_current = False
        self._updates = 0
        # True after a loss. Engines that share the GPUs of the ranks start again when the GPUs are free; other engines
        # start again by themselves.
        self._engines_missing = False
        self.engines_lost = 0
        # Weak: a strategy would keep each stage, with its models.
        self.on_closed: list[WeakMethod[Callable[[], object]]] = []

    @property
    def engine(self) -> RolloutEngine:
        """The rollout engine.

        Raises:
            ConfigError: the strategy has no rollout engine.
        """
        if self._engine is None and self._make_engine is not None:
            self._engine = self._make_engine()
            self.connect()
        if self._engine is None:
            raise ConfigError(
                f"{type(self._strategy).__name__} has no rollout engine for sampling: "
                "pass rollout=VLLMRollout(...) or rollout=TransformersRollout(...)"
            )
        return self._engine

    def prepare(self, *, shared: bool = False) -> None:
        """Start the rollout engine, once, before the ranks use their devices. Collective.

        Args:
            shared: use the rollout engine of rank 0 on all ranks.

        Raises:
            ConfigError: the rollout engine lacks members of `RolloutEngine`.
        """
        if self._connected:
            return
        if shared:
            self._engine = broadcast(self._engine)
        if self._engine is not None:
            _check_members(self._engine)
            self._engine.prepare(self._strategy.ranks)

    def connect(self) -> None:
        """Connect this rank to the rollout engine, once. The next phase updates the weights: the model may be new.

        Raises:
            ConfigError: the rollout engine cannot sample from the policy.
        """
        self.weights_changed()
        if isinstance(self._engine, HasPolicyCheck):
            self._engine.check_policy(self._strategy.weight_source)
        if self._connected:
            return
        ranks = self._strategy.ranks
        if self._engine is not None:
            self._engine.connect(ranks.rank, ranks.world_size)
            self._connected = True

    def close(self) -> None:
        """Disconnect this rank from the rollout engine."""
        if self._engine is not None and self._connected:
            self._engine.close()
            self.end_connection()

    def end_connection(self) -> None:
        """Let the next `connect` connect anew, for another policy. The rollout engine stays."""
        self._connected = False
        if not self._is_given:
            # The engine is a copy of the policy before.
            self._engine = None
        for method in self.on_closed:
            if (forget := method()) is not None:
                forget()

    def weights_changed(self) -> None:
        """Let the next phase update the rollout engine's weights, because the policy has changed."""
        self._is_current = False

    def run_sampling(self, version: int, sample: Callable[[RolloutEngine], T]) -> T:
        """Run a function in a rollout phase, and again after an engine was lost. Collective.

        Args:
            version: version of the policy, to be stored in the samples.
            sample: function that submits and collects samples. Every rank calls it. It is called again after an
                engine was lost on any rank, so it must remember which samples it has already received.

        Returns:
            The result of `sample`.

        Raises:
            EngineLost: engines were lost `MAX_LOSSES` times.
        """
        cause: EngineLost | None = None
        for _ in range(MAX_LOSSES):
            with self.phase(version) as engine, self._strategy.phase_log.measure("rollout"):
                try:
                    result, lost = sample(engine), False
                except EngineLost as error:
                    lost, cause = True, error
                # The ranks agree before the rollout engine sleeps, because the engine may still sample for another
                # rank.
                lost_on_any_rank = self._strategy.ranks.any(lost)
            if not lost_on_any_rank:
                return result
            self._drop_lost_engines()
        raise lost_too_often() from cause

    @contextmanager
    def phase(self, version: int) -> Iterator[RolloutEngine]:
        """Give the device to the rollout engine, with the policy's current weights.

        The order of the steps limits the memory in use:

        1. Training frees the optimizer states.
        2. The rollout engine allocates memory for weights, and receives the policy's weights.
        3. Training frees the parameters.
        4. The rollout engine allocates the KV cache.

        Every release of memory is measured. Training keeps all memory if the rollout engine never sleeps, or if the
        device has room for both.

        Args:
            version: version of the policy, to be stored in the samples.

        Raises:
            MemoryNotFreed: a release freed less memory than expected.
            WeightsDiffer: a check of the update found other weights in the rollout engine than in the policy.
        """
        engine, log, memory = self.engine, self._strategy.phase_log, self.memory
        slept: MemoryChange | None = None
        self._make_room_for_weights(engine)
        expected_probe = self._update_and_check(engine, version)
        with log.measure("offload"):
            if engine.sleeps:
                self._free("offload parameters", memory.offload_parameters, memory.parameter_bytes())
            self._wake_up(engine, "kv_cache")
        if expected_probe is not None:
            with log.measure("check_weights"), suppress(EngineLost):
                log_probs, tolerance = expected_probe
                check_log_probs(log_probs, engine.prompt_log_probs(PROBE), max(tolerance, engine.log_prob_tolerance))
        failed = True
        try:
            yield engine
            failed = False
        finally:
            with log.measure("reload"):
                slept = engine.sleep()
                if engine.sleeps and not failed:
                    self._strategy.ranks.wait()
                memory.reload_parameters()
            # Not measured: a measured phase ends when the GPU is idle, and these copies run beside the next phase.
            memory.reload_optimizer()
            if not engine.keeps_weights:
                self.weights_changed()
        if slept is not None:
            log.note("engine_awake", slept.before)
            log.note("engine_asleep", slept.after)
            slept.check("sleep of the rollout engine")

    def _make_room_for_weights(self, engine: RolloutEngine) -> None:
        """Free the optimizer states, and let the rollout engine allocate its weights. Start lost engines before."""
        memory, restarts = self.memory, self._engines_missing and engine.shares_gpus
        if restarts:
            self._restart_engines(engine)
        self._engines_missing = False
        with self._strategy.phase_log.measure("offload"):
            if engine.sleeps and not restarts:
                memory.measure_room(self._strategy.phase_log.device, engine.gpu_share)
                # If parameters leave one rank, all ranks gather them again in the next pass.
                memory.crowded = self._strategy.ranks.any(memory.crowded)
                self._free("offload optimizer", memory.offload_optimizer, memory.optimizer_bytes())
            self._wake_up(engine, "weights")

    def _restart_engines(self, engine: RolloutEngine) -> None:
        """Start lost engines on the GPUs of the ranks, while training holds no memory there. Collective."""
        memory = self.memory
        # Also for an engine that never sleeps: vLLM needs its whole share of a GPU at the start.
        memory.crowded = True
        memory.offload_optimizer()
        memory.offload_parameters()
        memory.release_unused(self._strategy.phase_log.device)
        self._strategy.ranks.wait()
        engine.prepare(self._strategy.ranks)
        memory.reload_parameters()
        # A sleeping engine allocates weights next, so the optimizer states stay on the host.
        if not engine.sleeps:
            memory.reload_optimizer()

    def _update_and_check(self, engine: RolloutEngine, version: int) -> tuple[list[float], float] | None:
        """Update the rollout engine's weights if the policy has changed; check every `check_updates`-th update.

        Returns:
            The policy's log-probs of the probe and the tolerance of the comparison; None without a check.
        """
        if self._is_current:
            return None
        self._send_weights(engine, version)
        self._is_current = True
        self._updates += 1
        if not engine.check_updates or self._updates % engine.check_updates:
            return None
        with self._strategy.phase_log.measure("check_weights"):
            # A rollout engine lost here is replaced before sampling.
            with suppress(EngineLost):
                engine.check_weights(self._strategy.weight_source())
            # The engine does not round as 8-bit products do.
            return None if has_float8(self._strategy.model_engine(POLICY)) else self._probe()

    def _send_weights(self, engine: RolloutEngine, version: int) -> None:
        cause: EngineLost | None = None
        for _ in range(MAX_LOSSES):
            with self._strategy.phase_log.measure("update_weights"):
                try:
                    engine.update_weights(self._strategy.weight_source(), version)
                    lost = False
                except EngineLost as error:
                    lost, cause = True, error
                lost_on_any_rank = self._strategy.ranks.any(lost)
            if not lost_on_any_rank:
                return
            self._drop_lost_engines()
            self._make_room_for_weights(engine)
        raise lost_too_often() from cause

    def _drop_lost_engines(self) -> None:
        self.engines_lost += self.engine.drop_lost_engines()
        self._engines_missing = True
        self.weights_changed()

    def _wake_up(self, engine: RolloutEngine, memory: str) -> None:
        """Let the rollout engine allocate memory between two waits for all ranks.

        A rank may wake an engine on the device of another rank, and may use an engine that another rank wakes.
        """
        if engine.sleeps:
            # Also if nothing moved to the host.
            self.memory.release_unused(self._strategy.phase_log.device)
            self._strategy.ranks.wait()
        engine.wake_up([memory])
        if engine.sleeps:
            self._strategy.ranks.wait()

    def _free(self, phase: str, offload: Callable[[], None], expected: int) -> None:
        before = self._strategy.phase_log.bytes_in_use()
        offload()
        MemoryChange(before, self._strategy.phase_log.bytes_in_use(), expected).check(phase)

    @torch.no_grad()
    def _probe(self) -> tuple[list[float], float]:
        """Return the policy's log-probs of the probe's tokens, and the tolerance of the comparison. Collective."""
        ids_1T = torch.tensor([PROBE], device=self._strategy.phase_log.device)
        logits_TV = self._strategy.model_engine(POLICY)(input_ids=ids_1T).logits[0, :-1]
        log_probs_T = logits_TV.float().log_softmax(-1).gather(-1, ids_1T[0, 1:, None]).squeeze(-1)
        return log_probs_T.tolist(), tolerance_of(logits_TV.dtype, logits_TV.device.type)


def _check_is_engine(engine: object) -> None:
    """Refuse a name, a class or a configuration in the place of an engine.

    Raises:
        ConfigError: the object is no rollout engine.
    """
    if engine is not None and (isinstance(engine, type) or not hasattr(engine, "update_weights")):
        raise ConfigError(
            f"rollout={repr(engine)[:80]} is no rollout engine: pass rollout=VLLMRollout(...) or "
            "rollout=TransformersRollout(...)"
        )


def _check_members(engine: RolloutEngine) -> None:
    # Some members are used after the loss of an engine only, hours after the start.
    lacking = sorted(get_protocol_members(RolloutEngine).difference(dir(engine)))
    if lacking:
        raise ConfigError(
            f"the rollout engine {type(engine).__name__} lacks {', '.join(lacking)}: define all methods and properties "
            "of rl_plugins.rollout.engine.RolloutEngine"
        )


def lost_too_often() -> EngineLost:
    """Return the error after `MAX_LOSSES` losses of rollout engines in one phase."""
    return EngineLost(
        f"rollout engines were lost {MAX_LOSSES} times in one phase: read the engines' output for the cause"
    )
