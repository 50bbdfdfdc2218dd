"""The output head of a causal language model, and running something else in its place.

Whatever stands in the head's place is called through the module itself, because ZeRO-3 gathers a module's weights in
the hooks of its `__call__`, for forward and for backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from rl_plugins.models.token_distributions import accumulation_dtype

Forward = Callable[[Tensor], Tensor]

# Of every head that has been tried: whether its model returns what it gives as it is.
_IS_LAST: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


@contextmanager
def replaced_forward(module: nn.Module, forward: Forward) -> Iterator[None]:
    """Inside, calling `module` calls `forward`; its hooks run as ever."""
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]


def last_linear_head(model: Callable[..., Any], inputs: dict[str, Tensor]) -> nn.Linear | None:
    """The head of `model` if the logits are nothing but what this one linear layer gives.

    None for a model that caps or scales its logits, drops or adds some, ignores `logits_to_keep`, has no head or a
    head of another kind. Whether it does is tried once per head, with a forward pass without gradient in which the
    head gives known numbers; so it holds for models that nobody has listed. Under ZeRO-3 that pass is collective.

    Args:
        model: called with `inputs` and `logits_to_keep`; an engine that knows its module's `get_output_embeddings`.
        inputs: of a forward pass; the trial takes the first row.
    """
    get_output_embeddings = getattr(model, "get_output_embeddings", None)
    head = get_output_embeddings() if get_output_embeddings is not None else None
    # A subclass, or a forward that someone else has put there, may compute something else.
    if type(head) is not nn.Linear or "forward" in head.__dict__:
        return None
    if head not in _IS_LAST:
        _IS_LAST[head] = _is_last(model, head, {name: tensor[:1] for name, tensor in inputs.items()})
    return head if _IS_LAST[head] else None


def _is_last(model: Callable[..., Any], head: nn.Linear, inputs: dict[str, Tensor]) -> bool:
    shapes: list[torch.Size] = []
    given: list[Tensor] = []

    def ramp(hidden: Tensor) -> Tensor:
        # Wide enough that any cap bends it, and in float32 so that no rounding hides it.
        ramp_V = torch.linspace(
            -1e4, 1e4, head.out_features, dtype=accumulation_dtype(hidden.dtype), device=hidden.device
        )
        shapes.append(hidden.shape[:-1])
        given.append(ramp_V.expand(*hidden.shape[:-1], -1))
        return given[-1].clone()

    with torch.no_grad(), unchanged_random_state(inputs["input_ids"].device), replaced_forward(head, ramp):
        logits: Tensor = model(**inputs, use_cache=False, logits_to_keep=1).logits
    if shapes != [torch.Size([1, 1])] or logits.shape != given[0].shape:
        return False
    return bool((logits == given[0]).all())


@contextmanager
def unchanged_random_state(device: torch.device) -> Iterator[None]:
    """A trial with dropout inside leaves the random numbers of the run as they were."""
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device], device_type=_generator_type(device)):
        yield


def _generator_type(device: torch.device) -> str:
    # `fork_rng` has the CPU's state in hand anyway, and looks for a module of this name.
    return "cuda" if device.type == "cpu" else device.type
