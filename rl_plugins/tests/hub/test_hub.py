"""Names of the Hugging Face hub: a commit for each name, the needed files, one download, and one line for a failure."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from huggingface_hub import constants, hf_hub_download

from rl_plugins.errors import ConfigError, DeadlineExceeded
from rl_plugins.hub.files import download, model_folder, only_download
from rl_plugins.hub.names import HubName, model_name, pin
from rl_plugins.tests.hub.hub_server import TOKEN, StandIn, serving, use
from rl_plugins.tests.loops import for_each
from rl_plugins.tests.patience import patient

COMMIT = "0" * 40
NAMES = (
    "config.json", "model.safetensors", "tokenizer.json", "merges.txt", "chat_template.jinja", "README.md",
    "modeling_own.py", "model.bin", "onnx/config.json", "consolidated.safetensors", "tokenizer.model",
    "additional_chat_templates/tool_use.jinja",
)  # fmt: skip
# Files of equal content would be downloaded once.
FILES = {name: f'{{"content": "{name}"}}'.encode() for name in NAMES}
NEEDED = [
    "additional_chat_templates/tool_use.jinja", "chat_template.jinja", "config.json", "merges.txt", "tokenizer.json",
    "tokenizer.model",
]  # fmt: skip


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    monkeypatch.chdir(tmp_path)
    with serving() as stand_in:
        use(stand_in, tmp_path / "cache", monkeypatch)
        yield stand_in


def files_in(folder: str) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in Path(folder).rglob("*") if file.is_file())


def refusal(path: str, **options: bool) -> str:
    """Return the message of `model_folder`, which is one line."""
    with pytest.raises(ConfigError) as error:
        model_folder(path, option="model.path", **options)
    message = str(error.value)
    assert message.startswith(f"model.path={path}") and "\n" not in message and TOKEN not in message
    return message


@for_each(
    ("path", "name"),
    [
        ("own/policy", HubName("own/policy")),
        ("own/policy@v1.2", HubName("own/policy", "v1.2")),
        ("own/policy@refs/pr/3", HubName("own/policy", "refs/pr/3")),
        ("gpt2", HubName("gpt2")),
        ("/own/policy", None),
        ("./policy", None),
        ("a/b/c", None),
        ("s3://bucket/policy", None),
        ("models:/policy/1", None),
        ("own/policy@", None),
        ("here/policy", None),
    ],
)
def test_model_name_knows_names_from_folders_and_addresses(tmp_path, monkeypatch, path, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here" / "policy").mkdir(parents=True, exist_ok=True)
    assert model_name(path) == name
    assert name is None or str(name) == path


def test_model_folder_fetches_the_needed_files_of_one_commit_once(hub: StandIn) -> None:
    first = hub.add("models/own/policy", FILES)
    name = str(pin(HubName("own/policy")))
    assert name == f"own/policy@{first}"
    hub.add("models/own/policy", {**FILES, "config.json": b'{"later": 1}'})
    settings = model_folder(name, weights=False)
    assert files_in(settings) == NEEDED and hub.downloads(".safetensors") == []
    folder = model_folder(name)
    assert folder == settings and files_in(folder) == sorted([*NEEDED, "model.safetensors"])
    assert (Path(folder) / "config.json").read_bytes() == FILES["config.json"]
    hub.requests.clear()
    assert model_folder(name) == folder and hub.requests == []
    assert "modeling_own.py" in files_in(model_folder(name, trust_remote_code=True))
    # A name without a commit stays at one commit in a process.
    later = model_folder("own/policy")
    assert later != folder
    hub.add("models/own/policy", FILES)
    assert model_folder("own/policy", weights=False) == later


def test_model_folder_takes_pickles_of_trusted_repositories_alone(hub: StandIn) -> None:
    hub.add("models/own/old", {"config.json": b"{}", "pytorch_model.bin": b"pickle"})
    assert "pickles (.bin)" in refusal("own/old") and "trust_remote_code" in refusal("own/old")
    assert "pytorch_model.bin" in files_in(model_folder("own/old", trust_remote_code=True))


def test_model_folder_downloads_once_for_all_processes(hub: StandIn) -> None:
    name = f"own/policy@{hub.add('models/own/policy', FILES)}"
    hub.may_serve.clear()
    with ThreadPoolExecutor(4) as pool:
        folders = [pool.submit(model_folder, name) for _ in range(4)]
        assert hub.served.wait(patient(20))
        hub.may_serve.set()
        assert len({folder.result(patient(60)) for folder in folders}) == 1
    assert len(hub.downloads("model.safetensors")) == 1 and len(hub.downloads("config.json")) == 1


def test_only_download_names_the_download_that_stands_still(tmp_path: Path) -> None:
    folder = tmp_path / "models--own--policy"
    (folder / "blobs").mkdir(parents=True)
    (folder / "blobs" / "1.incomplete").write_bytes(b"half")
    with (
        only_download("own/policy", folder),
        pytest.raises(DeadlineExceeded, match=r"download own/policy from the hub.*not grown beyond 4 bytes"),
        only_download("own/policy", folder, stall_s=0.05),
    ):
        pass
    with only_download("own/policy", folder, stall_s=0.05):
        pass


def test_model_folder_names_the_fault_of_a_name_and_the_way_out(hub: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("models/own/private", FILES, access="private")
    hub.add("models/own/gated", FILES, access="gated")
    hub.add("models/own/empty", {"config.json": b"{}", "README.md": b""})
    message = refusal("own/nothing")
    assert "no such repository, or it is private and there is no token (HF_TOKEN)" in message
    assert "there is no token (HF_TOKEN)" in refusal("own/private")
    assert "the repository has no revision 'v9'" in refusal("own/gated@v9")
    assert "gated, and there is no token: accept its conditions at http" in refusal("own/gated")
    assert "no weights of transformers, such as model.safetensors (it has README.md, config.json)" in refusal(
        "own/empty"
    )
    assert f"no revision '{COMMIT}'" in refusal(f"own/empty@{COMMIT}")
    assert "not a name of the hub" in refusal("own/two--dashes")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "refuses the token (status 401): set HF_TOKEN" in refusal("own/private")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert "or the token may not read it" in refusal("own/nothing")
    assert "gated, and the token may not read it" in refusal("own/gated")
    assert "model.safetensors" in files_in(model_folder("own/private"))
    hub.failing = 503
    assert "does not answer (Server error '503" in refusal("own/other")
    hub.failing = 429
    assert "too many requests (status 429)" in refusal("own/other")


def test_model_folder_names_a_hub_that_is_down(hub, monkeypatch, refused_address):
    monkeypatch.setattr(constants, "ENDPOINT", f"http://{refused_address}")
    assert f"http://{refused_address} does not answer" in refusal("own/policy")


def test_model_folder_works_offline_with_the_files_of_the_cache(hub: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("models/own/policy", FILES)
    model_folder("own/policy", weights=False)
    hub.failing = 500
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("rl_plugins.hub.files._commits_here", {})
    hub.requests.clear()
    assert files_in(model_folder("own/policy", weights=False)) == NEEDED
    message = refusal("own/policy")
    assert "HF_HUB_OFFLINE forbids requests" in message and "`hf download own/policy" in message
    assert "HF_HUB_OFFLINE forbids requests" in refusal("own/other@v1") and hub.requests == []
    # A local folder comes first.
    shutil.copytree(model_folder("own/policy", weights=False), "own/other")
    assert model_folder("own/other") == "own/other"


def test_download_never_takes_a_part_of_a_data_set_for_the_whole(hub: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = hub.add("datasets/own/rows", {"data/0.parquet": b"0", "data/1.parquet": b"1"})
    # One file is in the cache, without the list of all files.
    hf_hub_download("own/rows", "data/0.parquet", repo_type="dataset", revision=commit)
    name = HubName("own/rows", commit, "dataset")

    def fetch() -> Path:
        return download(name, ["data/*.parquet"], "data.train_files", left_out=())

    with (
        monkeypatch.context() as offline,
        pytest.raises(ConfigError, match=r"HF_HUB_OFFLINE forbids requests.*hf down"),
    ):
        offline.setattr(constants, "HF_HUB_OFFLINE", True)
        fetch()
    # The library asks again after 500, 503 and 429, with waits between the requests.
    hub.failing = 501
    with pytest.raises(
        ConfigError, match=r"data.train_files=hf://datasets/own/rows@.*does not answer \(Server error '501"
    ):
        fetch()
    hub.failing = 0
    assert files_in(str(fetch())) == ["data/0.parquet", "data/1.parquet"]
    hub.failing = 501
    assert len(files_in(str(fetch()))) == 2
