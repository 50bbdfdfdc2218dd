"""Commands and Python blocks of README and docs run, and the options named by the pages exist.

Python blocks of a page run one after the other in a temporary folder. Every command of a shell block is checked against
its program: the options of a recipe compose, a module or script exists and knows the flags, and so on. Paths of the
repository exist.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from rl_plugins.tests.cases import case
from rl_plugins.tests.repository.documentation import MADE, ROOT, WRITTEN, blocks, check_command
from rl_plugins.tests.sandbox.machine import skip_without_namespaces

# Makes the files for the blocks of a page in the folder of the blocks, from the blocks themselves.
GIVEN: dict[str, Callable[[Path, list[str]], object]] = {
    "docs/rewards.md": lambda folder, code: (folder / "my_reward.py").write_text(code[0]),
}
OWN_FOLDERS = tuple(
    f"{name}/" for name in ("benchmarks", "docs", "examples", "integration_tests", "recipes", "rl_plugins")
)
# Written like options, and something else.
NOT_OPTIONS = {
    "strategy.model",  # an attribute of Lightning's strategies
    "reward_model.ground_truth",  # a column of the data
}
# Mappings with the arguments of a function as keys.
FREE = ("algorithm.advantage_options.", "algorithm.policy_loss_options.", "loss.options.", "reward.functions.")


def commands() -> Iterator[tuple[str, list[str]]]:
    """Page and words of every command in a shell block; continued lines are one."""
    for page, text in WRITTEN.items():
        for block in blocks(text, "bash"):
            for line in block.replace("\\\n", " ").splitlines():
                if words := shlex.split(line, comments=True):
                    yield page, words


COMMANDS = list(commands())


def test_commands_finds_the_commands_of_pages():
    assert ("README.md", ["make", "quickstart"]) in COMMANDS
    assert len(COMMANDS) > 50


def test_readme_commands_for_cpus_and_gpus_differ_by_devices_and_the_name_of_the_run():
    recipe = ["python", "-m", "rl_plugins.recipes.grpo"]
    on_cpus, on_gpus = (words[3:] for page, words in COMMANDS if page == "README.md" and words[:3] == recipe)
    assert set(on_cpus) <= set(on_gpus)
    more = {word.partition("=")[0] for word in set(on_gpus) - set(on_cpus)}
    assert more == {"run.name", "model.precision", "placement.num_workers"}


def test_all_pages_with_commands_are_typed_or_left_out_with_a_reason():
    from integration_tests import test_docs_commands as typed

    assert {page for page in WRITTEN if any(typed.lines(page))} == typed.PAGES_LEFT_OUT.keys() | {*typed.PAGES}
    lines = [" ".join(line.split()) for page in typed.PAGES for line in typed.lines(page)]
    for start in (*typed.LEFT_OUT, *typed.TYPED_BEFORE):
        assert any(line.startswith(start) for line in lines), f"no page in PAGES has a line {start!r}"


@pytest.mark.parametrize("page", sorted(page for page, text in WRITTEN.items() if blocks(text, "python")))
def test_python_blocks_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if page == "docs/code.md":
        skip_without_namespaces()
    found = blocks(WRITTEN[page], "python")
    if page in GIVEN:
        GIVEN[page](tmp_path, found)
    names: dict[str, object] = {"__name__": "page"}
    for number, code in enumerate(found, 1):
        exec(compile(code, f"{page}, block {number}", "exec"), names)


def difference(name):
    """The changed lines between the files of a name in the two examples; a file may be new with RL."""
    files = [ROOT / "examples" / project / name for project in ("existing_project", "existing_project_rl")]
    before, after = (file.read_text(encoding="utf-8").splitlines() if file.exists() else [] for file in files)
    # Heads of files and places, and empty lines, are left out.
    changes = list(difflib.unified_diff(before, after, n=0))[2:]
    return [line for line in changes if not line.startswith("@@") and line != "+"]


@pytest.mark.parametrize("page", ["README.md", "docs/existing_project.md"])
def test_diff_of_a_page_is_the_difference_between_the_two_examples(page):
    shown = blocks(WRITTEN[page], "diff")[0]
    assert [line for line in shown.splitlines() if line] == difference("train.py")


def test_diff_of_lightning_cli_is_the_difference_between_the_two_examples():
    _, shown = blocks(WRITTEN["docs/existing_project.md"], "diff")
    expected = {name: difference(name) for name in ("cli.py", "cli.yaml", "reward.py")}
    assert shown.splitlines() == [line for name, lines in expected.items() for line in (f"+++ {name}", *lines)]


@pytest.mark.parametrize("page", sorted({page for page, _ in COMMANDS}))
def test_commands_of_a_page_name_existing_options_flags_and_paths(page):
    for words in (words for other, words in COMMANDS if other == page):
        with case(shlex.join(words)):
            check_command(words)
            missing = [word for word in words if word.startswith(OWN_FOLDERS) and not (ROOT / word).exists()]
            assert missing == []


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("python -m rl_plugins.recipes.grpo sampling.max_token=5", ValueError),
        ("python -m rl_plugins.recipes.gropo", AssertionError),
        ("python -m benchmarks.nothing", AssertionError),
        ("python -m benchmarks.packing --fast", AssertionError),
        ("python examples/existing_project/train.py rate=1", AssertionError),
        ("make quikstart", AssertionError),
        ("rl-plugins show outputs/run --curve x", SystemExit),
        ("rl-plugins submit -- grpo run.nam=x", ValueError),
        ("ray job submit -- python -m rl_plugins.recipes.grpo run.nam=x", ValueError),
        ("rayy job submit", AssertionError),
        ("SHARED=/shared sbatch examples/cluster/slurm.sh", AssertionError),
    ],
)
def test_check_command_refuses_a_wrong_command(command, error):
    with pytest.raises(error):
        check_command(shlex.split(command))


@cache
def documented_options() -> set[str]:
    """Return every option in the tables made from the schema and the algorithms, and the groups above them."""
    rows = r"^\| `(?:\+\+)?([a-z_0-9.]+)` \|"
    options = {option for text in MADE.values() for option in re.findall(rows, text, re.MULTILINE)}
    return options | {option[: dot.start()] for option in options for dot in re.finditer(r"\.", option)}


def named_options(page: str) -> set[str]:
    """Every `group.option` or `group.option=value` of a page, whose words stand between single backticks."""
    # Of a table of names, the first column is ours.
    lines = [line.split(" | ")[0] if page.endswith("coming_from.md") else line for line in WRITTEN[page].splitlines()]
    quoted = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", "\n".join(lines))
    words = [word.removeprefix("++").partition("=")[0] for quote in quoted for word in quote.split()]
    groups = {option.partition(".")[0] for option in documented_options()}
    named = {
        word for word in words if re.fullmatch(r"[a-z_]+(\.[a-z_0-9]+)+", word) and word.partition(".")[0] in groups
    }
    return {word for word in named if not word.endswith((".db", ".jsonl", ".md", ".py", ".txt", ".yaml"))}


def test_documented_options_and_named_options_find_options():
    assert {"placement.num_workers", "sampling.max_tokens"} <= documented_options()
    assert {"placement.num_workers", "algorithm.kl.coefficient"} <= named_options("docs/coming_from.md")
    assert "data.train_batch_size" not in named_options("docs/coming_from.md")


def test_options_in_the_text_of_pages_exist():
    unknown = {page: named_options(page) - documented_options() - NOT_OPTIONS for page in WRITTEN}
    named = {page: {option for option in options if not option.startswith(FREE)} for page, options in unknown.items()}
    assert {page: options for page, options in named.items() if options} == {}


def test_rows_of_the_table_of_names_have_four_cells():
    rows = [line for line in WRITTEN["docs/coming_from.md"].splitlines() if line.startswith("| `")]
    assert len(rows) > 50
    assert {line.count(" | ") for line in rows} == {3}
