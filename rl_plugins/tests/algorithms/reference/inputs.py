"""Seeded random inputs for every branch of the formulas, by the argument names of the functions."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Inputs = dict[str, NDArray[Any]]

# Inputs with any value where `response_mask_BT` is 0. Rewards are not among them, because R_i sums over all positions.
MASKED = (
    "log_probs_BT",
    "old_log_probs_BT",
    "ref_log_probs_BT",
    "teacher_log_probs_BT",
    "rollout_log_probs_BT",
    "rollout_weights_BT",
    "sum_pi_squared_BT",
    "entropy_BT",
    "advantages_BT",
    "values_BT",
    "old_values_BT",
    "returns_BT",
)

# Inputs with any value for an invalid sample.
PER_SAMPLE = ("token_level_rewards_BT", "scores_B", "component_rewards_BK", "baseline_rewards_B")


def make_inputs(
    seed: int,
    *,
    width: int = 12,
    components: int = 3,
    vocabulary: int = 17,
    extremes: bool = True,
    groups_of_one: bool = True,
) -> Inputs:
    """A batch of 24 samples, in a random order.

    Groups: two of four ordinary samples, one of four with two equal best rewards, one of three equal rewards, one of
    three zeros, one alone, one with a single valid sample of two, one without a valid sample.

    Args:
        seed: the same seed gives the same batch.
        width: T, at least 10.
        components: K of `component_rewards_BK`.
        vocabulary: V of `logits_NV`.
        extremes: True for some log-ratios beyond +-20 (and differences from the reference beyond k3's bounds).
        groups_of_one: include groups with a single valid sample (pass@k refuses such groups).

    Returns:
        float64 except the following. `response_mask_BT` (0 or 1) keeps the tokens of invalid samples, `loss_mask_BT`
        does not; `valid_B`, `is_positive_B`, `selected_BT` are bool; `groups_B`, `response_lengths_B` int64.
    """
    if width < 10:
        raise ValueError(f"width={width}: take at least 10.")
    rng = np.random.default_rng(seed)
    #          ordinary     ordinary      shared top    equal      zeros     alone  one valid  none valid
    sizes = {41: 4, 2: 4, 17: 4, 8: 3, 0: 3, 99: 1, 5: 2, 3: 3}
    groups_B = np.concatenate([np.full(size, group, dtype=np.int64) for group, size in sizes.items()])
    samples = len(groups_B)
    valid_B = np.ones(samples, dtype=bool)
    valid_B[[6, 21, 22, 23]] = False
    if groups_of_one:
        valid_B[19] = False
    else:
        groups_B[18] = 5
    scores_B = rng.normal(size=samples)
    scores_B[4:8] = [1.0, 0.0, 1.0, 0.0]
    scores_B[8:12] = [0.5, 2.0, 2.0, -1.0]
    scores_B[12:15] = 0.1
    scores_B[15:18] = 0.0

    # Rows 0 to 3 are the first group: the rows below put every kind of response into this group.
    lengths_B = rng.integers(2, width, size=samples)
    lengths_B[0:6] = [width, width - 2, 0, 7, 9, 9]
    lengths_B[8:10] = [1, 0]
    mask_BT = (np.arange(width) < lengths_B[:, None]).astype(np.float64)
    mask_BT[0, 3:6] = 0.0
    mask_BT[1, 0] = 0.0
    mask_BT[1, 4] = 0.0
    mask_BT[3, 5:] = 0.0
    mask_BT[4, 2:8] = 0.0
    loss_mask_BT = mask_BT * valid_B[:, None]

    # Rewards are on the last token, also on an observation (row 3). A small reward is on every sampled token of the
    # first group only, because the other groups need equal rewards.
    rewards_BT = np.zeros((samples, width))
    rewards_BT[np.arange(samples), np.maximum(lengths_B - 1, 0)] = scores_B
    rewards_BT[0:4] += 0.05 * rng.normal(size=(4, width)) * mask_BT[0:4]
    component_rewards_BK = rng.normal(size=(samples, components))
    component_rewards_BK[:, 0] = rng.integers(0, 2, size=samples)
    component_rewards_BK[12:18] = 0.25

    def normal(scale: float = 1.0) -> NDArray[np.float64]:
        return scale * rng.normal(size=(samples, width))

    old_BT = -np.abs(normal(1.5)) - 1e-3
    log_probs_BT = np.minimum(old_BT + normal(0.4), -1e-3)
    ref_BT = np.minimum(old_BT + normal(1.0), -1e-3)
    rollout_BT = np.minimum(old_BT + normal(0.1), -1e-3)
    advantages_BT = normal()
    advantages_BT[10], advantages_BT[11], advantages_BT[12] = 0.8, -0.8, 0.0
    # One sequence almost without change, and two with the same change, up and down, for the ratios of sequences.
    log_probs_BT[13] = old_BT[13] + 1e-4 * rng.normal(size=width)
    rollout_BT[13] = old_BT[13] + 1e-4 * rng.normal(size=width)
    log_probs_BT[11], rollout_BT[11] = old_BT[11] - 1.4, old_BT[11] - 0.7
    old_BT[10] -= 1.0
    rollout_BT[10] = old_BT[10] - 0.7
    # Large changes of probabilities, with either sign of the advantage, for the trust regions of probabilities; and
    # ratios of 30, beyond the cap and the dual clip.
    jumps_T = np.array([-0.05, -0.05, -4.0, -4.0, -0.05, -3.45])
    origins_T = np.array([-4.0, -4.0, -0.05, -0.05, -3.45, -0.05])
    log_probs_BT[0, [0, 1, 2, 6, 7, 8]], old_BT[0, [0, 1, 2, 6, 7, 8]] = jumps_T, origins_T
    advantages_BT[0, [0, 1, 2, 6, 7, 8]] = [1.0, -1.0, 1.0, -1.0, -2.0, -2.0]
    if extremes:
        log_probs_BT[1, [1, 2, 3, 5]] = [-0.5, -0.5, -26.0, -26.0]
        old_BT[1, [1, 2, 3, 5]] = [-26.0, -26.0, -0.5, -0.5]
        ref_BT[1, [1, 2, 3, 5]] = [-25.0, -7.0, -0.25, -0.5]
        rollout_BT[1, [1, 2, 3, 5]] = [-26.0, -50.0, -0.5, -25.0]
        advantages_BT[1, [1, 2, 3, 5]] = [1.0, -1.0, 1.0, -1.0]
        # A whole sequence beyond the bound of a sequence's ratio.
        old_BT[3, :5] = log_probs_BT[3, :5] - 12.0
    probabilities_BT = np.exp(old_BT)
    sum_pi_squared_BT = probabilities_BT**2 + rng.uniform(0.05, 1.0, (samples, width)) * (1 - probabilities_BT) ** 2

    values_BT, old_values_BT = normal(), normal()
    near_BT = rng.random((samples, width)) < 0.5
    old_values_BT[near_BT] = values_BT[near_BT] + 0.3 * rng.uniform(-1, 1, int(near_BT.sum()))
    entropy_BT = np.abs(normal())
    entropy_BT[15:18] = 0.4
    # Turns of one to four tokens, and three states.
    turns_BT = np.cumsum(rng.random((samples, width)) < 0.4, axis=1, dtype=np.int64)
    states_BT = np.take_along_axis(rng.integers(0, 3, (samples, width + 1)), turns_BT, axis=1)
    inputs: Inputs = {
        "token_level_rewards_BT": rewards_BT,
        "response_mask_BT": mask_BT,
        "loss_mask_BT": loss_mask_BT,
        "groups_B": groups_B,
        "valid_B": valid_B,
        "scores_B": scores_B,
        "component_rewards_BK": component_rewards_BK,
        "baseline_rewards_B": rng.normal(size=samples),
        "response_lengths_B": lengths_B.astype(np.int64),
        "is_positive_B": scores_B > 0,
        "log_probs_BT": log_probs_BT,
        "old_log_probs_BT": old_BT,
        "ref_log_probs_BT": ref_BT,
        "teacher_log_probs_BT": ref_BT[::-1].copy(),
        "rollout_log_probs_BT": rollout_BT,
        "rollout_weights_BT": rng.uniform(0.2, 2.0, (samples, width)),
        "sum_pi_squared_BT": sum_pi_squared_BT,
        "entropy_BT": entropy_BT,
        "advantages_BT": advantages_BT,
        "values_BT": values_BT,
        "old_values_BT": old_values_BT,
        "returns_BT": normal(),
        "turns_BT": turns_BT,
        "states_BT": states_BT,
        "selected_BT": (rng.random((samples, width)) < 0.2) & (loss_mask_BT != 0),
    }
    order = rng.permutation(samples)
    inputs = {name: array[order] for name, array in inputs.items()}
    # Rows of the logits are separate tokens: ordinary, equal to the reference, far apart, with an impossible gap.
    logits_NV = 2 * rng.normal(size=(9, vocabulary))
    ref_logits_NV = 2 * rng.normal(size=(9, vocabulary))
    ref_logits_NV[0] = logits_NV[0] + 3.0
    logits_NV[1] *= 10
    if extremes:
        logits_NV[2, 0] += 200.0
    return {**inputs, "logits_NV": logits_NV, "ref_logits_NV": ref_logits_NV}


def with_garbage(inputs: Inputs, garbage: float = float("nan")) -> Inputs:
    """Return the same inputs with `garbage` at unused places: masked positions, and rewards of invalid samples."""
    dirty = {name: array.copy() for name, array in inputs.items()}
    masked_BT, invalid_B = inputs["response_mask_BT"] == 0, ~inputs["valid_B"]
    for name in MASKED:
        dirty[name][masked_BT | invalid_B[:, None]] = garbage
    for name in PER_SAMPLE:
        dirty[name][invalid_B] = garbage
    return dirty


def pick(inputs: Inputs, *names: str) -> Inputs:
    """Return the named inputs only, as keyword arguments."""
    return {name: inputs[name] for name in names}
