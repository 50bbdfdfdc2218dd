"""Sampling and scoring hold a few rows in memory at a time, whatever the number of rows."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl_plugins.data import parquet
from rl_plugins.data.on_disk import MappedLists
from rl_plugins.data.parquet import UNSCORED_COLUMNS, load_rows
from rl_plugins.evaluation import generation, results
from rl_plugins.evaluation.generation import Job, generate, open_samples
from rl_plugins.evaluation.results import evaluate, load_samples
from rl_plugins.rewards.inline import InlineScorer
from rl_plugins.rollout.engine import Generations, GroupRequest

# Rows are few and large, because the time of the test goes by rows. The library's pieces have fewer rows accordingly.
FEWER = 8
ROWS, ROW_BYTES, PART = 8192 // FEWER, 4096 * FEWER, 128 // FEWER
MIB = 2**20


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((parquet, "_BATCH_ROWS"), (generation, "_CHUNK"), (results, "_CHUNK")):
        monkeypatch.setattr(module, name, getattr(module, name) // FEWER)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """32 MiB of rows in one row group."""
    path, random = tmp_path / "prompts.parquet", Random(0)
    rows = [
        {
            "prompt": [{"role": "user", "content": str(number)}],
            "data_source": "random",
            "ability": "none",
            "reward_model": {"ground_truth": "1"},
            "extra_info": {"text": random.randbytes(ROW_BYTES // 2).hex()},
        }
        for number in range(ROWS)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=ROWS)
    return path


@contextmanager
def at_most(mebibytes: float) -> Iterator[None]:
    """Limit the sum of the peaks of Python's objects and Arrow's tables; mapped files count as neither."""
    usual = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(usual)
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        yield
        peak = (tracemalloc.get_traced_memory()[1] + pool.max_memory()) / MIB
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(usual)
    assert peak < mebibytes, f"{peak:.0f} MiB"


def sample(rows: object, requests: list[GroupRequest], sampling: object) -> Generations:
    count = len(requests)
    return Generations.from_responses([[1]] * count, [[0.0]] * count, ["stop"] * count, 0)


class Tokenizer:
    eos_token_id = 0

    def batch_decode(self, responses: list[list[int]], skip_special_tokens: bool) -> list[str]:
        return ["1" * (ROW_BYTES // 2)] * len(responses)


def test_generate_and_evaluate_hold_few_rows_in_memory(prompts: Path, tmp_path: Path) -> None:
    rows, ids = load_rows(prompts, UNSCORED_COLUMNS), MappedLists([[1]] * ROWS)
    job = Job("name", "transformers", "cpu", "float32", 1, 8, 0.0, 1.0, seed=7, prompts_per_part=PART)
    tokenizer: Any = Tokenizer()
    with at_most(24):
        samples = open_samples(tmp_path / "samples.parquet", rows, job, "name")
        with samples.open():
            assert len(list(generate(samples, rows, ids, job, tokenizer, sample))) == ROWS // PART
    scorer = InlineScorer({"_target_": "rl_plugins.rewards.scorers.exact_match"})
    with at_most(36):
        found = evaluate(load_samples(samples.path), scorer.score, str, right_from=1.0, max_failure_rate=0.0)
    assert len(found.prompts) == ROWS and found.summary["random"]["mean@1"].value == 0.0
