"""One rank of ZeRO that trains adapters, with its checks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.algorithms.regularization import KLConfig
from rl_plugins.config.models import CriticConfig, LoraConfig, OptimizerConfig
from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.stages.policy_optimization import PolicyOptimization
from rl_plugins.strategies.zero import ZeroStrategy
from rl_plugins.tests.stages import canned


class Inspect(PolicyOptimization):
    """Stage that checks the engines before the end of training."""

    folder: Path

    def on_train_end(self) -> None:
        strategy: Any = self.strategy
        assert set(strategy._model_engines) == set(strategy._trained) == {"policy", "critic"}
        self.trainer.save_checkpoint(self.folder / "state")
        self.export(self.folder / "policy")
        self.export(self.folder / "adapter", adapter=True)
        for name in ("policy", "critic"):
            self.check_checkpoint(name)

    def check_checkpoint(self, name: str) -> None:
        """The checkpoint holds the trained weights, and restores weights and optimizer state bit for bit."""
        strategy: Any = self.strategy
        files = list((self.folder / "state" / name / "zero").glob("*model_states.pt"))
        (module,) = [torch.load(file, weights_only=False)["module"] for file in files]
        trained = {key for key, parameter in getattr(self, name).named_parameters() if parameter.requires_grad}
        # DeepSpeed keeps a second name of a frozen weight.
        assert set(module) - {"base_model.model.lm_head.weight"} == trained
        expected, moments = merged(strategy, name), moments_of(strategy, name)
        assert moments
        for key, parameter in getattr(self, name).named_parameters():
            if key in trained:
                getattr(parameter, "ds_tensor", parameter).data.zero_()
        for moment in tensors_of(strategy, name):
            moment.zero_()
        assert not all(torch.equal(weight, expected[key]) for key, weight in merged(strategy, name).items())
        strategy.load_checkpoint(self.folder / "state")
        assert all(torch.equal(weight, expected[key]) for key, weight in merged(strategy, name).items())
        assert moments_of(strategy, name) == moments


def merged(strategy: ZeroStrategy, name: str) -> dict[str, Tensor]:
    return {key: tensor.clone() for key, tensor in strategy.weight_source(name)}


def tensors_of(strategy: ZeroStrategy, name: str) -> list[Tensor]:
    """Moments and master weights."""
    engine: Any = strategy.model_engine(name)
    optimizer = engine.optimizer.optimizer
    tensors = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return [tensor for tensor in tensors if tensor.numel() > 1]


def moments_of(strategy: ZeroStrategy, name: str) -> list[list[float]]:
    return [tensor.flatten().tolist() for tensor in tensors_of(strategy, name)]


def stage_of(policy: str, kind: type[PolicyOptimization] = PolicyOptimization) -> PolicyOptimization:
    """PPO with adapters of policy and critic."""
    return kind(
        policy,
        tokenizer=canned.tokenizer,
        scorer=canned.CannedScorer(),
        sampling=SamplingConfig(max_tokens=20, num_samples=3, temperature=canned.TEMPERATURE),
        algorithm=Algorithm(advantage="gae", kl=KLConfig(0.1)),
        critic=CriticConfig(optimizer=OptimizerConfig(lr=0.01), lora=LoraConfig(rank=2)),
        optimizer=OptimizerConfig(lr=0.01),
        lora=LoraConfig(rank=4),
        tokens_per_micro_batch=50,
    )


def train(_: int, stage: int, policy: str, folder: Path) -> None:
    module = stage_of(policy, Inspect)
    assert isinstance(module, Inspect)
    module.folder = folder
    # The new adapters are random numbers.
    torch.manual_seed(3)
    strategy = ZeroStrategy(stage=stage, rollout=canned.CannedRollout(), timeout_s=60)
    trainer = canned.quiet_trainer(strategy, accelerator="cpu", devices=1, precision="32-true")
    trainer.fit(module, canned.loader([canned.prompt_batch(canned.PROMPTS)] * 2))
