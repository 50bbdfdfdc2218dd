"""Log-probs and entropy of response tokens, without the logits of a whole batch.

A causal language model runs up to its output head. The hidden states of the predicting positions go through the head
chunk by chunk (`chunked_head_columns`). For this, the forward of the head is replaced during the call of the model. The
head is still called as a module, because ZeRO-3 gathers the weights of a module in the hooks of `__call__`, in forward
and in backward.

Some models change the logits after the head, or have no head. Such a model returns the logits of the response, and the
logits are converted to float32 block by block.

Axes: `B` samples, `S` prompt and response (prompts padded on the left, responses on the right), `T` response tokens,
`N` real response tokens of all samples, `H` hidden, `V` vocabulary, `K` tokens at one position, `J` and `C`: see
`token_distributions`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from rl_plugins.data.images import ImageInputs
from rl_plugins.device_copies import to_device
from rl_plugins.models.liger import fused_log_probs, has_liger
from rl_plugins.models.packing import check_positions, pack
from rl_plugins.models.remote import RemoteModel
from rl_plugins.models.token_distributions import (
    ColumnSpec,
    accumulation_dtype,
    cast_as_linear,
    chunked_head_columns,
    distribution_columns,
    logits_at_once,
)
from rl_plugins.router_replay import RouterReplay
from rl_plugins.vision_language import padded_inputs

# Cache: for each output head, whether the model returns the head's output unchanged as logits (no soft-cap, scaling or
# truncation).
_RETURNS_HEAD_OUTPUT: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


@dataclass(frozen=True)
class ResponseLogProbs:
    """Log-probs of response tokens and numbers of their distributions, [B, T]. Fields not requested are None.

    Attributes:
        log_probs_BT: log-probs of the response tokens.
        entropy_BT: entropy in nats, with a gradient on request.
        sum_pi_squared_BT: sum of the squared probabilities over the vocabulary, without gradient.
        top_ids_BTK: ids of the most likely tokens, the likeliest first, int64.
        top_log_probs_BTK: log-probs of the most likely tokens, without gradient.
        log_probs_BTK: log-probs of the tokens given as `tokens_BTK`, with gradient.
    """

    log_probs_BT: Tensor
    entropy_BT: Tensor | None = None
    sum_pi_squared_BT: Tensor | None = None
    top_ids_BTK: Tensor | None = None
    top_log_probs_BTK: Tensor | None = None
    log_probs_BTK: Tensor | None = None

    def mapped(self, function: Callable[[Tensor], Tensor]) -> ResponseLogProbs:
        """Return the result of a function for each field."""
        columns = {column.name: getattr(self, column.name) for column in fields(self)}
        return ResponseLogProbs(**{name: function(value) for name, value in columns.items() if value is not None})


def response_log_probs(
    model: Callable[..., Any],
    *,
    input_ids_BS: Tensor,
    attention_mask_BS: Tensor,
    position_ids_BS: Tensor,
    response_width: int,
    image_inputs_B: Sequence[ImageInputs | None] | None = None,
    temperature: float = 1.0,
    sum_pi_squared: bool = False,
    entropy: bool = True,
    entropy_gradient: bool = False,
    top_k: int = 0,
    tokens_BTK: Tensor | None = None,
    packed: bool = False,
    router_replay: RouterReplay | None = None,
    device: torch.device | None = None,
) -> ResponseLogProbs:
    """Run one forward pass, and compute the log-probs of the last `response_width` tokens of every sample, [B, T].

    Padded positions have finite numbers without meaning. Callers must mask padded positions. With samples on the host,
    the host does not wait for a GPU.

    Args:
        model: causal language model of transformers, or any callable with the same `forward` (`logits_to_keep`
            included), such as a model engine. With a `RemoteModel`, the log-probs have no gradient.
        input_ids_BS: ids of prompts and responses.
        attention_mask_BS: 1 at real tokens, 0 at padding.
        position_ids_BS: positions, counted from 0 at the first real token of a sample.
        response_width: number of response columns, T.
        image_inputs_B: inputs of the images of each sample; None if no sample has images.
        temperature: divisor of the logits.
        sum_pi_squared: return `sum_pi_squared_BT`.
        entropy: return `entropy_BT`. If False, a model with kernels of Liger runs a fused head for log-probs alone.
        entropy_gradient: give `entropy_BT` a gradient.
        top_k: number of most likely tokens to return as `top_ids_BTK` and `top_log_probs_BTK`, at most the size of the
            vocabulary.
        tokens_BTK: ids of tokens whose log-probs are returned as `log_probs_BTK`.
        packed: run the real tokens of all samples as one row without padding, with each shared prompt only once. If
            the model does not use the attention `packed_sdpa`, prompts are not shared, and the attention mask may be as
            large as the square of the row.
        router_replay: records or sets the experts of the tokens of `model`, a mixture of experts.
        device: device of the model and of the result, by default the device of the samples.

    Raises:
        ConfigError: `packed` is True, and the model does not separate the samples of a row; or see `check_positions`.
    """
    device = device or input_ids_BS.device
    if isinstance(model, RemoteModel):
        found = model.response_log_probs(
            input_ids_BS=input_ids_BS,
            attention_mask_BS=attention_mask_BS,
            position_ids_BS=position_ids_BS,
            response_width=response_width,
            image_inputs_B=image_inputs_B,
            temperature=temperature,
            sum_pi_squared=sum_pi_squared,
            entropy=entropy,
            top_k=top_k,
            packed=packed,
        )
        return found.mapped(partial(to_device, device=device))
    check_positions(model, position_ids_BS)
    columns = ColumnSpec(temperature, sum_pi_squared, entropy_gradient, top_k)
    prompt_width = input_ids_BS.shape[1] - response_width
    places = attention_mask_BS[:, prompt_width:].nonzero(as_tuple=True)
    tokens_N = to_device(input_ids_BS[:, prompt_width:][places], device)
    extra_NJ = None if tokens_BTK is None else to_device(tokens_BTK[places], device)
    real_tokens = tuple(to_device(places_N, device) for places_N in places)
    # Liger's kernel has no temperature.
    is_fused = not entropy and columns == ColumnSpec() and extra_NJ is None and has_liger(model)
    tokens: dict[str, Any] = {
        "input_ids_BS": input_ids_BS, "attention_mask_BS": attention_mask_BS, "position_ids_BS": position_ids_BS,
    }  # fmt: skip
    head = last_linear_head(model, {name.removesuffix("_BS"): values for name, values in tokens.items()}, device)
    if packed:
        row = pack(model, **tokens, image_inputs_B=image_inputs_B, response_width=response_width, device=device)
        inputs = row.inputs
        kept: Tensor | int = to_device(row.predicting(attention_mask_BS, response_width), device)
    else:
        inputs = padded_inputs(model, **tokens, image_inputs_B=image_inputs_B, device=device)
        # The last position predicts no token, but `logits_to_keep` cannot exclude the last position.
        kept = response_width + 1
    if router_replay is not None:
        is_token_BS = attention_mask_BS.bool()
        places_N = row.places_BS[is_token_BS] if packed else is_token_BS.flatten().nonzero().squeeze(-1)
        router_replay.start(to_device(places_N, device), inputs.arguments["input_ids"].numel())
    run = partial(inputs.run, model, logits_to_keep=kept, use_cache=False)

    if head is not None:
        forward = head.forward

        def columns_of_hidden(hidden: Tensor) -> Tensor:
            hidden_NH = hidden[0] if packed else hidden[:, :-1][real_tokens]
            if is_fused and len(tokens_N):
                return _fused_columns(head, hidden_NH, tokens_N)[None]
            return _columns_of_hidden(head, forward, hidden_NH, tokens_N, columns, extra_NJ)[None]

        # The columns are returned as the output of the head, so that hooks on the output gather the weight in backward.
        with replaced_forward(head, columns_of_hidden):
            columns_NC = run().logits[0]
    elif packed:
        columns_NC = distribution_columns(run().logits[0], tokens_N, columns, extra_NJ)
    else:
        # A selection of positions would copy the logits. The last position and padding get an arbitrary token instead.
        next_tokens_BT = input_ids_BS.roll(-1, dims=1)[:, -(response_width + 1) :]
        logits_BTV = run().logits
        logits_NV = logits_BTV.reshape(-1, logits_BTV.shape[-1])
        if tokens_BTK is not None:
            # A row with a blank image has no such tokens.
            added = (0, 0, 0, 1, 0, len(input_ids_BS) - len(tokens_BTK))
            extra_NJ = to_device(nn.functional.pad(tokens_BTK, added).flatten(0, 1), device)
        next_tokens_N = to_device(next_tokens_BT.reshape(-1), device)
        all_NC = distribution_columns(logits_NV, next_tokens_N, columns, extra_NJ)
        return _by_name(all_NC.view(*next_tokens_BT.shape, -1)[:, :-1], columns, entropy=entropy)
    columns_BTC = columns_NC.new_zeros(len(input_ids_BS), response_width, columns_NC.shape[-1])
    columns_BTC[real_tokens] = columns_NC
    return _by_name(columns_BTC, columns, entropy=entropy)


def _columns_of_hidden(
    head: nn.Linear,
    forward: Callable[[Tensor], Tensor],
    hidden_NH: Tensor,
    tokens_N: Tensor,
    columns: ColumnSpec,
    extra_NJ: Tensor | None,
) -> Tensor:
    largest = logits_at_once(hidden_NH.device).chunk
    if hidden_NH.shape[0] * head.out_features <= largest:
        return distribution_columns(forward(hidden_NH), tokens_N, columns, extra_NJ)
    rows = max(1, largest // head.out_features)
    return chunked_head_columns(hidden_NH, head.weight, head.bias, tokens_N, columns, extra_NJ, rows=rows)


def _fused_columns(head: nn.Linear, hidden_NH: Tensor, tokens_N: Tensor) -> Tensor:
    """Return the column of log-probs alone [N, 1]."""
    inputs = cast_as_linear(hidden_NH, head.weight, head.bias)
    with torch.autocast(hidden_NH.device.type, enabled=False):
        return fused_log_probs(*inputs, tokens_N)[:, None]


def _by_name(columns_BTC: Tensor, columns: ColumnSpec, *, entropy: bool) -> ResponseLogProbs:
    """Name the columns of `distribution_columns`.

    Their order is log-prob, entropy, sum of squared probabilities (optional), `top_k` log-probs, `top_k` ids, and the
    log-probs of extra tokens.
    """
    entropy_BT = columns_BTC[..., 1] if entropy else None
    fixed, extra_BTK = columns_BTC[..., : columns.num_fixed].detach(), columns_BTC[..., columns.num_fixed :]
    tops, ids = fixed[..., fixed.shape[-1] - 2 * columns.top_k :].tensor_split(2, dim=-1)
    return ResponseLogProbs(
        columns_BTC[..., 0],
        entropy_BT if entropy_BT is None or columns.entropy_gradient else entropy_BT.detach(),
        fixed[..., 2] if columns.sum_pi_squared else None,
        ids.long() if columns.top_k else None,
        tops if columns.top_k else None,
        extra_BTK if extra_BTK.shape[-1] else None,
    )


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Replace the forward of `module` inside the block. The hooks of the module still run."""
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]


