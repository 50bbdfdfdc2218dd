"""Stand-in of DeepSpeed's op for `nvme` files on a machine without the op's library: reads and writes at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from rl_plugins.errors import ConfigError
from rl_plugins.strategies import offload

_check = offload.check_file_op


class FileHandle:
    """Handle with the methods of DeepSpeed's `aio_handle`."""

    def __init__(self, **options: Any) -> None:
        self._locked: set[int] = set()
        self._finished = 0

    def new_cpu_locked_tensor(self, numel: int, like: Tensor) -> Tensor:
        tensor = torch.empty(numel, dtype=like.dtype)
        self._locked.add(tensor.data_ptr())
        return tensor

    def free_cpu_locked_tensor(self, tensor: Tensor) -> bool:
        self._locked.discard(tensor.data_ptr())
        return True

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.data_ptr() in self._locked

    def async_pwrite(self, tensor: Tensor, path: str, offset: int) -> int:
        assert offset == 0
        Path(path).write_bytes(tensor.detach().view(torch.uint8).numpy().tobytes())
        return self._finish()

    def async_pread(self, tensor: Tensor, path: str, offset: int) -> int:
        assert offset == 0
        tensor.detach().copy_(torch.from_file(path, size=tensor.numel(), dtype=tensor.dtype))
        return self._finish()

    def wait(self) -> int:
        finished, self._finished = self._finished, 0
        return finished

    def _finish(self) -> int:
        self._finished += 1
        return 0


@contextmanager
def any_file_op() -> Iterator[None]:
    """Let DeepSpeed load its op for files, or the stand-in where the op cannot be built."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    real = AsyncIOBuilder.load

    def load(builder: Any, verbose: bool = True) -> Any:
        return real(builder, verbose) if _has_file_op() else SimpleNamespace(aio_handle=FileHandle)

    with mock.patch.object(AsyncIOBuilder, "load", load), mock.patch.object(offload, "check_file_op", lambda: None):
        yield


@cache
def _has_file_op() -> bool:
    try:
        _check()
    except ConfigError:
        return False
    return True
