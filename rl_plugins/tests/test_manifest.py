"""Manifest of a checkpoint: each kind of damage is found, and the file is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rl_plugins.manifest import CheckpointWriter, find_damage, read_manifest, without
from rl_plugins.tests.files import flip_byte, rewrite_manifest
from rl_plugins.tests.loops import for_each

FILES = {"state/policy/weights": b"w" * 100, "state/critic/weights": b"c" * 100, "random_state_0.pt": b"r" * 10}


@pytest.fixture
def make(tmp_path: Path) -> Callable[[], Path]:
    """Function that makes a checkpoint."""
    numbers = iter(range(100))

    def checkpoint() -> Path:
        folder = tmp_path / f"checkpoint_{next(numbers):08d}"
        for name, content in FILES.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        rewrite_manifest(folder)
        return folder

    return checkpoint


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def replace_all(file: Path) -> None:
    file.write_bytes(b"x" * 100)


DAMAGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "flipped": ("state/policy/weights", flip_byte, "has another content than its manifest says"),
    "foreign content": ("state/policy/weights", replace_all, "has another content than its manifest says"),
    "truncated": ("state/critic/weights", truncate, "has 99 bytes, and its manifest says 100"),
    "empty": ("random_state_0.pt", lambda file: file.write_bytes(b""), "has 0 bytes, and its manifest says 10"),
    "missing": ("random_state_0.pt", Path.unlink, "is missing"),
    "foreign file": ("random_state_1.pt", Path.touch, "is not a file of this checkpoint"),
    "garbled manifest": ("manifest.json", lambda file: file.write_text(file.read_text()[:50]), "is damaged"),
    "other manifest": ("manifest.json", lambda file: file.write_text('{"files": [1]}'), "is damaged"),
}


@for_each("name", DAMAGES)
def test_find_damage_names_the_file(make: Callable[[], Path], name: str) -> None:
    checkpoint = make()
    assert find_damage(checkpoint) is None
    file, harm, description = DAMAGES[name]
    harm(checkpoint / file)
    assert (find_damage(checkpoint) or "").startswith(f"{checkpoint / file} {description}")


def test_find_damage_accepts_the_rest_of_a_manifest_whose_writer_was_killed(make: Callable[[], Path]) -> None:
    checkpoint = make()
    (checkpoint / ".manifest.json.7.tmp").touch()
    assert find_damage(checkpoint) is None


def test_find_damage_without_a_manifest(make: Callable[[], Path]) -> None:
    checkpoint = make()
    (checkpoint / "manifest.json").unlink()
    assert "is not a complete checkpoint" in (find_damage(checkpoint) or "")


def test_find_damage_is_shared_by_the_ranks(make: Callable[[], Path]) -> None:
    checkpoint = make()
    flip_byte(checkpoint / "state" / "policy" / "weights")
    found = [find_damage(checkpoint, rank=rank, num_ranks=3) for rank in range(3)]
    assert sum(damage is not None for damage in found) == 1


def test_manifest_without_a_model_that_is_removed_afterwards(make: Callable[[], Path]) -> None:
    checkpoint = make()
    without(checkpoint, "state/critic")
    assert read_manifest(checkpoint).keys() == {"state/policy/weights", "random_state_0.pt"}
    # The process can be killed here, before the files are removed.
    assert find_damage(checkpoint) is None


def test_checkpoint_writer_keeps_the_first_error_and_writes_no_later_file(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path)
    writer.save(1, tmp_path / "missing" / "file")
    writer.save(2, tmp_path / "other")
    writer.save_text("text", tmp_path / "text")
    assert (writer.failure or "").startswith(f"{tmp_path / 'missing' / 'file'} cannot be written (No such file")
    assert not list(tmp_path.iterdir()) and writer.files == {}
