"""Arguments that every stage passes on to `Stage`."""

from __future__ import annotations

from typing import Any, TypedDict

from rl_plugins.config.models import LoraConfig, OptimizerConfig


class StageArguments(TypedDict, total=False):
    """Arguments of `Stage`, which describes them."""

    tokenizer: Any
    optimizer: OptimizerConfig | None
    gradient_checkpointing: bool
    lora: LoraConfig | None
    max_steps: int
    tokens_per_micro_batch: int
    tokens_per_log_prob_batch: int | None
    patches_per_micro_batch: int | None
    packing: bool
    attention: str | None
    trust_remote_code: bool
