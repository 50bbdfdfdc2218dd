"""Conversion of raw records of any layout to rows.

The options of `rl-plugins prepare jsonl` and `rl-plugins prepare hf` name the fields of a record; the kind of file
follows from the named fields.
"""

from __future__ import annotations

import hashlib
import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

import pyarrow as pa

from rl_plugins.config.data import DataConfig
from rl_plugins.data.conversations import REASONING_KEYS
from rl_plugins.data.dotted_keys import find
from rl_plugins.data.formats import FORMATS
from rl_plugins.data.prepare.files import Record, read_records, read_saved, saved_splits
from rl_plugins.data.reasoning import END_OF_THOUGHT, THINK, without_reasoning
from rl_plugins.errors import ConfigError, RowError

_TEXT = pa.string()
_KINDS = {
    "prompts": ("ground_truth",),
    "sft": ("response",),
    "judged": ("response", "label"),
    "preferences": ("chosen", "rejected"),
    "steps": ("steps", "labels"),
}
_TYPES = {
    "response": _TEXT, "label": pa.bool_(), "chosen": _TEXT, "rejected": _TEXT, "margin": pa.float64(),
    "steps": pa.list_(_TEXT), "labels": pa.list_(pa.float64()),
}  # fmt: skip
_RECIPES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "prompts": ("grpo", {}),
    "sft": ("sft", {"data.response_key": "response"}),
    "judged": (
        "preference_optimization",
        {"loss.name": "kto", "data.response_key": "response", "data.label_key": "label"},
    ),
    "preferences": ("preference_optimization", {}),
    "steps": (
        "reward_modeling",
        {"loss.name": "process_reward", "data.steps_key": "steps", "data.labels_key": "labels"},
    ),
}
"""Recipe for each kind of file, and the options that name the columns."""


@dataclass(frozen=True)
class FieldNames:
    """Dotted keys of the fields of a raw record; None for a field without a use.

    Attributes:
        prompt: key of the prompt: a text or a list of messages.
        ground_truth: key of the right answer; numbers and lists become texts.
        response: key of the response to learn or, with a label, to judge: a text, or messages with the response last.
        label: key of the label: true if the response is good.
        chosen: key of the better response of a pair.
        rejected: key of the worse response of a pair.
        margin: key of the difference in quality of a pair, a number.
        steps: key of the steps of a response, a list of texts.
        labels: key of the labels of the steps, a list of numbers.
    """

    prompt: str
    ground_truth: str | None = None
    response: str | None = None
    label: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    margin: str | None = None
    steps: str | None = None
    labels: str | None = None

    @property
    def kind(self) -> str:
        """Name of the format in `FORMATS`.

        Raises:
            ConfigError: the fields fit no format.
        """
        given = {field.name for field in fields(self) if getattr(self, field.name) is not None} - {"prompt"}
        for kind, needed in _KINDS.items():
            optional = {"ground_truth", *(["margin"] if kind == "preferences" else [])}
            if given >= set(needed) and given <= {*needed, *optional}:
                return kind
        known = "; ".join(f"{' and '.join(map(_option_of, needed))} for {kind}" for kind, needed in _KINDS.items())
        raise ConfigError(f"{', '.join(map(_option_of, sorted(given))) or 'no field'} makes no file: give {known}")