def last_linear_head(
    model: Callable[..., Any], inputs: dict[str, Tensor], device: torch.device | None = None
) -> nn.Linear | None:
    """Return the output head of `model` if the logits are the unchanged output of this linear layer, or else None.

    None is returned for a model that caps or scales its logits, drops or adds logits, ignores `logits_to_keep`, or has
    no head or a head of another class. There is no list of model families: each head is tested once, in a forward pass
    without gradient in which the head returns known numbers. Under ZeRO-3, the test is collective.

    Args:
        model: causal language model, or a model engine with the `get_output_embeddings` of its module.
        inputs: arguments of a forward pass. The test uses the first two tokens of the first row.
        device: device of the model, by default the device of the arguments.
    """
    get_output_embeddings = getattr(model, "get_output_embeddings", None)
    head = get_output_embeddings() if get_output_embeddings is not None else None
    # A subclass, or a forward already replaced by other code, may compute something else.
    if type(head) is not nn.Linear or "forward" in head.__dict__:
        return None
    if head not in _RETURNS_HEAD_OUTPUT:
        ids = inputs["input_ids"]
        ids = to_device(ids[:1, :2], device or ids.device)
        places = torch.arange(ids.shape[1], device=ids.device)[None]
        first = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": places}
        _RETURNS_HEAD_OUTPUT[head] = _returns_head_output(model, head, first)
    return head if _RETURNS_HEAD_OUTPUT[head] else None


