"""Folders at an address. The storage of these tests is a folder; integration_tests/test_storage.py has a server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rl_plugins.errors import ConfigError, StorageError
from rl_plugins.storage import Storage, fetch_copy, folder_in, is_address, local_path
from rl_plugins.tests.loops import for_each


@for_each(
    ("path", "answer"),
    [("s3://bucket/a", True), ("fsspec+memory://a", True), ("/data/a", False), ("runs:/1/a", False), ("a://", True)],
)
def test_is_address_knows_addresses_from_paths(path: str, answer: bool) -> None:
    assert is_address(path) == answer


@for_each("path", ["s3://bucket/x", Path("s3://bucket/x"), "s3://:secret-word@bucket/x?key=secret-word"])
def test_local_path_refuses_addresses_also_as_a_path(path: str | Path) -> None:
    with pytest.raises(ConfigError, match=r"^folder=s3://\S*bucket/x: an address .* give a local path; ") as refused:
        local_path("folder", path)
    assert "secret-word" not in str(refused.value)


@for_each("path", ["outputs/run", "/shared/s3:/run", "a:b/c", "runs/a=b", Path("x")])
def test_local_path_returns_paths(path: str | Path) -> None:
    assert local_path("folder", path) == Path(path)


@for_each(
    ("address", "inside"),
    [
        ("s3://bucket/runs/", "s3://bucket/runs/one%20run"),
        ("s3://bucket/runs?region=a&scheme=http", "s3://bucket/runs/one%20run?region=a&scheme=http"),
        ("/shared/a?b", "/shared/a?b/one run"),
    ],
)
def test_folder_in_keeps_the_options_of_an_address(address: str, inside: str) -> None:
    assert folder_in(address, "one run") == inside


def test_storage_sends_lists_fetches_and_removes_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("first")
    storage = Storage.at("run.storage", f"file://{tmp_path}/there%20is/").inside("run")
    assert storage.shown == f"file://{tmp_path}/there%20is/run"
    assert storage.files() == {}
    for name in ("a", "deep/b"):
        with (tmp_path / "a").open("rb") as file:
            storage.send(file, name)
    assert {name: info.size for name, info in storage.files().items()} == {"a": 5, "deep/b": 5}
    assert (tmp_path / "there is" / "run" / "deep" / "b").read_text() == "first"
    (tmp_path / "a").write_text("second")
    with (tmp_path / "a").open("rb") as file:
        storage.send(file, "a")
    assert storage.read("a") == b"second"
    storage.fetch(["a", "deep/b"], tmp_path / "here")
    assert (tmp_path / "here" / "deep" / "b").read_text() == "first"
    assert (tmp_path / "here" / "a").stat().st_mtime_ns == storage.files()["a"].mtime_ns
    # Somebody else may have removed a file, or the storage, whose reply was lost.
    for _ in range(2):
        storage.remove("a")
        storage.remove_folder("deep")
    assert storage.files() == {}


def test_storage_makes_folders_in_a_file_system_of_fsspec(tmp_path: Path) -> None:
    """fsspec's local file system has folders, as sftp has, and refuses a file in a missing folder."""
    (tmp_path / "a").write_text("first")
    storage = Storage.at("run.storage", f"fsspec+file://{tmp_path}/there").inside("run")
    assert storage.local is None and storage.files() == {}
    for name in ("a", "deep/b", "deep/b"):
        with (tmp_path / "a").open("rb") as file:
            storage.send(file, name)
    assert {name: info.size for name, info in storage.files().items()} == {"a": 5, "deep/b": 5}
    storage.fetch(["a", "deep/b"], tmp_path / "here")
    assert (tmp_path / "here" / "deep" / "b").read_text() == "first"
    for _ in range(2):
        storage.remove("a")
        storage.remove_folder("deep")
    assert storage.files() == {}


@for_each("address", ["nowhere://bucket", "s3://me:word@/x", "relative/folder"])
def test_storage_refuses_an_address_that_pyarrow_does_not_open(address: str) -> None:
    with pytest.raises(ConfigError, match=r"run.storage=\S+: pyarrow does not open this address \(") as raised:
        Storage.at("run.storage", address)
    assert "word" not in str(raised.value)


