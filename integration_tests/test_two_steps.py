"""Every recipe takes two steps over ZeRO or FSDP2 workers and vLLM: the weights move, the numbers are finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from integration_tests import two_steps
from integration_tests.in_turn import runs_in_turn
from rl_plugins.commands.export import export_checkpoint
from rl_plugins.config.hydra_errors import CONFIG_FOLDER
from rl_plugins.data.prepare.files import write_splits
from rl_plugins.data.prepare.tasks import addition_rows, preference_rows
from rl_plugins.data.tokenization import load_tokenizer
from rl_plugins.models.scalar_head import load_scalar_head
from rl_plugins.models.tiny import save_tiny_policy
from rl_plugins.run_folder import read_metrics
from rl_plugins.tests.metrics_page import undocumented
from rl_plugins.tests.tiers import tiered

ALGORITHMS = sorted(path.stem for path in (CONFIG_FOLDER / "algorithm").glob("*.yaml"))
NAMES = [
    *two_steps.STAGES, *(name for name in ALGORITHMS if name not in two_steps.STAGES), *two_steps.OVER_FSDP
]  # fmt: skip
# One run of every kind of stage, and of every option with an effect on the course of a step.
CORE = {
    "sft", "reward_modeling", "dpo", "online_dpo", "prime", "ppo", "grpo", "grpo_conversation", "grpo_agent",
    "grpo_lora", "on_policy_distillation", f"grpo{two_steps.FSDP}",
}  # fmt: skip
# Metrics of some runs only.
ALSO = {
    "grpo": {"time/check_weights", "memory/engine_awake", "memory/engine_asleep"},
    "grpo_mixture": {"curriculum/seen", "curriculum/reward", "curriculum/learnability"},
    "grpo_partial": {"train/reward", "rollout/staleness", "memory/engine_awake", "memory/engine_asleep"},
    "ppo": {"train/critic/loss", "train/critic/lr", "train/critic/explained_variance", "time/update_critic"},
    "ppo_stateful": {"train/reward", "train/critic/loss", "train/rollout_gap_max"},
    "grpo_tools": {"train/reward", "train/rollout_gap_max", "train/tools/calls"},
    "grpo_agent": {"train/reward", "train/rollout_gap_max", "train/agent/calls", "train/agent/seconds"},
    "dapo": {"time/rollout", "train/uniform_groups"},
    "reinforce_plus_plus": {"train/kl", "time/ref_log_probs", "time/old_log_probs"},
    "on_policy_distillation": {"time/teacher_log_probs"},
    "kl_cov": {"train/selected_fraction"},
    "prime": {"train/process_reward_model/loss", "train/process_reward_model/lr"},
    "safe_rlhf": {
        "train/cost",
        "train/lambda",
        "train/critic/loss",
        "train/cost_critic/loss",
        "train/cost_critic/lr",
        "train/cost_critic/explained_variance",
        "time/cost_model",
        "time/cost_values",
        "time/update_cost_critic",
    },
    "forward_kl_distillation": {"time/teacher_log_probs"},
    "two_teachers": {"time/teacher_log_probs"},
    "weighted_teachers": {"time/teacher_log_probs", "train/teacher_mass"},
    "own_earlier_self": {"time/teacher_log_probs"},
    "dpo": {"train/accuracy", "train/margin", "time/ref_log_probs"},
    "dpo_validated": {"val/loss", "val/accuracy", "val/time/validate"},
    "online_dpo": {"train/accuracy", "train/margin", "train/uniform_groups"},
    # No second model: the time is the time of the policy's passes without the adapter.
    "grpo_lora": {"train/kl", "time/ref_log_probs"},
    "ppo_lora": {"train/critic/loss", "train/critic/lr", "time/update_critic"},
}


@pytest.fixture(scope="module")
def wait_for(
    request: pytest.FixtureRequest, workplace: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Path]]:
    """Wait for a run. The order of the selected tests is the order of their runs."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    names = dict.fromkeys(str(item.callspec.params["run"]) for item in items)
    folder = tmp_path_factory.mktemp("recipes")
    save_tiny_policy(folder / "other", seed=1)
    save_scores(folder / "scores", folder / "other")
    rows = addition_rows(below=100, num_train=64, num_test=1, seed=0)["train"]
    write_splits({"train_pairs": preference_rows(rows, seed=0)}, folder)
    with runs_in_turn([two_steps.recipe(name, workplace, folder) for name in names], folder) as wait:
        yield wait


def save_scores(folder: Path, policy: Path) -> None:
    """Save a model with random scores, for a reward model or a cost model."""
    scores: Any = load_scalar_head(str(policy), dtype=torch.float32)
    torch.nn.init.normal_(scores.score.weight, generator=torch.Generator().manual_seed(0))
    scores.save_pretrained(folder)
    load_tokenizer(str(policy)).save_pretrained(folder)


@pytest.fixture
def folder(wait_for: Callable[[str], Path], run: str) -> Path:
    """The folder of the test's run, after the end of the run."""
    return wait_for(run)


