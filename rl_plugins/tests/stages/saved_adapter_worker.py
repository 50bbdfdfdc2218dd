"""One rank of a strategy that trains a policy from a saved adapter, with the start and the end of the training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.algorithms.regularization import KLConfig
from rl_plugins.config.models import CriticConfig, LoraConfig, OptimizerConfig
from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.models.log_probs import response_log_probs
from rl_plugins.stages.policy_optimization import PolicyOptimization
from rl_plugins.strategies.fsdp import FSDPStrategy
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.strategies.zero import ZeroStrategy
from rl_plugins.tests.stages import canned

TOKENS = torch.arange(3, 19).reshape(2, 8)
SETTINGS: dict[str, Any] = {"rank": 4, "alpha": 8.0}


class Training(NamedTuple):
    """Log-probs at first, the mean KL divergence of each step, and the merged weights at the end."""

    log_probs_BT: Tensor
    ref_log_probs_BT: Tensor
    kl: list[float]
    weights: dict[str, Tensor]


class Watched(PolicyOptimization):
    """Stage with log-probs of policy and reference before the first step."""

    def on_train_start(self) -> None:
        self.first = {name: log_probs(self.strategy.model_engine(name)) for name in ("policy", "reference")}


def log_probs(model: Any) -> Tensor:
    with torch.no_grad():
        return response_log_probs(
            model,
            input_ids_BS=TOKENS,
            attention_mask_BS=torch.ones_like(TOKENS),
            position_ids_BS=torch.arange(8).expand(2, 8),
            response_width=5,
        ).log_probs_BT.clone()


def stage_of(policy: str, lora: LoraConfig, kind: type[PolicyOptimization] = Watched, **options: Any) -> Any:
    """GRPO with a KL term."""
    return kind(
        policy,
        tokenizer=canned.tokenizer,
        scorer=canned.CannedScorer(),
        sampling=SamplingConfig(max_tokens=20, num_samples=3, temperature=canned.TEMPERATURE),
        optimizer=OptimizerConfig(name="SGD", lr=1.0),
        lora=lora,
        tokens_per_micro_batch=50,
        **{"algorithm": Algorithm(kl=KLConfig(0.1)), "critic": CriticConfig(), **options},
    )


def train(rank: int, name: str, policy: str, adapter: str) -> Training:
    """Train two steps; each rank has the same prompts."""
    stage = stage_of(policy, LoraConfig(**SETTINGS, path=adapter))
    # The ranks have different random numbers.
    torch.manual_seed(rank)
    options: dict[str, Any] = {"accelerator": "cpu", "precision": "32-true"}
    strategy: Any = SingleDeviceRolloutStrategy(rollout=canned.CannedRollout())
    if name != "single":
        options |= {"num_nodes": 2, "devices": 1}
        parallel: dict[str, Any] = {"rollout": canned.CannedRollout(), "timeout_s": 60}
        strategy = ZeroStrategy(stage=3, **parallel) if name == "zero" else FSDPStrategy(**parallel)
    divergences: list[float] = []

    def keep(found: Mapping[str, float]) -> Mapping[str, float]:
        divergences.append(found["train/kl"])
        return {}

    stage.further_metrics.append(keep)
    trainer = canned.quiet_trainer(strategy, **options)
    trainer.fit(stage, canned.loader([canned.prompt_batch(canned.PROMPTS)] * 2))
    weights = {key: tensor.clone() for key, tensor in stage.strategy.weight_source("policy")}
    return Training(stage.first["policy"], stage.first["reference"], divergences, weights)
