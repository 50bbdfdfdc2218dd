"""Push of a model's folder to a repository of the Hugging Face hub, as one commit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rl_plugins.errors import ConfigError
from rl_plugins.hub import HubName, explained, model_name

_OPTION = "--push"
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", "adapter_config.json")


@dataclass(frozen=True)
class PushTarget:
    """Repository that takes a model.

    Attributes:
        name: name of the repository.
    """

    name: HubName

    @classmethod
    def open(cls, path: str, *, public: bool = False) -> PushTarget:
        """Make the repository if missing, which shows if the token may write.

        Args:
            path: name of the repository.
            public: make a new repository public. An existing repository keeps its access.

        Raises:
            ConfigError: the name is malformed, there is no token, the token may not write, or the hub does not answer.
        """
        from huggingface_hub import HfApi, get_token, is_offline_mode

        name = model_name(path) if not path.startswith((".", "/", "~")) else None
        if Path(path).is_dir():
            name = HubName(path)
        if name is None or name.revision is not None or "/" not in name.repository:
            raise ConfigError(f"{_OPTION} {path}: must be OWNER/NAME, without a revision")
        if is_offline_mode():
            raise ConfigError(f"{_OPTION} {path}: HF_HUB_OFFLINE forbids requests: unset it, or leave {_OPTION} out")
        if get_token() is None:
            raise ConfigError(
                f"{_OPTION} {path}: there is no token of the hub: set HF_TOKEN to a token that may write to {path}"
            )
        with explained(name, _OPTION, "write to"):
            HfApi().create_repo(name.repository, private=not public, exist_ok=True)
        return cls(name)

    def push(self, folder: Path, message: str) -> str:
        """Send a folder as one commit, and return the address of the commit.

        Weights of an earlier push with other names are removed: a reader would find two models.

        Args:
            folder: folder of the model.
            message: message of the commit.

        Raises:
            ConfigError: the hub refuses or does not answer. The folder stays as it is.
        """
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

        files = {file.relative_to(folder).as_posix(): file for file in sorted(folder.rglob("*")) if file.is_file()}
        try:
            with explained(self.name, _OPTION, "write to"):
                there = HfApi().list_repo_files(self.name.repository)
                old = [file for file in there if file.endswith(_WEIGHTS) and file not in files and "/" not in file]
                commit = HfApi().create_commit(
                    self.name.repository,
                    [
                        *(CommitOperationDelete(file) for file in old),
                        *(CommitOperationAdd(name, file) for name, file in files.items()),
                    ],
                    commit_message=message,
                )
        except ConfigError as error:
            raise ConfigError(
                f"{error}. {folder} is complete, and `hf upload {self.name.repository} {folder}` sends it again"
            ) from None
        return str(commit.commit_url)
