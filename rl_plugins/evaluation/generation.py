"""Sampling of responses to a file of prompts, part by part, with the rollout engines of training.

The parts and the settings of the samples lie in the folder `<file>.parts` beside the file of samples. A part gets its
name when it is complete; so does the file, which holds the settings in its metadata. A killed process can continue: the
samples of a prompt depend on the policy, the settings and the prompt's row only, because a sample's seed follows from
the row, and the prompts of a part are always sampled together.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.control_characters import whole_characters
from rl_plugins.data.parquet import PromptRows, Row
from rl_plugins.errors import ConfigError
from rl_plugins.file_lock import FileLock
from rl_plugins.redaction import redacted
from rl_plugins.whole_file import storage_errors, write_whole, write_whole_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rl_plugins.data.images import PromptImages
    from rl_plugins.rollout.engine import Generations, GroupRequest


_KEY = b"rl_plugins.generation"


class SampleFile:
    """Parquet file of samples and its parts.

    Args:
        path: path of the file.
        num_parts: number of parts.
        settings: settings of the samples, JSON values.

    Example:
        samples = SampleFile(path, num_parts, settings)
        with samples.open():
            for number in samples.missing():
                samples.write_part(number, sample_part(number))
            samples.finish()
    """

    def __init__(self, path: Path, num_parts: int, settings: Mapping[str, Any]) -> None:
        self.path, self._num_parts = path, num_parts
        self._settings: dict[str, Any] = json.loads(json.dumps(settings))
        self._folder = path.with_name(f"{path.name}.parts")

    @contextmanager
    def open(self) -> Iterator[None]:
        """Lock the file for this process and write the settings. A complete file ends without its parts.

        Raises:
            ConfigError: the file or its parts have other settings, the file was not made by `rl-plugins generate`, or
                another process has locked the file.
            StorageError: the folder of the parts cannot be written.
        """
        self.check()
        with storage_errors(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self._folder / "lock")
        try:
            if not lock.take():
                raise ConfigError(f"{self.path}: another process is making it: wait for it, or end it")
            write_whole_text(self._settings_file, json.dumps(self._settings, indent=1))
            yield
        finally:
            lock.close()
            if self.complete:
                # On NFS, the folder of an open file cannot be removed.
                self.remove_parts()

    def check(self) -> None:
        """Compare the settings with the settings of an existing file, or of its parts.

        Before the first part is made, settings may change.

        Raises:
            ConfigError: the settings differ; the message names the differences.
        """
        if self.path.exists():
            found, place = read_settings(self.path), self.path
        elif self._settings_file.is_file() and any(self._folder.glob("*.parquet")):
            found, place = json.loads(self._settings_file.read_text()), self._folder
        else:
            return
        differing = [
            f"{name} was {found.get(name)} and is now {self._settings.get(name)}"
            for name in sorted({*found, *self._settings})
            if found.get(name) != self._settings.get(name)
        ]
        if differing:
            raise ConfigError(
                f"{place} was made with other settings: {'; '.join(differing)}. Restore the settings to continue, "
                f"choose another file, or remove {place}"
            )

    @property
    def complete(self) -> bool:
        """True if the file is complete."""
        return self.path.exists()

    def missing(self) -> list[int]:
        """Return the numbers of the missing parts."""
        return [number for number in range(self._num_parts) if not self._part(number).is_file()]

    def write_part(self, number: int, rows: pa.Table) -> None:
        """Write a part."""
        write_whole(self._part(number), lambda file: pq.write_table(rows, file))

    def finish(self) -> None:
        """Join the parts, one in memory at a time."""

        def join(file: Path) -> None:
            schema = pq.read_schema(self._part(0)).with_metadata({_KEY: json.dumps(self._settings)})
            with pq.ParquetWriter(file, schema) as writer:
                for number in range(self._num_parts):
                    writer.write_table(pq.ParquetFile(self._part(number)).read().replace_schema_metadata(None))

        write_whole(self.path, join)

    def remove_parts(self) -> None:
        """Remove the parts of a complete file. A process killed after the last part leaves the parts behind."""
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _settings_file(self) -> Path:
        return self._folder / "settings.json"

    def _part(self, number: int) -> Path:
        return self._folder / f"part_{number:05d}.parquet"


def read_settings(path: Path) -> dict[str, Any]:
    """Return the settings in the metadata of a file of samples.

    Raises:
        ConfigError: the file was not made by `rl-plugins generate`.
    """
    try:
        metadata = pq.read_schema(path).metadata or {}
    except (pa.ArrowInvalid, OSError):
        metadata = {}
    if _KEY not in metadata:
        raise ConfigError(f"{path} was not made by `rl-plugins generate`: name another file")
    settings: dict[str, Any] = json.loads(metadata[_KEY])
    return settings


Sample = Callable[[Sequence[Row], list["GroupRequest"], "SamplingConfig"], "Generations"]
"""Samples responses to prompts, from the rows of the prompts, a request for each prompt, and settings."""
_KINDS = {"responses": pa.string(), "finish_reasons": pa.string(), "response_lengths": pa.int64()}
COLUMNS = tuple(_KINDS)
"""Columns added to the columns of a prompt: lists with one entry per sample."""
_KINDS_OF_CONVERSATIONS = {
    "conversations": pa.string(), "answers": pa.string(), "turns": pa.int64(), "scores": pa.float64(),
    "failures": pa.string(), "faults": pa.string(),
}  # fmt: skip
SCORED_COLUMNS = ("answers", "scores", "failures")
"""Further columns of conversations, for their measures."""

_CHUNK = 1024
_FINGERPRINT_BLOCKS, _BLOCK_BYTES = 64, 4096


@dataclass(frozen=True)
class Job:
    """Settings of the samples.

    Attributes:
        policy: name of the policy, for the record.
        engine: `vllm` or `transformers`.
        device: `cpu` or `cuda`.
        dtype: type of the engine's weights.
        num_samples: responses per prompt.
        max_tokens: longest response, in tokens.
        temperature: temperature of the samples; 0 is greedy.
        top_p: probability of the nucleus.
        seed: seed of all samples.
        prompts_per_part: number of prompts to sample and write together.
        stop: strings that end a response.
        stop_token_ids: tokens that end a response, besides the end of the sequence.
        template_options: further variables of the chat template.
        chat_template: chat template in place of the tokenizer's own; None for the tokenizer's own.
        environment: digest of the options of conversations; None for single responses.
    """

    policy: str
    engine: Literal["vllm", "transformers"]
    device: Literal["cpu", "cuda"]
    dtype: str
    num_samples: int
    max_tokens: int
    temperature: float
    top_p: float
    seed: int
    prompts_per_part: int
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    template_options: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    environment: str | None = None

    def settings(self, rows: PromptRows, model: str) -> dict[str, Any]:
        """Return everything the samples depend on, with digests of the prompts and of the model's weights."""
        prompts = hashlib.blake2b(digest_size=8)
        for row in rows:
            prompts.update(json.dumps(row, sort_keys=True, default=str).encode())
        return {
            **asdict(self),
            "weights": fingerprint(model),
            "prompts": prompts.hexdigest(),
        }

    def sampling(self, stop_token_ids: tuple[int, ...]) -> SamplingConfig:
        """Return the settings of the engine."""
        return SamplingConfig(
            max_tokens=self.max_tokens,
            num_samples=self.num_samples,
            temperature=self.temperature,
            top_p=self.top_p,
            stop=self.stop,
            stop_token_ids=(*stop_token_ids, *self.stop_token_ids),
        )


