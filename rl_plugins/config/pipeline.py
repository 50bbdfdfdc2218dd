"""Options of a pipeline: its stages, and their common options."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass
class PipelineStage:
    """Recipe and options of one stage.

    Attributes:
        recipe: name of the recipe.
        choices: group choices, such as `reward=gsm8k`.
        options: changed options of the recipe, nested by group.
    """

    recipe: str = MISSING
    choices: list[str] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class PipelineConfig:
    """Configuration of a pipeline.

    Attributes:
        name: name of the pipeline and of the MLflow run; the folder `output_dir/name` has a folder for each stage.
        output_dir: parent folder of the pipeline's folder.
        model: initial model of the first stage.
        tracking_uri: URI of the MLflow store; null is MLFLOW_TRACKING_URI, or an SQLite file in the pipeline's folder.
        experiment: MLflow experiment.
        resume: `true` or `auto` starts or continues the pipeline of this name; `false` refuses to change a pipeline.
        dry_run: check all stages, with the rows and rewards of the next stage, and exit without a start.
        folder: folder of the pipeline, for the options of stages to refer to.
        data: lists of files by name, for the options of stages to refer to.
        common: options of every stage.
        stages: stages by name, in the order of the runs.
    """

    name: str = MISSING
    output_dir: str = "outputs"
    model: str = MISSING
    tracking_uri: str | None = None
    experiment: str = "rl_plugins"
    resume: bool | str = False
    dry_run: bool = False
    folder: str = MISSING
    data: dict[str, list[str]] = field(default_factory=dict)
    common: dict[str, Any] = field(default_factory=dict)
    stages: dict[str, PipelineStage] = field(default_factory=dict)
