"""Tokens and arithmetic of a step, counted by hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from benchmarks.tiny_families import save_tiny_family
from rl_plugins.callbacks.throughput import PEAK_TFLOPS, Throughput, flops_per_token, known_peak
from rl_plugins.config.models import LoraConfig
from rl_plugins.models.lora import add_adapter
from rl_plugins.models.tiny import build_model
from rl_plugins.stages.policy_optimization import PolicyOptimization
from rl_plugins.tests.callbacks.training import build_stage, train
from rl_plugins.tests.cases import case
from rl_plugins.tests.stages import canned


@pytest.mark.parametrize("packing", [True, False])
def test_throughput_counts_trained_and_sampled_tokens_and_flops(packing: bool) -> None:
    budget = 1000 if packing else 20
    stage = build_stage(4, packing=packing, updates_per_step=2, passes_per_step=2, tokens_per_micro_batch=budget)
    _, log = train(stage, [Throughput(peak_tflops=2.0)])
    texts = [(prompt, response) for prompt, responses in canned.RESPONSES.items() for response in responses]
    lengths = {pair: sum(len(canned.tokenizer.encode(text)) for text in pair) for pair in texts}
    # Packed, a prompt runs once for its samples.
    prompts = [len(canned.tokenizer.encode(prompt)) for prompt, _ in texts]
    spared = [length - length / 3 for length in prompts] if packing else [0]
    spared_squares = [length**2 - length**2 / 3 for length in prompts] if packing else [0]
    rows = [row for _, row in log.rows]
    trained = [row for row in rows if "throughput/mfu" in row]
    timed = [row for row in rows if "time/step" in row]
    assert len(trained) == 4
    # Two passes over all prompts. Each prompt comes twice in an epoch.
    tokens = [
        row["throughput/trained_tokens_per_s"] * own["time/step"] for row, own in zip(trained, timed, strict=True)
    ]
    assert sum(tokens) == pytest.approx(4 * (sum(lengths.values()) - sum(spared)))
    responses = sum(len(canned.tokenizer.encode(response)) for _, response in texts)
    sampled = [
        row["throughput/sampled_tokens_per_s"] * own["time/rollout"] for row, own in zip(trained, timed, strict=True)
    ]
    assert sum(sampled) == pytest.approx(2 * responses)
    matrices, attention = flops_per_token(stage.policy)
    flops = sum(
        row["throughput/mfu"] * own["time/update_policy"] * 2e12 for row, own in zip(trained, timed, strict=True)
    )
    run = sum(lengths.values()) - sum(spared)
    pairs = sum(length**2 for length in lengths.values()) - sum(spared_squares)
    assert flops == pytest.approx(4 * (run * matrices + pairs * attention))
    assert not stage.policy._forward_pre_hooks


def test_throughput_without_a_known_peak_logs_no_mfu() -> None:
    _, log = train(build_stage(1), [Throughput()])
    names = {name for _, row in log.rows for name in row if name.startswith("throughput/")}
    assert names == {"throughput/trained_tokens_per_s", "throughput/sampled_tokens_per_s"}
    assert known_peak(torch.device("cpu")) is None


def test_throughput_has_mfu_again_after_a_vision_language_model(monkeypatch: pytest.MonkeyPatch) -> None:
    callback = Throughput(peak_tflops=2.0)
    for vision in (True, False):
        monkeypatch.setattr("rl_plugins.callbacks.throughput.is_vision_language", lambda _, found=vision: found)
        _, log = train(build_stage(1), [callback])
        with case(f"vision: {vision}"):
            assert any("throughput/mfu" in row for _, row in log.rows) == (not vision)


def trained_tokens(stage: PolicyOptimization, callback: Throughput) -> float:
    """Train; return the number of tokens that the callback counted."""
    rows = [row for _, row in train(stage, [callback])[1].rows]
    rates = [row["throughput/trained_tokens_per_s"] for row in rows if "throughput/trained_tokens_per_s" in row]
    times = [row["time/step"] for row in rows if "time/step" in row]
    return sum(rate * time for rate, time in zip(rates, times, strict=True))


def test_throughput_counts_once_in_the_run_after_an_error() -> None:
    def fail(metrics: Mapping[str, float]) -> dict[str, float]:
        raise OSError("a disk is full")

    callback, stage = Throughput(), build_stage(2)
    stage.further_metrics.append(fail)
    with pytest.raises(OSError, match="a disk is full"):
        train(stage, [callback])
    stage.further_metrics.remove(fail)
    assert trained_tokens(stage, callback) == pytest.approx(trained_tokens(build_stage(1), Throughput()))
    assert not stage.policy._forward_pre_hooks and not stage.further_metrics


def test_flops_per_token_by_hand() -> None:
    tied = build_model(hidden_size=32, intermediate_size=48)
    config = tied.config
    assert config.tie_word_embeddings
    matrices, attention = flops_per_token(tied)
    assert matrices == 6 * sum(p.numel() for p in tied.parameters())
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    assert attention == 12 * config.num_hidden_layers * config.num_attention_heads * width
    adapted = add_adapter(build_model(hidden_size=32, intermediate_size=48), LoraConfig(rank=2))
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in adapted.parameters()) - trained
    assert flops_per_token(adapted) == (6 * trained + 4 * frozen, attention)
    assert flops_per_token(torch.nn.Linear(3, 2)) == (6 * 8, 0.0)


def test_flops_per_token_count_the_chosen_experts(tmp_path: Path) -> None:
    model = save_tiny_family("qwen3_moe", tmp_path)
    experts = {name: p.numel() for name, p in model.named_parameters() if ".experts." in name}
    others = sum(p.numel() for name, p in model.named_parameters() if name not in experts)
    embeddings = 0 if model.config.tie_word_embeddings else model.get_input_embeddings().weight.numel()
    share = model.config.num_experts_per_tok / model.config.num_experts
    assert experts and share < 1
    assert flops_per_token(model)[0] == 6 * (others - embeddings + share * sum(experts.values()))


def test_sampled_tokens_per_s_of_an_engine_ahead_counts_the_time_of_sampling() -> None:
    callback, stage = Throughput(), build_stage(1)
    train(stage, [callback])
    step = {"samples_per_s": 2.0, "train/response_length": 10.0, "time/step": 4.0, "time/rollout": 0.001}
    assert callback._metrics_of_step({**step, "idle/engine": 0.5})["throughput/sampled_tokens_per_s"] == 40.0


def test_flops_per_token_count_the_numbers_of_four_bits() -> None:
    pytest.importorskip("bitsandbytes")
    plain, packed = (
        flops_per_token(add_adapter(build_model(hidden_size=32), LoraConfig(rank=2, quantization=quantization)))
        for quantization in (None, "nf4")
    )
    assert plain == packed


def test_known_peak_by_device_name(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = {
        "NVIDIA H200": 989.0, "NVIDIA H100 NVL": 835.0, "NVIDIA H100 80GB HBM3": 989.0, "NVIDIA L40S": 362.0,
        "NVIDIA A100-SXM4-80GB": 312.0, "NVIDIA L4": 121.0, "Quadro K2000": None,
        "NVIDIA RTX A4000": None, "NVIDIA RTX A1000": None, "NVIDIA GH200 480GB": 989.0,
    }  # fmt: skip
    name = ""
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: name)
    for name, peak in peaks.items():
        with case(name):
            assert known_peak(torch.device("cuda")) == peak
    assert all(value > 100 for value in PEAK_TFLOPS.values())
