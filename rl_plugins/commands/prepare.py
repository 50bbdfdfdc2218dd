"""Make data files for the recipes, and check data files.

examples:
  rl-plugins prepare gsm8k --input raw/gsm8k --output data/gsm8k
  rl-plugins prepare game --output data/game
  rl-plugins prepare jsonl --train math.jsonl --output data/math --data-source math \\
      --prompt question --ground-truth answer --test-share 0.05
  rl-plugins prepare jsonl --train pairs.jsonl --output data/pairs --data-source chat \\
      --prompt prompt --chosen chosen --rejected rejected
  rl-plugins prepare hf --input saved_data_set --output data/sft --data-source chat \\
      --prompt messages --response messages
  rl-plugins prepare verifiers --env my-env --args '{"level": 2}' --output data/my-env
  rl-plugins prepare validate data/math/train.parquet --test data/math/test.parquet \\
      --tokenizer MODEL --max-prompt-tokens 512
"""

from __future__ import annotations

import json
import shlex
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_plugins.commands.main import number, output_path
from rl_plugins.config.data import DataConfig
from rl_plugins.config.settings import AT_LEAST_1
from rl_plugins.control_characters import without_controls
from rl_plugins.data.formats import FORMATS
from rl_plugins.data.prepare import calculator, game, programs
from rl_plugins.data.prepare.conversion import (
    add_conversion_arguments,
    conversion_of,
    convert,
    json_records,
    saved_records,
)
from rl_plugins.data.prepare.files import read_records, write_rows, write_splits
from rl_plugins.data.prepare.tasks import TASKS, agent_task
from rl_plugins.errors import ConfigError

if TYPE_CHECKING:
    from rl_plugins.data.image_prompts import Processor
    from rl_plugins.data.parquet import Row
    from rl_plugins.data.validation import Findings

_MAX_SHOWN = 50
_KEYS = [option for option in fields(DataConfig) if option.name.endswith("_key")]
"""Options under `data` that name the columns beside the prompt."""
_TASKS = {
    **TASKS,
    "calculator": agent_task(
        "made-up products for a policy with a calculator", calculator.SIZES, calculator.calculator_splits
    ),
    "game": agent_task("made-up games: guess a hidden number", game.SIZES, game.game_splits),
    "programs": agent_task("made-up functions to program from two values", programs.SIZES, programs.program_splits),
}


def add_arguments(parser: ArgumentParser) -> None:
    """Declare a subcommand for each task, for both conversions, and for the check."""
    commands = parser.add_subparsers(dest="source", required=True, metavar="source")

    def command(name: str, summary: str, execute: Callable[[Namespace], int]) -> ArgumentParser:
        added = commands.add_parser(name, help=summary, description=summary)
        added.set_defaults(execute=execute)
        return added

    for name, task in _TASKS.items():
        task_parser = command(name, task.summary, _make)
        task.add_arguments(task_parser)
        _add_output(task_parser)
    lines = command(
        "jsonl", "JSON lines or parquet files of any layout", lambda options: _convert(options, json_records)
    )
    lines.add_argument("--train", type=Path, nargs="+", required=True, help="training files")
    lines.add_argument("--test", type=Path, nargs="+", default=[], help="held-out files")
    saved = command(
        "hf",
        "a data set of Hugging Face, saved with save_to_disk",
        lambda options: _convert(options, saved_records),
    )
    saved.add_argument("--input", type=Path, required=True, help="folder of the data set")
    saved.add_argument("--train-split", default="train", help="training split (default: %(default)s)")
    saved.add_argument("--test-split", help="held-out split, such as test")
    played = command("verifiers", "the data set of an environment of the package verifiers", _make_verifiers)
    _add_verifiers(played)
    for conversion_parser in (lines, saved):
        _add_output(conversion_parser)
        add_conversion_arguments(conversion_parser)
    _add_validate(command("validate", "every bad row of data files, duplicates and prompt lengths", _validate))


def run(arguments: Namespace) -> int:
    """Make or check data files.

    Returns:
        1 if a checked file has faults, else 0.
    """
    status: int = arguments.execute(arguments)
    return status


