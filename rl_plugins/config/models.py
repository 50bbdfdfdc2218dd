"""Settings of the models: the policy, the models beside the policy, their adapters and optimizers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from omegaconf import MISSING

from rl_plugins.config.judge import JudgeConfig
from rl_plugins.config.precision import FLOAT8_SCALES, PRECISIONS
from rl_plugins.config.settings import (
    ABOVE_0,
    ABOVE_0_OR_NULL,
    AT_LEAST_1,
    FROM_0_TO_1,
    FROM_0_TO_BELOW_1,
    GPUS,
    NOT_NEGATIVE,
    PROCESSES,
    SECONDS,
    Range,
    Settings,
    check_ranges,
    fits,
    is_node,
    one_of,
    or_null,
    shown,
)
from rl_plugins.errors import ConfigError
from rl_plugins.hub.names import model_name

LANGUAGE_MODEL = "language-model"
"""Setting of `LoraConfig.target_modules` for a vision-language model whose vision tower stays as it is."""
_LAYERS = Range(
    "must be all-linear, language-model, a list of layers' names, or a regular expression",
    lambda value: (
        bool(value) and isinstance(value, str | list | tuple) and all(isinstance(name, str) for name in value)
    ),
)
_EXCLUDED = or_null(Range("must be a list of layers' names, or a regular expression", _LAYERS.holds))
_NAMED = Range(
    "must be a name, a dotted path, or a mapping with the key _target_",
    lambda value: isinstance(value, str) or is_node(value),
)
_OPTIONS_OF_SCHEDULE = {
    "constant": {"warmup_steps": False},
    "linear": {"warmup_steps": False, "decay_steps": True, "lr_end": False},
    "cosine": {"warmup_steps": False, "stable_steps": False, "decay_steps": True, "lr_end": False},
    "wsd": {"warmup_steps": False, "stable_steps": True, "decay_steps": True, "lr_end": False},
}
"""Options of each schedule of the package: True for an option without which the schedule would be another one."""
SCHEDULES = tuple(_OPTIONS_OF_SCHEDULE)
"""Names of the schedules of the package."""
_DECAY_RATES = Range(
    "must be two numbers from 0 to below 1",
    lambda value: (
        isinstance(value, list | tuple)
        and len(value) == 2
        and all(fits(beta, float) and 0 <= beta < 1 for beta in value)
    ),
)


@dataclass
class LoraConfig(Settings):
    """Low-rank adapter, which is trained instead of the model.

    Attributes:
        rank: rank of the change of each layer; 0 trains the model itself.
        alpha: scale of the change, which is multiplied by `alpha / rank`.
        dropout: dropout of the adapter's inputs in training.
        target_modules: `all-linear` for all linear layers except the output head and, in a mixture of experts, layers
            with the names of experts' layers; `language-model` for these layers without the vision tower and the
            projector of a vision-language model; a list of layer names (`q_proj`), or a regular expression for full
            layer names.
        exclude_modules: layers of `target_modules` without an adapter: a list of layer names, or a regular expression
            for full layer names; null excludes none.
        experts: adapter of the experts of a mixture, too: a change of each expert's matrices, with the same rank.
        quantization: `nf4` keeps the frozen weights of the layers with an adapter in 4 bits
            (`pip install 'rl-plugins[bitsandbytes]'`); null keeps the weights as they are.
        path: folder or Hugging Face name of a saved adapter in PEFT's format, with which training starts; null is a new
            adapter, which does not change the outputs. The other options must describe the saved adapter.

    Sources: LoRA, https://arxiv.org/abs/2106.09685; `nf4`, QLoRA, https://arxiv.org/abs/2305.14314.
    """

    rank: Annotated[int, NOT_NEGATIVE] = 16
    alpha: Annotated[float, ABOVE_0] = 32.0
    dropout: Annotated[float, FROM_0_TO_BELOW_1] = 0.0
    target_modules: Annotated[Any, _LAYERS] = "all-linear"
    exclude_modules: Annotated[Any, _EXCLUDED] = None
    experts: bool = False
    quantization: Annotated[str | None, one_of(None, "nf4")] = None
    path: str | None = None

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: a value is out of range, or options of the adapter do not fit together.
        """
        super().__post_init__()
        if self.quantization and not self.rank:
            raise ConfigError(f"quantization={self.quantization} is for weights under an adapter: give rank a value")
        if self.quantization and self.experts:
            raise ConfigError(f"quantization={self.quantization}: experts stay as they are: use experts=false")
        if self.quantization and self.path:
            raise ConfigError(f"path={self.path}: not tried with quantization={self.quantization}: leave one out")
        if self.path and not self.rank:
            raise ConfigError(f"path={self.path}: rank=0 trains no adapter: give rank and alpha the adapter's values")
        if self.experts and self.dropout:
            raise ConfigError(f"dropout={self.dropout}: an adapter of experts has no dropout: use dropout=0")


