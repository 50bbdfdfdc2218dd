"""Copy of a run's folder in storage. The storage of these tests is a folder."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest

from rl_plugins.callbacks.checkpoint_files import remove_folder, remove_model
from rl_plugins.config.recipe import RecipeConfig
from rl_plugins.errors import CheckpointError, ConfigError, StorageError
from rl_plugins.launch import stored_run as module
from rl_plugins.launch.stored_run import StoredRun, stored_run
from rl_plugins.manifest import MANIFEST, find_damage
from rl_plugins.run_folder import RunFolder, append_metrics
from rl_plugins.storage import Storage
from rl_plugins.tests.files import flip_byte, rewrite_manifest
from rl_plugins.tests.loops import for_each
from rl_plugins.tests.patience import patient, wait_until


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_EVERY_S", "_LONGEST_PAUSE_S"):
        monkeypatch.setattr(module, name, 0.01)


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """Folder of the run in storage."""
    return tmp_path / "there" / "run"


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage.at("run.storage", f"file://{tmp_path}/there").inside("run")


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "here" / "run")
    folder.path.mkdir(parents=True)
    folder.config.write_text("run: {}\n")
    return folder


def save(path: Path) -> None:
    """Write a checkpoint."""
    for name in ("state/policy/a", "state/critic/a", "random_state_0.pt"):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(f"{path.name} {name}")
    rewrite_manifest(path)


def step_to(run: RunFolder, step: int, keep: int = 2) -> None:
    """Do as training does: metrics, a checkpoint, and at most `keep` checkpoints."""
    append_metrics(run.metrics, {"train/loss": 1.0}, step)
    save(run.checkpoint(step))
    for old in run.checkpoints()[:-keep]:
        remove_folder(old)


def finish(run: RunFolder) -> None:
    run.export.mkdir()
    (run.export / "model.safetensors").write_text("weights")
    run.finished.write_text("{}")


def copied(storage: Storage, run: RunFolder, keep: int = 2, work: Callable[[], object] = lambda: None) -> None:
    with StoredRun(storage, run, keep=keep, stall_s=patient(60)).copied():
        work()


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def restored(storage: Storage, path: Path) -> RunFolder:
    folder = RunFolder(path)
    StoredRun(storage, folder, keep=2).restore()
    return folder


def test_copied_makes_the_storage_equal_to_the_folder_without_files_of_the_machine(
    storage: Storage, run: RunFolder, there: Path
) -> None:
    def train() -> None:
        for step in (2, 4, 6):
            step_to(run, step)
            wait_until(lambda: (there / f"checkpoint_{step:08d}" / MANIFEST).is_file(), f"the copy of {step}")  # noqa: B023
        save(run.best(4))
        for name in ("rollouts/step/a", "damaged_1_checkpoint_00000002/a", ".lock", "stop", "samples/.new.tmp"):
            (run.path / name).parent.mkdir(parents=True, exist_ok=True)
            (run.path / name).write_text("only here")
        (run.samples / "step_00000002.json").write_text("[]")
        finish(run)

    copied(storage, run, work=train)
    assert [path.name for path in sorted(there.iterdir())] == [
        "best_00000004", "checkpoint_00000004", "checkpoint_00000006", "config.yaml", "finished.json", "metrics.jsonl",
        "policy", "samples",
    ]  # fmt: skip
    assert "samples/.new.tmp" not in names(there)
    for path in there.iterdir():
        assert names(path) == [name for name in names(run.path / path.name) if ".new" not in name]
    assert find_damage(there / "checkpoint_00000006") is None
    assert not run.linked.is_dir() or names(run.linked) == []


def test_copied_follows_removed_models_removed_files_and_a_checkpoint_written_again(
    storage: Storage, run: RunFolder, there: Path
) -> None:
    step_to(run, 2)
    step_to(run, 4)
    finish(run)
    copied(storage, run)
    remove_model(run.checkpoint(2), "critic")
    remove_folder(run.checkpoint(4))
    save(run.checkpoint(4))
    (run.checkpoint(4) / "random_state_1.pt").write_text("of another worker")
    rewrite_manifest(run.checkpoint(4))
    before = (there / "checkpoint_00000002" / "state/policy/a").stat().st_mtime_ns

    copied(storage, run, work=run.finished.unlink)
    assert not (there / "finished.json").exists()
    for step in (2, 4):
        assert names(there / f"checkpoint_{step:08d}") == names(run.checkpoint(step))
        assert find_damage(there / f"checkpoint_{step:08d}") is None
    assert not (there / "checkpoint_00000002" / "state/critic").exists() or not names(
        there / "checkpoint_00000002" / "state/critic"
    )
    assert (there / "checkpoint_00000002" / "state/policy/a").stat().st_mtime_ns == before, "copied again"


def test_copied_completes_a_checkpoint_with_a_manifest_in_storage_before_all_files(
    storage: Storage, run: RunFolder, there: Path
) -> None:
    """Another program has begun to copy the run."""
    step_to(run, 2)
    copied(storage, run)
    checkpoint = there / "checkpoint_00000002"
    (checkpoint / "state/policy/a").unlink()
    (checkpoint / "state/critic/a").write_text("half")
    before = (checkpoint / "random_state_0.pt").stat().st_mtime_ns
    copied(storage, run)
    assert find_damage(checkpoint) is None
    assert (checkpoint / "random_state_0.pt").stat().st_mtime_ns == before, "copied again"


def test_copied_and_restore_know_checkpoints_by_whole_names(storage: Storage, run: RunFolder, tmp_path: Path) -> None:
    """A user keeps copies of checkpoints under other names, older and newer than the checkpoints of the run."""
    step_to(run, 2)
    step_to(run, 4)
    kept = ["best_00000002_keep", "checkpoint_00000002_keep", "checkpoint_00000006_keep"]
    for name in (*kept, "samples/checkpoint_00000008"):
        save(run.path / name)
    whole = names(run.path)
    copied(storage, run)
    assert sorted(storage.files()) == whole
    # The next process reads the manifests in storage.
    remove_folder(run.checkpoint(2))
    copied(storage, run)
    assert sorted(storage.files()) == whole
    new = restored(storage, tmp_path / "new" / "run")
    assert new.checkpoints() == [new.checkpoint(4)]
    assert all(find_damage(new.path / name) is None for name in kept)


def test_copied_keeps_the_best_checkpoint_in_storage_until_the_next_one_is_there(
    storage: Storage, run: RunFolder, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step_to(run, 2)
    save(run.best(2))
    copied(storage, run)
    append_metrics(run.metrics, {"train/loss": 1.0}, 4)
    send, remove_stored = Storage.send, Storage.remove_folder
    manifest = there / "best_00000004" / MANIFEST
    removed: list[tuple[str, bool]] = []

    def send_during_training(self: Storage, file: BinaryIO, name: str, on_part: Callable[[], None]) -> None:
        # The checkpoints for this copy are chosen already.
        if name == "metrics.jsonl":
            save(run.best(4))
            remove_folder(run.best(2))
        send(self, file, name, on_part)

    def remove_noted(self: Storage, name: str) -> None:
        removed.append((name, manifest.is_file()))
        remove_stored(self, name)

    monkeypatch.setattr(Storage, "send", send_during_training)
    monkeypatch.setattr(Storage, "remove_folder", remove_noted)
    copied(storage, run, work=lambda: wait_until(lambda: removed, "the removal of the old best checkpoint"))
    assert removed == [("best_00000002", True)]
    assert find_damage(manifest.parent) is None


def test_copied_finishes_a_checkpoint_that_training_removes_meanwhile(
    storage: Storage, run: RunFolder, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the second names, a slow storage would never get a whole checkpoint."""
    step_to(run, 2)
    removed = threading.Event()
    send = Storage.send

    def send_late(self: Storage, file: BinaryIO, name: str, on_part: Callable[[], None]) -> None:
        if name == "checkpoint_00000002/state/policy/a":
            assert removed.wait(patient(60))
        send(self, file, name, on_part)

    monkeypatch.setattr(Storage, "send", send_late)

    def train() -> None:
        wait_until(lambda: (there / "checkpoint_00000002").is_dir(), "the first file")
        step_to(run, 4, keep=1)
        removed.set()
        wait_until((there / "checkpoint_00000002" / MANIFEST).is_file, "the checkpoint")
        assert find_damage(there / "checkpoint_00000002") is None

    copied(storage, run, keep=3, work=train)
    assert [path.name for path in sorted(there.glob("checkpoint_*"))] == ["checkpoint_00000002", "checkpoint_00000004"]


