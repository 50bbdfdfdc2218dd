"""Steps of Safe RLHF on fixed samples: costs, two critics, and the multiplier."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from typing_extensions import override

from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.algorithms.constraint import CostConstraint
from rl_plugins.algorithms.regularization import KLConfig
from rl_plugins.config.models import CriticConfig, OptimizerConfig, RewardModelConfig
from rl_plugins.errors import CheckpointError, ConfigError, RewardError
from rl_plugins.models.tiny import build_model
from rl_plugins.stages.critic_training import CriticLearner, CriticTraining, value_objective
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.tests.algorithms.reference import safe_rlhf as reference
from rl_plugins.tests.loops import for_each
from rl_plugins.tests.stages import canned
from rl_plugins.tests.stages.test_critic_training import gap, learn, weights_of
from rl_plugins.tests.stages.test_experience_maker import save_reward_model

BETA, LAM, STEPS = 0.05, 0.9, 3
CONSTRAINT = CostConstraint("format", threshold=0.2, lambda_lr=0.5, window=2)
OPTIMIZER = OptimizerConfig(lr=0.02, gradient_clip=0.1)


def algorithm(constraint: CostConstraint = CONSTRAINT) -> Algorithm:
    return Algorithm(
        advantage="gae",
        advantage_options={"lam": LAM, "normalize": False},
        kl=KLConfig(BETA, "reward", "k1"),
        value_clip=0.02,
        constraint=constraint,
    )


def make_stage(**options: Any) -> canned.Keeping:
    arguments = {
        "algorithm": algorithm(),
        "critic": CriticConfig(canned.other_model(), OPTIMIZER),
        "cost_critic": CriticConfig(canned.other_model(6), OPTIMIZER),
        "reference": canned.other_model(),
        **options,
    }
    stage: canned.Keeping = canned.ppo(canned.Keeping, **arguments)
    return stage


class SaveSecondStep(Callback):
    """Saves a checkpoint after the second step."""

    def __init__(self, file: Path) -> None:
        self.file = file

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        if pl_module.step == 2:
            trainer.save_checkpoint(self.file)


def fit(stage: canned.Keeping, steps: int = STEPS, state: Path | None = None, **options: Any) -> None:
    strategy = SingleDeviceRolloutStrategy(rollout=canned.CannedRollout())
    trainer = canned.quiet_trainer(strategy, **{"precision": "64-true", **options})
    loader = canned.loader([canned.prompt_batch(canned.PROMPTS)] * steps)
    trainer.fit(stage, loader, ckpt_path=state, weights_only=True)


@cache
def trained() -> canned.Keeping:
    """A stage after training."""
    stage = make_stage()
    fit(stage)
    return stage


def numbers(tensor: Tensor | None) -> Any:
    assert tensor is not None
    return tensor.double().numpy()


def test_lambda_and_advantages_of_each_step_agree_with_the_second_implementation() -> None:
    stage = trained()
    costs = [batch.costs[batch.valid].tolist() for batch in stage.trained_on]  # type: ignore[index]
    assert all(set(of_step) == {0.0, 1.0} for of_step in costs)
    multipliers = reference.multipliers(costs, threshold=0.2, initial=1.0, rate=0.5, maximum=5.0, window=2)
    assert multipliers[0] != 1
    for batch, row, multiplier in zip(stage.trained_on, stage.metrics, multipliers, strict=True):
        assert row["train/lambda"] == pytest.approx(multiplier, rel=1e-12)
        advantages_BT, returns_BT, cost_returns_BT = reference.advantages_and_returns(
            scores_B=numbers(batch.scores),
            costs_B=numbers(batch.costs),
            kl_BT=numbers(batch.old_log_probs) - numbers(batch.ref_log_probs),
            values_BT=numbers(batch.values),
            cost_values_BT=numbers(batch.cost_values),
            mask_BT=numbers(batch.response_mask),
            valid_B=batch.valid.numpy(),
            beta=BETA,
            gamma=1.0,
            lam=LAM,
            multiplier=multiplier,
        )
        for actual, expected in (
            (batch.advantages, advantages_BT),
            (batch.returns, returns_BT),
            (batch.cost_returns, cost_returns_BT),
        ):
            np.testing.assert_allclose(numbers(actual), expected, rtol=1e-5, atol=1e-6)


def test_step_logs_cost_lambda_and_both_critics() -> None:
    rows = trained().metrics
    digits = [response.isdigit() for group in canned.RESPONSES.values() for response in group if "!" not in response]
    assert rows[-1]["train/cost"] == rows[-1]["train/cost_in_window"] == pytest.approx(sum(digits) / len(digits))
    # The mean cost is below the threshold.
    assert 1 > rows[0]["train/lambda"] > rows[-1]["train/lambda"] > 0
    for critic in ("critic", "cost_critic"):
        names = {f"train/{critic}/{name}" for name in ("loss", "lr", "gradient_norm", "explained_variance")}
        assert names <= rows[-1].keys()
    assert {"time/values", "time/cost_values", "time/update_critic", "time/update_cost_critic"} <= rows[-1].keys()
    # The critics learn different returns.
    assert rows[-1]["train/critic/loss"] != rows[-1]["train/cost_critic/loss"]


def test_cost_critic_of_a_pool_gets_the_weights_of_the_cost_critic_in_the_workers() -> None:
    stage = trained()
    training = CriticTraining(
        path=canned.other_model(6),
        config=CriticConfig(optimizer=OPTIMIZER),
        gradient_clip=0.1,
        objective=value_objective(algorithm(), 2, "cost_critic"),
        computes_in=torch.float64,
        loading={},
        tokens_per_micro_batch=40,
        packing=True,
        seed=0,
    )
    learner = CriticLearner(training)
    learn(learner, stage.trained_on)
    assert gap(learner.weights, weights_of(stage.cost_critic)) < 1e-12


def test_load_checkpoint_refuses_a_checkpoint_of_a_run_without_a_bound_on_the_cost() -> None:
    checkpoint: dict[str, Any] = {}
    trained().on_save_checkpoint(checkpoint)
    del checkpoint["stage"]["multiplier"]
    with pytest.raises(
        CheckpointError, match=r"without a bound on the mean cost \(algorithm\.constraint\): resume with"
    ):
        make_stage().on_load_checkpoint(checkpoint)


def test_resumed_run_ends_with_the_lambda_and_the_weights_of_an_uninterrupted_run(tmp_path: Path) -> None:
    whole, resumed, file = make_stage(), make_stage(), tmp_path / "state.ckpt"
    # Lightning loads a checkpoint into the policy, which has float32 parameters, before it changes the precision.
    fit(whole, callbacks=[SaveSecondStep(file)], precision="32-true")
    fit(resumed, state=file, precision="32-true")
    assert resumed.step == STEPS and resumed.multiplier is not None and whole.multiplier is not None
    assert resumed.multiplier.state_dict() == whole.multiplier.state_dict()
    assert len(resumed.metrics) == 1 and resumed.metrics[0]["train/lambda"] == whole.metrics[-1]["train/lambda"]
    for name in ("policy", "critic", "cost_critic"):
        assert gap(weights_of(getattr(resumed, name)), weights_of(getattr(whole, name))) == 0, name


def test_lambda_waits_while_the_policy_waits_for_a_critic() -> None:
    stage = make_stage(cost_critic=CriticConfig(canned.other_model(6), OPTIMIZER, warmup_steps=2))
    before = [parameter.clone() for parameter in build_model_of_canned().parameters()]
    fit(stage, steps=2)
    assert [row["train/lambda"] for row in stage.metrics] == [1.0, 1.0]
    assert all(math.isnan(row["train/cost_in_window"]) for row in stage.metrics)
    assert all(torch.equal(a, b.to(a)) for a, b in zip(before, stage.policy.parameters(), strict=True))
    assert stage.metrics[-1]["train/critic/loss"] and stage.metrics[-1]["train/cost_critic/loss"]


def build_model_of_canned() -> Any:
    return build_model(hidden_size=32, intermediate_size=48, initializer_range=0.2)


def test_cost_model_scores_are_added_to_the_costs_of_the_function(tmp_path: Path) -> None:
    save_reward_model(tmp_path)

    def costs(constraint: CostConstraint, **options: Any) -> Tensor:
        stage = make_stage(algorithm=algorithm(constraint), **options)
        fit(stage, steps=1)
        assert stage.trained_on[0].costs is not None
        return stage.trained_on[0].costs

    alone = costs(CostConstraint(), cost_model=RewardModelConfig(str(tmp_path)))
    mixed = costs(CONSTRAINT, cost_model=RewardModelConfig(str(tmp_path), weight=-2.0, rule_weight=0.5))
    of_function = costs(CONSTRAINT)
    assert alone.unique().numel() == len(alone) and set(of_function.tolist()) == {0.0, 1.0}
    # The failed sample costs nothing, and does not count.
    valid = torch.arange(12) != 4
    torch.testing.assert_close(mixed, torch.where(valid, -2 * alone + 0.5 * of_function, 0))


def test_group_relative_advantages_take_a_constraint_without_critics() -> None:
    stage = make_stage(algorithm=Algorithm(constraint=CONSTRAINT), critic=None, cost_critic=None)
    fit(stage, steps=1)
    (batch,) = stage.trained_on
    assert batch.values is batch.cost_values is None and stage.critic is stage.cost_critic is None
    multiplier = stage.metrics[0]["train/lambda"]
    rewards, costs = numbers(batch.scores).reshape(4, 3), numbers(batch.costs).reshape(4, 3)
    # The last group has no failed sample: reward and cost are made relative to the group separately.
    relative = [(row - row.mean()) / (row.std(ddof=1) + 1e-6) for row in (rewards[3], costs[3])]
    expected = (relative[0] - multiplier * relative[1]) / (1 + multiplier)
    np.testing.assert_allclose(numbers(batch.advantages)[9:, 0], expected, rtol=1e-5, atol=1e-6)


@for_each(
    ("options", "message"),
    [
        (
            {"algorithm": algorithm(CostConstraint())},
            r"needs costs_B: name the cost model with cost_model=\.\.\., or the number of the reward function with",
        ),
        (
            {"algorithm": Algorithm(), "cost_model": RewardModelConfig("model")},
            r"does not use the costs of cost_model: set algorithm.constraint, or leave cost_model out",
        ),
        (
            {"cost_critic": None},
            r"needs cost_values_BT: name the model that the cost critic starts from with cost_critic=CriticConfig",
        ),
    ],
)
def test_policy_optimization_refuses_a_constraint_without_models(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_stage(**options)


def test_cost_that_the_reward_function_does_not_return_is_refused() -> None:
    with pytest.raises(RewardError, match=r"constraint\.cost names 'harm', and the reward function returns correct, f"):
        fit(make_stage(algorithm=algorithm(CostConstraint("harm"))), steps=1)
