"""Files of a ZeRO model engine in a checkpoint, written and read by DeepSpeed as data.

By itself DeepSpeed would unpickle any object in its files. The module imports DeepSpeed, which looks for a device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine
from typing_extensions import override

from rl_plugins.manifest import CheckpointWriter
from rl_plugins.plain_file import load_plain
from rl_plugins.strategies.zero_shards import TAG, deepspeed_records


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
    for file in sorted((folder / TAG / "offloaded_tensors").glob("rank*/**/*")):
        if file.is_file() and int(file.relative_to(folder / TAG).parts[1].removeprefix("rank")) == rank:
            writer.add(file)


def load_shards(engine: Any, folder: Path, *, strict: bool) -> None:
    """Load shards that as many ranks under the same stage have written. Collective.

    Args:
        engine: DeepSpeed's engine of the model.
        folder: folder of the model.
        strict: require all weights of the model in the files.
    """
    engine.checkpoint_engine = PlainCheckpointEngine()
    scaler = engine.optimizer.loss_scaler
    engine.load_checkpoint(str(folder), tag=TAG, load_module_strict=strict)
    if type(engine.optimizer.loss_scaler) is not type(scaler):
        # The checkpoint is of another precision.
        engine.optimizer.loss_scaler, engine.optimizer.dynamic_loss_scale = scaler, scaler.dynamic
