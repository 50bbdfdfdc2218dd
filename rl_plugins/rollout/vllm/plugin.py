"""What is registered with vLLM, through its own doors, in the engine's process before the engine is built.

- The `plain_weights` quantization config keeps linear and embedding weights as they are in the checkpoint, where vLLM's
  CPU build would repack them. Then loading is an in-place copy at any time and tied embeddings stay tied.
- The `shared_memory` weight-transfer backend, the CPU counterpart of vLLM's CUDA IPC.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
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

from rl_plugins.rollout.shared_memory import SharedMemoryReceiver

PLAIN_WEIGHTS = "plain_weights"
SHARED_MEMORY = "shared_memory"


class _PlainLinear(UnquantizedLinearMethod):
    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Keep the weight as it was loaded."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.nn.functional.linear(x, layer.weight, bias)


class _PlainEmbedding(UnquantizedEmbeddingMethod):
    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Keep the weight as it was loaded."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.nn.functional.linear(x, layer.weight, bias)


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
    _receiver: SharedMemoryReceiver | None = None

    def init_transfer_engine(self, init_info: SharedMemoryInitInfo) -> None:
        """Move the parameters into shared memory, unless they are there, and listen for the ranks."""
        if self._receiver is None:
            model: Any = self.model
            self._receiver = SharedMemoryReceiver(model, model.load_weights, self.parallel_config.rank)
        self._receiver.expect(**init_info.expect)

    def start_weight_update(self) -> None:
        """Plain weights are loaded in place: nothing to prepare."""

    def receive_weights(self, update_info: SharedMemoryUpdateInfo) -> None:
        """Wait while the ranks write."""
        assert self._receiver is not None, "init_transfer_engine comes first"
        self._receiver.receive()

    def finish_weight_update(self) -> None:
        """Plain weights were loaded in place: nothing to finalise."""

    def shutdown(self) -> None:
        """Leave the ranks; the parameters stay where they are."""
        if self._receiver is not None:
            self._receiver.disconnect()


WeightTransferEngineFactory.register_engine(SHARED_MEMORY, SharedMemoryEngine)


class WorkerExtension:
    """Named as vLLM's `worker_extension_cls`, so that each worker process imports this module before it loads."""