def open_samples(path: Path, rows: PromptRows, job: Job, model: str) -> SampleFile:
    """Return the file of a job's samples.

    Args:
        path: path of the file.
        rows: rows of the prompts.
        job: settings of the samples.
        model: Hugging Face folder or name of the policy.

    Raises:
        ConfigError: the file was made with other settings, or the prompts already have a column of samples.
    """
    added = (*COLUMNS, *(() if job.environment is None else _KINDS_OF_CONVERSATIONS))
    taken = [name for name in added if name in rows.rows[0]]
    if taken:
        raise ConfigError(f"{rows.location(0)}: there is a column {taken[0]!r} already: name a file of prompts")
    samples = SampleFile(path, -(-len(rows) // job.prompts_per_part), job.settings(rows, model))
    samples.check()
    return samples


def generate(
    samples: SampleFile,
    rows: PromptRows,
    prompt_ids: Sequence[list[int]],
    job: Job,
    tokenizer: PreTrainedTokenizerBase,
    sample: Sample,
    images: Sequence[PromptImages | None] | None = None,
) -> Iterator[dict[str, float]]:
    """Make the missing parts, then the file.

    Args:
        samples: file returned by `open_samples` for the same job, and opened.
        rows: rows of the prompts.
        prompt_ids: token ids of each prompt.
        job: settings of the samples.
        tokenizer: tokenizer of the policy.
        sample: samples responses or conversations.
        images: images of each row; None if no row has images.

    Yields:
        For each part: the number of `parts` made by this call so far, `samples_per_s` and `tokens_per_s` of the part.
    """
    from rl_plugins.rollout.engine import GroupRequest

    sampling, missing, size = job.sampling((tokenizer.eos_token_id,)), samples.missing(), job.num_samples
    # Every part has the types of all rows.
    schema = _schema(rows)
    for made_so_far, number in enumerate(missing, start=1):
        start = time.perf_counter()
        part = range(number * job.prompts_per_part, min((number + 1) * job.prompts_per_part, len(rows)))
        requests = [
            GroupRequest(row, prompt_ids[row], _seed(job.seed, row), images=None if images is None else images[row])
            for row in part
        ]
        asked = [dict(rows.rows[row]) for row in part]
        generations = sample(asked, requests, sampling)
        made = pa.Table.from_pylist(asked, schema)
        for name, (kind, values) in _columns(generations, tokenizer).items():
            of_rows = [values[start : start + size] for start in range(0, len(values), size)]
            made = made.append_column(name, pa.array(of_rows, pa.list_(kind)))
        samples.write_part(number, made)
        seconds = time.perf_counter() - start
        yield {
            "parts": made_so_far,
            "samples_per_s": len(generations.lengths) / seconds,
            "tokens_per_s": float(generations.lengths.sum()) / seconds,
        }
    samples.finish()


def _columns(
    generations: Generations, tokenizer: PreTrainedTokenizerBase
) -> dict[str, tuple[pa.DataType, Sequence[Any]]]:
    """Return type and values of each column of samples. The response of a conversation is its text."""
    endings = generations.endings
    values: dict[str, Sequence[Any]] = {
        "responses": [ending.transcript() for ending in endings]
        or tokenizer.batch_decode(generations.responses(), skip_special_tokens=True),
        "finish_reasons": generations.finish_reasons,
        "response_lengths": generations.lengths.tolist(),
    }
    if endings:
        values |= {
            "conversations": [json.dumps([*map(dict, (*(one.prompt or ()), *one.said))]) for one in endings],
            "answers": [ending.last for ending in endings],
            "turns": [ending.turns for ending in endings],
            "scores": [ending.score.value for ending in endings],
            "failures": [ending.score.failure for ending in endings],
            "faults": [redacted(whole_characters(ending.score.message)) for ending in endings],
        }
    return {name: ((_KINDS | _KINDS_OF_CONVERSATIONS)[name], column) for name, column in values.items()}


def fingerprint(model: str) -> str:
    """Return a digest of 64 blocks of each file in the model's folder, which any training changes, or the hub name."""
    folder, hasher = Path(model), hashlib.blake2b(digest_size=8)
    if not folder.is_dir():
        return model
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        size = path.stat().st_size
        hasher.update(f"{path.relative_to(folder)} {size}".encode())
        with path.open("rb") as file:
            for block in range(_FINGERPRINT_BLOCKS):
                file.seek(block * size // _FINGERPRINT_BLOCKS)
                hasher.update(file.read(_BLOCK_BYTES))
    return hasher.hexdigest()


def _seed(seed: int, row: int) -> int:
    return int(np.random.SeedSequence([seed, row]).generate_state(1)[0]) >> 1


def _schema(rows: PromptRows) -> pa.Schema:
    """Return a schema for all rows, found in one pass with a few rows in memory at a time."""
    try:
        # Rows of several files may differ in columns, and Arrow takes the columns of the first row only.
        columns = dict.fromkeys(rows.columns)
        parts = (pa.Table.from_pylist([{**columns, **row} for row in chunk]).schema for chunk in rows.chunks(_CHUNK))
        return reduce(lambda a, b: pa.unify_schemas([a, b], promote_options="permissive"), parts)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise ConfigError(
            f"the prompts do not fit into one table, because their columns differ in type ({error}): sample each "
            "file by itself"
        ) from None
