"""Preference optimization with ZeRO-3 in two processes over gloo ends with the weights of one process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rl_plugins.tests.stages import zero_preferences_worker


@pytest.mark.slow
def test_two_ranks_end_with_the_weights_of_one_process(tmp_path: Path) -> None:
    root = str(Path(__file__).parents[3])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_RANK": "0"}
    environment = {**os.environ, **meeting, "DS_ACCELERATOR": "cpu", "PYTHONPATH": root}
    files = [tmp_path / f"rank{rank}.pt" for rank in range(2)]
    ranks = [
        subprocess.Popen(
            [sys.executable, zero_preferences_worker.__file__, str(file)],
            env=environment | {"NODE_RANK": str(rank)},
            cwd=root,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, file in enumerate(files)
    ]
    try:
        outputs = [rank.communicate(timeout=250)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(outputs)
    start = zero_preferences_worker.OwnPolicy().model.state_dict()
    for case in zero_preferences_worker.CASES:
        expected = zero_preferences_worker.in_one_process(case)
        for file in files:
            actual = torch.load(file)[case]
            assert actual.keys() == expected.keys()
            largest = max(float((weight - start[name]).abs().max()) for name, weight in expected.items())
            assert largest > 1e-3
            for name, weight in expected.items():
                assert float((actual[name] - weight).abs().max()) < 1e-3 * largest, (case, name)
