"""A run on a model and data of the Hugging Face hub trains, exports, and pushes an export with a model card."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard, constants
from omegaconf import OmegaConf
from safetensors.numpy import load

from rl_plugins.commands.export import export_checkpoint
from rl_plugins.config.models import LoraConfig
from rl_plugins.launch import local  # noqa: F401
from rl_plugins.launch.command_line import run_recipe
from rl_plugins.launch.model_card import model_card
from rl_plugins.models import saved_adapter
from rl_plugins.models.loading import load_causal_lm
from rl_plugins.models.lora import MergedWeightSource, add_adapter
from rl_plugins.models.tiny import save_tiny_policy
from rl_plugins.run_folder import RunFolder, append_metrics, read_metrics
from rl_plugins.tests.hub.hub_server import TOKEN, StandIn, serving, use
from rl_plugins.tests.launch.configurations import configured, message_of
from rl_plugins.tests.models.random_adapter import with_random_adapter
from rl_plugins.weights.source import ModuleWeightSource

SECRET = "sk-word-of-a-judge"
REWARD = """
import zlib

def score(solution_str, api_key):
    return zlib.crc32(solution_str.encode()) % 97 / 97
"""
OPTIONS = (
    "launcher=local", "rollout.engine=transformers", "reward.num_workers=0", "tracking.enabled=false",
    "placement.device=cpu", "sampling.max_tokens=2", "data.max_prompt_tokens=32", "batch.prompts_per_step=2",
    "batch.samples_per_prompt=2", "run.steps=2", "run.checkpoint_every=2", "run.eval_every=0", "optimizer.lr=1e-3",
    "algorithm.kl.coefficient=0.05", "data.train_files=[hf://datasets/own/rows/train.parquet]",
    f"reward.functions.default={{path: rewards.py, name: score, api_key: {SECRET}}}",
)  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, workplace: Path) -> Iterator[tuple[StandIn, RunFolder]]:
    """The hub, and a run of two steps on its model and its data."""
    folder = tmp_path_factory.mktemp("trained")
    model = save_tiny_policy(folder / "tiny")
    (folder / "rewards.py").write_text(REWARD)
    with serving() as hub, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.delenv("RAY_ADDRESS", raising=False)
        for name, value in {"OMP_WAIT_POLICY": "PASSIVE", "DS_ACCELERATOR": "cpu"}.items():
            patch.setenv(name, value)
        use(hub, folder / "cache", patch)
        hub.add("models/own/tiny", model)
        hub.add("datasets/own/rows", {"train.parquet": (workplace / "train.parquet").read_bytes()})
        yield hub, run_recipe(configured("grpo", *OPTIONS, "model.path=own/tiny", "run.name=taught"), "grpo")


def test_run_recipe_trains_a_model_of_the_hub_on_data_of_the_hub(trained: tuple[StandIn, RunFolder]) -> None:
    hub, run = trained
    model = hub.repositories["models/own/tiny"]
    before = load(model.commits[model.refs["main"]]["model.safetensors"])
    after = load((run.export / "model.safetensors").read_bytes())
    assert before.keys() == after.keys() and any((before[name] != after[name]).any() for name in before)
    assert len(hub.downloads("/model.safetensors")) == 1
    assert "snapshots" not in (run.export / "tokenizer_config.json").read_text()


def test_run_recipe_trains_from_an_adapter_of_the_hub(
    trained: tuple[StandIn, RunFolder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub, _ = trained
    model = add_adapter(load_causal_lm("own/tiny", dtype=torch.float32), LoraConfig(rank=2, alpha=4))
    source = MergedWeightSource(ModuleWeightSource(model), with_random_adapter(model))
    hub.add("models/own/adapter", source.adapter_files())
    adapter = ("model.lora.rank=2", "model.lora.alpha=4", "model.lora.path=own/adapter", "run.export_lora=adapter")
    config = configured("grpo", *OPTIONS, *adapter, "model.path=own/tiny", "optimizer.lr=0", "run.name=adapted")
    run = run_recipe(config, "grpo")
    repository = hub.repositories["models/own/adapter"]
    commit = repository.refs["main"]
    assert OmegaConf.load(run.config).model.lora.path == f"own/adapter@{commit}"
    assert json.loads(run.pinned_versions.read_text())["models/own/adapter@main"] == commit
    start = load(repository.commits[commit]["adapter_model.safetensors"])
    after = load((run.export / "adapter_model.safetensors").read_bytes())
    assert start.keys() == after.keys() and all((start[name] == after[name]).all() for name in start)
    metrics = read_metrics(run.metrics)
    assert max(map(abs, metrics["train/kl"].values())) < 1e-6 and max(metrics["train/rollout_gap_max"].values()) < 1e-4
    # The checkpoint has the weights of the adapter, and the base model is on this machine.
    monkeypatch.setattr(saved_adapter, "load_adapter", None)
    export_checkpoint(run.checkpoint(2), tmp_path / "again")
    again = load((tmp_path / "again" / "adapter_model.safetensors").read_bytes())
    assert all((start[name] == again[name]).all() for name in start)


def test_export_checkpoint_pushes_a_folder_with_a_model_card(trained, tmp_path, monkeypatch) -> None:
    hub, run = trained
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    checkpoint, out = run.checkpoint(2), tmp_path / "out"
    (run.tracking_run).write_text("1234abcd")
    address = export_checkpoint(checkpoint, out, push="own/taught")
    repository = hub.repositories["models/own/taught"]
    commit = repository.refs["main"]
    assert repository.access == "private" and address == f"{hub.address}/own/taught/commit/{commit}"
    pushed = repository.commits[commit]
    assert pushed == {file.name: file.read_bytes() for file in out.iterdir()}
    assert pushed["model.safetensors"] == (run.export / "model.safetensors").read_bytes()
    text = pushed["README.md"].decode()
    card: Any = ModelCard(text)
    base = hub.repositories["models/own/tiny"].refs["main"]
    assert (card.data.base_model, card.data.datasets) == ("own/tiny", ["own/rows"])
    rows = hub.repositories["datasets/own/rows"].refs["main"]
    for line in (
        "- recipe: grpo", f"- base model: own/tiny@{base}", f"- data set of the hub: own/rows@main, commit {rows}",
        "- step: 2", "- MLflow run: 1234abcd", "optimizer.lr: 0.001", "run.steps: 2", "default.path: \"rewards.py\"",
    ):  # fmt: skip
        assert line in text, line
    assert "| `train/reward` | " in text and "transformers " in text
    assert SECRET not in text and TOKEN not in text and str(run.path.parent) not in text and "output_dir" not in text
    # A second push leaves no weights of the first one behind.
    repository.add({**pushed, "model-00001-of-00002.safetensors": b"", "notes.txt": b""})
    export_checkpoint(checkpoint, tmp_path / "again", push="own/taught")
    assert set(repository.commits[repository.refs["main"]]) == {*pushed, "notes.txt"}


def test_model_card_of_a_best_checkpoint_has_the_metrics_of_the_step(tmp_path) -> None:
    folder = RunFolder(tmp_path)
    for step in (1, 2):
        append_metrics(folder.metrics, {"val/reward": step / 4}, step)
    for checkpoint, row in {folder.best(1): "0.25 | 1", folder.checkpoint(2): "0.5 | 2"}.items():
        assert f"| `val/reward` | {row} |" in model_card("own/taught", checkpoint, is_adapter=False)


def test_export_checkpoint_names_the_fault_of_a_push_before_the_export(trained, tmp_path, monkeypatch) -> None:
    hub, run = trained

    def refusal(push: str) -> str:
        message = message_of(lambda: export_checkpoint(run.checkpoint(2), tmp_path / "out", push=push))
        assert not (tmp_path / "out").exists() and "\n" not in message
        return message

    assert "--push own/new: there is no token of the hub: set HF_TOKEN" in refusal("own/new")
    assert "--push new: must be OWNER/NAME" in refusal("new") and "without a revision" in refusal("own/new@main")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "refuses the token (status 401): set HF_TOKEN to a token that may write to the repository" in refusal(
        "own/new"
    )
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.failing = 503
    assert "--push=own/new: " in refusal("own/new") and "does not answer" in refusal("own/new")
    hub.failing = 0
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE forbids requests" in refusal("own/new") and "models/own/new" not in hub.repositories


def test_export_checkpoint_makes_the_model_card_before_the_export(trained, tmp_path, monkeypatch) -> None:
    hub, run = trained
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    copy = RunFolder(tmp_path / "run")
    shutil.copytree(run.path, copy.path)
    config: Any = OmegaConf.load(copy.config)
    config.tracking.experiment = "${oc.env:NO_SUCH_NAME}"
    OmegaConf.save(config, copy.config)
    message = message_of(lambda: export_checkpoint(copy.checkpoint(2), tmp_path / "out", push="own/new"))
    assert "NO_SUCH_NAME" in message and not (tmp_path / "out").exists() and "models/own/new" not in hub.repositories
    config.model.path = "${oc.env:NO_SUCH_MODEL}"
    OmegaConf.save(config, copy.config)
    message = message_of(lambda: export_checkpoint(copy.checkpoint(2), tmp_path / "out"))
    assert message == f"{copy.config} does not name the model that was trained: name its folder with --model"
