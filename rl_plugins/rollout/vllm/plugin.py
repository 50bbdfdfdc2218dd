"""What is registered with vLLM, through its own doors, in the engine's process before the engine is built.

- The `plain_weights` quantization config keeps linear and embedding weights as they are in the checkpoint, where vLLM's
  CPU build would replace them by packed ones. Then loading is an in-place copy at any time and tied embeddings stay
  tied. Products use a packed copy, made when it is first needed and given up with the next update or sleep.
- The `shared_memory` weight-transfer backend, the CPU counterpart of vLLM's CUDA IPC.
- The `gloo` weight-transfer backend, the CPU counterpart of its NCCL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor
from vllm._custom_ops import create_onednn_mm, onednn_mm
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

from rl_plugins.memory import MemoryChange, discard, resident_bytes, return_free_memory
from rl_plugins.processor import multiplies_bfloat16
from rl_plugins.weights.gloo import GlooReceiver
from rl_plugins.weights.shared_memory import Run, SharedMemoryReceiver

PLAIN_WEIGHTS = "plain_weights"
SHARED_MEMORY = "shared_memory"
GLOO = "gloo"
_PRIMITIVES = 128


class PackedProducts:
    """Products with a copy of the layer's weight that oneDNN has packed for them.

    They are faster than products with the plain weight, above all with few tokens and in float32
    (`benchmarks/packed_products.py`).
    """

    def process_weights_after_loading(self, layer: Any) -> None:
        """Keep the weight as it was loaded."""
        layer.packed = None

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x @ weight.T + bias`."""
        if not _has_packed_products(layer.weight.dtype):
            return torch.nn.functional.linear(x, layer.weight, bias)
        if layer.packed is None:
            layer.packed = create_onednn_mm(layer.weight.t(), _PRIMITIVES)
        return onednn_mm(layer.packed, x, bias)


def _has_packed_products(dtype: torch.dtype) -> bool:
    """Whether oneDNN has fast ones here; those of its reference implementation, for what is left, are very slow."""
    fast = dtype == torch.float32 or (dtype == torch.bfloat16 and multiplies_bfloat16())
    return fast and hasattr(torch.ops._C, "create_onednn_mm_handler")


class _PlainLinear(PackedProducts, UnquantizedLinearMethod):
    pass


class _PlainEmbedding(PackedProducts, UnquantizedEmbeddingMethod):
    pass


def give_up_packed(model: torch.nn.Module) -> int:
    """Forget the packed copies of weights; returns their bytes."""
    layers: list[Any] = [layer for layer in model.modules() if getattr(layer, "packed", None) is not None]
    for layer in layers:
        layer.packed = None
    return sum(layer.weight.nbytes for layer in layers)


@register_quantization_config(PLAIN_WEIGHTS)
class PlainWeights(QuantizationConfig):
    """No quantization and no repacking."""

    def get_name(self) -> Any:
        """The name it is registered under."""
        return PLAIN_WEIGHTS

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Whatever the model computes in."""
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        """No GPU is needed."""
        return -1

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Nothing is read from the checkpoint."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> PlainWeights:
        """There is nothing to configure."""
        return cls()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Plain methods for linear and embedding layers."""
        if isinstance(layer, LinearBase):
            return _PlainLinear()
        if isinstance(layer, VocabParallelEmbedding):
            return _PlainEmbedding()
        return None


@dataclass
class SharedMemoryInitInfo(WeightTransferInitInfo):
    """Arguments of `SharedMemoryReceiver.expect`."""

    expect: dict[str, Any]


@dataclass
class SharedMemoryUpdateInfo(WeightTransferUpdateInfo):
    """Nothing: all there is to know was said at the start."""


