from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl_plugins.models.tiny import build_tokenizer


def make_row(number: int, **changes: Any) -> dict[str, Any]:
    row = {
        "prompt": [{"role": "user", "content": f"{number}+1="}],
        "data_source": "addition",
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
        "extra_info": {"split": "train", "index": number, "answer": f"it is {number + 1}"},
    }
    return {**row, **changes}


@pytest.fixture(scope="session")
def tokenizer():
    return build_tokenizer()


@pytest.fixture
def row():
    return make_row


@pytest.fixture
def write_rows(tmp_path):
    def write(rows: list[dict[str, Any]], name: str = "train.parquet") -> Path:
        path = tmp_path / name
        pq.write_table(pa.Table.from_pylist(rows), path)
        return path

    return write
