"""Options of a recipe: the records of all groups in one record, and the way from Hydra's output to this record."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl_plugins.config.data import BatchConfig, DataConfig, MixturePart
from rl_plugins.config.environment_variables import OptionPath, environment_expressions, value_at
from rl_plugins.config.hydra_errors import CONFIG_FOLDER, explain, keys_of
from rl_plugins.config.judge import JUDGE_FILES, judges_of, with_judges
from rl_plugins.config.models import (
    CostModelOptions,
    CriticOptions,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    ReferenceConfig,
    RewardConfig,
    RewardModelOptions,
    TeacherConfig,
)
from rl_plugins.config.placement import CRITIC_POOLS, FROZEN, PlacementConfig, StrategyConfig
from rl_plugins.config.precision import dtype_of_passes
from rl_plugins.config.rollout import RolloutConfig, default_gpu_share, default_sleep
from rl_plugins.config.run import AverageConfig, DebugConfig, GuardConfig, RunConfig, TrackingConfig, tracking_address
from rl_plugins.config.sampling import EnvironmentOptions, SamplingOptions, Schedule, ValidationConfig
from rl_plugins.config.settings import AT_LEAST_1, Settings, one_of, shown
from rl_plugins.errors import ConfigError, config_errors
from rl_plugins.redaction import redacted_value
from rl_plugins.storage import is_address, local_path
from rl_plugins.text_file import REPLACE, read_yaml
from rl_plugins.tracking.store import store_beside
from rl_plugins.whole_file import write_whole_text

COLLECTING_STAGES = ("policy_optimization", "prime")
"""Stages with an experience maker."""
SAMPLING_STAGES = (*COLLECTING_STAGES, "online_preference_optimization")
"""Stages with training on their own samples."""
GIVEN_RESPONSE_STAGES = ("reward_modeling", "preference_optimization")
"""Stages whose training rows contain preferences or labels instead of a reward."""
STAGES = ("sft", *GIVEN_RESPONSE_STAGES, *SAMPLING_STAGES)
LOSSES_WITHOUT_REFERENCE = ("orpo", "simpo")
"""Losses of preferences that need no reference model."""
MODELS = ("model", "reference", "teacher", "critic", "reward_model", "cost_critic", "cost_model")
"""Groups with the path of a model."""


@dataclass
class RecipeConfig(Settings):
    """All options of a recipe: a record for each group, and the options without a group.

    Attributes:
        stage: training method; most groups without a use for the method are ignored.
        launcher: `ray`, or `local` for one process.
        algorithm: algorithm of policy optimization: a node with `_target_`.
        callbacks: further callbacks of Lightning: a mapping of names to nodes with `_target_`.
        process_reward_model: PRIME's model: a node with `_target_`, or null for its defaults.
    """

    stage: Annotated[str, one_of(*STAGES)] = MISSING
    launcher: Annotated[str, one_of("ray", "local")] = "ray"
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    critic: CriticOptions = field(default_factory=CriticOptions)
    reward_model: RewardModelOptions = field(default_factory=RewardModelOptions)
    cost_critic: CriticOptions = field(default_factory=CriticOptions)
    cost_model: CostModelOptions = field(default_factory=CostModelOptions)
    process_reward_model: Any = None
    loss: LossConfig = field(default_factory=LossConfig)
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    environment: EnvironmentOptions = field(default_factory=EnvironmentOptions)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    schedule: Schedule = field(default_factory=Schedule)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    average: AverageConfig = field(default_factory=AverageConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
    callbacks: dict[str, Any] = field(default_factory=dict)
    algorithm: Any = None

    def __post_init__(self) -> None:
        """Check all settings, and choose the correction for the gap between rollout engine and training."""
        super().__post_init__()
        # Expression and value of each option from the environment. No field, because it is no option.
        self.from_environment: dict[OptionPath, tuple[str, object]] = {}
        self._has_default_correction = isinstance(self.algorithm, dict) and self.algorithm.get("correction", "") is None
        self._choose_correction()

    def _choose_correction(self) -> None:
        """Set the correction by the dtypes of engine and training, unless the recipe names a correction."""
        if not self._has_default_correction:
            return
        # With a staleness, the ratios of the loss are ratios to the sampling policies already.
        gap = self.rollout.quantizes or self.model.float8 or self.rollout_dtype != self._passes_dtype
        self.algorithm["correction"] = "token_tis" if gap and not self.schedule.max_staleness else "none"

    @property
    def generates(self) -> bool:
        """True if the stage samples from its model, in training or in validation. A reward model does not."""
        return self.stage != "reward_modeling"

    @property
    def needs_engine(self) -> bool:
        """True if the run has a rollout engine: it samples in training or validation, and replays no samples."""
        samples = self.stage in SAMPLING_STAGES or (self.validates and self.scores)
        return self.generates and self.debug.replay is None and samples

    @property
    def store_uri(self) -> str:
        """URI of the MLflow store: the option, or an SQLite file beside the runs."""
        return self.tracking.uri or store_beside(Path(self.run.output_dir))

    @property
    def validates_on_responses(self) -> bool:
        """True if validation measures the loss on given responses, and samples nothing."""
        return self.stage in ("sft", "preference_optimization") and self.data.validate_on == "responses"

    @property
    def scores(self) -> bool:
        """True if responses get rewards, in training or in validation."""
        return self.generates and not self.validates_on_responses

    @property
    def needs_vllm(self) -> bool:
        """True if the run has rollout engines of vLLM."""
        return self.needs_engine and self.rollout.engine == "vllm"

    @property
    def validates(self) -> bool:
        """True if the run validates."""
        return bool(self.data.val_files) and self.run.eval_every > 0

    @property
    def prompts_drawn(self) -> int:
        """Number of prompts drawn for a step; see `algorithm.group_filter`."""
        return self.batch.prompts_per_step * self.oversampling

    @property
    def oversampling(self) -> int:
        """Number of prompts drawn for each prompt of a step. The check of the algorithm names a wrong number."""
        group_filter = self.algorithm.get("group_filter") if isinstance(self.algorithm, dict) else None
        number = group_filter.get("oversampling", 1) if isinstance(group_filter, dict) else 1
        is_used = self.stage in COLLECTING_STAGES and AT_LEAST_1.fault(number, int) is None
        return number if is_used else 1

    @property
    def size_of_step(self) -> str:
        """Options that give `prompts_drawn`, for messages."""
        more = f" x algorithm.group_filter.oversampling={self.oversampling}" if self.oversampling > 1 else ""
        return f"batch.prompts_per_step={self.batch.prompts_per_step}{more}"

    @property
    def num_workers(self) -> int:
        """Number of training workers: one with the local launcher."""
        return 1 if self.launcher == "local" else self.placement.num_workers

    @property
    def on_gpus(self) -> bool:
        """True if the run uses GPUs. The launcher has replaced `placement.device=auto` by the device of the run."""
        return self.placement.device == "cuda"

    @property
    def precision(self) -> str:
        """Precision of the run: the option `model.precision`, or its default."""
        return self.model.precision or ("bf16-mixed" if self.on_gpus else "32-true")

    @property
    def num_engines(self) -> int:
        """Number of rollout engines: the option `rollout.engines`, or its default."""
        if self.has_engine_per_worker:
            return self.placement.num_workers // self.rollout.tensor_parallel_size
        return int(self.rollout.engines or 1)

    @property
    def has_engine_per_worker(self) -> bool:
        """True if every `rollout.tensor_parallel_size` workers have an engine."""
        engines = self.rollout.engines
        return engines == "per_worker" or (engines is None and self.on_gpus and self.placement.rollout == "colocated")

    @property
    def rollout_sleep(self) -> str:
        """Memory freed by the engines while the workers train: the option `rollout.sleep`, or its default."""
        if self.rollout.sleep or self.schedule.max_staleness:
            return self.rollout.sleep or "none"
        sends_adapter = self.model.lora.rank > 0 and self.rollout.lora == "adapter"
        return default_sleep(on_gpus=self.on_gpus, sends_adapter=sends_adapter)

    @property
    def frozen_models(self) -> dict[str, int]:
        """Number of frozen models in the training workers by role. Models in pools have other processes."""
        kl, lora = self.algorithm.get("kl") if isinstance(self.algorithm, dict) else None, self.model.lora
        compares = isinstance(kl, dict) and bool(kl.get("coefficient"))
        if self.stage.endswith("preference_optimization"):
            compares = self.loss.name not in LOSSES_WITHOUT_REFERENCE
        numbers = {
            # Without a new adapter, the policy is the reference.
            "reference": bool(self.reference.path) or (compares and not (lora.rank and not lora.path)),
            "process_reference": self.stage == "prime",
            **{role: bool(getattr(self, role).path) for role in ("reward_model", "cost_model")},
            "teacher": len(self.teacher.paths) or bool(self.teacher.path or self.teacher.update_every),
        }
        return {role: int(number) for role, number in numbers.items() if role not in self.placement.pools}

    @property
    def engine_limits(self) -> dict[str, Any]:
        """Size, memory and deadlines of a vLLM engine with defaults that depend on the device, by the option's name."""
        places, pools = self.strategy.offload.places, self.placement.pools
        trained_leave = all(places[model] == "while_sampling" for model in places.keys() - {*FROZEN, *pools})
        share = default_gpu_share(
            split=self.placement.rollout == "split",
            takes_turns=trained_leave and self.rollout_sleep != "none",
            staying=sum(number for role, number in self.frozen_models.items() if places.get(role, "stay") == "stay"),
        )
        return self.rollout.limits(on_gpus=self.on_gpus, gpu_share=share)

    @property
    def rollout_dtype(self) -> str:
        """Name of the dtype of a rollout engine's weights: the option, or the dtype of the policy's passes."""
        return self.rollout.dtype or self._passes_dtype

    @property
    def _passes_dtype(self) -> str:
        return dtype_of_passes(self.precision)

    @property
    def rewards(self) -> dict[str, Any]:
        """Rewards by data source: the option `reward.functions`, with the settings of each judge."""
        processes = self.num_workers * max(1, self.reward.num_workers)
        rewards: dict[str, Any] = with_judges(self.reward.functions, self.reward.judge, processes)
        return rewards

    @property
    def model_paths(self) -> dict[str, str]:
        """Folder or Hugging Face name of each model that the recipe names, by its option."""
        return {option: values[key] for option, values, key in self._places_of_paths()}

    @property
    def adapter_paths(self) -> dict[str, str]:
        """Folder or Hugging Face name of each saved adapter in the recipe, by the option."""
        return {option: values[key] for option, values, key in self._places_of_adapters()}

    def replace_model_paths(self, new: Callable[[str, str], str]) -> None:
        """Replace the path of each model and of each saved adapter.

        Args:
            new: function of an option and its path; returns the new path.
        """
        for option, values, key in (*self._places_of_paths(), *self._places_of_adapters()):
            values[key] = new(option, values[key])

    def _places_of_adapters(self) -> Iterator[tuple[str, dict[str, Any], str]]:
        """Yield the option of each saved adapter, and the mapping and the key with its path."""
        for group in ("model", *CRITIC_POOLS):
            if getattr(self, group).lora.path:
                yield f"{group}.lora.path", vars(getattr(self, group).lora), "path"

    def _places_of_paths(self) -> Iterator[tuple[str, dict[str, Any], str]]:
        """Yield the option of each named model, and the mapping and the key with its path."""
        places = [(f"{group}.path", vars(getattr(self, group)), "path") for group in MODELS]
        places += [(f"teacher.paths.{name}", self.teacher.paths, name) for name in self.teacher.paths]
        if isinstance(self.process_reward_model, dict) and self.stage == "prime":
            places.append(("process_reward_model.path", self.process_reward_model, "path"))
        if self.placement.judge.actors:
            places.append(("reward.judge.model", vars(self.reward.judge), "model"))
        yield from (place for place in places if place[1].get(place[2]) and isinstance(place[1][place[2]], str))

    def set_device(self, device: str) -> None:
        """Set the device of the run, `cpu` or `cuda`, and the precision and correction that follow from the device."""
        self.placement.device = device
        self._choose_correction()
        self.model.precision = self.precision

    def make_paths_absolute(self) -> None:
        """Make the paths of files and folders absolute, because Ray's workers have other working directories.

        Raises:
            ConfigError: a folder that must be local is an address.
        """
        self.run.output_dir = _absolute(self.run.output_dir)
        if self.run.storage:
            self.run.storage = _absolute(self.run.storage)
        self.data.replace_files(lambda option, path: [_absolute(path)])
        if self.debug.replay:
            self.debug.replay = str(local_path("debug.replay", self.debug.replay).absolute())
        if folder := self.strategy.offload.folder:
            self.strategy.offload.folder = str(local_path("strategy.offload.folder", folder).absolute())
        own = (node.get("config") for node in judges_of(self.reward.functions))
        for options in (vars(self.reward.judge), *(node for node in own if isinstance(node, dict))):
            options |= {name: _absolute(str(options[name])) for name in JUDGE_FILES if options.get(name)}
        for node in (
            *_files_of(self.reward.functions),
            self.data.dataset,
            *self.environment.tools,
            self.environment.parser,
            self.environment.stateful,
            self.environment.agent,
        ):
            if isinstance(node, dict) and "_target_" not in node and "path" in node:
                node["path"] = _absolute(str(node["path"]))
        for tool in self.environment.tools:
            if isinstance(tool, dict) and isinstance(tool.get("mcp"), list):
                tool["mcp"] = [_absolute(part) if Path(str(part)).is_file() else part for part in tool["mcp"]]
        self.replace_model_paths(lambda option, path: _absolute(path) if Path(path).is_dir() else path)