def no_adapter() -> LoraConfig:
    """Return settings without an adapter, the default of recipes."""
    return LoraConfig(rank=0)


@dataclass
class RouterLossConfig(Settings):
    """Losses of the routers of a mixture of experts; see `rl_plugins.callbacks.router_losses.RouterLosses`.

    Attributes:
        balance: coefficient of the loss for an even load of the experts; 0 for none.
        z: coefficient of the loss for small logits; 0 for none.
    """

    balance: Annotated[float, NOT_NEGATIVE] = 0.0
    z: Annotated[float, NOT_NEGATIVE] = 0.0

    @property
    def active(self) -> bool:
        """True if there is a loss."""
        return bool(self.balance or self.z)


@dataclass
class ModelConfig(Settings):
    """Policy.

    Attributes:
        path: Hugging Face name or folder; a name may have a revision, `OWNER/NAME@REVISION`.
        revision: branch, tag or commit of a name on the hub; null is the main branch, or the revision in `path`.
        precision: Lightning's precision flag: `32-true`, `bf16-true`, `bf16-mixed`, or `16-mixed` for passes in float16
            with a scaled loss. Null is `bf16-mixed` on GPUs, with master weights in float32, and `32-true` on CPU.
        gradient_checkpointing: compute activations again in the backward pass.
        compile: compile the blocks of the models in the training workers with `torch.compile`. The first steps take
            longer.
        liger: run norms, rotary positions, MLPs and output heads of the models in the training workers by the Triton
            kernels of Liger (`pip install 'rl-plugins[liger]'`); on GPUs only.
        float8: train with 8-bit floating point products in the linear layers inside the blocks of policy and critic
            (`pip install 'rl-plugins[torchao]'`): `tensorwise` has a scale for each matrix and is the fastest,
            `rowwise` has a scale for each row and is more precise. GPUs of compute capability 8.9 or more only; null
            keeps the precision.
        attention: attention of transformers in the training workers, such as `eager`, `flash_attention_2` or
            `flex_attention`; null is the package's own for packed samples (`packed_sdpa`), which shares prompts.
        router_replay: in a mixture of experts, the experts of the tokens in the updates of a step, so that ratios
            compare the same experts: `recompute` for the experts that computed the old log-probs, `rollout` for the
            experts of the rollout engine (vLLM on GPUs, or the transformers engine). Null lets the routers choose.
        router_losses: losses of the routers of a mixture of experts; off by default.
        trust_remote_code: run Python code that the config.json of a model of the run names (`auto_map`), in every
            process that loads the model. The code has all rights of the user, so read the code first.
        lora: adapter of the policy; off by default.
    """

    path: str = MISSING
    revision: str | None = None
    precision: Annotated[str | None, one_of(None, *PRECISIONS)] = None
    gradient_checkpointing: bool = False
    compile: bool = False
    liger: bool = False
    float8: Annotated[str | None, one_of(None, *FLOAT8_SCALES)] = None
    attention: str | None = None
    router_replay: Annotated[str | None, one_of(None, "recompute", "rollout")] = None
    router_losses: RouterLossConfig = field(default_factory=RouterLossConfig)
    trust_remote_code: bool = False
    lora: LoraConfig = field(default_factory=no_adapter)

    def __post_init__(self) -> None:
        """Check the settings, and join the revision to the name.

        Raises:
            ConfigError: a setting is out of range, or the path has a revision or is a folder.
        """
        super().__post_init__()
        if self.revision is None:
            return
        name = model_name(self.path)
        if name is None:
            raise ConfigError(
                f"revision={self.revision}: path={self.path} is a folder or an address, and only names on the hub have "
                "revisions: leave revision out"
            )
        if name.revision not in (None, self.revision):
            raise ConfigError(f"revision={self.revision}: path={self.path} has a revision, too: leave one of them out")
        self.path, self.revision = str(replace(name, revision=self.revision)), None


