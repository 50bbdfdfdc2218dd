"""Copy of a run's folder in storage (`run.storage`), and the way back onto a new machine.

A run works in its local folder. The process that starts the run copies new and changed files in the background. The
manifest of a checkpoint is copied after all its files, and removed before them, so a checkpoint with a manifest is
complete in storage. `finished.json` is copied after everything else.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from rl_plugins.config.recipe import RecipeConfig
from rl_plugins.errors import CheckpointError, ConfigError, StorageError
from rl_plugins.manifest import MANIFEST, find_damage, parse_manifest, read_manifest
from rl_plugins.run_folder import RunFolder
from rl_plugins.run_lock import owned
from rl_plugins.storage import Storage
from rl_plugins.tracking.store import sqlite_file
from rl_plugins.whole_file import link_or_copy, only_printed, storage_errors

_EVERY_S = 5.0
_LONGEST_PAUSE_S = 60.0
_STALL_S = 600.0
_CHECKPOINT = re.compile(r"(checkpoint|best)_\d{8}(?=/|$)")
# Requests to a running process, samples for a second training, and checkpoints without use.
_LOCAL = re.compile(r"\.|stop$|rollouts$|damaged_")


def stored_run(config: RecipeConfig, folder: RunFolder) -> StoredRun | None:
    """Return the copy of a run in storage; None without the option `run.storage`.

    Raises:
        ConfigError: the storage does not answer, cannot be written, or is the folder of the run; or it has the run, and
            the run must be new.
    """
    if config.run.storage is None:
        return None
    storage = Storage.at("run.storage", config.run.storage).inside(config.run.name)
    if storage.local is not None:
        there, here = storage.local.resolve(), folder.path.resolve()
        if there.is_relative_to(here) or here.is_relative_to(there):
            raise ConfigError(
                f"run.storage={config.run.storage}: the copy and the run ({folder.path}) would be in one folder: name "
                "another folder, or leave the option out"
            )
    # A file of MLflow in the output folder stays on its machine, so another machine begins a new run in its own file.
    # A machine without the file does so, too.
    uri, output = config.tracking.uri, Path(config.run.output_dir).absolute()
    file = None if uri is None else sqlite_file(uri)
    with_id = uri is not None and (file is None or (file.is_file() and not file.is_relative_to(output)))
    run = StoredRun(storage, folder, keep=config.run.keep_checkpoints, restores_tracking_run=with_id)
    try:
        if not config.run.resume and run.has_results():
            raise ConfigError(
                f"the run {storage.shown} exists: continue it with run.resume=true, or give another run.name"
            )
        run.try_to_write()
    except StorageError as error:
        raise ConfigError(f"run.storage: {error}: correct the address, or the credentials") from None
    return run


class StoredRun:
    """Copy of a run's folder in storage.

    Args:
        storage: folder of the run in storage.
        folder: local folder of the run.
        keep: number of newest checkpoints to keep in storage.
        stall_s: seconds without a copied part after which the end of a run gives up.
        restores_tracking_run: restore the id of the MLflow run.
    """

    def __init__(
        self,
        storage: Storage,
        folder: RunFolder,
        *,
        keep: int,
        stall_s: float = _STALL_S,
        restores_tracking_run: bool = True,
    ) -> None:
        self._restores_tracking_run = restores_tracking_run
        self._storage, self._folder, self._keep, self._stall_s = storage, folder, keep, stall_s
        # State of each copied file, by its path; None for a file of an earlier process in an unknown state.
        self._copied: dict[str, object] = {}
        # Text of the manifest of each complete checkpoint.
        self._manifests: dict[str, str] = {}
        self._failures = 0
        self._copied_at = 0.0
        self._is_complete = False
        self._ending, self._abandoned, self._ended = threading.Event(), threading.Event(), threading.Event()

    def has_results(self) -> bool:
        """Return True if the storage has metrics, a checkpoint or an exported model of the run."""
        names = {name.partition("/")[0] for name in self._storage.files()}
        results = {path.name for path in (self._folder.metrics, self._folder.export)}
        return bool(names & results) or any(map(_CHECKPOINT.fullmatch, names))

    def try_to_write(self) -> None:
        """Write and remove a file.

        Raises:
            StorageError: the storage refuses.
        """
        name = f".{os.getpid()}.tried"
        with open(os.devnull, "rb") as nothing:
            self._storage.send(nothing, name)
        self._storage.remove(name)

    def read(self, name: str) -> bytes | None:
        """Return the content of a file of the run; None if the storage does not have the file.

        Raises:
            StorageError: the storage does not answer.
        """
        return self._storage.read(name) if name in self._storage.files() else None

    # Fetch ----------------------------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Fetch the run from storage, if the newest intact checkpoint there is newer than all intact ones here.

        A run without a checkpoint is fetched if there is no run here. The checkpoint comes last, so an interrupted
        fetch begins again.

        Raises:
            StorageError: the storage does not answer.
            CheckpointError: the storage has checkpoints, all of them are damaged, and there is none here.
        """
        stored = self._storage.files()
        if not stored:
            return
        with storage_errors(self._folder.path):
            self._folder.path.mkdir(parents=True, exist_ok=True)
        with owned(self._folder):
            self._restore(stored)

    def _restore(self, stored: Mapping[str, object]) -> None:
        complete = sorted(
            (str(path.parent) for path in map(Path, stored) if path.name == MANIFEST and _is_checkpoint(path.parent)),
            reverse=True,
        )
        here = next((path.name for path in reversed(self._folder.checkpoints()) if find_damage(path) is None), "")
        newer = [name for name in complete if name.startswith("checkpoint_") and name > here]
        partial = next((path for name in newer if (path := self._fetch_checkpoint(name, stored)) is not None), None)
        if newer and partial is None and not here:
            raise CheckpointError(
                f"{self._storage.shown} has no intact checkpoint: give another run.name, or remove its checkpoints to "
                "start from the beginning"
            )
        if partial is None and self._folder.has_results():
            return
        is_finished = self._folder.finished.name in stored
        exports = (self._folder.export.name, "reward_model")
        files = [
            name
            for name in stored
            if not _CHECKPOINT.match(name)
            and not _LOCAL.match(name)
            and (self._restores_tracking_run or name != self._folder.tracking_run.name)
            # The export of a run that has not finished may lack files.
            and (is_finished or name.partition("/")[0] not in exports)
        ]
        self._storage.fetch(files, self._folder.path)
        for name in complete:
            if name.startswith("best_") and not (self._folder.path / name).exists():
                best = self._fetch_checkpoint(name, stored)
                if best is not None:
                    best.rename(self._folder.path / name)
        if partial is not None:
            self._put_in_place(partial)

    def _fetch_checkpoint(self, name: str, stored: Mapping[str, object]) -> Path | None:
        """Return a temporary folder with a checkpoint of the storage; None for a damaged checkpoint."""
        partial = self._folder.path / f".{name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        prefix = f"{name}/"
        files = [file.removeprefix(prefix) for file in stored if file.startswith(prefix)]
        self._storage.inside(name).fetch(files, partial)
        damage = find_damage(partial)
        if damage is None:
            return partial
        self._tell(f"{self._storage.shown}/{name} is damaged, and not used: {damage}")
        shutil.rmtree(partial)
        return None

    def _put_in_place(self, partial: Path) -> None:
        checkpoint = partial.with_name(partial.name[1:].removesuffix(".partial"))
        with storage_errors(checkpoint):
            if checkpoint.exists():
                aside = self._folder.aside(checkpoint)
                checkpoint.rename(aside)
                self._tell(f"{checkpoint.name} is damaged here, so it is now {aside.name}, and not used")
            partial.rename(checkpoint)
        self._tell(f"fetched {checkpoint.name} from {self._storage.shown}")

    # Copy -----------------------------------------------------------------------------------------------------------

    @contextmanager
    def copied(self) -> Iterator[None]:
        """Copy the folder in the background inside this context, and completely at its end.

        After another error, too, the copy is completed, and the error goes on. Ctrl-C ends the copy at once.

        Raises:
            StorageError: the storage lacks a file at the end, and no part was copied for `stall_s` seconds.
        """
        # Listed now: a file that the run removes at its start is removed in storage, too.
        files = _local_files(self._folder)
        threading.Thread(target=self._copy_until_end, args=(files,), name="storage", daemon=True).start()
        try:
            yield
        except KeyboardInterrupt:
            self._abandon()
            self._tell(f"{self._storage.shown} may lack the newest files")
            raise
        except BaseException:
            with only_printed():
                self._finish()
            raise
        self._finish()

    def _finish(self) -> None:
        self._note_part()
        self._ending.set()
        while not self._ended.wait(min(1.0, self._stall_s)):
            if time.monotonic() - self._copied_at > self._stall_s:
                break
        if not self._is_complete:
            self._abandon()
            raise StorageError(
                f"{self._storage.shown} lacks the newest files of the run, and nothing was copied for "
                f"{self._stall_s:.0f} s. {self._folder.path} has all files: repeat the command with run.resume=auto"
            )
        repeated = f" after {self._failures} failures" if self._failures else ""
        self._tell(f"{self._storage.shown} has all files of the run{repeated}")

    def _abandon(self) -> None:
        self._abandoned.set()
        self._ending.set()

    def _copy_until_end(self, files: Mapping[str, tuple[int, int]]) -> None:
        pause_s, knows_storage = 1.0, False
        try:
            while not self._abandoned.is_set():
                is_last, wait_s = self._ending.is_set(), _EVERY_S
                try:
                    if not knows_storage:
                        self._look_at_storage(files)
                        knows_storage = True
                    self._copy_changes()
                    self._is_complete = is_last and self._has_newest()
                    pause_s = 1.0
                except (StorageError, OSError) as error:
                    self._failures += 1
                    pause_s = wait_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                    self._tell(f"{error}: failure {self._failures}, the next try is in {pause_s:.0f} s")
                if self._is_complete:
                    return
                if is_last:
                    self._abandoned.wait(pause_s)
                else:
                    self._ending.wait(wait_s)
        finally:
            self._ended.set()

    def _has_newest(self) -> bool:
        newest = self._folder.latest_checkpoint()
        return newest is None or newest.name in self._manifests

    def _look_at_storage(self, files: Mapping[str, tuple[int, int]]) -> None:
        """Note the files that an earlier process has copied.

        Args:
            files: files here at the start of this process.
        """
        stored = self._storage.files()
        for name, info in stored.items():
            if _CHECKPOINT.match(name):
                self._copied[name] = None
            elif name in files:
                size, time_ns = files[name]
                is_same = info.size == size and (info.mtime_ns or 0) >= time_ns
                self._copied[name] = files[name] if is_same else None
        for path in [Path(name) for name in stored if name.endswith(f"/{MANIFEST}")]:
            if not _is_checkpoint(path.parent):
                continue
            name = path.parent.name
            text = self._storage.read(str(path)).decode(errors="replace")
            with suppress(CheckpointError):
                records = {f"{name}/{file}": kept for file, kept in parse_manifest(text, path).items()}
                # Another program may have copied the manifest before all files.
                there = {file for file, kept in records.items() if file in stored and stored[file].size == kept.bytes}
                self._copied |= {file: records[file] for file in there}
                if there == records.keys():
                    self._manifests[name] = text

    def _copy_changes(self) -> None:
        # Checkpoints are listed before files are copied, so the storage has no checkpoint with older metrics.
        checkpoints = [*reversed(self._folder.checkpoints()), *self._folder.bests()]
        files = _local_files(self._folder)
        for name in [name for name in self._copied if name not in files and not _CHECKPOINT.match(name)]:
            self._storage.remove(name)
            del self._copied[name]
        end = self._folder.finished.name
        for name in files:
            if name != end:
                with suppress(FileNotFoundError):
                    self._copy(self._folder.path, name, files[name])
        for checkpoint in checkpoints:
            # Training may remove the checkpoint, or one of its models, at any moment.
            with suppress(FileNotFoundError, CheckpointError):
                self._copy_checkpoint(checkpoint)
        if end in files:
            self._copy(self._folder.path, end, files[end])
        self._remove_old()

    def _copy(self, folder: Path, name: str, state: object, prefix: str = "") -> None:
        """Copy a file if the storage has another state of the file."""
        if self._copied.get(prefix + name) != state:
            with (folder / name).open("rb") as file:
                self._storage.send(file, prefix + name, self._note_part)
            self._copied[prefix + name] = state

    def _copy_checkpoint(self, checkpoint: Path) -> None:
        name, prefix = checkpoint.name, f"{checkpoint.name}/"
        if (checkpoint / MANIFEST).read_text(encoding="utf-8") == self._manifests.get(name):
            return
        with _linked(checkpoint, self._folder.linked / name) as linked:
            manifest = read_manifest(linked)
            left = {file for file in self._copied if file.startswith(prefix)} - {prefix + file for file in manifest}
            for file in sorted(left, key=lambda file: file != prefix + MANIFEST):
                self._manifests.pop(name, None)
                self._storage.remove(file)
                del self._copied[file]
            for file, kept in manifest.items():
                self._copy(linked, file, kept, prefix)
            text = (linked / MANIFEST).read_text(encoding="utf-8")
            self._copy(linked, MANIFEST, text, prefix)
        self._manifests[name] = text
        self._tell(f"copied {name} to {self._storage.shown}")

    def _remove_old(self) -> None:
        """Remove the checkpoints that are neither here nor among the newest ones in storage."""
        checkpoints = self._folder.checkpoints()
        if not checkpoints:
            return
        # A newer checkpoint than all checkpoints here is incomplete, damaged, or of another end of the run.
        older = sorted(
            name for name in self._manifests if name.startswith("checkpoint_") and name <= checkpoints[-1].name
        )
        bests = {path.name for path in self._folder.bests()}
        kept = {path.name for path in checkpoints} | bests | set(older[-self._keep :])
        names = {name.partition("/")[0] for name in self._copied if _CHECKPOINT.match(name)}
        if not bests <= self._manifests.keys():
            # As many best checkpoints stay in storage until the new ones are there.
            stored = sorted(name for name in self._manifests if name.startswith("best_"))
            kept |= set(stored[-len(bests) :])
        for name in sorted(names - kept):
            if self._manifests.pop(name, None) is not None:
                self._storage.remove(f"{name}/{MANIFEST}")
            self._storage.remove_folder(name)
            self._copied = {file: state for file, state in self._copied.items() if not file.startswith(f"{name}/")}

    def _note_part(self) -> None:
        self._copied_at = time.monotonic()

    def _tell(self, line: str) -> None:
        print(f"{self._folder.path.name}: {line}", flush=True)


