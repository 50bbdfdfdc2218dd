"""The schema of a recipe: small typed groups, one per part of the system; it refuses unknown keys and wrong types."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, cast

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl_plugins.errors import ConfigError
from rl_plugins.launch.hydra_errors import explain, keys_of
from rl_plugins.launch.options.data import BatchConfig, DataConfig, MixtureOptions
from rl_plugins.launch.options.machines import PlacementConfig, StrategyOptions
from rl_plugins.launch.options.models import (
    CriticOptions,
    LossOptions,
    ModelConfig,
    OptimizerOptions,
    ReferenceOptions,
    RewardModelOptions,
    RewardOptions,
    TeacherOptions,
)
from rl_plugins.launch.options.run import AverageOptions, DebugOptions, GuardOptions, RunConfig, TrackingConfig
from rl_plugins.launch.options.sampling import (
    EnvironmentOptions,
    RolloutConfig,
    SamplingOptions,
    ScheduleOptions,
    ValidationOptions,
)


@dataclass
class RecipeConfig:
    """A recipe.

    Attributes:
        stage: what is trained and how; the groups it has no use for are ignored.
        launcher: `ray`, or `local` for one process.
        algorithm: of policy optimization: a node with `_target_`.
        process_reward_model: of PRIME: a node with `_target_`, or null for its defaults.
    """

    stage: str = MISSING
    launcher: str = "ray"
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    reference: ReferenceOptions = field(default_factory=ReferenceOptions)
    teacher: TeacherOptions = field(default_factory=TeacherOptions)
    critic: CriticOptions = field(default_factory=CriticOptions)
    reward_model: RewardModelOptions = field(default_factory=RewardModelOptions)
    process_reward_model: Any = None
    loss: LossOptions = field(default_factory=LossOptions)
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    environment: EnvironmentOptions = field(default_factory=EnvironmentOptions)
    validation: ValidationOptions = field(default_factory=ValidationOptions)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    schedule: ScheduleOptions = field(default_factory=ScheduleOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    reward: RewardOptions = field(default_factory=RewardOptions)
    strategy: StrategyOptions = field(default_factory=StrategyOptions)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    average: AverageOptions = field(default_factory=AverageOptions)
    guard: GuardOptions = field(default_factory=GuardOptions)
    debug: DebugOptions = field(default_factory=DebugOptions)
    algorithm: Any = None


def parse_config(values: Any) -> RecipeConfig:
    """Check a mapping against the schema and make it a `RecipeConfig`; data files and folders become absolute.

    Raises:
        ConfigError: a key that does not exist, a value of the wrong type, or one that is missing.
    """
    try:
        # As plain values: Hydra's `+key=value` lets unknown keys into what it composes.
        plain = OmegaConf.to_container(values) if OmegaConf.is_config(values) else values
        config: Any = OmegaConf.to_object(OmegaConf.merge(_schema(), plain))
        config.data.mixture = _parse_mixture(config.data.mixture)
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error, lambda: keys_of(_schema()))) from None
    # MLflow sets the variable itself for what comes after it in a process, such as another run.
    config.tracking.uri = config.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI") or None
    # Ray's workers have working directories of their own.
    config.run.output_dir = str(Path(config.run.output_dir).absolute())
    config.data.train_files = [str(Path(path).absolute()) for path in config.data.train_files]
    for part in config.data.mixture.values():
        part.files = [str(Path(path).absolute()) for path in part.files]
    config.data.val_files = [str(Path(path).absolute()) for path in config.data.val_files]
    if config.debug.replay:
        config.debug.replay = str(Path(config.debug.replay).absolute())
    if config.strategy.offload.folder:
        config.strategy.offload.folder = str(Path(config.strategy.offload.folder).absolute())
    for reward in config.reward.functions.values():
        if isinstance(reward, dict) and "_target_" not in reward and "path" in reward:
            reward["path"] = str(Path(str(reward["path"])).absolute())
    for group in (config.model, config.reference, config.teacher, config.critic, config.reward_model):
        if group.path and Path(group.path).is_dir():
            group.path = str(Path(group.path).absolute())
    return cast(RecipeConfig, config)


@cache
def _schema() -> Any:
    """The schema as OmegaConf reads it; who merges into it gets a copy."""
    return OmegaConf.structured(RecipeConfig)


@cache
def register_schema() -> None:
    """Make `RecipeConfig` known to Hydra as `recipe_schema`, the first entry of every recipe's defaults."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="recipe_schema", node=RecipeConfig)


def num_engines(config: RecipeConfig) -> int:
    """How many rollout engines there are."""
    engines = config.rollout.engines
    return config.placement.num_workers if engines == "per_worker" else int(engines)


def engine_threads(config: RecipeConfig, machines: int) -> int:
    """Threads of each process of an engine on CPU: its own cores, or those of the workers that wait while it samples.

    Args:
        config: the run's.
        machines: that the workers and the engines are spread over, at most.
    """
    placement = config.placement
    if placement.rollout == "split":
        return max(1, int(placement.engine_cpus))
    if config.schedule.max_staleness:
        # The workers train meanwhile.
        return 1
    cores = math.ceil(placement.num_workers / machines) * placement.cpus_per_worker
    processes = math.ceil(num_engines(config) / machines) * config.rollout.tensor_parallel_size
    return max(1, int(cores / processes))


def rollout_sleep(config: RecipeConfig) -> str:
    """What the engines give back while the workers train."""
    return config.rollout.sleep or ("none" if config.schedule.max_staleness else "kv_cache")


def rollout_dtype(config: RecipeConfig) -> str:
    """Name of the dtype of a rollout engine's weights: as configured, or the one that the policy computes in."""
    return config.rollout.dtype or ("float32" if config.model.precision == "32-true" else "bfloat16")


def _parse_mixture(parts: Any) -> dict[str, MixtureOptions]:
    """The parts by their names; the type of the option itself is open, or Hydra would refuse names it does not know."""
    node = OmegaConf.create({"data": {"mixture": DictConfig({}, element_type=MixtureOptions)}})
    merged: Any = OmegaConf.merge(node, {"data": {"mixture": parts or {}}})
    return {str(name): part for name, part in cast(Any, OmegaConf.to_object(merged))["data"]["mixture"].items()}
