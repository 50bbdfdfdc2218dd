"""Fields of an experience under the input names of algorithm functions."""

from __future__ import annotations

from torch import Tensor

from rl_plugins.data.experience import Experience


def filled(field: Tensor | None) -> Tensor:
    """Return a field that an earlier part of the step has computed, and assert that the field is set."""
    assert field is not None, "the parts of the step ran out of order"
    return field


def named_tensors(batch: Experience) -> dict[str, Tensor | None]:
    """Return the tensors of a batch by input name, such as `scores_B`; see `rl_plugins.algorithms.inputs`."""
    return {
        "scores_B": batch.scores,
        "baseline_rewards_B": batch.baseline_scores,
        "component_rewards_BK": batch.component_scores,
        "groups_B": batch.groups,
        "valid_B": batch.valid,
        "response_lengths_B": batch.response_lengths,
        "response_mask_BT": batch.response_mask,
        "rollout_log_probs_BT": batch.rollout_log_probs,
        "old_log_probs_BT": batch.old_log_probs,
        "ref_log_probs_BT": batch.ref_log_probs,
        "teacher_log_probs_BT": batch.teacher_log_probs,
        "teacher_top_log_probs_BTK": batch.teacher_top_log_probs,
        "entropy_BT": batch.entropy,
        "sum_pi_squared_BT": batch.sum_pi_squared,
        "values_BT": batch.values,
        "process_rewards_BT": batch.process_rewards,
        "rollout_weights_BT": batch.rollout_weights,
        "advantages_BT": batch.advantages,
        "returns_BT": batch.returns,
        "loss_mask_BT": batch.loss_mask,
        "selected_BT": batch.selected,
    }