@dataclass
class ReferenceConfig(Settings):
    """Reference model of a KL term or of a preference loss.

    Attributes:
        path: Hugging Face name or folder; null is the initial policy, with the adapter at `model.lora.path`.
        update_every: steps between two moves of the reference model towards the policy; 0 keeps the reference model.
        keep: share of the reference model's weights kept in a move: 0 copies the policy, 0.99 is a moving
            average.
    """

    path: str | None = None
    update_every: Annotated[int, NOT_NEGATIVE] = 0
    keep: Annotated[float, FROM_0_TO_BELOW_1] = 0.0


@dataclass
class TeacherConfig(Settings):
    """Teacher of a distillation, or several teachers.

    Attributes:
        path: Hugging Face name or folder of a model with the policy's tokens, for one teacher.
        paths: paths of several teachers by name. Without `weights`, the name is a data_source, whose prompts have this
            teacher; the teacher `default` has the prompts of all other data sources.
        weights: weight of each teacher of `paths` by name, with the sum 1; every prompt then has all teachers.
        update_every: steps between two moves of the teacher towards the policy, so that the policy learns from its own
            earlier self; 0 keeps the teacher. With a number above 0, a null `path` is the initial policy.
        keep: share of the teacher's weights kept in a move: 0 copies the policy, 0.99 is a moving average.
    """

    path: str | None = None
    paths: dict[str, str] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    update_every: Annotated[int, NOT_NEGATIVE] = 0
    keep: Annotated[float, FROM_0_TO_BELOW_1] = 0.0

    def __post_init__(self) -> None:
        """Check the settings against each other.

        Raises:
            ConfigError: one teacher and several teachers are named, several teachers follow the policy, or the weights
                have other names than the teachers, are not above 0, or have another sum than 1.
        """
        super().__post_init__()
        if self.paths and self.path:
            raise ConfigError(f"path={self.path}: paths names several teachers: leave one of the two out")
        if self.paths and self.update_every:
            raise ConfigError(
                f"update_every={self.update_every}: paths names several teachers, which cannot follow the policy: "
                "leave one of the two out"
            )
        if not self.weights:
            return
        if differing := sorted(self.weights.keys() ^ self.paths.keys()):
            raise ConfigError(
                f"weights={shown(self.weights)}: {differing[0]!r} is in only one of weights and paths: name the same "
                "teachers in both"
            )
        for name, weight in self.weights.items():
            check_ranges(float, ABOVE_0, **{f"weights.{name}": weight})
        if not math.isclose(total := math.fsum(self.weights.values()), 1, abs_tol=1e-6):
            raise ConfigError(f"weights={shown(self.weights)}: the sum is {total:g}: make the sum 1")

    @property
    def models(self) -> dict[str, str]:
        """Name of each teacher's model, by the teacher's name in `paths`; `default` is the name of the only teacher."""
        return {name: f"teacher_{name}" for name in self.paths} or {"default": "teacher"}

    def teacher_of(self, data_source: str) -> str:
        """Return the name of the teacher of a data source.

        Raises:
            ConfigError: the data source has no teacher.
        """
        if data_source in self.paths:
            return data_source
        if "default" not in self.models:
            raise ConfigError(
                f"no teacher for data_source {data_source!r}: paths has teachers for "
                f"{', '.join(map(repr, sorted(self.paths)))}; add the missing teacher, or a `default`"
            )
        return "default"


