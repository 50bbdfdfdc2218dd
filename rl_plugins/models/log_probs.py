"""Log-probs and entropy of response tokens, without the logits of a batch.

A causal language model is run up to its output head; there, the hidden states that predict a response token go through
the head by chunks (`chunked_head`). Models that do something to their logits after the head, or have none, give the
logits of the response, which are turned to float32 by blocks.

Axes: `B` samples, `S` prompt and response (prompts padded on the left, responses on the right), `T` response tokens,
`N` real response tokens of all samples, `H` hidden, `V` vocabulary, `J` and `K`: see `token_distributions`; in results
and arguments of `response_log_probs`, `K` is tokens at the place of one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from rl_plugins.models.chunked_head import chunked_head_columns
from rl_plugins.models.output_head import last_linear_head, replaced_forward
from rl_plugins.models.packing import pack
from rl_plugins.models.remote import RemoteModel
from rl_plugins.models.token_distributions import Columns, distribution_columns

CHUNK_ELEMENTS = 2**24
"""Logits at a time: 32 MB in bfloat16."""


@dataclass(frozen=True)
class ResponseLogProbs:
    """Of the response tokens and the distributions they were drawn from, [B, T].

    Attributes:
        log_probs_BT: log-probs of the tokens.
        entropy_BT: entropy in nats; without gradient unless asked for.
        sum_pi_squared_BT: sum over the vocabulary of the squared probabilities, without gradient; None unless asked
            for.
        top_ids_BTK: the most likely tokens, the likeliest first, int64; None unless asked for.
        top_log_probs_BTK: their log-probs, without gradient.
        log_probs_BTK: log-probs of the tokens that were given, with gradient; None where none were.
    """

    log_probs_BT: Tensor
    entropy_BT: Tensor
    sum_pi_squared_BT: Tensor | None = None
    top_ids_BTK: Tensor | None = None
    top_log_probs_BTK: Tensor | None = None
    log_probs_BTK: Tensor | None = None


def token_log_probs(
    logits_BTV: Tensor,
    tokens_BT: Tensor,
    temperature: float = 1.0,
    *,
    sum_pi_squared: bool = False,
    entropy_gradient: bool = False,
) -> ResponseLogProbs:
    """Log-probs of `tokens_BT` under `softmax(logits / temperature)`, and that distribution's entropy.

    The float32 copy of the logits (float64 of float64) is made, and recomputed in backward, a block at a time. Give
    contiguous logits: others are copied whole, in their own dtype.
    """
    columns = Columns(temperature, sum_pi_squared, entropy_gradient)
    columns_NK = distribution_columns(logits_BTV.reshape(-1, logits_BTV.shape[-1]), tokens_BT.reshape(-1), columns)
    return _by_name(columns_NK.view(*tokens_BT.shape, -1), columns)


def response_log_probs(
    model: Callable[..., Any],
    *,
    input_ids_BS: Tensor,
    attention_mask_BS: Tensor,
    position_ids_BS: Tensor,
    response_width: int,
    temperature: float = 1.0,
    sum_pi_squared: bool = False,
    entropy_gradient: bool = False,
    top_k: int = 0,
    tokens_BTK: Tensor | None = None,
    packed: bool = False,
) -> ResponseLogProbs:
    """One forward pass; log-probs of the last `response_width` tokens of every row, [B, T].

    Padded positions give finite numbers without meaning: mask them.

    Args:
        model: with the `forward` of a causal language model of transformers, `logits_to_keep` included; an engine
            around one will do, and so will a `RemoteModel`, whose log-probs have no gradient.
        input_ids_BS: prompts and responses.
        attention_mask_BS: 1 at real tokens.
        position_ids_BS: from 0 at the first real token of a row.
        response_width: T.
        temperature: the logits are divided by it.
        sum_pi_squared: give `sum_pi_squared_BT`, too.
        entropy_gradient: `entropy_BT` has a gradient.
        top_k: give so many of the most likely tokens, too, at most the vocabulary: `top_ids_BTK`, `top_log_probs_BTK`.
        tokens_BTK: give the log-probs of these tokens, too: `log_probs_BTK`.
        packed: the real tokens of all samples go through the model as one row without padding, the prompts that
            several of them have only once. With attention that is not `packed_sdpa`, prompts are not shared, and the
            mask of that row may be as large as the square of its length.

    Raises:
        ConfigError: `packed`, and the model lets the samples of a row see each other.
    """
    if isinstance(model, RemoteModel):
        return model.response_log_probs(
            input_ids_BS=input_ids_BS,
            attention_mask_BS=attention_mask_BS,
            position_ids_BS=position_ids_BS,
            response_width=response_width,
            temperature=temperature,
            sum_pi_squared=sum_pi_squared,
            top_k=top_k,
            packed=packed,
        )
    columns = Columns(temperature, sum_pi_squared, entropy_gradient, top_k)
    prompt_width = input_ids_BS.shape[1] - response_width
    where = attention_mask_BS[:, prompt_width:].nonzero(as_tuple=True)
    tokens_N = input_ids_BS[:, prompt_width:][where]
    further_NJ = None if tokens_BTK is None else tokens_BTK[where]
    inputs: dict[str, Any] = {
        "input_ids": input_ids_BS,
        "attention_mask": attention_mask_BS,
        "position_ids": position_ids_BS,
    }
    head = last_linear_head(model, inputs)
    if packed:
        row = pack(
            model,
            input_ids_BS=input_ids_BS,
            attention_mask_BS=attention_mask_BS,
            position_ids_BS=position_ids_BS,
            response_width=response_width,
        )
        inputs = {**row.inputs, "logits_to_keep": row.predicting(attention_mask_BS, response_width)}
    else:
        # The last position predicts nothing, but `logits_to_keep` cannot leave it out.
        inputs["logits_to_keep"] = response_width + 1
    run = partial(model, **inputs, use_cache=False)

    if head is not None:
        forward = head.forward

        def columns_of_hidden(hidden: Tensor) -> Tensor:
            hidden_NH = hidden[0] if packed else hidden[:, :-1][where]
            return _columns_of_hidden(head, forward, hidden_NH, tokens_N, columns, further_NJ)[None]

        # The result goes out as the head's output, so that hooks on it see to the weight in backward.
        with replaced_forward(head, columns_of_hidden):
            columns_NK = run().logits[0]
    elif packed:
        columns_NK = distribution_columns(run().logits[0], tokens_N, columns, further_NJ)
    else:
        # Choosing among the positions would copy the logits: the last one and padding get any token.
        next_tokens_BT = input_ids_BS.roll(-1, dims=1)[:, -(response_width + 1) :]
        logits_BTV = run().logits
        logits_NV = logits_BTV.reshape(-1, logits_BTV.shape[-1])
        if tokens_BTK is not None:
            further_NJ = nn.functional.pad(tokens_BTK, (0, 0, 0, 1)).flatten(0, 1)
        all_NK = distribution_columns(logits_NV, next_tokens_BT.reshape(-1), columns, further_NJ)
        return _by_name(all_NK.view(*next_tokens_BT.shape, -1)[:, :-1], columns)
    columns_BTK = columns_NK.new_zeros(len(input_ids_BS), response_width, columns_NK.shape[-1])
    columns_BTK[where] = columns_NK
    return _by_name(columns_BTK, columns)


def _columns_of_hidden(
    head: nn.Linear,
    forward: Callable[[Tensor], Tensor],
    hidden_NH: Tensor,
    tokens_N: Tensor,
    columns: Columns,
    further_NJ: Tensor | None,
) -> Tensor:
    if hidden_NH.shape[0] * head.out_features <= CHUNK_ELEMENTS:
        return distribution_columns(forward(hidden_NH), tokens_N, columns, further_NJ)
    rows = max(1, CHUNK_ELEMENTS // head.out_features)
    return chunked_head_columns(hidden_NH, head.weight, head.bias, tokens_N, columns, further_NJ, rows=rows)


def _by_name(columns_BTK: Tensor, columns: Columns) -> ResponseLogProbs:
    entropy_BT = columns_BTK[..., 1]
    own, further_BTK = columns_BTK[..., : columns.own].detach(), columns_BTK[..., columns.own :]
    tops, ids = own[..., own.shape[-1] - 2 * columns.top_k :].tensor_split(2, dim=-1)
    return ResponseLogProbs(
        columns_BTK[..., 0],
        entropy_BT if columns.entropy_gradient else entropy_BT.detach(),
        own[..., 2] if columns.sum_pi_squared else None,
        ids.long() if columns.top_k else None,
        tops if columns.top_k else None,
        further_BTK if further_BTK.shape[-1] else None,
    )
