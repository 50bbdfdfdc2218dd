"""`launcher=local`: one process without Ray, DeepSpeed and vLLM trains, resumes, exports and can be debugged."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from integration_tests.conftest import Recipe
from rl_plugins.commands.export import export_checkpoint
from rl_plugins.errors import ConfigError
from rl_plugins.models.tiny import CHAT_TEMPLATE
from rl_plugins.run_folder import read_metrics

LOCAL = (
    "launcher=local",
    "rollout.engine=transformers",
    "run.deterministic=true",
    "run.eval_every=0",
    "run.checkpoint_every=2",
    "batch.prompts_per_step=4",
    "batch.samples_per_prompt=4",
    "batch.updates_per_step=2",
    "optimizer.lr=1e-3",
    "algorithm.kl.coefficient=0.05",
    "data.curriculum.share=0.5",
    "tracking.enabled=false",
)
# The reward looks for libraries in the training process.
WITHOUT_RAY = ("reward.functions.default={_target_: integration_tests.rewards.without_ray}", "reward.num_workers=0")


def test_local_launcher_trains_resumes_and_exports(start_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    """The first run is in a new interpreter, as a user starts it, and has as many threads as the second run."""
    template = tmp_path / "template.jinja"
    template.write_text("{{ '<|system|>Add.' }}" + CHAT_TEMPLATE)
    options = (*LOCAL, *WITHOUT_RAY, "run.steps=3", f"data.chat_template={template}")
    whole = start_recipe("grpo", "whole", *options, new_interpreter=True, OMP_NUM_THREADS="1")
    assert whole.wait() == 0, whole.tail()
    series = read_metrics(whole.run / "metrics.jsonl")
    assert list(series["train/loss"]) == [1, 2, 3]
    assert max(series["train/rollout_gap_max"].values()) < 1e-4
    assert not any(word in whole.tail() for word in ("Warning", "WARNING", "Traceback")), whole.tail()

    # State after a killed run: the checkpoint of step 2 and no later one.
    broken = whole.run.with_name("broken")
    shutil.copytree(whole.run, broken)
    shutil.rmtree(broken / "checkpoint_00000003")
    shutil.rmtree(broken / "policy")
    resumed = start_recipe("grpo", "broken", *options, "run.resume=true")
    assert resumed.wait() == 0, resumed.tail()
    assert "continuing from" in resumed.tail() and "checkpoint_00000002" in resumed.tail()

    # A checkpoint of another run alone.
    branch = whole.run.with_name("branch")
    shutil.copytree(whole.run / "checkpoint_00000002", branch / "checkpoint_00000002")
    shutil.copy(whole.run / "config.yaml", branch)
    continued = start_recipe("grpo", "branch", *options, "run.resume=true")
    assert continued.wait() == 0, continued.tail()
    assert [row["step"] for row in continued.trained()] == [3]
    for resumed_run in (broken, branch):
        assert (resumed_run / "policy" / "model.safetensors").read_bytes() == (
            whole.run / "policy" / "model.safetensors"
        ).read_bytes()

    export_checkpoint(broken / "checkpoint_00000003", tmp_path / "exported")
    for file in (whole.run / "policy").iterdir():
        assert (tmp_path / "exported" / file.name).read_bytes() == file.read_bytes(), file.name
    assert (whole.run / "policy" / "chat_template.jinja").read_text() == template.read_text()
    with pytest.raises(ConfigError, match=r"exported exists: give another folder"):
        export_checkpoint(broken / "checkpoint_00000003", tmp_path / "exported")
    with pytest.raises(ConfigError, match=r"broken is not a checkpoint of a run"):
        export_checkpoint(broken, tmp_path / "other")
    with pytest.raises(ConfigError, match=r"checkpoint_00000003 is of a run without an adapter"):
        export_checkpoint(broken / "checkpoint_00000003", tmp_path / "other", lora="adapter")
    config = (broken / "config.yaml").read_text()
    (broken / "config.yaml").write_text(config.replace("/tiny\n", "/moved\n"))
    with pytest.raises(ConfigError, match=r"config.yaml names .*/moved, which does not exist: .*--model"):
        export_checkpoint(broken / "checkpoint_00000003", tmp_path / "other")
    export_checkpoint(broken / "checkpoint_00000003", tmp_path / "other", model=str(whole.run / "policy"))
    assert (tmp_path / "other" / "model.safetensors").read_bytes() == (
        whole.run / "policy" / "model.safetensors"
    ).read_bytes()


def test_breakpoint_in_a_reward_opens_the_debugger(start_recipe: Callable[..., Recipe]) -> None:
    run = start_recipe(
        "grpo", "debugged", *LOCAL, "run.steps=1", "batch.prompts_per_step=2", "batch.samples_per_prompt=2",
        "data.val_files=[]", "reward.functions.default={_target_: integration_tests.rewards.inspected}",
        "reward.num_workers=0",
        typed="p 'asked for ' + repr(len(solution_str))\n" + "c\n" * 200,
    )  # fmt: skip
    assert run.wait() == 0, run.tail()
    assert "(Pdb)" in run.tail() and "asked for " in run.tail()
    assert run.trained()[-1]["train/reward_raised"] == 0


def test_local_launcher_trains_in_float16_with_an_engine_in_float16(
    start_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    options = (*LOCAL, *WITHOUT_RAY, "run.steps=2", "model.precision=16-mixed")
    recipe = start_recipe("grpo", "float16", *options)
    assert recipe.wait() == 0, recipe.tail()
    series = read_metrics(recipe.run / "metrics.jsonl")
    # In bfloat16, the largest gap is 0.04.
    assert max(series["train/rollout_gap_max"].values()) < 0.01
    assert all(scale >= 2**10 for scale in series["train/loss_scale"].values())
    export_checkpoint(recipe.run / "checkpoint_00000002", tmp_path / "exported")
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert {weight.dtype for weight in exported.values()} == {torch.float16}
