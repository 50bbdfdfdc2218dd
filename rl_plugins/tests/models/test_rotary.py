"""Rotary frequencies that depend on the longest sample of a pass: such a pass is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForTokenClassification

from rl_plugins.errors import ConfigError
from rl_plugins.models.log_probs import response_log_probs
from rl_plugins.models.packing import check_positions
from rl_plugins.models.scalar_head import position_scores
from rl_plugins.tests.models.samples import LONGROPE, LONGROPE_LENGTH, batch_of, forward_arguments, random_samples, tiny

LONGEST, SHORT = (4, LONGROPE_LENGTH - 4), (3, 6)
TOO_LONG = (4, LONGROPE_LENGTH - 3)
DYNAMIC: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}


def arguments(*lengths: tuple[int, int]) -> dict[str, Any]:
    """The first sample has other tokens than the sample of a pass alone."""
    first, *others = (random_samples(one, seed=sum(one))[0] for one in lengths)
    return forward_arguments(batch_of([first, *others]))


def log_probs(model: Any, *lengths: tuple[int, int], packed: bool = True) -> Tensor:
    with torch.no_grad():
        return response_log_probs(model, **arguments(*lengths), packed=packed).log_probs_BT


@pytest.mark.parametrize("packed", [True, False])
def test_a_sample_has_the_log_probs_of_a_pass_alone_or_the_pass_is_refused(packed: bool) -> None:
    model = tiny("Phi3", **LONGROPE)
    alone_BT = log_probs(model, SHORT, packed=packed)
    beside_BT = log_probs(model, LONGEST, SHORT, packed=packed)
    torch.testing.assert_close(beside_BT[1:, : SHORT[1]], alone_BT)
    message = "Phi3ForCausalLM has the rotary positions longrope, .* within 16 tokens, or let longer samples run alone"
    with pytest.raises(ConfigError, match=f"{message} with tokens_per_micro_batch=16"):
        log_probs(model, TOO_LONG, SHORT, packed=packed)
    assert log_probs(model, TOO_LONG, packed=packed).isfinite().all()


def test_check_positions_of_scalar_heads_and_of_dynamic_frequencies() -> None:
    policy = tiny("Phi3", **LONGROPE)
    critic = AutoModelForTokenClassification.from_config(policy.config)
    with pytest.raises(ConfigError, match="Phi3ForTokenClassification has the rotary positions longrope"):
        position_scores(critic, **arguments(TOO_LONG, SHORT))
    dynamic = tiny("Llama", rope_parameters=DYNAMIC, max_position_embeddings=16)
    assert log_probs(dynamic, LONGEST, SHORT).isfinite().all()
    with pytest.raises(ConfigError, match=r"positions dynamic, .* keep prompt and response within 16 tokens$"):
        log_probs(dynamic, TOO_LONG)


def test_check_positions_of_layer_types_and_of_other_models() -> None:
    model, positions_BS = tiny("Phi3", **LONGROPE), torch.arange(99).expand(2, -1)
    of_layers = {"sliding_attention": {"rope_type": "default"}, "full_attention": model.config.rope_parameters}
    model.config.rope_parameters = of_layers
    with pytest.raises(ConfigError, match="longrope"):
        check_positions(model, positions_BS)
    for other in (tiny("Llama"), nn.Linear(1, 1)):
        check_positions(other, positions_BS)
