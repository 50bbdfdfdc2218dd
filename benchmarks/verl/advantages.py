"""Cases of advantages. Numbers at masked positions are not compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from benchmarks.verl.case import EDGES, Case, Inputs, Numbers, in_words, valid_values
from benchmarks.verl.functions import Verl
from rl_plugins.algorithms.advantages import ADVANTAGES


def advantages(verl: Verl) -> Iterator[Case]:
    """Yield the cases."""
    alone = {EDGES: "the only sample of a group: verl raises an error, and here it gets 0 (`grpo_passk`)"}
    zero = {EDGES: "the only sample of a group keeps its reward here, and gets 0 in verl (`rloo`)"}
    single = {EDGES: "verl computes the statistics in float32: equal rewards do not give exactly 0, as here"}
    config = verl.algorithm_config
    for gamma, lam in ((1.0, 1.0), (0.95, 0.8)):
        options = {"gamma": gamma, "lam": lam}
        yield _advantage(verl, "gae", "gae", options, {**options, "values": "values_BT"}, {})
    for by_std in (True, False):
        for name in ("grpo", "grpo_vectorized"):
            theirs: dict[str, Any] = {"norm_adv_by_std_in_grpo": by_std, "index": "groups_B"}
            documented = single if name == "grpo_vectorized" else {}
            yield _advantage(verl, name, "grpo", {"scale": "group" if by_std else "none"}, theirs, documented)
        theirs = {"index": "groups_B", "config": config(norm_adv_by_std_in_grpo=by_std)}
        yield _advantage(verl, "grpo_passk", "grpo_passk", {"normalize": by_std}, theirs, alone)
    yield _advantage(verl, "gdpo", "gdpo", {}, {"index": "groups_B"}, {})
    for by_std in (True, False):
        yield _components(verl, by_std)
    for name in ("rloo", "opo", "reinforce_plus_plus_baseline"):
        yield _advantage(verl, name, name, {}, {"index": "groups_B"}, {})
    yield _advantage(verl, "rloo_vectorized", "rloo", {}, {"index": "groups_B"}, zero)
    for norm in (1.0, 2.5):
        yield _advantage(verl, "gpg", "gpg", {"norm": norm}, {"index": "groups_B", "f_norm": norm}, {})
    for gamma in (1.0, 0.9):
        theirs = {"config": config(gamma=gamma)}
        yield _advantage(verl, "reinforce_plus_plus", "reinforce_plus_plus", {"gamma": gamma}, theirs, {})
    yield _advantage(verl, "remax", "remax", {}, {"reward_baselines": "baseline_rewards_B"}, {})
    for name in ("optimal_token_baseline", "tir_optimal_token_baseline"):
        for zero_tail in (True, False):
            for weights in (False, True):
                theirs = {
                    "index": "groups_B",
                    "old_log_probs": "old_log_probs_BT",
                    "sum_pi_squared": "sum_pi_squared_BT",
                    "handle_zero_tail": zero_tail,
                    **({"rollout_is_weights": "rollout_weights_BT"} if weights else {}),
                }
                yield _advantage(verl, name, name, {"zero_tail": zero_tail}, theirs, {}, weights=weights)


def _advantage(
    verl: Verl,
    name: str,
    our_name: str,
    options: Mapping[str, Any],
    their_options: Mapping[str, Any],
    documented: Mapping[str, str],
    *,
    weights: bool = False,
) -> Case:
    """Return a case of an advantage; numbers at masked positions are not compared.

    Args:
        verl: the checkout.
        name: verl's name.
        our_name: name in `ADVANTAGES`.
        options: options of our function.
        their_options: arguments of verl's function; a text that is the name of an input stands for the input.
        documented: reasons for differences.
        weights: give `rollout_weights_BT` to our function.
    """
    needed = {
        "gae": ("values_BT",),
        "remax": ("baseline_rewards_B",),
        "optimal_token_baseline": ("old_log_probs_BT", "sum_pi_squared_BT"),
        "tir_optimal_token_baseline": ("old_log_probs_BT", "sum_pi_squared_BT"),
    }.get(our_name, ())

    def ours(inputs: Inputs) -> Numbers:
        given = ("token_level_rewards_BT", "response_mask_BT", "groups_B", "valid_B", *needed)
        further = {"rollout_weights_BT": inputs["rollout_weights_BT"]} if weights else {}
        found = ADVANTAGES[our_name](**{key: inputs[key] for key in given}, **options, **further)
        return [valid_values(values_BT, inputs) for values_BT in found]

    def theirs(inputs: Inputs) -> Numbers:
        arguments = {
            key: inputs[value] if isinstance(value, str) and value in inputs else value
            for key, value in their_options.items()
        }
        if "index" in arguments:
            arguments["index"] = arguments["index"].numpy()
        # verl changes the rewards of some estimators in place.
        found = verl.core.ADV_ESTIMATOR_REGISTRY[name](
            token_level_rewards=inputs["token_level_rewards_BT"].clone(),
            response_mask=inputs["response_mask_BT"],
            **arguments,
        )
        return [valid_values(values_BT, inputs) for values_BT in found]

    words = in_words(options) + (" weights" if weights else "")
    return Case("advantage", name, words.strip(), ours, theirs, documented)


def _components(verl: Verl, by_std: bool) -> Case:
    """Return a case of GDPO with several rewards for each response."""
    weights = [1.0, 0.5, 2.0]

    def ours(inputs: Inputs) -> Numbers:
        given = ("token_level_rewards_BT", "response_mask_BT", "groups_B", "valid_B", "component_rewards_BK")
        advantages_BT, _ = ADVANTAGES["gdpo"](**{key: inputs[key] for key in given}, weights=weights, normalize=by_std)
        return [valid_values(advantages_BT, inputs)]

    def theirs(inputs: Inputs) -> Numbers:
        components = {f"r{k}": rewards_B.numpy() for k, rewards_B in enumerate(inputs["component_rewards_BK"].T)}
        mask_BT = inputs["response_mask_BT"]
        advantages_BT, _ = verl.core.compute_gdpo_outcome_advantage(
            inputs["token_level_rewards_BT"],
            mask_BT,
            inputs["groups_B"].numpy(),
            norm_adv_by_std_in_grpo=by_std,
            config=verl.algorithm_config(gdpo_reward_keys=list(components), gdpo_reward_weights=weights),
            non_tensor_batch=components,
            batch={"prompts": mask_BT[:, :0], "attention_mask": torch.ones_like(mask_BT, dtype=torch.long)},
        )
        return [valid_values(advantages_BT, inputs)]

    return Case("advantage", "gdpo", f"three components normalize={by_std}", ours, theirs)