def test_errors_of_the_storage_are_one_line_with_the_address_and_without_secrets(refused_address: str) -> None:
    storage = Storage.at("run.storage", f"s3://key:word@bucket/runs?scheme=http&endpoint_override={refused_address}")
    # pyarrow tries again for seconds before it raises.
    from pyarrow.fs import AwsStandardS3RetryStrategy, S3FileSystem

    files = S3FileSystem(
        access_key="key", secret_key="word", scheme="http", endpoint_override=refused_address,
        retry_strategy=AwsStandardS3RetryStrategy(max_attempts=1),
    )  # fmt: skip
    storage = Storage(storage.shown, files, "bucket/runs")
    with pytest.raises(StorageError, match=r"^s3://bucket/runs cannot be read \(.*NETWORK_CONNECTION") as raised:
        storage.files()
    assert "word" not in str(raised.value) and "\n" not in str(raised.value)


def test_fetch_copy_copies_a_file_or_a_folder_once_for_each_state(tmp_path: Path) -> None:
    there, cache = tmp_path / "there", tmp_path / "cache"
    (there / "model").mkdir(parents=True)
    (there / "model" / "config.json").write_text("{}")
    (there / "rows.parquet").write_text("rows")
    copy = fetch_copy("model.path", f"file://{there}/model", cache)
    assert copy.name.startswith("model-") and (copy / "config.json").read_text() == "{}"
    rows = fetch_copy("data.train_files", f"file://{there}/rows.parquet", cache)
    assert rows.name == "rows.parquet" and rows.read_text() == "rows"
    rows.write_text("the copy is used again")
    assert fetch_copy("data.train_files", f"file://{there}/rows.parquet", cache) == rows
    assert rows.read_text() == "the copy is used again"
    (there / "rows.parquet").write_text("other rows")
    assert fetch_copy("data.train_files", f"file://{there}/rows.parquet", cache).read_text() == "other rows"
    assert len(list(cache.iterdir())) == 3
    (there / "two words").write_text("found")
    assert fetch_copy("data.train_files", f"file://{there}/two%20words", cache).read_text() == "found"
    with pytest.raises(ConfigError, match=r"data.train_files=file://\S+/none: there is no such file or folder"):
        fetch_copy("data.train_files", f"file://{there}/none", cache)


FETCHING = """
import os, sys
from pathlib import Path
from rl_plugins.storage import Storage, fetch_copy
Storage.fetch = lambda self, names, folder: (folder.mkdir(), (folder / "half").touch(), os.kill(os.getpid(), 9))
fetch_copy("model.path", sys.argv[1], Path(sys.argv[2]))
"""


def test_fetch_copy_removes_the_folder_of_a_killed_process(tmp_path: Path) -> None:
    there, cache = tmp_path / "model [1]", tmp_path / "cache"
    there.mkdir()
    (there / "config.json").write_text("{}")
    address = f"file://{tmp_path}/model%20%5B1%5D"
    assert subprocess.run([sys.executable, "-c", FETCHING, address, str(cache)]).returncode == -signal.SIGKILL
    (left,) = cache.iterdir()
    assert [path.name for path in left.rglob("*")] == ["copy", "half"]
    copy = fetch_copy("model.path", address, cache)
    assert list(cache.iterdir()) == [copy] and os.listdir(copy) == ["config.json"]


def test_fetch_copy_leaves_nothing_behind_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(self: Storage, names: object, folder: Path) -> None:
        folder.mkdir()
        (folder / "half").touch()
        raise StorageError("no answer")

    (tmp_path / "rows.parquet").touch()
    monkeypatch.setattr(Storage, "fetch", fetch)
    with pytest.raises(ConfigError, match=r"data.train_files=file://\S+: no answer"):
        fetch_copy("data.train_files", f"file://{tmp_path}/rows.parquet", tmp_path / "cache")
    assert os.listdir(tmp_path / "cache") == []
