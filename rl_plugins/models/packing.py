"""The samples of a micro-batch as one row without padding; where one ends, the positions start again at 0.

transformers takes such a row, given without an attention mask, as several sequences that do not see each other. A model
that does not (one with a state that runs through the row, or with a mask of its own) is refused.

Axes: `B` samples, `S` prompt and response with padding, `T` response tokens with padding, `M` all real tokens, `N` real
response tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from rl_plugins.errors import ConfigError
from rl_plugins.models.output_head import unchanged_random_state

_TRIAL_TOKENS = 4

# Of every model that has been tried: whether it keeps the samples of a row apart.
_KEEPS_APART: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def pack(
    input_ids_BS: Tensor, attention_mask_BS: Tensor, position_ids_BS: Tensor, response_width: int
) -> dict[str, Tensor]:
    """Inputs of a forward pass over one row: `input_ids` and `position_ids` [1, M], `logits_to_keep` [N].

    `logits_to_keep` are the positions that predict the response tokens, sample after sample.
    """
    is_token_BS = attention_mask_BS.bool()
    place_BS = is_token_BS.flatten().cumsum(dim=0).view_as(is_token_BS) - 1
    is_response_BS = is_token_BS.clone()
    is_response_BS[:, : is_token_BS.shape[1] - response_width] = False
    return {
        "input_ids": input_ids_BS[is_token_BS][None],
        "position_ids": position_ids_BS[is_token_BS][None],
        "logits_to_keep": place_BS[is_response_BS] - 1,
    }


def check_keeps_apart(model: Callable[..., Any], device: torch.device) -> None:
    """Try once per model whether a sample's logits depend on the sample that stands before it in a row. Collective.

    Raises:
        ConfigError: they do.
    """
    assert isinstance(model, nn.Module), "packed samples need a module"
    if model not in _KEEPS_APART:
        _KEEPS_APART[model] = _keeps_apart(model, device)
    if not _KEEPS_APART[model]:
        raise ConfigError(
            f"{type(getattr(model, 'module', model)).__name__} lets packed samples see each other: "
            "with this model and its attention implementation, set packed to false"
        )


def _keeps_apart(model: Callable[..., Any], device: torch.device) -> bool:
    ids = torch.arange(_TRIAL_TOKENS, device=device)
    positions = ids.repeat(2)[None]

    def logits_after(before: Tensor) -> Tensor:
        # The same dropout, if any, both times.
        torch.manual_seed(0)
        row = torch.cat([before, ids])[None]
        logits: Tensor = model(input_ids=row, position_ids=positions, use_cache=False, logits_to_keep=1).logits
        return logits

    with torch.no_grad(), unchanged_random_state(device):
        one, other = logits_after(ids.flip(0)), logits_after(torch.zeros_like(ids))
    # Not bit for bit: the kernels of a mixture of experts follow how many tokens go to each expert.
    tolerance = 8 * torch.finfo(one.dtype).eps * float(one.abs().max())
    return bool(((one - other).abs() <= tolerance).all())
