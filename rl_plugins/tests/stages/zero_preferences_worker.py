"""One of two ranks of ZeRO-3 on CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from rl_plugins.stages.preference_optimization import OnlinePreferenceOptimization, PreferenceOptimization
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.strategies.zero import ZeroStrategy
from rl_plugins.tests.stages import canned, canned_preferences

# Class, options, and the data of each step: rows, or prompts without a pair on one of two ranks.
CASES: dict[str, tuple[Any, dict[str, Any], list[list[Any]]]] = {
    "dpo": (PreferenceOptimization, {"loss_options": {"beta": 0.5}}, [[0, 1, 2, 3, 4, 5], [5, 2, 0, 1]]),
    "kto": (PreferenceOptimization, {"loss": "kto"}, [[0, 1, 2, 3]]),
    "online": (OnlinePreferenceOptimization, {}, [["100+1", "4+4"], ["4+4", "12+30"]]),
}


class OwnPolicy(canned.OwnPolicy):
    """A float32 policy with SGD. Adam would amplify rounding errors, SGD does not."""

    def __init__(self) -> None:
        super().__init__(canned_preferences.SEED)
        self.model.float()

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.model.parameters(), lr=0.02)


def train(case: str, rank: int, world_size: int, strategy: Any, **options: Any) -> dict[str, Tensor]:
    """The weights after the steps of a case."""
    base, stage_options, steps = CASES[case]
    weights: dict[str, Tensor] = {}

    class Inspect(base):  # type: ignore[misc,valid-type]
        def on_train_end(self) -> None:
            weights.update({name: tensor.clone() for name, tensor in self.strategy.weight_source()})

    stage = canned_preferences.stage_of(OwnPolicy(), Inspect, tokens_per_micro_batch=80, **stage_options)
    batches: list[Any] = [
        canned.prompt_batch(rows[rank::world_size])
        if case == "online"
        else canned_preferences.batch_of(True, rows[rank::world_size])
        for rows in steps
    ]
    canned.quiet_trainer(strategy, accelerator="cpu", precision="32-true", **options).fit(stage, canned.loader(batches))
    assert stage.step == len(steps)
    return weights


def in_one_process(case: str) -> dict[str, Tensor]:
    return train(case, 0, 1, SingleDeviceRolloutStrategy(rollout=canned.CannedRollout()))


def rank_weights(rank: int, case: str) -> dict[str, Tensor]:
    strategy = ZeroStrategy(stage=3, rollout=canned.CannedRollout(), timeout_s=120)
    return train(case, rank, 2, strategy, devices=1, num_nodes=2)
