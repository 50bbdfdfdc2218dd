"""Background checkpoints that are written as late as possible: when the main thread waits for them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from rl_plugins.background_writer import BackgroundWriter


@contextmanager
def late_writing() -> Iterator[None]:
    """Let the thread of every `BackgroundWriter` begin only when the main thread waits, or gives the checkpoint up."""
    begin: dict[int, threading.Event] = {}
    start, wait = BackgroundWriter.start, BackgroundWriter.wait
    abandon, write_all = BackgroundWriter.abandon, BackgroundWriter._write_all

    def late_start(writer: BackgroundWriter) -> None:
        begin[id(writer)] = threading.Event()
        start(writer)

    def late_write(writer: BackgroundWriter) -> None:
        begin[id(writer)].wait()
        write_all(writer)

    def asking_wait(writer: BackgroundWriter, deadline_s: float) -> Path | None:
        begin[id(writer)].set()
        return wait(writer, deadline_s)

    def asking_abandon(writer: BackgroundWriter, deadline_s: float) -> None:
        begin[id(writer)].set()
        abandon(writer, deadline_s)

    with mock.patch.multiple(
        BackgroundWriter, start=late_start, _write_all=late_write, wait=asking_wait, abandon=asking_abandon
    ):
        yield
