"""Files of a new checkpoint that are kept in host memory, and written by a thread while training continues.

The bytes in memory are the bytes of the file: `torch.save` and PyTorch's distributed format write into memory in the
same way as onto a disk. So training may change every tensor afterwards, and the file is the same as one that is written
at once. The thread takes no part in the communication of the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

from typing_extensions import override

from rl_plugins.manifest import CheckpointWriter
from rl_plugins.plain_file import READ_BYTES, HashedFile, check_plain


class KeptFile(BytesIO):
    """A new file in host memory."""

    @override
    def close(self) -> None:
        """Do nothing: the content is written later."""


class BackgroundWriter(CheckpointWriter):
    """Writer whose files stay in host memory until `start`, which writes the files in a thread.

    After `start`, the attributes of `CheckpointWriter` are complete when `wait` has returned None.

    Args:
        folder: folder of the new checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        # None is a file of another library, which is on the disk.
        self._kept: dict[Path, KeptFile | None] = {}
        self._written: Future[None] | None = None
        self._writing: Path = folder
        self._abandoned = False

    @override
    @contextmanager
    def create(self, path: Path) -> Iterator[KeptFile]:
        file = KeptFile()
        yield file
        self._kept[path] = file

    @override
    def save(self, value: object, path: Path, *, records: Sequence[type] = ()) -> None:
        import torch

        with self.create(path) as file:
            torch.save(value, file)
            file.seek(0)
            check_plain(file, path, records=records)

    @override
    def rename(self, path: Path, new_path: Path) -> None:
        self._kept[new_path] = self._kept.pop(path)

    @override
    def add(self, path: Path) -> None:
        self._kept[path] = None

    def start(self) -> None:
        """Begin to write the files, in a thread."""
        thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._written = thread.submit(self._write_all)
        thread.shutdown(wait=False)

    def is_written(self) -> bool:
        """Return True if the thread has ended, with or without a failure."""
        assert self._written is not None
        return self._written.done()

    def wait(self, deadline_s: float) -> Path | None:
        """Wait for the end of the thread; return the file that is still being written after `deadline_s` seconds."""
        assert self._written is not None
        wait([self._written], deadline_s)
        if not self._written.done():
            return self._writing
        self._written.result()
        return None

    def abandon(self, deadline_s: float) -> None:
        """Let the thread end early, and wait at most `deadline_s` seconds for the end of the thread."""
        self._abandoned = True
        if self._written is not None:
            wait([self._written], deadline_s)

    def _write_all(self) -> None:
        while self._kept and self.failure is None and not self._abandoned:
            self._writing = next(iter(self._kept))
            # The memory of a written file is free for training.
            file = self._kept.pop(self._writing)
            if file is None:
                super().add(self._writing)
            else:
                with super().create(self._writing) as on_disk:
                    self._copy(file, on_disk)

    def _copy(self, file: KeptFile, on_disk: HashedFile) -> None:
        content = file.getbuffer()
        for start in range(0, len(content), READ_BYTES):
            if self._abandoned:
                return
            on_disk.write(content[start : start + READ_BYTES])
