"""SFT on conversations: the loss counts the tokens of the policy alone, packed and padded; val/loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl_plugins.config.models import OptimizerConfig
from rl_plugins.data.sft import SFTDataModule
from rl_plugins.models.tiny import build_model
from rl_plugins.stages.forward_passes import ForwardPasses
from rl_plugins.stages.sft import SFT
from rl_plugins.strategies.fsdp import FSDPStrategy
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.tests.loops import for_each
from rl_plugins.tests.ranks import run_ranks
from rl_plugins.tests.stages import canned

TALKS = [
    ["1+1", "2"],
    ["12+30", "forty-two", "and 4+4?", "8."],
    ["7", "abcd", "e", "f", "a longer question", "yes"],
]


def batch_of_talks() -> dict[str, list[Any]]:
    roles = ("user", "assistant")
    rows = [
        {"messages": [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]}
        for texts in TALKS
    ]
    data = SFTDataModule(rows, tokenizer=canned.tokenizer, prompts_per_step=3, messages_key="messages")
    data.setup("fit")
    batch: dict[str, list[Any]] = data.sources["train"].batch(range(len(rows)), 0)
    return batch


def stage_of(own: Any, **options: Any) -> SFT:
    return SFT(own, tokenizer=canned.tokenizer, optimizer=OptimizerConfig(gradient_clip=0.0), **options)


def gradients(batch: dict[str, list[Any]], **options: Any) -> tuple[list[Tensor], float]:
    """Return the gradients and the loss of one step."""
    own = canned.OwnPolicy()
    stage = stage_of(own, **options)
    metrics = canned.metrics_of(stage)
    trainer = canned.quiet_trainer(SingleDeviceRolloutStrategy(), precision="64-true")
    trainer.fit(stage, canned.loader([batch]))
    (found,) = own.recorder.gradients
    return [gradient.clone() for gradient in found], metrics["train/loss"]


def loss_of_replies(model: Any) -> Tensor:
    """Return the mean loss of the tokens of replies, from the template's marks of these tokens."""
    terms = []
    for texts in TALKS:
        messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
        whole = canned.tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = torch.tensor(whole["input_ids"]), torch.tensor(whole["assistant_masks"]).bool()
        terms.append(nn.functional.cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="none")[mask[1:]])
    return torch.cat(terms).mean()


@for_each(("budget", "packing"), [(10**6, True), (10**6, False), (40, True), (60, False)])
def test_sft_learns_the_tokens_of_replies_alone_packed_and_padded(budget: int, packing: bool) -> None:
    model = canned.OwnPolicy().model
    loss = loss_of_replies(model)
    expected = torch.autograd.grad(loss, list(model.parameters()))
    found, reported = gradients(batch_of_talks(), tokens_per_micro_batch=budget, packing=packing)
    assert reported == pytest.approx(float(loss.detach()), rel=1e-6)
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-6, atol=1e-9)


def test_sft_runs_a_pass_without_gradients_on_a_rank_with_fewer_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = gradients(batch_of_talks())
    plain, none = ForwardPasses.micro_batches, torch.zeros(0, dtype=torch.int64)
    monkeypatch.setattr(ForwardPasses, "micro_batches", lambda *arguments: [*plain(*arguments), none])
    found, _ = gradients(batch_of_talks())
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-9, atol=1e-12)


def steps_of(rank: int, world_size: int) -> dict[str, float]:
    """Train a step and validate under FSDP2, with most samples on the first rank; return the metrics."""
    split = len(batch_of_talks()["prompt_ids"]) if world_size == 1 else 2
    own = slice(split) if rank == 0 else slice(split, None)
    batch = {name: values[own] for name, values in batch_of_talks().items()}
    stage = stage_of(build_model(hidden_size=32, initializer_range=0.2), tokens_per_micro_batch=20)
    metrics = canned.metrics_of(stage)
    strategy = FSDPStrategy(timeout_s=60) if world_size > 1 else SingleDeviceRolloutStrategy()
    trainer = canned.quiet_trainer(strategy, accelerator="cpu", devices=1, num_nodes=world_size)
    trainer.fit(stage, canned.loader([batch]), canned.loader([batch]))
    return {name: metrics[name] for name in ("train/loss", "train/gradient_norm", "val/loss")}


def test_sft_with_unequal_ranks_is_sft_on_one_rank() -> None:
    expected = steps_of(0, 1)
    for found, _ in run_ranks(steps_of, 2):
        assert found == pytest.approx(expected, rel=1e-4)


def test_sft_measures_the_loss_of_given_responses_in_validation() -> None:
    batch = batch_of_talks()
    nothing: dict[str, list[Any]] = {name: [] for name in batch}
    halves = [
        {name: values[:1] for name, values in batch.items()},
        {name: values[1:] for name, values in batch.items()},
    ]
    for batches in ([batch], [*halves, nothing]):
        own = canned.OwnPolicy()
        expected = float(loss_of_replies(own.model).detach())
        stage = stage_of(own, tokens_per_log_prob_batch=40)
        metrics = canned.metrics_of(stage)
        trainer = canned.quiet_trainer(SingleDeviceRolloutStrategy(), precision="64-true")
        trainer.validate(stage, canned.loader(batches), verbose=False)
        assert metrics["val/loss"] == pytest.approx(expected, rel=1e-6)
