"""Sampling of responses to a file of prompts, part by part, with the rollout engines of training.

The samples of a prompt depend on the policy, the settings and the prompt's row only. An interruption changes nothing: a
sample's seed follows from the row, and the prompts of a part are always sampled together.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa

from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.data.parquet import PromptRows
from rl_plugins.errors import ConfigError
from rl_plugins.evaluation.sample_file import SampleFile

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rl_plugins.rollout.engine import Generations

Sample = Callable[[list[list[int]], "SamplingConfig", list[int]], "Generations"]
COLUMNS = ("responses", "finish_reasons", "response_lengths")
"""Columns added to the columns of a prompt: lists with one entry per sample."""

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

    def settings(self, rows: PromptRows, model: str) -> dict[str, Any]:
        """Return everything the samples depend on, with digests of the prompts and of the model's weights."""
        prompts = hashlib.blake2b(digest_size=8)
        for row in rows:
            prompts.update(json.dumps(row, sort_keys=True, default=str).encode())
        return {**asdict(self), "weights": fingerprint(model), "prompts": prompts.hexdigest()}

    def sampling(self, stop_token_ids: tuple[int, ...]) -> SamplingConfig:
        """Return the settings of the engine."""
        return SamplingConfig(
            max_tokens=self.max_tokens,
            num_samples=self.num_samples,
            temperature=self.temperature,
            top_p=self.top_p,
            stop_token_ids=stop_token_ids,
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
    taken = [name for name in COLUMNS if name in rows.rows[0]]
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
) -> Iterator[dict[str, float]]:
    """Make the missing parts, then the file.

    Args:
        samples: file returned by `open_samples` for the same job, and opened.
        rows: rows of the prompts.
        prompt_ids: token ids of each prompt.
        job: settings of the samples.
        tokenizer: tokenizer of the policy.
        sample: Function of the engine that samples responses to prompts.

    Yields:
        For each part: the number of `parts` made by this call so far, `samples_per_s` and `tokens_per_s` of the part.
    """
    sampling, missing = job.sampling((tokenizer.eos_token_id,)), samples.missing()
    # Every part has the types of all rows.
    schema = _schema(rows)
    for made_so_far, number in enumerate(missing, start=1):
        start = time.perf_counter()
        part = slice(number * job.prompts_per_part, (number + 1) * job.prompts_per_part)
        prompts = list(prompt_ids[part])
        seeds = [_seed(job.seed, part.start + position) for position in range(len(prompts))]
        generations = sample(prompts, sampling, seeds)
        texts = tokenizer.batch_decode(generations.responses(), skip_special_tokens=True)
        columns = dict(zip(COLUMNS, (texts, generations.finish_reasons, generations.lengths.tolist()), strict=True))
        made = pa.Table.from_pylist([dict(rows.rows[part.start + n]) for n in range(len(prompts))], schema)
        for name, values in columns.items():
            kind = pa.list_(pa.int64() if name == "response_lengths" else pa.string())
            made = made.append_column(name, pa.array(_grouped(values, job.num_samples), kind))
        samples.write_part(number, made)
        seconds = time.perf_counter() - start
        yield {
            "parts": made_so_far,
            "samples_per_s": len(texts) / seconds,
            "tokens_per_s": float(generations.lengths.sum()) / seconds,
        }
    samples.finish()


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


def _grouped(values: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [values[start : start + size] for start in range(0, len(values), size)]