def _is_checkpoint(folder: Path) -> bool:
    return _CHECKPOINT.fullmatch(str(folder)) is not None


def _local_files(folder: RunFolder) -> dict[str, tuple[int, int]]:
    """Return size and time of each file to copy, by its path in the folder, without the files of checkpoints."""
    files: dict[str, tuple[int, int]] = {}
    for top in sorted(folder.path.iterdir()):
        if _LOCAL.match(top.name) or _CHECKPOINT.fullmatch(top.name):
            continue
        for path in (top, *top.rglob("*")):
            name = path.relative_to(folder.path)
            # A hidden file is not complete.
            if path.is_file() and not any(part.startswith(".") for part in name.parts):
                with suppress(FileNotFoundError):
                    status = path.stat()
                    files[name.as_posix()] = (status.st_size, status.st_mtime_ns)
    return files


@contextmanager
def _linked(checkpoint: Path, folder: Path) -> Iterator[Path]:
    """Give the files of a checkpoint a second name inside this context, so that training may remove the first one.

    Raises:
        FileNotFoundError: a file has been removed.
        CheckpointError: the checkpoint has no manifest.
    """
    shutil.rmtree(folder, ignore_errors=True)
    try:
        for name in (*read_manifest(checkpoint), MANIFEST):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            link_or_copy(checkpoint / name, folder / name)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
