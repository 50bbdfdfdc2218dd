"""Random bad input for the functions that check input, in this process, without Ray, vLLM and training.

`python -m rl_plugins.tests.fuzz --minutes 30` prints the share of each outcome by target, and each fault with its
input.

A target is a function of input: options, rows, files of rows, folders of models, files of runs. Hypothesis makes the
input from good input by a few changes: other values, missing keys, changed bytes, a shorter file.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from safetensors.numpy import save

from rl_plugins.commands.main import parse_arguments
from rl_plugins.config.checks import check_batch, check_options
from rl_plugins.config.recipe import RecipeConfig, parse_config
from rl_plugins.data.formats import FORMATS, RowKeys
from rl_plugins.data.parquet import load_rows
from rl_plugins.data.prepare.files import read_records
from rl_plugins.errors import CheckpointError, UserError
from rl_plugins.launch.hub_commits import HubCommits
from rl_plugins.manifest import MANIFEST, find_damage
from rl_plugins.models.folder import check_model_folder, check_model_type
from rl_plugins.plain_file import load_plain, save_plain
from rl_plugins.run_folder import RunFolder, read_metrics
from rl_plugins.tests.files import rewrite_manifest

OUTCOMES = ("clear", "accepted", "unclear", "traceback", "wrongly accepted")
_LONGEST = 1000
_LONGEST_SHOWN = 300
_STEP = 50

Path_ = tuple[Any, ...]
Change = tuple[Path_, Any]
_REMOVED = object()


@dataclass
class Report:
    """Outcomes of a target.

    Attributes:
        counts: number of inputs, by outcome.
        faults: one input for each fault, by the place of the fault.
    """

    counts: Counter[str] = field(default_factory=Counter)
    faults: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Target:
    """A function that checks input.

    Attributes:
        inputs: strategy of the input.
        check: function of an input. It raises a UserError for bad input, and an AssertionError for bad input that the
            tested function has accepted.
        things: words of which a clear message has one: names of files or options.
    """

    inputs: st.SearchStrategy[Any]
    check: Callable[[Any], object]
    things: Sequence[str]

    def run(self, report: Report, examples: int, number: int) -> None:
        """Try some inputs, and add the outcomes to the report.

        Args:
            report: report of the target.
            examples: number of inputs.
            number: seed of the inputs.
        """

        @seed(number)
        @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(self.inputs)
        def try_one(given_input: Any) -> None:
            outcome, place = self._outcome(deepcopy(given_input))
            report.counts[outcome] += 1
            if place:
                report.faults.setdefault(f"{outcome}: {place}", repr(given_input)[:_LONGEST_SHOWN])

        try_one()

    def _outcome(self, given_input: Any) -> tuple[str, str]:
        """Return the outcome, and the place of the fault."""
        try:
            with warnings.catch_warnings(action="ignore"):
                self.check(given_input)
        except UserError as error:
            message = str(error)
            is_line = message.isprintable() and 10 < len(message) < _LONGEST
            if is_line and any(word in message for word in self.things):
                return "clear", ""
            return "unclear", f"{message[:_LONGEST_SHOWN]!r} from {_place(error)}"
        except AssertionError as error:
            return "wrongly accepted", str(error)
        except Exception as error:
            return "traceback", f"{type(error).__name__} at {_place(error)}"
        return "accepted", ""


def _place(error: BaseException) -> str:
    """Return file and line of the last frame of the project."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "rl_plugins" in frame.filename]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"


# Inputs -----------------------------------------------------------------------------------------------------------