@pytest.mark.parametrize("run", tiered(NAMES, CORE))
def test_two_steps_of(run: str, folder: Path, workplace: Path) -> None:
    series, name = read_metrics(folder / "metrics.jsonl"), run.removesuffix(two_steps.FSDP)
    assert undocumented(series) == [], "add a row to docs/metrics.md"
    samples = name.removesuffix("_lora") in ALGORITHMS or name.startswith("grpo_zero")
    sampled = {"train/reward", "train/entropy", "train/rollout_gap_max"} if samples else set()
    for metric in {"train/loss", "train/gradient_norm", "train/lr"} | sampled | ALSO.get(name, set()):
        assert list(series[metric]) == [1, 2], metric
        # A critic that starts at 0 explains nothing of equal returns.
        assert all(map(math.isfinite, series[metric].values())) or metric.endswith("explained_variance"), metric
    if sampled:
        assert max(series["train/rollout_gap_max"].values()) < 1e-3
    exported = folder / ("reward_model" if name.startswith("reward_modeling") else "policy")
    if (exported / "adapter_model.safetensors").is_file():
        weights = load_file(exported / "adapter_model.safetensors")
        # Pairs do not teach a score's bias: the bias cancels.
        assert all(weight.any() for key, weight in weights.items() if "lora_B" in key or key.endswith("score.weight"))
        return
    before, after = (load_file(path / "model.safetensors") for path in (workplace / "tiny", exported))
    moved = [not torch.equal(before[key], after[key]) for key in before if key in after]
    assert moved and any(moved)


@pytest.mark.parametrize(
    "run",
    tiered(
        (
            "grpo_conversation",
            "grpo_tools",
            "grpo_agent",
            "ppo_conversation",
            "online_dpo_conversation",
            "ppo_stateful",
        ),
        CORE,
    ),
)
def test_conversations_have_several_turns(run: str, folder: Path) -> None:
    series = read_metrics(folder / "metrics.jsonl")
    assert all(1 < turns <= (5 if run == "grpo_agent" else 3) for turns in series["train/turns"].values())
    assert set(series["train/observations_cut"].values()) == {0.0}
    # Trainer and engine agree on the log-probs of every turn.
    if run != "online_dpo_conversation":
        assert max(series["train/rollout_gap_max"].values()) < 1e-4


@pytest.mark.parametrize("run", tiered(("grpo_tools",), CORE))
def test_tools_answer_each_call_of_the_policy(run: str, folder: Path) -> None:
    series = read_metrics(folder / "metrics.jsonl")
    # Two calls in each response before the last, of 32 conversations.
    calls = {step: 64 * (turns - 1) for step, turns in series["train/turns"].items()}
    assert series["train/tools/calls"] == pytest.approx(calls) and min(calls.values()) > 0
    for kind in ("malformed", "unknown", "late", "raised", "died"):
        assert set(series[f"train/tools/{kind}"].values()) == {0.0}, kind


@pytest.mark.parametrize("run", tiered(("grpo_agent",), CORE))
def test_agents_call_the_policy_in_each_trajectory(run: str, folder: Path) -> None:
    series = read_metrics(folder / "metrics.jsonl")
    assert set(series["train/agent/calls"].values()) == set(series["train/turns"].values()) == {5.0}
    assert set(series["train/agent/sequences"].values()) == {3.0}
    assert set(series["train/agent/refused"].values()) == set(series["train/reward_raised"].values()) == {0.0}
    assert all(seconds > 0 for seconds in series["train/agent/seconds"].values())


@pytest.mark.parametrize("run", tiered(("grpo_lora",), CORE))
def test_export_checkpoint_merges_the_adapter_of_a_policy(
    run: str, folder: Path, workplace: Path, tmp_path: Path
) -> None:
    """Export as the run does. The checkpoint holds the adapter alone, and an option exports the adapter."""
    export_checkpoint(folder / "checkpoint_00000002", tmp_path / "merged")
    assert_equal_weights(folder / "policy", tmp_path / "merged", "model.safetensors")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    base = AutoModelForCausalLM.from_pretrained(workplace / "tiny")
    assert merged.keys() == base.state_dict().keys()
    export_checkpoint(folder / "checkpoint_00000002", tmp_path / "adapter", lora="adapter")
    adapted: Any = PeftModel.from_pretrained(base, tmp_path / "adapter")
    for name, weight in adapted.merge_and_unload().state_dict().items():
        torch.testing.assert_close(weight, merged[name])


@pytest.mark.parametrize("run", tiered(("reward_modeling_lora",), CORE))
def test_export_checkpoint_writes_the_adapter_of_a_reward_model(
    run: str, folder: Path, workplace: Path, tmp_path: Path
) -> None:
    """Export as the run does: `run.export_lora=adapter` is in the checkpoint's configuration."""
    export_checkpoint(folder / "checkpoint_00000002", tmp_path / "exported")
    assert_equal_weights(folder / "reward_model", tmp_path / "exported", "adapter_model.safetensors")
    base = load_scalar_head(str(workplace / "tiny"), dtype=torch.float32)
    reward_model = PeftModel.from_pretrained(base, tmp_path / "exported")
    assert reward_model(input_ids=torch.arange(6)[None]).logits.any()


def assert_equal_weights(one: Path, other: Path, file: str) -> None:
    by_run, by_checkpoint = load_file(one / file), load_file(other / file)
    assert by_run.keys() == by_checkpoint.keys()
    assert all(torch.equal(weight, by_checkpoint[key]) for key, weight in by_run.items())
