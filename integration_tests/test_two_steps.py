"""Every recipe takes two steps over ZeRO or FSDP2 workers and vLLM: the weights move, the numbers are finite."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from integration_tests import two_steps
from rl_plugins.data.prepare.addition import addition_rows, preference_rows
from rl_plugins.data.prepare.writing import write_splits
from rl_plugins.launch.export import export_checkpoint
from rl_plugins.launch.hydra_errors import CONFIG_FOLDER
from rl_plugins.models.scalar_head import load_scalar_head
from rl_plugins.models.tiny import save_tiny_policy
from rl_plugins.run_folder import read_metrics

# The first test waits for all runs.
pytestmark = pytest.mark.timeout(1500)

ALGORITHMS = sorted(path.stem for path in (CONFIG_FOLDER / "algorithm").glob("*.yaml"))
NAMES = [
    *two_steps.STAGES, *(name for name in ALGORITHMS if name not in two_steps.STAGES), *two_steps.OVER_FSDP
]  # fmt: skip
# What only some of them measure.
ALSO = {
    "grpo": {"time/check_weights", "memory/engine_awake", "memory/engine_asleep"},
    "grpo_mixture": {"curriculum/seen", "curriculum/reward", "curriculum/learnability"},
    "ppo": {"train/critic/loss", "train/critic/lr", "train/critic/explained_variance", "time/update_critic"},
    "dapo": {"time/rollout", "train/uniform_groups"},
    "reinforce_plus_plus": {"train/kl", "time/ref_log_probs", "time/old_log_probs"},
    "on_policy_distillation": {"time/teacher_log_probs"},
    "kl_cov": {"train/selected_fraction"},
    "prime": {"train/process_reward_model/loss", "train/process_reward_model/lr"},
    "forward_kl_distillation": {"time/teacher_log_probs"},
    "dpo": {"train/accuracy", "train/margin", "time/ref_log_probs"},
    "online_dpo": {"train/accuracy", "train/margin", "train/uniform_groups"},
    # No second model: the time is that of passes of the policy with its adapter off.
    "grpo_lora": {"train/kl", "time/ref_log_probs"},
    "ppo_lora": {"train/critic/loss", "train/critic/lr", "time/update_critic"},
}


@pytest.fixture(scope="module")
def folder(workplace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipes")
    if not (workplace / "other").is_dir():
        save_tiny_policy(workplace / "other", seed=1)
        rows = addition_rows(below=100, num_train=64, num_test=1, seed=0)["train"]
        write_splits({"train_pairs": preference_rows(rows, seed=0)}, workplace / "data")
    log = folder / "log.txt"
    with log.open("w") as output:
        command = [sys.executable, two_steps.__file__, str(workplace), str(folder), *NAMES]
        result = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, timeout=1400, env=os.environ)
    assert result.returncode == 0, log.read_text()[-6000:]
    return folder


@pytest.mark.parametrize("run", NAMES)
def test_two_steps(run: str, folder: Path, workplace: Path) -> None:
    assert (folder / run / "done").is_file()
    series, name = read_metrics(folder / run / "metrics.jsonl"), run.removesuffix(two_steps.FSDP)
    samples = name.removesuffix("_lora") in ALGORITHMS or name.startswith("grpo_zero")
    sampled = {"train/reward", "train/entropy", "train/rollout_gap_max"} if samples else set()
    for metric in {"train/loss", "train/gradient_norm", "train/lr"} | sampled | ALSO.get(name, set()):
        assert list(series[metric]) == [1, 2], metric
        # A critic that starts at 0 explains nothing of returns that are all alike.
        assert all(map(math.isfinite, series[metric].values())) or metric.endswith("explained_variance"), metric
    if sampled:
        assert max(series["train/rollout_gap_max"].values()) < 1e-3
    exported = folder / run / ("reward_model" if name.startswith("reward_modeling") else "policy")
    if (exported / "adapter_model.safetensors").is_file():
        weights = load_file(exported / "adapter_model.safetensors")
        # A score's bias is not learnt from pairs: it cancels.
        assert all(weight.any() for key, weight in weights.items() if "lora_B" in key or key.endswith("score.weight"))
        return
    before, after = (load_file(path / "model.safetensors") for path in (workplace / "tiny", exported))
    moved = [not torch.equal(before[key], after[key]) for key in before if key in after]
    assert moved and any(moved)


@pytest.mark.parametrize("name", ["grpo", "ppo", "online_dpo"])
def test_conversations_have_several_turns(name: str, folder: Path) -> None:
    series = read_metrics(folder / f"{name}_conversation" / "metrics.jsonl")
    assert all(1 < turns <= 3 for turns in series["train/turns"].values())
    assert set(series["train/observations_cut"].values()) == {0.0}
    # Trainer and engine agree on what every turn was sampled with.
    if name != "online_dpo":
        assert max(series["train/rollout_gap_max"].values()) < 1e-3


def test_adapters_are_exported_whole_or_alone(folder: Path, workplace: Path, tmp_path: Path) -> None:
    """By the run itself as from its checkpoint, which holds the adapter without what it was added to."""
    for name, exported, file in (
        ("grpo_lora", "policy", "model.safetensors"),
        ("reward_modeling_lora", "reward_model", "adapter_model.safetensors"),
    ):
        export_checkpoint(folder / name / "checkpoint_00000002", tmp_path / name)
        by_run, by_checkpoint = (load_file(path / file) for path in (folder / name / exported, tmp_path / name))
        assert by_run.keys() == by_checkpoint.keys()
        assert all(torch.equal(weight, by_checkpoint[key]) for key, weight in by_run.items())
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "grpo_lora")
    assert plain.state_dict().keys() == AutoModelForCausalLM.from_pretrained(workplace / "tiny").state_dict().keys()
    # What the run wrote whole is asked for as an adapter.
    export_checkpoint(folder / "grpo_lora" / "checkpoint_00000002", tmp_path / "adapter", lora="adapter")
    adapted: Any = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(workplace / "tiny"), tmp_path / "adapter"
    )
    for name, weight in adapted.merge_and_unload().state_dict().items():
        torch.testing.assert_close(weight, plain.state_dict()[name])
    base = load_scalar_head(str(workplace / "tiny"), dtype=torch.float32)
    reward_model = PeftModel.from_pretrained(base, tmp_path / "reward_modeling_lora")
    assert reward_model(input_ids=torch.arange(6)[None]).logits.any()
