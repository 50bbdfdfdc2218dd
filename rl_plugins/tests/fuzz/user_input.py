"""Targets for input of users: options, rows, files of rows, folders of models, files of runs."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from hypothesis import strategies as st
from omegaconf import OmegaConf
from safetensors.numpy import save

from rl_plugins.commands.main import parse_arguments
from rl_plugins.config.checks import check_batch, check_options
from rl_plugins.config.data import DataConfig
from rl_plugins.config.models import LoraConfig
from rl_plugins.config.recipe import RecipeConfig, parse_config
from rl_plugins.config.stage_checks import check_stage_options
from rl_plugins.data.formats import FORMATS
from rl_plugins.data.images import read_images
from rl_plugins.data.parquet import LocatedRow, load_rows
from rl_plugins.data.prepare.files import read_records
from rl_plugins.errors import CheckpointError
from rl_plugins.launch.pinned_versions import PinnedVersions
from rl_plugins.manifest import MANIFEST, find_damage
from rl_plugins.models.folder import check_model_folder, check_model_type
from rl_plugins.models.lora import add_adapter
from rl_plugins.models.saved_adapter import load_adapter
from rl_plugins.models.tiny import build_model
from rl_plugins.plain_file import load_plain, save_plain
from rl_plugins.report.page import write_report
from rl_plugins.run_folder import RunFolder, read_metrics
from rl_plugins.tests.files import rewrite_manifest
from rl_plugins.tests.fuzz.inputs import NUMBERS, TEXTS, VALUES, Path_, as_json, changed, damaged, paths_of
from rl_plugins.tests.fuzz.target import Target
from rl_plugins.tests.pictures import encoded, picture
from rl_plugins.tests.report.handmade_run import handmade_run

_ROW: dict[str, Any] = {
    "prompt": [{"role": "user", "content": "17+25="}],
    "data_source": "addition",
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "42"},
    "extra_info": {"index": 0, "steps": ["1", "2"], "labels": [1.0, None]},
    "chosen": "42", "rejected": "41", "margin": 0.5, "label": True,
    "messages": [
        {"role": "user", "content": "17+25="},
        {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "add", "arguments": '{"a": 17}'}}]},
        {"role": "tool", "content": "42", "tool_call_id": "c"},
        {"role": "assistant", "content": "42", "reasoning": "add"},
    ],
    "tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}],
}  # fmt: skip
_KEYS = DataConfig(margin_key="margin")
_MODEL = {
    "model_type": "qwen2", "vocab_size": 8, "hidden_size": 4, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rope_scaling": {"factor": 2.0},
}  # fmt: skip
_ADAPTER = {
    "peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "exclude_modules": None,
    "init_lora_weights": True, "use_dora": False, "bias": "none", "modules_to_save": None, "rank_pattern": {},
}  # fmt: skip
_ALGORITHM: dict[str, Any] = {
    "_target_": "rl_plugins.algorithms.algorithm.Algorithm",
    "advantage": "grpo", "advantage_options": {"scale": "group"}, "policy_loss": "ppo_clip",
    "policy_loss_options": {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}, "aggregation": "token-mean",
    "scale_factor": 1.0, "reward_components": ["format"], "teacher_top_k": 32, "value_clip": 0.5,
    **{
        name: {"_target_": f"rl_plugins.algorithms.{module}", **options}
        for name, module, options in (
            ("kl", "regularization.KLConfig", {"coefficient": 0.1, "target": 0.1, "horizon": 100.0, "estimator": "k3"}),
            ("entropy", "regularization.EntropyConfig", {"coefficient": 0.1, "target": 0.5, "rate": 0.1, "maximum": 1}),
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
    check_stage_options(config)
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


def _row_check(kind: str) -> Callable[[Any], object]:
    return lambda row: FORMATS[kind].checked(row, _KEYS, "rows.parquet, row 3")


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


def _adapter_check(folder: Path, files: Mapping[str, bytes]) -> Callable[[tuple[str, bytes]], None]:
    settings = LoraConfig(rank=2, alpha=4.0, target_modules=["q_proj"])
    # Without weights, the model stays as it is.
    with torch.device("meta"):
        model = add_adapter(build_model(), settings)

    def check(change: tuple[str, bytes]) -> None:
        for name, content in {**files, change[0]: change[1]}.items():
            (folder / name).write_bytes(content)
        load_adapter(model, replace(settings, path=str(folder)))

    return check


def _report_check(folder: Path, files: Mapping[str, bytes]) -> Callable[[tuple[str, bytes]], None]:
    def check(change: tuple[str, bytes]) -> None:
        for name, content in {**files, change[0]: change[1]}.items():
            (folder / name).write_bytes(content)
        write_report(RunFolder(folder))

    return check


def _read_json_lines(file: Path) -> None:
    for _ in read_records(file):
        pass


def _read_image(content: bytes) -> None:
    read_images(LocatedRow({"images": [content]}, "rows.parquet, row 3"))


def _read_versions(file: Path) -> None:
    PinnedVersions.of_run(RunFolder(file.parent))


def user_targets(folder: Path) -> Mapping[str, Target]:
    """Return the targets by name.

    Args:
        folder: existing folder for files.
    """
    base: Any = OmegaConf.to_container(OmegaConf.structured(RecipeConfig))
    base |= {
        "stage": "policy_optimization",
        "model": {**base["model"], "path": "m"},
        "run": {**base["run"], "name": "r"},
    }
    options = ["=", "option", "configuration", "rollout.vllm.", "sampling.vllm.", "placement.judge.vllm."]
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
    pictures = [encoded(picture(size=(8, 8)), kind) for kind in ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "DDS")]
    found["images"] = Target(st.sampled_from(pictures).flatmap(damaged), _read_image, ["rows.parquet, row 3"])
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
    adapter = folder / "adapter"
    adapter.mkdir(exist_ok=True)
    of_adapter = {
        "adapter_config.json": json.dumps(_ADAPTER).encode(),
        "adapter_model.safetensors": save({"base_model.model.lm_head.lora_A.weight": np.ones((2, 4), np.float32)}),
    }
    as_adapter = st.sampled_from(sorted(of_adapter)).flatmap(
        lambda name: st.tuples(st.just(name), damaged(of_adapter[name]))
    ) | st.tuples(st.just("adapter_config.json"), as_json(changed(_ADAPTER) | VALUES))
    found["folder of an adapter"] = Target(as_adapter, _adapter_check(adapter, of_adapter), [str(adapter)])
    plain = folder / "state"
    save_plain({"step": 3, "weights": np.ones(4)}, plain)
    found["plain file"] = Target(damaged(plain.read_bytes()), _file_check(plain, load_plain), ["state"])
    found["algorithm"] = Target(changed(_ALGORITHM) | VALUES, _algorithm_check(base), ["algorithm", "option"])
    # The name of the command stays.
    lines_of_words = st.sampled_from(_COMMANDS).flatmap(
        lambda words: changed(words[1:], TEXTS | NUMBERS.map(str)).map(lambda others: [words[0], *others])
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
    run = handmade_run(folder / "run")
    samples = next(iter(run.samples.iterdir()))
    of_samples = json.loads(samples.read_bytes())
    read = {name: (run.path / name).read_bytes() for name in ("config.yaml", f"samples/{samples.name}")}
    in_run = st.sampled_from(sorted(read)).flatmap(
        lambda name: st.tuples(st.just(name), damaged(read[name]) | as_json(changed(of_samples) | VALUES))
    )
    found["files of a report"] = Target(in_run, _report_check(run.path, read), ["config.yaml"])
    versions = {"models/own/model@main": "0" * 40, "models:/adder@champion": "models:/adder/2"}
    pinned = damaged(json.dumps(versions).encode()) | as_json(changed(versions) | VALUES)
    found["versions of models and data"] = Target(
        pinned, _file_check(folder / "versions.json", _read_versions), ["versions.json"]
    )
    return found
