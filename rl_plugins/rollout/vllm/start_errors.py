"""Errors of an engine that does not start, in its actor and in its other processes.

On CUDA an engine has processes of its own. If a process fails at the start, vLLM logs the error in this process, and
raises an error without the reason in the process of the actor.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from typing_extensions import override

from rl_plugins.errors import ConfigError
from rl_plugins.model_json import read_model_config

_VARIABLE = "RL_PLUGINS_START_ERROR"
"""Environment variable with the file of the first error, while an engine starts."""


@contextmanager
def errors_of_processes() -> Iterator[None]:
    """Give the reason to an error of vLLM inside the context.

    Raises:
        ValueError: a process of the engine refuses a setting.
        RuntimeError: a process of the engine fails otherwise; the message has the type of the error.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "error"
        os.environ[_VARIABLE] = str(file)
        try:
            yield
        except RuntimeError as error:
            if not file.exists():
                raise
            kind, _, message = file.read_text().partition(": ")
            if kind == ValueError.__name__:
                raise ValueError(message) from error
            raise RuntimeError(f"vLLM does not start: {kind}: {message}") from error
        finally:
            del os.environ[_VARIABLE]


def refusal(model: str, folder: str, error: ValueError) -> ConfigError:
    """Return the error for a model or an option that vLLM refuses.

    Args:
        model: name or folder of the model, for the message.
        folder: folder of the model.
        error: vLLM's error.
    """
    from pydantic import ValidationError
    from vllm.model_executor.models.registry import ModelRegistry

    reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
    for architecture in read_model_config(Path(folder) / "config.json").get("architectures") or ():
        if architecture in ModelRegistry.models:
            try:
                ModelRegistry.models[architecture].load_model_cls()
            except ImportError as missing:
                # vLLM's reason is "failed to be inspected".
                reason = f"the class {architecture} needs a package that is not installed ({missing})"
    return ConfigError(
        f"{model}: vLLM does not start: {reason.removeprefix('Value error, ')}: change the model or the option, "
        "install the package, or use TransformersRollout (in a recipe: rollout.engine=transformers)"
    )


def keep_first_error() -> None:
    """Keep the first error that vLLM logs in this process for the process of the actor.

    An engine core calls the function at the start of its executor. A worker on CUDA, which has no executor, calls the
    function at the import of `plugin`.
    """
    if file := os.environ.get(_VARIABLE):
        logging.getLogger("vllm").addHandler(_FirstError(Path(file)))


class _FirstError(logging.Handler):
    def __init__(self, file: Path) -> None:
        super().__init__(logging.ERROR)
        self._file = file

    @override
    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        # The folder is gone after the start. An error of another process may be there, which caused this error.
        if error is not None:
            with suppress(FileNotFoundError, FileExistsError), self._file.open("x") as file:
                file.write(f"{type(error).__name__}: {error}")