@dataclass(frozen=True)
class Conversion:
    """Conversion of records to rows.

    Attributes:
        names: keys of the fields.
        data_source: value of the column `data_source` in all rows.
        ability: value of the column `ability` in all rows.
        instruction: text appended to every prompt.
        extra: keys of further fields to keep in `extra_info`, as texts.
    """

    names: FieldNames
    data_source: str
    ability: str = "general"
    instruction: str = ""
    extra: tuple[str, ...] = ()

    @property
    def schema(self) -> pa.Schema:
        """Columns of the file."""
        columns = {
            "prompt": pa.list_(pa.struct({"role": _TEXT, "content": _TEXT})),
            "data_source": _TEXT,
            "ability": _TEXT,
            "reward_model": pa.struct({"style": _TEXT, "ground_truth": _TEXT}),
            "extra_info": pa.struct({"split": _TEXT, "index": pa.int64(), **dict.fromkeys(self.extra, _TEXT)}),
        }
        return pa.schema({**columns, **{name: _TYPES[name] for name in _TYPES if getattr(self.names, name)}})

    @property
    def recipe(self) -> tuple[str, Mapping[str, str]]:
        """Module of the recipe for the file, and the options that name the columns."""
        if self.names.margin:
            # No loss of preferences has margins.
            return "reward_modeling", {"data.margin_key": "margin"}
        return _RECIPES[self.names.kind]

    @cached_property
    def _keys(self) -> DataConfig:
        margin_key = "margin" if self.names.margin else None
        return DataConfig(response_key="response", margin_key=margin_key, steps_key="steps", labels_key="labels")

    def row(self, record: Record, split: str, index: int, location: str) -> dict[str, Any]:
        """Return the row of a record.

        Args:
            record: the raw record.
            split: name of the split.
            index: number of the record in its split.
            location: file and number of the record, for messages.

        Raises:
            RowError: a field is missing or of the wrong type.
        """
        found = {
            name: find(record, key, _option_of(name), location)
            for name in ("ground_truth", *_TYPES)
            if (key := getattr(self.names, name)) is not None
        }
        prompt = find(record, self.names.prompt, "--prompt", location)
        for name in ("response", "chosen", "rejected"):
            if name in found:
                field = f"{_option_of(name)}={getattr(self.names, name)!r}"
                messages = found[name]
                found[name] = _response(messages, field, location)
                _check_asked(messages, prompt, field, location)
        kind = self.names.kind
        truth = found.pop("ground_truth", without_reasoning(found["response"]) if kind == "sft" else "")
        row = {
            "prompt": self._messages(prompt, location),
            "data_source": self.data_source,
            "ability": self.ability,
            "reward_model": {"style": "rule", "ground_truth": None if truth is None else _text(truth)},
            "extra_info": {
                "split": split,
                "index": index,
                **{key: _text(find(record, key, "--extra", location)) for key in self.extra},
            },
            **found,
        }
        if kind == "prompts" and truth is None:
            raise RowError(location, f"--ground-truth={self.names.ground_truth!r}", "holds nothing (null)")
        FORMATS[kind].checked(row, self._keys, location)
        if kind == "steps":
            row["labels"] = [None if label is None else float(label) for label in row["labels"]]
        return row

    def _messages(self, prompt: object, location: str) -> object:
        if isinstance(prompt, str):
            return [{"role": "user", "content": f"{prompt} {self.instruction}".strip()}]
        if not _are_messages(prompt):
            return prompt
        asked = _asked(prompt)
        field = f"--prompt={self.names.prompt!r}"
        # Templates leave the reasoning of earlier turns out, too.
        messages = [{"role": message.get("role"), "content": _text_of(message, field, location)} for message in asked]
        if messages and self.instruction:
            messages[-1]["content"] = f"{messages[-1]['content']} {self.instruction}"
        return messages


