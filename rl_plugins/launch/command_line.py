"""What `python -m rl_plugins.recipes.X key=value ...` does: compose, check, train.

Hydra only composes; the run itself starts after Hydra is done, so that its errors keep their own words.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl_plugins.config.hydra_errors import CONFIG_FOLDER, explain, keys_of
from rl_plugins.config.recipe import RecipeConfig, parse_config, register_schema
from rl_plugins.errors import ConfigError, RunStopped, UserError
from rl_plugins.launch.config_difference import difference
from rl_plugins.run_folder import RunFolder

_INTERRUPTED = 130


def recipe_main(config_name: str) -> None:
    """The entry point of a recipe; exits with status 2 after a `ConfigError`, with 75 after `RunStopped`."""

    def run() -> None:
        # All of --multirun are checked for their types before the first one runs.
        composed = [(parse_config(config), recipe) for config, recipe in compose_for_command_line(config_name)]
        for config, recipe in composed:
            run_recipe(config, recipe)

    exit_on_user_error(run)


def exit_on_user_error(run: Callable[[], object], resume: str = "run.resume=true") -> None:
    """Run; a `UserError` becomes one line on stderr and status 2, `RunStopped` one on stdout and status 75.

    Ctrl-C becomes a line and status 130, as of a shell.

    Args:
        run: what to do.
        resume: the option with which the same command goes on.
    """
    try:
        run()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except RunStopped as stopped:
        print(f"{stopped}; the same command with {resume} goes on", flush=True)
        sys.exit(os.EX_TEMPFAIL)
    except KeyboardInterrupt:
        print(f"interrupted; {resume} goes on from the newest checkpoint", file=sys.stderr)
        sys.exit(_INTERRUPTED)


def compose_config(config_name: str, overrides: list[str]) -> Any:
    """The composed configuration of a recipe.

    Raises:
        ConfigError: an unknown key (with the nearest known one), group choice or recipe, a wrong type, or bad syntax.
    """
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException

    register_schema()
    with initialize_config_dir(config_dir=str(CONFIG_FOLDER), version_base="1.3"):
        try:
            return compose(config_name, overrides)
        except (HydraException, ValueError) as error:
            raise ConfigError(explain(error, lambda: keys_of(compose(config_name)))) from None


def compose_for_command_line(config_name: str) -> list[tuple[Any, str]]:
    """The configurations that sys.argv asks for: one; none after --help or --cfg; several with --multirun.

    Each with the name of its recipe, which may be another with --config-name.

    `--cfg diff`, which is ours, prints what differs from the recipe.

    Raises:
        ConfigError: as `compose_config`.
    """
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException

    if (asked := _asks_for_difference(sys.argv[1:])) is not None:
        config_name, overrides = asked.config_name or config_name, asked.overrides
        print(difference(compose_config(config_name, []), compose_config(config_name, overrides)))
        return []
    register_schema()
    # Hydra would print its own frame around what goes wrong, and end the process.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    # Hydra's parser takes overrides in one row only: flags and their values go before them.
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda argument: "=" in argument and not argument.startswith("-"))
    composed: list[tuple[Any, str]] = []

    def keep(config: Any) -> None:
        composed.append((config, str(HydraConfig.get().job.config_name)))

    # The name that --help shows.
    keep.__module__ = f"rl_plugins.recipes.{config_name}"
    decorate = hydra.main(version_base="1.3", config_path=str(CONFIG_FOLDER), config_name=config_name)
    main: Callable[[], None] = decorate(keep)
    try:
        main()
    # Hydra raises bare ValueErrors too.
    except (HydraException, ValueError) as error:
        raise ConfigError(explain(error, lambda: keys_of(compose_config(config_name, [])))) from None
    return composed


def _asks_for_difference(arguments: list[str]) -> argparse.Namespace | None:
    """What stands beside `--cfg diff`, which Hydra does not know; None without it."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--cfg", "-c")
    parser.add_argument("--config-name", "-cn")
    asked, overrides = parser.parse_known_args(arguments)
    return argparse.Namespace(config_name=asked.config_name, overrides=overrides) if asked.cfg == "diff" else None


def run_recipe(
    config: RecipeConfig, recipe: str | None = None, when_checked: Callable[[RecipeConfig], None] | None = None
) -> RunFolder:
    """Check, train, and say where things are.

    Args:
        config: what to do.
        recipe: name of the recipe that it was composed from; what differs is noted in the run's folder.
        when_checked: called when nothing wrong was found, before anything is written.

    Raises:
        ConfigError: something in the configuration or around it is wrong; nothing heavy has started.
        RunStopped: the run was asked to stop, and has saved.
    """
    from omegaconf import OmegaConf

    from rl_plugins.config.batch import describe_batch
    from rl_plugins.launch.build_lock import clear_stale_build_locks
    from rl_plugins.launch.preflight import fetch_models, preflight, slow_here, tracking_uri
    from rl_plugins.launch.run_report import reported, write_changes
    from rl_plugins.tracking.provenance import write_provenance

    if config.launcher == "local":
        # Before the checks import torch: threads that spin while they wait take the time of all others, up to tenfold.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    config.tracking.uri = tracking_uri(config)
    fetch_models(config)
    preflight(config)
    if when_checked is not None:
        when_checked(config)
    for lock in clear_stale_build_locks(extensions_folder()):
        print(f"{config.run.name}: removed {lock}, left behind by a build that was killed", flush=True)
    folder = RunFolder(Path(config.run.output_dir) / config.run.name)
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.config.write_text(OmegaConf.to_yaml(OmegaConf.structured(config)), encoding="utf-8")
    write_provenance(folder)
    if recipe is not None:
        write_changes(folder, recipe, compose_config(recipe, []), config)
    if slow := slow_here(config):
        print(f"{config.run.name}: {slow}", flush=True)
    print(f"{config.run.name}: {describe_batch(config)}", flush=True)
    for left in (folder.stop, folder.stopped):
        left.unlink(missing_ok=True)
    latest = folder.latest_checkpoint()
    if latest is not None:
        print(f"{config.run.name}: continuing from {latest}", flush=True)
    elif config.run.resume:
        print(f"{config.run.name}: {folder.path} has no checkpoint, so it begins anew", flush=True)
    checkpoint = None if latest is None else str(latest)
    if config.launcher == "local":
        from rl_plugins.launch.local import train
    else:
        from rl_plugins.launch.ray_train import train
    with reported(folder):
        train(config, folder, checkpoint)
    if folder.stopped.is_file():
        raise RunStopped(f"{config.run.name}: stopped {folder.stopped.read_text(encoding='utf-8')}")
    return folder


def extensions_folder() -> Path:
    """Where torch builds extensions (torch.utils.cpp_extension, found without importing torch)."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path(cache) / "torch_extensions")
