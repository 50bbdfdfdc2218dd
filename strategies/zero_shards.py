"""Shards of a ZeRO checkpoint, read by parameter, to resume with any number of workers and any stage.

DeepSpeed loads a checkpoint only with the same number of workers. The file of a worker holds flat partitions: master
weights, and optimizer states of the same layout. A partition is a sequence of stretches, and each stretch belongs to
one parameter. This module finds the stretches of all files by parameter name. Each worker copies the content of its own
partitions out of the memory-mapped files. Nothing is converted, gathered or written.

Layouts: deepspeed/utils/zero_to_fp32.py and deepspeed/checkpoint/ds_to_universal.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from rl_plugins.errors import CheckpointError
from rl_plugins.plain_file import load_plain
from rl_plugins.run_folder import RunFolder

TAG = "zero"
"""Name of the folder of shards in the folder of a model."""
WEIGHTS_FILE = "weights.pt"
"""Name of the file with the whole weights of a model without an optimizer."""
SWAPPED = "offloaded_tensors"
"""Name of the folder with the files of offload to `nvme`, among the shards: master weights and optimizer states."""


@dataclass(frozen=True)
class Stretch:
    """Consecutive elements of a parameter in a flat partition of a worker.

    Attributes:
        name: name of the parameter.
        partition: index among the worker's partitions.
        offset: index of the first element in the partition.
        start: index of the first element in the flattened parameter.
        numel: number of elements.
    """

    name: str
    partition: int
    offset: int
    start: int
    numel: int


def stretches_of_slices(mappings: Sequence[Sequence[Mapping[str, Any]]]) -> list[list[Stretch]]:
    """Return the stretches of each worker under stages 1 and 2, which cut whole parameter groups into equal parts.

    Args:
        mappings: for each worker, in order, and each partition: parameter name to address (`start`, `numel`).
    """
    seen: dict[str, int] = {}
    workers = []
    for mapping in mappings:
        held = []
        for partition, addresses in enumerate(mapping):
            for name, address in addresses.items():
                held.append(Stretch(name, partition, address.start, seen.get(name, 0), address.numel))
                seen[name] = seen.get(name, 0) + address.numel
        workers.append(held)
    return workers


def stretches_of_shapes(shapes: Sequence[Mapping[str, torch.Size]], workers: int) -> list[list[Stretch]]:
    """Return the stretches of each worker under stage 3, which cuts every parameter into equal parts.

    Args:
        shapes: for each partition, parameter name to shape, in the order of the partition.
        workers: number of workers.
    """
    held: list[list[Stretch]] = [[] for _ in range(workers)]
    for partition, group in enumerate(shapes):
        offset = 0
        for name, shape in group.items():
            numel = math.prod(shape)
            part = -(-numel // workers)
            for worker in range(workers):
                start = min(worker * part, numel)
                held[worker].append(Stretch(name, partition, offset, start, min(part, numel - start)))
            offset += part
    return held


class ZeroShards:
    """Checkpoint files of one model engine.

    Args:
        folder: folder with `*_optim_states.pt` and `*_model_states.pt`.

    Raises:
        CheckpointError: the folder has no such files.
    """

    def __init__(self, folder: Path) -> None:
        files = sorted(folder.glob("*_optim_states.pt"), key=_worker_of)
        models = sorted(folder.glob("*_model_states.pt"), key=_worker_of)
        if not files or not models:
            raise CheckpointError(f"{folder} holds no shards of a model engine: resume from another checkpoint")
        self._models, self._in_bfloat16 = models, files[0].name.startswith("bf16_")
        self._folder, self._name = folder, folder.absolute().parent.name
        self._model = _load(models[0])
        self._workers = [_Partitions(_load(file)["optimizer_state_dict"]) for file in files]
        self.workers, self.stage = len(files), self._workers[0].stage
        if self.stage == 3:
            held = stretches_of_shapes(self._model["param_shapes"], self.workers)
        else:
            held = stretches_of_slices([worker.values["param_slice_mappings"] for worker in self._workers])
        self._of_parameter: dict[str, list[tuple[_Partitions, Stretch]]] = {}
        for worker, stretches in zip(self._workers, held, strict=True):
            for stretch in stretches:
                self._of_parameter.setdefault(stretch.name, []).append((worker, stretch))

    def fit(self, engine: Any, workers: int) -> bool:
        """Return True if DeepSpeed can load the files: an engine over `workers` workers has the layout of the files.

        DeepSpeed looks for other names of files in bfloat16.
        """
        is_alike = (engine.zero_optimization_stage() == 3) == (self.stage == 3)
        return workers == self.workers and is_alike and engine.bfloat16_enabled() == self._in_bfloat16

    def check_model(self, model: nn.Module) -> None:
        """Compare names and shapes of parameters with a model.

        Raises:
            CheckpointError: a parameter of the model or of the files is missing in the other, or has another shape.
        """
        saved = {name: tuple(shape) for group in self._model["param_shapes"] for name, shape in group.items()}
        # An optimizer of the user may leave parameters out, which then are among the weights alone.
        known = saved.keys() | self._model["module"].keys()
        own = dict(model.named_parameters())
        odd = sorted(saved.keys() - own.keys())
        for name, parameter in own.items():
            # Under stage 3, a parameter is empty beside its shard.
            shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
            if parameter.requires_grad and (name not in known or saved.get(name, shape) != shape):
                odd.append(name)
        if odd:
            raise CheckpointError(
                f"the checkpoint belongs to another model: {odd[0]} is in one of the two, or has two shapes: resume "
                "with the model of the checkpoint"
            )

    def check_place(self, engine: Any, workers: int) -> None:
        """Compare the place of optimizer states with an engine over `workers` workers: memory, or files (`nvme`).

        DeepSpeed copies the files of each worker as a whole.

        Raises:
            CheckpointError: only the checkpoint or only the engine has states in files, or another number of workers or
                another precision has written the files.
        """
        swaps = engine.zero_nvme_offload_optimizer()
        if self._in_files and not (swaps and self.fit(engine, workers)):
            raise CheckpointError(
                f"the optimizer states of {self._name!r} in the checkpoint are in files of as many workers (offload to "
                f"nvme): resume with {self._run_with_files}"
            )
        if swaps and not self._in_files and not self._has_copy_of(_masters_of(engine)):
            raise CheckpointError(
                f"the optimizer states of {self._name!r} in the checkpoint are not in files, and offload to nvme "
                f"continues only files: resume with offload={{{self._name!r}: 'cpu'}} (in a recipe: "
                f"strategy.offload.{self._name}=cpu)"
            )

    @cached_property
    def _in_files(self) -> bool:
        # DeepSpeed writes a partition in a file as an empty partition.
        pieces = (piece for of_parameter in self._of_parameter.values() for piece in of_parameter)
        return any(stretch.numel and not worker.masters[stretch.partition].numel() for worker, stretch in pieces)

    @property
    def _run_with_files(self) -> str:
        return (
            f"{self.workers} workers in the same precision, and with offload={{{self._name!r}: 'nvme'}} (in a recipe: "
            f"strategy.offload.{self._name}=nvme)"
        )

    def _has_copy_of(self, masters: Sequence[Tensor]) -> bool:
        """Return True if the groups of parameters are too small for files, in a run with `nvme` and in this engine.

        DeepSpeed copies the folder of files, also if the folder is empty.

        Args:
            masters: master weights of the engine.
        """
        return (self._folder / SWAPPED).is_dir() and all(master.numel() for master in masters)

    def restore(self, engine: Any, rank: int, workers: int) -> None:
        """Copy weights, optimizer states and settings, buffers and counters into an engine. Collective.

        Raises:
            CheckpointError: the files lack a parameter group of the engine, or have 8-bit states.
        """
        self._check_states()
        optimizer = engine.optimizer
        if engine.zero_optimization_stage() == 3:
            optimizer.checkpoint_event_prologue()
        own, saved = _Partitions(optimizer.state_dict()), self._workers[0]
        if len(own.groups) != len(saved.groups):
            raise CheckpointError(
                f"the optimizer of the checkpoint has {len(saved.groups)} parameter groups, and the optimizer of this "
                f"run has {len(own.groups)}: resume with the optimizer of the checkpoint"
            )
        for group, saved_group in zip(own.groups, saved.groups, strict=True):
            group.update({key: value for key, value in saved_group.items() if key != "params"})
        stretches = _stretches_of(engine, own, rank, workers)
        for index, master in enumerate(_masters_of(engine)):
            own.states[index] = self._fill(master.data, [s for s in stretches if s.partition == index])
        # A checkpoint of another precision has another kind of scale for the loss.
        if type(saved.values["loss_scaler"]) is type(own.values["loss_scaler"]):
            for name in ("loss_scaler", "dynamic_loss_scale", "overflow"):
                own.values[name] = saved.values[name]
        optimizer.load_state_dict([own.values] * workers, load_from_fp32_weights=True)
        if engine.zero_optimization_stage() == 3:
            optimizer.checkpoint_event_epilogue()
        else:
            # Stage 3 updates the low-precision parameters in `checkpoint_event_epilogue`.
            optimizer.update_lp_params()
        copy_weights(engine.module, WholeWeights(self._untrained()), rank)
        for counter in ("global_steps", "global_samples", "skipped_steps"):
            setattr(engine, counter, self._model[counter])

    def _check_states(self) -> None:
        # Bitsandbytes puts codes and scales of a state into a dictionary of their own.
        states = [state for worker in self._workers for state in worker.states.values()]
        if any(isinstance(value, Mapping) for state in states for value in state.values()):
            raise CheckpointError(
                "the optimizer of the checkpoint has 8-bit states, whose blocks of numbers cannot be cut anew: resume "
                f"with {self.workers} workers under ZeRO-{self.stage}"
            )

    def whole_weights(self) -> WholeWeights:
        """Return the whole weights of the model: trained weights in float32, frozen weights and buffers.

        Raises:
            CheckpointError: the trained weights are in files of offload to `nvme`.
        """
        if self._in_files:
            raise CheckpointError(
                f"the weights of {self._name!r} in {self._folder} are in files of as many workers (offload to nvme), "
                f"which only a resumed run reads: resume with {self._run_with_files}; at its end, the run writes the "
                "policy"
            )
        shapes = {name: shape for group in self._model["param_shapes"] for name, shape in group.items()}
        readers = self._untrained() | {name: partial(self._join, name, shape) for name, shape in shapes.items()}
        # A checkpoint of an adapter has no frozen weights.
        readers |= {name: readers[same] for name, same in self._model["shared_params"].items() if same in readers}
        return WholeWeights(readers)

    def _untrained(self) -> dict[str, Callable[[], Tensor]]:
        """Return functions that read frozen weights and buffers, by name. Stages 1 and 2 keep them in the module."""
        names = self._model["module"].keys() if self.stage < 3 else self._model["buffer_names"]
        readers: dict[str, Callable[[], Tensor]] = {name: partial(self._of_module, name) for name in names}
        if self.stage == 3 and (frozen := self._model.get("frozen_param_shapes")):
            readers |= {name: partial(self._join_frozen, name, shape) for name, shape in frozen.items()}
        return {name: reader for name, reader in readers.items() if name not in self._of_parameter}

    def _of_module(self, name: str) -> Tensor:
        tensor: Tensor = self._model["module"][name]
        return tensor.float() if tensor.is_floating_point() else tensor

    def _join_frozen(self, name: str, shape: torch.Size) -> Tensor:
        parts = [model["frozen_param_fragments"][name].flatten() for model in self._model_of_each_worker]
        return torch.cat(parts)[: shape.numel()].view(shape)

    @cached_property
    def _model_of_each_worker(self) -> list[dict[str, Any]]:
        return [_load(file) for file in self._models]

    def _join(self, name: str, shape: torch.Size) -> Tensor:
        stretches = sorted(self._of_parameter[name], key=lambda stretch: stretch[1].start)
        parts = [worker.masters[s.partition][s.offset : s.offset + s.numel] for worker, s in stretches]
        return torch.cat(parts).view(shape)

    def _fill(self, master: Tensor, stretches: Sequence[Stretch]) -> dict[str, Any]:
        """Write the master weights of a partition in place, and return the optimizer state of the partition."""
        if not stretches:
            return {}
        worker, first = self._of_parameter[stretches[0].name][0]
        # A state without partitions, such as the step count, is equal on all workers.
        state = {
            key: torch.zeros_like(master, dtype=value.dtype) if _is_partition(value) else deepcopy(value)
            for key, value in worker.states.get(first.partition, {}).items()
        }
        for stretch in stretches:
            for source, partition, offset, source_slice in self._pieces(stretch):
                target = slice(offset, offset + source_slice.stop - source_slice.start)
                master[target].copy_(source.masters[partition][source_slice])
                for key, value in state.items():
                    if _is_partition(value):
                        value[target].copy_(source.states[partition][key][source_slice])
        return state

    def _pieces(self, wanted: Stretch) -> Iterator[tuple[_Partitions, int, int, slice]]:
        """Yield each saved piece of a stretch: worker, partition index, offset in the target, slice of the source."""
        for worker, saved in self._of_parameter[wanted.name]:
            start = max(wanted.start, saved.start)
            stop = min(wanted.start + wanted.numel, saved.start + saved.numel)
            if start < stop:
                source = saved.offset + start - saved.start
                target = wanted.offset + start - wanted.start
                yield worker, saved.partition, target, slice(source, source + stop - start)


def weights_in(folder: Path, module: nn.Module) -> Mapping[str, Tensor]:
    """Return the weights of a model without an optimizer in this process.

    Args:
        folder: folder of the model in a checkpoint.
        module: the model.

    Raises:
        CheckpointError: the folder has the shards of another model.
    """
    file = folder / WEIGHTS_FILE
    if file.is_file():
        weights: Mapping[str, Tensor] = load_plain(file, mmap=True)
        return weights
    # A validation trains no model, also not the models that the checkpoint has in shards.
    shards = ZeroShards(folder / TAG)
    shards.check_model(module)
    return shards.whole_weights()


class WholeWeights(Mapping[str, Tensor]):
    """Whole weights of a checkpoint by name. Each access reads a weight from the files.

    Args:
        readers: function that reads a weight, by the name of the weight.
    """

    def __init__(self, readers: Mapping[str, Callable[[], Tensor]]) -> None:
        self._readers = readers

    @override
    def __getitem__(self, name: str) -> Tensor:
        return self._readers[name]()

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    @override
    def __len__(self) -> int:
        return len(self._readers)


@torch.no_grad()
def copy_weights(module: nn.Module, weights: Mapping[str, Tensor], rank: int) -> None:
    """Copy whole weights and buffers into a model; others stay. Collective.

    Args:
        module: model, possibly sharded by stage 3.
        weights: weights and buffers by name, on every rank.
        rank: number of this rank.
    """
    import deepspeed

    for name, parameter in module.named_parameters():
        if name in weights:
            is_sharded = hasattr(parameter, "ds_id")
            whole = deepspeed.zero.GatheredParameters([parameter], modifier_rank=0) if is_sharded else nullcontext()
            with whole:
                if rank == 0 or not is_sharded:
                    parameter.copy_(weights[name])
    for name, buffer in module.named_buffers():
        if name in weights:
            buffer.copy_(weights[name])


class _Partitions:
    """State of one worker's ZeRO optimizer, with the same attributes for all stages."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        self.stage = int(values["zero_stage"])
        sharded = self.stage == 3
        base = values["optimizer_state_dict" if sharded else "base_optimizer_state"]
        self.states: dict[int, dict[str, Any]] = base["state"]
        self.groups: list[dict[str, Any]] = base["param_groups"]
        self.masters: list[Tensor] = values["fp32_flat_groups" if sharded else "single_partition_of_fp32_groups"]


