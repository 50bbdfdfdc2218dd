"""Checkpoints in an SQLite store: records, and the best checkpoints, also after interruptions."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from rl_plugins.callbacks.best_checkpoints import BestCheckpoints
from rl_plugins.callbacks.checkpoint import PolicyCheckpoint
from rl_plugins.callbacks.checkpoint_artifacts import (
    BestUpload,
    manifest_digest,
    record_checkpoint,
    upload_best,
)
from rl_plugins.run_folder import RunFolder
from rl_plugins.tests.callbacks.training import alter, build_stage, train
from rl_plugins.tests.files import rewrite_manifest
from rl_plugins.tests.patience import patient
from rl_plugins.tracking.loggers import MLflowTracking
from rl_plugins.tracking.run import TrackedRun

pytestmark = pytest.mark.usefixtures("quick_sender")
REWARDS = [0.1, 0.5, 0.3, 0.7, 0.9, 0.2]


@pytest.fixture
def save(folder: RunFolder) -> Callable[..., Path]:
    def save(step: int, content: str) -> Path:
        path = folder.best(step)
        (path / "state").mkdir(parents=True, exist_ok=True)
        (path / "state" / "weights").write_text(content)
        (path / "metric.json").write_text(json.dumps({"val/reward": step}))
        rewrite_manifest(path)
        return path

    return save


def stored(run: TrackedRun) -> dict[str, str]:
    """Return the checkpoints in the store, by the content of their one file."""
    local = Path(run.client.download_artifacts(run.run_id, ""))
    return {path.name: (path / "state" / "weights").read_text() for path in sorted(local.glob("best_*"))}


def callbacks(folder: RunFolder, *, keep: int, count: int) -> list[Any]:
    options: Any = {"metric": "train/reward", "mode": "max"}
    return [
        PolicyCheckpoint(folder.path, every=1, keep_last=1),
        BestCheckpoints(folder.path, keep=keep, **options),
        BestUpload(folder.path, count=count, **options),
    ]


def test_best_upload_keeps_the_best_checkpoints_in_the_store_and_never_more(
    store: str, folder: RunFolder, tracking: Callable[..., MLflowTracking], monkeypatch: pytest.MonkeyPatch
) -> None:
    log_artifacts, most = MlflowClient.log_artifacts, []

    def looked_at(client: MlflowClient, run_id: str, *arguments: Any) -> None:
        log_artifacts(client, run_id, *arguments)
        most.append(sum(file.path.startswith("best_") for file in client.list_artifacts(run_id)))

    monkeypatch.setattr(MlflowClient, "log_artifacts", looked_at)
    stage = build_stage(len(REWARDS))
    alter(stage, {step: {"train/reward": reward} for step, reward in enumerate(REWARDS, start=1)})
    train(stage, callbacks(folder, keep=3, count=2), loggers=[tracking()])
    client, run_id = MlflowClient(store), folder.tracking_run.read_text()
    names = {file.path for file in client.list_artifacts(run_id)}
    assert names == {"best_00000004", "best_00000005"} and max(most) == 2
    # The store has the files of the folder.
    for name in names:
        local = Path(client.download_artifacts(run_id, name))
        files = [path.relative_to(local) for path in local.rglob("*") if path.is_file()]
        assert len(files) > 2 and all((local / f).read_bytes() == (folder.path / name / f).read_bytes() for f in files)


def test_upload_best_sends_a_checkpoint_again_after_an_outage(
    folder: RunFolder, run: TrackedRun, save: Callable[..., Path], tracking: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_artifacts, left = MlflowClient.log_artifacts, iter(range(2))

    def cut_off(client: MlflowClient, run_id: str, local: str, name: str) -> None:
        if next(left, None) is None:
            log_artifacts(client, run_id, local, name)
        else:
            log_artifacts(client, run_id, str(Path(local) / "state"), f"{name}/half")
            raise OSError("connection reset")

    best = [save(step, str(step)) for step in (3, 7)]
    monkeypatch.setattr(MlflowClient, "log_artifacts", cut_off)
    logger = tracking()
    sent = threading.Event()
    logger.submit(lambda found: upload_best(found, best))
    logger.submit(lambda _: sent.set())
    assert sent.wait(patient(60)), "the call after the upload was not made"
    logger.finalize("success", patient(60))
    assert logger.all_sent() and logger.sender.failures == 2
    assert stored(run) == {"best_00000003": "3", "best_00000007": "7"}
    assert not run.client.list_artifacts(run.run_id, "best_00000003/half")
    # And nothing is sent twice.
    monkeypatch.setattr(MlflowClient, "log_artifacts", None)
    upload_best(run, best)


def test_upload_best_replaces_a_checkpoint_of_the_same_step(run: TrackedRun, save: Callable[..., Path]) -> None:
    upload_best(run, [save(3, "first")])
    upload_best(run, [save(3, "of the resumed run")])
    assert stored(run) == {"best_00000003": "of the resumed run"}


def test_upload_best_sends_a_checkpoint_removed_from_the_store_again(
    run: TrackedRun, save: Callable[..., Path]
) -> None:
    best = save(3, "three")
    upload_best(run, [best])
    shutil.rmtree(Path(run.client.download_artifacts(run.run_id, "best_00000003")))
    upload_best(run, [best])
    assert stored(run) == {"best_00000003": "three"}


def test_upload_best_removes_the_upload_of_a_checkpoint_that_vanished(
    run: TrackedRun, save: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    log_artifacts, old, new = MlflowClient.log_artifacts, save(3, "old"), save(7, "new")

    def gone(client: MlflowClient, run_id: str, local: str, name: str) -> None:
        log_artifacts(client, run_id, str(Path(local) / "state"), f"{name}/state")
        shutil.rmtree(local)
        raise FileNotFoundError(local)

    with monkeypatch.context() as during:
        during.setattr(MlflowClient, "log_artifacts", gone)
        upload_best(run, [old])
    upload_best(run, [new])
    assert stored(run) == {"best_00000007": "new"}
    assert {key for key in run.client.get_run(run.run_id).data.tags if key.startswith("uploaded")} == {
        "uploaded.best_00000007"
    }


def test_upload_best_of_a_refused_checkpoint_does_not_block_later_calls(
    folder: RunFolder, run: TrackedRun, save: Callable[..., Path], tracking: Any, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    from requests import HTTPError, Response

    too_large = Response()
    too_large.status_code = 413

    def refused(*_: Any) -> None:
        raise HTTPError("413 Request Entity Too Large", response=too_large)

    best = save(3, "large")
    monkeypatch.setattr(MlflowClient, "log_artifacts", refused)
    logger = tracking()
    logger.submit(lambda found: upload_best(found, [best]))
    logger.submit(lambda found: found.client.set_tag(found.run_id, "after", "it"))
    logger.finalize("success", patient(60))
    assert run.client.get_run(run.run_id).data.tags["after"] == "it" and logger.sender.failures == 0
    assert any("could not be recorded: 413" in record.getMessage() for record in caplog.records)


def test_record_checkpoint_records_a_digest_of_the_content(folder: RunFolder, run: TrackedRun, tmp_path: Path) -> None:
    checkpoint = folder.checkpoint(20)
    (checkpoint / "state").mkdir(parents=True)
    (checkpoint / "state" / "large").write_bytes(b"a" * 5 * 2**20)
    digests = set()
    for last in (b"1", b"2"):
        (checkpoint / "state" / "clock").write_bytes(last)
        rewrite_manifest(checkpoint)
        digests.add(manifest_digest(checkpoint))
        with (checkpoint / "state" / "large").open("ab") as large:
            large.write(last)
        rewrite_manifest(checkpoint)
        digests.add(manifest_digest(checkpoint))
    assert len(digests) == 4
    record_checkpoint(run, checkpoint)
    record_checkpoint(run, folder.checkpoint(40))
    tags = run.client.get_run(run.run_id).data.tags
    assert tags["checkpoint.path"] == str(checkpoint) and tags["checkpoint.digest"] in digests
    path = run.client.download_artifacts(run.run_id, "checkpoints/step_00000020.json", str(tmp_path))
    assert json.loads(Path(path).read_text())["files"]["state/clock"]["bytes"] == 1
