"""A function that verl and rl_plugins both have, and its inputs. Axes: see CONTRIBUTING.md."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rl_plugins.algorithms.aggregation import GlobalCounts, local_counts
from rl_plugins.algorithms.rollout_correction import Rejection

Inputs = Mapping[str, Tensor]
Numbers = Sequence[Tensor]

PLAIN, OBSERVATIONS, EDGES = "plain", "observations", "edges"
MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
SCALE = 7.0
RATIOS_ARE_BOUNDED = "ratios are bounded by e^20 here (`bounded_log_ratio`), and not in verl"


@dataclass(frozen=True)
class Case:
    """A function with options.

    Attributes:
        kind: kind of the function.
        name: verl's name.
        options: the options in words.
        ours: returns the numbers of rl_plugins.
        theirs: returns the numbers of verl.
        documented: reason for different numbers, by the kind of the inputs.
    """

    kind: str
    name: str
    options: str
    ours: Callable[[Inputs], Numbers]
    theirs: Callable[[Inputs], Numbers]
    documented: Mapping[str, str] = field(default_factory=dict)


def valid_values(values_BT: Tensor, inputs: Inputs) -> Tensor:
    """Return the values of the valid tokens [N]."""
    return values_BT[inputs["response_mask_BT"].bool()]


def gradient_of(loss: Tensor, values: Tensor) -> Tensor:
    """Return the gradient of the loss with respect to the values."""
    (gradient,) = torch.autograd.grad(loss, values)
    return gradient


def counts_of(inputs: Inputs) -> GlobalCounts:
    """Return the sizes of the mini-batch."""
    tokens, sequences = local_counts(inputs["response_mask_BT"]).tolist()
    return GlobalCounts(tokens, sequences)


def batch_info(inputs: Inputs) -> dict[str, Any]:
    """Return the sizes of the mini-batch, as verl's trainer gives them."""
    counts = counts_of(inputs)
    return {
        "dp_size": 1,
        "batch_num_tokens": counts.tokens,
        "global_batch_size": counts.sequences,
        "loss_scale_factor": SCALE,
    }


def policies_of(inputs: Inputs) -> dict[str, Any]:
    """Return the arguments of our functions of rollout corrections."""
    return {
        "log_probs_BT": inputs["old_log_probs_BT"],
        "rollout_log_probs_BT": inputs["rollout_log_probs_BT"],
        "response_mask_BT": inputs["response_mask_BT"],
    }


def their_rules(rules: Sequence[Rejection]) -> dict[str, Any]:
    """Return verl's options of rejection."""
    if not rules:
        return {}
    return {
        "rollout_rs": ",".join(rule.mode for rule in rules),
        "rollout_rs_threshold": ",".join(map(_their_threshold, rules)),
    }


def _their_threshold(rule: Rejection) -> str:
    low, high = rule.bounds()
    return f"{math.exp(low)!r}_{math.exp(high)!r}" if rule.estimator == "k1" else repr(high)


def in_words(options: Mapping[str, Any]) -> str:
    """Return options as they are written on a command line."""
    return " ".join(f"{name}={value}" for name, value in options.items())