def convert(
    records: Mapping[str, Iterable[tuple[str, Record]]], conversion: Conversion, test_share: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the split and the row of every record.

    Args:
        records: location and record of every record of a split.
        conversion: conversion of records to rows.
        test_share: share of the prompts to put into the split `test`, if `records` has no such split.

    Raises:
        ConfigError: a split has no records, or a record makes no row.
    """
    held_out_share = test_share if "test" not in records else 0.0
    for split, entries in records.items():
        index = -1
        for index, (location, record) in enumerate(entries):
            row = conversion.row(record, split, index, location)
            held_out = held_out_share and _uniform_hash(row["prompt"]) < held_out_share
            row["extra_info"]["split"] = target = "test" if held_out else split
            yield target, row
        if index < 0:
            raise ConfigError(f"the input of the split {split!r} has no records: name other files or another split")


def _uniform_hash(prompt: object) -> float:
    """Return a number from 0 to below 1 that depends on the prompt alone."""
    digest = hashlib.blake2b(json.dumps(prompt).encode(), digest_size=8).digest()
    return int.from_bytes(digest) / 2**64


def _asked(messages: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages before the response of the policy, if this is the last message."""
    return messages[:-1] if messages[-1].get("role") == "assistant" else messages


def _check_asked(value: object, prompt: object, field: str, location: str) -> None:
    """Check that the messages before a response are as many as those of the prompt: the row keeps the prompt alone.

    Raises:
        RowError: their numbers differ, and the response has messages before it.
    """
    if not _are_messages(value) or not (isinstance(prompt, str) or _are_messages(prompt)):
        return
    before, asked = len(value) - 1, 1 if isinstance(prompt, str) else len(_asked(prompt))
    if before not in (0, asked):
        reason = (
            f"{before} messages are before the response, and --prompt has {asked}: name this field in --prompt, too"
        )
        raise RowError(location, field, reason)


def _are_messages(value: object) -> TypeGuard[list[Mapping[str, Any]]]:
    return isinstance(value, list) and bool(value) and all(isinstance(message, Mapping) for message in value)


def _response(value: object, field: str, location: str) -> object:
    """Return the text of the last message, which is the policy's; a value without messages is returned unchanged.

    Reasoning in a field of its own stands before the text, as chat templates of reasoning models write the message.

    Raises:
        RowError: the last message has another role, or is more or other than a text.
    """
    if not _are_messages(value):
        return value
    role = value[-1].get("role")
    if role != "assistant":
        reason = f"the last message has the role {role!r}, and a response has the role 'assistant': remove the record"
        raise RowError(location, field, reason)
    text = _text_of(value[-1], field, location)
    reasoning = next((found for name in REASONING_KEYS if (found := value[-1].get(name))), None)
    if reasoning is None or END_OF_THOUGHT in text:
        return text
    if not isinstance(reasoning, str):
        raise RowError(
            location, field, f"a message has the reasoning {str(reasoning)[:40]!r}: write a text, or remove the record"
        )
    return f"{THINK}\n" + reasoning.strip("\n") + f"\n{END_OF_THOUGHT}\n\n" + text.lstrip("\n")


def _text_of(message: Mapping[str, Any], field: str, location: str) -> str:
    """Return the text of a message.

    Raises:
        RowError: the message is more or other than a text.
    """
    if message.get("tool_calls"):
        raise RowError(
            location, field, "a message has tool_calls, and a row keeps texts alone: write the calls into the content"
        )
    content = message.get("content")
    if not isinstance(content, str):
        raise RowError(
            location, field, f"a message has the content {str(content)[:40]!r}: write a text, or remove the record"
        )
    return content


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _option_of(name: str) -> str:
    return "--" + name.replace("_", "-")


# Command line -----------------------------------------------------------------------------------------------------


def add_conversion_arguments(parser: ArgumentParser) -> None:
    """Add the options of a conversion."""
    parser.add_argument("--prompt", required=True, help="field of the prompt: a text, or a list of messages")
    for name, meaning in {
        "ground_truth": "of the right answer",
        "response": "of the response (SFT; with --label, a judged one): a text, or messages with the response last",
        "label": "of true or false: true if the response is good",
        "chosen": "of the better response of a pair",
        "rejected": "of the worse response of a pair",
        "margin": "of a number: the difference in quality of a pair",
        "steps": "of a list of texts: the steps of a response",
        "labels": "of a list of numbers from 0 (wrong) to 1 (right), one per step",
    }.items():
        parser.add_argument(_option_of(name), metavar="FIELD", help=f"field {meaning}")
    parser.add_argument("--extra", nargs="*", default=[], metavar="FIELD", help="fields to keep in extra_info")
    parser.add_argument("--data-source", required=True, help="name of the data, by which rewards are chosen")
    parser.add_argument("--ability", default="general", help="ability the data asks for (default: %(default)s)")
    parser.add_argument("--instruction", default="", help="text appended to every prompt")
    parser.add_argument(
        "--test-share", type=float, default=0.0, metavar="SHARE",
        help="share of the prompts to hold out if there is no test file; equal prompts stay together",
    )  # fmt: skip


def conversion_of(options: Namespace) -> Conversion:
    """Return the conversion described by the options.

    Raises:
        ConfigError: the fields fit no kind of file, or the share is out of range.
    """
    names = FieldNames(**{field.name: getattr(options, field.name) for field in fields(FieldNames)})
    if own := {"split", "index"}.intersection(options.extra):
        raise ConfigError(f"--extra {own.pop()}: extra_info has a field of this name already: rename the field")
    if not 0 <= options.test_share < 1:
        raise ConfigError(f"--test-share={options.test_share}: must be from 0 to below 1")
    # Raises for fields that fit no kind of file, before anything is read.
    _ = names.kind
    return Conversion(names, options.data_source, options.ability, options.instruction, tuple(options.extra))


def json_records(options: Namespace) -> dict[str, Iterator[tuple[str, Record]]]:
    """Return the records of each split of JSON lines or parquet files."""
    splits: dict[str, list[Path]] = {"train": options.train, "test": options.test}
    return {
        split: (entry for path in paths for entry in read_records(path)) for split, paths in splits.items() if paths
    }


def saved_records(options: Namespace) -> dict[str, Iterator[tuple[str, Record]]]:
    """Return the records of the splits of a data set written with `save_to_disk`.

    Raises:
        ConfigError: the data set lacks a split.
    """
    folders = saved_splits(options.input)
    names = {"train": options.train_split, "test": options.test_split}
    for name in filter(None, names.values()):
        if name not in folders:
            raise ConfigError(f"{options.input}: there is no split {name!r}; there is {', '.join(folders)}")
    return {split: read_saved(folders[name]) for split, name in names.items() if name}
