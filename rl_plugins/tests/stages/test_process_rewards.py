"""A step of PRIME equals PRIME in one function, for any micro-batches; and wrong options are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.config.models import OptimizerConfig
from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.errors import ConfigError, DataError
from rl_plugins.models.tiny import build_model, save_tiny_policy
from rl_plugins.stages.policy_optimization import PolicyOptimization
from rl_plugins.stages.process_rewards import ProcessRewardConfig
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.tests.algorithms.reference import process_rewards as reference
from rl_plugins.tests.loops import for_each
from rl_plugins.tests.stages import canned

ALGORITHM = Algorithm(advantage="prime")
CONFIG = replace(canned.PROCESS_REWARDS, beta=0.3)


def log_probs(model: Any, prompt: str, response: str, temperature: float = 1.0) -> Tensor:
    prompt_ids, ids = canned.tokenizer.encode(prompt), canned.tokenizer.encode(response)
    logits = model(torch.tensor([prompt_ids + ids])).logits[0] / temperature
    return logits.log_softmax(-1)[len(prompt_ids) - 1 : -1].gather(-1, torch.tensor(ids, dtype=torch.long)[:, None])[
        :, 0
    ]


def other_model() -> Any:
    return build_model(hidden_size=32, intermediate_size=48, initializer_range=0.2, seed=5).double()


def plain_prime(config: ProcessRewardConfig) -> tuple[list[Tensor], list[Tensor], dict[str, float]]:
    """Gradients of policy and process reward model, and the model's metrics; sample by sample, without padding."""
    samples = [
        (number, prompt, response, value)
        for number, (prompt, responses) in enumerate(canned.RESPONSES.items())
        for response in responses
        if (value := canned.score(response)) is not None
    ]
    groups = np.array([number for number, _, _, _ in samples])
    scores = np.array([value for _, _, _, value in samples])
    outcomes = (scores > 0.5).astype(float)
    judge, start, policy = other_model(), other_model(), canned.OwnPolicy().model

    def ratios() -> list[Tensor]:
        return [log_probs(judge, p, r) - log_probs(start, p, r).detach() for _, p, r, _ in samples if r]

    there = np.array([bool(response) for _, _, response, _ in samples])
    returns = config.beta * torch.stack([row.sum() for row in ratios()])
    if config.loss == "cross_entropy":
        wanted = torch.from_numpy(outcomes[there])
        losses = -(wanted * returns.sigmoid().log() + (1 - wanted) * (1 - returns.sigmoid()).log())
    else:
        all_returns = np.zeros(len(samples))
        all_returns[there] = returns.detach().numpy()
        values = reference.outcome_preference(
            returns_B=all_returns,
            outcomes_B=outcomes,
            groups_B=groups,
            valid_B=np.ones(len(samples), dtype=bool),
            best_of_n=config.best_of_n,
        )[there]
        # Before the first update all returns are 0, and -log sigmoid has the slope -1/2.
        assert not all_returns.any()
        signs = torch.from_numpy(np.where(outcomes[there] > 0, 1.0, -1.0))
        weights = torch.from_numpy(values) / np.log(2)
        losses = weights * (np.log(2) - 0.5 * signs * returns)
    losses.mean().backward()
    of_judge = [p.grad.clone() for p in judge.parameters()]
    metrics = {"loss": float(losses.detach().mean()), "accuracy": float((outcomes[there] < 0.5).mean()), "return": 0.0}
    if config.update == "before":
        optimizer = torch.optim.AdamW(judge.parameters(), lr=config.optimizer.lr, weight_decay=0.0)
        optimizer.step()

    width = max(len(response) for _, _, response, _ in samples)
    mask, judged = np.zeros((len(samples), width)), np.zeros((len(samples), width))
    rows = iter(ratios())
    for i, (_, _, response, _) in enumerate(samples):
        mask[i, : len(response)] = 1
        if response:
            judged[i, : len(response)] = next(rows).detach().numpy()
    rewards = reference.process_rewards(
        log_probs_BT=judged,
        reference_log_probs_BT=np.zeros_like(judged),
        response_mask_BT=mask,
        outcomes_B=outcomes if config.ends_in_outcome else None,
        beta=config.beta,
        lam=config.lam,
        granularity=config.granularity,
    )
    if config.normalize:
        rewards = reference.normalized(process_rewards_BT=rewards, response_mask_BT=mask)
    outcome_rewards = np.zeros_like(judged)
    outcome_rewards[:, 0] = scores
    advantages, _ = reference.prime(
        token_level_rewards_BT=outcome_rewards,
        response_mask_BT=mask,
        groups_B=groups,
        valid_B=np.ones(len(samples), dtype=bool),
        process_rewards_BT=rewards,
    )
    terms = []
    for i, (_, prompt, response, _) in enumerate(samples):
        if response:
            current = log_probs(policy, prompt, response, canned.TEMPERATURE)
            terms.append(-torch.from_numpy(advantages[i, : len(response)]) * (current - current.detach()).exp())
    return list(torch.autograd.grad(torch.cat(terms).mean(), list(policy.parameters()))), of_judge, metrics


