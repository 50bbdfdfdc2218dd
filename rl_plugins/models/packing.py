"""The samples of a micro-batch as one row without padding; where one ends, the positions start again at 0.

transformers takes such a row, given without an attention mask, as several sequences that do not see each other; a model
that attends by `packed_sdpa` needs no mask as large as the square of the row for that. A model that lets them see each
other (one with a state that runs through the row, or with a mask of its own) is refused.

A model that attends by `packed_sdpa` also runs a prompt only once for all samples of it that are in the row: where the
second response to it begins, positions go on from the prompt's end (see `packed_attention`).

Axes: `B` samples, `S` prompt and response with padding, `P` prompt with padding, `T` response tokens with padding, `M`
tokens of the row, `N` real response tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from rl_plugins.errors import ConfigError
from rl_plugins.models.packed_attention import boundaries, has_packed_attention

logger = logging.getLogger(__name__)

_TRIAL_TOKENS = 4


@dataclass(frozen=True)
class _Trial:
    """What a model does with rows.

    Attributes:
        keeps_apart: a sample's outputs do not depend on the sample that stands before it.
        shares_prompts: nor on whether its prompt stands there for it alone.
    """

    keeps_apart: bool
    shares_prompts: bool


# Of every model that has been tried, without the engine around it.
_TRIALS: WeakKeyDictionary[nn.Module, _Trial] = WeakKeyDictionary()


@dataclass(frozen=True)
class Row:
    """A micro-batch as one row.

    Attributes:
        inputs: of a forward pass of the model, `input_ids` and `position_ids` [1, M] among them.
        places_BS: int64, where in the row each real token stands.
    """

    inputs: dict[str, Any]
    places_BS: Tensor

    def predicting(self, attention_mask_BS: Tensor, response_width: int) -> Tensor:
        """Where in the row the tokens stand that predict the response tokens, sample after sample [N]."""
        prompt_width = attention_mask_BS.shape[1] - response_width
        return self.places_BS[:, prompt_width - 1 : -1][attention_mask_BS[:, prompt_width:].bool()]


def pack(
    model: Callable[..., Any],
    *,
    input_ids_BS: Tensor,
    attention_mask_BS: Tensor,
    position_ids_BS: Tensor,
    response_width: int | None = None,
) -> Row:
    """The real tokens of some samples as one row. Collective.

    Args:
        model: that will run it.
        input_ids_BS: prompts, padded on the left, and responses.
        attention_mask_BS: 1 at real tokens.
        position_ids_BS: from 0 at the first real token of a sample.
        response_width: T; None where it is not known what of the samples is a prompt.

    Raises:
        ConfigError: the model lets the samples of a row see each other.
    """
    trial, is_token_BS = _try(model, input_ids_BS.device), attention_mask_BS.bool()
    if response_width is None or not trial.shares_prompts:
        places_BS = is_token_BS.flatten().cumsum(dim=0).view_as(is_token_BS) - 1
        return Row(_inputs(model, input_ids_BS[is_token_BS], position_ids_BS[is_token_BS]), places_BS)
    width = input_ids_BS.shape[1] - response_width
    first_B = first_of_prompt(input_ids_BS[:, :width], is_token_BS[:, :width])
    # The samples of a prompt stand where the first of them did.
    first_B, order_B = first_B.sort(stable=True)
    is_in_row_BS = is_token_BS[order_B]
    is_in_row_BS[:, :width] &= (first_B == order_B)[:, None]
    places_BS = torch.empty_like(input_ids_BS)
    places_BS[order_B] = is_in_row_BS.flatten().cumsum(dim=0).view_as(is_in_row_BS) - 1
    places_BS[order_B, :width] = places_BS[first_B, :width]
    row = (values_BS[order_B][is_in_row_BS] for values_BS in (input_ids_BS, position_ids_BS))
    return Row(_inputs(model, *row), places_BS)


def first_of_prompt(prompts_BP: Tensor, is_token_BP: Tensor) -> Tensor:
    """Of each sample, the first one [B] that has the same real tokens at the same places as its prompt."""
    nth_B = torch.arange(len(prompts_BP), device=prompts_BP.device)
    if not prompts_BP.numel():
        return nth_B
    numbers_B = torch.where(is_token_BP, prompts_BP, -1).unique(dim=0, return_inverse=True)[1]
    first_B = nth_B.scatter_reduce(0, numbers_B, nth_B, "amin", include_self=False)[numbers_B]
    return first_B


def shares_prompts(model: Callable[..., Any]) -> bool:
    """Whether a model runs a prompt only once for all its samples in a row, as far as is known."""
    if not has_packed_attention(model):
        return False
    trial = _TRIALS.get(_without_engine(model))
    return trial is None or trial.shares_prompts


def _without_engine(model: Callable[..., Any]) -> nn.Module:
    assert isinstance(model, nn.Module), "packed samples need a module"
    inner: nn.Module = getattr(model, "module", model)
    return inner


def _inputs(model: Callable[..., Any], ids_M: Tensor, positions_M: Tensor) -> dict[str, Any]:
    begin = boundaries(positions_M) if has_packed_attention(model) else {}
    return {"input_ids": ids_M[None], "position_ids": positions_M[None], **begin}


def _try(model: Callable[..., Any], device: torch.device) -> _Trial:
    # Once per model.
    inner = _without_engine(model)
    if inner in _TRIALS:
        return _TRIALS[inner]
    trial, name = _trial_of(model, device), type(inner).__name__
    if not trial.keeps_apart:
        raise ConfigError(
            f"{name} lets packed samples see each other: with this model and its attention implementation, "
            "set batch.packing=false"
        )
    if has_packed_attention(model) and not trial.shares_prompts:
        logger.warning(
            "%s cannot share a prompt among the samples of a row: each runs its own. The first micro-batches hold more "
            "than batch.tokens_per_micro_batch",
            name,
        )
    _TRIALS[inner] = trial
    return trial


def _trial_of(model: Any, device: torch.device) -> _Trial:
    ids = torch.arange(_TRIAL_TOKENS, device=device)
    others = ids.flip(0)
    half = _TRIAL_TOKENS // 2

    def outputs(tokens: list[Tensor], positions: list[Tensor], last: int) -> list[Tensor]:
        with _inputs_of_scalar_heads(model) as seen:
            logits = model(**_inputs(model, torch.cat(tokens), torch.cat(positions)), use_cache=False).logits
        return [output[0, -last:] for output in (logits, *seen)]

    with torch.no_grad(), _without_dropout(model):
        whole = outputs([others, ids], [ids, ids], _TRIAL_TOKENS)
        after_another = outputs([torch.zeros_like(ids), ids], [ids, ids], _TRIAL_TOKENS)
        if not (keeps_apart := _are_close(whole, after_another)) or not has_packed_attention(model):
            return _Trial(keeps_apart, shares_prompts=False)
        shared = outputs([ids[:half], others[half:], ids[half:]], [ids, ids[half:]], half)
        # The kernels of rows of another length round in another way, layer after layer.
        return _Trial(keeps_apart, _are_close([output[half:] for output in whole], shared, at_least=1e-2))


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    try:
        # Not by `eval`, which some models take as the sign to merge adapters.
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def _inputs_of_scalar_heads(model: nn.Module) -> Iterator[list[Tensor]]:
    """What goes into the heads that give one number: a new head says 0 of everything."""
    seen: list[Tensor] = []
    heads = [module for module in model.modules() if isinstance(module, nn.Linear) and module.out_features == 1]
    hooks = [head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0])) for head in heads]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _are_close(outputs: list[Tensor], others: list[Tensor], at_least: float = 0.0) -> bool:
    # Not bit for bit: the kernels of a mixture of experts follow how many tokens go to each expert.
    return all(
        bool(((one - other).abs() <= max(8 * torch.finfo(one.dtype).eps, at_least) * float(one.abs().max())).all())
        for one, other in zip(outputs, others, strict=True)
    )
