"""Distillation on the most likely tokens of the teacher: the gradient of a step equals the definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.errors import ConfigError
from rl_plugins.models.tiny import build_model
from rl_plugins.stages.policy_optimization import PolicyOptimization
from rl_plugins.tests.loops import for_each
from rl_plugins.tests.stages import canned

K = 5


def whole(model: Any, prompt: str, response: str) -> Tensor:
    """Log-probs [T, V] at the places of the response tokens."""
    prompt_ids, ids = canned.tokenizer.encode(prompt), canned.tokenizer.encode(response)
    logits = model(torch.tensor([prompt_ids + ids])).logits[0] / canned.TEMPERATURE
    return logits[len(prompt_ids) - 1 : -1].log_softmax(-1)


@for_each("budget", [1, 40, 10**6])
def test_forward_kl_gradient_equals_the_definition_for_any_micro_batches(budget: int) -> None:
    policy = canned.OwnPolicy().model
    teacher = build_model(hidden_size=32, intermediate_size=48, initializer_range=0.2, seed=5).double()
    terms = []
    for prompt, responses in canned.RESPONSES.items():
        for response in responses:
            if response and canned.score(response) is not None:
                of_teacher, ids = whole(teacher, prompt, response).detach().topk(K)
                of_policy = whole(policy, prompt, response).gather(-1, ids)
                terms.append((of_teacher.exp() * (of_teacher - of_policy)).sum(dim=-1).clamp(min=0))
    expected = torch.autograd.grad(torch.cat(terms).mean(), list(policy.parameters()))
    algorithm = Algorithm(policy_loss="forward_kl_top_k", teacher_top_k=K)
    (gradient,), metrics = canned.gradients(algorithm, tokens_per_micro_batch=budget)
    for one, other in zip(gradient, expected, strict=True):
        assert float((one - other).abs().max()) <= 1e-6 * float(other.abs().max())
    assert metrics["train/loss"] == pytest.approx(float(torch.cat(terms).mean().detach()), rel=1e-6)
    assert 0 < metrics["train/teacher_mass"] < 1


def test_forward_kl_without_a_teacher_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"needs teacher_top_log_probs_BTK: name the teacher with teacher="):
        PolicyOptimization(
            build_model(),
            tokenizer=canned.tokenizer,
            scorer=canned.CannedScorer(),
            sampling=SamplingConfig(max_tokens=8, num_samples=3),
            algorithm=Algorithm(policy_loss="forward_kl_top_k"),
        )


def test_teacher_top_k_of_0_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"teacher_top_k=0: must be at least 1"):
        Algorithm(teacher_top_k=0)
