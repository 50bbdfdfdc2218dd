"""Cases of policy losses: values and gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor

from benchmarks.verl.case import (
    EDGES,
    MODES,
    RATIOS_ARE_BOUNDED,
    SCALE,
    Case,
    Inputs,
    Numbers,
    batch_info,
    counts_of,
    gradient_of,
    in_words,
    their_rules,
)
from benchmarks.verl.functions import Verl
from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.algorithms.policy_losses import SELECTIONS
from rl_plugins.algorithms.rollout_correction import Level, Rejection, RolloutCorrection

_CAP = 2.0
"""Largest weight."""


def policy_losses(verl: Verl) -> Iterator[Case]:
    """Yield the cases with an old policy."""
    wide = {"clip_low": 0.1, "clip_high": 0.28}
    their_wide = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.28}
    unbounded = {EDGES: RATIOS_ARE_BOUNDED}
    for mode in MODES:
        for weights in (False, True):
            loss = partial(_policy_loss, verl, mode=mode, weights=weights)
            yield loss("vanilla", "ppo_clip", {}, {})
            yield loss("vanilla", "ppo_clip", {**wide, "dual_clip": 1.5}, {**their_wide, "clip_ratio_c": 1.5})
            yield loss("gpg", "gpg", {}, {})
            yield loss("cispo", "cispo", wide, their_wide)
            for name in ("clip_cov", "kl_cov"):
                yield loss(name, name, {}, {}, documented=unbounded)
            for name in ("dppo_tv", "dppo_kl"):
                yield loss(name, name, {}, {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 20.0})
                yield loss(name, name, {"low": 0.01, "high": 0.03, "cap": 1.5}, {
                    "clip_ratio_low": 0.01, "clip_ratio_high": 0.03, "clip_ratio_c": 1.5
                })  # fmt: skip
            yield loss("dro", "dro", {"beta": 0.3}, {})
            yield loss("reinforce", "reinforce", {}, {})
    empty = {
        EDGES: "verl's mean counts responses without a token and does not bound the ratio; "
        "here the mean is over the other responses (`gmpo`)"
    }
    for weights in (False, True):
        loss = partial(_policy_loss, verl, mode="seq-mean-token-mean", weights=weights)
        yield loss("gspo", "gspo", {}, {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4})
        yield loss("gspo", "gspo", wide, their_wide)
        yield loss("sapo", "sapo", {}, {})
        yield loss("sapo", "sapo", {"tau_positive": 1.5, "tau_negative": 2.0}, {"tau_pos": 1.5, "tau_neg": 2.0})
        yield loss("geo_mean", "gmpo", {}, {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4}, documented=empty)
        yield loss("geo_mean", "gmpo", wide, their_wide, documented=empty)


def _policy_loss(
    verl: Verl,
    name: str,
    our_name: str,
    options: Mapping[str, Any],
    their_options: Mapping[str, Any],
    *,
    mode: str,
    weights: bool,
    documented: Mapping[str, str] | None = None,
) -> Case:
    """Return a case of a policy loss: its value and its gradient. Tokens are selected before the first update."""
    selects = our_name in SELECTIONS
    algorithm = Algorithm(policy_loss=our_name, policy_loss_options=options, aggregation=mode, scale_factor=SCALE)

    def log_probs_of(inputs: Inputs) -> Tensor:
        return (inputs["old_log_probs_BT"] if selects else inputs["log_probs_BT"]).clone().requires_grad_()

    def ours(inputs: Inputs) -> Numbers:
        log_probs_BT = log_probs_of(inputs)
        names = ("old_log_probs_BT", "advantages_BT", "response_mask_BT", *(["rollout_weights_BT"] if weights else ()))
        given: dict[str, Any] = {**{key: inputs[key] for key in names}, "log_probs_BT": log_probs_BT}
        if selects:
            given["selected_BT"] = SELECTIONS[our_name](
                log_probs_BT=log_probs_BT.detach(),
                advantages_BT=inputs["advantages_BT"],
                response_mask_BT=inputs["response_mask_BT"],
                ids_B=torch.arange(len(log_probs_BT)),
                seed=0,
                share=1.0 if our_name == "clip_cov" else 0.2,
            )
        loss, _ = algorithm.loss(given, kl_coefficient=0.0, counts=counts_of(inputs))
        return [loss.detach(), gradient_of(loss, log_probs_BT)]

    def theirs(inputs: Inputs) -> Numbers:
        log_probs_BT = log_probs_of(inputs)
        policy_loss = verl.algorithm_config(
            clip_cov_ratio=1.0,
            clip_cov_lb=1.0,
            clip_cov_ub=5.0,
            kl_cov_ratio=0.2,
            ppo_kl_coef=0.1,
            dro_beta=0.3,
        )
        config = verl.actor_config(global_batch_info=batch_info(inputs), policy_loss=policy_loss, **their_options)
        old = "rollout_log_prob" if name == "reinforce" else "old_log_prob"
        function = verl.core.POLICY_LOSS_REGISTRY.get(name, verl.core.compute_policy_loss_reinforce)
        loss, _ = function(
            **{old: inputs["old_log_probs_BT"]},
            log_prob=log_probs_BT,
            advantages=inputs["advantages_BT"],
            response_mask=inputs["response_mask_BT"],
            loss_agg_mode=mode,
            config=config,
            rollout_is_weights=inputs["rollout_weights_BT"] if weights else None,
        )
        return [loss.detach(), gradient_of(loss, log_probs_BT)]

    words = [mode, in_words(options), "weights" if weights else ""]
    return Case("policy loss", name, " ".join(filter(None, words)), ours, theirs, documented or {})


def bypass_losses(verl: Verl) -> Iterator[Case]:
    """Yield the cases in which the sampling policy takes the place of the old policy."""
    for mode in MODES:
        for rule in (None, Rejection("token_k2", 0.05), Rejection("seq_mean_k1", (0.8, 1.25))):
            correction = RolloutCorrection(rules=() if rule is None else (rule,), bypass=True)
            yield _bypass_case(verl, "ppo_clip", mode, correction)
            yield _bypass_case(verl, "reinforce", mode, correction)
            for level in get_args(Level):
                yield _bypass_case(verl, "reinforce", mode, replace(correction, level=level, cap=_CAP))


def _bypass_case(verl: Verl, loss: str, mode: str, correction: RolloutCorrection) -> Case:
    algorithm = Algorithm(policy_loss=loss, aggregation=mode, scale_factor=SCALE, correction=correction)

    def ours(inputs: Inputs) -> Numbers:
        log_probs_BT = inputs["log_probs_BT"].clone().requires_grad_()
        given = {key: inputs[key] for key in ("advantages_BT", "response_mask_BT")}
        given |= {"log_probs_BT": log_probs_BT}
        given |= dict.fromkeys(("old_log_probs_BT", "rollout_log_probs_BT"), inputs["rollout_log_probs_BT"])
        value, _ = algorithm.loss(algorithm.corrected(given), kl_coefficient=0.0, counts=counts_of(inputs))
        return [value.detach(), gradient_of(value, log_probs_BT)]

    def theirs(inputs: Inputs) -> Numbers:
        log_probs_BT = inputs["log_probs_BT"].clone().requires_grad_()
        options = verl.algorithm_config(
            loss_type=loss, rollout_is=correction.level, rollout_is_threshold=_CAP, **their_rules(correction.rules)
        )
        value, _ = verl.core.POLICY_LOSS_REGISTRY["bypass_mode"](
            old_log_prob=inputs["rollout_log_probs_BT"],
            log_prob=log_probs_BT,
            advantages=inputs["advantages_BT"],
            response_mask=inputs["response_mask_BT"],
            loss_agg_mode=mode,
            config=verl.actor_config(
                global_batch_info=batch_info(inputs), policy_loss=verl.algorithm_config(rollout_correction=options)
            ),
        )
        return [value.detach(), gradient_of(value, log_probs_BT)]

    words = [mode, loss, correction.level or "", *(f"{rule.mode} {rule.threshold}" for rule in correction.rules)]
    return Case("policy loss", "bypass_mode", " ".join(filter(None, words)), ours, theirs)
