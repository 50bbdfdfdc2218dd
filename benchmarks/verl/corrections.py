"""Cases of the correction of the gap between rollout and training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args

import torch

from benchmarks.verl.case import EDGES, Case, Inputs, Numbers, policies_of, their_rules
from benchmarks.verl.functions import Verl
from rl_plugins.algorithms.rollout_correction import (
    ROLLOUT_CORRECTIONS,
    Rejection,
    RejectionMode,
    RolloutCorrection,
    diagnostics,
    importance_weights,
    rejection_mask,
)

PRESETS = {
    "disabled": "none",
    "decoupled_token_is": "token_tis",
    "decoupled_seq_is": "sequence_tis",
    "decoupled_token_icepop": "icepop",
    "decoupled_seq_is_rs": "mis",
    "decoupled_geo_rs": "geo_rs",
    "decoupled_geo_rs_token_tis": "geo_rs_token_tis",
    "decoupled_geo_rs_seq_tis": "geo_rs_sequence_tis",
    "decoupled_k3_rs": "k3_rs",
    "decoupled_k3_rs_token_tis": "k3_rs_token_tis",
    "decoupled_k3_rs_seq_tis": "k3_rs_sequence_tis",
    "bypass_ppo_clip": "bypass",
    "bypass_ppo_clip_geo_rs": "bypass_geo_rs",
    "bypass_ppo_clip_k3_rs": "bypass_k3_rs",
    "bypass_pg_is": "bypass_sequence_tis",
    "bypass_pg_token_icepop": "bypass_icepop",
    "bypass_pg_geo_rs": "bypass_geo_rs",
    "bypass_pg_geo_rs_token_tis": "bypass_geo_rs_token_tis",
    "bypass_pg_geo_rs_seq_tis": "bypass_geo_rs_sequence_tis",
}
"""verl's presets, and ours."""


def corrections(verl: Verl) -> Iterator[Case]:
    """Yield the cases."""
    for name, ours_name in PRESETS.items():
        yield _preset(verl, name, ROLLOUT_CORRECTIONS[ours_name])
    for mode in get_args(RejectionMode):
        threshold: Any = (0.9, 1.2) if mode.endswith("k1") else 0.05
        yield _rejection(verl, (Rejection(mode, threshold),))
    yield _rejection(verl, (Rejection("token_k1", 1.3), Rejection("seq_mean_k3", 0.02)))
    for level in ("token", "sequence"):
        for cap in (2.0, 0.9):
            for normalize in (False, True):
                yield _weights(verl, level, cap, normalize)
    every = "responses without a token count in verl's means and extremes, and not here (`diagnostics`)"
    bounded = "d is bounded to [-20, 20] in exponents here (`diagnostics`)"
    for ours, (theirs, reason) in {
        "training_ppl": ("training_ppl", every),
        "rollout_ppl": ("rollout_ppl", every),
        "kl": ("kl", ""),
        "k3": ("k3_kl", bounded),
        "log_ppl_difference": ("log_ppl_diff", every),
        "log_ppl_abs_difference": ("log_ppl_abs_diff", every),
        "log_ppl_difference_max": ("log_ppl_diff_max", every),
        "log_ppl_difference_min": ("log_ppl_diff_min", every),
        "ppl_ratio": ("ppl_ratio", every),
        "chi2_token": ("chi2_token", ""),
        "chi2_sequence": ("chi2_seq", every),
    }.items():
        yield _diagnostic(verl, ours, theirs, {EDGES: reason} if reason else {})


def _preset(verl: Verl, name: str, correction: RolloutCorrection) -> Case:
    """Return a case of a preset: its mask, its weights, and bypass as a number."""

    def ours(inputs: Inputs) -> Numbers:
        mask_BT, weights_BT = correction.correct(**policies_of(inputs))
        return [mask_BT, mask_BT if weights_BT is None else weights_BT, torch.tensor(float(correction.bypass))]

    def theirs(inputs: Inputs) -> Numbers:
        config = getattr(verl.presets, name)()
        found, mask_BT, _ = verl.correction.compute_rollout_correction_and_rejection_mask(
            inputs["old_log_probs_BT"],
            inputs["rollout_log_probs_BT"],
            inputs["response_mask_BT"],
            rollout_is=config.rollout_is,
            rollout_is_threshold=config.rollout_is_threshold,
            rollout_rs=config.rollout_rs,
            rollout_rs_threshold=config.rollout_rs_threshold,
            rollout_is_batch_normalize=config.rollout_is_batch_normalize,
        )
        weights_BT = mask_BT if found is None else mask_BT * found.batch["rollout_is_weights"]
        return [mask_BT, weights_BT, torch.tensor(float(config.bypass_mode))]

    return Case("preset", name, "", ours, theirs)


def _rejection(verl: Verl, rules: tuple[Rejection, ...]) -> Case:
    def ours(inputs: Inputs) -> Numbers:
        return [rejection_mask(**policies_of(inputs), rules=rules)]

    def theirs(inputs: Inputs) -> Numbers:
        mask_BT, _ = verl.correction.compute_rollout_rejection_mask(
            inputs["old_log_probs_BT"] - inputs["rollout_log_probs_BT"],
            inputs["response_mask_BT"],
            **their_rules(rules),
        )
        return [mask_BT]

    words = ", ".join(f"{rule.mode} {rule.threshold}" for rule in rules)
    return Case("rollout correction", "rejection", words, ours, theirs)


def _weights(verl: Verl, level: Any, cap: float, normalize: bool) -> Case:
    def ours(inputs: Inputs) -> Numbers:
        return [importance_weights(**policies_of(inputs), level=level, cap=cap, normalize=normalize)]

    def theirs(inputs: Inputs) -> Numbers:
        weights_BT, _ = verl.correction.compute_rollout_correction_weights(
            inputs["old_log_probs_BT"] - inputs["rollout_log_probs_BT"],
            inputs["response_mask_BT"],
            rollout_is=level,
            rollout_is_threshold=cap,
            rollout_is_batch_normalize=normalize,
        )
        return [weights_BT]

    return Case("rollout correction", "importance weights", f"{level} cap={cap} normalize={normalize}", ours, theirs)


def _diagnostic(verl: Verl, ours_name: str, theirs_name: str, documented: Mapping[str, str]) -> Case:
    def ours(inputs: Inputs) -> Numbers:
        return [torch.tensor(diagnostics(**policies_of(inputs))[ours_name])]

    def theirs(inputs: Inputs) -> Numbers:
        found = verl.correction.compute_offpolicy_metrics(
            inputs["old_log_probs_BT"], inputs["rollout_log_probs_BT"], inputs["response_mask_BT"]
        )
        return [torch.tensor(found[theirs_name])]

    return Case("rollout correction", theirs_name, "", ours, theirs, documented)
