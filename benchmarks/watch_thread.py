"""A thread that measures again and again during a block."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Self


class WatchThread(ABC):
    """Measures from the start to the end of a `with` block.

    Args:
        every_s: seconds between two measurements.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s, self._ended = every_s, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    @abstractmethod
    def measure(self) -> None:
        """Measure once."""

    def __enter__(self) -> Self:
        """Start the thread."""
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop the thread."""
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(self._every_s):
            self.measure()