def test_copied_tries_again_after_failures_and_sends_no_file_twice(
    storage: Storage, run: RunFolder, there: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step_to(run, 2)
    send, sent = Storage.send, list[str]()

    def send_seldom(self: Storage, file: BinaryIO, name: str, on_part: Callable[[], None]) -> None:
        sent.append(name)
        if len(sent) % 2:
            raise StorageError(f"{self.shown} does not take {name} (api_key=word)")
        send(self, file, name, on_part)

    monkeypatch.setattr(Storage, "send", send_seldom)
    copied(storage, run)
    assert find_damage(there / "checkpoint_00000002") is None
    number = len(names(run.path)) - (run.lock.is_file())
    assert len(sent) == 2 * number and len(set(sent)) == number
    said = capsys.readouterr().out
    assert "does not take config.yaml (api_key=***): failure 1, the next try is in " in said
    assert f"has all files of the run after {number} failures" in said


def test_copied_ends_with_an_error_if_the_storage_lacks_files(
    storage: Storage, run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step_to(run, 2)
    (tmp_path / "there").write_text("a file in the place of the folder")
    lacks = r"there/run lacks the newest files of the run, and nothing was copied for 0 s\. \S+/here/run has all files"
    with pytest.raises(StorageError, match=lacks), StoredRun(storage, run, keep=2, stall_s=0.2).copied():
        pass
    with pytest.raises(ConfigError, match="of training"), StoredRun(storage, run, keep=2, stall_s=0.2).copied():
        raise ConfigError("the error of training")
    assert "lacks the newest files" in capsys.readouterr().out
    with pytest.raises(KeyboardInterrupt), StoredRun(storage, run, keep=2, stall_s=1000).copied():
        raise KeyboardInterrupt
    assert "may lack the newest files" in capsys.readouterr().out


def test_copied_ends_with_an_error_if_the_last_checkpoint_has_no_manifest(storage: Storage, run: RunFolder) -> None:
    step_to(run, 2)
    (run.checkpoint(2) / MANIFEST).unlink()
    with pytest.raises(StorageError, match="lacks the newest"), StoredRun(storage, run, keep=2, stall_s=0.2).copied():
        pass


def test_restore_fetches_the_run_onto_a_new_machine(
    storage: Storage, run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (2, 4):
        step_to(run, step)
    save(run.best(2))
    run.samples.mkdir()
    (run.samples / "step_00000002.json").write_text("[]")
    run.export.mkdir()
    (run.export / "config.json").write_text("an export that has not finished")
    copied(storage, run)
    new = restored(storage, tmp_path / "new" / "run")
    assert [path.name for path in sorted(new.path.iterdir())] == [
        ".lock", "best_00000002", "checkpoint_00000004", "config.yaml", "metrics.jsonl", "samples",
    ]  # fmt: skip
    assert new.metrics.read_bytes() == run.metrics.read_bytes()
    assert all(find_damage(path) is None for path in (new.checkpoint(4), new.best(2)))
    assert "run: fetched checkpoint_00000004 from file://" in capsys.readouterr().out

    finish_again = RunFolder(new.path)
    finish(finish_again)
    copied(storage, finish_again)
    assert (restored(storage, tmp_path / "third" / "run").export / "model.safetensors").is_file()


def test_restore_passes_over_incomplete_and_damaged_checkpoints(
    storage: Storage, run: RunFolder, there: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (2, 4, 6):
        step_to(run, step, keep=3)
    copied(storage, run, keep=3)
    (there / "checkpoint_00000006" / MANIFEST).unlink()
    flip_byte(there / "checkpoint_00000004" / "state/policy/a")
    new = restored(storage, tmp_path / "new" / "run")
    assert new.checkpoints() == [new.checkpoint(2)]
    assert new.unfinished() == []
    assert "there/run/checkpoint_00000004 is damaged, and not used: " in capsys.readouterr().out
    # The new machine takes the place of the old one.
    copied(storage, new, keep=1)
    assert [path.name for path in there.glob("checkpoint_*")] == ["checkpoint_00000002"]
    flip_byte(there / "checkpoint_00000002" / "state/policy/a")
    with pytest.raises(CheckpointError, match=r"there/run has no intact checkpoint: give another run.name"):
        restored(storage, tmp_path / "third" / "run")


def test_restore_keeps_an_intact_checkpoint_here_and_replaces_an_older_or_damaged_one(
    storage: Storage, run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = RunFolder(tmp_path / "old" / "run")
    step_to(run, 2)
    shutil.copytree(run.path, old.path)
    step_to(run, 4)
    copied(storage, run)
    # The run went on elsewhere.
    restored(storage, old.path)
    assert old.checkpoints() == [old.checkpoint(2), old.checkpoint(4)]
    assert old.metrics.read_bytes() == run.metrics.read_bytes()
    append_metrics(run.metrics, {"train/loss": 1.0}, 5)
    before = run.metrics.read_bytes()
    restored(storage, run.path)
    assert run.metrics.read_bytes() == before
    flip_byte(run.checkpoint(4) / "state/policy/a")
    restored(storage, run.path)
    assert find_damage(run.checkpoint(4)) is None
    assert (run.path / "damaged_1_checkpoint_00000004").is_dir()
    assert "checkpoint_00000004 is damaged here, so it is now damaged_1_checkpoint_00000004" in capsys.readouterr().out


def test_restore_fetches_a_run_without_a_checkpoint_and_makes_no_folder_without_a_run(
    storage: Storage, run: RunFolder, tmp_path: Path
) -> None:
    new = restored(storage, tmp_path / "new" / "run")
    assert not new.path.exists()
    append_metrics(run.metrics, {"train/loss": 1.0}, 1)
    copied(storage, run)
    restored(storage, new.path)
    assert new.metrics.read_bytes() == run.metrics.read_bytes() and new.checkpoints() == []


@for_each(
    ("uri", "has_id"),
    [
        (None, False),
        ("sqlite:///{here}/mlflow.db", False),
        ("sqlite:////team/mlflow.db", False),
        ("sqlite:///{here}.db", True),
        ("http://mlflow", True),
    ],
)
def test_restored_run_has_the_run_of_a_store_that_another_machine_sees(
    uri: str | None, has_id: bool, tmp_path: Path
) -> None:
    config = RecipeConfig(stage="sft")
    config.run.name, config.run.storage, config.run.resume = "run", str(tmp_path / "there"), True
    config.run.output_dir = str(tmp_path / "new")
    config.tracking.uri = uri and uri.format(here=config.run.output_dir)
    (tmp_path / "new.db").touch()
    (tmp_path / "there" / "run").mkdir(parents=True, exist_ok=True)
    (tmp_path / "there" / "run" / "mlflow_run_id").write_text("489d")
    (tmp_path / "there" / "run" / "metrics.jsonl").write_text("{}\n")
    folder = RunFolder(tmp_path / "new" / "run")
    shutil.rmtree(folder.path, ignore_errors=True)
    stored = stored_run(config, folder)
    assert stored is not None
    stored.restore()
    assert folder.metrics.is_file() and folder.tracking_run.is_file() == has_id


def test_stored_run_refuses_a_new_run_where_the_storage_has_one(
    tmp_path: Path, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RecipeConfig(stage="sft")
    config.run.name = "run"
    assert stored_run(config, run) is None
    config.run.storage = str(tmp_path / "there")
    stored = stored_run(config, run)
    assert stored is not None and names(tmp_path / "there") == []
    with stored.copied():
        step_to(run, 2)
    with pytest.raises(ConfigError, match=r"the run \S+/there/run exists: continue it with run.resume=true"):
        stored_run(config, run)
    config.run.resume = "auto"
    assert stored_run(config, run) is not None
    (tmp_path / "file").touch()
    config.run.storage = str(tmp_path / "file")
    with pytest.raises(ConfigError, match=r"run.storage: \S+/file/run does not take "):
        stored_run(config, run)


@for_each("place", ["{folder}", "file://{folder}", "{folder}/run", "{link}"])
def test_stored_run_refuses_the_folder_of_the_run_as_storage(tmp_path: Path, place: str) -> None:
    folder, link = tmp_path / "outputs", tmp_path / "link"
    if not link.exists():
        folder.mkdir()
        link.symlink_to(folder)
    config = RecipeConfig(stage="sft")
    config.run.name, config.run.storage = "run", place.format(folder=folder, link=link)
    with pytest.raises(ConfigError, match=r"run.storage=\S+: the copy and the run .* would be in one folder"):
        stored_run(config, RunFolder(folder / "run"))
