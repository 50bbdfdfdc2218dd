"""Command line of recipes, `python -m rl_plugins.recipes.X key=value ...`: compose, check and train."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path

from rl_plugins.config.checks import check_batch, check_options
from rl_plugins.config.recipe import (
    SAMPLING_STAGES,
    RecipeConfig,
    parse_config,
    public_options,
    write_config,
)
from rl_plugins.config.stage_checks import check_stage_options
from rl_plugins.errors import RayLost, RunStopped, TrainingDiverged, UserError, config_errors
from rl_plugins.garbage_collection import garbage_collector_off
from rl_plugins.launch.compose import compose_config, compose_for_command_line, difference
from rl_plugins.run_folder import RunFolder
from rl_plugins.run_lock import owned
from rl_plugins.signals import ending_signals, remove_request, stop_before_next
from rl_plugins.user_code import exits_refused
from rl_plugins.whole_file import storage_errors, write_whole_text


def recipe_main(config_name: str) -> None:
    """Run a recipe from the command line, with the exit status of `exit_on_user_error`.

    Args:
        config_name: name of the recipe's file in `recipes/conf`.
    """

    def run() -> None:
        # The options of all runs of --multirun are checked before the first run starts.
        composed = [(parse_config(config), recipe) for config, recipe in compose_for_command_line(config_name)]
        for config, _ in composed if len(composed) > 1 else ():
            if not RunFolder(Path(config.run.output_dir) / config.run.name).finished.is_file():
                with config_errors(f"{config.run.name}: "):
                    check_all_options(config)
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
    from rl_plugins.launch.fetch import fetch_data, fetch_models, fetch_weights
    from rl_plugins.launch.own_ray import remove_left_folders
    from rl_plugins.launch.pinned_versions import PinnedVersions
    from rl_plugins.launch.preflight import preflight
    from rl_plugins.launch.resume import finished_step
    from rl_plugins.launch.stored_run import stored_run

    started = time.time()
    stop_before_next(config.run.name)
    if config.launcher == "local":
        # Set before the checks import torch: spinning threads make other threads up to ten times slower.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    remove_left_folders()
    folder = RunFolder(Path(config.run.output_dir) / config.run.name)
    # A repeated command of a finished run prints its last step, even if a check would refuse its options today. So
    # these checks come after `finished_step`.
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
    with garbage_collector_off():
        if may_be_finished:
            check_all_options(config)
        config.tracking.uri = config.store_uri
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
    with storage_errors(folder.path):
        folder.path.mkdir(parents=True, exist_ok=True)
    with owned(folder):
        shutil.rmtree(folder.linked, ignore_errors=True)
        with copied:
            versions.write(folder.pinned_versions)
            _train(config, folder, recipe, started)
    if folder.stopped.is_file():
        raise RunStopped(f"{config.run.name}: stopped {folder.stopped.read_text(encoding='utf-8')}")
    return folder


def _train(config: RecipeConfig, folder: RunFolder, recipe: str | None, started: float) -> None:
    """Write the files of the start, and train. The process owns the folder."""
    from omegaconf import OmegaConf

    from rl_plugins.launch.preflight import slow_here
    from rl_plugins.report.page import report_at_end
    from rl_plugins.tracking.provenance import write_provenance

    write_config(config, folder.config)
    write_provenance(folder, code=config.tracking.code)
    if recipe is not None:
        changes = difference(compose_config(recipe, []), OmegaConf.create(public_options(config)))
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
        with report_at_end(folder):
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
