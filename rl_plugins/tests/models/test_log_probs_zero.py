"""Log-probs of a model in shards: ZeRO-3 in two processes over gloo, gradients against an unsharded model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("zero_log_probs_worker.py")


@pytest.mark.slow
def test_gradients_of_a_sharded_head(tmp_path: Path) -> None:
    # DeepSpeed chooses its accelerator once per process, and its process group outlives a test.
    root = str(Path(__file__).parents[3])
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": root, "LOCAL_RANK": "0"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(tmp_path / "meeting")],
            env=environment | {"RANK": str(rank), "WORLD_SIZE": "2"},
            cwd=root,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=250)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, output in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, output
        assert output.endswith("the checks are through\n")