def _files_of(rewards: object) -> Iterator[dict[str, Any]]:
    """Yield the node of each reward from a file, also inside a sum."""
    if not isinstance(rewards, dict):
        return
    if "_target_" not in rewards and isinstance(rewards.get("path"), str):
        yield rewards
        return
    parts = rewards.get("rewards") if "_target_" in rewards else rewards
    for part in parts.values() if isinstance(parts, dict) else ():
        yield from _files_of(part)


def _absolute(path: str) -> str:
    return path if is_address(path) else str(Path(path).absolute())


def parse_config(values: object) -> RecipeConfig:
    """Check a mapping against the options of a recipe, and return the record. Paths of files become absolute.

    Args:
        values: mapping of groups to options, or a composed configuration of OmegaConf.

    Raises:
        ConfigError: a key does not exist, or a value is missing, has the wrong type, or is out of its range. The
            message names the option.
    """
    try:
        # As plain values, because Hydra's `+key=value` adds unknown keys to a composed configuration.
        plain = OmegaConf.to_container(values) if OmegaConf.is_config(values) else values
        _check_groups(_schema(), plain, [])
        merged = OmegaConf.merge(_schema(), plain)
        config: RecipeConfig = _build(merged, [])
        expressions = environment_expressions(merged)
        config.data.mixture = _mixture_parts(config.data.mixture or {})
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error, lambda: keys_of(_schema()))) from None
    # MLflow sets the variable for later runs of a process.
    config.tracking.uri = tracking_address(config.tracking.uri)
    config.make_paths_absolute()
    options = asdict(config)
    expressions.pop(("data", "chat_template"), None)  # Its value is the text of a file by now.
    config.from_environment = {path: (text, value_at(options, path)) for path, text in expressions.items()}
    return config