def assert_same(actual: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert float((one - other).abs().max()) <= tolerance * float(other.abs().max())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lam": 0.8, "normalize": False},
        {"granularity": "whole", "ends_in_outcome": True, "lam": 0.5},
        {"update": "after"},
        {"loss": "preference"},
        {"loss": "preference", "best_of_n": "outcome", "update": "after"},
        {"loss": "preference", "best_of_n": "return"},
    ],
    ids=lambda options: ", ".join(f"{name}={value}" for name, value in options.items()) or "defaults",
)
def test_prime_step_equals_the_definition(options: dict[str, Any]) -> None:
    config = replace(CONFIG, **options)
    expected, of_judge, expected_metrics = plain_prime(config)
    assert all(gradient.abs().max() > 0 for gradient in (*expected, *of_judge))
    for budget in (40, 10**6):
        (gradient, judges), metrics = canned.gradients(
            ALGORITHM, tokens_per_micro_batch=budget, process_reward_model=config
        )
        assert_same(judges, of_judge, 1e-6)
        assert_same(gradient, expected, 1e-5)
        for name, value in expected_metrics.items():
            assert metrics[f"train/process_reward_model/{name}"] == pytest.approx(value, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("best_of_n", ["outcome", "return"])
def test_micro_batches_do_not_change_the_preference_loss_in_later_updates(best_of_n: Any) -> None:
    config = replace(CONFIG, loss="preference", best_of_n=best_of_n)
    expected, _ = canned.gradients(ALGORITHM, updates_per_step=2, process_reward_model=config)
    actual, _ = canned.gradients(ALGORITHM, updates_per_step=2, process_reward_model=config, tokens_per_micro_batch=40)
    assert len(expected) == 4
    for one, other in zip(actual, expected, strict=True):
        assert_same(one, other, 1e-8)


def test_passes_per_step_repeat_only_the_policy_updates() -> None:
    gradients, _ = canned.gradients(ALGORITHM, updates_per_step=2, passes_per_step=3)
    assert len(gradients) == 6 + 2


def stage(policy: Any, **options: Any) -> PolicyOptimization:
    arguments: dict[str, Any] = {
        "tokenizer": canned.tokenizer,
        "scorer": canned.CannedScorer(),
        "sampling": SamplingConfig(max_tokens=8, num_samples=3),
        "process_reward_model": canned.PROCESS_REWARDS,
        **options,
    }
    return PolicyOptimization(policy, **arguments)


def fit(module: PolicyOptimization, steps: int) -> dict[str, float]:
    """The metrics of the last step."""
    metrics = canned.metrics_of(module)
    trainer = canned.quiet_trainer(SingleDeviceRolloutStrategy(rollout=canned.CannedRollout()))
    trainer.fit(module, canned.loader([canned.prompt_batch(canned.PROMPTS)] * steps))
    return metrics


def test_process_reward_model_starts_from_the_policy_and_learns(tmp_path: Path) -> None:
    path = str(save_tiny_policy(tmp_path))
    config = replace(CONFIG, optimizer=OptimizerConfig(lr=0.02, gradient_clip=1e-3))
    module = stage(path, process_reward_model=config, optimizer=OptimizerConfig(lr=1e-4))
    first = fit(module, steps=1)
    assert first["train/process_reward_model/lr"] == pytest.approx(0.02)
    # The bound is far below the norm, and the logged norm is the norm before clipping.
    assert first["train/process_reward_model/gradient_norm"] > 1e-3
    pairs = zip(module.process_reference.parameters(), build_model().parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert not any(parameter.requires_grad for parameter in module.process_reference.parameters())
    assert not torch.equal(module.process_reward_model.model.norm.weight, module.policy.model.norm.weight)
    loss = first["train/process_reward_model/loss"]
    assert loss == pytest.approx(np.log(2), rel=1e-5)
    module = stage(path, process_reward_model=config, optimizer=OptimizerConfig(lr=1e-4))
    trained = fit(module, steps=12)
    assert trained["train/process_reward_model/loss"] < 0.9 * loss
    assert trained["train/process_reward_model/accuracy"] > 0.8


@for_each(
    ("options", "message"),
    [
        ({"granularity": "step"}, r"granularity=step: use one of token, whole"),
        ({"loss": "mse"}, r"loss=mse: use one of cross_entropy, preference"),
        ({"update": "never"}, r"update=never: use one of before, after"),
        ({"best_of_n": "score"}, r"best_of_n=score: use one of outcome, return, null"),
        ({"best_of_n": "outcome"}, r"best_of_n=outcome weighs preferences: choose the loss preference"),
        (
            {"ends_in_outcome": True},
            r"ends_in_outcome=true: with lam=0 and granularity=token, no token gets the outcome",
        ),
        ({"beta": 0}, r"beta=0: must be above 0"),
        ({"lam": 2}, r"lam=2: must be between 0 and 1"),
    ],
)
def test_process_reward_config_refuses_bad_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ProcessRewardConfig(**options)


def test_prime_refuses_scores_outside_0_and_1_without_success_above(tmp_path: Path) -> None:
    module = stage(str(save_tiny_policy(tmp_path)), process_reward_model=ProcessRewardConfig())
    with pytest.raises(DataError, match=r"range from 0 to 1\.45: say with process_reward_model\.success_above"):
        fit(module, steps=1)


def test_prime_refuses_a_loaded_policy_without_a_process_reward_model_path() -> None:
    with pytest.raises(ConfigError, match=r"process_reward_model=ProcessRewardConfig\(path=\.\.\.\)"):
        stage(build_model())


def test_prime_refuses_an_algorithm_without_process_rewards() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.advantage='grpo' does not use process rewards"):
        stage(build_model(), algorithm=Algorithm())
