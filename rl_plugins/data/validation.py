"""Report on data files: every bad row, duplicate prompts, prompts of training and test files, and prompt lengths.

Files are read a few rows at a time; only a digest of every prompt stays in memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rl_plugins.config.data import DataConfig
from rl_plugins.data.chat_template import TemplateCheck, TemplateRefusal, refused_messages
from rl_plugins.data.conversations import MESSAGES, TOOLS
from rl_plugins.data.formats import CONVERSATIONS, FORMATS
from rl_plugins.data.image_prompts import ImagePromptEncoder, has_image_processor, tokenizer_of
from rl_plugins.data.images import IMAGES, check_places, has_images, in_parts, read_images
from rl_plugins.data.parquet import LocatedRow, ParquetRows, PromptRows, Row
from rl_plugins.data.tokenization import TokenizerRefusal, tokenize_prompts
from rl_plugins.errors import ConfigError, RowError

if TYPE_CHECKING:
    from rl_plugins.data.chat_template import Messages
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
    keys: DataConfig,
    tokenizer: Processor | None = None,
    max_prompt_tokens: int | None = None,
) -> Findings:
    """Read every row of the files and return the findings.

    Args:
        train: paths of the training files.
        test: paths of the held-out files.
        kind: name of the rows' format in `FORMATS`.
        keys: options with the dotted keys of the values beside the prompt.
        tokenizer: tokenizer with a chat template, or processor of a vision-language model, to measure prompts and to
            find prompts the template refuses; None for neither.
        max_prompt_tokens: largest number of tokens of a prompt; longer prompts are counted.
    """
    findings, compared = Findings(max_prompt_tokens=max_prompt_tokens), compared_column(kind)
    check = _PromptCheck(tokenizer, has_tools=kind == CONVERSATIONS)
    first_trained: dict[int, tuple[str, int]] = {}
    for held_out, paths in ((False, train), (True, test)):
        first_seen: dict[int, tuple[str, int]] = {}
        for path in map(str, paths):
            findings.rows[path] = findings.duplicates[path] = 0
            for number, row in check.measured(_good_rows(path, kind, keys, check, findings), path, findings):
                digest = _digest(row, compared)
                if first_seen.setdefault(digest, (path, number)) != (path, number):
                    findings.duplicates[path] += 1
                if held_out and digest in first_trained:
                    findings.shared.append(SharedRow(path, number, *first_trained[digest]))
        first_trained = first_trained or first_seen
    # The prompts of many rows are measured at once, after the checks of these rows.
    places = {path: place for place, path in enumerate(findings.rows)}
    findings.bad_rows.sort(key=lambda bad: (places[bad.file], -1 if bad.row is None else bad.row))
    if check.lengths:
        tokens = np.asarray(check.lengths)
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


def compared_column(kind: str) -> str:
    """Return the column whose messages tell rows of a format apart: many conversations begin with the same prompt."""
    return MESSAGES if kind == CONVERSATIONS else "prompt"


def shared_prompts(train: PromptRows, held_out: PromptRows, compared: str = "prompt") -> dict[int, int]:
    """Return the number of each held-out row whose prompt is in the training rows, with the number of a training row.

    Args:
        train: training rows, read up to the last prompt in common.
        held_out: held-out rows.
        compared: column with the messages of a row.
    """
    left: dict[int, list[int]] = {}
    for number, row in enumerate(held_out):
        left.setdefault(_digest(row, compared), []).append(number)
    shared: dict[int, int] = {}
    for number, row in enumerate(train):
        shared |= dict.fromkeys(left.pop(_digest(row, compared), ()), number)
        if not left:
            break
    return shared


class _PromptCheck:
    """Tries the chat template on prompts, reads their images, and measures the prompts.

    Args:
        processor: tokenizer, or processor of a vision-language model; None to read images alone.
        has_tools: True if the column `tools` has tools for the chat template.

    Attributes:
        lengths: number of tokens of each good prompt.
    """

    def __init__(self, processor: Processor | None, *, has_tools: bool) -> None:
        self._has_tools = has_tools
        self._tokenizer = None if processor is None else tokenizer_of(processor)
        self._template = None if self._tokenizer is None else TemplateCheck(self._tokenizer, {})
        self._images = ImagePromptEncoder(processor) if has_image_processor(processor) else None
        self.lengths: list[int] = []

    def check(self, row: LocatedRow) -> None:
        """Check the messages and the images of a row.

        Raises:
            RowError: the chat template refuses the messages, or an image is bad.
        """
        messages, with_images = row.columns["prompt"], has_images(row.columns)
        if with_images:
            check_places(row)
        if with_images or self._images is not None:
            messages = in_parts(messages, images=with_images)
        if self._template is not None and (reason := self._template.refusal(messages)):
            raise RowError(row.location, "column 'prompt'", reason)
        if self._images is not None:
            self.lengths.append(len(self._images.encode_row(row, {})))
        elif with_images:
            read_images(row)

    def measured(self, rows: Iterator[tuple[int, Row]], path: str, findings: Findings) -> Iterator[tuple[int, Row]]:
        """Measure prompts for a tokenizer, many at a time; yield the rows whose texts the chat template accepts."""
        if self._tokenizer is None or self._images is not None:
            yield from rows
            return
        while chunk := list(islice(rows, _CHUNK)):
            try:
                self.lengths += self._lengths([row for _, row in chunk])
            except (TemplateRefusal, TokenizerRefusal):
                # The template accepts the roles of all rows; the texts of a row are refused.
                chunk = [row for row in chunk if self._measure(*row, path, findings)]
            yield from chunk

    def _measure(self, number: int, row: Row, path: str, findings: Findings) -> bool:
        """Measure one prompt; for a prompt whose text is refused, add to the findings and return False."""
        assert self._tokenizer is not None
        try:
            self.lengths += self._lengths([row])
        except (TemplateRefusal, TokenizerRefusal) as error:
            reason = str(error)
            if isinstance(error, TemplateRefusal):
                reason = refused_messages(self._tokenizer, row["prompt"], error)
            findings.bad_rows.append(BadRow(path, number, "column 'prompt'", reason))
            return False
        return True

    def _lengths(self, rows: Sequence[Row]) -> list[int]:
        assert self._tokenizer is not None
        prompts: dict[str, list[Messages]] = {}
        for row in rows:
            if not has_images(row):
                tools = row[TOOLS] if self._has_tools else None
                prompts.setdefault(json.dumps(tools, default=repr), []).append(row["prompt"])
        lengths: list[int] = []
        for tools, with_tools in prompts.items():
            options = {} if tools == "null" else {"tools": json.loads(tools)}
            lengths += tokenize_prompts(with_tools, self._tokenizer, options).lengths.tolist()
        return lengths


def _good_rows(
    path: str, kind: str, keys: DataConfig, check: _PromptCheck, findings: Findings
) -> Iterator[tuple[int, Row]]:
    """Yield the good rows with their numbers; add the bad rows to the findings."""
    try:
        for row in ParquetRows(Path(path), FORMATS[kind].columns):
            number = findings.rows[path]
            findings.rows[path] += 1
            try:
                plain = FORMATS[kind].checked(row, keys, path)
                check.check(LocatedRow(plain, path, Path(path).parent))
            except RowError as error:
                findings.bad_rows.append(BadRow(path, number, error.field, error.reason))
            else:
                yield number, plain
    except ConfigError as error:
        findings.bad_rows.append(BadRow(path, None, "file", str(error).removeprefix(f"{path}: ")))


def _digest(row: Row, compared: str) -> int:
    # A message of a data set in Python may have values without a form in JSON.
    digest = hashlib.blake2b(json.dumps(row[compared], sort_keys=True, default=repr).encode(), digest_size=8)
    images = row[IMAGES] if has_images(row) else ()
    for image in images if isinstance(images, Sequence) else (images,):
        for part in image.values() if isinstance(image, Mapping) else (image,):
            digest.update(part if isinstance(part, bytes) else repr(part).encode())
    return int.from_bytes(digest.digest())
