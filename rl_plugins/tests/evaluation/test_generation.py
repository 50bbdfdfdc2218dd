"""Files of samples: a killed run goes on to the same file, and files of other settings or rows are refused."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from rl_plugins.data.parquet import load_rows
from rl_plugins.errors import ConfigError
from rl_plugins.evaluation import generation
from rl_plugins.evaluation.generation import Job, SampleFile, fingerprint, generate, open_samples
from rl_plugins.file_lock import FileLock
from rl_plugins.rollout.engine import Generations

JOB = Job("name", "transformers", "cpu", "float32", 3, 8, 1.0, 1.0, seed=7, prompts_per_part=4)


class Tokenizer:
    eos_token_id = 0

    def batch_decode(self, responses, skip_special_tokens):
        return [" ".join(map(str, response)) for response in responses]


class Killed(Exception):
    pass


class Engine:
    """An engine with responses that depend on prompt and seed. The engine is killed after some calls."""

    def __init__(self, calls=100):
        self.calls, self.prompts = calls, []

    def __call__(self, rows, requests, sampling):
        if not self.calls:
            raise Killed
        self.calls -= 1
        self.prompts += [request.prompt for request in requests]
        responses = []
        for request in requests:
            random = np.random.default_rng([request.seed, *request.prompt])
            responses += [random.integers(1, 9, size=random.integers(1, 5)).tolist() for _ in range(3)]
        return Generations.from_responses(responses, [[0.0] * len(r) for r in responses], ["stop"] * len(responses), 0)


@pytest.fixture
def rows():
    return load_rows(
        [
            {
                "prompt": [{"role": "user", "content": f"{n}"}],
                "data_source": "numbers",
                "ability": "none",
                "reward_model": {"ground_truth": str(n)},
                # The first part has no such text at all.
                "extra_info": {"n": n, "note": None if n < 4 else str(n)},
            }
            for n in range(10)
        ]
    )


def make(path, rows, engine, job=JOB, model="name"):
    samples = open_samples(path, rows, job, model)
    if samples.complete:
        return []
    tokenizer: Any = Tokenizer()
    with samples.open():
        return list(generate(samples, rows, [[n] for n in range(10)], job, tokenizer, engine))


def test_generate_resumes_a_killed_run_to_the_same_file(tmp_path, rows):
    whole, broken = tmp_path / "whole.parquet", tmp_path / "broken.parquet"
    assert [made["parts"] for made in make(whole, rows, Engine())] == [1, 2, 3]
    with pytest.raises(Killed):
        make(broken, rows, Engine(calls=2))
    assert not broken.exists()
    # A process killed while it writes leaves such a file.
    (tmp_path / "broken.parquet.parts" / ".part_00002.parquet.99.tmp").write_text("half")
    rest = Engine()
    assert [made["parts"] for made in make(broken, rows, rest)] == [1]
    assert rest.prompts == [[8], [9]]
    assert broken.read_bytes() == whole.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.parquet", "whole.parquet"]
    assert make(broken, rows, Engine(calls=0)) == []


def test_open_closes_the_lock_before_the_parts_are_removed(tmp_path, rows, monkeypatch):
    def remove(folder, **options):
        lock = FileLock(folder / "lock")
        free.append(lock.take())
        lock.close()
        rmtree(folder, **options)

    free: list[bool] = []
    rmtree = generation.shutil.rmtree
    monkeypatch.setattr(generation.shutil, "rmtree", remove)
    make(tmp_path / "s.parquet", rows, Engine())
    assert free == [True] and [path.name for path in tmp_path.iterdir()] == ["s.parquet"]


def test_generate_writes_rows_with_responses(tmp_path, rows):
    engine = Engine()
    make(tmp_path / "s.parquet", rows, engine)
    table = pq.read_table(tmp_path / "s.parquet").to_pylist()
    assert [{name: row[name] for name in rows.rows[0]} for row in table] == list(rows.rows)
    assert all(len(row["responses"]) == len(row["finish_reasons"]) == 3 for row in table)
    assert [len(text.split()) for text in table[9]["responses"]] == table[9]["response_lengths"]
    # The same prompt under another number has other samples.
    assert len({tuple(row["responses"]) for row in table}) == 10


def test_generate_fills_missing_columns_and_refuses_columns_of_two_types(tmp_path, rows):
    mixed = load_rows([{**row, **({"level": n / 2} if n > 7 else {})} for n, row in enumerate(rows)])
    make(tmp_path / "s.parquet", mixed, Engine())
    assert pq.read_table(tmp_path / "s.parquet")["level"].to_pylist() == [None] * 8 + [4.0, 4.5]
    other = load_rows([{**row, "level": "high" if n > 7 else n} for n, row in enumerate(rows)])
    with pytest.raises(ConfigError, match="do not fit into one table, because their columns differ in type"):
        make(tmp_path / "t.parquet", other, Engine())


def test_open_samples_refuses_other_settings_by_name(tmp_path, rows):
    path = tmp_path / "s.parquet"
    with pytest.raises(Killed):
        make(path, rows, Engine(calls=1))
    with pytest.raises(ConfigError, match=r"parts was made with other settings: temperature was 1.0 and is now 0.5\."):
        make(path, rows, Engine(), replace(JOB, temperature=0.5))
    make(path, rows, Engine())
    with pytest.raises(ConfigError, match=r"s.parquet was made .*: num_samples was 3 and is now 2; seed was 7 and is"):
        make(path, rows, Engine(), replace(JOB, num_samples=2, seed=8))
    fewer = load_rows(list(rows.rows)[:8])
    with pytest.raises(ConfigError, match=r": prompts was \w+ and is now"):
        make(path, fewer, Engine())
    with pytest.raises(ConfigError, match=r"row 0: there is a column 'responses' already"):
        make(tmp_path / "t.parquet", load_rows(path), Engine())


def test_open_samples_refuses_other_template_options(tmp_path, rows):
    path = tmp_path / "s.parquet"
    with pytest.raises(Killed):
        make(path, rows, Engine(calls=1))
    with pytest.raises(ConfigError, match=r"template_options was \{\} and is now \{'n': 1\}"):
        make(path, rows, Engine(), replace(JOB, template_options={"n": 1}))


def test_open_samples_takes_other_settings_before_the_first_part(tmp_path, rows):
    path = tmp_path / "s.parquet"
    with pytest.raises(Killed):
        make(path, rows, Engine(calls=0))
    make(path, rows, Engine(), replace(JOB, temperature=0.5))
    assert path.is_file()


def test_open_samples_refuses_a_foreign_file_and_a_file_in_use(tmp_path, rows):
    foreign = tmp_path / "foreign.parquet"
    foreign.write_text("not parquet")
    with pytest.raises(ConfigError, match=r"foreign.parquet was not made by `rl-plugins generate`"):
        make(foreign, rows, Engine())
    path = tmp_path / "s.parquet"
    with SampleFile(path, 1, {"a": 1}).open():
        code = (
            "import sys; from pathlib import Path; from rl_plugins.evaluation.generation import SampleFile\n"
            f"with SampleFile(Path({str(path)!r}), 1, {{'a': 1}}).open(): pass"
        )
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "another process is making it" in other.stderr


def test_fingerprint_depends_on_weights_and_not_on_the_folder(tmp_path):
    for name in ("one", "same", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(bytes(10**6 - 1) + bytes([name == "other"]))
    one, same, other = (fingerprint(str(tmp_path / name)) for name in ("one", "same", "other"))
    assert one == same
    # A change of one byte is not seen; training changes nearly all bytes.
    trained = tmp_path / "other" / "model.safetensors"
    trained.write_bytes(b"\1" * 10**6)
    assert fingerprint(str(tmp_path / "other")) != one and other in (one, other)
    assert fingerprint("some/model") == "some/model"
