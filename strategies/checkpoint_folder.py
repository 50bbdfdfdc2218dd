"""Folder of a checkpoint: the parts that strategies write and read in the same way.

These parts are the states of Lightning, and the folders of models trained in another process. The writer of a rank
also writes the shards of the rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from rl_plugins.errors import CheckpointError, StorageError
from rl_plugins.manifest import CheckpointWriter
from rl_plugins.models.four_bit import four_bit_layers
from rl_plugins.models.remote import RemoteLearner, learners_of
from rl_plugins.plain_file import load_plain
from rl_plugins.ranks import Ranks, gather
from rl_plugins.storage import local_path
from rl_plugins.strategies.blending import BlendedModels
from rl_plugins.strategies.contract import COST_CRITIC, CRITIC

_LIGHTNING_FILE = "lightning.ckpt"
_FOUR_BITS = "four_bits"
_OR_EXPORT = "or export the policy (rl-plugins export) for a new run"


def writer_of(storage_options: object, folder: Path) -> CheckpointWriter:
    """Return the writer that `PolicyCheckpoint` passes as `storage_options`, or a new writer. Make the folder.

    Raises:
        ConfigError: the folder is an address.
    """
    folder = local_path("folder of the checkpoint", folder)
    writer = storage_options if isinstance(storage_options, CheckpointWriter) else CheckpointWriter(folder)
    writer.make_folder(folder)
    return writer


def check_written(writer: CheckpointWriter, storage_options: object, path: Path) -> None:
    """Wait until all ranks have written their files of a checkpoint, and check the files. Collective.

    Raises:
        StorageError: see `check_failures`.
    """
    check_failures(gather(writer.failure), writer, storage_options, path)


def check_failures(
    failures: Iterable[str | None], writer: CheckpointWriter, storage_options: object, path: Path
) -> None:
    """Check if all files of a checkpoint are written.

    `PolicyCheckpoint` reads the failures of the writer that it passes as `storage_options`.

    Raises:
        StorageError: a rank could not write a file with a writer of `writer_of`.
    """
    failure = next((failure for failure in failures if failure is not None), None)
    if failure is not None and writer is not storage_options:
        raise StorageError(f"the checkpoint {path} is not saved: {failure}")


def save_unsharded(
    writer: CheckpointWriter, folder: Path, models: Mapping[str, nn.Module], lightning: dict[str, Any]
) -> None:
    """Save learners, and the states of Lightning's loops, of callbacks and of the stage. Only one rank calls this."""
    for name, learner in learners_of(models).items():
        save_learner(writer, learner, folder / name)
    note_four_bits(lightning, models)
    writer.save(lightning, folder / _LIGHTNING_FILE)


def save_learner(writer: CheckpointWriter, learner: RemoteLearner, folder: Path) -> None:
    """Let the process of a learner save the learner."""
    if writer.failure is None:
        try:
            learner.save(folder)
        except OSError as error:
            writer.fail(folder, error)
        writer.add_folder(folder)


def read_lightning(folder: Path, models: Mapping[str, nn.Module], blended: BlendedModels) -> dict[str, Any]:
    """Check a folder before the first model is loaded; return the states of Lightning's loops, callbacks and the stage.

    Raises:
        CheckpointError: the folder is no checkpoint, lacks a blended model, or was saved with other 4-bit weights.
    """
    if (state := folder / "state").exists():
        raise CheckpointError(f"{folder} is the folder of a checkpoint, with more than the states: name {state}")
    if folder.is_file():
        raise CheckpointError(
            f"{folder} is a file, which SingleDeviceRolloutStrategy or a strategy of Lightning has saved: resume with "
            f"this strategy, {_OR_EXPORT}"
        )
    if not (folder / _LIGHTNING_FILE).is_file():
        raise CheckpointError(f"{folder} is not a checkpoint of this package: it has no file {_LIGHTNING_FILE}")
    blended.check_in(folder)
    states: dict[str, Any] = load_plain(folder / _LIGHTNING_FILE)
    check_saved_four_bits(folder, states, models)
    return states


def check_is_whole(path: Path) -> None:
    """Check that a checkpoint is no folder with the shards of several processes.

    Raises:
        CheckpointError: the checkpoint has shards.
    """
    if (path / _LIGHTNING_FILE).is_file():
        raise CheckpointError(
            f"{path} is a folder, which ZeroStrategy or FSDPStrategy has saved: resume with this strategy, {_OR_EXPORT}"
        )


def note_four_bits(lightning: dict[str, Any], models: Mapping[str, nn.Module]) -> None:
    """Add the names of the models with 4-bit weights to the states of a checkpoint."""
    if names := [name for name, model in models.items() if four_bit_layers(model)]:
        lightning[_FOUR_BITS] = names


def check_saved_four_bits(path: Path, lightning: Mapping[str, Any], models: Mapping[str, nn.Module]) -> None:
    """Check that the same models have 4-bit weights as in a checkpoint.

    A checkpoint does not hold the weights under an adapter, and the adapter fits the weights of its training alone:
    whole weights, or 4-bit weights.

    Args:
        path: file or folder of the checkpoint, for the message.
        lightning: states of the checkpoint.
        models: models to load, by name.

    Raises:
        CheckpointError: a model has 4-bit weights only in the checkpoint, or only here.
    """
    for name, model in models.items():
        saved = name in lightning.get(_FOUR_BITS, [])
        if saved == bool(four_bit_layers(model)):
            continue
        option = f"{name if name in (CRITIC, COST_CRITIC) else 'model'}.lora.quantization"
        if saved:
            before, now, way_out = "4-bit", "whole", f"LoraConfig(quantization='nf4'), in a recipe {option}=nf4"
        else:
            before, now, way_out = "whole", "4-bit", f"LoraConfig(quantization=None), in a recipe {option}=null"
        raise CheckpointError(
            f"{path} is of a run with {before} weights of {name!r}, and this run has {now} weights: resume with "
            f"{way_out}"
        )


def load_learner(learner: RemoteLearner, folder: Path, ranks: Ranks) -> None:
    """Load a learner on rank 0. Collective."""
    if ranks.rank == 0:
        learner.load(folder)
    ranks.wait()


def restored_states(model: nn.Module, optimizer: Optimizer | None, schedulers: Sequence[Any]) -> str:
    """Return the restored states of a model, in words.

    Args:
        model: model with states in a checkpoint.
        optimizer: optimizer of the model in this process, if there is one.
        schedulers: Lightning's `lr_scheduler_configs`.
    """
    if isinstance(model, RemoteLearner):
        return "weights, optimizer, schedule"
    scheduled = any(config.scheduler.optimizer is optimizer for config in schedulers)
    return "weights" + ", optimizer" * (optimizer is not None) + ", schedule" * scheduled
