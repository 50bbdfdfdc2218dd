"""Command line of recipes, `python -m rl_plugins.recipes.X key=value ...`: compose, check and train.

Hydra only composes the configuration. The run starts after Hydra has ended, so that Hydra does not change its errors.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rl_plugins.config.checks import check_batch, check_options
from rl_plugins.config.hydra_errors import CONFIG_FOLDER, explain, foreign_name, keys_of
from rl_plugins.config.recipe import (
    SAMPLING_STAGES,
    RecipeConfig,
    options_of,
    parse_config,
    write_config,
    written,
)
from rl_plugins.config.schemas import register_schemas
from rl_plugins.config.stage_checks import check_stage_options
from rl_plugins.errors import ConfigError, RayLost, RunStopped, TrainingDiverged, UserError
from rl_plugins.garbage_collection import collector_off
from rl_plugins.redaction import redacted_value
from rl_plugins.run_folder import RunFolder
from rl_plugins.run_lock import owned
from rl_plugins.signals import ending_signals, remove_request, stop_before_next
from rl_plugins.user_code import exits_refused
from rl_plugins.whole_file import storing, write_whole_text

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


def recipe_main(config_name: str) -> None:
    """Run a recipe from the command line, with the exit status of `exit_on_user_error`.

    Args:
        config_name: name of the recipe's file in `recipes/conf`.
    """

    def run() -> None:
        # The types of all runs of --multirun are checked before the first run starts.
        composed = [(parse_config(config), recipe) for config, recipe in compose_for_command_line(config_name)]
        has_diverged = False
        for config, recipe in composed:
            try:
                run_recipe(config, recipe)
            except TrainingDiverged as error:
                if len(composed) == 1:
                    raise
                # A comparison finds such settings, and goes on.
                print(f"error: {config.run.name}: {error}", file=sys.stderr)
                has_diverged = True
        if has_diverged:
            sys.exit(2)

    exit_on_user_error(run)


def exit_on_user_error(run: Callable[[], object], resume: str = "run.resume=auto") -> None:
    """Call a function, and turn expected errors into one printed line and an exit status.

    docs/commands.md has the table of all statuses.

    Args:
        run: function to call.
        resume: option to continue the run, for the printed line.
    """
    with ending_signals() as signals:
        try:
            run()
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        except RayLost as error:
            print(f"error: {error}. To continue, repeat the command with {resume}", file=sys.stderr)
            sys.exit(os.EX_UNAVAILABLE)
        except RunStopped as stopped:
            print(f"{stopped}. To continue, repeat the command with {resume}", flush=True)
            # Ray would call a job with another status than 0 failed.
            is_job = "job_submission_id" in os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "")
            sys.exit(0 if is_job else os.EX_TEMPFAIL)
        except KeyboardInterrupt as interrupt:
            state = f": {interrupt}. To continue, repeat the command with {resume}" if str(interrupt) else ""
            print(f"interrupted by {signals.name}{state}", file=sys.stderr)
            sys.exit(signals.status)


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
    return f"{key}={_written(value)}"


def _written(value: object) -> str:
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{name}:{_written(item)}' for name, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_written, value))}]"
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

    before, after = (dict(options_of(redacted_value(OmegaConf.to_container(node)))) for node in (recipe, config))
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


def check_all_options(config: RecipeConfig) -> None:
    """Run the checks of options alone. Data can be downloaded after these checks.

    Raises:
        ConfigError: an option is wrong. The message names the fault and the way to correct it.
    """
    check_options(config)
    check_stage_options(config)
    check_batch(config)


@exits_refused()
def run_recipe(
    config: RecipeConfig,
    recipe: str | None = None,
    when_checked: Callable[[RecipeConfig], None] | None = None,
    pinned: Mapping[str, str] | None = None,
) -> RunFolder:
    """Check the configuration and train. With `run.dry_run`, only check the configuration.

    The order: check the options, fetch data, restore a stored run, end if the run is finished, fetch the
    configurations of models, check everything else, fetch weights, take the run's folder, train.

    Args:
        config: configuration of the run.
        recipe: name of the recipe, to write the difference from the recipe into the run's folder.
        when_checked: function of the configuration. It is called after all checks, before a file is written into the
            run's folder.
        pinned: versions of names, looked up by a pipeline; see `PinnedVersions`.

    Returns:
        Folder of the run.

    Raises:
        ConfigError: the configuration, or for example a data file, is wrong. No heavy process has started.
        UserError: the run could not go on: a damaged checkpoint, failed rewards, a full disk, diverged training.
        RayLost: Ray ended during the run.
        RunStopped: the run stopped on request, and has saved a checkpoint; or a signal came before the run began.
        KeyboardInterrupt: a signal ended the run at once. The message names the newest checkpoint.
    """
    from rl_plugins.launch.build_lock import clear_stale_build_locks, extensions_folder
    from rl_plugins.launch.dry_run import set_steps
    from rl_plugins.launch.hub_fetch import fetch_weights
    from rl_plugins.launch.own_ray import remove_left_folders
    from rl_plugins.launch.pinned_versions import PinnedVersions
    from rl_plugins.launch.preflight import fetch_data, fetch_models, preflight, tracking_uri
    from rl_plugins.launch.resume import finished_step
    from rl_plugins.launch.stored_run import stored_run

    started = time.time()
    stop_before_next(config.run.name)
    if config.launcher == "local":
        # Set before the checks import torch: spinning threads make other threads up to ten times slower.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    remove_left_folders()
    folder = RunFolder(Path(config.run.output_dir) / config.run.name)
    # A finished run ends before the checks.
    may_be_finished = folder.finished.is_file()
    if not may_be_finished:
        check_all_options(config)
    stored = stored_run(config, folder)
    versions = PinnedVersions.of_run(folder, stored) if config.run.resume else PinnedVersions()
    versions.known |= pinned or {}
    fetch_data(config, versions)
    set_steps(config)
    if stored is not None and config.run.resume:
        stored.restore()
    copied = nullcontext() if stored is None else stored.copied()
    if (step := finished_step(config, folder)) is not None:
        print(
            f"{config.run.name}: the run is finished: step {step} was its last, and {folder.path} has its results. "
            "Nothing is left to do; a larger run.steps continues it",
            flush=True,
        )
        with copied:
            return folder
    with collector_off():
        if may_be_finished:
            check_all_options(config)
        config.tracking.uri = tracking_uri(config)
        fetch_models(config, versions)
        preflight(config)
    if config.run.dry_run:
        print(
            f"{config.run.name}: all checks have passed: {_describe_batch(config)}. Leave run.dry_run out to train",
            flush=True,
        )
        return folder
    # The driver of a cluster need not train; `train_on_ray` downloads on the machines of the run.
    if config.launcher == "local" or not os.environ.get("RAY_ADDRESS"):
        fetch_weights(config)
    if when_checked is not None:
        when_checked(config)
    for lock in clear_stale_build_locks(extensions_folder()):
        print(f"{config.run.name}: removed {lock}, the lock of a killed build", flush=True)
    with storing(folder.path):
        folder.path.mkdir(parents=True, exist_ok=True)
    with owned(folder):
        shutil.rmtree(folder.linked, ignore_errors=True)
        with copied:
            versions.write(folder.versions)
            _train(config, folder, recipe, started)
    if folder.stopped.is_file():
        raise RunStopped(f"{config.run.name}: stopped {folder.stopped.read_text(encoding='utf-8')}")
    return folder


def _train(config: RecipeConfig, folder: RunFolder, recipe: str | None, started: float) -> None:
    """Write the files of the start, and train. The process owns the folder."""
    from omegaconf import OmegaConf

    from rl_plugins.launch.preflight import slow_here
    from rl_plugins.report.page import reported
    from rl_plugins.tracking.provenance import write_provenance

    write_config(config, folder.config)
    write_provenance(folder, code=config.tracking.code)
    if recipe is not None:
        changes = difference(compose_config(recipe, []), OmegaConf.create(written(config)))
        write_whole_text(folder.changes, f"# recipe: {recipe}\n{changes}\n")
    if slow := slow_here(config):
        print(f"{config.run.name}: {slow}", flush=True)
    print(f"{config.run.name}: {_describe_batch(config)}", flush=True)
    remove_request(folder.stop, before=started)
    for left in (folder.stopped, folder.finished):
        left.unlink(missing_ok=True)
    if folder.has_results() and folder.latest_checkpoint() is None:
        print(f"{config.run.name}: {folder.path} has no checkpoint, so training starts from the beginning", flush=True)
    if config.launcher == "local":
        from rl_plugins.launch.local import train_in_this_process as launch
    else:
        from rl_plugins.launch.ray_train import train_on_ray as launch
    try:
        with reported(folder):
            launch(config, folder)
    except KeyboardInterrupt:
        newest = folder.latest_checkpoint()
        state = f"the newest checkpoint is {newest.name}" if newest else "there is no checkpoint"
        raise KeyboardInterrupt(f"{config.run.name}: {state}") from None


def _describe_batch(config: RecipeConfig) -> str:
    """Return the number of steps, and the sizes of a step, in words."""
    samples = config.stage in SAMPLING_STAGES
    sizes = config.batch.in_words(config.num_workers, samples=samples)
    return f"{config.run.steps} {'RL steps' if samples else 'steps'} of {sizes}"