@dataclass
class OptimizerConfig(Settings):
    """Optimizer and schedule of a trained model, by default AdamW with a constant rate.

    Attributes:
        name: class in `torch.optim`, such as `SGD`; dotted path of a class or function; or a node with `_target_` and
            arguments. `Muon` is for the matrices of hidden layers, with AdamW for the other parameters (not with ZeRO).
        options: further arguments of the optimizer.
        lr: learning rate.
        vision_lr: learning rate of the vision tower of a vision-language model; null is `lr`, and 0 freezes the tower.
        betas: decay rates of the first and second moment, for optimizers with the argument.
        weight_decay: weight decay, for optimizers with the argument.
        schedule: `constant`, `linear` or `cosine` for the kind of decay after the warm-up, or `wsd` (warm-up, stable,
            decay) for steps at the full rate before a linear decay; or a class in `torch.optim.lr_scheduler`, the
            dotted path of a class or function of the optimizer, or a node with `_target_` and arguments. The schedule
            moves on after each step of the stage.
        schedule_options: arguments of a schedule beside the four names.
        warmup_steps: stage steps of linear warm-up, for each of the four names.
        stable_steps: stage steps at the full rate between warm-up and decay (`wsd`, `cosine`).
        decay_steps: stage steps over which the rate falls to `lr_end` after that (`linear`, `cosine`, `wsd`).
        lr_end: share of `lr` at the end of the decay.
        gradient_clip: bound on the global gradient norm; 0 for none.
    """

    lr: Annotated[float, NOT_NEGATIVE] = 1e-6
    name: Annotated[Any, _NAMED] = "AdamW"
    options: dict[str, Any] = field(default_factory=dict)
    betas: Annotated[tuple[float, float], _DECAY_RATES] = (0.9, 0.999)
    weight_decay: Annotated[float, NOT_NEGATIVE] = 0.0
    schedule: Annotated[Any, _NAMED] = "constant"
    schedule_options: dict[str, Any] = field(default_factory=dict)
    warmup_steps: Annotated[int, NOT_NEGATIVE] = 0
    stable_steps: Annotated[int, NOT_NEGATIVE] = 0
    decay_steps: Annotated[int, NOT_NEGATIVE] = 0
    lr_end: Annotated[float, NOT_NEGATIVE] = 0.0
    gradient_clip: Annotated[float, NOT_NEGATIVE] = 1.0
    vision_lr: Annotated[float | None, or_null(NOT_NEGATIVE)] = None

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: a value is out of range, or the schedule lacks an option or has no use for one.
        """
        super().__post_init__()
        # A node is no key of a mapping.
        own = _OPTIONS_OF_SCHEDULE[self.schedule] if self.schedule in SCHEDULES else {}
        for option in _OPTIONS_OF_SCHEDULE["wsd"]:
            value = getattr(self, option)
            if value and option not in own:
                fitting = [name for name in SCHEDULES if option in _OPTIONS_OF_SCHEDULE[name]]
                otherwise = "" if own else " or give schedule_options,"
                raise ConfigError(
                    f"{option}={value}: schedule={shown(self.schedule)} has no {option}: leave it out,{otherwise} or "
                    f"use schedule={' or '.join(fitting)}"
                )
            if not value and own.get(option):
                raise ConfigError(f"{option}=0: schedule={self.schedule} needs a number of steps: give it a value")
        if own and self.schedule_options:
            raise ConfigError(
                f"schedule_options: schedule={self.schedule} has the options {', '.join(own)}: leave schedule_options "
                "out"
            )

    @property
    def path(self) -> str:
        """Name or dotted path of the class or function."""
        return str(self.name["_target_"] if is_node(self.name) else self.name)

    @property
    def is_muon(self) -> bool:
        """True for Muon, which a run takes with AdamW for the parameters that are no matrices."""
        return self.path in ("Muon", "torch.optim.Muon")

    def factor(self, step: int) -> float:
        """Return the share of `lr` at a step of the stage."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        if self.decay_steps == 0:
            return 1.0
        progress = min(max(step - self.warmup_steps - self.stable_steps, 0) / self.decay_steps, 1.0)
        if self.schedule == "cosine":
            progress = (1.0 - math.cos(math.pi * progress)) / 2
        return 1.0 - (1.0 - self.lr_end) * progress


