"""Training with emulated 8-bit products: near to training in float32, with the same names and dtypes of weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch import Callback
from safetensors.torch import load_file
from torch import Tensor

from rl_plugins.config.models import OptimizerConfig
from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.models.float8 import has_float8
from rl_plugins.models.tiny import save_tiny_policy
from rl_plugins.stages.sft import SFT
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.strategies.zero import ZeroStrategy
from rl_plugins.tests.models.emulated_float8 import emulated_float8
from rl_plugins.tests.ranks import run_ranks
from rl_plugins.tests.stages import canned
from rl_plugins.tests.strategies import fsdp_runs
from rl_plugins.tests.strategies.fsdp_runs import ALONE, TWO, Layout, Weights
from rl_plugins.weights.source import WeightMeta

SINGLE = ALONE.on_single_device()
LAYOUTS: dict[str, Layout] = {"single": SINGLE, "zero-3": TWO, "fsdp": TWO}
MAKE: dict[str, Callable[[], Any]] = {
    "zero-3": lambda: ZeroStrategy(stage=3, timeout_s=100, rollout=canned.CannedRollout())
}


class Trained(NamedTuple):
    """Results of two steps of PPO: weights, names of the models with 8-bit products, and the sent tensors."""

    policy: Weights
    critic: Weights
    models: set[str]
    sent: list[WeightMeta]


def train(rank: int, name: str, folder: Path, options: dict[str, Any]) -> Trained:
    strategy = MAKE[name]() if name in MAKE else None
    with emulated_float8():
        stage = fsdp_runs.trained(LAYOUTS[name], rank, folder, strategy=strategy, **options)
    models = {key for key, model in stage.named_models().items() if has_float8(model)}
    used: Any = stage.strategy
    return Trained(*stage.course[-1][:2], models, used.weight_source().metadata())


def results_of(name: str, folder: Path, **options: Any) -> Trained:
    trained: Trained = run_ranks(train, name, folder, options, world_size=LAYOUTS[name].world_size)[0][0]
    return trained


def change_of(weights: Weights, start: Weights) -> Tensor:
    return torch.cat([(weights[key] - weight).flatten() for key, weight in start.items()])


@pytest.mark.parametrize(("name", "scales"), [("single", "rowwise"), ("zero-3", "tensorwise"), ("fsdp", "tensorwise")])
def test_8_bit_products_train_policy_and_critic_like_float32(tmp_path: Path, name: str, scales: str) -> None:
    """The change of all weights differs from that of float32 by less than 0.6 of its norm."""
    pytest.importorskip("torchao")
    save_tiny_policy(tmp_path / "policy", **fsdp_runs.EVEN_SIZES | {"intermediate_size": 48})
    start = load_file(tmp_path / "policy" / "model.safetensors")
    plain = results_of("single", tmp_path)
    found = results_of(name, tmp_path, float8=scales, gradient_checkpointing=True)
    assert plain.models == set() and found.models == {"policy", "critic"}
    assert found.sent == plain.sent and found.critic.keys() == plain.critic.keys()
    expected, change = change_of(plain.policy, start), change_of(found.policy, start)
    assert 1e-3 < float((change - expected).norm() / expected.norm()) < 0.6


class Losses(Callback):
    """Keeps the loss of each step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
        self.values.append(float(trainer.callback_metrics["train/loss"]))


def losses_of(folder: Path, float8: str | None) -> list[float]:
    stage = SFT(
        str(folder),
        tokenizer=canned.tokenizer,
        scorer=canned.CannedScorer(),
        eval_sampling=SamplingConfig(max_tokens=4),
        optimizer=OptimizerConfig(lr=3e-3),
        tokens_per_micro_batch=40,
        float8=float8,
    )
    losses = Losses()
    trainer = canned.quiet_trainer(SingleDeviceRolloutStrategy(), accelerator="cpu", devices=1, callbacks=[losses])
    batch = {
        "prompt_ids": [canned.tokenizer.encode(prompt) for prompt in canned.PROMPTS],
        "response_ids": [canned.tokenizer.encode(canned.RESPONSES[prompt][0]) for prompt in canned.PROMPTS],
    }
    with emulated_float8():
        trainer.fit(stage, canned.loader([batch] * 8))
    return losses.values


def test_loss_falls_with_8_bit_products_as_in_float32(tmp_path: Path) -> None:
    """After eight steps, the losses differ by less than a tenth of the fall."""
    pytest.importorskip("torchao")
    save_tiny_policy(tmp_path / "policy", **fsdp_runs.EVEN_SIZES | {"intermediate_size": 48})
    plain = losses_of(tmp_path / "policy", None)
    found = losses_of(tmp_path / "policy", "tensorwise")
    fall = plain[0] - plain[-1]
    assert fall > 0.3 and found[0] != plain[0]
    assert abs(found[-1] - plain[-1]) < 0.1 * fall, (plain, found)
