"""The command line of a conversion: which records, and which of their fields is what."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from rl_plugins.data.prepare.conversion import Conversion, FieldNames, option_of
from rl_plugins.data.prepare.records import Record, read_records, read_saved, saved_splits
from rl_plugins.errors import ConfigError


def add_conversion_arguments(parser: ArgumentParser) -> None:
    """Add the options that say which field is what."""
    parser.add_argument("--prompt", required=True, help="field of the prompt: a text, or a list of messages")
    for name, meaning in {
        "ground_truth": "of the right answer",
        "response": "of the response (SFT; with --label, a judged one): a text, or messages of which it is the last",
        "label": "of true or false, whether the response is good",
        "chosen": "of the better response of a pair",
        "rejected": "of the worse one",
        "margin": "of a number, by how much",
        "steps": "of a list of texts, the steps of a response",
        "labels": "of as many numbers from 0 (wrong) to 1 (right)",
    }.items():
        parser.add_argument(option_of(name), metavar="FIELD", help=f"field {meaning}")
    parser.add_argument("--extra", nargs="*", default=[], metavar="FIELD", help="fields to keep in extra_info")
    parser.add_argument("--data-source", required=True, help="name of the data, by which rewards are chosen")
    parser.add_argument("--ability", default="general", help="what it asks for (default: %(default)s)")
    parser.add_argument("--instruction", default="", help="text appended to every prompt")
    parser.add_argument(
        "--test-share", type=float, default=0.0, metavar="SHARE",
        help="share of the prompts to hold out where there is no test file; equal prompts stay together",
    )  # fmt: skip


def conversion(options: Namespace) -> Conversion:
    """Return what the options describe.

    Raises:
        ConfigError: the fields make no file, or the share is out of range.
    """
    names = FieldNames(**{field.name: getattr(options, field.name) for field in fields(FieldNames)})
    if not 0 <= options.test_share < 1:
        raise ConfigError(f"--test-share={options.test_share}: must be from 0 to below 1")
    made = Conversion(names, options.data_source, options.ability, options.instruction, tuple(options.extra))
    # Fields that make no file are refused before anything is read.
    _ = made.names.kind
    return made


def json_records(options: Namespace) -> dict[str, Iterator[tuple[str, Record]]]:
    """The records of each split of JSON lines or parquet files."""
    splits: dict[str, list[Path]] = {"train": options.train, "test": options.test}
    return {
        split: (entry for path in paths for entry in read_records(path)) for split, paths in splits.items() if paths
    }


def saved_records(options: Namespace) -> dict[str, Iterator[tuple[str, Record]]]:
    """The records of the splits of a data set that was saved with `save_to_disk`.

    Raises:
        ConfigError: there is no such split.
    """
    there = saved_splits(options.input)
    wanted = {"train": options.train_split, "test": options.test_split}
    for name in filter(None, wanted.values()):
        if name not in there:
            raise ConfigError(f"{options.input}: there is no split {name!r}; there is {', '.join(there)}")
    return {split: read_saved(there[name]) for split, name in wanted.items() if name}
