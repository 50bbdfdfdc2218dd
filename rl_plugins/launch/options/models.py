"""Options of the models: what they are, how they learn, and what they are judged by."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass
class LoraOptions:
    """A low-rank adapter that is trained in place of the model.

    Attributes:
        rank: of the change of each layer; 0 trains the model itself.
        alpha: the change is multiplied by `alpha / rank`.
        dropout: of the adapter's inputs, while training.
        target_modules: `all-linear`, a list of layers' names, or a regular expression for their full names.
    """

    rank: int = 0
    alpha: float = 32.0
    dropout: float = 0.0
    target_modules: Any = "all-linear"


@dataclass
class ModelConfig:
    """The policy.

    Attributes:
        path: Hugging Face name or folder.
        precision: Lightning's precision flag: `32-true`, `bf16-true` or `bf16-mixed`.
        gradient_checkpointing: recompute activations in the backward pass.
        lora: its adapter; off by default.
    """

    path: str = MISSING
    precision: str = "32-true"
    gradient_checkpointing: bool = False
    lora: LoraOptions = field(default_factory=LoraOptions)


@dataclass
class ReferenceOptions:
    """The reference model of a KL term or of a preference loss.

    Attributes:
        path: Hugging Face name or folder; null is the policy's own start.
        update_every: steps after which it is moved towards the policy; 0 leaves it as it is.
        keep: share of its weights that a move keeps: 0 copies the policy, 0.99 is a moving average.
    """

    path: str | None = None
    update_every: int = 0
    keep: float = 0.0


@dataclass
class TeacherOptions:
    """The teacher of a distillation.

    Attributes:
        path: Hugging Face name or folder, with the policy's tokens.
    """

    path: str | None = None


@dataclass
class OptimizerOptions:
    """AdamW.

    Attributes:
        lr: learning rate.
        betas: decay of the moments.
        weight_decay: decoupled weight decay.
        warmup_steps: steps of linear warm-up.
        decay_steps: steps of linear decay after it; 0 keeps the rate.
        lr_end: share of `lr` at the end of the decay.
        gradient_clip: bound on the global gradient norm; 0 for none.
    """

    lr: float = 1e-6
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    weight_decay: float = 0.0
    warmup_steps: int = 0
    decay_steps: int = 0
    lr_end: float = 0.0
    gradient_clip: float = 1.0


@dataclass
class CriticOptions:
    """The critic of algorithms that need values.

    Attributes:
        path: what it starts from, a policy or a reward model; null is `model.path`.
        optimizer: its own.
        warmup_steps: steps in which it is trained alone.
        keep_checkpoints: newest checkpoints that hold it; null keeps it as long as the policy's.
        lora: its adapter; off by default.
    """

    path: str | None = None
    optimizer: OptimizerOptions = field(default_factory=lambda: OptimizerOptions(lr=1e-5))
    warmup_steps: int = 0
    keep_checkpoints: int | None = None
    lora: LoraOptions = field(default_factory=LoraOptions)


@dataclass
class RewardModelOptions:
    """A trained reward model beside the policy, scoring its tokens; its score is added to that of `reward`.

    Attributes:
        path: its folder or name; null is none. It must have the policy's tokens.
        weight: of its score.
        rule_weight: of the score of `reward`; 0 leaves that to validation.
    """

    path: str | None = None
    weight: float = 1.0
    rule_weight: float = 1.0


@dataclass
class LossOptions:
    """The loss of stages that learn from preferences or labels.

    Attributes:
        name: in `PREFERENCE_LOSSES` or `REWARD_MODEL_LOSSES`; null is the stage's default.
        options: its keyword arguments.
    """

    name: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class RewardOptions:
    """The scorers.

    Attributes:
        functions: one reward (`_target_`, or `path` and `name`), or a mapping from data_source to rewards.
        num_workers: reward processes of each training worker.
        deadline_s: seconds for one call of a reward.
        max_failure_rate: share of failed samples that stops the run.
    """

    functions: dict[str, Any] = field(default_factory=dict)
    num_workers: int = 1
    deadline_s: float = 30.0
    max_failure_rate: float = 0.1
