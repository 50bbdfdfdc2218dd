"""The in-process engine: exact log-probs, seeds of samples, and every way to end a response."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from threading import Lock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.errors import ConfigError
from rl_plugins.models.tiny import build_model, save_tiny_policy
from rl_plugins.rollout.transformers_engine import TransformersRollout, _draw, _processed_log_probs
from rl_plugins.weights.source import ModuleWeightSource

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [40], [9, 8, 7], [100, 101, 102, 103]]


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return build_model(initializer_range=0.1).eval()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TransformersRollout]:
    folder: Path = save_tiny_policy(tmp_path_factory.mktemp("policy"), initializer_range=0.1)
    engine = TransformersRollout(str(folder), max_batch_size=5)
    engine.connect(0, 1)
    yield engine
    engine.close()


@torch.no_grad()
def next_token_logits(model: torch.nn.Module, prompt: list[int], response: list[int]) -> Tensor:
    """Return the logits of each drawn response token, float32 [T, V]."""
    logits: Tensor = model(input_ids=torch.tensor([prompt + response]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1]


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
def test_generate_returns_the_log_probs_of_a_plain_forward(
    engine: TransformersRollout, model: torch.nn.Module, temperature: float
) -> None:
    sampling = SamplingConfig(max_tokens=9, num_samples=3, temperature=temperature)
    generations = engine.generate(PROMPTS, sampling, [11, 12, 13, 14])
    rows = [prompt for prompt in PROMPTS for _ in range(3)]
    for prompt, response, log_probs in zip(
        rows, generations.responses(), generations.response_log_probs(), strict=True
    ):
        assert len(response) == 9 or response[-1] == engine._model.generation_config.eos_token_id
        expected = (next_token_logits(model, prompt, response) / temperature).log_softmax(-1)
        chosen = expected.gather(-1, torch.tensor(response)[:, None]).squeeze(-1)
        torch.testing.assert_close(torch.tensor(log_probs), chosen, rtol=0, atol=1e-5)


def test_generate_with_a_seed_does_not_depend_on_the_rest_of_the_batch(engine: TransformersRollout) -> None:
    sampling = SamplingConfig(max_tokens=5, num_samples=2)
    together = engine.generate(PROMPTS, sampling, [5, 6, 7, 8]).responses()
    for index, prompt in enumerate(PROMPTS):
        assert engine.generate([prompt], sampling, [5 + index]).responses() == together[2 * index : 2 * index + 2]
    reverse = engine.generate(PROMPTS[::-1], sampling, [8, 7, 6, 5]).responses()
    assert [reverse[i : i + 2] for i in (6, 4, 2, 0)] == [together[i : i + 2] for i in (0, 2, 4, 6)]
    assert together[0] != together[1], "the samples of one prompt must differ"
    assert engine.generate(PROMPTS, sampling, [50, 60, 70, 80]).responses() != together
    assert engine.generate(PROMPTS, sampling, None).responses() != engine.generate(PROMPTS, sampling, None).responses()


def test_generate_ends_at_all_ends_of_the_generation_config(
    engine: TransformersRollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = SamplingConfig(max_tokens=9)
    (whole,) = engine.generate([PROMPTS[0]], sampling, [11]).responses()
    monkeypatch.setattr(engine._model.generation_config, "eos_token_id", [whole[-1], whole[2]])
    generations = engine.generate([PROMPTS[0]], sampling, [11])
    assert generations.responses() == [whole[: whole.index(whole[2]) + 1]]
    assert generations.finish_reasons == ["stop"]


@pytest.mark.parametrize("seeded", [True, False])
def test_draw_follows_the_distribution(seeded: bool) -> None:
    count = 20_000
    log_probs = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05]).log()
    torch.manual_seed(0)
    generators = [torch.Generator().manual_seed(seed) for seed in range(count)] if seeded else None
    drawn = _draw(log_probs.expand(count, -1), 1.0, generators)
    expected = log_probs.exp()
    frequencies = torch.bincount(drawn, minlength=5) / count
    # Five standard deviations of a frequency.
    assert ((frequencies - expected).abs() <= 5 * (expected * (1 - expected) / count).sqrt()).all()


def test_generate_at_temperature_0_takes_the_most_likely_token(
    engine: TransformersRollout, model: torch.nn.Module
) -> None:
    generations = engine.generate(PROMPTS, SamplingConfig(max_tokens=6, temperature=0.0), None)
    for prompt, response in zip(PROMPTS, generations.responses(), strict=True):
        assert response == next_token_logits(model, prompt, response).argmax(-1).tolist()


def test_processed_log_probs_keep_tokens_of_min_p_times_the_largest_probability() -> None:
    logits = 2 * torch.randn(6, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    processed = _processed_log_probs(logits, SamplingConfig(max_tokens=1, min_p=0.2, temperature=0.8)).exp()
    whole = (logits / 0.8).softmax(-1)
    kept = torch.where(whole >= 0.2 * whole.max(-1, keepdim=True).values, whole, 0.0)
    torch.testing.assert_close(processed, kept / kept.sum(-1, keepdim=True))


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (-1, 0.5), (20, 0.3), (1, 1.0), (1000, 1.0), (-1, 1e-6)])
def test_processed_log_probs_keep_top_k_and_top_p_tokens_and_are_normalised(top_k: int, top_p: float) -> None:
    logits = 2 * torch.randn(6, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sampling = SamplingConfig(max_tokens=1, top_k=top_k, top_p=top_p, temperature=0.8)
    processed = _processed_log_probs(logits, sampling)
    torch.testing.assert_close(processed.exp().sum(-1), torch.ones(6, dtype=torch.float64))
    for row, result in zip((logits / 0.8).softmax(-1).tolist(), processed.exp().tolist(), strict=True):
        order = sorted(range(50), key=lambda token: -row[token])[: top_k if top_k > 0 else 50]
        within = sum(row[token] for token in order)
        kept, mass = [], 0.0
        for token in order:
            # The smallest set with a share of top_p: keep while the share of the tokens before is smaller.
            if mass / within < top_p:
                kept.append(token)
            mass += row[token]
        total = sum(row[token] for token in kept)
        expected = [row[token] / total if token in kept else 0.0 for token in range(50)]
        assert result == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_stop_token_ids_end_a_response_and_belong_to_the_response(engine: TransformersRollout) -> None:
    free = engine.generate(PROMPTS, SamplingConfig(max_tokens=8), [1, 2, 3, 4]).responses()
    stops = (free[0][2], free[1][0])
    sampling = SamplingConfig(max_tokens=8, stop_token_ids=stops)
    stopped = engine.generate(PROMPTS, sampling, [1, 2, 3, 4])
    for response, whole, reason in zip(stopped.responses(), free, stopped.finish_reasons, strict=True):
        ends = [position for position, token in enumerate(whole) if token in stops]
        assert response == (whole[: ends[0] + 1] if ends else whole)
        assert reason == ("stop" if ends else "length")
    assert {"stop"} <= set(stopped.finish_reasons)
    assert [len(p) for p in stopped.response_log_probs()] == stopped.lengths.tolist()


def test_generate_without_prompts_returns_no_responses(engine: TransformersRollout) -> None:
    no_seeds: list[int] = []
    for seeds in (None, no_seeds):
        generations = engine.generate([], SamplingConfig(max_tokens=4, num_samples=2), seeds)
        assert generations.responses() == generations.response_log_probs() == []
        assert generations.finish_reasons == []


def test_generate_refuses_stop_strings(engine: TransformersRollout) -> None:
    with pytest.raises(ConfigError, match="stop_token_ids"):
        engine.generate(PROMPTS, SamplingConfig(max_tokens=4, stop=("END",)), None)


def test_update_weights_refuses_the_weights_of_another_model(engine: TransformersRollout) -> None:
    before = engine.prompt_log_probs([5, 6, 7])
    wider = build_model(intermediate_size=128)
    with pytest.raises(ConfigError, match=r"mlp.*\[128, 128\], and the rollout engine's model .* has a parameter of"):
        engine.update_weights(ModuleWeightSource(wider), 1)
    with pytest.raises(ConfigError, match=r"has no such parameter: start both from one model"):
        engine.update_weights(ModuleWeightSource(torch.nn.ModuleDict({"lm": build_model()})), 1)
    assert engine.prompt_log_probs([5, 6, 7]) == before


def test_update_weights_changes_the_weights_and_the_version(tmp_path: Path) -> None:
    engine = TransformersRollout(str(save_tiny_policy(tmp_path, initializer_range=0.1)))
    engine.connect(0, 1)
    sampling = SamplingConfig(max_tokens=5, temperature=0.0)
    before = engine.generate(PROMPTS, sampling, None)
    other = build_model(initializer_range=0.1, seed=9)
    engine.update_weights(ModuleWeightSource(other), version=3)
    after = engine.generate(PROMPTS, sampling, None)
    assert [set(one.policy_versions.tolist()) for one in (before, after)] == [{0}, {3}]
    for prompt, response, log_probs in zip(PROMPTS, after.responses(), after.response_log_probs(), strict=True):
        expected = next_token_logits(other, prompt, response).log_softmax(-1)
        chosen = expected.gather(-1, torch.tensor(response)[:, None]).squeeze(-1)
        torch.testing.assert_close(torch.tensor(log_probs), chosen, rtol=0, atol=1e-5)


def fail(*arguments: object) -> None:
    raise AssertionError("a hook was called")


def test_model_in_memory_samples_as_the_model_of_a_folder(engine: TransformersRollout) -> None:
    model = build_model(initializer_range=0.1)
    for module in model.modules():
        # Locks cannot be copied.
        module.register_forward_hook(partial(fail, Lock()))
        module.register_forward_pre_hook(partial(fail, Lock()))
    in_memory = TransformersRollout(model)
    with torch.no_grad():
        model.model.norm.weight.zero_()
    in_memory.connect(0, 1)
    sampling = SamplingConfig(max_tokens=5, num_samples=2)
    expected = engine.generate(PROMPTS, sampling, [5, 6, 7, 8])
    assert in_memory.generate(PROMPTS, sampling, [5, 6, 7, 8]).responses() == expected.responses()


def test_object_that_cannot_be_copied_as_a_policy_is_refused() -> None:
    module = torch.nn.ModuleDict({"model": build_model()})
    with pytest.raises(ConfigError, match=r"got a ModuleDict without the config .* pass the folder .* or a"):
        TransformersRollout(module)
    with pytest.raises(ConfigError, match=r"got a model with an adapter, .* pass the folder .* of the base model"):
        TransformersRollout(get_peft_model(build_model(), LoraConfig(target_modules="all-linear")))


def test_generate_refuses_a_response_beyond_the_positions_of_the_model() -> None:
    config = GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1)
    engine = TransformersRollout(GPT2LMHeadModel(config))
    engine.connect(0, 1)
    # The last token of a response has no position, because nothing follows.
    assert engine.generate([[1, 2], [3]], SamplingConfig(max_tokens=7), None).responses()
    with pytest.raises(ConfigError, match=r"a prompt of 2 tokens .* max_tokens=8, .* than the 8 positions"):
        engine.generate([[1, 2], [3]], SamplingConfig(max_tokens=8), None)