def read_config(file: Path, way_out: str = REPLACE) -> RecipeConfig:
    """Read the configuration of a run.

    Args:
        file: `config.yaml` of a run, or a file with the same options.
        way_out: advice for the user if the file is damaged.

    Raises:
        ConfigError: the file is damaged, or an option is wrong. The message begins with the file.
    """
    values = read_yaml(file, way_out)
    with config_errors(f"{file}: "):
        return parse_config(values)


def _check_groups(schema: object, values: object, names: Sequence[str]) -> None:
    """Check that each group of options is a mapping; OmegaConf does not name a group that is a list.

    Raises:
        ConfigError: a group is of another type.
    """
    # Null leaves the defaults, and an interpolation may name another group.
    is_left = values is None or (isinstance(values, str) and "${" in values)
    if not isinstance(schema, DictConfig) or (names and is_left):
        return
    if not isinstance(values, Mapping):
        where = f"option {'.'.join(names)!r}" if names else "the configuration"
        raise ConfigError(f"{where} is a group of options, not {shown(values)!r}: write a mapping of options to values")
    for name, value in values.items():
        if name in schema and not OmegaConf.is_missing(schema, name):
            _check_groups(schema[name], value, [*names, str(name)])


def public_options(config: RecipeConfig) -> dict[str, Any]:
    """Return the options as plain values without secrets, for files and pages.

    An unchanged option from the environment has its expression as the value.
    """
    options = asdict(config)
    for path, (expression, value) in config.from_environment.items():
        if value_at(options, path) == value:
            value_at(options, path[:-1])[path[-1]] = expression
    plain: dict[str, Any] = redacted_value(options)
    return plain