def _add_output(parser: ArgumentParser) -> None:
    parser.add_argument("--output", type=output_path, required=True, help="folder for train.parquet and test.parquet")


def _add_verifiers(parser: ArgumentParser) -> None:
    parser.add_argument("--env", required=True, help="name for verifiers.load_environment")
    parser.add_argument("--args", type=_json_object, default={}, help="arguments of its load_environment, as JSON")
    for split in ("train", "test"):
        parser.add_argument(f"--num-{split}", type=number(int, AT_LEAST_1), help=f"rows of {split} (default: all)")
    _add_output(parser)


def _json_object(text: str) -> dict[str, Any]:
    """Return the arguments of a text with a JSON object."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ArgumentTypeError(f"{text}: no JSON ({error})") from None
    if not isinstance(found, dict):
        raise ArgumentTypeError(f'{text}: give an object, such as {{"level": 2}}')
    return found


def _add_validate(parser: ArgumentParser) -> None:
    parser.add_argument("train", type=Path, nargs="+", help="parquet files")
    parser.add_argument(
        "--test",
        type=Path,
        nargs="*",
        default=[],
        help="held-out files, which must share no prompt with the training files",
    )
    parser.add_argument(
        "--format", choices=[*FORMATS], default="prompts", help="format of the rows (default: %(default)s)"
    )
    for key in _KEYS:
        parser.add_argument(
            f"--{key.name.replace('_', '-')}", default=key.default, help=f"like the option data.{key.name}"
        )
    parser.add_argument(
        "--tokenizer",
        help="folder or name of a model, to count the tokens of prompts, and to find prompts that the model's chat "
        "template refuses",
    )
    parser.add_argument("--chat-template", help="like the option data.chat_template (needs --tokenizer)")
    parser.add_argument(
        "--max-prompt-tokens", type=number(int, AT_LEAST_1), help="count longer prompts (needs --tokenizer)"
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run Python code that the tokenizer's folder names"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def _make(options: Namespace) -> int:
    splits = _TASKS[options.source].build(options)
    paths = write_splits(splits, options.output)
    counts = {path: len(splits[split]) for split, path in paths.items()}
    if "sft" not in splits:
        _print_files(counts, splits["train"][0], [_command("grpo", "MODEL", paths)])
        return 0
    # A task with responses has two recipes: SFT, and GRPO with the policy of SFT.
    names = {stage: f"{options.source}_{stage}" for stage in ("sft", "grpo")}
    sft = _command("sft", "MODEL", {"train": paths["sft"], "test": paths["dev"]}, names["sft"])
    grpo = _command("grpo", f"outputs/{names['sft']}/policy", paths, names["grpo"])
    _print_files(counts, splits["train"][0], [sft, grpo])
    return 0


def _make_verifiers(options: Namespace) -> int:
    from rl_plugins.environments.verifiers_agent import VerifiersAgent, dataset_rows, load_environment

    environment = load_environment(options.env, options.args)
    found = {split: dataset_rows(environment, split, getattr(options, f"num_{split}")) for split in ("train", "test")}
    splits = {split: rows for split, rows in found.items() if rows}
    if "train" not in splits:
        raise ConfigError(f"env={options.env}: the environment has no rows to train on: choose another environment")
    paths = write_splits(splits, options.output)
    arguments = {"args": options.args} if options.args else {}
    agent = {"_target_": f"{VerifiersAgent.__module__}.{VerifiersAgent.__name__}", "env": options.env, **arguments}
    command = _command("grpo", "MODEL", paths, options={"environment": "agent", "environment.agent": agent})
    _print_files({path: len(splits[split]) for split, path in paths.items()}, splits["train"][0], [command])
    return 0


def _convert(options: Namespace, records: Callable[[Namespace], dict[str, Any]]) -> int:
    conversion = conversion_of(options)
    counts = write_rows(convert(records(options), conversion, options.test_share), conversion.schema, options.output)
    files = {options.output / f"{split}.parquet": count for split, count in counts.items()}
    module, own_options = conversion.recipe
    command = _command(module, "MODEL", {path.stem: path for path in files}, options=own_options)
    _print_files(files, next(read_records(next(iter(files))))[1], [command])
    return 0


def _print_files(files: dict[Path, int], row: Row, commands: Sequence[str]) -> None:
    """Print the number of rows of each file, an example of a row, and the commands to train on the files."""
    for path, count in files.items():
        print(f"{path}: {count} rows")
    example = json.dumps(row, indent=2, ensure_ascii=False)
    print(f"\nAn example of a row:\n{without_controls(example)}")
    print("\nNext:", *commands, sep="\n  ")


def _command(
    recipe: str,
    model: str,
    splits: Mapping[str, Path],
    config_name: str | None = None,
    options: Mapping[str, object] | None = None,
) -> str:
    """Return the command that trains with a recipe.

    Args:
        recipe: module of the recipe.
        model: value of `model.path`.
        splits: file of the split `train`, and of `test` if there is one.
        config_name: name of the recipe's file; None for the name of the module.
        options: further options of the recipe.
    """
    from rl_plugins.launch.compose import override

    files = (("data.train_files", "train"), ("data.val_files", "test"))
    overrides = [override(option, value) for option, value in (options or {}).items()]
    overrides += [override(option, [splits[split]]) for option, split in files if split in splits]
    named = [] if config_name is None else ["--config-name", config_name]
    command = ["python", "-m", f"rl_plugins.recipes.{recipe}", *named, f"model.path={model}", *overrides]
    return shlex.join(command)


def _validate(options: Namespace) -> int:
    from rl_plugins.data.validation import validate

    if options.chat_template is not None and options.tokenizer is None:
        raise ConfigError("--chat-template needs a tokenizer: add --tokenizer MODEL, or leave the template out")
    keys = DataConfig(**{key.name: getattr(options, key.name) for key in _KEYS}, chat_template=options.chat_template)
    findings = validate(
        options.train,
        options.test,
        kind=options.format,
        keys=keys,
        tokenizer=None
        if options.tokenizer is None
        else _load_chat_tokenizer(options.tokenizer, options.trust_remote_code, keys.chat_template),
        max_prompt_tokens=options.max_prompt_tokens,
    )
    if options.json:
        print(json.dumps(asdict(findings), indent=2))
    else:
        _print_findings(findings)
    return 0 if findings.good else 1


def _load_chat_tokenizer(name: str, trust_remote_code: bool, chat_template: str | None) -> Processor:
    from rl_plugins.data.chat_template import check_chat_template
    from rl_plugins.data.image_prompts import load_tokenizer_or_processor, tokenizer_of

    processor = load_tokenizer_or_processor(name, trust_remote_code=trust_remote_code, chat_template=chat_template)
    check_chat_template(tokenizer_of(processor))
    return processor


def _print_findings(findings: Findings) -> None:
    from rich.table import Table

    from rl_plugins.commands.terminal import Terminal

    console = Terminal()
    for path, rows in findings.rows.items():
        bad = sum(bad_row.file == path for bad_row in findings.bad_rows)
        console.print(f"{path}: {rows} rows, {bad} bad, {findings.duplicates[path]} duplicates")
    if findings.prompt_tokens:
        statistics = ", ".join(f"{name} {value:g}" for name, value in findings.prompt_tokens.items())
        console.print(f"prompt tokens: {statistics}")
    if findings.max_prompt_tokens is not None and findings.prompt_tokens:
        console.print(f"longer than {findings.max_prompt_tokens} tokens: {findings.too_long} prompts")
    if findings.bad_rows:
        table = Table("file", "row", "field", "reason", title="bad rows", title_justify="left")
        for bad_row in findings.bad_rows:
            table.add_row(bad_row.file, "" if bad_row.row is None else str(bad_row.row), bad_row.field, bad_row.reason)
        console.print(table)
    for shared in findings.shared[:_MAX_SHOWN]:
        console.print(
            f"{shared.test_file}, row {shared.test_row} is also in {shared.train_file}, row {shared.train_row}",
        )
    if len(findings.shared) > _MAX_SHOWN:
        console.print(f"... and {len(findings.shared) - _MAX_SHOWN} more rows that both files have; --json names all")
