"""A recipe on a model and data of the Hugging Face hub, on a cluster of two machines, with a stand-in of the hub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from integration_tests.conftest import Recipe, recipes_in
from integration_tests.machines import Machines, machines
from rl_plugins.run_folder import RunFolder, read_metrics
from rl_plugins.tests.hub_server import StandIn, environment_of, serving

pytestmark = pytest.mark.extended

OPTIONS = (
    "model.path=own/tiny@v1", "reference.path=own/tiny", "data.train_files=[hf://datasets/own/sums/data/train.parquet]",
    "data.val_files=[hf://datasets/own/sums/data/test.parquet]", "batch.prompts_per_step=4",
    "batch.samples_per_prompt=4", "run.eval_every=2", "tracking.enabled=false", "placement.device=cpu",
    "run.checkpoint_every=1", "optimizer.lr=1e-3", "algorithm.kl.coefficient=0.05", "placement.num_workers=2",
)  # fmt: skip


@pytest.fixture
def hub(workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """A hub with a model and data, which processes of this test use."""
    with serving() as hub:
        hub.add("models/own/tiny", workplace / "tiny", ref="v1")
        hub.add("models/own/tiny", workplace / "tiny")
        hub.add(
            "datasets/own/sums", {f"data/{file.name}": file.read_bytes() for file in (workplace / "data").iterdir()}
        )
        for name, value in environment_of(hub, tmp_path / "cache").items():
            monkeypatch.setenv(name, value)
        yield hub


@pytest.fixture
def cluster(hub: StandIn) -> Iterator[Machines]:
    """A cluster whose machines know the hub."""
    with machines() as cluster:
        yield cluster


def test_recipe_on_two_machines_trains_and_resumes_at_the_commits_of_its_start(
    hub: StandIn, cluster: Machines, workplace: Path, tmp_path: Path
) -> None:
    cluster.resize(3, 3)
    environment = environment_of(hub, tmp_path / "cache")
    with recipes_in(tmp_path, workplace, cluster.address) as start:

        def run(steps: int) -> Recipe:
            options = (*OPTIONS, f"run.steps={steps}", "run.resume=auto")
            return start("grpo", "hub", *options, new_interpreter=True, **environment)

        first = run(2)
        assert first.wait() == 0, first.tail()
        folder = RunFolder(first.run)
        commits = json.loads(folder.hub.read_text())
        assert commits.keys() == {"models/own/tiny@v1", "models/own/tiny@main", "datasets/own/sums@main"}
        weights = hub.downloads("model.safetensors")
        # The driver has no part in the training, and both machines share a cache: one download for each model.
        assert len(weights) == len(set(weights)) == 2
        hub.add("models/own/tiny", {}, ref="v1")
        hub.add("models/own/tiny", {})
        hub.requests.clear()
        second = run(4)
        assert second.wait() == 0, second.tail()
        assert hub.requests == []
        assert OmegaConf.load(folder.config).model.path == f"own/tiny@{commits['models/own/tiny@v1']}"
        assert list(read_metrics(folder.metrics)["train/loss"]) == [1, 2, 3, 4]
        assert (folder.export / "model.safetensors").is_file()