def dotted_options(node: object, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of each option of nested mappings."""
    if isinstance(node, dict):
        for name, child in node.items():
            yield from dotted_options(child, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix, node


def changed_options(config: RecipeConfig) -> dict[str, Any]:
    """Return the options without secrets that differ from their defaults, by dotted name.

    Defaults of the algorithm are the values of all algorithms (`parts/base.yaml`).
    """
    defaults: Any = OmegaConf.to_container(_schema())
    if config.algorithm is not None:
        defaults["algorithm"] = OmegaConf.to_container(OmegaConf.load(CONFIG_FOLDER / "algorithm/parts/base.yaml"))
    unchanged = dict(dotted_options(defaults))
    absent = object()
    options = dotted_options(public_options(config))
    return {name: value for name, value in options if value != unchanged.get(name, absent)}


def write_config(config: RecipeConfig, file: Path) -> None:
    """Write a configuration that `parse_config` reads, without secrets."""
    write_whole_text(file, OmegaConf.to_yaml(OmegaConf.create(public_options(config))))


def _mixture_parts(parts: object) -> dict[str, MixturePart]:
    """Return the parts of a mixture by name. The option itself has no type, because Hydra refuses unknown names."""
    if not isinstance(parts, Mapping):
        raise ConfigError(f"data.mixture={parts}: must be a mapping of names to `files` and `weight`")
    # Errors name the option by its groups.
    schema = OmegaConf.create({"data": {"mixture": DictConfig({}, element_type=MixturePart)}})
    named: dict[str, MixturePart] = _build(OmegaConf.merge(schema, {"data": {"mixture": parts}}), [])["data"]["mixture"]
    return named


def _build(node: object, names: Sequence[str]) -> Any:
    """Return the record of a node, or its plain value. The error of a record gets the name of its group.

    Args:
        node: node of OmegaConf.
        names: names of the groups around the node, and of the node.
    """
    if not isinstance(node, DictConfig):
        return OmegaConf.to_object(node) if OmegaConf.is_config(node) else node
    values = {str(name): _build(child, [*names, str(name)]) for name, child in node.items()}
    record: Any = OmegaConf.get_type(node)
    try:
        return values if record is dict else record(**values)
    except ConfigError as error:
        raise ConfigError(".".join([*names, str(error)])) from None


@cache
def _schema() -> Any:
    """Options of a recipe as OmegaConf reads them. A merge makes a copy."""
    return OmegaConf.structured(RecipeConfig)
