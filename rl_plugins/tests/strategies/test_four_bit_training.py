"""Adapters over 4-bit weights under all strategies: the weights that are trained, sent, resumed and exported."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typing_extensions import override

from rl_plugins.commands.export import export_checkpoint
from rl_plugins.errors import CheckpointError, ConfigError
from rl_plugins.models.four_bit import four_bit_layers
from rl_plugins.models.lora import adapter_off, add_adapter
from rl_plugins.models.tiny import save_tiny_policy
from rl_plugins.rollout.vllm.client import VLLMRollout
from rl_plugins.rollout.vllm.config import VLLMConfig
from rl_plugins.run_folder import RunFolder
from rl_plugins.strategies.fsdp import FSDPStrategy
from rl_plugins.strategies.fsdp_shards import read_weights
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.strategies.zero import ZeroStrategy
from rl_plugins.tests.ranks import run_ranks
from rl_plugins.tests.stages import canned
from rl_plugins.tests.strategies import fsdp_runs, zero_runs
from rl_plugins.tests.strategies.fsdp_runs import Course, Layout, Recorded, assert_same_course
from rl_plugins.tests.strategies.zero_runs import METRICS, NF4, RUNS, STEPS

TOKENS = torch.arange(24).view(2, 12) * 5 % 90
ADAPTERS: dict[str, Any] = {"lora": NF4, "critic_lora": NF4}
TOLERANCES = {"32-true": 1e-5, "bf16-mixed": 1e-3, "bf16-true": 1e-3}
"""Largest mean difference of log-probs."""


@pytest.fixture(autouse=True)
def library() -> None:
    pytest.importorskip("bitsandbytes")


def strategy_named(name: str) -> Any:
    rollout: Any = canned.CannedRollout()
    if name == "single":
        return SingleDeviceRolloutStrategy(rollout=rollout)
    if name == "fsdp":
        return FSDPStrategy(rollout=rollout, timeout_s=60)
    return ZeroStrategy(stage=int(name[-1]), rollout=rollout, timeout_s=60)


class Compared(Recorded):
    """A stage that compares its policy and its reference with plain models after each step."""

    @override
    def end_step(self, metrics: Any) -> None:
        super().end_step(metrics)
        strategy: Any = self.trainer.strategy
        sent = {name: tensor.clone() for name, tensor in strategy.weight_source()}
        engine, policy = self.plain_model(), self.policy
        with torch.random.fork_rng():
            base = add_adapter(self.plain_model(), NF4)
        engine.load_state_dict({name: tensor.to(self.model_dtype) for name, tensor in sent.items()}, strict=False)
        policy.eval()
        with torch.no_grad(), strategy.precision_plugin.forward_context():
            got, sampled, quantized = (log_probs(model) for model in (policy, engine, base))
            with adapter_off(policy):
                reference = log_probs(policy)
        policy.train()
        tolerance = TOLERANCES[str(self.trainer.precision)]
        assert (got - sampled).abs().mean() < tolerance
        assert (reference - quantized).abs().mean() < tolerance
        assert (got - reference).abs().mean() > 5 * tolerance

    def plain_model(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.folder / "policy", dtype=self.model_dtype)


def log_probs(model: Any) -> torch.Tensor:
    log_probs: torch.Tensor = model(input_ids=TOKENS).logits.float().log_softmax(-1)
    return log_probs


def train(rank: int, layout: Layout, folder: Path, name: str, precision: str) -> list[float]:
    """Train two steps with comparisons; return the share of the codes on this rank, for each layer of both models."""
    options: dict[str, Any] = {"stage": Compared, "precision": precision, **ADAPTERS}
    module = fsdp_runs.trained(layout, rank, folder, strategy=strategy_named(name), **options)
    shares = []
    for layer in [*four_bit_layers(module.policy).values(), *four_bit_layers(module.critic).values()]:
        weight: Any = layer.weight
        shard = weight.to_local() if name == "fsdp" else getattr(weight, "ds_tensor", weight)
        shares.append(2 * shard.numel() / layer.in_features / layer.out_features)
    return shares


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *((name, precision) for precision in TOLERANCES for name in ("zero-3", "fsdp")),
        *((name, precision) for precision in ("32-true", "bf16-mixed") for name in ("single", "zero-1", "zero-2")),
    ],
)
def test_engine_and_reference_have_the_weights_of_the_policy(tmp_path: Path, name: str, precision: str) -> None:
    save_tiny_policy(tmp_path / "policy", **fsdp_runs.SIZES | {"initializer_range": 0.02})
    layout = fsdp_runs.ALONE.on_single_device() if name == "single" else fsdp_runs.TWO
    results = run_ranks(train, layout, tmp_path, name, precision, world_size=layout.world_size)
    # Policy and critic have two blocks with seven linear layers.
    expected = [0.5 if name in ("zero-3", "fsdp") else 1.0] * 28
    for shares, _ in results:
        assert shares == pytest.approx(expected)


def results_of(folder: Path, name: str) -> dict[str, Any]:
    run_ranks(zero_runs.train, folder, name, world_size=RUNS[name].world_size)
    results: dict[str, Any] = torch.load(folder / f"{name}.pt")
    return results


@pytest.mark.parametrize("name", ["nf4-single", "nf4-2", "nf4-3"])
def test_policy_of_four_bits_trains_resumes_and_exports(tmp_path: Path, name: str) -> None:
    """Memory moves in the resumed runs of ZeRO, and stage 2 is resumed under stage 1."""
    save_tiny_policy(tmp_path / "policy", hidden_size=32, intermediate_size=48, initializer_range=0.2, seed=5)
    expected, whole = results_of(tmp_path, "nf4-single"), results_of(tmp_path, name)
    for step, metrics in whole["steps"].items():
        for metric in METRICS:
            assert metrics[metric] == pytest.approx(expected["steps"][step][metric], rel=2e-4, abs=1e-5), (step, metric)
    resumed = results_of(tmp_path, f"{name}-resumed")
    for model, weights in whole["weights"].items():
        assert all(torch.equal(resumed["weights"][model][key], weight) for key, weight in weights.items()), model
    start, policy = load_file(tmp_path / "policy" / "model.safetensors"), whole["weights"]["policy"]
    moved = {key for key, weight in start.items() if not torch.equal(policy[key], weight)}
    assert moved == {key for key in start if key.endswith("_proj.weight")}
    (tmp_path / name / "config.yaml").write_text(
        f"model: {{path: {tmp_path}/policy, precision: 32-true, lora: {{rank: 4, alpha: 8.0, quantization: nf4}}}}"
    )
    export_checkpoint(RunFolder(tmp_path / name).checkpoint(STEPS), tmp_path / "out")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == start.keys()
    assert all(torch.equal(exported[key], weight) for key, weight in policy.items() if key in exported)
    assert not four_bit_layers(AutoModelForCausalLM.from_pretrained(tmp_path / "out"))


def test_other_number_of_workers_resumes_four_bits_under_another_stage(tmp_path: Path) -> None:
    save_tiny_policy(tmp_path / "policy", hidden_size=32, intermediate_size=48, initializer_range=0.2, seed=5)
    whole, one = (results_of(tmp_path, name)["weights"]["policy"] for name in ("nf4-3", "nf4-3-one-1"))
    for key, weight in whole.items():
        torch.testing.assert_close(one[key], weight, rtol=1e-3, atol=1e-4)


def course(layout: Layout, folder: Path, **options: Any) -> Course:
    arguments = layout, folder, ADAPTERS | options
    own: Course = run_ranks(fsdp_runs.course, *arguments, world_size=layout.world_size)[0][0]
    return own


def test_four_bits_under_fsdp_train_like_on_a_single_device_and_resume(tmp_path: Path) -> None:
    save_tiny_policy(tmp_path / "policy", **fsdp_runs.SIZES)
    start = tmp_path / "checkpoint"
    expected = course(fsdp_runs.TWO.on_single_device(), tmp_path)
    got = course(fsdp_runs.TWO, tmp_path, leave=start)
    assert_same_course(got, expected)
    saved = read_weights(start / "policy")
    assert saved and all(".lora_" in name for name in saved)
    assert_same_course(course(fsdp_runs.TWO, tmp_path, start=start, steps=1), got[1:], exactly=True)
    assert_same_course(course(fsdp_runs.ALONE, tmp_path, start=start, steps=1), expected[1:])


@pytest.mark.parametrize(
    "layout", [fsdp_runs.ON_HOST, fsdp_runs.COPIES, fsdp_runs.SEQUENCE], ids=["host", "copies", "sequence"]
)
def test_four_bits_in_other_layouts_of_fsdp_train_like_on_a_single_device(tmp_path: Path, layout: Layout) -> None:
    save_tiny_policy(tmp_path / "policy", **fsdp_runs.SIZES)
    options = {"steps": 1, "gradient_checkpointing": True}
    assert_same_course(course(layout, tmp_path, **options), course(layout.on_single_device(), tmp_path, **options))


def test_four_bits_under_fsdp_move_to_the_host_while_the_engine_samples(tmp_path: Path) -> None:
    save_tiny_policy(tmp_path / "policy", **fsdp_runs.SIZES)
    moved = run_ranks(fsdp_runs.course_with_moved_memory, fsdp_runs.TWO, tmp_path, ADAPTERS)[0][0]
    assert_same_course(moved, course(fsdp_runs.TWO, tmp_path), exactly=True)


WHOLE = replace(NF4, quantization=None)
CHANGES: list[tuple[Any, Any, str]] = [
    (
        NF4,
        WHOLE,
        "nf4 is of a run with 4-bit weights of 'policy', and this run has whole weights: resume with "
        "LoraConfig(quantization='nf4'), in a recipe model.lora.quantization=nf4",
    ),
    (
        WHOLE,
        NF4,
        "None is of a run with whole weights of 'policy', and this run has 4-bit weights: resume with "
        "LoraConfig(quantization=None), in a recipe model.lora.quantization=null",
    ),
]


def resume_with_a_change(rank: int, layout: Layout, folder: Path, name: str) -> None:
    for saved, now, message in CHANGES:
        start = folder / f"{saved.quantization}"
        options = {"strategy": strategy_named(name), "steps": 1}
        fsdp_runs.trained(layout, rank, folder, lora=saved, leave=start, **options)
        options["strategy"] = strategy_named(name)
        with pytest.raises(CheckpointError, match=re.escape(message)):
            fsdp_runs.trained(layout, rank, folder, lora=now, start=start, **options)


@pytest.mark.parametrize("name", ["single", "zero-3", "fsdp"])
def test_load_checkpoint_refuses_a_change_of_the_quantization(tmp_path: Path, name: str) -> None:
    save_tiny_policy(tmp_path / "policy", **fsdp_runs.SIZES)
    layout = fsdp_runs.ALONE.on_single_device() if name == "single" else fsdp_runs.ALONE
    run_ranks(resume_with_a_change, layout, tmp_path, name, world_size=1)


class StartedEngine(VLLMRollout):
    """An engine that no rank may connect to."""

    @override
    def prepare(self, ranks: Any) -> None:
        pass

    @override
    def connect(self, rank: int, world_size: int) -> None:
        raise AssertionError("a connection was not expected")


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (NF4, "weights under the adapter are in 4 bits, and vLLM .* use lora_rank=0 in VLLMConfig"),
        (None, "lora_rank=4 in VLLMConfig, and the policy has no adapter: set lora_rank=0"),
    ],
)
def test_connect_refuses_a_policy_to_which_vllm_applies_no_adapter(tmp_path: Path, lora: Any, message: str) -> None:
    path = str(save_tiny_policy(tmp_path / "policy", **fsdp_runs.SIZES))
    strategy = SingleDeviceRolloutStrategy(rollout=StartedEngine(VLLMConfig(path, lora_rank=4)))
    with pytest.raises(ConfigError, match=message):
        fsdp_runs.trained(fsdp_runs.ALONE.on_single_device(), 0, tmp_path, strategy=strategy, lora=lora)
