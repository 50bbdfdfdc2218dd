"""What stages and callbacks may ask of a strategy, whatever shards the models.

A stage names its models in `engine_modules()`; the strategy makes an *engine* of each: trainable ones (those that an
optimizer of `configure_optimizers` holds) get their own sharding, optimizer and clipping; frozen ones are only run.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from types import MappingProxyType
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from rl_plugins.errors import ConfigError
from rl_plugins.rollout.engine import EngineLost, RolloutEngine
from rl_plugins.rollout.memory import MemoryChange
from rl_plugins.rollout.weight_check import PROBE, check_log_probs, tolerance_of
from rl_plugins.rollout.weights import WeightSource
from rl_plugins.strategies.phases import PhaseLog

POLICY = "policy"
CRITIC = "critic"
REFERENCE = "reference"
REWARD_MODEL = "reward_model"
TEACHER = "teacher"

T = TypeVar("T")

# In one phase of a step; beyond it something is wrong with what the engines are given to do.
MOST_LOSSES = 5


@runtime_checkable
class HasEngines(Protocol):
    """A LightningModule whose models become named engines."""

    def engine_modules(self) -> dict[str, nn.Module]:
        """Name to model, after `configure_model`."""

    def gradient_clip(self, engine: str) -> float:
        """Bound on the global gradient norm of a trained engine; 0 for no bound."""


class RolloutStrategy(Protocol):
    """The contract between stages and strategies.

    Attributes:
        restored: engine to what the checkpoint that was loaded has given it, in words.
        engines_lost: rollout engines that were lost and replaced so far.
    """

    phases: PhaseLog
    restored: Mapping[str, str]
    engines_lost: int

    def engine(self, name: str) -> Any:
        """The callable that runs model `name`."""

    def sharded_init(self, frozen: str | None = None) -> AbstractContextManager[None]:
        """Models loaded inside with `from_pretrained` come into being in shards.

        Args:
            frozen: engine that the model is for, if that is only run: shards come into being where it keeps them.
        """

    def accumulate_gradients(self, name: str, *, last: bool) -> None:
        """Say before each backward pass whether it is the last one before the optimizer step of engine `name`."""

    def optimizer_index(self, name: str) -> int:
        """Where the optimizer of engine `name` stands in the strategy's `optimizers`."""

    def gradient_norm(self, name: str) -> float | None:
        """Global norm before clipping of the last step's gradient, where the engine knows it."""

    def weight_source(self, name: str = POLICY) -> WeightSource:
        """The engine's weights, for a rollout engine or an export."""

    def rollout_phase(self, version: int) -> AbstractContextManager[RolloutEngine]:
        """Training gives way to sampling with the policy's current weights."""

    def sampled(self, version: int, sample: Callable[[RolloutEngine], T]) -> T:
        """What `sample` gives in a rollout phase; it is called again when an engine was lost. Collective."""

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Element-wise sum of a small tensor over all ranks."""

    def max_over_ranks(self, values: Tensor) -> Tensor:
        """Element-wise maximum of a small tensor over all ranks."""

    def on_any_rank(self, happened: bool) -> bool:
        """Whether it has happened on one rank at least. Collective."""

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, in their order, on every rank. Collective."""

    def exchange(self, parcels: list[Any]) -> list[Any]:
        """Give `parcels[i]` to rank i; returns what every rank gave to this one, in their order. Collective."""

    def shards(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Name and this rank's part of each parameter of engine `name`. Collective.

        Whoever writes to the parts of the policy says so with `weights_changed`.
        """

    def weights_changed(self) -> None:
        """The rollout engine's copy of the weights is out of date."""

    def blend_weights(self, source: str, target: str, keep: float) -> None:
        """The weights of engine `target` become `keep * target + (1 - keep) * source`, shard by shard. Collective."""


def lost_too_often() -> EngineLost:
    """What ends a run whose engines are lost `MOST_LOSSES` times in one phase."""
    return EngineLost(f"rollout engines were lost {MOST_LOSSES} times in one phase: their output says why")


class RolloutMixin:
    """The rollout side of a strategy: owns the engine's connection and the order of the memory phases."""

    phases: PhaseLog
    restored: Mapping[str, str] = MappingProxyType({})
    _rollout: RolloutEngine | None
    _rollout_version: int | None = None
    _rollout_connected: bool = False
    _rollout_updates: int = 0
    engines_lost: int = 0

    @property
    def rollout(self) -> RolloutEngine:
        """The rollout engine.

        Raises:
            ConfigError: the strategy was made without one.
        """
        if self._rollout is None:
            raise ConfigError(
                f"{type(self).__name__} has no rollout engine to sample with: "
                "pass rollout=VLLMRollout(...) or rollout=TransformersRollout(...) to it"
            )
        return self._rollout

    def connect_rollout(self, rank: int, world_size: int) -> None:
        """Connect this rank to the engine, once; another fit may bring another model, so new weights are due."""
        self.weights_changed()
        if self._rollout is not None and not self._rollout_connected:
            self._rollout.connect(rank, world_size)
            self._rollout_connected = True

    def weights_changed(self) -> None:
        """The engine's copy of the weights is out of date."""
        self._rollout_version = None

    def sampled(self, version: int, sample: Callable[[RolloutEngine], T]) -> T:
        """What `sample` gives in a rollout phase. Collective.

        When an engine is lost, all ranks go on without it, and call again.

        Args:
            version: of the policy.
            sample: called on every rank; what it keeps of a call that failed, it need not ask for again.

        Raises:
            EngineLost: engines are lost again and again.
        """
        for _ in range(MOST_LOSSES):
            with self.rollout_phase(version) as engine, self.phases.measure("rollout"):
                try:
                    result, lost = sample(engine), False
                except EngineLost:
                    lost = True
                # No rank has the engine sleep while another one's groups are being sampled.
                lost_somewhere = self.on_any_rank(lost)
            if not lost_somewhere:
                return result
            self._replace_lost()
        raise lost_too_often()

    def _update_engine(self, engine: RolloutEngine, version: int) -> None:
        for _ in range(MOST_LOSSES):
            try:
                lost = False
                engine.update_weights(self.weight_source(), version)
            except EngineLost:
                lost = True
            if not self.on_any_rank(lost):
                return
            self._replace_lost()
        raise lost_too_often()

    def _replace_lost(self) -> None:
        self.engines_lost += self.rollout.replace_lost()
        self.weights_changed()

    def on_any_rank(self, happened: bool) -> bool:
        """Whether it has happened on one rank at least. Collective."""
        return bool(self.max_over_ranks(torch.tensor([float(happened)])).item())

    @contextmanager
    def rollout_phase(self, version: int) -> Iterator[RolloutEngine]:
        """Sampling with the policy's current weights.

        The order bounds the memory: the trainer gives up its optimizer states, the engine takes room for weights, the
        weights stream in, the trainer gives up its parameters, and only then does the engine take its KV cache. What
        is given up is measured, and must be as much as was expected. Beside an engine that never sleeps, nothing is.

        Args:
            version: of the policy; the samples carry it.

        Raises:
            MemoryNotFreed: a phase gave back less than it must.
            WeightsDiffer: the engine checks its updates, and its weights are not the policy's.
        """
        engine = self.rollout
        policy_log_probs: list[float] = []
        slept: MemoryChange | None = None
        with self.phases.measure("offload"):
            if engine.sleeps:
                self._give_up("offload optimizer", self.offload_optimizer, self.optimizer_bytes())
                self._meet()
            engine.wake_up(["weights"])
        if self._rollout_version is None:
            with self.phases.measure("update_weights"):
                self._update_engine(engine, version)
            self._rollout_version = version
            self._rollout_updates += 1
            if engine.check_updates and self._rollout_updates % engine.check_updates == 0:
                with self.phases.measure("check_weights"):
                    # An engine that is lost here is found to be lost when it is to sample.
                    with suppress(EngineLost):
                        engine.check_weights(self.weight_source())
                    policy_log_probs, tolerance = self._probe()
        with self.phases.measure("offload"):
            if engine.sleeps:
                self._give_up("offload parameters", self.offload_parameters, self.parameter_bytes())
                self._meet()
            engine.wake_up(["kv_cache"])
        if policy_log_probs:
            with self.phases.measure("check_weights"), suppress(EngineLost):
                tolerance = max(tolerance, engine.log_prob_tolerance)
                check_log_probs(policy_log_probs, engine.prompt_log_probs(PROBE), tolerance)
        failed = True
        try:
            yield engine
            failed = False
        finally:
            with self.phases.measure("reload"):
                slept = engine.sleep()
                if engine.sleeps and not failed:
                    self._meet()
                self.reload()
            if not engine.keeps_weights:
                self.weights_changed()
        if slept is not None:
            self.phases.note("engine_awake", slept.before)
            self.phases.note("engine_asleep", slept.after)
            slept.check("sleep of the rollout engine")

    def _meet(self) -> None:
        """Wait for all ranks: the engine may be on the device of another one than the rank that talks to it."""
        self.on_any_rank(False)

    def _give_up(self, phase: str, give_up: Callable[[], None], expected: int) -> None:
        before = self.phases.bytes_in_use()
        give_up()
        MemoryChange(before, self.phases.bytes_in_use(), expected).check(phase)

    @torch.no_grad()
    def _probe(self) -> tuple[list[float], float]:
        """The policy's log-probs of the probe's tokens, and how exact they are. Collective."""
        ids_1T = torch.tensor([PROBE], device=self.phases.device)
        logits_TV = self.engine(POLICY)(input_ids=ids_1T).logits[0, :-1]
        log_probs_T = logits_TV.float().log_softmax(-1).gather(-1, ids_1T[0, 1:, None]).squeeze(-1)
        return log_probs_T.tolist(), tolerance_of(logits_TV.dtype)

    def engine(self, name: str) -> Any:
        """The callable that runs model `name`."""
        raise NotImplementedError

    def weight_source(self, name: str = POLICY) -> WeightSource:
        """The weights of engine `name`."""
        raise NotImplementedError

    def max_over_ranks(self, values: Tensor) -> Tensor:
        """Element-wise maximum of a small tensor over all ranks."""
        raise NotImplementedError

    def offload_optimizer(self) -> None:
        """Give up device memory of optimizer states, if so configured."""

    def offload_parameters(self) -> None:
        """Give up device memory of parameters and gradients, if so configured."""

    def optimizer_bytes(self) -> int:
        """Device memory that `offload_optimizer` must free; 0 where it frees none."""
        return 0

    def parameter_bytes(self) -> int:
        """Device memory that `offload_parameters` must free; 0 where it frees none."""
        return 0

    def reload(self) -> None:
        """Take back what was given up."""


def small_all_reduce(values: Tensor, device: torch.device, operation: Any) -> Tensor:
    """All-reduce a small tensor in float64, back on the device it came from; the tensor itself outside a group."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return values
    reduced = values.to(device=device, dtype=torch.float64, copy=True)
    torch.distributed.all_reduce(reduced, op=operation)
    return reduced.to(values.device)


def exchange_objects(parcels: list[Any], rank: int, device: torch.device) -> list[Any]:
    """Every rank's parcel for this one; of a single process, its own. Collective.

    A rank receives nothing but what is addressed to it.

    Args:
        parcels: for each rank one; that for this rank comes back as it is.
        rank: this one.
        device: that the process group communicates from.
    """
    if len(parcels) == 1:
        return list(parcels)
    packed = [b"" if place == rank else pickle.dumps(parcel) for place, parcel in enumerate(parcels)]
    sizes = torch.tensor([len(parcel) for parcel in packed], device=device)
    sizes_here = torch.empty_like(sizes)
    torch.distributed.all_to_all_single(sizes_here, sizes)
    sent = torch.frombuffer(bytearray(b"".join(packed)) or bytearray(1), dtype=torch.uint8)[: int(sizes.sum())]
    got = torch.empty(int(sizes_here.sum()), dtype=torch.uint8, device=device)
    torch.distributed.all_to_all_single(got, sent.to(device), sizes_here.tolist(), sizes.tolist())
    parts = got.cpu().split(sizes_here.tolist())
    return [
        parcels[rank] if place == rank else pickle.loads(part.numpy().tobytes()) for place, part in enumerate(parts)
    ]