@dataclass
class CriticConfig(Settings):
    """Critic, for algorithms with values.

    Attributes:
        path: folder or Hugging Face name of a policy or a reward model, the initial critic; null is the initial policy.
        optimizer: settings of the critic's optimizer.
        warmup_steps: first steps, in which only the critic is trained.
        lora: adapter of the critic, without dropout; off by default.
    """

    path: str | None = None
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    warmup_steps: Annotated[int, NOT_NEGATIVE] = 0
    lora: LoraConfig = field(default_factory=no_adapter)


@dataclass
class CriticOptions(CriticConfig):
    """Critic, for algorithms with values.

    Attributes:
        keep_checkpoints: number of newest checkpoints with the critic; null keeps the critic as long as the
            policy.
    """

    keep_checkpoints: Annotated[int | None, or_null(AT_LEAST_1)] = None


@dataclass
class RewardModelOptions(Settings):
    """Trained reward model, which scores the tokens of the policy. Its score is added to the score of `reward`.

    Attributes:
        path: folder or Hugging Face name of a model with the policy's tokens; null is none.
        weight: weight of the reward model's score.
        rule_weight: weight of the score of `reward`. With 0 only validation uses the score; failed calls still count.
    """

    path: str | None = None
    weight: float = 1.0
    rule_weight: float = 1.0


@dataclass
class CostModelOptions(RewardModelOptions):
    """Trained cost model, for algorithms with a bound on the mean cost. It scores the tokens of the policy.

    Its score is added to the number `algorithm.constraint.cost` of `reward`, if the number has a name.

    Attributes:
        path: folder or Hugging Face name of a model with the policy's tokens and with costs as scores; null is none.
        weight: weight of the cost model's score; -1 makes a cost of a score for harmlessness.
        rule_weight: weight of the cost from `reward`.
    """


@dataclass
class RewardModelConfig(RewardModelOptions):
    """Trained reward model or cost model, which runs as a frozen model on the tokens of the samples.

    Attributes:
        max_failure_rate: largest share of a rank's samples (0 to 1) whose scores may not be finite; a larger share
            ends the run. Several steps count together; see `FailureRate`.
    """

    max_failure_rate: Annotated[float, FROM_0_TO_1] = 0.0


@dataclass
class LossConfig(Settings):
    """Loss of stages with preferences or labels.

    Attributes:
        name: name in `PREFERENCE_LOSSES` or `REWARD_MODEL_LOSSES`; null is the stage's default.
        options: keyword arguments of the loss.
    """

    name: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class RewardConfig(Settings):
    """Rewards and their processes.

    Attributes:
        functions: one reward (`_target_`, or `path` and `name`), or a mapping from data_source to rewards.
        num_workers: reward processes of each training worker; 0, with launcher=local only, calls rewards in the
            training process, without hard deadline and limits.
        gpus: Ray GPUs of each reward process; a fraction shares a GPU. A process with 0 sees no GPU.
        deadline_s: deadline of one call of a reward, in seconds.
        load_timeout_s: seconds for a reward process to load the rewards.
        memory_mb: memory of a reward process beyond a process without rewards, in MiB; null is half of the memory
            that is free at its start, and no limit with `gpus`.
        pass_env: names of environment variables with secrets that reward processes get; other secrets are removed.
        max_failure_rate: share of failed samples above which the run ends.
    """

    functions: dict[str, Any] = field(default_factory=dict)
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    num_workers: Annotated[int, PROCESSES] = 1
    gpus: Annotated[float, GPUS] = 0.0
    deadline_s: Annotated[float, SECONDS] = 30.0
    load_timeout_s: Annotated[float, SECONDS] = 12.0
    memory_mb: Annotated[int | None, ABOVE_0_OR_NULL] = None
    pass_env: list[str] = field(default_factory=list)
    max_failure_rate: Annotated[float, FROM_0_TO_1] = 0.1
