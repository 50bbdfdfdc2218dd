"""Raw records of any layout become rows: the user says which field is what, and that says which kind of file it is."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import pyarrow as pa

from rl_plugins.data.columns import find
from rl_plugins.data.formats import FORMATS, Keys
from rl_plugins.data.prepare.records import Record
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
_RECIPES = {
    "prompts": "grpo",
    "sft": "sft data.response_key=response",
    "judged": "preference_optimization loss.name=kto data.response_key=response data.label_key=label",
    "preferences": "preference_optimization",
    "steps": "reward_modeling loss.name=process_reward data.steps_key=steps data.labels_key=labels",
}


@dataclass(frozen=True)
class FieldNames:
    """The fields of a raw record, dotted keys, by what they hold.

    Attributes:
        prompt: a text or a list of messages.
        ground_truth: the right answer; numbers and lists become texts.
        response: a response to learn or, with a label, to judge: a text, or messages of which it is the last.
        label: whether the response is good.
        chosen: the better response of a pair.
        rejected: the worse one.
        margin: by how much.
        steps: list of texts.
        labels: list of numbers.
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
        """The name of the format in `FORMATS`.

        Raises:
            ConfigError: the fields are those of no format, or of several.
        """
        given = {field.name for field in fields(self) if getattr(self, field.name) is not None} - {"prompt"}
        for kind, needed in _KINDS.items():
            optional = {"ground_truth", *(["margin"] if kind == "preferences" else [])}
            if given >= set(needed) and given <= {*needed, *optional}:
                return kind
        known = "; ".join(f"{' and '.join(option_of(name) for name in needed)} for {k}" for k, needed in _KINDS.items())
        raise ConfigError(f"{', '.join(map(option_of, sorted(given))) or 'no field'} makes no file: give {known}")


@dataclass(frozen=True)
class Conversion:
    """How records become rows.

    Attributes:
        names: the fields.
        data_source: of all rows.
        ability: of all rows.
        instruction: appended to every prompt.
        extra: fields that are kept in `extra_info`, as texts.
    """

    names: FieldNames
    data_source: str
    ability: str = "general"
    instruction: str = ""
    extra: tuple[str, ...] = ()

    @property
    def schema(self) -> pa.Schema:
        """The columns of the file."""
        columns = {
            "prompt": pa.list_(pa.struct({"role": _TEXT, "content": _TEXT})),
            "data_source": _TEXT,
            "ability": _TEXT,
            "reward_model": pa.struct({"style": _TEXT, "ground_truth": _TEXT}),
            "extra_info": pa.struct({"split": _TEXT, "index": pa.int64(), **dict.fromkeys(self.extra, _TEXT)}),
        }
        return pa.schema({**columns, **{name: _TYPES[name] for name in _TYPES if getattr(self.names, name)}})

    @property
    def recipe(self) -> str:
        """The recipe that takes the file, and the options that name its columns."""
        return _RECIPES[self.names.kind] + (" data.margin_key=margin" if self.names.margin else "")

    def row(self, record: Record, split: str, index: int, where: str) -> dict[str, Any]:
        """Return the row of a record.

        Raises:
            RowError: a field is missing or of another kind than it should be.
        """
        found = {
            name: find(record, key, option_of(name), where)
            for name in ("ground_truth", *_TYPES)
            if (key := getattr(self.names, name)) is not None
        }
        for name in ("response", "chosen", "rejected"):
            if name in found:
                found[name] = _last_content(found[name])
        truth = found.pop("ground_truth", found.get("response"))
        row = {
            "prompt": self._messages(find(record, self.names.prompt, "--prompt", where)),
            "data_source": self.data_source,
            "ability": self.ability,
            "reward_model": {"style": "rule", "ground_truth": None if truth is None else _text(truth)},
            "extra_info": {
                "split": split,
                "index": index,
                **{key: _text(find(record, key, "--extra", where)) for key in self.extra},
            },
            **found,
        }
        kind = self.names.kind
        keys = Keys(
            "response", margin_key="margin" if self.names.margin else None, steps_key="steps", labels_key="labels"
        )
        FORMATS[kind].check(row, keys, where)
        if kind == "steps":
            row["labels"] = [None if label is None else float(label) for label in row["labels"]]
        if kind == "prompts" and truth is None:
            raise RowError(where, f"--ground-truth={self.names.ground_truth!r}", "holds nothing (null).")
        return row

    def _messages(self, prompt: Any) -> Any:
        if isinstance(prompt, str):
            return [{"role": "user", "content": f"{prompt} {self.instruction}".strip()}]
        if not isinstance(prompt, list) or not all(isinstance(message, Mapping) for message in prompt):
            return prompt
        messages = [{"role": message.get("role"), "content": message.get("content")} for message in prompt]
        while messages and messages[-1]["role"] == "assistant":
            # The response, which the policy is to give.
            messages.pop()
        if messages and self.instruction:
            messages[-1]["content"] = f"{messages[-1]['content']} {self.instruction}"
        return messages


def converted(
    records: Mapping[str, Iterable[tuple[str, Record]]], made: Conversion, test_share: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the split and the row of every record; a share of the prompts goes to `test` where it is no split."""
    hold_out = test_share if "test" not in records else 0.0
    for split, entries in records.items():
        for index, (where, record) in enumerate(entries):
            row = made.row(record, split, index, where)
            if hold_out and _place(row["prompt"]) < hold_out:
                row["extra_info"]["split"] = "test"
            yield row["extra_info"]["split"], row


def _place(prompt: Any) -> float:
    """A number from 0 to below 1 that depends on the prompt alone."""
    digest = hashlib.blake2b(json.dumps(prompt).encode(), digest_size=8).digest()
    return int.from_bytes(digest) / 2**64


def _last_content(value: Any) -> Any:
    return value[-1].get("content") if isinstance(value, list) and value and isinstance(value[-1], Mapping) else value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def option_of(name: str) -> str:
    """The command line's option that names a field."""
    return "--" + name.replace("_", "-")
