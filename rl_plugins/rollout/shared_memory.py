"""Weights from trainers to an engine on the same host through one bucket of shared memory.

The bucket has two halves. While the engine loads one half, every rank writes its own shards of the next layers into
the other, so nothing is gathered, nothing is serialised, and the extra memory is the bucket. The files are unlinked as
soon as both sides have them open: a killed process leaves nothing behind.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rl_plugins.rollout.weights import WeightMeta, WeightSource

SHARED_MEMORY = "/dev/shm"
DEFAULT_BUCKET_BYTES = 64 * 2**20
_ALIGNMENT = 64


class SharedMemoryReceiver(Protocol):
    """The engine's side, called by rank 0 only; `update` may return before the engine has finished."""

    def init(self, init_info: dict[str, Any]) -> None:
        """Open the two halves: `{"paths": [...], "half_bytes": n}`."""

    def start(self) -> None:
        """A weight update begins."""

    def update(self, update_info: dict[str, Any]) -> Callable[[], None]:
        """Load one half: `{"half": i, "tensors": [(name, dtype, shape, offset)]}`; returns a wait function."""

    def finish(self, version: int) -> None:
        """The weight update is complete."""


@dataclass(frozen=True)
class _Bucket:
    tensors: dict[str, tuple[WeightMeta, int]]

    def describe(self, half: int) -> dict[str, Any]:
        tensors = [
            (meta.name, str(meta.dtype).removeprefix("torch."), list(meta.shape), offset)
            for meta, offset in self.tensors.values()
        ]
        return {"half": half, "tensors": tensors}


def plan_buckets(metadata: list[WeightMeta], half_bytes: int) -> list[_Bucket]:
    """Pack parameters in order into as few halves as hold them, each tensor whole and aligned."""
    buckets: list[dict[str, tuple[WeightMeta, int]]] = [{}]
    used = 0
    for meta in metadata:
        size = -(-meta.nbytes // _ALIGNMENT) * _ALIGNMENT
        if buckets[-1] and used + size > half_bytes:
            buckets.append({})
            used = 0
        buckets[-1][meta.name] = (meta, used)
        used += size
    return [_Bucket(tensors) for tensors in buckets]


class SharedMemorySender:
    """The trainer's side; built and called on every rank.

    Args:
        source: the weights.
        rank: this rank; rank 0 talks to the engine.
        barrier: waits for all ranks.
        broadcast: sends rank 0's object to all ranks.
        receiver: the engine's side (rank 0), None elsewhere.
        bucket_bytes: memory for both halves; grows if one tensor needs more.
    """

    def __init__(
        self,
        source: WeightSource,
        *,
        rank: int,
        barrier: Callable[[], None],
        broadcast: Callable[[Any], Any],
        receiver: SharedMemoryReceiver | None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> None:
        self._source, self._barrier, self._receiver = source, barrier, receiver
        metadata = source.metadata()
        total = sum(-(-meta.nbytes // _ALIGNMENT) * _ALIGNMENT for meta in metadata)
        largest = max(meta.nbytes for meta in metadata) + _ALIGNMENT
        half_bytes = max(min(bucket_bytes // 2, total), largest)
        self._buckets = plan_buckets(metadata, half_bytes)
        self.bucket_bytes = 2 * half_bytes
        with ExitStack() as unlinking:
            created = [_create_file(half_bytes, unlinking) for _ in range(2)] if rank == 0 else []
            paths: list[str] = broadcast(created)
            self._halves = open_halves(paths, half_bytes)
            if receiver is not None:
                receiver.init({"paths": paths, "half_bytes": half_bytes})
            barrier()

    def send(self, version: int) -> None:
        """Update the engine's weights to those of the source. Collective."""
        if self._receiver is not None:
            self._receiver.start()
        shards = self._source.shards()
        loaded: Callable[[], None] | None = None
        for index, bucket in enumerate(self._buckets):
            half = index % 2
            for _ in bucket.tensors:
                name, start, part = next(shards)
                meta, offset = bucket.tensors[name]
                _view(self._halves[half], meta, offset)[start : start + part.numel()].copy_(part)
            # The engine must have left the other half before anybody writes there in the next round.
            if loaded is not None:
                loaded()
            self._barrier()
            if self._receiver is not None:
                loaded = self._receiver.update(bucket.describe(half))
        if loaded is not None:
            loaded()
        if self._receiver is not None:
            self._receiver.finish(version)
        # No rank goes on to sample before the new weights are in.
        self._barrier()


def _view(half: Tensor, meta: WeightMeta, offset: int) -> Tensor:
    return half[offset : offset + meta.nbytes].view(meta.dtype)


def _create_file(size: int, unlinking: ExitStack) -> str:
    descriptor, path = tempfile.mkstemp(prefix="rl_plugins-weights-", dir=SHARED_MEMORY)
    unlinking.callback(os.unlink, path)
    try:
        os.posix_fallocate(descriptor, 0, size)  # Fails here, not with SIGBUS on first touch, when /dev/shm is full.
    except OSError as error:
        raise OSError(
            error.errno,
            f"{SHARED_MEMORY} has no room for a weight bucket of {2 * size / 2**20:.0f} MB: "
            "lower weight_transfer.bucket_mb or enlarge it (docker run --shm-size)",
        ) from error
    finally:
        os.close(descriptor)
    return path


def open_halves(paths: list[str], half_bytes: int) -> list[Tensor]:
    """The engine's view of the bucket."""
    return [torch.from_file(path, shared=True, size=half_bytes, dtype=torch.uint8) for path in paths]


def read_tensors(half: Tensor, tensors: list[tuple[str, str, list[int], int]]) -> list[tuple[str, Tensor]]:
    """Named views into one half; valid until the next update."""
    weights = []
    for name, dtype_name, shape, offset in tensors:
        meta = WeightMeta(name, getattr(torch, dtype_name), tuple(shape))
        weights.append((name, _view(half, meta, offset).view(meta.shape)))
    return weights
