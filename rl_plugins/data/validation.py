"""Report on data files: every bad row, duplicate prompts, prompts of training and test files, and prompt lengths.

Files are read a few rows at a time; only a digest of every prompt stays in memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rl_plugins.data.formats import FORMATS, RowKeys
from rl_plugins.data.image_prompts import ImagePrompts, has_image_processor, tokenizer_of
from rl_plugins.data.images import IMAGES, check_places, has_images, in_parts, read_images
from rl_plugins.data.parquet import ParquetRows, Row
from rl_plugins.data.tokenization import TemplateCheck, tokenize_prompts
from rl_plugins.errors import ConfigError, RowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rl_plugins.data.image_prompts import Processor

_CHUNK = 1024


@dataclass(frozen=True)
class BadRow:
    """A malformed row, or an unreadable file.

    Attributes:
        file: name of the file.
        row: number of the row in the file, from 0; None if the whole file is unreadable.
        field: the column, or the option and the key.
        reason: reason in words.
    """

    file: str
    row: int | None
    field: str
    reason: str


@dataclass(frozen=True)
class SharedRow:
    """A prompt of a test file that is also in a training file.

    Attributes:
        test_file: name of the test file.
        test_row: number of the row in the test file, from 0.
        train_file: name of the training file.
        train_row: number of the first row with this prompt in the training file.
    """

    test_file: str
    test_row: int
    train_file: str
    train_row: int


@dataclass
class Findings:
    """Findings in data files.

    Attributes:
        rows: number of rows, by file.
        bad_rows: malformed rows and unreadable files.
        duplicates: number of rows with a prompt of an earlier row (of the training files, or of the test files), by
            file.
        shared: rows of test files with a prompt of a training file.
        prompt_tokens: minimum, median, mean, 95th percentile and maximum over all good rows; empty without a tokenizer.
        max_prompt_tokens: largest number of tokens of a prompt, or None.
        too_long: number of prompts above `max_prompt_tokens`.
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
        """True if no row is malformed and no test prompt is in a training file."""
        return not self.bad_rows and not self.shared


def validate(
    train: Sequence[Path],
    test: Sequence[Path],
    *,
    kind: str,
    keys: RowKeys,
    tokenizer: Processor | None = None,
    max_prompt_tokens: int | None = None,
) -> Findings:
    """Read every row of the files and return the findings.

    Args:
        train: paths of the training files.
        test: paths of the held-out files.
        kind: name of the rows' format in `FORMATS`.
        keys: dotted keys of the values beside the prompt.
        tokenizer: tokenizer with a chat template, or processor of a vision-language model, to measure prompts and to
            find prompts the template refuses; None for neither.
        max_prompt_tokens: largest number of tokens of a prompt; longer prompts are counted.
    """
    findings = Findings(max_prompt_tokens=max_prompt_tokens)
    lengths: list[int] = []
    text = None if tokenizer is None else tokenizer_of(tokenizer)
    template = None if text is None else TemplateCheck(text, {})
    measure = _image_lengths(tokenizer, lengths)
    first_trained: dict[int, tuple[str, int]] = {}
    for held_out, paths in ((False, train), (True, test)):
        first_seen: dict[int, tuple[str, int]] = {}
        for path in map(str, paths):
            findings.rows[path] = findings.duplicates[path] = 0
            rows = _good_rows(path, kind, keys, template, measure, findings)
            for number, row in rows if text is None else _measure(rows, text, lengths):
                prompt = _digest(row)
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
    path: str,
    kind: str,
    keys: RowKeys,
    template: TemplateCheck | None,
    read: Callable[[Row, str, Path], object],
    findings: Findings,
) -> Iterator[tuple[int, Row]]:
    """Yield the good rows with their numbers; add the bad rows to the findings. `read` reads the images of a row."""
    try:
        for row in ParquetRows(Path(path), FORMATS[kind].columns):
            number = findings.rows[path]
            findings.rows[path] += 1
            try:
                FORMATS[kind].check(row, keys, path)
                messages = row["prompt"]
                if has_images(row):
                    check_places(row, path)
                    read(row, path, Path(path).parent)
                    messages = in_parts(messages, images=True)
                if template and (reason := template.refusal(messages)):
                    raise RowError(path, "column 'prompt'", reason)
            except RowError as error:
                findings.bad_rows.append(BadRow(path, number, error.field, error.reason))
            else:
                yield number, row
    except ConfigError as error:
        findings.bad_rows.append(BadRow(path, None, "file", str(error).removeprefix(f"{path}: ")))


def _measure(
    rows: Iterator[tuple[int, Row]], tokenizer: PreTrainedTokenizerBase, lengths: list[int]
) -> Iterator[tuple[int, Row]]:
    """Yield the rows unchanged; append the lengths of prompts without images, in tokens, to `lengths`."""
    while chunk := list(islice(rows, _CHUNK)):
        prompts = (row["prompt"] for _, row in chunk if not has_images(row))
        lengths += tokenize_prompts(prompts, tokenizer, {}).lengths.tolist()
        yield from chunk


def _image_lengths(processor: Processor | None, lengths: list[int]) -> Callable[[Row, str, Path], object]:
    """Return a function that reads the images of a row, and with a processor appends the length of its prompt."""
    if not has_image_processor(processor):
        return read_images
    prompts = ImagePrompts(processor)
    return lambda row, location, folder: lengths.append(len(prompts.encode_row(row, location, folder, {})))


def _digest(row: Row) -> int:
    digest = hashlib.blake2b(json.dumps(row["prompt"], sort_keys=True).encode(), digest_size=8)
    if has_images(row):
        digest.update(repr(row[IMAGES]).encode())
    return int.from_bytes(digest.digest())