def _returns_head_output(model: Callable[..., Any], head: nn.Linear, inputs: dict[str, Tensor]) -> bool:
    shapes: list[torch.Size] = []
    ramps: list[Tensor] = []

    def ramp(hidden: Tensor) -> Tensor:
        # The range is wide enough for any soft-cap to change the numbers, and float32 shows every change.
        ramp_V = torch.linspace(
            -1e4, 1e4, head.out_features, dtype=accumulation_dtype(hidden.dtype), device=hidden.device
        )
        shapes.append(hidden.shape[:-1])
        ramps.append(ramp_V.expand(*hidden.shape[:-1], -1))
        return ramps[-1].clone()

    with torch.no_grad(), _unchanged_random_state(inputs["input_ids"].device), replaced_forward(head, ramp):
        logits: Tensor = model(**inputs, use_cache=False, logits_to_keep=1).logits
    if shapes != [torch.Size([1, 1])] or logits.shape != ramps[0].shape:
        return False
    return bool((logits == ramps[0]).all())


@contextmanager
def _unchanged_random_state(device: torch.device) -> Iterator[None]:
    """Restore the random state after the block. The model may use dropout inside the block."""
    # `fork_rng` always restores the CPU's state. For a CPU, `device_type` must still name a module of torch.
    device_type = "cuda" if device.type == "cpu" else device.type
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device], device_type=device_type):
        yield
