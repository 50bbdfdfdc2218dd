"""A run with a limited number of steps: the run then waits in its reward until the test allows more."""

from __future__ import annotations

import os
from pathlib import Path

from integration_tests.conftest import Recipe


class Pace:
    """Number of steps a run may take. A run with `overrides` then waits in the rewards of the next step.

    Args:
        file: file with the number of samples for each process, read by `rewards.paced`; no file means no limit.
        samples: number of samples of a step in each scoring process.
    """

    def __init__(self, file: Path, samples: int) -> None:
        self.file, self._samples, self._allowed = file, samples, 0

    @property
    def overrides(self) -> tuple[str, ...]:
        return (
            "reward.functions.default._target_=integration_tests.rewards.paced",
            f"+reward.functions.default.pace={self.file}",
            # Longer than any wait of `paced`, because the error of `paced` names the awaited thing.
            "reward.deadline_s=3600",
            "reward.num_workers=1",
        )

    def allow(self, steps: int) -> None:
        """Allow each scoring process this number of steps, counted from the start of the process."""
        # Half a step more: the trial scores a sample, too, possibly in the same process.
        self._allowed = steps * self._samples + self._samples // 2
        # A process never reads an incomplete file.
        written = self.file.with_suffix(".new")
        written.write_text(str(self._allowed))
        os.replace(written, self.file)

    def allow_all(self) -> None:
        """Let every process score any number of samples."""
        self.file.unlink()

    def is_reached(self) -> bool:
        """Return True if a process has taken its steps and waits."""
        held = self.file.with_suffix(".held")
        return held.is_file() and held.read_text() == str(self._allowed + 1)

    def wait(self, run: Recipe) -> None:
        """Wait until the run waits."""
        run.wait_until(self.is_reached, f"sample {self._allowed + 1} of a process, where {self.file} makes it wait")
