"""ZeRO over two ranks is the single device's training, and a checkpoint of one worker goes on with two, and back."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_plugins.models.tiny import save_tiny_policy
from rl_plugins.tests.strategies import zero_ranks
from rl_plugins.tests.strategies.zero_ranks import SAVED, STAGES, STEPS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    save_tiny_policy(folder / "policy", hidden_size=32, intermediate_size=48, initializer_range=0.2, seed=5)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    root = str(Path(zero_ranks.__file__).parents[3])
    common = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    group = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "ranks",
    }  # fmt: skip
    roles = [("alone", {})] + [("pair", {**group, "RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(2)]
    logs = [folder / f"{index}.log" for index in range(3)]
    processes = []
    for (role, variables), log in zip(roles, logs, strict=True):
        with log.open("w") as output:
            processes.append(
                subprocess.Popen(
                    [sys.executable, zero_ranks.__file__, role, str(folder)],
                    env=common | variables, cwd=root, stdout=output, stderr=subprocess.STDOUT,
                )
            )  # fmt: skip
    try:
        codes = [process.wait(280) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0, 0, 0], "\n".join(log.read_text()[-4000:] for log in logs)
    return folder


def results(folder: Path, name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(folder / f"{name}.pt")
    return loaded


def check_equal(folder: Path, name: str, steps: range) -> None:
    got, expected = results(folder, name), results(folder, "single")
    assert list(got["steps"]) == list(steps)
    for step in steps:
        assert got["steps"][step] == pytest.approx(expected["steps"][step], rel=1e-3, abs=1e-5), step
    assert set(got["weights"]) == {"policy", "critic", "reference"}
    for engine, weights in got["weights"].items():
        for key, weight in weights.items():
            torch.testing.assert_close(weight, expected["weights"][engine][key], rtol=1e-3, atol=1e-4, msg=key)


def test_the_single_device_learns_clips_and_warms_up(folder: Path) -> None:
    """Or the comparisons would say nothing."""
    steps = results(folder, "single")["steps"]
    assert list(steps) == list(range(1, STEPS + 1))
    assert all(values["gradient_norm"] > 0.5 and values["critic/gradient_norm"] > 0.3 for values in steps.values())
    assert (
        len({values["loss"] for values in steps.values()}) == len({values["lr"] for values in steps.values()}) == STEPS
    )


@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_train_as_the_single_device(folder: Path, stage: int) -> None:
    check_equal(folder, f"two-{stage}", range(1, STEPS + 1))


@pytest.mark.parametrize("stage", STAGES)
def test_one_worker_goes_on_where_two_stopped_under_another_stage(folder: Path, stage: int) -> None:
    check_equal(folder, f"two-{stage}-one-{stage % 3 + 1}", range(SAVED + 1, STEPS + 1))


@pytest.mark.parametrize("stage", STAGES)
def test_two_workers_go_on_where_one_stopped(folder: Path, stage: int) -> None:
    check_equal(folder, f"one-{stage}-two-{stage}", range(SAVED + 1, STEPS + 1))
