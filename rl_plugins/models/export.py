"""Export of a trained policy as a Hugging Face folder: safetensors, config, generation config and tokenizer."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from safetensors import SafetensorError
from torch import Tensor, nn

from rl_plugins.errors import ConfigError
from rl_plugins.file_lock import FileLock
from rl_plugins.models.lora import has_adapter
from rl_plugins.storage import local_path
from rl_plugins.weights.source import WeightSource
from rl_plugins.whole_file import storage_errors, synchronize

if TYPE_CHECKING:
    from peft import PeftModel

    from rl_plugins.data.image_prompts import Processor


@runtime_checkable
class SavesPretrained(Protocol):
    """Model with a config and the method `save_pretrained` of transformers."""

    config: Any

    def save_pretrained(self, save_directory: Path, *, state_dict: dict[str, Tensor]) -> object:
        """Write the weights, the config and the generation config."""


def save_policy(
    model: nn.Module, source: WeightSource, processor: Processor, folder: str | Path, is_writer: bool
) -> None:
    """Gather the weights layer by layer and write the folder. The folder appears when it is complete. Collective.

    Args:
        model: model of transformers (possibly sharded), with the config and the method `save_pretrained`.
        source: weights of the model.
        processor: tokenizer, or processor of a vision-language model, to save in the folder.
        folder: folder to write. An older export in the folder is replaced.
        is_writer: True on exactly one rank. This rank holds a full copy of the weights in host memory.

    Raises:
        ConfigError: the model has no method `save_pretrained`, `folder` is an address, or another process is writing
            the folder.
    """
    folder = local_path("folder", folder)
    if has_adapter(model):
        model = model.get_base_model()
    if not isinstance(model, SavesPretrained):
        raise ConfigError(f"{type(model).__name__} has no save_pretrained: only transformers models can be exported")
    weights: dict[str, Tensor] = {}
    for name, tensor in source:
        if is_writer:
            weights[name] = tensor.detach().to("cpu", copy=True)
    if is_writer:
        # Every rank has whole buffers.
        buffers = {name: buffer.detach().to("cpu", copy=True) for name, buffer in saved_buffers(model).items()}
        write_policy(model, weights | buffers, processor, folder)


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers in the files of a model by name, such as the correction bias of a router."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }


def write_policy(model: SavesPretrained, weights: dict[str, Tensor], processor: Processor, folder: Path) -> None:
    """Write full weights, the config of the model and a tokenizer or a processor into a folder, as one atomic step.

    Raises:
        ConfigError: another process is writing the folder.
    """
    dtype = next(iter(weights.values())).dtype
    with _atomic_folder(folder) as partial:
        with _default_generation(model) as generation:
            model.save_pretrained(partial, state_dict=weights)
        if generation is not None and (file := partial / "generation_config.json").is_file():
            generation.to_json_file(file, keys_to_pop=["compile_config"])
        # Transformers names the dtype of the model, and shards of FSDP2 have another dtype than exported weights.
        model.config.dtype = dtype
        model.config.save_pretrained(partial)
        processor.save_pretrained(partial)


def add_ends(model: Any, ends: Iterable[int]) -> None:
    """Add tokens to the ends of responses in the generation config of a model, which an export writes."""
    inner = model.get_base_model() if has_adapter(model) else model
    generation: Any = getattr(inner, "generation_config", None)
    known = getattr(generation, "eos_token_id", None)
    known = known if isinstance(known, list) else [] if known is None else [known]
    if generation is not None and (new := [end for end in ends if end not in known]):
        generation.eos_token_id = [*known, *new]


@contextmanager
def _default_generation(model: Any) -> Iterator[Any]:
    """Replace the generation config of a model by the default inside the block; give the model's own one.

    `save_pretrained` refuses options of sampling without `do_sample=true`, and many published models have such files.
    """
    own = getattr(model, "generation_config", None)
    if own is not None:
        model.generation_config = type(own)()
    try:
        yield own
    finally:
        if own is not None:
            model.generation_config = own


def save_adapter(
    model: PeftModel, weights: dict[str, Tensor], processor: Processor, folder: str | Path, is_writer: bool
) -> None:
    """Write an adapter in the format of peft, for `PeftModel.from_pretrained`, as one atomic step.

    Args:
        model: model with the adapter.
        weights: full trained tensors, by name.
        processor: tokenizer, or processor of a vision-language model, to save in the folder.
        folder: folder to write. An older export in the folder is replaced.
        is_writer: True on exactly one rank.

    Raises:
        ConfigError: `folder` is an address, or another process is writing the folder.
    """
    folder = local_path("folder", folder)
    if is_writer:
        with _atomic_folder(folder) as partial:
            model.save_pretrained(str(partial), state_dict=weights, save_embedding_layers=False)
            processor.save_pretrained(partial)


@contextmanager
def _atomic_folder(folder: Path) -> Iterator[Path]:
    """Give a temporary folder, and move its content to `folder` at the end of the block.

    Raises:
        ConfigError: another process is writing the folder.
    """
    work, old = folder.with_name(f".{folder.name}.partial"), folder.with_name(f".{folder.name}.removed")
    partial = work / "new"
    with storage_errors(folder):
        work.mkdir(parents=True, exist_ok=True)
        lock = FileLock(work / "lock")
        if not lock.take():
            lock.close()
            raise ConfigError(f"{folder}: another process is writing this folder: wait for it, or give another folder")
        try:
            # A killed process leaves such a folder.
            shutil.rmtree(partial, ignore_errors=True)
            yield partial
            for file in partial.rglob("*"):
                synchronize(file)
            if folder.exists():
                shutil.rmtree(old, ignore_errors=True)
                os.replace(folder, old)
            os.replace(partial, folder)
            shutil.rmtree(old, ignore_errors=True)
        except SafetensorError as error:
            raise OSError(errno.ENOSPC, str(error)) from error
        finally:
            # The next process may take the lock before the folder is removed, and then needs a folder of its own.
            removed = tempfile.mkdtemp(prefix=work.name, dir=work.parent)
            os.replace(work, removed)
            lock.close()
            # On NFS, the folder of an open file cannot be removed.
            shutil.rmtree(removed, ignore_errors=True)
