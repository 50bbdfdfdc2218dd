"""Experts that the training workers cannot share are refused before a model is loaded."""

from __future__ import annotations

from typing import Any

from rl_plugins.launch.algorithm_check import check_expert_parallel
from rl_plugins.tests.launch.configurations import configured, message_of

MIXTURE = {"model_type": "qwen3_moe", "num_experts": 6}
DENSE = {"model_type": "qwen3", "num_experts": 0}


def message(size: int, models: dict[str, dict[str, Any]], *options: str) -> str:
    """Return the message for a run in which `size` of eight workers share the experts."""
    words = ["strategy.name=fsdp", f"strategy.expert_parallel={size}", "placement.num_workers=8", "model.path=policy"]
    return message_of(lambda: check_expert_parallel(configured("grpo", *words, *options), models))


def test_check_expert_parallel_takes_experts_that_workers_share_evenly() -> None:
    assert message(2, {"policy": MIXTURE}) == "nothing is refused"
    # Only the reference has experts.
    models = {"policy": DENSE, "other": MIXTURE}
    assert message(2, models, "reference.path=other") == "nothing is refused"
    # The policy of an earlier stage does not exist yet.
    assert message(4, {}) == "nothing is refused"


def test_check_expert_parallel_names_the_fitting_number_of_workers() -> None:
    found = message(4, {"policy": MIXTURE})
    assert found == (
        "strategy.expert_parallel=4: 4 workers cannot share the 6 experts of model.path=policy evenly: use 2"
    )


def test_check_expert_parallel_ignores_models_in_other_processes() -> None:
    models = {"policy": MIXTURE, "other": {**MIXTURE, "num_experts": 3}}
    assert "3 experts of reference.path=other evenly: use 1" in message(2, models, "reference.path=other")
    pool = ["reference.path=other", "placement.reference.actors=1"]
    assert message(2, models, *pool) == "nothing is refused"
    assert "has no experts" in message(2, {"policy": DENSE, "other": MIXTURE}, *pool)


def test_check_expert_parallel_refuses_families_without_an_exchange_of_tokens() -> None:
    hybrid = {"model_type": "granitemoehybrid", "num_local_experts": 4}
    assert "the experts of model.path=policy, a granitemoehybrid, cannot be divided" in message(2, {"policy": hybrid})
    with_images = {"model_type": "qwen3_vl_moe", "text_config": MIXTURE, "vision_config": {}}
    assert "or the model reads images: set strategy.expert_parallel=1" in message(2, {"policy": with_images})
