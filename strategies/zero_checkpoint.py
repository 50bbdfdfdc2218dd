"""Files of a ZeRO model engine in a checkpoint, written and read by DeepSpeed as data.

By itself DeepSpeed would unpickle any object in its files, and would lose an optimizer with states on a drive. The
module imports DeepSpeed, which looks for a device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine
from torch import Tensor
from typing_extensions import override

from rl_plugins.manifest import CheckpointWriter
from rl_plugins.models.lora import has_adapter
from rl_plugins.plain_file import load_plain
from rl_plugins.strategies.zero_shards import SWAPPED, TAG, deepspeed_records


class PlainCheckpointEngine(CheckpointEngine):
    """Reads and writes the files of DeepSpeed as data.

    Args:
        writer: writer of this rank; None to read only.
    """

    def __init__(self, writer: CheckpointWriter | None = None) -> None:
        super().__init__()
        self.name = "plain"
        self._writer = writer

    @override
    def create(self, info: CheckpointCommitInfo) -> None:
        """Do nothing: there is nothing to prepare."""

    @override
    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a folder for the files of a checkpoint."""
        assert self._writer is not None
        self._writer.make_folder(Path(path))

    @override
    def save(self, state_dict: object, path: str) -> None:
        """Write a file; an error stays in the writer, so that no rank leaves the collective calls of the others."""
        assert self._writer is not None
        self._writer.save(state_dict, Path(path), records=deepspeed_records())

    @override
    def load(self, path: str, map_location: Any = None) -> Any:
        """Read a file."""
        return load_plain(Path(path), records=deepspeed_records(), device=map_location or "cpu")

    @override
    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Do nothing: `PolicyCheckpoint` renames the folder."""
        return True


def save_shards(writer: CheckpointWriter, engine: Any, folder: Path, *, rank: int, without_frozen: bool) -> None:
    """Write the shards of a trained model. Collective.

    Args:
        writer: writer of this rank.
        engine: DeepSpeed's engine of the model.
        folder: folder of the model.
        rank: number of this rank.
        without_frozen: leave out frozen weights.
    """
    engine.checkpoint_engine = PlainCheckpointEngine(writer)
    # DeepSpeed would copy programs into the folder, and a full disk would then end rank 0 alone.
    engine._copy_recovery_script = lambda save_path: None
    engine.save_checkpoint(str(folder), tag=TAG, save_latest=False, exclude_frozen_parameters=without_frozen)
    # DeepSpeed copies the files of tensors on disk by itself, into a folder for each rank.
    for file in sorted((folder / TAG / SWAPPED).glob("rank*/**/*")):
        if file.is_file() and int(file.relative_to(folder / TAG).parts[1].removeprefix("rank")) == rank:
            writer.add(file)


def load_shards(engine: Any, folder: Path) -> None:
    """Load shards that as many ranks under the same stage have written. Collective.

    Args:
        engine: DeepSpeed's engine of the model.
        folder: folder of the model.
    """
    engine.checkpoint_engine = PlainCheckpointEngine()
    scaler = engine.optimizer.loss_scaler
    swapped = _SwappedOptimizer(engine, folder) if engine.zero_nvme_offload_optimizer() else None
    if swapped:
        swapped.take_file_names()
    # For a model with an adapter, the frozen weights are not in the checkpoint.
    engine.load_checkpoint(str(folder), tag=TAG, load_module_strict=not has_adapter(engine.module))
    if swapped:
        swapped.load()
    if type(engine.optimizer.loss_scaler) is not type(scaler):
        # The checkpoint is of another precision.
        engine.optimizer.loss_scaler, engine.optimizer.dynamic_loss_scale = scaler, scaler.dynamic


class _SwappedOptimizer:
    """Optimizer with states in files on a drive, and its files in a checkpoint. DeepSpeed only copies the files.

    Args:
        engine: DeepSpeed's engine of the model.
        folder: folder of the model in the checkpoint.
    """

    def __init__(self, engine: Any, folder: Path) -> None:
        self._engine, self._folder = engine, str(folder)
        self._optimizer, self._swapper = engine.optimizer, engine.optimizer.optimizer_swapper
        self._sizes = engine.optimizer.fp16_partitioned_groups_flat_numel

    def take_file_names(self) -> None:
        """Take the names of the files in the checkpoint, before DeepSpeed copies the files; delete the files so far.

        A name has the numbers of parameters in the process, and a process may have made other models first.
        """
        own = Path(self._engine._get_zero_ckpt_name(self._folder, TAG))
        saved = load_plain(own, records=deepspeed_records(), mmap=True)["optimizer_state_dict"]["fp32_flat_groups"]
        for info in self._swapper.swap_params_info.values():
            for path in info.get_swap_paths():
                Path(path).unlink(missing_ok=True)
        self._swapper.swap_params_info.clear()
        masters = self._optimizer.fp32_partitioned_groups_flat
        for index, (master, saved_master) in enumerate(zip(masters, saved, strict=True)):
            if self._optimizer._swappable_optimizer_subgroup(index):
                master.ds_id = saved_master.ds_id
                self._swapper._create_param_swap_info(master, self._sizes[index])

    def load(self) -> None:
        """Load the other states of this rank, and let DeepSpeed read the copied files.

        The others are options, step counts, the scale of the loss, and the groups of parameters too small for a file.
        """
        self._engine._load_zero_checkpoint(self._folder, TAG)
        for master, size in zip(self._optimizer.fp32_partitioned_groups_flat, self._sizes, strict=True):
            for state in self._optimizer.optimizer.state.get(master, {}).values():
                if isinstance(state, Tensor) and not state.numel():
                    # A state in a file is empty in the checkpoint, and DeepSpeed finds such states by their size. An
                    # expanded number has a size, and needs no memory.
                    state.data = state.new_zeros(1).expand(size)
            # DeepSpeed notes the states in files here, and reads the files of a group before each step of the group.
            self._swapper.release_swap_buffers(master)
        self._optimizer.checkpoint_event_epilogue()
