"""Cases of value losses, aggregations, KL terms, rewards and statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.verl.case import (
    MODES,
    SCALE,
    Case,
    Inputs,
    Numbers,
    batch_info,
    counts_of,
    gradient_of,
    valid_values,
)
from benchmarks.verl.functions import Verl
from rl_plugins.algorithms.aggregation import GlobalCounts, aggregate
from rl_plugins.algorithms.filtering import resampling_weights
from rl_plugins.algorithms.inputs import one_rank
from rl_plugins.algorithms.masked import whiten
from rl_plugins.algorithms.policy_losses.distillation import forward_kl_top_k
from rl_plugins.algorithms.regularization import KL_ESTIMATORS, Coefficient, KLConfig, kl_in_reward
from rl_plugins.algorithms.reward_shaping import OverlongPenalty, overlong_penalty
from rl_plugins.algorithms.value_loss import value_loss
from rl_plugins.models.token_distributions import ColumnSpec, distribution_columns


def other_functions(verl: Verl) -> Iterator[Case]:
    """Yield the cases."""
    for mode in MODES:
        yield from _value_losses(verl, mode)
        yield _aggregation(verl, mode)
    names = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
    for name, ours in {**names, "k1+": "k1+", "k3+": "k3+", "abs+": "abs+"}.items():
        yield _kl(verl, name, ours)
    for coefficient in (0.1, 1.0):
        yield _reward(verl, coefficient)
    yield Case("coefficient", "AdaptiveKLController", "", _our_controller, partial(_their_controller, verl))
    for name, kind in {"pow": "power", "max_min": "extremes", "max_random": "best"}.items():
        yield _resampling(verl, name, kind)
    for max_tokens, buffer_tokens in ((12, 3), (12, 12)):
        yield _overlong(verl, max_tokens, buffer_tokens)
    yield _whitening(verl)
    for column, name in enumerate(("logprobs_from_logits_naive", "entropy_from_logits", "sum_pi_squared")):
        yield _distribution(verl, column, name)
    for bound in (None, -2.0):
        yield _distillation(verl, bound)


def _value_losses(verl: Verl, mode: str) -> Iterator[Case]:
    for clip in (0.5, 0.1):

        def ours(inputs: Inputs, clip: float = clip) -> Numbers:
            values_BT = inputs["values_BT"].clone().requires_grad_()
            names = ("old_values_BT", "returns_BT", "response_mask_BT")
            loss_BT, _ = value_loss(values_BT=values_BT, **{name: inputs[name] for name in names}, clip=clip)
            width = float(loss_BT.shape[1])
            loss = aggregate(loss_BT, inputs["response_mask_BT"], mode, counts_of(inputs), scale_factor=width)
            return [loss.detach(), gradient_of(loss, values_BT)]

        def theirs(inputs: Inputs, clip: float = clip) -> Numbers:
            values_BT = inputs["values_BT"].clone().requires_grad_()
            loss, _ = verl.core.compute_value_loss(
                values_BT, inputs["returns_BT"], inputs["old_values_BT"], inputs["response_mask_BT"], clip, mode
            )
            return [loss.detach(), gradient_of(loss, values_BT)]

        yield Case("value loss", "compute_value_loss", f"{mode} clip={clip}", ours, theirs)


def _aggregation(verl: Verl, mode: str) -> Case:
    """Return a case of an aggregation on one of two ranks, with a third of the tokens and sequences."""

    def ours(inputs: Inputs) -> Numbers:
        counts = counts_of(inputs)
        counts = GlobalCounts(3 * counts.tokens, 3 * counts.sequences, ranks=2)
        return [aggregate(inputs["advantages_BT"], inputs["response_mask_BT"], mode, counts, scale_factor=SCALE)]

    def theirs(inputs: Inputs) -> Numbers:
        info = batch_info(inputs)
        info |= {name: 3 * info[name] for name in ("batch_num_tokens", "global_batch_size")} | {"dp_size": 2}
        return [verl.core.agg_loss(inputs["advantages_BT"], inputs["response_mask_BT"], mode, **info)]

    return Case("aggregation", "agg_loss", mode, ours, theirs)


def _kl(verl: Verl, name: str, ours_name: str) -> Case:
    def numbers(function: Callable[[Tensor, Tensor], Tensor], inputs: Inputs) -> Numbers:
        log_probs_BT = inputs["log_probs_BT"].clone().requires_grad_()
        kl_BT = function(log_probs_BT, inputs["ref_log_probs_BT"])
        return [kl_BT.detach(), gradient_of(kl_BT.sum(), log_probs_BT)]

    return Case(
        "KL", "kl_penalty", name, partial(numbers, KL_ESTIMATORS[ours_name]),
        partial(numbers, lambda own, reference: verl.core.kl_penalty(own, reference, name)),
    )  # fmt: skip


def _reward(verl: Verl, coefficient: float) -> Case:
    names = ("token_level_rewards_BT", "old_log_probs_BT", "ref_log_probs_BT")

    def ours(inputs: Inputs) -> Numbers:
        given = [inputs[name] for name in (*names, "response_mask_BT")]
        return [valid_values(kl_in_reward(*given, coefficient=coefficient), inputs)]

    def theirs(inputs: Inputs) -> Numbers:
        return [valid_values(verl.core.compute_rewards(*(inputs[name] for name in names), coefficient), inputs)]

    return Case("reward", "compute_rewards", f"kl_ratio={coefficient}", ours, theirs)


def _resampling(verl: Verl, name: str, kind: Any) -> Case:
    def ours(inputs: Inputs) -> Numbers:
        return [resampling_weights(rewards_B=inputs["token_level_rewards_BT"].sum(dim=-1), kind=kind)]

    def theirs(inputs: Inputs) -> Numbers:
        return [verl.resampling_weights(inputs["token_level_rewards_BT"], reweight_method=name)]

    return Case("resampling", "compute_pf_ppo_reweight_data", name, ours, theirs)


def _whitening(verl: Verl) -> Case:
    def ours(inputs: Inputs) -> Numbers:
        return [valid_values(whiten(inputs["advantages_BT"], inputs["response_mask_BT"], one_rank), inputs)]

    def theirs(inputs: Inputs) -> Numbers:
        whitened_BT = verl.torch_functional.masked_whiten(inputs["advantages_BT"], inputs["response_mask_BT"])
        return [valid_values(whitened_BT, inputs)]

    return Case("statistics", "masked_whiten", "", ours, theirs)


def _distribution(verl: Verl, column: int, name: str) -> Case:
    """Return a case of a column of `distribution_columns`; only the first two have a gradient."""

    def logits_of(inputs: Inputs) -> tuple[Tensor, Tensor]:
        logits_NV = inputs["logits_NV"].clone().requires_grad_()
        return logits_NV, torch.arange(len(logits_NV)) % logits_NV.shape[1]

    def ours(inputs: Inputs) -> Numbers:
        logits_NV, tokens_N = logits_of(inputs)
        columns = ColumnSpec(sum_pi_squared=True, entropy_gradient=True)
        found_N = distribution_columns(logits_NV, tokens_N, columns)[:, column]
        return [found_N.detach(), *([gradient_of(found_N.sum(), logits_NV)] if column < 2 else [])]

    def theirs(inputs: Inputs) -> Numbers:
        logits_NV, tokens_N = logits_of(inputs)
        functional = verl.torch_functional
        if column == 0:
            found_N = functional.logprobs_from_logits_naive(logits_NV, tokens_N)
        elif column == 1:
            found_N = functional.entropy_from_logits(logits_NV)
        else:
            found_N = functional.calculate_sum_pi_squared_from_logits(logits_NV)
        return [found_N.detach(), *([gradient_of(found_N.sum(), logits_NV)] if column < 2 else [])]

    return Case("distribution", name, "", ours, theirs)


def _our_controller(inputs: Inputs) -> Numbers:
    controller = Coefficient(KLConfig(0.2, target=0.1, horizon=1000))
    values: list[float] = []
    for measured in inputs["entropy_BT"].mean(dim=-1).tolist():
        controller.update(measured, 64)
        values.append(controller.coefficient)
    return [torch.tensor(values, dtype=torch.float64)]


def _their_controller(verl: Verl, inputs: Inputs) -> Numbers:
    controller = verl.core.AdaptiveKLController(0.2, 0.1, 1000)
    values: list[float] = []
    for measured in inputs["entropy_BT"].mean(dim=-1).tolist():
        controller.update(measured, 64)
        values.append(float(controller.value))
    return [torch.tensor(values, dtype=torch.float64)]


def _overlong(verl: Verl, max_tokens: int, buffer_tokens: int) -> Case:
    penalty = OverlongPenalty(max_tokens, buffer_tokens)

    def ours(inputs: Inputs) -> Numbers:
        return [
            overlong_penalty(
                response_lengths_B=inputs["response_lengths_B"],
                max_tokens=penalty.max_tokens,
                buffer_tokens=penalty.slope_tokens,
            ).double()
        ]

    def theirs(inputs: Inputs) -> Numbers:
        reward = partial(verl.overlong_reward, max_tokens=max_tokens, buffer_tokens=buffer_tokens, factor=1.0)
        return [torch.tensor([reward(length) for length in inputs["response_lengths_B"].tolist()], dtype=torch.float64)]

    return Case("reward", "dapo overlong_buffer", f"max={max_tokens} buffer={buffer_tokens}", ours, theirs)


def _distillation(verl: Verl, log_prob_min_clamp: float | None, top: int = 3) -> Case:
    """Return a case of the forward KL over the teacher's most likely tokens: values and gradient of the logits."""

    # In row 0 both policies are equal, so rounding decides whether the bound at 0 takes the gradient away.
    def top_log_probs(inputs: Inputs) -> tuple[Tensor, Tensor]:
        values, ids = inputs["ref_logits_NV"][1:].log_softmax(-1).topk(top)
        return values[None], ids[None]

    def ours(inputs: Inputs) -> Numbers:
        logits_NV = inputs["logits_NV"][1:].clone().requires_grad_()
        teacher_BTK, ids_BTK = top_log_probs(inputs)
        unused_BT = torch.zeros(ids_BTK.shape[:2], dtype=torch.float64)
        loss_BT, _ = forward_kl_top_k(
            log_probs_BT=unused_BT, old_log_probs_BT=unused_BT, advantages_BT=unused_BT,
            response_mask_BT=torch.ones_like(unused_BT), teacher_top_log_probs_BTK=teacher_BTK,
            top_log_probs_BTK=logits_NV.log_softmax(-1)[None].gather(-1, ids_BTK),
            log_prob_min_clamp=log_prob_min_clamp,
        )  # fmt: skip
        return [loss_BT.detach(), gradient_of(loss_BT.sum(), logits_NV)]

    def theirs(inputs: Inputs) -> Numbers:
        logits_NV = inputs["logits_NV"][1:].clone().requires_grad_()
        teacher, ids = (torch.nested.as_nested_tensor(list(t), layout=torch.jagged) for t in top_log_probs(inputs))
        options = verl.algorithm_config(log_prob_min_clamp=log_prob_min_clamp)
        found = verl.distillation.compute_forward_kl_topk(
            logits_NV[None], teacher, ids, verl.algorithm_config(distillation_loss=options), "thd"
        )
        # `verl.trainer.distillation.losses` bounds the sum.
        loss_BT = found["distillation_losses"].clamp_min(0.0)
        return [loss_BT.detach(), gradient_of(loss_BT.sum(), logits_NV)]

    words = "" if log_prob_min_clamp is None else f"{log_prob_min_clamp=}"
    return Case("distillation", "compute_forward_kl_topk", words, ours, theirs)
