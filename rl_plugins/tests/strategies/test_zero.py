"""ZeRO in one process over gloo: named engines, weights, and checkpoints that restore bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_plugins.tests.ranks import run_ranks
from rl_plugins.tests.strategies import zero_worker


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_strategy_engines_weight_sources_and_checkpoints(tmp_path: Path, stage: int) -> None:
    run_ranks(zero_worker.train, stage, tmp_path, world_size=1)
