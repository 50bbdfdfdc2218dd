"""What the strategies have in common that give each rank its shards of every model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from rl_plugins.errors import ConfigError
from rl_plugins.models.remote import RemoteLearner, RemoteModel
from rl_plugins.rollout.ranks import gather
from rl_plugins.strategies.contract import RolloutMixin, exchange_objects, small_all_reduce
from rl_plugins.strategies.host_memory import HostMemory
from rl_plugins.strategies.offload import Offload
from rl_plugins.strategies.sequence_parallel import SequenceShards

LIGHTNING_FILE = "lightning.ckpt"
"""Of a checkpoint, what is not in the shards of its engines."""
ALL_OF_A_LEARNER = "weights, optimizer, schedule"
"""What a model that learns elsewhere is given back."""


class ShardedStrategy(RolloutMixin, ParallelStrategy):
    """Ranks that hold shards, and talk to each other.

    Trained engines give way to the rollout engine while it samples, unless `offload` gives them another place: first
    the optimizer's part of their memory, then their own.
    """

    _engines: dict[str, Any]
    _offload: Offload
    _on_host: HostMemory
    _sequence_parallel: int
    _sequences: list[SequenceShards]
    # Frozen engines whose weights are no longer those of their files, and their averages in float32.
    _moved: set[str]
    _masters: dict[str, dict[str, Tensor]]

    def _trained(self) -> list[str]:
        """Names of the engines that are trained."""
        raise NotImplementedError

    def shards(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Each parameter's name, and what this rank has of it."""
        raise NotImplementedError

    def _optimizer_tensors(self, name: str) -> Iterable[Tensor]:
        """What the optimizer of an engine has: states, master weights."""
        raise NotImplementedError

    def _engine_tensors(self, name: str) -> Iterable[Tensor]:
        """What an engine itself has: weights, gradients."""
        raise NotImplementedError

    def _share_sequences(self, models: Mapping[str, nn.Module]) -> None:
        """Neighbouring ranks run rows together, if so configured. Before the models are sharded; collective."""
        if self._sequence_parallel > 1:
            group, _ = torch.distributed.new_subgroups(self._sequence_parallel)
            self._sequences = [SequenceShards(model, name, group) for name, model in held_here(models).items()]

    def _check_groups(self, option: str, size: int) -> None:
        if self.world_size % size:
            raise ConfigError(f"{option}={size}: {self.world_size} training workers make no whole groups of it")

    def blend_weights(self, source: str, target: str, keep: float) -> None:
        """The weights of a frozen engine follow those of another, `keep * target + (1 - keep) * source`.

        Each rank blends its own shards. In low precision the average is held in float32 beside the weights, or small
        steps would be lost in rounding. From then on checkpoints hold the engine, also if `keep` is 1 and nothing has
        moved yet.
        """
        self._moved.add(target)
        if keep == 1:
            return
        masters = self._masters.setdefault(target, {})
        for (name, own), (_, other) in zip(self.shards(target), self.shards(source), strict=True):
            blend_shard(own, other, keep, masters, name)

    def _moving(self, tensors_of: Callable[[str], Iterable[Tensor]]) -> Iterator[Tensor]:
        for name in self._trained():
            if self._offload.moves(name):
                yield from tensors_of(name)

    @override
    def optimizer_bytes(self) -> int:
        return self._on_host.nbytes(self._moving(self._optimizer_tensors))

    @override
    def offload_optimizer(self) -> None:
        self._on_host.take(self._moving(self._optimizer_tensors))

    @override
    def parameter_bytes(self) -> int:
        return self._on_host.nbytes(self._moving(self._engine_tensors))

    @override
    def offload_parameters(self) -> None:
        self._on_host.take(self._moving(self._engine_tensors))

    @override
    def reload(self) -> None:
        self._on_host.give_back()

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Element-wise sum over all ranks."""
        return small_all_reduce(values, self.root_device, torch.distributed.ReduceOp.SUM)

    def max_over_ranks(self, values: Tensor) -> Tensor:
        """Element-wise maximum over all ranks."""
        return small_all_reduce(values, self.root_device, torch.distributed.ReduceOp.MAX)

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank."""
        return gather(value)

    def exchange(self, parcels: list[Any]) -> list[Any]:
        """Give `parcels[i]` to rank i; returns what every rank gave to this one."""
        return exchange_objects(parcels, self.global_rank, self.root_device)

    def _begin_load(self, folder: Path) -> None:
        """What moves goes back, too: averages begin anew from the weights that a checkpoint holds.

        Raises:
            ConfigError: it does not hold an engine that moves.
        """
        self._masters.clear()
        for name in sorted(self._moved):
            if not (folder / name).is_dir():
                raise ConfigError(
                    f"{folder} does not hold engine {name!r}, which has moved since: resume the run (run.resume=true), "
                    "which loads it from its own files"
                )

    def _save_learners(self, folder: Path) -> None:
        """Have what learns elsewhere write a folder each."""
        if self.is_global_zero:
            for name, engine in self._engines.items():
                if isinstance(engine, RemoteLearner):
                    engine.save(folder / name)

    def _load_learner(self, name: str, folder: Path) -> str:
        """Have an engine that learns elsewhere go on from a checkpoint; returns what it was given. Collective."""
        if self.is_global_zero:
            self._engines[name].load(folder / name)
        self.barrier(f"{name} loaded")
        return ALL_OF_A_LEARNER

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        # The engines save their own shards.
        return {} if self._engines else super().lightning_module_state_dict()

    @override
    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return {} if self._engines else super().optimizer_state(optimizer)

    @override
    def teardown(self) -> None:
        for sequences in self._sequences:
            sequences.remove()
        self._sequences = []
        if self._rollout is not None and self._rollout_connected:
            self._rollout.close()
            self._rollout_connected = False
        super().teardown()


def held_here(models: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Without those that run elsewhere, of which there is nothing to shard."""
    return {name: model for name, model in models.items() if not isinstance(model, RemoteModel)}


def optimizers_of_engines(engines: Mapping[str, nn.Module], optimizers: Sequence[Optimizer]) -> dict[str, Optimizer]:
    """The optimizer of each engine that one of them holds.

    Raises:
        ConfigError: an engine with two.
    """
    trained = {}
    for name, model in engines.items():
        own = {id(p) for p in model.parameters()}
        held = [o for o in optimizers if any(id(p) in own for group in o.param_groups for p in group["params"])]
        if len(held) > 1:
            raise ConfigError(f"engine {name!r} has {len(held)} optimizers: configure_optimizers may give it one")
        if held:
            trained[name] = held[0]
    return trained


def states_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """The tensors that an optimizer keeps for its parameters."""
    return (value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))


def blend_shard(own: Tensor, other: Tensor, keep: float, masters: dict[str, Tensor], name: str) -> None:
    """A shard becomes `keep * own + (1 - keep) * other`, in place.

    Args:
        own: the shard.
        other: that of the other engine.
        keep: share that it keeps.
        masters: float32 averages of shards in low precision, by name.
        name: of the parameter.
    """
    if keep == 0 or own.dtype == torch.float32:
        own.lerp_(other.to(own), 1 - keep)
    else:
        master = masters.setdefault(name, own.float())
        own.copy_(master.lerp_(other.float(), 1 - keep))
