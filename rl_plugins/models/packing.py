"""The samples of a micro-batch as one row without padding; where one ends, the positions start again at 0.

transformers takes such a row, given without an attention mask, as several sequences that do not see each other; a model
that attends by `packed_sdpa` needs no mask as large as the square of the row for that. A model that lets them see each
other (one with a state that runs through the row, or with a mask of its own) is refused.

Axes: `B` samples, `S` prompt and response with padding, `T` response tokens with padding, `M` all real tokens, `N` real
response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from rl_plugins.errors import ConfigError
from rl_plugins.models.output_head import unchanged_random_state
from rl_plugins.models.packed_attention import boundaries, has_packed_attention

_TRIAL_TOKENS = 4

# Of every model that has been tried: whether it keeps the samples of a row apart.
_KEEPS_APART: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def pack(
    model: Callable[..., Any], *, input_ids_BS: Tensor, attention_mask_BS: Tensor, position_ids_BS: Tensor
) -> dict[str, Any]:
    """Inputs of a forward pass of `model` over one row, `input_ids` and `position_ids` [1, M] among them. Collective.

    Raises:
        ConfigError: the model lets the samples of a row see each other.
    """
    _check_keeps_apart(model, input_ids_BS.device)
    is_token_BS = attention_mask_BS.bool()
    return _row(model, input_ids_BS[is_token_BS], position_ids_BS[is_token_BS], is_token_BS.sum(dim=1))


def predicting_places(attention_mask_BS: Tensor, response_width: int) -> Tensor:
    """Where in the row the tokens stand that predict the response tokens, sample after sample [N]."""
    is_token_BS = attention_mask_BS.bool()
    place_BS = is_token_BS.flatten().cumsum(dim=0).view_as(is_token_BS) - 1
    is_response_BS = is_token_BS.clone()
    is_response_BS[:, : is_token_BS.shape[1] - response_width] = False
    return place_BS[is_response_BS] - 1


def _row(model: Callable[..., Any], ids_M: Tensor, positions_M: Tensor, lengths_B: Tensor) -> dict[str, Any]:
    begin = boundaries(lengths_B) if has_packed_attention(model) else {}
    return {"input_ids": ids_M[None], "position_ids": positions_M[None], **begin}


def _check_keeps_apart(model: Callable[..., Any], device: torch.device) -> None:
    # Once per model: whether a sample's outputs depend on the sample that stands before it in a row.
    assert isinstance(model, nn.Module), "packed samples need a module"
    if model not in _KEEPS_APART:
        _KEEPS_APART[model] = _keeps_apart(model, device)
    if not _KEEPS_APART[model]:
        raise ConfigError(
            f"{type(getattr(model, 'module', model)).__name__} lets packed samples see each other: "
            "with this model and its attention implementation, set batch.packing=false"
        )


def _keeps_apart(model: nn.Module, device: torch.device) -> bool:
    ids = torch.arange(_TRIAL_TOKENS, device=device)
    lengths = torch.tensor([_TRIAL_TOKENS, _TRIAL_TOKENS])

    def outputs_after(before: Tensor) -> list[Tensor]:
        # The same dropout, if any, both times.
        torch.manual_seed(0)
        with _inputs_of_scalar_heads(model) as seen:
            logits = model(**_row(model, torch.cat([before, ids]), ids.repeat(2), lengths), use_cache=False).logits
        return [output[0, _TRIAL_TOKENS:] for output in (logits, *seen)]

    with torch.no_grad(), unchanged_random_state(device):
        pairs = zip(outputs_after(ids.flip(0)), outputs_after(torch.zeros_like(ids)), strict=True)
        return all(_are_close(one, other) for one, other in pairs)


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


def _are_close(one: Tensor, other: Tensor) -> bool:
    # Not bit for bit: the kernels of a mixture of experts follow how many tokens go to each expert.
    tolerance = 8 * torch.finfo(one.dtype).eps * float(one.abs().max())
    return bool(((one - other).abs() <= tolerance).all())
