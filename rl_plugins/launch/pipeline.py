"""Several recipes one after the other, each starting from what those before it have made, under one MLflow run.

A pipeline that was interrupted goes on: stages that are through are left alone, the one in between is resumed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl_plugins.errors import ConfigError
from rl_plugins.launch.batch import check_batch
from rl_plugins.launch.command_line import compose_config, run_recipe
from rl_plugins.launch.config import RecipeConfig, parse_config
from rl_plugins.launch.hydra_errors import explain
from rl_plugins.launch.values import check_values
from rl_plugins.run_folder import RunFolder, read_metrics


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


def register_schema() -> None:
    """Make `PipelineConfig` known to Hydra as `pipeline_schema`, the first entry of a pipeline's defaults."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="pipeline_schema", node=PipelineConfig)


def run_pipeline(composed: Any) -> Path:
    """Check all stages, then run those that are not through; returns the pipeline's folder.

    Raises:
        ConfigError: something in the configuration of a stage is wrong; a wrong option is found before the first stage.
    """
    configs = stage_configs(composed)
    first = next(iter(configs.values()))
    folder = Path(first.run.output_dir)
    if folder.is_dir() and any(folder.iterdir()) and not composed.resume:
        raise ConfigError(f"the pipeline {folder} exists: continue it with resume=true, or give another name")
    for name, config in configs.items():
        for check in (check_values, check_batch):
            _with_name(name, partial(check, config))
    folder.mkdir(parents=True, exist_ok=True)
    parent = ParentRun(str(first.tracking.uri), first.tracking.experiment, composed.name)
    parent.open(folder / "mlflow_run_id")
    for position, (name, config) in enumerate(configs.items(), start=1):
        run = RunFolder(folder / name)
        label = f"{composed.name} [{position}/{len(configs)}] {name}"
        if run.exported() is not None:
            print(f"{label}: through, see {run.path}", flush=True)
        else:
            print(label, flush=True)
            config.run.resume = run.latest_checkpoint() is not None
            config.tracking.parent_run = parent.run_id
            # What a stage starts from exists only now, and its folder becomes absolute.
            fresh = parse_config(OmegaConf.to_container(OmegaConf.structured(config)))
            _with_name(name, partial(run_recipe, fresh, composed.stages[name].recipe))
        parent.log(name, position, run)
    parent.close()
    return folder


def stage_configs(composed: Any) -> dict[str, RecipeConfig]:
    """The configuration of each stage.

    Raises:
        ConfigError: names the stage, and the key or value at fault.
    """
    try:
        pipeline = OmegaConf.merge(
            OmegaConf.structured(PipelineConfig), OmegaConf.create(OmegaConf.to_container(composed))
        )
        OmegaConf.resolve(pipeline)
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error)) from None
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


def _with_name(stage: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except ConfigError as error:
        raise ConfigError(f"stage {stage}: {error}") from None


class ParentRun:
    """The MLflow run under which those of the stages hang.

    Args:
        uri: of the tracking store.
        experiment: its experiment.
        name: its name.
    """

    def __init__(self, uri: str, experiment: str, name: str) -> None:
        self._uri, self._experiment, self._name = uri, experiment, name
        self.run_id: str | None = None

    def open(self, id_file: Path) -> None:
        """Create the run, or go on with the one whose id is in the file."""
        from mlflow import MlflowClient

        from rl_plugins.callbacks.mlflow import quiet_mlflow
        from rl_plugins.callbacks.mlflow_run import find_experiment

        quiet_mlflow()
        self._client = MlflowClient(self._uri)
        if id_file.is_file():
            self.run_id = id_file.read_text().strip()
            self._client.set_terminated(self.run_id, "RUNNING")
            return
        experiment_id = find_experiment(self._client, self._uri, self._experiment)
        self.run_id = self._client.create_run(experiment_id, run_name=self._name).info.run_id
        id_file.write_text(self.run_id)

    def log(self, stage: str, position: int, run: RunFolder) -> None:
        """The last validation of a stage that is through."""
        assert self.run_id is not None
        series = read_metrics(run.metrics)
        for metric in ("val/reward", "val/accuracy"):
            if series.get(metric):
                last = list(series[metric].values())[-1]
                self._client.log_metric(self.run_id, f"{stage}/{metric}", last, step=position)

    def close(self) -> None:
        """All stages are through."""
        assert self.run_id is not None
        self._client.set_terminated(self.run_id, "FINISHED")


def pipeline_main(config_name: str) -> None:
    """The entry point of a pipeline; exits with status 2 after a `ConfigError`."""
    from rl_plugins.launch.command_line import exit_on_config_error

    register_schema()
    exit_on_config_error(lambda: print(f"all stages are in {run_pipeline(compose_config(config_name, sys.argv[1:]))}"))