_NUMBERS = (
    st.sampled_from([0, -1, 1, 2, 1.5, math.nan, math.inf, -math.inf, 10**30, -(10**30), 1e300, True, 2**63])
    | st.integers()
    | st.floats()
)
_TEXTS = st.text(max_size=8) | st.sampled_from(
    ["", " ", "???", "${a.b}", "${", "\n", "\x1b[2J", "1e9", "null", "x" * 500]
)
_SIMPLE = st.none() | _NUMBERS | _TEXTS
VALUES = st.recursive(
    _SIMPLE,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def paths_of(value: Any, above: Path_ = ()) -> list[Path_]:
    """Return the paths of all values inside mappings and lists."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    return [path for key, inner in items for path in [(*above, key), *paths_of(inner, (*above, key))]]


def changed(base: Any, values: st.SearchStrategy[Any] = VALUES) -> st.SearchStrategy[Any]:
    """Return the strategy of a value with one to three inner values replaced or removed."""
    changes = st.tuples(st.sampled_from(paths_of(base)), values | st.just(_REMOVED))
    return st.lists(changes, min_size=1, max_size=3).map(lambda some: _with_changes(base, some))


def _with_changes(base: Any, changes: Sequence[Change]) -> Any:
    whole: Any = deepcopy(base)
    for path, value in changes:
        node: Any = whole
        for key in path[:-1]:
            node = node[key] if isinstance(node, dict | list) and _has(node, key) else None
        if isinstance(node, dict | list) and _has(node, path[-1]):
            if value is _REMOVED:
                del node[path[-1]]
            else:
                node[path[-1]] = value
    return whole


def _has(node: Any, key: str | int) -> bool:
    return key in node if isinstance(node, dict) else isinstance(key, int) and key < len(node)


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """Return the strategy of a file with changed bytes, with bytes cut off, or with other content."""
    kind = draw(st.sampled_from(["flip", "cut", "other"]))
    if kind == "cut":
        return content[: draw(st.integers(0, len(content) - 1))]
    if kind == "other":
        return draw(st.binary(max_size=64))
    harmed = bytearray(content)
    # Most faults are at the ends, where headers are.
    position = st.integers(0, len(content) - 1) | st.integers(0, min(99, len(content) - 1))
    position |= st.integers(max(0, len(content) - 100), len(content) - 1)
    for place, mask in draw(st.lists(st.tuples(position, st.integers(1, 255)), min_size=1, max_size=4)):
        harmed[place] ^= mask
    return bytes(harmed)


def as_json(values: st.SearchStrategy[Any]) -> st.SearchStrategy[bytes]:
    """Return the strategy of JSON files with the values."""
    return values.map(lambda value: json.dumps(value).encode())


# Targets ----------------------------------------------------------------------------------------------------------

_ROW: dict[str, Any] = {
    "prompt": [{"role": "user", "content": "17+25="}],
    "data_source": "addition",
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "42"},
    "extra_info": {"index": 0, "steps": ["1", "2"], "labels": [1.0, None]},
    "chosen": "42", "rejected": "41", "margin": 0.5, "label": True,
}  # fmt: skip
_KEYS = RowKeys(margin_key="margin")
_MODEL = {
    "model_type": "qwen2", "vocab_size": 8, "hidden_size": 4, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rope_scaling": {"factor": 2.0},
}  # fmt: skip
_ALGORITHM: dict[str, Any] = {
    "_target_": "rl_plugins.algorithms.algorithm.Algorithm",
    "advantage": "grpo", "advantage_options": {"scale": "group"}, "policy_loss": "ppo_clip",
    "policy_loss_options": {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}, "aggregation": "token-mean",
    "scale_factor": 1.0, "reward_components": ["format"], "teacher_top_k": 32, "value_clip": 0.5,
    **{
        name: {"_target_": f"rl_plugins.algorithms.{module}", **options}
        for name, module, options in (
            ("kl", "algorithm.KLConfig", {"coefficient": 0.1, "target": 0.1, "horizon": 100.0, "estimator": "k3"}),
            ("entropy", "algorithm.EntropyConfig", {"coefficient": 0.1, "target": 0.5, "rate": 0.01, "maximum": 1.0}),
            ("modifiers", "algorithm.LossModifiers", {"off_policy_mask": 0.1, "top_entropy": 0.5, "positive_nll": 1}),
            ("shaping", "reward_shaping.RewardShaping", {"clip": [-1.0, 1.0], "length_factor": 0.1}),
            ("group_filter", "filtering.GroupFilter", {"low": 0.1, "high": 0.9, "max_batches": 3, "oversampling": 2}),
            ("correction", "rollout_correction.RolloutCorrection", {"level": "token", "cap": 2.0, "band": None}),
        )
    },
}  # fmt: skip
_COMMANDS = [
    line.split()
    for line in (
        "generate m --data a.parquet --output s.parquet --samples 4 --temperature 0.5 --top-p 0.9 --max-tokens 8",
        "evaluate a.parquet b.parquet --reward exact_match --right-from 0.5 --workers 2 --deadline 3 --memory-mb 100",
        "export run/checkpoint_00000001 out --lora merged",
        "prepare validate a.parquet --format sft --max-prompt-tokens 8 --tokenizer m",
        "show run",
        "report run",
        "sync run",
        "plan grpo model.path=m",
        "submit --address a -- grpo run.steps=1",
    )
]
_TOKENIZER = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 7}, "merges": []}, "added_tokens": [{"id": 7}]}


def _check_config(values: Any) -> None:
    config = parse_config(values)
    check_options(config)
    check_batch(config)
    wrong = [
        path for path, value in _leaves(OmegaConf.to_container(OmegaConf.structured(config))) if _is_infinite(value)
    ]
    free = (
        "algorithm", "callbacks", "dataset", "functions", "loggers", "options", "process_reward_model", "profiler",
        "request", "schedule_options", "vllm",
    )  # fmt: skip
    wrong = [path for path in wrong if not set(free) & set(map(str, path))]
    assert wrong == [], f"{'.'.join(map(str, wrong[0]))} is not finite"


def _leaves(value: Any) -> list[tuple[Path_, Any]]:
    leaves = []
    for path in paths_of(value):
        node = value
        for key in path:
            node = node[key]
        leaves.append((path, node))
    return leaves


def _is_infinite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _algorithm_check(base: Mapping[str, Any]) -> Callable[[Any], None]:
    def check(node: Any) -> None:
        # The import loads torch, which takes seconds.
        from rl_plugins.launch.algorithm_check import check_algorithm

        check_algorithm(parse_config({**base, "algorithm": node}))
        wrong = [path for path, value in _leaves(node) if _is_infinite(value)]
        assert wrong == [], f"algorithm.{'.'.join(map(str, wrong[0]))} is not finite"

    return check


def _check_arguments(words: list[Any]) -> None:
    name, *others = words
    # A word may happen to be -h, which prints the help and ends the command.
    with suppress(SystemExit), redirect_stdout(io.StringIO()):
        values = vars(parse_arguments(name, [str(word) for word in others]))
        wrong = [option for option, value in values.items() if _is_infinite(value)]
        assert wrong == [], f"{name} --{wrong[0]} is not finite"


def _manifest_check(checkpoint: Path) -> Callable[[bytes], None]:
    def check(content: bytes) -> None:
        (checkpoint / MANIFEST).write_bytes(content)
        if (damage := find_damage(checkpoint)) is not None:
            raise CheckpointError(damage)

    return check


def _row_check(kind: str) -> Callable[[Any], None]:
    return lambda row: FORMATS[kind].check(row, _KEYS, "rows.parquet, row 3")


def _file_check(file: Path, check: Callable[[Path], object]) -> Callable[[bytes], None]:
    def write_and_check(content: bytes) -> None:
        file.write_bytes(content)
        check(file)

    return write_and_check


def _read_rows(file: Path) -> None:
    for _ in load_rows(file):
        pass


def _model_check(folder: Path, files: Mapping[str, bytes]) -> Callable[[tuple[str, bytes]], None]:
    def check(change: tuple[str, bytes]) -> None:
        for name, content in {**files, change[0]: change[1]}.items():
            (folder / name).write_bytes(content)
        check_model_type(str(folder), check_model_folder("model.path", str(folder)) or {})

    return check


def _read_json_lines(file: Path) -> None:
    for _ in read_records(file):
        pass


def _read_commits(file: Path) -> None:
    HubCommits.of_run(RunFolder(file.parent))


@cache
def targets(folder: Path) -> Mapping[str, Target]:
    """Return all targets by name.

    Args:
        folder: existing folder for files.
    """
    base: Any = OmegaConf.to_container(OmegaConf.structured(RecipeConfig))
    base |= {
        "stage": "policy_optimization",
        "model": {**base["model"], "path": "m"},
        "run": {**base["run"], "name": "r"},
    }
    options = ["=", "option", "configuration", "rollout.vllm.", "sampling.vllm."]
    found = {
        "options": Target(changed(base), _check_config, options),
        "any options": Target(VALUES, _check_config, options),
    }
    for kind in FORMATS:
        found[f"rows of {kind}"] = Target(changed(_ROW) | VALUES, _row_check(kind), ["rows.parquet, row 3"])
    rows = folder / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([_ROW] * 3), rows)
    found["parquet file"] = Target(damaged(rows.read_bytes()), _file_check(rows, _read_rows), ["rows.parquet"])
    lines = "".join(f"{json.dumps(_ROW)}\n" for _ in range(3)).encode()
    jsonl = folder / "rows.jsonl"
    found["json lines"] = Target(damaged(lines), _file_check(jsonl, _read_json_lines), ["rows.jsonl"])
    names = ["model.embed_tokens.weight", *(f"model.layers.{number}.mlp.up_proj.weight" for number in range(2))]
    files = {
        "config.json": json.dumps(_MODEL).encode(),
        "tokenizer.json": json.dumps(_TOKENIZER).encode(),
        "model.safetensors": save({name: np.ones((8, 4), np.float32) for name in names}),
        "tokenizer_config.json": b"{}",
    }
    model = folder / "model"
    model.mkdir(exist_ok=True)
    as_model = _model_check(model, files)
    found["folder of a model"] = Target(
        st.sampled_from(sorted(files)).flatmap(lambda name: st.tuples(st.just(name), damaged(files[name]))),
        as_model,
        [str(model)],
    )
    for name, content in {"config.json": _MODEL, "tokenizer.json": _TOKENIZER}.items():
        found[name] = Target(st.tuples(st.just(name), as_json(changed(content) | VALUES)), as_model, [str(model)])
    plain = folder / "state"
    save_plain({"step": 3, "weights": np.ones(4)}, plain)
    found["plain file"] = Target(damaged(plain.read_bytes()), _file_check(plain, load_plain), ["state"])
    found["algorithm"] = Target(changed(_ALGORITHM) | VALUES, _algorithm_check(base), ["algorithm", "option"])
    # The name of the command stays.
    lines_of_words = st.sampled_from(_COMMANDS).flatmap(
        lambda words: changed(words[1:], _TEXTS | _NUMBERS.map(str)).map(lambda others: [words[0], *others])
    )
    found["arguments"] = Target(lines_of_words, _check_arguments, ["rl-plugins"])
    checkpoint = folder / "checkpoint_00000003"
    checkpoint.mkdir(exist_ok=True)
    (checkpoint / "state").write_bytes(b"weights")
    rewrite_manifest(checkpoint)
    manifest = (checkpoint / MANIFEST).read_bytes()
    some = damaged(manifest) | as_json(changed(json.loads(manifest)) | VALUES)
    found["manifest"] = Target(some, _manifest_check(checkpoint), [checkpoint.name])
    metrics = "".join(json.dumps({"step": step, "time": 1.0, "train/loss": 0.5}) + "\n" for step in range(3)).encode()
    found["metrics"] = Target(damaged(metrics), _file_check(folder / "metrics.jsonl", read_metrics), ["metrics.jsonl"])
    commits = {"models/own/model@main": "0" * 40, "datasets/own/rows@v1": "1" * 40}
    hub = damaged(json.dumps(commits).encode()) | as_json(changed(commits) | VALUES)
    found["commits of the hub"] = Target(hub, _file_check(folder / "hub.json", _read_commits), ["hub.json"])
    return found


def fuzz(
    folder: Path, *, examples: int | None = None, seconds: float = math.inf, first: int = 0, apart: int = 1
) -> dict[str, Report]:
    """Try inputs of every target, in turn, until the time is over.

    Args:
        folder: folder for files.
        examples: number of inputs of each target; None for no bound.
        seconds: largest duration.
        first: first seed of the inputs.
        apart: distance of the seeds.

    Returns:
        Report of each target by its name.
    """
    reports = {name: Report() for name in targets(folder)}
    end, number = time.monotonic() + seconds, first
    while True:
        for name, target in targets(folder).items():
            if time.monotonic() > end:
                return reports
            target.run(reports[name], _STEP if examples is None else examples, number)
        number += apart
        if examples is not None:
            return reports


def fuzz_in_processes(processes: int, seconds: float) -> dict[str, Report]:
    """Try inputs of every target in several processes, each with seeds of its own; return the reports of all."""
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        started = [pool.submit(_fuzz_from, first, processes, seconds) for first in range(processes)]
        reports, *others = (one.result() for one in started)
    for other in others:
        for name, report in other.items():
            reports[name].counts += report.counts
            reports[name].faults = report.faults | reports[name].faults
    return reports


def _fuzz_from(first: int, apart: int, seconds: float) -> dict[str, Report]:
    with tempfile.TemporaryDirectory() as folder:
        return fuzz(Path(folder), seconds=seconds, first=first, apart=apart)


def faults_of(reports: Mapping[str, Report]) -> list[str]:
    """Return a line for each fault."""
    return [
        f"{name}: {place}, with the input {shown}" for name, report in reports.items()
        for place, shown in report.faults.items()
    ]  # fmt: skip


def main() -> int:
    """Print the share of each outcome by target, and the faults; return 1 if there is a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2.0, help="duration (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="(default: one for each core)")
    options = parser.parse_args()
    reports = fuzz_in_processes(options.processes, seconds=60 * options.minutes)
    print(f"{'target':<22}{'inputs':>9}" + "".join(f"{outcome:>18}" for outcome in OUTCOMES))
    reports["all"] = Report(sum((report.counts for report in reports.values()), Counter()))
    for name, report in reports.items():
        total = report.counts.total()
        shares = "".join(f"{report.counts[outcome] / max(total, 1):>18.2%}" for outcome in OUTCOMES)
        print(f"{name:<22}{total:>9}{shares}")
    faults = faults_of(reports)
    print("\n".join(faults))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
