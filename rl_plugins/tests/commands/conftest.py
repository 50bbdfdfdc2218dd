from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest


@pytest.fixture(scope="session")
def root() -> Path:
    """The folder of the checkout."""
    return Path(__file__).parents[3]


@pytest.fixture
def write_samples(tmp_path):
    """Function that writes a file as `generate` does, from `{(data source, question, truth): responses}`."""

    def write(name, rows):
        content = [
            {
                "data_source": source,
                "prompt": [{"role": "user", "content": question}],
                "ability": "math",
                "reward_model": {"ground_truth": truth},
                "extra_info": {"index": index},
                "responses": responses,
                "finish_reasons": ["stop"] * (len(responses) - 1) + ["length"],
                "response_lengths": [len(response) for response in responses],
            }
            for index, ((source, question, truth), responses) in enumerate(rows.items())
        ]
        path = tmp_path / name
        pq.write_table(pa.Table.from_pylist(content), path)
        return path

    return write
