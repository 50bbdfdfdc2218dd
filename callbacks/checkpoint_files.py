"""Checkpoints put in place one after the other, written at once or in the background.

All ranks write a checkpoint under a temporary name, and rank 0 renames the folder when the disk has all files and their
manifest. So a checkpoint with its final name is complete. A checkpoint in the background is put in place by the main
threads of the ranks, at the end of a step: a thread of `BackgroundWriter` only writes files.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from lightning.pytorch import Trainer

from rl_plugins.background_writer import BackgroundWriter
from rl_plugins.errors import DeadlineExceeded, StorageError, UserError
from rl_plugins.manifest import CheckpointWriter, without, write_manifest
from rl_plugins.plain_file import FileDigest
from rl_plugins.ranks import gather, place
from rl_plugins.whole_file import synchronize

# A thread that ends early has written one part of a file, and the disk may be slow.
_ABANDON_S = 60.0


@dataclass
class _Pending:
    """A checkpoint in the background, and the actions that wait until the checkpoint is in place."""

    writer: BackgroundWriter
    final: Path
    actions: list[Callable[[], None]] = field(default_factory=list)


class CheckpointFiles:
    """Writes checkpoints, one at a time, at once or in the background.

    Every method except `abandon` and `waited_s` is collective.

    A StorageError of any method says that a rank could not write a file. Earlier checkpoints are unchanged, and the new
    files are removed.

    Args:
        deadline_s: seconds that a step waits for the checkpoint in the background; None writes all checkpoints at once.
    """

    def __init__(self, deadline_s: float | None = None) -> None:
        self.deadline_s = deadline_s
        self._pending: _Pending | None = None
        self._waited_s = 0.0

    def write(
        self,
        trainer: Trainer,
        final: Path,
        save: Callable[[CheckpointWriter], None],
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Write a checkpoint, or begin to write it. The last checkpoint must be in place: call `wait` first.

        Args:
            trainer: trainer with the ranks.
            final: folder of the checkpoint.
            save: gives the files of this rank to a writer.
            then: action when the checkpoint is in place.
        """
        assert self._pending is None
        partial = final.with_name(f".{final.name}.partial")
        with self._waiting():
            writer = CheckpointWriter(partial) if self.deadline_s is None else BackgroundWriter(partial)
            if trainer.is_global_zero:
                shutil.rmtree(partial, ignore_errors=True)
                writer.make_folder(partial)
            trainer.strategy.barrier("checkpoint folder")
            save(writer)
            if isinstance(writer, BackgroundWriter):
                writer.start()
                self._pending = _Pending(writer, final, [then])
                return
        put_in_place_together(writer, final)
        then()

    def when_in_place(self, action: Callable[[], None]) -> None:
        """Act when the checkpoint in the background is in place; without one, act at once."""
        if self._pending is None:
            action()
        else:
            self._pending.actions.append(action)

    def advance(self) -> None:
        """Put the checkpoint in the background in place, if all ranks have written."""
        if self._pending is not None and all(gather(self._pending.writer.is_written())):
            self.wait()

    def wait(self) -> None:
        """Wait until the checkpoint in the background is in place.

        Raises:
            DeadlineExceeded: a rank is still writing after the deadline.
        """
        if self._pending is None:
            return
        pending = self._pending
        assert self.deadline_s is not None
        with self._waiting():
            late = gather(pending.writer.wait(self.deadline_s))
            for rank, file in enumerate(late):
                if file is not None:
                    raise DeadlineExceeded(
                        f"the run waited {self.deadline_s:.0f} s for {pending.final.name} in the background: rank "
                        f"{rank} is writing {file}"
                    )
            self._pending = None
            put_in_place_together(pending.writer, pending.final)
        for action in pending.actions:
            action()

    def waited_s(self) -> float:
        """Return the seconds that training has waited for checkpoints in the background since the last call."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    def abandon(self) -> None:
        """Give up the checkpoint in the background. The next run removes its files."""
        if self._pending is not None:
            self._pending.writer.abandon(_ABANDON_S)
            self._pending = None

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._waited_s += time.perf_counter() - start


def put_in_place_together(writer: CheckpointWriter, final: Path) -> None:
    """Put the files of all ranks in place. Collective.

    Raises:
        StorageError: a rank could not write a file. Earlier checkpoints are unchanged, and the new files are removed.
    """
    written = gather((writer.files, writer.failure))
    failure = next((failure for _, failure in written if failure is not None), None)
    is_first = place()[0] == 0
    if is_first and failure is None:
        files = {name: kept for files, _ in written for name, kept in files.items()}
        failure = put_in_place(writer.folder, files, final)
    # All ranks end if rank 0 could not finish the folder.
    failure = gather(failure)[0]
    if failure is not None:
        if is_first:
            shutil.rmtree(writer.folder, ignore_errors=True)
        raise StorageError(f"{final.name} is not saved: {failure}. Earlier checkpoints are unchanged")


def put_in_place(partial: Path, files: dict[str, FileDigest], final: Path) -> str | None:
    """Write the manifest of a complete checkpoint and rename its folder; return an error as a line for the user."""
    others = CheckpointWriter(partial)
    others.add_others(files)
    if others.failure is None:
        try:
            write_manifest(partial, files | others.files)
            remove_folder(final)
            os.replace(partial, final)
            synchronize(final.parent)
        except StorageError as error:
            return str(error)
        except OSError as error:
            others.fail(final, error)
    return others.failure


@contextmanager
def old_files_may_stay(folder: Path) -> Iterator[None]:
    """Print the error of an old checkpoint that cannot be removed: the error does not end training."""
    try:
        yield
    except (OSError, UserError) as error:
        print(f"{folder} cannot be removed ({error}): training continues", flush=True)


def remove_folder(folder: Path) -> None:
    """Remove the folder of a checkpoint, or a folder inside a checkpoint, if the folder exists.

    The folder is renamed before it is removed, so no half-removed folder has the name of a checkpoint.
    """
    if folder.exists():
        renamed = folder.with_name(f".{folder.name}.removed")
        shutil.rmtree(renamed, ignore_errors=True)
        os.replace(folder, renamed)
        shutil.rmtree(renamed)


def remove_model(checkpoint: Path, model: str) -> None:
    """Remove the states of one model from a checkpoint."""
    folder = checkpoint / "state" / model
    if folder.exists():
        without(checkpoint, f"state/{model}")
        remove_folder(folder)
