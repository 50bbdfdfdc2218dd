"""Several recipes one after the other, each starting from what those before it have made, under one MLflow run.

A pipeline that was interrupted goes on: stages that are through are left alone, the one in between is resumed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl_plugins.errors import ConfigError
from rl_plugins.launch.ahead import check_ahead
from rl_plugins.launch.batch import check_batch
from rl_plugins.launch.command_line import compose_config, compose_for_command_line, exit_on_config_error, run_recipe
from rl_plugins.launch.config import RecipeConfig, parse_config
from rl_plugins.launch.hydra_errors import explain
from rl_plugins.launch.parent_run import parent_run
from rl_plugins.launch.values import check_values
from rl_plugins.run_folder import RunFolder
from rl_plugins.tracking.store import check_store


@dataclass
class StageOptions:
    """One stage of a pipeline.

    Attributes:
        recipe: name of its recipe.
        choices: group choices, such as `reward=gsm8k`.
        options: what differs from the recipe; the same keys, nested.
    """

    recipe: str = MISSING
    choices: list[str] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class PipelineConfig:
    """A pipeline.

    Attributes:
        name: of the pipeline and its MLflow run; its folder is `output_dir/name`, with a run's folder for each stage.
        output_dir: where it lives.
        model: what the first stage starts from.
        tracking_uri: of the MLflow store; null is MLFLOW_TRACKING_URI, or an SQLite file in its folder.
        experiment: MLflow experiment.
        resume: continue the pipeline of this name; false refuses to touch an existing one.
        folder: of the pipeline, for the stages to refer to.
        data: files, named for the stages to refer to.
        common: options of every stage.
        stages: name to stage, in their order.
    """

    name: str = MISSING
    output_dir: str = "outputs"
    model: str = MISSING
    tracking_uri: str | None = None
    experiment: str = "rl_plugins"
    resume: bool = False
    folder: str = MISSING
    data: dict[str, list[str]] = field(default_factory=dict)
    common: dict[str, Any] = field(default_factory=dict)
    stages: dict[str, StageOptions] = field(default_factory=dict)


@cache
def register_schema() -> None:
    """Make `PipelineConfig` known to Hydra as `pipeline_schema`, the first entry of a pipeline's defaults."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="pipeline_schema", node=PipelineConfig)


def run_pipeline(composed: Any) -> Path:
    """Check all stages, then run those that are not through; returns the pipeline's folder.

    Raises:
        ConfigError: something in the configuration of a stage is wrong; a wrong option or a missing file is found
            before the first stage.
    """
    configs = stage_configs(composed)
    first = next(iter(configs.values()))
    folder = Path(first.run.output_dir)
    if any((folder / name).exists() for name in configs) and not composed.resume:
        raise ConfigError(f"the pipeline {folder} exists: continue it with resume=true, or give another name")
    for name, config in configs.items():
        for check in (check_values, check_batch):
            _with_name(name, partial(check, config))
    for name, config in configs.items():
        if RunFolder(folder / name).exported() is None:
            _with_name(name, partial(check_ahead, config, folder))
    folder.mkdir(parents=True, exist_ok=True)
    if first.tracking.enabled:
        check_store(str(first.tracking.uri))
    resolved = _resolved(composed)
    resolved.tracking_uri = first.tracking.uri
    RunFolder(folder).pipeline.write_text(OmegaConf.to_yaml(resolved), encoding="utf-8")
    with ExitStack() as stack:
        parent = stack.enter_context(parent_run(folder)) if first.tracking.enabled else None
        for position, (name, config) in enumerate(configs.items(), start=1):
            run = RunFolder(folder / name)
            label = f"{composed.name} [{position}/{len(configs)}] {name}"
            if run.exported() is not None:
                print(f"{label}: through, see {run.path}", flush=True)
            else:
                print(label, flush=True)
                config.run.resume = run.path.is_dir()
                config.tracking.parent_run = parent.known_id() if parent else None
                # What a stage starts from exists only now, and its folder becomes absolute.
                fresh = parse_config(OmegaConf.to_container(OmegaConf.structured(config)))
                adopt = parent.adopt if parent else None
                _with_name(name, partial(run_recipe, fresh, composed.stages[name].recipe, adopt))
            if parent:
                parent.log(name)
    return folder


def stage_configs(composed: Any) -> dict[str, RecipeConfig]:
    """The configuration of each stage.

    Raises:
        ConfigError: names the stage, and the key or value at fault.
    """
    pipeline = _resolved(composed)
    if missing := sorted(OmegaConf.missing_keys(pipeline)):
        raise ConfigError(f"option {missing[0]!r} has no value: add {missing[0]}=... to the command line")
    folder = (Path(pipeline.output_dir) / pipeline.name).absolute()
    run = {"output_dir": str(folder)}
    uri = pipeline.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder}/mlflow.db"
    tracking = {"uri": uri, "experiment": pipeline.experiment}
    configs = {}
    for name, stage in pipeline.stages.items():
        own = {"run": {**run, "name": name}, "tracking": tracking}

        def compose(stage: Any = stage, own: Mapping[str, Any] = own) -> RecipeConfig:
            # As plain values: the schema speaks when all is put together.
            recipe = OmegaConf.create(OmegaConf.to_container(compose_config(stage.recipe, list(stage.choices))))
            return parse_config(OmegaConf.merge(recipe, pipeline.common, stage.options, own))

        configs[name] = _with_name(name, compose)
    if not configs:
        raise ConfigError("stages is empty: a pipeline needs at least one")
    return configs


def _resolved(composed: Any) -> Any:
    try:
        pipeline = OmegaConf.merge(
            OmegaConf.structured(PipelineConfig), OmegaConf.create(OmegaConf.to_container(composed))
        )
        OmegaConf.resolve(pipeline)
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error)) from None
    return pipeline


def _with_name(stage: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except ConfigError as error:
        raise ConfigError(f"stage {stage}: {error}") from None


def pipeline_main(config_name: str) -> None:
    """The entry point of a pipeline; exits with status 2 after a `ConfigError`."""
    register_schema()

    def run() -> None:
        for composed, _ in compose_for_command_line(config_name):
            print(f"all stages are in {run_pipeline(composed)}")

    exit_on_config_error(run, resume="resume=true")
