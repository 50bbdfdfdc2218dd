"""A run that waits in its reward when it has taken as many steps as a test allows: the test has the run in its hand."""

from __future__ import annotations

import os
from pathlib import Path

from integration_tests.conftest import Recipe


class Pace:
    """Allows steps. A run of `overrides` waits in the middle of the rewards of the step behind them.

    Args:
        file: `rewards.paced` reads the number of samples that a process may score; without the file, any number.
        samples: of a step, in each process that scores.
    """

    def __init__(self, file: Path, samples: int) -> None:
        self.file, self._samples, self._allowed = file, samples, 0

    @property
    def overrides(self) -> tuple[str, ...]:
        return (
            "reward.functions.default._target_=integration_tests.rewards.paced",
            f"+reward.functions.default.pace={self.file}",
            # Longer than any wait of `paced`, which says what it waited for.
            "reward.deadline_s=3600",
            "reward.num_workers=1",
        )

    def allow(self, steps: int) -> None:
        """Let a process that scores take so many steps, counted from its start."""
        # A half: `check_reward` scores a sample, too, and that may be in the same process.
        self._allowed = steps * self._samples + self._samples // 2
        # Never read half written.
        written = self.file.with_suffix(".new")
        written.write_text(str(self._allowed))
        os.replace(written, self.file)

    def allow_all(self) -> None:
        """Let every process score any number of samples."""
        self.file.unlink()

    def is_reached(self) -> bool:
        """Whether a process has taken its steps and waits."""
        held = self.file.with_suffix(".held")
        return held.is_file() and held.read_text() == str(self._allowed + 1)

    def wait(self, run: Recipe) -> None:
        """Wait until the run waits."""
        run.wait_until(self.is_reached, f"sample {self._allowed + 1} of a process, where {self.file} makes it wait")
