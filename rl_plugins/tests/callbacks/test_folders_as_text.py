"""Callbacks take the name of a folder as a text."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import rl_plugins as rl


@pytest.mark.parametrize(
    "make",
    [
        rl.BestCheckpoints,
        partial(rl.BestUpload, metric="val/reward", mode="max", count=1),
        rl.CheckpointReference,
        rl.Curves,
        lambda folder: rl.DivergenceGuard(rl.Bounds(), folder=folder),
        rl.GracefulStop,
        partial(rl.PolicyCheckpoint, every=1),
        partial(rl.RolloutDump, keep_last=1),
        rl.RolloutReplay,
        rl.RunReport,
        rl.SampleTable,
        partial(rl.TargetReward, target=1.0),
    ],
)
def test_folder_as_text_is_the_folder_of_the_path(make: Callable[[Any], object], tmp_path: Path) -> None:
    assert vars(make(str(tmp_path)))["_folder"] == vars(make(tmp_path))["_folder"]
