"""Configuration of a recipe, composed by Hydra: from a list of overrides, or from the command line.

Hydra only composes. A run starts after Hydra has ended, so that Hydra does not change the errors of the run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rl_plugins.config.hydra_errors import CONFIG_FOLDER, explain, foreign_name, keys_of
from rl_plugins.config.recipe import dotted_options
from rl_plugins.config.schemas import register_schemas
from rl_plugins.errors import ConfigError
from rl_plugins.redaction import redacted_value

if TYPE_CHECKING:
    from omegaconf import DictConfig

_ABSENT = object()
_GROUPS = re.compile(r"^[^=]*[.+](?=\w+=)")
"""Groups of an option before its own name."""
_FLAGS_WITH_VALUE = {
    *("--cfg", "--config-dir", "--config-name", "--config-path", "--experimental-rerun", "--package"),
    *("-c", "-cd", "-cn", "-cp", "-p"),
}
"""Flags of Hydra whose value is the next argument, which may have an `=`."""
_NOT_IN_NAMES = re.compile(r"[^\w.=+-]")


def compose_config(config_name: str, overrides: list[str], folder: Path = CONFIG_FOLDER) -> Any:
    """Return the composed configuration of a recipe.

    Args:
        config_name: name of the recipe's file.
        overrides: Hydra overrides, such as `run.steps=3`.
        folder: folder of the recipe's file, `recipes/conf` by default.

    Raises:
        ConfigError: a key, a group choice or the recipe is unknown, a type is wrong, or an override is no valid syntax.
    """
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException

    register_schemas()
    with initialize_config_dir(config_dir=str(folder), version_base="1.3"):
        try:
            return _without_replaced_options(compose(config_name, overrides), config_name, overrides)
        except (HydraException, ValueError) as error:
            raise ConfigError(explain(error, lambda: keys_of(compose(config_name)))) from None


def _without_replaced_options(config: DictConfig, config_name: str, overrides: Sequence[str]) -> DictConfig:
    """Remove the recipe's options of an advantage or a policy loss that an override replaces.

    Options stay if an override names them: a function of the user has other arguments than the recipe's function.
    Options also stay if the override names the recipe's own function. Call it while Hydra is initialized.
    """
    from hydra import compose
    from omegaconf import open_dict

    keys = [text.partition("=")[0].lstrip("+") for text in overrides]
    for function, further in (("advantage", ()), ("policy_loss", ("selection_options",))):
        if f"algorithm.{function}" not in keys:
            continue
        others = [text for text, key in zip(overrides, keys, strict=True) if key != f"algorithm.{function}"]
        if config.algorithm.get(function) == compose(config_name, others).algorithm.get(function):
            continue
        with open_dict(config):
            for group in (f"{function}_options", *further):
                options = config.algorithm.get(group) or {}
                for name in list(options) if f"algorithm.{group}" not in keys else ():
                    if f"algorithm.{group}.{name}" not in keys:
                        del options[name]
    return config


def override(key: str, value: object) -> str:
    """Return `key=value` for a command line, with quotes around the value if Hydra would refuse or change the value.

    Hydra's grammar gives `(`, `#` and other characters a meaning.

    Args:
        key: name of the option.
        value: path, other text, list of texts, or mapping with values of JSON.
    """
    return f"{key}={_in_hydra_syntax(value)}"


def _in_hydra_syntax(value: object) -> str:
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{name}:{_in_hydra_syntax(item)}' for name, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_in_hydra_syntax, value))}]"
    if value is None or isinstance(value, int | float):
        return json.dumps(value)
    return _quoted(str(value))


def _quoted(text: str) -> str:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import Quote, QuotedString
    from hydra.errors import HydraException

    try:
        # In a list, commas and brackets have a meaning, too.
        read = OverridesParser.create().parse_override(f"key=[{text}]").value()
    except HydraException:
        read = None
    return text if read == [text] else QuotedString(text, Quote.double).with_quotes()


def compose_for_command_line(config_name: str) -> list[tuple[Any, str]]:
    """Return the configurations of sys.argv, each with the name of its recipe.

    The list is empty after --help or --cfg, and has several configurations with --multirun. --config-name selects
    another recipe. Our own `--cfg diff` prints the difference from the recipe.

    Args:
        config_name: name of the recipe without --config-name.

    Raises:
        ConfigError: as in `compose_config`.
    """
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException

    asked = _arguments_of_hydra(sys.argv[1:])
    _check_name_of_own_recipe(asked)
    if asked.cfg == "diff":
        name = asked.config_name or config_name
        folders = [CONFIG_FOLDER, *([Path(asked.config_dir).absolute()] if asked.config_dir else [])]
        folder = next((folder for folder in folders if (folder / f"{name}.yaml").is_file()), CONFIG_FOLDER)
        others = override("hydra.searchpath", [f"file://{other}" for other in folders if other != folder])
        config = compose_config(name, [others, *asked.overrides], folder)
        print(difference(compose_config(_recipe_of(name, config_name), []), config))
        return []
    for argument in sys.argv[1:]:
        if argument.startswith("--") and (hint := foreign_name(argument.partition("=")[0])):
            raise ConfigError(f"{argument}: an option is key=value; {hint}")
    register_schemas()
    # Without this variable Hydra prints its own text around an error, and ends the process.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    words = _flags_first(sys.argv[1:])
    composed, jobs = list[tuple[Any, str]](), list[list[str]]()

    def keep(config: DictConfig) -> None:
        own = HydraConfig.get()
        name, overrides = str(own.job.config_name), list(own.overrides.task)
        composed.append((_without_replaced_options(config, name, overrides), _recipe_of(name, config_name)))
        jobs.append(overrides)

    # --help shows this name.
    keep.__module__ = f"rl_plugins.recipes.{config_name}"
    decorate = hydra.main(version_base="1.3", config_path=str(CONFIG_FOLDER), config_name=config_name)
    main: Callable[[], None] = decorate(keep)
    try:
        # Hydra writes the options of a sweep, with their secrets, into this folder.
        with TemporaryDirectory() as folder_of_sweep:
            sys.argv[1:] = [*words, override("hydra.sweep.dir", folder_of_sweep)]
            main()
    # Hydra also raises plain ValueErrors.
    except (HydraException, ValueError) as error:
        raise ConfigError(explain(error, lambda: keys_of(compose_config(config_name, [])))) from None
    finally:
        # The run's folder and MLflow have the command.
        sys.argv[1:] = words
    for (config, _), name in zip(composed, _ends_of_names(jobs), strict=True):
        if name:
            # A pipeline has a name of its own.
            (config.run if "run" in config else config).name += name
    return composed


def _flags_first(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with flags and their values first: Hydra's parser accepts no flags between overrides."""
    flags, overrides = list[str](), list[str]()
    for argument in (left := iter(arguments)):
        if argument in _FLAGS_WITH_VALUE:
            flags += [argument, *islice(left, 1)]
        elif argument.startswith("~") or ("=" in argument and not argument.startswith("-")):
            overrides.append(argument)
        else:
            flags.append(argument)
    return [*flags, *overrides]


