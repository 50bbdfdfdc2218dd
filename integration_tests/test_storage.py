"""Runs, data and models in object storage: a local server that speaks S3."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from moto.server import ThreadedMotoServer
from pyarrow.fs import FileSelector, S3FileSystem

from integration_tests.campaign import differences
from integration_tests.conftest import Recipe
from integration_tests.pace import Pace
from integration_tests.test_local_launcher import LOCAL, WITHOUT_RAY
from rl_plugins.errors import StorageError
from rl_plugins.launch.stored_run import StoredRun
from rl_plugins.manifest import MANIFEST, find_damage
from rl_plugins.run_folder import RunFolder
from rl_plugins.storage import Storage
from rl_plugins.tests.files import rewrite_manifest

BUCKET = "bucket"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret-word", "AWS_REGION": "us-east-1"}


class S3:
    """A server with one bucket."""

    def __init__(self) -> None:
        # The system chooses a free port.
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
        self._server.start()
        host, port = self._server.get_host_and_port()
        self.variables = {**CREDENTIALS, "AWS_ENDPOINT_URL": f"http://{host}:{port}"}
        self.files = S3FileSystem(
            access_key="key", secret_key="secret-word", region="us-east-1", scheme="http",
            endpoint_override=f"{host}:{port}", allow_bucket_creation=True,
        )  # fmt: skip
        self.files.create_dir(BUCKET)

    def names(self, folder: str) -> list[str]:
        """Return the paths of all files in a folder of the bucket."""
        path = f"{BUCKET}/{folder}"
        found = self.files.get_file_info(FileSelector(path, recursive=True, allow_not_found=True))
        return sorted(info.path.removeprefix(f"{path}/") for info in found if info.is_file)

    def stop(self) -> None:
        """End the server."""
        self._server.stop()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3]:
    server = S3()
    yield server
    server.stop()


@pytest.fixture
def s3(s3_server: S3, monkeypatch: pytest.MonkeyPatch) -> S3:
    """The server, at the endpoint of this process."""
    for name, value in s3_server.variables.items():
        monkeypatch.setenv(name, value)
    return s3_server


def save(run: RunFolder, step: int) -> None:
    checkpoint = run.checkpoint(step)
    (checkpoint / "state").mkdir(parents=True)
    (checkpoint / "state" / "weights").write_bytes(bytes(20_000_000))
    (checkpoint / "random_state_0.pt").write_text(str(step))
    rewrite_manifest(checkpoint)


def test_stored_run_is_copied_kept_and_restored_in_s3(s3: S3, tmp_path: Path) -> None:
    run, new = RunFolder(tmp_path / "here" / "run"), RunFolder(tmp_path / "new" / "run")
    storage = Storage.at("run.storage", f"s3://{BUCKET}/unit").inside("run")
    for step in (1, 2, 3):
        if step > 2:
            shutil.rmtree(run.checkpoint(step - 2))
        save(run, step)
        run.metrics.write_text(f"{step}\n")
        copy = StoredRun(storage, run, keep=2)
        copy.try_to_write()
        with copy.copied():
            pass
    expected = [f"checkpoint_0000000{step}/{name}" for step in (2, 3) for name in (
        MANIFEST, "random_state_0.pt", "state/weights"
    )]  # fmt: skip
    assert s3.names("unit/run") == [*expected, "metrics.jsonl"]
    s3.files.delete_file(f"{BUCKET}/unit/run/checkpoint_00000003/{MANIFEST}")
    StoredRun(storage, new, keep=2).restore()
    assert new.checkpoints() == [new.checkpoint(2)] and find_damage(new.checkpoint(2)) is None
    assert new.metrics.read_text() == "3\n"
    # The incomplete checkpoint is newer than all checkpoints of the new machine.
    with StoredRun(storage, new, keep=2).copied():
        pass
    assert s3.names("unit/run") == [*expected[:3], "metrics.jsonl"]


def test_storage_without_the_bucket_refuses_the_first_file(s3: S3) -> None:
    storage = Storage.at("run.storage", "s3://nowhere/runs").inside("run")
    with pytest.raises(StorageError, match=r"^s3://nowhere/runs/run does not take .*NO_SUCH_BUCKET") as raised:
        StoredRun(storage, RunFolder("run"), keep=1).try_to_write()
    assert "secret-word" not in str(raised.value)


@pytest.mark.extended
def test_local_launcher_reads_data_and_model_from_s3_and_continues_elsewhere(
    s3: S3, start_recipe: Callable[..., Recipe], workplace: Path, tmp_path: Path
) -> None:
    storage = Storage.at("", f"s3://{BUCKET}/inputs")
    for file in (workplace / "data" / "train.parquet", *(workplace / "tiny").iterdir()):
        with file.open("rb") as opened:
            storage.send(opened, f"{file.parent.name}/{file.name}")
    options = (
        *LOCAL, *WITHOUT_RAY, f"run.storage=s3://{BUCKET}/local", "run.resume=auto", "data.val_files=[]",
        f"data.train_files=[s3://{BUCKET}/inputs/data/train.parquet]", f"model.path=s3://{BUCKET}/inputs/tiny",
    )  # fmt: skip
    first = start_recipe("grpo", "run", *options, "run.steps=2", **s3.variables)
    assert first.wait() == 0, first.tail()
    assert f"run: s3://{BUCKET}/inputs/tiny is {first.folder}/outputs/.models/tiny-" in first.tail()
    assert f"run: s3://{BUCKET}/local/run has all files of the run" in first.tail()
    shutil.rmtree(first.run)
    second = start_recipe("grpo", "run", *options, "run.steps=3", **s3.variables)
    assert second.wait() == 0, second.tail()
    assert "resumed from checkpoint_00000002" in second.tail()
    assert [row["step"] for row in second.trained()] == [1, 2, 3]
    weights = (second.run / "policy" / "model.safetensors").read_bytes()
    shutil.rmtree(second.run)
    third = start_recipe("grpo", "run", *options, "run.steps=3", **s3.variables)
    assert third.wait() == 0 and "the run is finished: step 3" in third.tail(), third.tail()
    assert (third.run / "policy" / "model.safetensors").read_bytes() == weights
    for log in (first, second, third):
        assert "secret-word" not in log.tail(1_000_000)


@pytest.mark.extended
def test_killed_run_with_background_checkpoints_continues_from_s3_with_the_same_bits(
    s3: S3, start_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    common = (
        "rollout.engine=transformers", "placement.num_workers=1", "run.deterministic=true", "run.steps=5",
        "run.checkpoint_every=2", "run.eval_every=0", "batch.prompts_per_step=4", "batch.samples_per_prompt=2",
        "optimizer.lr=1e-3", "algorithm.kl.coefficient=0.05", "tracking.enabled=false",
    )  # fmt: skip
    in_s3 = (f"run.storage=s3://{BUCKET}/runs", "run.async_checkpoints=true", "run.resume=auto")
    pace = Pace(tmp_path / "pace", samples=8)
    pace.allow(3)
    whole = start_recipe("grpo", "whole", *common, *Pace(tmp_path / "none", samples=8).overrides)
    broken = start_recipe("grpo", "broken", *common, *pace.overrides, *in_s3, **s3.variables)
    pace.wait(broken)
    broken.wait_for_words(f"broken: copied checkpoint_00000002 to s3://{BUCKET}/runs/broken")
    broken.kill()
    # The new machine has nothing.
    shutil.rmtree(broken.run)
    pace.allow_all()
    resumed = start_recipe("grpo", "broken", *common, *pace.overrides, *in_s3, **s3.variables)
    assert resumed.wait() == 0, resumed.tail()
    assert f"broken: fetched checkpoint_00000002 from s3://{BUCKET}/runs/broken" in resumed.tail(1_000_000)
    assert "resumed from checkpoint_00000002" in resumed.tail(1_000_000)
    assert whole.wait() == 0, whole.tail()
    assert differences(resumed.run, whole.run) == []
    stored = s3.names("runs/broken")
    assert {"finished.json", "report.html", "policy/model.safetensors", f"checkpoint_00000005/{MANIFEST}"} < set(stored)
    assert {name.partition("/")[0] for name in stored if name.startswith("checkpoint_0")} == {
        "checkpoint_00000004", "checkpoint_00000005",
    }  # fmt: skip
