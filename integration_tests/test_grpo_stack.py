"""One GRPO run over ZeRO-3 workers, vLLM and MLflow: its metrics, checkpoints, output, report and exported policy."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from mlflow import MlflowClient
from mlflow.entities import Run
from safetensors.torch import load_file

from integration_tests.conftest import Recipe, recipes_in
from rl_plugins.data.prepare.files import write_splits
from rl_plugins.data.prepare.tasks import addition_rows
from rl_plugins.rollout.vllm.config import VLLMConfig
from rl_plugins.run_folder import read_metrics
from rl_plugins.tests.metrics_page import undocumented
from rl_plugins.tests.patience import patient
from rl_plugins.tracking.unsent_metrics import FIRST_CHARTS

STEPS = 4
# Prompts with the same beginning, longer than one block of the KV cache: the prefix cache keeps this block.
PREAMBLE = "You add two numbers, and you say nothing but their sum. " * 3

PHASES = ("offload", "rollout", "reload", "reward", "balance", "old_log_probs", "ref_log_probs", "advantages")
VALIDATION_PHASES = ("offload", "update_weights", "rollout", "reload", "reward")
ENGINE_MEMORY = ("memory/engine_awake", "memory/engine_asleep")
METRICS = {
    *(f"train/{name}" for name in ("reward", "kl", "kl_coefficient", "ppo_kl", "entropy", "loss", "lr")),
    *(f"train/{name}" for name in ("clip_fraction", "dual_clip_fraction", "gradient_norm", "uniform_groups")),
    *(f"train/{name}" for name in ("response_length", "truncated", "rollout_gap", "rollout_gap_max")),
    *(f"train/reward_{failure}" for failure in ("raised", "timeout", "not_finite", "died", "memory", "image")),
    *(f"{kind}/{phase}" for kind in ("time", "memory") for phase in (*PHASES, "update_policy")),
    *("time/step", "tokens_per_s", "samples_per_s", *ENGINE_MEMORY),
    *(f"throughput/{kind}_tokens_per_s" for kind in ("trained", "sampled")),
    *("idle/trainer", "idle/engine", "rollout/engines", "rollout/engines_lost"),
}
VALIDATION = {"val/reward", "val/reward_failures", *(f"val/addition/mean_at_1{end}" for end in ("", "_low", "_high"))}
# In a step with a validation, the validation updates the weights of the engine.
SOMETIMES = {"time/update_weights", "memory/update_weights"}


@pytest.fixture(scope="module")
def recipe(workplace: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recipe]:
    folder = tmp_path_factory.mktemp("stack")
    splits = addition_rows(below=100, num_train=64, num_test=32, seed=0)
    for row in (row for rows in splits.values() for row in rows):
        row["prompt"].insert(0, {"role": "system", "content": PREAMBLE})
    write_splits(splits, folder / "data")
    with recipes_in(folder, workplace) as start:
        recipe = start(
            "grpo", "stack",
            f"data.train_files=[{folder}/data/train.parquet]", f"data.val_files=[{folder}/data/test.parquet]",
            "data.max_prompt_tokens=220", "sampling.max_tokens=8", "run.steps=4", "run.eval_every=2",
            "run.checkpoint_every=2", "run.keep_checkpoints=1", "batch.prompts_per_step=8",
            "batch.samples_per_prompt=4", "batch.updates_per_step=2", "batch.tokens_per_micro_batch=2048",
            "optimizer.lr=2e-3", "algorithm.kl.coefficient=0.05", "algorithm.kl.estimator=k3",
            "tracking.experiment=stack", "reward.functions.default={_target_: integration_tests.rewards.shortness}",
            new_interpreter=True,
        )  # fmt: skip
        assert recipe.wait() == 0, recipe.tail()
        yield recipe


@pytest.fixture(scope="module")
def series(recipe: Recipe) -> dict[str, dict[int, float]]:
    return read_metrics(recipe.run / "metrics.jsonl")


def test_every_metric_is_there_on_every_step(series: dict[str, dict[int, float]]) -> None:
    of_validation = {f"val/{kind}/{phase}" for kind in ("time", "memory") for phase in VALIDATION_PHASES}
    of_validation |= {f"val/{name}" for name in ENGINE_MEMORY}
    # Metrics of the machine come after the first five seconds: on a fast machine, after the run.
    of_stage = {name for name in series if not name.startswith("system/node_0/")}
    assert of_stage == METRICS | SOMETIMES | VALIDATION | of_validation
    assert undocumented(series) == [], "add a row to docs/metrics.md"
    for name in METRICS:
        assert list(series[name]) == [1, 2, 3, 4], name
    assert all(list(series[name]) == [2, 4] for name in SOMETIMES)
    assert all(list(series[name]) == [0, 2, 4] for name in VALIDATION | of_validation)
    assert min(series["train/gradient_norm"].values()) > 0
    assert set(series["train/lr"].values()) == {2e-3}
    assert all(0 < memory < 24 for name in METRICS if name.startswith("memory/") for memory in series[name].values())
    awake, asleep = (series[name] for name in ENGINE_MEMORY)
    # The whole KV cache of 1 GiB is never in memory: a few of its blocks are in use, and are released.
    assert all(0.1 < asleep[step] < awake[step] < asleep[step] + 0.5 for step in awake)
    phases = {name: values for name, values in series.items() if name.startswith("time/") and name != "time/step"}
    in_phases = {step: sum(values.get(step, 0) for values in phases.values()) for step in range(1, STEPS + 1)}
    for step, whole in series["time/step"].items():
        # Phases do not overlap.
        assert in_phases[step] <= whole
        assert series["samples_per_s"][step] == pytest.approx(32 / whole)
    # The phases contain nearly all of the time, but a busy machine interrupts steps between two phases.
    assert max(in_phases[step] / whole for step, whole in series["time/step"].items()) > 0.3


def test_rollout_engine_samples_with_the_trained_weights(series: dict[str, dict[int, float]]) -> None:
    # The policy is far from its start: old weights, or prefixes cached with old weights, would show in the gap.
    assert all(series["train/kl"][step] > 0.01 for step in range(2, STEPS + 1))
    assert max(series["train/rollout_gap_max"].values()) < 1e-4


def test_training_changes_every_weight(recipe: Recipe, workplace: Path) -> None:
    before = load_file(workplace / "tiny" / "model.safetensors")
    after = load_file(recipe.run / "policy" / "model.safetensors")
    assert before.keys() == after.keys()
    moved = [name for name in before if (before[name] - after[name]).abs().max() > 1e-3]
    assert len(moved) == len(before)


def test_keep_checkpoints_keeps_the_last_complete_checkpoint(recipe: Recipe) -> None:
    checkpoint = recipe.run / f"checkpoint_{STEPS:08d}"
    assert [path for path in recipe.run.iterdir() if "checkpoint_0" in path.name] == [checkpoint]
    assert not list(recipe.run.rglob("*partial*"))
    shards = [f"zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt" for rank in (0, 1) for kind in ("model", "optim")]
    for name in ("random_state_0.pt", "random_state_1.pt", "state/lightning.ckpt"):
        assert (checkpoint / name).is_file(), name
    assert sorted(path.name for path in (checkpoint / "state" / "policy" / "zero").iterdir()) == sorted(shards)


@pytest.fixture(scope="module")
def tracked(recipe: Recipe) -> tuple[MlflowClient, Run]:
    client = MlflowClient(f"sqlite:///{recipe.folder}/outputs/mlflow.db")
    experiment = client.get_experiment_by_name("stack")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    return client, run


def test_mlflow_metrics_equal_metrics_jsonl(
    tracked: tuple[MlflowClient, Run], series: dict[str, dict[int, float]]
) -> None:
    client, run = tracked
    assert run.info.status == "FINISHED" and run.info.run_name == "stack"
    first = {second for name, second in FIRST_CHARTS.items() if name in series}
    assert first >= {"reward", "response_length", "entropy", "rollout_gap"}
    assert run.data.metrics.keys() == series.keys() | first
    for name, values in series.items():
        history = client.get_metric_history(run.info.run_id, name)
        assert {metric.step: metric.value for metric in history} == values, name


def test_mlflow_artifacts_hold_config_and_samples(
    tracked: tuple[MlflowClient, Run], recipe: Recipe, tmp_path: Path
) -> None:
    client, run = tracked
    files = Path(client.download_artifacts(run.info.run_id, "", str(tmp_path)))
    assert (files / "config.yaml").read_text() == (recipe.run / "config.yaml").read_text()
    assert recipe.folder / "outputs" in Path(run.info.artifact_uri.removeprefix("file://")).parents
    for step in (0, 2, 4):
        table: dict[str, Any] = json.loads((files / "samples" / f"step_{step:08d}.json").read_text())
        assert table["columns"] == ["prompt", "response", "score", "ground_truth", "failure"]
        rows = json.loads((recipe.run / "samples" / f"step_{step:08d}.json").read_text())
        # Rank 0's half of the 32 rows.
        assert len(table["data"]) == len(rows) == 16
        assert all(re.fullmatch(r"\d+\+\d+=", row["prompt"]) for row in rows)


def test_output_has_lines_of_the_run_only(recipe: Recipe) -> None:
    log = recipe.tail(1_000_000)
    assert "stack: 4 RL steps of 8 prompts x 4 samples = 32 samples, 16 on each of 2 workers" in log
    metrics = "reward \\S+, kl \\S+, val \\S+, loss \\S+, ppo_kl \\S+, trainer idle \\S+, engine idle \\S+"
    assert re.search(rf"stack: step 4 of 4, {metrics}, \S+ s/step", log)
    # Ray prints the worker's name before each line.
    ours = re.compile(r"(\(RayTrainWorker pid=\d+\) )?stack: ")
    other = [line for line in log.splitlines() if line and not ours.match(line)]
    assert not other, "\n".join(other)
    assert not {b"\r", b"\x1b"} & {bytes([code]) for code in recipe.log.read_bytes()}


def test_report_html_is_complete(recipe: Recipe, tracked: tuple[MlflowClient, Run], tmp_path: Path) -> None:
    page = recipe.run.joinpath("report.html").read_text()
    assert page.endswith("</html>\n") and page.count("<section>") == page.count("</section>") == 8
    for said in (
        "4 of 4",
        "<figcaption>Log-prob gap, trainer to sampler</figcaption>",
        "optimizer.lr: 0.002  # recipe: ",
    ):
        assert said in page, said
    for row in json.loads((recipe.run / "samples" / "step_00000004.json").read_text()):
        assert row["prompt"] in page
    client, run = tracked
    sent = Path(client.download_artifacts(run.info.run_id, "report.html", str(tmp_path))).read_text()
    assert sent.endswith("</html>\n") and "4 of 4" in sent


def test_export_of_a_checkpoint_equals_the_exported_policy(recipe: Recipe, tmp_path: Path) -> None:
    checkpoint = recipe.run / f"checkpoint_{STEPS:08d}"
    command = [sys.executable, "-m", "rl_plugins", "export", str(checkpoint), str(tmp_path / "exported")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(240))
    assert done.returncode == 0 and done.stderr == "", done.stderr
    files = sorted(path.name for path in (recipe.run / "policy").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "exported").iterdir())
    for name in files:
        assert (tmp_path / "exported" / name).read_bytes() == (recipe.run / "policy" / name).read_bytes(), name


def test_exported_policy_has_equal_log_probs_in_transformers_and_vllm(recipe: Recipe) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = recipe.run / "policy"
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert model.dtype == torch.float32
    prompts = [tokenizer.encode(text) for text in ("17+25=42", "The sum of both is what?", "9+9=")]
    vllm = subprocess.run(
        [sys.executable, "-m", "integration_tests.prompt_log_probs", str(folder)],
        input=json.dumps(prompts), capture_output=True, text=True, timeout=patient(300),
        env={**os.environ, **VLLMConfig(str(folder)).environment},
    )  # fmt: skip
    assert vllm.returncode == 0, vllm.stderr[-4000:]
    for ids, log_probs in zip(prompts, json.loads(vllm.stdout.splitlines()[-1]), strict=True):
        with torch.no_grad():
            predicted = model(torch.tensor([ids[:-1]])).logits[0].log_softmax(-1)
        mine = predicted.gather(-1, torch.tensor(ids[1:])[:, None]).squeeze(-1)
        assert (mine - torch.tensor(log_probs)).abs().max() < 1e-4
