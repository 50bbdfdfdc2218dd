"""Losses of routers: the gradient of the definition, any micro-batches and ranks, resumed runs, and metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.tiny_families import save_tiny_family
from rl_plugins.callbacks.compiled_blocks import CompiledBlocks
from rl_plugins.callbacks.router_losses import RouterLosses
from rl_plugins.config.models import OptimizerConfig
from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.errors import ConfigError
from rl_plugins.models.tiny import save_tiny_policy
from rl_plugins.stages.sft import SFT
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.tests.models.memory import LargestMemory
from rl_plugins.tests.ranks import run_ranks
from rl_plugins.tests.stages import canned

BATCH = {
    "prompt_ids": [[5, 6, 7], [8, 9], [10], [11, 12, 13, 14]],
    "response_ids": [[20, 21], [22, 23, 24], [25, 26, 27, 28], [29]],
}


def stage_of(folder: Path, *, steps: int = 2, checkpointing: bool = False, **options: Any) -> tuple[Any, Any]:
    """Return a mixture of experts that hardly changes in a step, and a stage that trains the mixture."""
    own = canned.mixture_policy(folder, lr=1e-9)
    if checkpointing:
        own.model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    stage = SFT(
        own,
        tokenizer=canned.tokenizer,
        scorer=canned.CannedScorer(),
        eval_sampling=SamplingConfig(max_tokens=4),
        optimizer=OptimizerConfig(gradient_clip=0.0),
        max_steps=steps,
        **options,
    )
    return own, stage


def fit(stage: Any, callback: RouterLosses | None, batches: list[Any], strategy: Any = None) -> None:
    """Train a stage on batches."""
    strategy = strategy or SingleDeviceRolloutStrategy(rollout=canned.CannedRollout())
    trainer = canned.quiet_trainer(strategy, callbacks=[callback] if callback else [])
    trainer.fit(stage, canned.loader(batches))


def trained(
    folder: Path, callback: RouterLosses | None, *, steps: int = 2, rank: int = 0, world_size: int = 1, **options: Any
) -> tuple[Any, Any]:
    """Train on the batch in each step; return the policy and the metrics of the last step."""
    own, stage = stage_of(folder, steps=steps, **options)
    metrics = canned.metrics_of(stage)
    strategy = canned.AllReduceStrategy(rank, world_size, rollout=canned.CannedRollout()) if world_size > 1 else None
    batch = {name: rows[rank::world_size] for name, rows in BATCH.items()}
    fit(stage, callback, [batch] * steps, strategy)
    return own, metrics


def trained_rank(rank: int, folder: Path) -> tuple[list[Tensor], dict[str, float]]:
    """Return the gradients of the second step, and the metrics, of one of two ranks."""
    own, metrics = trained(folder, RouterLosses(balance=0.5, z=0.25), rank=rank, world_size=2)
    return own.recorder.gradients[1], dict(metrics)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    save_tiny_family("qwen3_moe", folder)
    return folder


def plain_losses(model: Any) -> tuple[Tensor, Tensor]:
    """Return the balance loss and the z-loss of all tokens of the batch, sequence by sequence."""
    by_layer: list[list[Tensor]] = [[] for _ in model.model.layers]
    for prompt, response in zip(*BATCH.values(), strict=True):
        found = model(torch.tensor([prompt + response]), output_router_logits=True).router_logits
        for logits, layer in zip(found, by_layer, strict=True):
            layer.append(logits)
    balance, z = [], []
    for layer in by_layer:
        logits_NE = torch.cat(layer)
        probabilities_NE = logits_NE.softmax(dim=-1)
        counts_E = probabilities_NE.topk(2).indices.flatten().bincount(minlength=4)
        balance.append(4 * (counts_E / counts_E.sum() * probabilities_NE.mean(dim=0)).sum())
        z.append(logits_NE.logsumexp(dim=-1).square().mean())
    return torch.stack(balance).mean(), torch.stack(z).mean()


def assert_same(gradients: list[Tensor], expected: list[Tensor], tolerance: float = 1e-4) -> None:
    for one, other in zip(gradients, expected, strict=True):
        assert float((one - other).abs().max()) <= tolerance * float(other.abs().max()) + 1e-8


def test_router_losses_add_the_gradients_of_the_definition_from_the_second_step(folder: Path) -> None:
    plain, _ = trained(folder, None)
    own, metrics = trained(folder, RouterLosses(balance=0.5, z=0.25))
    assert_same(own.recorder.gradients[0], plain.recorder.gradients[0])
    balance, z = plain_losses(own.model)
    parameters = list(own.model.parameters())
    added = torch.autograd.grad(0.5 * balance + 0.25 * z, parameters, allow_unused=True, materialize_grads=True)
    expected = [one + other for one, other in zip(plain.recorder.gradients[1], added, strict=True)]
    assert_same(own.recorder.gradients[1], expected)
    assert any(not torch.allclose(one, other) for one, other in zip(expected, plain.recorder.gradients[1], strict=True))
    assert metrics["train/router_balance"] == pytest.approx(float(balance), rel=1e-4)
    assert metrics["train/router_z"] == pytest.approx(float(z), rel=1e-4)
    assert 1 <= metrics["train/router_load"] <= 2 and 0 < metrics["train/router_entropy"] <= 1.387


def test_router_losses_count_the_choices_of_a_router_with_a_bias(tmp_path: Path) -> None:
    model = save_tiny_family("deepseek_v3", tmp_path)
    config = model.config
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer[0] = 100.0
    stage = SFT(
        model,
        tokenizer=canned.tokenizer,
        scorer=canned.CannedScorer(),
        eval_sampling=SamplingConfig(max_tokens=4),
        max_steps=1,
    )
    fit(stage, RouterLosses(balance=0.5), [BATCH])
    # The first expert is among the experts of each token.
    load = float(stage.trainer.callback_metrics["train/router_load"])
    assert load == pytest.approx(config.n_routed_experts / config.num_experts_per_tok)


@pytest.mark.parametrize(
    "options",
    [
        {"tokens_per_micro_batch": 8},
        {"packing": False},
        {"packing": False, "tokens_per_micro_batch": 10},
        {"checkpointing": True},
    ],
    ids=str,
)
def test_router_losses_do_not_depend_on_micro_batches_and_packing(folder: Path, options: dict[str, Any]) -> None:
    expected, expected_metrics = trained(folder, RouterLosses(balance=0.5, z=0.25))
    own, metrics = trained(folder, RouterLosses(balance=0.5, z=0.25), **options)
    assert_same(own.recorder.gradients[1], expected.recorder.gradients[1])
    for name in ("balance", "z", "load", "entropy"):
        assert metrics[f"train/router_{name}"] == pytest.approx(expected_metrics[f"train/router_{name}"], rel=1e-4)


def test_router_losses_keep_no_activations_of_recomputed_blocks(folder: Path, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(folder)
    config.num_hidden_layers, config.layer_types = 6, None
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    prompts = [[5 + token % 50 for token in range(500)]] * 2
    long = {"prompt_ids": prompts, "response_ids": [[20, 21], [22]]}

    def largest_memory(callback: RouterLosses | None) -> int:
        _, stage = stage_of(tmp_path, checkpointing=True, packing=False)
        with LargestMemory() as memory:
            fit(stage, callback, [long] * 2)
        return memory.bytes

    plain, with_losses = largest_memory(None), largest_memory(RouterLosses(balance=0.5, z=0.25))
    assert with_losses < 1.1 * plain, (plain, with_losses)


def test_router_losses_of_ranks_equal_the_losses_of_the_whole_batch(folder: Path) -> None:
    expected, expected_metrics = trained(folder, RouterLosses(balance=0.5, z=0.25))
    for (gradients, metrics), _ in run_ranks(trained_rank, folder, world_size=2):
        assert_same(gradients, expected.recorder.gradients[1])
        assert metrics["train/router_balance"] == pytest.approx(expected_metrics["train/router_balance"], rel=1e-4)


def test_router_losses_go_on_from_a_checkpoint(folder: Path) -> None:
    whole, _ = trained(folder, RouterLosses(balance=0.5, z=0.25))
    first = RouterLosses(balance=0.5, z=0.25)
    trained(folder, first, steps=1)
    resumed = RouterLosses(balance=0.5, z=0.25)
    resumed.load_state_dict(first.state_dict())
    own, _ = trained(folder, resumed, steps=1)
    assert_same(own.recorder.gradients[0], whole.recorder.gradients[1])


def test_router_losses_count_once_in_the_run_after_an_error(folder: Path) -> None:
    whole, _ = trained(folder, RouterLosses(balance=0.5, z=0.25))

    def fail(metrics: Any) -> Any:
        raise OSError("a disk is full")

    callback, (own, stage) = RouterLosses(balance=0.5, z=0.25), stage_of(folder)
    stage.further_metrics.append(fail)
    with pytest.raises(OSError, match="a disk is full"):
        fit(stage, callback, [BATCH])
    stage.further_metrics.remove(fail)
    fit(stage, callback, [BATCH])
    assert_same(own.recorder.gradients[0], whole.recorder.gradients[1])
    assert not stage.further_losses and not stage.further_metrics


def test_router_losses_refuse_passes_with_tokens_of_several_ranks(folder: Path) -> None:
    own, stage = stage_of(folder)
    canned.NoTokens(own.model)
    with pytest.raises(ConfigError, match="router_losses has not been tried with tensor_parallel and sequence_paralle"):
        fit(stage, RouterLosses(balance=0.5), [BATCH])


def test_router_losses_refuse_compiled_blocks(folder: Path) -> None:
    _, stage = stage_of(folder)
    trainer = canned.quiet_trainer(
        SingleDeviceRolloutStrategy(rollout=canned.CannedRollout()), callbacks=[CompiledBlocks(), RouterLosses()]
    )
    with pytest.raises(ConfigError, match="leave router_losses or CompiledBlocks out"):
        trainer.fit(stage, canned.loader([BATCH]))


def test_router_losses_refuse_a_dense_model(tmp_path: Path) -> None:
    save_tiny_policy(tmp_path, hidden_size=32, intermediate_size=48)
    with pytest.raises(ConfigError, match="router_losses: the model is not a mixture of experts"):
        trained(tmp_path, RouterLosses(balance=0.5))