def _recipe_of(name: str, extended: str) -> str:
    """Return the name of a recipe's file, or the recipe that another file (--config-dir) extends."""
    return name if (CONFIG_FOLDER / f"{name}.yaml").is_file() else extended


def _ends_of_names(jobs: Sequence[Sequence[str]]) -> list[str]:
    """Return the end of each run's name with --multirun: `-lr=0.1` for a job with its own `optimizer.lr=0.1`.

    The end is empty for a single job, and if the overrides give the names themselves.
    """
    own = [[text for text in job if any(text not in other for other in jobs)] for job in jobs]
    if any(text.lstrip("+").startswith(("run.name=", "name=")) for texts in own for text in texts):
        return [""] * len(jobs)
    # A name of a folder has fewer characters than an override.
    return ["".join(f"-{_NOT_IN_NAMES.sub('_', _GROUPS.sub('', text))}" for text in texts) for texts in own]


def _arguments_of_hydra(arguments: list[str]) -> argparse.Namespace:
    """Return the arguments that name a recipe and a way to print the recipe, and the other arguments as `overrides`."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--cfg", "-c")
    parser.add_argument("--config-name", "-cn")
    parser.add_argument("--config-dir", "-cd")
    asked, overrides = parser.parse_known_args(arguments)
    asked.overrides = overrides
    return asked


def _check_name_of_own_recipe(asked: argparse.Namespace) -> None:
    """Raise a ConfigError if a recipe of the user has the name of a recipe of the package, which Hydra finds first."""
    if not asked.config_dir or not asked.config_name:
        return
    own, packaged = (Path(folder) / f"{asked.config_name}.yaml" for folder in (asked.config_dir, CONFIG_FOLDER))
    if own.is_file() and packaged.is_file() and not own.samefile(packaged):
        raise ConfigError(f"{own}: a recipe of the package has this name: rename the file")


def difference(recipe: object, config: object) -> str:
    """Return a line of YAML without secrets for each different option, with the recipe's value in a comment.

    Args:
        recipe: configuration composed without overrides.
        config: configuration composed with overrides.
    """
    from omegaconf import OmegaConf

    before, after = (dict(dotted_options(redacted_value(OmegaConf.to_container(node)))) for node in (recipe, config))
    keys = [*after, *(key for key in before if key not in after)]
    lines = [
        f"{key}: {_yaml(after.get(key, _ABSENT))}  # recipe: {_yaml(before.get(key, _ABSENT))}"
        for key in keys
        if before.get(key, _ABSENT) != after.get(key, _ABSENT)
    ]
    return "\n".join(lines) or "nothing differs from the recipe"


def _yaml(value: object) -> str:
    import yaml

    if value is _ABSENT:
        return "(none)"
    return str(yaml.safe_dump(value, default_flow_style=True, width=10**6)).removesuffix("...\n").strip()