def _masters_of(engine: Any) -> list[Tensor]:
    """Return the live partitions of master weights, padding included."""
    optimizer = engine.optimizer
    sharded = engine.zero_optimization_stage() == 3
    masters: list[Tensor] = (
        optimizer.fp32_partitioned_groups_flat if sharded else optimizer.single_partition_of_fp32_groups
    )
    return masters


def _stretches_of(engine: Any, own: _Partitions, rank: int, workers: int) -> list[Stretch]:
    """Return the stretches of one rank of a live engine."""
    if own.stage == 3:
        names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
        shapes = [{names[id(p)]: p.ds_shape for p in group} for group in engine.optimizer.fp16_groups]
        return stretches_of_shapes(shapes, workers)[rank]
    mappings: list[Any] = [None] * workers
    torch.distributed.all_gather_object(mappings, own.values["param_slice_mappings"])
    return stretches_of_slices(mappings)[rank]


def _is_partition(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _worker_of(file: Path) -> int:
    match = re.search(r"zero_pp_rank_(\d+)_", file.name)
    return int(match.group(1)) if match else 0


def _load(file: Path) -> dict[str, Any]:
    # With mmap, only the copied parts are read.
    values: dict[str, Any] = load_plain(file, records=deepspeed_records(), mmap=True)
    return values


def check_shards(state: Path, names: Sequence[str]) -> None:
    """Check a checkpoint for the shards of models.

    Raises:
        CheckpointError: a model is missing; the message names the newest checkpoint with all models.
    """
    missing = next((name for name in names if not (state / name / TAG).is_dir()), None)
    if missing is None:
        return
    run = RunFolder(state.absolute().parent.parent)
    whole = [path for path in run.checkpoints() if all((path / state.name / name / TAG).is_dir() for name in names)]
    way_out = f"{whole[-1]} is the newest that holds all models" if whole else "no checkpoint of the run holds all"
    raise CheckpointError(f"{state / missing} holds no shards of model {missing!r}: {way_out}")


@cache
def deepspeed_records() -> tuple[Any, ...]:
    """Return the classes of DeepSpeed in its files: plain records and enumerations."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return (LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address)
