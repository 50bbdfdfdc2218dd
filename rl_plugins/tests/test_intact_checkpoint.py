"""Choice of an intact checkpoint, also by several ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_plugins.errors import CheckpointError
from rl_plugins.intact_checkpoint import check_state, newest_intact
from rl_plugins.run_folder import RunFolder
from rl_plugins.tests.files import flip_byte, rewrite_manifest
from rl_plugins.tests.ranks import run_ranks


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """Run with three checkpoints."""
    folder = RunFolder(tmp_path / "run")
    for step in (2, 4, 6):
        path = folder.checkpoint(step)
        path.mkdir(parents=True)
        for name in ("state", "random_state_0.pt", "random_state_1.pt"):
            (path / name).write_bytes(name.encode() * 100)
        rewrite_manifest(path)
    return folder


def choose(rank: int, folder: Path) -> Path | None:
    return newest_intact(RunFolder(folder))


def test_newest_intact_passes_over_damaged_checkpoints(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    flip_byte(run.checkpoint(6) / "state")
    (run.checkpoint(4) / "random_state_1.pt").unlink()
    assert newest_intact(run) == run.checkpoint(2)
    said = capsys.readouterr().out.splitlines()
    assert said == [
        f"run: {run.checkpoint(6) / 'state'} has another content than its manifest says, so checkpoint_00000006 is now "
        "damaged_1_checkpoint_00000006, and not used",
        f"run: {run.checkpoint(4) / 'random_state_1.pt'} is missing, so checkpoint_00000004 is now "
        "damaged_1_checkpoint_00000004, and not used",
        f"run: continuing from {run.checkpoint(2)}",
    ]
    assert run.latest_checkpoint() == newest_intact(run) == run.checkpoint(2)
    assert len(list(run.path.glob("damaged_1_*"))) == 2
    assert capsys.readouterr().out == f"run: continuing from {run.checkpoint(2)}\n"


def test_newest_intact_of_several_ranks_is_one_checkpoint(run: RunFolder) -> None:
    flip_byte(run.checkpoint(6) / "random_state_1.pt")
    outcomes = run_ranks(choose, run.path)
    assert [chosen for chosen, _ in outcomes] == [run.checkpoint(4)] * 2
    assert "".join(said for _, said in outcomes).count(f"continuing from {run.checkpoint(4)}") == 1


def test_newest_intact_without_an_intact_checkpoint(run: RunFolder) -> None:
    for checkpoint in run.checkpoints():
        (checkpoint / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"checkpoint_00000006 .*run has no intact checkpoint: give another"):
        newest_intact(run)
    assert newest_intact(RunFolder(run.path / "none")) is None and len(run.checkpoints()) == 3


def test_check_state_names_the_file_and_the_intact_checkpoint_before(run: RunFolder) -> None:
    flip_byte(run.checkpoint(6) / "state")
    flip_byte(run.checkpoint(4) / "state")
    file, before = run.checkpoint(6) / "state", run.checkpoint(2)
    with pytest.raises(CheckpointError, match=rf"^{file} has another .*: the intact checkpoint before is {before}$"):
        check_state(run.checkpoint(6) / "state")
    flip_byte(run.checkpoint(2) / "state")
    with pytest.raises(CheckpointError, match="there is no intact checkpoint before"):
        check_state(run.checkpoint(6) / "state")


def test_check_state_does_not_read_a_checked_checkpoint_again(run: RunFolder) -> None:
    flip_byte(run.checkpoint(6) / "state")
    check_state(run.checkpoint(6) / "state", known_intact=run.checkpoint(6))
    with pytest.raises(CheckpointError, match="another content"):
        check_state(run.checkpoint(6) / "state", known_intact=run.checkpoint(4))


def test_check_state_of_a_checkpoint_without_a_manifest(run: RunFolder) -> None:
    """`Trainer.save_checkpoint` writes no manifest."""
    (run.checkpoint(6) / "manifest.json").unlink()
    check_state(run.checkpoint(6) / "state")
