"""A recipe on models and data of the Hugging Face hub, on a cluster with a stand-in of the hub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from integration_tests.conftest import recipes_in
from integration_tests.machines import Machines, machines
from rl_plugins.run_folder import RunFolder, read_metrics
from rl_plugins.tests.hub.hub_server import StandIn, environment_of, serving

pytestmark = pytest.mark.extended

OPTIONS = (
    "model.path=own/tiny", "model.revision=v1", "reference.path=own/base", "algorithm.kl.coefficient=0.05",
    "data.train_files=[hf://datasets/own/sums/data/train.parquet]",
    "data.val_files=[hf://datasets/own/sums/data/test.parquet]", "batch.prompts_per_step=4",
    "batch.samples_per_prompt=4", "run.steps=2", "run.eval_every=0", "tracking.enabled=false",
    "placement.device=cpu", "placement.num_workers=1", "optimizer.lr=1e-3",
)  # fmt: skip


@pytest.fixture
def hub(workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """A hub with a model and data, which processes of this test use."""
    with serving() as hub:
        hub.add("models/own/tiny", workplace / "tiny", ref="v1")
        hub.add("models/own/base", workplace / "tiny")
        rows = {f"data/{file.name}": file.read_bytes() for file in (workplace / "data").iterdir()}
        hub.add("datasets/own/sums", rows)
        for name, value in environment_of(hub, tmp_path / "cache").items():
            monkeypatch.setenv(name, value)
        yield hub


@pytest.fixture
def cluster(hub: StandIn) -> Iterator[Machines]:
    """A cluster whose machines know the hub.

    The libraries of the hub read its address at their import.
    """
    with machines(new_interpreters=True) as cluster:
        yield cluster


def test_recipe_trains_on_models_and_data_of_the_hub_on_a_cluster(
    hub: StandIn, cluster: Machines, workplace: Path, tmp_path: Path
) -> None:
    cluster.resize(3)
    environment = environment_of(hub, tmp_path / "cache")
    with recipes_in(tmp_path, workplace, cluster.address) as start:
        recipe = start("grpo", "hub", *OPTIONS, new_interpreter=True, **environment)
        assert recipe.wait() == 0, recipe.tail()
    folder = RunFolder(recipe.run)
    commits = json.loads(folder.pinned_versions.read_text())
    assert commits.keys() == {"models/own/tiny@v1", "models/own/base@main", "datasets/own/sums@main"}
    # Worker, engine and driver need each model, and one process of the machine downloads.
    weights = hub.downloads("model.safetensors")
    assert len(weights) == len(set(weights)) == 2
    config = OmegaConf.load(folder.config)
    assert config.model.path == f"own/tiny@{commits['models/own/tiny@v1']}"
    assert config.reference.path == f"own/base@{commits['models/own/base@main']}"
    assert list(read_metrics(folder.metrics)["train/loss"]) == [1, 2]
    assert (folder.export / "model.safetensors").is_file()
