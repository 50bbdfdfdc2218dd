"""The pages of the documentation, the sources of the package, and checks of the shell commands in pages.

Pages made from docstrings have other tests (test_algorithm_docs).
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import itertools
import re
import sys
from argparse import ArgumentParser
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from rl_plugins.config.recipe import parse_config
from rl_plugins.launch.compose import compose_config
from rl_plugins.launch.pipeline import stage_configs

ROOT = Path(__file__).parents[3]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
}
MADE = {page: text for page, text in PAGES.items() if text.startswith("<!-- Written by")}
WRITTEN = {page: text for page, text in PAGES.items() if page not in MADE}

_PIPELINES = {"sft_rm_ppo"}
# Programs of other projects: their arguments are not checked.
_FOREIGN = {
    ".",
    ".venv/bin/pre-commit",
    "cp",
    "curl",
    "export",
    "docker",
    "mkdir",
    "kubectl",
    "mlflow",
    "pip",
    "ray",
    "rm",
    "sbatch",
    "vllm",
}
# Words in place of a reader's words.
_PLACEHOLDERS = {"...", "key=value"}


def blocks(text: str, language: str) -> list[str]:
    """The code of the fenced blocks in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def sources() -> list[Path]:
    """Return every file of the package, without its tests."""
    tops = ("rl_plugins", "strategies", "callbacks", "recipes")
    return [path for top in tops for path in (ROOT / top).rglob("*.py") if "tests" not in path.parts]


def syntax_tree(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def figures() -> Any:
    """Return the module docs/figures.py."""
    spec = importlib.util.spec_from_file_location("figures", ROOT / "docs" / "figures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses of the program look up the module.
    sys.modules["figures"] = module
    spec.loader.exec_module(module)
    return module


def text_of(node: ast.expr) -> str | None:
    """Return a string of the code, with … for inserted values; None for another expression."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def check_command(words: list[str]) -> None:
    """Check a command against the started program."""
    given = list(itertools.takewhile(re.compile(r"[A-Z_]+=").match, words))
    program, *arguments = [word for word in words[len(given) :] if word not in _PLACEHOLDERS]
    if program == "rl-plugins":
        _check_subcommand(*arguments)
    elif program == "make":
        _check_make(arguments)
    elif program != "python":
        assert program in _FOREIGN, f"{program} is unknown"
        if program == "sbatch":
            _check_variables(ROOT / arguments[0], {word.partition("=")[0] for word in given})
        if "--" in arguments:
            check_command(arguments[arguments.index("--") + 1 :])
    elif arguments[0] == "-m":
        _check_module(*arguments[1:])
    elif arguments[0] == "-c":
        exec(compile("\n".join(_imports(arguments[1])), "python -c", "exec"), {})
    else:
        _check_script(ROOT / arguments[0], arguments[1:])


def _check_module(module: str, *arguments: str) -> None:
    """Check the module of `python -m`: a recipe by its options, another module by its flags."""
    recipe = module.removeprefix("rl_plugins.recipes.")
    if module == "rl_plugins":
        _check_subcommand(*arguments)
    elif recipe not in (module, "quickstart"):
        assert (ROOT / "recipes" / f"{recipe}.py").is_file(), f"there is no recipe {recipe}"
        _check_recipe(recipe, list(arguments))
    else:
        spec = importlib.util.find_spec(module)
        assert spec is not None and spec.origin is not None, f"there is no module {module}"
        origin = Path(spec.origin)
        files = origin.parent.glob("*.py") if origin.stem == "__init__" else [origin]
        _check_flags(arguments, "".join(file.read_text(encoding="utf-8") for file in files))


def _check_recipe(recipe: str, arguments: list[str]) -> None:
    """Check the composition of options with a recipe, without the groups in the reader's folder only."""
    parser = ArgumentParser(allow_abbrev=False, exit_on_error=False)
    for flag in ("--cfg", "--config-name", "--config-dir"):
        parser.add_argument(flag)
    parser.add_argument("--multirun", action="store_true")
    flags, options = parser.parse_known_args(arguments)
    if flags.multirun:
        # The first of several values.
        options = [option if "[" in option else option.partition(",")[0] for option in options]
    if flags.config_dir is not None:
        groups = {path.parent.name for path in (ROOT / flags.config_dir).rglob("*.yaml")}
        options = [option for option in options if option.partition("=")[0] not in groups]
    if recipe in _PIPELINES:
        stage_configs(compose_config(recipe, options))
    else:
        parse_config(compose_config(flags.config_name or recipe, ["model.path=MODEL", *options]))


def _check_subcommand(name: str, *arguments: str) -> None:
    """Check a line of `rl-plugins` with the parser of its command, or the options of its recipe."""
    if (ROOT / "recipes" / f"{name}.py").is_file():
        _check_module(f"rl_plugins.recipes.{name}", *arguments)
        return
    command = importlib.import_module(f"rl_plugins.commands.{name}")
    parser = ArgumentParser(prog=name)
    command.add_arguments(parser)
    parser.parse_args(arguments)
    if name == "submit":
        first, *rest = arguments[arguments.index("--") + 1 :]
        is_recipe = (ROOT / "recipes" / f"{first}.py").is_file()
        check_command(["python", "-m", f"rl_plugins.recipes.{first}", *rest] if is_recipe else [first, *rest])


def _check_make(arguments: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for word in arguments:
        variable, is_variable, _ = word.partition("=")
        known = rf"\$\({variable}\)" if is_variable else rf"^{word}:"
        assert re.search(known, makefile, re.MULTILINE), f"make knows no {variable}"


def _check_script(script: Path, arguments: list[str]) -> None:
    """Check that a script knows the flags, or that the script's configuration has the options."""
    _check_flags(arguments, script.read_text(encoding="utf-8"))
    file = script.with_name("config.yaml")
    known = OmegaConf.load(file).keys() if file.is_file() else ()
    for option, is_option, _ in (word.partition("=") for word in arguments):
        assert not is_option or option.startswith("-") or option in known, f"{script} has no option {option}"


def _check_flags(arguments: list[str] | tuple[str, ...], source: str) -> None:
    """Check that the source of the program contains each flag."""
    for word in arguments:
        flag = word.partition("=")[0]
        assert not flag.startswith("--") or flag == "--help" or f'"{flag}"' in source, f"{flag} is unknown"


def _check_variables(script: Path, given: set[str]) -> None:
    """Check that a command gives each variable which its shell script refuses to miss."""
    missing = set(re.findall(r"\$\{(\w+):\?", script.read_text(encoding="utf-8"))) - given
    assert not missing, f"{script} needs {missing}"


def _imports(code: str) -> list[str]:
    """The import statements of a piece of code."""
    return [ast.unparse(node) for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Import | ast.ImportFrom)]
