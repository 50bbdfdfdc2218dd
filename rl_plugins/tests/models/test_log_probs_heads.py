"""last_linear_head finds heads whose output is the logits, and response_log_probs equals plain logits for any head."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl_plugins.data.experience import computed
from rl_plugins.models import log_probs as module
from rl_plugins.models.log_probs import last_linear_head, replaced_forward, response_log_probs
from rl_plugins.tests.loops import for_each
from rl_plugins.tests.models.memory import at_once
from rl_plugins.tests.models.samples import VOCABULARY, batch_of, forward_arguments, random_samples, tiny

LENGTHS = [(5, 4), (1, 6), (7, 1), (3, 6), (2, 0)]


class ModelOfAUser(nn.Module):
    """A module with the forward of a causal language model and no other method of the class."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny("Qwen2")

    def forward(self, **inputs: Any) -> Any:
        return SimpleNamespace(logits=2 * self.model(**inputs).logits)


class WithAnother(nn.Module):
    """Qwen2 with logits changed by `change`."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.model, self.change = tiny("Qwen2"), change

    def get_output_embeddings(self) -> Any:
        return self.model.get_output_embeddings()

    def forward(self, **inputs: Any) -> Any:
        return SimpleNamespace(logits=self.change(self.model(**inputs).logits))


class ScaledLinear(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        return 3 * super().forward(hidden)


def with_head(head: nn.Module) -> Any:
    model = tiny("Llama")
    model.lm_head = head.double()
    return model


PLAIN = {
    "qwen2": lambda: tiny("Qwen2"),
    "qwen2, tied": lambda: tiny("Qwen2", tie_word_embeddings=True),
    "llama with a bias": lambda: with_head(nn.Linear(32, VOCABULARY)),
    "gemma2 without a cap": lambda: tiny("Gemma2", query_pre_attn_scalar=8, final_logit_softcapping=None),
    "cohere, scaled by one": lambda: tiny("Cohere", logit_scale=1.0),
    "granite, scaled by one": lambda: tiny("Granite", logits_scaling=1.0),
    "a cast after the head": lambda: WithAnother(lambda logits: logits.clone().double()),
}
CHANGED = {
    "gemma2": lambda: tiny("Gemma2", query_pre_attn_scalar=8, final_logit_softcapping=2.0),
    "gemma2, a wide cap": lambda: tiny("Gemma2", query_pre_attn_scalar=8, final_logit_softcapping=1e5),
    "cohere": lambda: tiny("Cohere", logit_scale=0.0625),
    "granite": lambda: tiny("Granite", logits_scaling=4.0),
    "falcon h1's multiplier": lambda: WithAnother(lambda logits: logits * 1.5),
    "in place": lambda: WithAnother(lambda logits: logits.mul_(0.5)),
    "a forbidden token": lambda: WithAnother(lambda logits: logits.index_fill(-1, torch.tensor([3]), -1e4)),
    "a vocabulary cut off": lambda: WithAnother(lambda logits: torch.cat([logits, logits[..., :2]], dim=-1)),
    "a head of a user": lambda: with_head(ScaledLinear(32, VOCABULARY)),
    "a head in two parts": lambda: with_head(nn.Sequential(nn.Linear(32, 8), nn.Linear(8, VOCABULARY))),
    "no head that is known": ModelOfAUser,
}


def inputs_of(batch: Any) -> dict[str, Tensor]:
    return {
        "input_ids": batch.input_ids,
        "attention_mask": batch.attention_mask,
        "position_ids": batch.position_ids,
    }


@pytest.mark.parametrize("name", PLAIN)
def test_last_linear_head_finds_a_plain_head(name: str) -> None:
    model = PLAIN[name]()
    head = last_linear_head(model, inputs_of(batch_of(random_samples(*LENGTHS))))
    assert head is not None and head is model.get_output_embeddings()
    assert "forward" not in head.__dict__


@pytest.mark.parametrize("name", CHANGED)
def test_last_linear_head_is_none_when_logits_are_changed_after_the_head(name: str) -> None:
    assert last_linear_head(CHANGED[name](), inputs_of(batch_of(random_samples(*LENGTHS)))) is None


def test_last_linear_head_leaves_a_replaced_forward_alone() -> None:
    model = tiny("Qwen2")
    original = model.lm_head.forward
    model.lm_head.forward = lambda hidden: 2 * original(hidden)
    assert last_linear_head(model, inputs_of(batch_of(random_samples(*LENGTHS)))) is None
    assert "forward" in model.lm_head.__dict__


def test_last_linear_head_runs_the_model_once_and_keeps_the_random_state() -> None:
    model, inputs = tiny("Qwen2", attention_dropout=0.5).train(), inputs_of(batch_of(random_samples(*LENGTHS)))
    passes: list[tuple[bool, tuple[int, ...]]] = []
    model.register_forward_pre_hook(
        lambda _, __, arguments: passes.append((torch.is_grad_enabled(), (*arguments["input_ids"].shape,))),
        with_kwargs=True,
    )
    torch.manual_seed(5)
    before = torch.get_rng_state()
    for _ in range(3):
        last_linear_head(model, inputs)
    # A mask of all pairs of tokens of a long row would not fit.
    assert passes == [(False, (1, 2))]
    assert torch.equal(torch.get_rng_state(), before)


def test_replaced_forward_restores_the_forward_after_an_error() -> None:
    head = nn.Linear(2, 3)
    with pytest.raises(ZeroDivisionError), replaced_forward(head, lambda hidden: hidden / 0 / (1 // 0)):
        head(torch.ones(2))
    assert "forward" not in head.__dict__
    assert head(torch.ones(2)).shape == (3,)


def plain_columns(model: Any, samples: Any, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Compute log-probs, entropy and sum of squares of response tokens from the logits of all positions."""
    # Padded as in the function under test: some families round to float32 inside, differently for each shape.
    logits_BSV = model(**inputs_of(batch_of(samples)), use_cache=False, logits_to_keep=0).logits
    prompt_width = max(len(prompt) for prompt, _ in samples)
    parts = []
    for logits, (_, response) in zip(logits_BSV, samples, strict=True):
        predicting = logits[prompt_width - 1 : prompt_width - 1 + len(response)]
        log_pi = (predicting / temperature).log_softmax(dim=-1)
        chosen = log_pi.gather(-1, torch.tensor(response, dtype=torch.int64)[:, None]).squeeze(-1)
        parts.append((chosen, -(log_pi.exp() * log_pi).sum(dim=-1), (2 * log_pi).exp().sum(dim=-1)))
    log_probs, entropy, squares = (torch.cat(column) for column in zip(*parts, strict=True))
    return log_probs, entropy, squares