class SharedMemoryEngine(WeightTransferEngine[SharedMemoryInitInfo, SharedMemoryUpdateInfo]):
    """The worker's side of the shared-memory transport."""

    init_info_cls = SharedMemoryInitInfo
    update_info_cls = SharedMemoryUpdateInfo
    receiver: SharedMemoryReceiver | None = None

    def init_transfer_engine(self, init_info: SharedMemoryInitInfo) -> None:
        """Move the parameters into shared memory, unless they are there, and listen for the ranks."""
        if self.receiver is None:
            model: Any = self.model
            self.receiver = SharedMemoryReceiver(model, model.load_weights, self.parallel_config.rank)
        self.receiver.expect(**init_info.expect)

    def start_weight_update(self) -> None:
        """Plain weights are loaded in place: nothing to prepare."""

    def receive_weights(self, update_info: SharedMemoryUpdateInfo) -> None:
        """Wait while the ranks write."""
        assert self.receiver is not None, "init_transfer_engine comes first"
        self.receiver.receive()

    def finish_weight_update(self) -> None:
        """Plain weights were loaded in place, but packed copies are of those before."""
        give_up_packed(self.model)

    def shutdown(self) -> None:
        """Leave the ranks; the parameters stay where they are."""
        if self.receiver is not None:
            self.receiver.disconnect()


WeightTransferEngineFactory.register_engine(SHARED_MEMORY, SharedMemoryEngine)


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """Arguments of `GlooReceiver.expect`."""

    expect: dict[str, Any]


class GlooEngine(WeightTransferEngine[GlooInitInfo, SharedMemoryUpdateInfo]):
    """The worker's side of the gloo transport."""

    init_info_cls = GlooInitInfo
    update_info_cls = SharedMemoryUpdateInfo
    gloo: GlooReceiver | None = None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Know where the sender is; the connection is made when it sends."""
        if self.gloo is None:
            model: Any = self.model
            self.gloo = GlooReceiver(model.load_weights, self.parallel_config.rank)
        self.gloo.expect(**init_info.expect)

    def start_weight_update(self) -> None:
        """Plain weights are loaded in place: nothing to prepare."""

    def receive_weights(self, update_info: SharedMemoryUpdateInfo) -> None:
        """Take in what rank 0 sends."""
        assert self.gloo is not None, "init_transfer_engine comes first"
        self.gloo.receive()

    def finish_weight_update(self) -> None:
        """Plain weights were loaded in place, but packed copies are of those before."""
        give_up_packed(self.model)

    def shutdown(self) -> None:
        """Leave the sender."""
        if self.gloo is not None:
            self.gloo.disconnect()


WeightTransferEngineFactory.register_engine(GLOO, GlooEngine)


class WorkerExtension:
    """Methods of each worker process that the actor calls through vLLM's `collective_rpc`.

    It is named as vLLM's `worker_extension_cls`, so each worker process imports this module before it loads.
    """

    model_runner: Any
    weight_transfer_engine: Any

    def give_back(self, weights: bool) -> MemoryChange:
        """Free the KV cache, which vLLM cannot on CPU, packed weights, and the weights themselves if asked to.

        All come back when they are written or needed. Weights that no update has brought yet stay: nobody could bring
        them back.
        """
        caches = {cache.untyped_storage().data_ptr(): cache for cache in self.model_runner.kv_caches}
        storages = [torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage()) for cache in caches.values()]
        receiver: SharedMemoryReceiver | None = getattr(self.weight_transfer_engine, "receiver", None)
        before = _private_bytes() + (receiver.held if receiver else 0)
        expected = sum(resident_bytes(storage) for storage in storages)
        for storage in storages:
            discard(storage)
        if weights and receiver:
            expected += receiver.give_back()
        expected += give_up_packed(self.model_runner.model)
        return_free_memory()
        after = _private_bytes() + (receiver.held if receiver else 0)
        return MemoryChange(before, after, expected)

    def checksums(self, runs: list[Run]) -> list[int]:
        """`SharedMemoryReceiver.checksums`."""
        receiver: SharedMemoryReceiver = self.weight_transfer_engine.receiver
        return receiver.checksums(runs)

    def device_memory(self) -> tuple[int, int]:
        """Bytes in use on the GPU, by whomever, and those of this engine's KV cache."""
        free, total = torch.cuda.mem_get_info()
        storages = {cache.untyped_storage().data_ptr(): cache for cache in self.model_runner.kv_caches}
        return total - free, sum(cache.untyped_storage().nbytes() for cache in storages.values())


def _private_bytes() -> int:
    memory = psutil.Process().memory_info()
    return int(memory.rss - memory.shared)
