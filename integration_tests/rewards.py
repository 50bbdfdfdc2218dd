"""Rewards for the integration tests, named by `_target_`."""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from pathlib import Path

from rl_plugins.tests.patience import wait_until


def shortness(solution_str: str) -> float:
    """The fewer letters, the better: any policy gets different scores for different samples."""
    return 1.0 - sum(character.isalpha() for character in solution_str) / 8


def short_and_even(solution_str: str) -> dict[str, float]:
    """Two rewards and their sum."""
    parts = {"correct": shortness(solution_str), "format": float(len(solution_str) % 2 == 0)}
    return {"score": sum(parts.values()), **parts}


def short_and_harmful(solution_str: str) -> dict[str, float]:
    """A reward, and a cost beside it."""
    return {"score": shortness(solution_str), "harm": float(len(solution_str) % 2)}


def asks_back(solution_str: str, messages: list[dict[str, str]], turns_left: int) -> float | str:
    """Reply to some responses; the other responses are the last ones."""
    if turns_left and len(solution_str) % 3:
        return "so?"
    return shortness(" ".join(message["content"] for message in messages if message["role"] == "assistant"))


def without_ray(solution_str: str) -> float:
    """Fail in a process with Ray or vLLM."""
    loaded = {"ray", "vllm", "deepspeed"} & set(sys.modules)
    assert not loaded, f"{loaded} in a run of one process"
    return shortness(solution_str)


def inspected(solution_str: str) -> float:
    """Stop in the debugger."""
    breakpoint()
    return shortness(solution_str)


def paced(solution_str: str, pace: str) -> float:
    """Wait after the number of samples in the file `pace`; see `pace.Pace`."""
    _SCORED[pace] += 1
    number, file = _SCORED[pace], Path(pace)
    if number > _allowed(file):
        file.with_suffix(".held").write_text(str(number))
        wait_until(lambda: number <= _allowed(file), f"leave in {file} to score sample {number}", seconds=1800)
    return shortness(solution_str)


_SCORED: Counter[str] = Counter()


def _allowed(file: Path) -> float:
    try:
        return int(file.read_text())
    except FileNotFoundError:
        return math.inf


def visible_gpus(solution_str: str) -> float:
    """Return the number of the GPU visible to this process; -1 for none. Without the variable, all GPUs are visible."""
    return float(os.environ["CUDA_VISIBLE_DEVICES"] or -1)
