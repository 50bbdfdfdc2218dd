"""Everything that is wrong with data files, not only the first of it; what is there twice, and how long prompts are.

Files are read a few rows at a time; what stays in memory is a digest of every prompt.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_plugins.data.formats import FORMATS, Keys
from rl_plugins.data.parquet import ParquetRows, Row
from rl_plugins.data.tokenization import RoleOrders, tokenize_prompts
from rl_plugins.errors import ConfigError, RowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHUNK = 1024


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used.

    Attributes:
        file: its file.
        row: its place there, counted from 0; None where the file as a whole is at fault.
        field: the column, or the option and the key.
        reason: what is wrong.
    """

    file: str
    row: int | None
    field: str
    reason: str


@dataclass(frozen=True)
class SharedRow:
    """A prompt of a test file that is also in a training file.

    Attributes:
        test_file: the test file.
        test_row: the row there, counted from 0.
        train_file: the training file.
        train_row: the first row there with this prompt.
    """

    test_file: str
    test_row: int
    train_file: str
    train_row: int


@dataclass
class Findings:
    """What was found.

    Attributes:
        rows: file to the number of its rows.
        bad_rows: each of them.
        duplicates: file to how many of its rows have a prompt that came before, in the training or in the test files.
        shared: rows of test files with a prompt of a training file.
        prompt_tokens: minimum, median, mean, 95th percentile and maximum over all good rows, if they were measured.
        max_prompt_tokens: the limit, if one was given.
        too_long: how many prompts are longer than the limit.
    """

    rows: dict[str, int] = field(default_factory=dict)
    bad_rows: list[BadRow] = field(default_factory=list)
    duplicates: dict[str, int] = field(default_factory=dict)
    shared: list[SharedRow] = field(default_factory=list)
    prompt_tokens: dict[str, float] = field(default_factory=dict)
    max_prompt_tokens: int | None = None
    too_long: int = 0

    @property
    def good(self) -> bool:
        """Whether every row can be used and no test prompt is trained on."""
        return not self.bad_rows and not self.shared


def validate(
    train: Sequence[Path],
    test: Sequence[Path],
    *,
    kind: str,
    keys: Keys,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_prompt_tokens: int | None = None,
) -> Findings:
    """Read every row of the files.

    Args:
        train: training files.
        test: files that are held out.
        kind: of rows, in `FORMATS`.
        keys: where rows hold what their format asks for.
        tokenizer: with a chat template, to measure prompts and to find those that the template refuses; None does
            neither.
        max_prompt_tokens: the limit that prompts are compared with.
    """
    findings = Findings(max_prompt_tokens=max_prompt_tokens)
    lengths: list[int] = []
    orders = None if tokenizer is None else RoleOrders(tokenizer, {})
    first_trained: dict[int, tuple[str, int]] = {}
    for held_out, paths in ((False, train), (True, test)):
        first_seen: dict[int, tuple[str, int]] = {}
        for path in map(str, paths):
            findings.rows[path] = findings.duplicates[path] = 0
            rows = _good_rows(path, kind, keys, orders, findings)
            for number, row in rows if tokenizer is None else _measured(rows, tokenizer, lengths):
                prompt = _digest(row["prompt"])
                if first_seen.setdefault(prompt, (path, number)) != (path, number):
                    findings.duplicates[path] += 1
                if held_out and prompt in first_trained:
                    findings.shared.append(SharedRow(path, number, *first_trained[prompt]))
        first_trained = first_trained or first_seen
    if lengths:
        tokens = np.asarray(lengths)
        findings.prompt_tokens = {
            "min": float(tokens.min()),
            "median": float(np.median(tokens)),
            "mean": float(tokens.mean()),
            "p95": float(np.percentile(tokens, 95)),
            "max": float(tokens.max()),
        }
        if max_prompt_tokens is not None:
            findings.too_long = int((tokens > max_prompt_tokens).sum())
    return findings


def _good_rows(
    path: str, kind: str, keys: Keys, orders: RoleOrders | None, findings: Findings
) -> Iterator[tuple[int, Row]]:
    """The rows that can be used, with their places; the others go to the findings."""
    try:
        for row in _rows(Path(path), FORMATS[kind].columns):
            number = findings.rows[path]
            findings.rows[path] += 1
            try:
                FORMATS[kind].check(row, keys, path)
                if orders and (reason := orders.reason_against(row["prompt"])):
                    raise RowError(path, "column 'prompt'", reason)
            except RowError as error:
                findings.bad_rows.append(BadRow(path, number, error.field, error.reason))
            else:
                yield number, row
    except ConfigError as error:
        findings.bad_rows.append(BadRow(path, None, "file", str(error).removeprefix(f"{path}: ")))


def _measured(
    rows: Iterator[tuple[int, Row]], tokenizer: PreTrainedTokenizerBase, lengths: list[int]
) -> Iterator[tuple[int, Row]]:
    """The same rows; the lengths of their prompts are appended."""
    while chunk := list(islice(rows, _CHUNK)):
        lengths += tokenize_prompts((row["prompt"] for _, row in chunk), tokenizer, {}).lengths.tolist()
        yield from chunk


def _rows(path: Path, columns: Sequence[str]) -> Iterator[Any]:
    for batch in ParquetRows(path, columns).batches():
        yield from batch.to_pylist()


def _digest(prompt: Any) -> int:
    return int.from_bytes(hashlib.blake2b(json.dumps(prompt, sort_keys=True).encode(), digest_size=8).digest())
