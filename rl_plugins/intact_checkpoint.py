"""Choice of an intact checkpoint. All ranks share the reading of the files."""

from __future__ import annotations

from pathlib import Path

from rl_plugins.errors import CheckpointError
from rl_plugins.manifest import MANIFEST, find_damage
from rl_plugins.ranks import barrier, broadcast, gather, place
from rl_plugins.run_folder import RunFolder
from rl_plugins.whole_file import storage_errors


def newest_intact(folder: RunFolder) -> Path | None:
    """Return the newest intact checkpoint of a run; None if the run has no checkpoint. Collective.

    Rank 0 renames each newer, damaged checkpoint, and prints one line about it. The files are kept. Rank 0 prints the
    name of the intact checkpoint, too.

    Raises:
        CheckpointError: the run has checkpoints, and all of them are damaged.
    """
    # Rank 0 lists the checkpoints: a new one can appear later on other machines.
    checkpoints: list[Path] = broadcast(folder.checkpoints())
    damages: dict[Path, str] = {}
    for checkpoint in reversed(checkpoints):
        damage = damage_of(checkpoint)
        if damage is None:
            _set_aside(folder, damages)
            if place()[0] == 0:
                print(f"{folder.path.name}: continuing from {checkpoint}", flush=True)
            return checkpoint
        damages[checkpoint] = damage
    if damages:
        raise CheckpointError(
            f"{next(iter(damages.values()))}, and {folder.path} has no intact checkpoint: give another run.name, or "
            "remove its checkpoints to start from the beginning"
        )
    return None


def check_state(state: Path, known_intact: Path | None = None) -> None:
    """Check the files of a checkpoint before its folder `state` is loaded. Collective.

    Lightning's `ModelCheckpoint` and `Trainer.save_checkpoint` write no manifest, so their files are not compared.

    Args:
        state: file or folder to load.
        known_intact: checkpoint of `newest_intact`, which is not read again.

    Raises:
        CheckpointError: a file is missing, damaged or of another checkpoint. The message names the file, and the newest
            intact checkpoint before.
    """
    checkpoint = state.absolute().parent
    if state.name != "state" or not broadcast((checkpoint / MANIFEST).exists()):
        return
    if known_intact is not None and known_intact.absolute() == checkpoint:
        return
    damage = damage_of(checkpoint)
    if damage is None:
        return
    others: list[Path] = broadcast(RunFolder(checkpoint.parent).checkpoints())
    before = next(
        (other for other in reversed(others) if other.name < checkpoint.name and damage_of(other) is None), None
    )
    way_out = "there is no intact checkpoint before" if before is None else f"the intact checkpoint before is {before}"
    raise CheckpointError(f"{damage}: {way_out}")


def damage_of(checkpoint: Path) -> str | None:
    """Return the first damage of a checkpoint, or None. Collective."""
    rank, num_ranks = place()
    found = gather(find_damage(checkpoint, rank=rank, num_ranks=num_ranks))
    return next((damage for damage in found if damage is not None), None)


def _set_aside(folder: RunFolder, damages: dict[Path, str]) -> None:
    """Rename damaged checkpoints, so that no later step of the run takes them for its newest checkpoint."""
    if place()[0] == 0:
        for checkpoint, damage in damages.items():
            aside = folder.aside(checkpoint)
            with storage_errors(aside):
                checkpoint.rename(aside)
            print(f"{folder.path.name}: {damage}, so {checkpoint.name} is now {aside.name}, and not used", flush=True)
    barrier()
