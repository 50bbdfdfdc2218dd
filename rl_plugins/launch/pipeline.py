"""Run several recipes in order, each with the models of earlier stages, under one MLflow run.

An interrupted pipeline can be resumed: complete stages are skipped, and the interrupted stage is resumed.

The folder of a pipeline contains the content of the MLflow run: `pipeline.yaml`, and in `metrics.jsonl` the last
validation of each complete stage. An outage of the MLflow store delays this content and stops nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl_plugins.config.environment_variables import resolved_without_environment
from rl_plugins.config.hydra_errors import explain
from rl_plugins.config.pipeline import PipelineConfig
from rl_plugins.config.recipe import RecipeConfig, dotted_options, parse_config, read_config
from rl_plugins.config.run import LOCAL_FOLDER, tracking_address
from rl_plugins.config.settings import FOLDER_NAME
from rl_plugins.errors import ConfigError, DeadlineExceeded, RunStopped, UserError, config_errors
from rl_plugins.launch.command_line import check_all_options, exit_on_user_error, run_recipe
from rl_plugins.launch.compose import compose_config, compose_for_command_line
from rl_plugins.launch.fetch import fetch_data
from rl_plugins.launch.pinned_versions import PinnedVersions, pinned_model
from rl_plugins.launch.preflight import check_stage_ahead
from rl_plugins.launch.resume import finished_step, noted_step
from rl_plugins.launch.stored_run import stored_run
from rl_plugins.redaction import redacted, redacted_value, without_password
from rl_plugins.run_folder import RunFolder, append_metrics, read_metrics
from rl_plugins.run_lock import owned
from rl_plugins.storage import folder_in
from rl_plugins.text_file import REMOVE, REPLACE, read_text, read_yaml
from rl_plugins.tracking.run import RunDescription, TrackedRun
from rl_plugins.tracking.sender import FINISH_TIMEOUT_S, RunSender
from rl_plugins.tracking.store import check_store, import_mlflow, open_client, store_beside
from rl_plugins.tracking.unsent_metrics import Point, UnsentMetrics, name_in_mlflow
from rl_plugins.whole_file import storage_errors, write_whole_text

logger = logging.getLogger(__name__)

_OPEN_TIMEOUT_S = 60.0
_SYNC_TIMEOUT_S = 600.0
_OWN_OPTIONS = {
    "run.name": "the name of the stage",
    "run.output_dir": "output_dir",
    "run.dry_run": "dry_run",
    "run.resume": "resume",
    "tracking.uri": "tracking_uri",
    "tracking.experiment": "experiment",
    "tracking.parent_run": None,
}
"""Options of stages set by the pipeline, with the option of the pipeline, if there is one."""
_VALIDATION_METRICS = ("val/reward", "val/accuracy", "val/loss")


def pipeline_main(config_name: str) -> None:
    """Run a pipeline from the command line. After a `ConfigError` the process exits with status 2.

    Args:
        config_name: name of the pipeline's file in `recipes/conf`.
    """

    def run() -> None:
        for composed, _ in compose_for_command_line(config_name):
            folder = run_pipeline(composed)
            if not composed.dry_run:
                print(f"all stages are in {folder}")

    exit_on_user_error(run, resume="resume=auto")


def run_pipeline(composed: DictConfig) -> Path:
    """Check all stages, then run all incomplete stages.

    Args:
        composed: configuration of the pipeline. An option of `PipelineConfig` that is left out has its default.

    Returns:
        Folder of the pipeline.

    Raises:
        ConfigError: the configuration of a stage is wrong, or the pipeline is running. A wrong option or a missing file
            of any stage is found before the first stage starts.
    """
    resolved = _resolve(composed)
    configs = stage_configs(composed)
    folder = Path(next(iter(configs.values())).run.output_dir)
    pinned = _check_stages(configs, folder, resume=resolved.resume)
    if resolved.dry_run:
        left = (name for name in configs if RunFolder(folder / name).exported() is None)
        for name in islice(left, 1):
            with config_errors(f"stage {name}: "):
                run_recipe(configs[name])
        return folder
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with owned(RunFolder(folder), "pipeline"):
        _run_stages(resolved, configs, folder, pinned)
    return folder


def _run_stages(
    resolved: PipelineConfig, configs: Mapping[str, RecipeConfig], folder: Path, pinned: Mapping[str, dict[str, str]]
) -> None:
    """Run all incomplete stages. The process owns the folder."""
    first = next(iter(configs.values()))
    PinnedVersions(ChainMap(*pinned.values())).write(RunFolder(folder).pinned_versions)
    if first.tracking.enabled:
        check_store(str(first.tracking.uri))
    resolved.tracking_uri = first.tracking.uri
    written = OmegaConf.create(redacted_value(OmegaConf.to_container(resolved)))
    write_whole_text(RunFolder(folder).pipeline, OmegaConf.to_yaml(written))
    with ExitStack() as stack:
        parent = stack.enter_context(parent_run(folder, first.tracking.uri)) if first.tracking.enabled else None
        for position, (name, config) in enumerate(configs.items(), start=1):
            run = RunFolder(folder / name)
            label = f"{resolved.name} [{position}/{len(configs)}] {name}"
            # A complete stage may have files to copy to its storage, or more steps to take.
            if run.exported() is not None and finished_step(config, run) is not None and not config.run.storage:
                print(f"{label}: complete, see {run.path}", flush=True)
            else:
                print(label, flush=True)
                config.tracking.parent_run = parent.run_id() if parent else None
                # Folders of models of earlier stages exist now.
                config.make_paths_absolute()
                when_checked = parent.add_stage if parent else None
                recipe = resolved.stages[name].recipe
                with config_errors(f"stage {name}: "):
                    run_recipe(config, recipe, when_checked, pinned[name])
            if parent:
                parent.log_validation(name)


def stage_configs(composed: DictConfig) -> dict[str, RecipeConfig]:
    """Return the configuration of each stage by name.

    Raises:
        ConfigError: a key or a value is wrong. The message names the stage and the key.
    """
    pipeline = _resolve(composed)
    if missing := sorted(OmegaConf.missing_keys(pipeline)):
        raise ConfigError(f"option {missing[0]!r} has no value: add {missing[0]}=... to the command line")
    if not FOLDER_NAME.holds(pipeline.name):
        raise ConfigError(f"name={pipeline.name!r}: {FOLDER_NAME.demand}")
    if fault := LOCAL_FOLDER.fault(pipeline.output_dir, str):
        raise ConfigError(f"output_dir={pipeline.output_dir}: {fault}")
    folder = (Path(pipeline.output_dir) / pipeline.name).absolute()
    run = {"output_dir": str(folder)}
    uri = tracking_address(pipeline.tracking_uri) or store_beside(folder)
    tracking = {"uri": uri, "experiment": pipeline.experiment}
    _check_own_options("common", pipeline.common)
    configs = {}
    for name, stage in pipeline.stages.items():
        _check_own_options(f"stages.{name}.options", stage.options)
        own_options = {"run": {**run, "name": name, "dry_run": pipeline.dry_run}, "tracking": tracking}
        with config_errors(f"stage {name}: "):
            # Merged as plain values: `parse_config` compares the result with the schema, and names the wrong option.
            recipe = OmegaConf.create(OmegaConf.to_container(compose_config(stage.recipe, list(stage.choices))))
            config = parse_config(OmegaConf.merge(recipe, pipeline.common, stage.options, own_options))
        configs[name] = config
        if config.run.storage:
            config.run.storage = folder_in(config.run.storage, pipeline.name)
    if not configs:
        raise ConfigError("stages is empty: a pipeline needs at least one")
    return configs


def _check_own_options(group: str, options: DictConfig) -> None:
    """Refuse options of stages set by the pipeline."""
    for option, _ in dotted_options(OmegaConf.to_container(options)):
        if option in _OWN_OPTIONS:
            way_out = f"use {_OWN_OPTIONS[option]}" if _OWN_OPTIONS[option] else "leave it out"
            raise ConfigError(f"{group}.{option}: the pipeline sets this option: {way_out}")


def _check_stages(
    configs: Mapping[str, RecipeConfig], folder: Path, *, resume: bool | str
) -> dict[str, dict[str, str]]:
    """Check all stages, and return the versions of the names of each stage. Names on the hub get their commits."""
    from rl_plugins.launch.dry_run import set_steps

    if resume not in (True, False, "auto"):
        raise ConfigError(f"resume={resume}: use true, false or auto")
    if any(RunFolder(folder / name).has_results() for name in configs) and not resume:
        raise ConfigError(f"the pipeline {folder} exists: continue it with resume=true, or give another name")
    for name, config in configs.items():
        if resume:
            config.run.resume = "auto"
        with config_errors(f"stage {name}: "):
            check_all_options(config)
    known = _known_versions(configs, folder) if resume else {}
    pinned = {}
    for name, config in configs.items():
        versions = PinnedVersions(known)
        with config_errors(f"stage {name}: "):
            fetch_data(config, versions)
            config.replace_model_paths(partial(pinned_model, versions))
            known |= versions.used
            pinned[name] = versions.used
            if not resume:
                stored_run(config, RunFolder(folder / name))
            if RunFolder(folder / name).exported() is None:
                check_stage_ahead(config, folder)
            else:
                set_steps(config)
    if resume:
        _check_continued_stages(configs, folder)
    return pinned


def _check_continued_stages(configs: Mapping[str, RecipeConfig], folder: Path) -> None:
    """Refuse to continue a complete stage whose model a later stage with results has begun from.

    Raises:
        ConfigError: a stage would continue. The model of a later stage would change in the middle of its training.
    """
    continued: list[str] = []
    for name, config in configs.items():
        run, models = RunFolder(folder / name), [Path(path).absolute() for path in config.model_paths.values()]
        for earlier in continued if run.has_results() else ():
            if any(model.is_relative_to(folder / earlier) for model in models):
                raise ConfigError(
                    f"stage {earlier}: the stage would continue with the new options, and stage {name} has results "
                    f"from its model: leave the options of stage {earlier} as they were, or give another name"
                )
        if run.exported() is not None and noted_step(run) is not None and finished_step(config, run) is None:
            continued.append(name)


def _known_versions(configs: Mapping[str, RecipeConfig], folder: Path) -> dict[str, str]:
    """Return the versions of an earlier start of a pipeline. Another machine finds them with the stored stages."""
    if known := PinnedVersions.of_run(RunFolder(folder)).known:
        return known
    for name, config in configs.items():
        run = RunFolder(folder / name)
        with config_errors(f"stage {name}: "):
            known |= PinnedVersions.of_run(run, stored_run(config, run)).known
    return known


def _resolve(composed: DictConfig) -> Any:
    """Return the configuration with all expressions resolved but those with the environment."""
    try:
        schema = OmegaConf.structured(PipelineConfig)
        merged = OmegaConf.merge(schema, OmegaConf.create(OmegaConf.to_container(composed)))
        # A missing variable is an error here.
        OmegaConf.resolve(merged.copy())
        return OmegaConf.merge(schema, resolved_without_environment(merged))
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error)) from None


class ParentRun:
    """The MLflow run of a pipeline. The runs of the stages are children of this run.

    Once the run exists, the store need not answer: a background sender tries again until the run is finished.
    """

    def __init__(self, folder: Path, uri: str | None = None) -> None:
        """Set up the sender. The first call to the store creates the run, unless the folder names a run already.

        Args:
            folder: folder of the pipeline. The name of the folder is the name of the run.
            uri: address of the MLflow store. None reads the address from the folder, which has no password.

        Raises:
            ConfigError: the configuration in the folder is damaged.
        """
        self._folder = RunFolder(folder)
        config: Any = read_yaml(self._folder.pipeline, REPLACE)
        self.uri = uri or str(tracking_address(config.tracking_uri))
        self.stages = {str(name): RunFolder(folder / str(name)) for name in config.stages}
        description = RunDescription(files=(self._folder.pipeline,))
        self._sender = RunSender(self.uri, config.experiment, self._folder, description)

    def run_id(self) -> str | None:
        """Return the id of the run, or None if the store has not created the run yet."""
        id_file = self._folder.tracking_run
        return read_text(id_file, REMOVE).strip() if id_file.is_file() else None

    def add_stage(self, config: RecipeConfig) -> None:
        """Make the run of a stage a child of this run, after the store has created this run.

        Args:
            config: configuration of the stage. The method sets `tracking.parent_run`.

        Raises:
            DeadlineExceeded: the store has not created the run.
        """
        run_id, is_open = self.run_id(), threading.Event()
        self._sender.submit(lambda _: is_open.set())
        if run_id is None and not is_open.wait(_OPEN_TIMEOUT_S):
            raise DeadlineExceeded(
                f"MLflow at {without_password(self.uri)} did not create the run of the pipeline {self._folder.path} "
                f"within {_OPEN_TIMEOUT_S:g} s"
            )
        config.tracking.parent_run = run_id or self.run_id()

    def log_validation(self, stage: str) -> None:
        """Log the last validation of a complete stage, unless the validation is logged already."""
        logged, series = read_metrics(self._folder.metrics), read_metrics(self.stages[stage].metrics)
        last = {f"{stage}/{name}": list(series[name].values())[-1] for name in _VALIDATION_METRICS if series.get(name)}
        step = list(self.stages).index(stage) + 1
        if any(logged.get(name, {}).get(step) != value for name, value in last.items()):
            append_metrics(self._folder.metrics, last, step)
            if logged.keys() & last.keys():
                # The numbers of a continued stage are newer, and the sender does not send a step twice.
                now_ms = int(time.time() * 1000)
                points = [Point(name_in_mlflow(name), value, step, now_ms) for name, value in last.items()]
                self._sender.submit(lambda run: run.log_points(points))
        self._sender.send_metrics()

    def finish(self, status: str, deadline_s: float) -> bool:
        """End the run.

        Args:
            status: MLflow's status: FINISHED, FAILED or KILLED.
            deadline_s: seconds to wait for the store.

        Returns:
            True if the store has all metrics and files of the run.
        """
        self._sender.finish(status, deadline_s)
        return self._sender.all_sent()

    def sync(self, deadline_s: float) -> bool:
        """Send the missing content of this run and of the runs of all stages, and register the policies of the stages.

        Args:
            deadline_s: seconds for this run, and for each stage.

        Returns:
            True if the store has everything.

        Raises:
            ConfigError: the store cannot be reached.
        """
        check_store(self.uri)
        self._sender.send_metrics()
        # A continuing stage has its earlier export, and no note of its end.
        complete = [name for name, stage in self.stages.items() if stage.exported() and noted_step(stage) is not None]
        for name in complete:
            self.log_validation(name)
        if any(stage.failed() for stage in self.stages.values()):
            status = "FAILED"
        else:
            status = "FINISHED" if len(complete) == len(self.stages) else "KILLED"
        sent = self.finish(status, deadline_s)
        # A finished run may lack its policy or a table, which the store has refused.
        return self._sync_stages(deadline_s, lambda *_: True) and sent

    def sync_stages(self, deadline_s: float) -> None:
        """Send the missing content of the stages' runs, if the store was away when the runs ended.

        Args:
            deadline_s: seconds for each stage.
        """
        self._sync_stages(deadline_s, _lacks_content)

    def _sync_stages(self, deadline_s: float, is_chosen: Callable[[str, RunFolder], bool]) -> bool:
        """Send the content of chosen stages, and log the errors of all stages at the end. Return True without an error.

        An error of a stage concerns no other stage.
        """
        # The thread of the sender may import MLflow, too.
        import_mlflow()
        from mlflow.exceptions import MlflowException

        # Imported here because `mlflow_run` imports Lightning, which this process otherwise does not need.
        from rl_plugins.launch.mlflow_run import sync

        errors = []
        for name, stage in self.stages.items():
            if not stage.config.is_file():
                continue
            try:
                if not read_config(stage.config).tracking.enabled:
                    continue
                uri = self._store_of(stage)
                if is_chosen(uri, stage) and not sync(stage.path, uri, deadline_s):
                    errors.append(f"stage {name}: MLflow does not have all of {stage.path}")
            except (MlflowException, UserError) as error:
                errors.append(f"stage {name}: {redacted(str(error))}")
        for text in errors:
            logger.error("%s: rl-plugins sync %s sends the missing content", text, self._folder.path)
        return not errors

    def _store_of(self, stage: RunFolder) -> str:
        """Return the URI of the store of a stage, which `rl-plugins sync --uri` may have moved to another store."""
        uri = read_config(stage.config).store_uri
        # Files have no password.
        return self.uri if without_password(uri) == without_password(self.uri) else uri


@contextmanager
def parent_run(folder: Path, uri: str | None) -> Iterator[ParentRun]:
    """Open the parent run for the stages in the block, and finish the run with the status of the stages.

    The store creates the run when the first stage has passed all checks.
    """
    parent, status = ParentRun(folder, uri), "FAILED"
    try:
        yield parent
        status = "FINISHED"
    except (RunStopped, KeyboardInterrupt):
        status = "KILLED"
        raise
    finally:
        if parent.finish(status, FINISH_TIMEOUT_S) and status == "FINISHED":
            parent.sync_stages(_SYNC_TIMEOUT_S)


def _lacks_content(uri: str, run: RunFolder) -> bool:
    check_store(uri)
    if not run.tracking_run.is_file():
        return True
    client = open_client(uri)
    tracked, unsent = client.get_run(read_text(run.tracking_run, REMOVE).strip()), UnsentMetrics(run.metrics)
    unsent.reset(TrackedRun(client, tracked.info.run_id, tracked.info.experiment_id).last_steps())
    return tracked.info.status != "FINISHED" or unsent.has_points()
