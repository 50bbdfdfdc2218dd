"""Models that give every position a number: critics and reward models (a causal model's body under a linear head).

A critic's number at a position is the value of the state that the tokens up to there make; a reward model's is the
score of those tokens. On disk both are token classification models with one label, as transformers knows them.

Axes: `B` samples, `S` prompt and response (prompts padded on the left, responses on the right), `T` response tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl_plugins.errors import ConfigError
from rl_plugins.models.packed_attention import use_packed_attention
from rl_plugins.models.packing import pack
from rl_plugins.models.remote import RemoteModel
from rl_plugins.models.token_distributions import accumulation_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def load_scalar_head(
    path: str, *, dtype: torch.dtype, gradient_checkpointing: bool = False, new_head: bool = True
) -> PreTrainedModel:
    """Load a model with a scalar head, in train mode and without dropout before the head.

    A folder with such a head (a reward model: token or sequence classification with one label) comes with it. Over the
    body of a causal language model the head is new: weight and bias are 0, and so is every score.

    Args:
        path: Hugging Face name or folder.
        dtype: of the parameters.
        gradient_checkpointing: recompute activations in the backward pass.
        new_head: whether a model without a head gets one; if not, it is refused.

    Raises:
        ConfigError: the architecture has no token classification model, the head has several labels, weights of the
            body are missing, or the head is, where it should be there.
    """
    from transformers import AutoModelForTokenClassification

    model: PreTrainedModel
    with _without_load_report():
        model, loaded = AutoModelForTokenClassification.from_pretrained(
            path, config=scalar_head_config(path), dtype=dtype, output_loading_info=True
        )
    head = {name: p for name, p in model.named_parameters() if not name.startswith(f"{model.base_model_prefix}.")}
    missing = {name: head.get(name) for name in loaded["missing_keys"]}
    if None in missing.values():
        lost = sorted(name for name, parameter in missing.items() if parameter is None)
        raise ConfigError(f"{path}: {len(lost)} weights of {type(model).__name__} are missing, such as {lost[0]}")
    # A head that was trained may have been without a bias.
    is_new = any(name.endswith("weight") for name in missing)
    if is_new and not new_head:
        raise ConfigError(
            f"{path} has no scalar head ({', '.join(sorted(head))}), so all its scores would be 0: name a reward "
            "model, such as one that the recipe reward_modeling has trained"
        )
    if is_new and (unused := sorted(name for name in loaded["unexpected_keys"] if _is_a_head(name))):
        raise ConfigError(f"{path}: its head {unused[0]} does not fit {type(model).__name__}, which wants {min(head)}")
    _zero([parameter for parameter in missing.values() if parameter is not None])
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    use_packed_attention(model)
    return model.train()


def scalar_head_config(path: str) -> PreTrainedConfig:
    """The configuration of a model with a scalar head, from that of a causal language model or of such a model.

    Raises:
        ConfigError: several labels, or an architecture without token classification.
    """
    from transformers import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING, AutoConfig

    config = AutoConfig.from_pretrained(path)
    architecture = (config.architectures or ["a causal language model"])[0]
    if architecture.endswith("Classification") and config.num_labels != 1:
        raise ConfigError(
            f"{path}: {architecture} has {config.num_labels} labels, and a scalar head has one: name a reward model "
            "with a single output, or a causal language model"
        )
    if type(config) not in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING:
        raise ConfigError(
            f"{path}: transformers has no token classification model for {config.model_type}, which critics and "
            "reward models need: start them from a model of another family, such as Qwen2 or Llama"
        )
    config.num_labels = 1
    # Scores of the same tokens must not differ from pass to pass.
    config.classifier_dropout = 0.0
    return config


@contextmanager
def _without_load_report() -> Iterator[None]:
    # transformers warns that the head is new and the language model's head unused; both are meant. A filter, because
    # at a higher level of this logger transformers reports on tensor parallelism instead.
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(_is_an_error)
    try:
        yield
    finally:
        logger.removeFilter(_is_an_error)


def _is_an_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def _is_a_head(name: str) -> bool:
    return name.split(".")[0] in ("score", "classifier", "value_head", "v_head", "reward_head")


def _zero(parameters: list[torch.nn.Parameter]) -> None:
    with torch.no_grad():
        if not any(hasattr(parameter, "ds_id") for parameter in parameters):
            for parameter in parameters:
                parameter.zero_()
            return
        import deepspeed

        # Under ZeRO-3 each rank has a shard; what rank 0 writes into the whole goes to all.
        with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0):
            for parameter in parameters:
                parameter.zero_()


def position_scores(
    model: Callable[..., Any],
    *,
    input_ids_BS: Tensor,
    attention_mask_BS: Tensor,
    position_ids_BS: Tensor,
    response_width: int | None = None,
    packed: bool = False,
) -> Tensor:
    """One forward pass; the number at every position [B, S], in float32 at least. Padding has finite numbers.

    With `packed`, the real tokens of all samples go through the model as one row, and if it is known how many columns
    are not prompts (`response_width`), the same prompts only once: see `packing`.
    """
    if isinstance(model, RemoteModel):
        return model.position_scores(
            input_ids_BS=input_ids_BS,
            attention_mask_BS=attention_mask_BS,
            position_ids_BS=position_ids_BS,
            response_width=response_width,
            packed=packed,
        )
    if not packed:
        output = model(
            input_ids=input_ids_BS, attention_mask=attention_mask_BS, position_ids=position_ids_BS, use_cache=False
        )
        padded_BS: Tensor = output.logits.squeeze(-1)
        return padded_BS.to(accumulation_dtype(padded_BS.dtype))
    row = pack(
        model,
        input_ids_BS=input_ids_BS,
        attention_mask_BS=attention_mask_BS,
        position_ids_BS=position_ids_BS,
        response_width=response_width,
    )
    scores_M: Tensor = model(**row.inputs, use_cache=False).logits[0].squeeze(-1)
    scores_M = scores_M.to(accumulation_dtype(scores_M.dtype))
    scores_BS = scores_M.new_zeros(attention_mask_BS.shape)
    is_token_BS = attention_mask_BS.bool()
    scores_BS[is_token_BS] = scores_M[row.places_BS[is_token_BS]]
    return scores_BS


def response_values(model: Callable[..., Any], *, response_width: int, **forward: Any) -> Tensor:
    """The number at the position before each response token [B, T]: the value of the state it was sampled in.

    Args:
        model: see `position_scores`.
        response_width: T.
        **forward: further arguments of `position_scores`.
    """
    scores_BS = position_scores(model, response_width=response_width, **forward)
    return scores_BS[:, -(response_width + 1) : -1]


def response_scores(
    model: Callable[..., Any], *, attention_mask_BS: Tensor, response_width: int, **forward: Any
) -> Tensor:
    """The number at each response token itself [B, T].

    At padding it is that of the sample's last token, which for an empty response is the prompt's. So that this has a
    place, there is one column even if every response is empty.

    Args:
        model: see `position_scores`.
        attention_mask_BS: 1 at real tokens.
        response_width: T.
        **forward: further arguments of `position_scores`.
    """
    scores_BS = position_scores(model, attention_mask_BS=attention_mask_BS, response_width=response_width, **forward)
    prompt_width = scores_BS.shape[1] - response_width
    response_lengths_B = attention_mask_BS[:, prompt_width:].sum(dim=-1)
    nth_T = torch.arange(1, max(response_width, 1) + 1, device=scores_BS.device)
    return scores_BS.gather(-1, prompt_width - 1 + nth_T.minimum(response_lengths_B[:, None]))


def last_token_scores(scores_BT: Tensor, response_lengths_B: Tensor) -> Tensor:
    """The score of each whole response [B]: of `response_scores`, the one at its last token, found by its length.

    An empty response has the score of its prompt.
    """
    return scores_BT.gather(-1, (response_lengths_B - 1).clamp(min=0)[:, None]).squeeze(-1)
