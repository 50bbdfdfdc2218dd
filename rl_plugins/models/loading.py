"""Loading of causal language models from a Hugging Face name or folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_plugins.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


_DEVICE_MAP: ContextVar[str | None] = ContextVar("device map", default=None)


@contextmanager
def without_weights() -> Iterator[None]:
    """Load models inside this context without weights, on the device `meta`."""
    previous = _DEVICE_MAP.set("meta")
    try:
        yield
    finally:
        _DEVICE_MAP.reset(previous)


def device_map() -> str | None:
    """Return the argument `device_map` of `from_pretrained`: `meta` inside `without_weights`."""
    return _DEVICE_MAP.get()


def load_causal_lm(path: str, *, dtype: torch.dtype, gradient_checkpointing: bool = False) -> PreTrainedModel:
    """Load a model in train mode. Dropout is the dropout of the model's config.

    Args:
        path: Hugging Face name or folder.
        dtype: Data type of the parameters.
        gradient_checkpointing: Recompute activations in the backward pass.
    """
    from transformers import AutoModelForCausalLM

    from rl_plugins.models.packed_attention import use_packed_attention

    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, device_map=device_map())
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    use_packed_attention(model)
    return model.train()


def check_model_folder(option: str, path: str) -> None:
    """Check the files of a local model folder, and the tokenizer against the model.

    The check takes milliseconds and loads no library. A name of the Hugging Face hub is not checked.

    Args:
        option: Option or argument with the path, for messages.
        path: Folder or name.

    Raises:
        ConfigError: A file is missing, or the tokenizer has more tokens than the model has embeddings.
    """
    folder = Path(path)
    if not folder.is_dir():
        if path.startswith((".", "/", "~")) or path.count("/") > 1:
            raise ConfigError(f"{option}={path}: no such folder")
        return
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{option}={path}: the folder has no config.json, so it is not a Hugging Face model")
    vocabulary = _read_json(folder / "config.json").get("vocab_size")
    tokenizer_file = folder / "tokenizer.json"
    if not tokenizer_file.is_file():
        return
    tokenizer = _read_json(tokenizer_file)
    ids = [token["id"] for token in tokenizer.get("added_tokens", [])]
    vocab = tokenizer.get("model", {}).get("vocab", {})
    ids += list(vocab.values()) if isinstance(vocab, dict) else range(len(vocab))
    if vocabulary is not None and ids and max(ids) >= vocabulary:
        raise ConfigError(
            f"{option}={path}: the tokenizer has ids up to {max(ids)}, but the model has only {vocabulary} embeddings: "
            "save the tokenizer of this model in the folder"
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: not valid JSON ({error})") from None
    return content