@pytest.mark.parametrize("name", [*PLAIN, *CHANGED])
@for_each("rows", [1, 4, 1000])
def test_response_log_probs_equal_plain_logits_for_any_head(
    monkeypatch: pytest.MonkeyPatch, name: str, rows: int
) -> None:
    monkeypatch.setattr(module, "logits_at_once", at_once(rows * VOCABULARY))
    model = (PLAIN | CHANGED)[name]()
    samples = random_samples(*LENGTHS)
    batch = batch_of(samples)
    result = response_log_probs(
        model, **forward_arguments(batch), temperature=0.7, sum_pi_squared=True, entropy_gradient=True
    )
    assert result.sum_pi_squared_BT is not None
    assert all(tensor.isfinite().all() for tensor in vars(result).values() if tensor is not None)
    assert not result.sum_pi_squared_BT.requires_grad
    mask = batch.response_mask.bool()
    got = [result.log_probs_BT[mask], computed(result.entropy_BT)[mask], result.sum_pi_squared_BT[mask]]
    expected = plain_columns(model, samples, 0.7)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    weights = torch.randn(2, len(got[0]), dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    parameters = list(model.parameters())

    def gradients(log_probs: Tensor, entropy: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad((weights[0] * log_probs + weights[1] * entropy).sum(), parameters)

    for one, other in zip(gradients(*got[:2]), gradients(*expected[:2]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@for_each("gradient", [False, True])
def test_response_log_probs_pass_only_predicting_positions_to_the_head(
    monkeypatch: pytest.MonkeyPatch, gradient: bool
) -> None:
    """The hidden states of padding are NaN, and no value and no gradient becomes NaN."""
    monkeypatch.setattr(module, "logits_at_once", at_once(3 * VOCABULARY))
    model, samples = tiny("Qwen2"), random_samples(*LENGTHS)
    batch = batch_of(samples)
    expected = plain_columns(model, samples, 1.0)[0]
    width, lengths = batch.responses.shape[1], [len(response) for _, response in samples]

    def spoil(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        assert inputs[0].shape[1] == width + 1
        hidden = inputs[0].clone()
        for row, length in enumerate(lengths):
            hidden[row, length:] = torch.nan
        return (hidden,)

    last_linear_head(model, inputs_of(batch))
    model.lm_head.register_forward_pre_hook(spoil)
    with torch.set_grad_enabled(gradient):
        result = response_log_probs(model, **forward_arguments(batch))
    torch.testing.assert_close(result.log_probs_BT[batch.response_mask.bool()], expected, rtol=1e-10, atol=1e-10)
    if gradient:
        result.log_probs_BT.sum().backward()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("name", ["qwen2", "gemma2"])
@for_each("width", [0, 3])
def test_response_log_probs_without_response_tokens_have_a_zero_gradient(name: str, width: int) -> None:
    """Every rank takes part in the collectives of a backward pass, also a rank without response tokens."""
    model = (PLAIN | CHANGED)[name]()
    batch = batch_of(random_samples((3, 0), (5, 0)))
    ids = torch.nn.functional.pad(batch.input_ids, (0, width))
    mask = torch.nn.functional.pad(batch.attention_mask, (0, width))
    positions = torch.nn.functional.pad(batch.position_ids, (0, width))
    result = response_log_probs(
        model, input_ids_BS=ids, attention_mask_BS=mask, position_ids_BS=positions, response_width=width
    )
    assert result.log_probs_BT.shape == (2, width)
    (0 * result.log_probs_BT).sum().backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())
