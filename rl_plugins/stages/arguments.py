"""Arguments that several stages have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypedDict

from rl_plugins.config.models import LoraConfig, OptimizerConfig
from rl_plugins.config.sampling import SamplingConfig

if TYPE_CHECKING:
    from rl_plugins.stages.sampling import AnyEnvironment, Scorer


class StageArguments(TypedDict, total=False):
    """Arguments of `Stage`, which describes them."""

    tokenizer: Any
    optimizer: OptimizerConfig | None
    gradient_checkpointing: bool
    float8: str | None
    lora: LoraConfig | None
    max_steps: int
    tokens_per_micro_batch: int
    tokens_per_log_prob_batch: int | None
    patches_per_micro_batch: int | None
    packing: bool
    attention: str | None
    trust_remote_code: bool


class GenerationArguments(TypedDict):
    """Arguments of stages that generate responses. `PolicyOptimization` describes the arguments."""

    scorer: Scorer | None
    eval_sampling: SamplingConfig
    environment: AnyEnvironment
    seed: int


class ValidationArguments(TypedDict):
    """Arguments of stages that generate responses in validation alone, or nowhere. `SFT` describes the arguments."""

    scorer: Scorer | None
    eval_sampling: SamplingConfig | None
    environment: AnyEnvironment | None
    seed: int


class PreferenceArguments(ValidationArguments):
    """Arguments of stages with a preference loss. `PreferenceOptimization` describes the arguments."""

    loss: str
    loss_options: Mapping[str, Any]
    reference: str | None
