"""Models that give every position a number: critics and reward models (a causal model's body under a linear head)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_scalar_head(path: str, *, dtype: torch.dtype, gradient_checkpointing: bool = False) -> PreTrainedModel:
    from transformers import AutoConfig, AutoModelForTokenClassification

    config = AutoConfig.from_pretrained(path, num_labels=1)
    config.classifier_dropout = 0.0
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForTokenClassification.from_pretrained(path, config=config, dtype=dtype)
    return model.train()


def position_scores(model: Any, *, input_ids_BS: Tensor, attention_mask_BS: Tensor, position_ids_BS: Tensor) -> Tensor:
    scores_BS = model(
        input_ids=input_ids_BS, attention_mask=attention_mask_BS, position_ids=position_ids_BS, use_cache=False
    ).logits.squeeze(-1)
    return scores_BS.to(torch.promote_types(scores_BS.dtype, torch.float32))


def response_values(model: Any, *, response_width: int, **inputs: Tensor) -> Tensor:
    return position_scores(model, **inputs)[:, -(response_width + 1) : -1]


def response_scores(model: Any, *, response_width: int, **inputs: Tensor) -> Tensor:
    return position_scores(model, **inputs)[:, -response_width:]


def last_token_scores(scores_BT: Tensor, response_lengths_B: Tensor) -> Tensor:
    return scores_BT.gather(-1, (response_lengths_B - 1).clamp(min=0)[:, None]).squeeze(-1)
