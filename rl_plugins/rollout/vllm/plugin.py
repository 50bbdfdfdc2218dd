"""Plug-ins for vLLM, registered through vLLM's public registries before the construction of the engine.

- The `plain_weights` quantization config keeps linear and embedding weights in the layout of the checkpoint. vLLM's CPU
  build would replace the weights by packed weights. With plain weights, loading is an in-place copy at any time, and
  tied embeddings stay tied. Matrix products use a packed copy, made for the first product and dropped by the next
  update or sleep.
- The `shared_memory` weight-transfer backend is the CPU counterpart of vLLM's CUDA IPC.
- The `gloo` weight-transfer backend is the CPU counterpart of vLLM's NCCL.
- The `interruptible_nccl` weight-transfer backend is vLLM's NCCL, with an end for lost engines (`nccl.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor
from vllm._custom_ops import create_onednn_mm, onednn_mm
from vllm.device_allocator import DEFERRABLE_TAGS, get_mem_allocator_instance
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.platforms import current_platform

from rl_plugins.cpu_instructions import multiplies_bfloat16
from rl_plugins.memory import discard, resident_bytes, return_free_memory
from rl_plugins.rollout.vllm.config import INTERRUPTIBLE_NCCL
from rl_plugins.rollout.vllm.engine_files import use_nameless_lock_of_progress_bars
from rl_plugins.rollout.vllm.executor import end_with_parent
from rl_plugins.rollout.vllm.start_errors import keep_first_error
from rl_plugins.weights.gloo import GlooReceiver
from rl_plugins.weights.layout import LoadWeights
from rl_plugins.weights.shared_memory import ElementRange, SharedMemoryReceiver

PLAIN_WEIGHTS = "plain_weights"
SHARED_MEMORY = "shared_memory"
GLOO = "gloo"
_PRIMITIVES = 128
_NEVER_SENT = ("correction_bias", "expert_bias", "router_bias")
"""Ends of the names of parameters of vLLM, which are buffers in transformers: biases in the choice of experts."""
_IDS_OF_THINKING = (
    "reasoning_start_token_ids", "natural_reasoning_end_token_ids", "reasoning_end_token_ids",
)  # fmt: skip
"""Names of the tensors of vLLM's `thinking_token_budget`."""


class PackedProducts:
    """Matrix products with a copy of the layer's weight packed by oneDNN.

    Packed products are faster than plain products, above all with few tokens and in float32
    (`benchmarks/packed_products.py`).
    """

    def process_weights_after_loading(self, layer: Any) -> None:
        """Keep the loaded weight unchanged."""
        layer.packed = None

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return `x @ weight.T + bias`."""
        if not _has_packed_products(layer.weight.dtype):
            return torch.nn.functional.linear(x, layer.weight, bias)
        if layer.packed is None:
            layer.packed = create_onednn_mm(layer.weight.t(), _PRIMITIVES)
        return onednn_mm(layer.packed, x, bias)


def _has_packed_products(dtype: torch.dtype) -> bool:
    """Return True if oneDNN has fast packed products for `dtype`. Its reference implementation is very slow."""
    fast = dtype == torch.float32 or (dtype == torch.bfloat16 and multiplies_bfloat16())
    return fast and hasattr(torch.ops._C, "create_onednn_mm_handler")


class _PlainLinear(PackedProducts, UnquantizedLinearMethod):
    pass


class _PlainEmbedding(PackedProducts, UnquantizedEmbeddingMethod):
    pass


class PlainExperts(UnquantizedFusedMoEMethod):
    """Products of experts with packed copies of the weights. vLLM would replace the weights with the copies."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Keep the loaded weights unchanged."""
        layer.packed = None
        if self.moe_kernel is None:
            self._init_moe_kernel(layer)

    # As in the class of vLLM, `apply` is not the method of a torch module.
    def apply(  # type: ignore[override]
        self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, *shared: Any, **named: Any
    ) -> Any:
        """Return the outputs of the experts."""
        if layer.packed is None:
            copies: Any = torch.nn.Module()
            for name in ("w13_weight", "w2_weight"):
                setattr(copies, name, torch.nn.Parameter(getattr(layer, name).detach().clone(), requires_grad=False))
            kernel: Any = self.moe_kernel
            kernel.fused_experts.process_weights_after_loading(copies)
            # A module would add its parameters to those of the model.
            layer.packed = (copies.w13_weight.data, copies.w2_weight.data)
        packed: Any = _PackedExperts(layer)
        return super().apply(packed, x, topk_weights, topk_ids, *shared, **named)


class _PackedExperts:
    """A layer of experts with the packed copies in place of the weights."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self.w13_weight, self.w2_weight = layer.packed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def _keep_plain(layer_class: Any) -> None:
    """Let vLLM build plain layers of a class also where a model names no quantization config, as for routers."""
    plain: dict[type, Callable[[], Any]] = {
        UnquantizedLinearMethod: _PlainLinear,
        UnquantizedEmbeddingMethod: _PlainEmbedding,
    }

    class Plain(layer_class):
        quant_method: Any

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            if make := plain.get(type(self.quant_method)):
                self.quant_method = make()

    layer_class.register_oot(Plain)


if current_platform.is_cpu():
    for layer_class in (
        ReplicatedLinear, GateLinear, ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear,
        RowParallelLinear, VocabParallelEmbedding, ParallelLMHead,
    ):  # fmt: skip
        _keep_plain(layer_class)


def drop_packed(model: torch.nn.Module) -> int:
    """Drop the packed copies of weights; return their size in bytes."""
    layers: list[Any] = [layer for layer in model.modules() if getattr(layer, "packed", None) is not None]
    size = 0
    for layer in layers:
        copies = layer.packed if isinstance(layer.packed, tuple) else [layer.weight]
        size += sum(copy.nbytes for copy in copies)
        layer.packed = None
    return size


@register_quantization_config(PLAIN_WEIGHTS)
class PlainWeights(QuantizationConfig):
    """No quantization and no repacking."""

    def get_name(self) -> Any:
        """Return the registered name."""
        return PLAIN_WEIGHTS

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Return all dtypes of models."""
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        """Return -1, because no GPU is needed."""
        return -1

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Return no file names, because the checkpoint has no settings."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> PlainWeights:
        """Return the config; there are no settings."""
        return cls()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Return plain methods for linear and embedding layers and experts, None for other layers."""
        if isinstance(layer, LinearBase):
            return _PlainLinear()
        if isinstance(layer, VocabParallelEmbedding):
            return _PlainEmbedding()
        if isinstance(layer, RoutedExperts):
            return PlainExperts(layer.moe_config)
        return None


@dataclass
class ReceiverInitInfo(WeightTransferInitInfo):
    """Arguments of `expect` of a receiver."""

    expect: dict[str, Any]


@dataclass
class EmptyUpdateInfo(WeightTransferUpdateInfo):
    """Empty, because the init info has all information."""


class _HostReceiver(WeightTransferEngine[ReceiverInitInfo, EmptyUpdateInfo]):
    """A receiver on CPU behind the interface of vLLM, which calls the receiver a weight-transfer engine."""

    init_info_cls = ReceiverInitInfo
    update_info_cls = EmptyUpdateInfo
    receiver: SharedMemoryReceiver | GlooReceiver | None = None

    def make(self, load_weights: LoadWeights, number: int) -> SharedMemoryReceiver | GlooReceiver:
        """Return the receiver of process `number` of the engine."""
        raise NotImplementedError

    def init_transfer_engine(self, init_info: ReceiverInitInfo) -> None:
        """Make the receiver once, and prepare the receiver for new ranks."""
        if self.receiver is None:
            model: Any = self.model
            self.receiver = self.make(model.load_weights, self.parallel_config.rank)
        self.receiver.expect(**init_info.expect)

    def start_weight_update(self) -> None:
        """Do nothing, because plain weights are loaded in place."""

    def receive_weights(self, update_info: EmptyUpdateInfo) -> None:
        """Receive the weights."""
        assert self.receiver is not None, "init_transfer_engine comes first"
        self.receiver.receive()

    def finish_weight_update(self) -> None:
        """Drop the packed copies of the old weights."""
        drop_packed(self.model)

    def shutdown(self) -> None:
        """Close the connections to the ranks."""
        if self.receiver is not None:
            self.receiver.disconnect()


class VLLMSharedMemoryReceiver(_HostReceiver):
    """A `SharedMemoryReceiver`. Its parameters stay in shared memory after `shutdown`."""

    def make(self, load_weights: LoadWeights, number: int) -> SharedMemoryReceiver:
        """Move the parameters into shared memory."""
        return SharedMemoryReceiver(self.model, load_weights, number)


class VLLMGlooReceiver(_HostReceiver):
    """A `GlooReceiver`."""

    def make(self, load_weights: LoadWeights, number: int) -> GlooReceiver:
        """Return a receiver that connects to rank 0 in the first update."""
        return GlooReceiver(load_weights, number)


WeightTransferEngineFactory.register_engine(SHARED_MEMORY, VLLMSharedMemoryReceiver)
WeightTransferEngineFactory.register_engine(GLOO, VLLMGlooReceiver)
WeightTransferEngineFactory.register_engine(INTERRUPTIBLE_NCCL, "rl_plugins.rollout.vllm.nccl", "NcclReceiver")
# In the process of a worker on CUDA, which is not a fork.
end_with_parent()
keep_first_error()
use_nameless_lock_of_progress_bars()


class WorkerExtension:
    """Methods of each worker process, called by the actor through vLLM's `collective_rpc`.

    The class is vLLM's `worker_extension_cls`, so each worker process imports this module before it loads the model.
    """

    model_runner: Any
    model_config: Any
    weight_transfer_engine: Any
    _weight_update_active: bool

    def keep_unsent_weights(self) -> None:
        """Let the weights without updates survive a sleep of the weights.

        No update sends biases in the choice of experts, the draft model of speculative decoding, the token ids around
        the model's thinking, and the places for image features that a vision-language model adds in each pass.
        """
        # The worker of vLLM has the method.
        draft: Any = self.get_draft_model()  # type: ignore[attr-defined]
        names = [name for name, _ in self.model_runner.model.named_parameters() if name.endswith(_NEVER_SENT)]
        self.model_config.sleep_preserve_parameter_names = names + ["draft.*"] * (draft is not None)
        # vLLM makes these token ids with the weights, and a sleep would free them.
        budget = getattr(getattr(self.model_runner, "sampler", None), "thinking_budget_state", None)
        for name in _IDS_OF_THINKING if budget is not None and budget.enabled else ():
            setattr(budget, name, getattr(budget, name).clone())
        # CUDA graphs have the addresses of these places. They hold zeros for texts, and vLLM restores buffers.
        for number, place in enumerate(getattr(self.model_runner.model, "deepstack_input_embeds", None) or ()):
            self.model_runner.model.register_buffer(f"kept_deepstack_{number}", place, persistent=False)

    def end_weight_update(self) -> None:
        """End an update that has failed in another worker. In the worker of the failure, vLLM has ended the update."""
        if self._weight_update_active:
            self.finish_weight_update()  # type: ignore[attr-defined]

    def give_back(self, weights: bool) -> tuple[int, int, int]:
        """Free the KV cache (vLLM cannot on CPU), packed copies, and the weights if `weights`.

        Later writes allocate the memory again. Weights stay before the first update, because no update could restore
        the weights.

        Returns:
            The numbers of a `MemoryChange`, because only plain values come back from the process of an engine core.
        """
        caches = {cache.untyped_storage().data_ptr(): cache for cache in self.model_runner.kv_caches}
        storages = [torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage()) for cache in caches.values()]
        found = getattr(self.weight_transfer_engine, "receiver", None)
        receiver = found if isinstance(found, SharedMemoryReceiver) else None
        before = _private_bytes() + (receiver.resident_bytes if receiver else 0)
        expected = sum(resident_bytes(storage) for storage in storages)
        for storage in storages:
            discard(storage)
        if weights and receiver:
            expected += receiver.give_back()
        expected += drop_packed(self.model_runner.model)
        return_free_memory()
        after = _private_bytes() + (receiver.resident_bytes if receiver else 0)
        return before, after, expected

    def checksums(self, ranges: list[ElementRange]) -> list[int]:
        """Return `SharedMemoryReceiver.checksums`."""
        receiver: SharedMemoryReceiver = self.weight_transfer_engine.receiver
        return receiver.checksums(ranges)

    def memory_to_wake(self, tags: list[str] | None) -> tuple[int, int]:
        """Return the bytes to be allocated on the GPU by a wake-up, and the free bytes.

        Args:
            tags: tags of the wake-up, see `vllm.LLM.wake_up`.
        """
        allocator: Any = get_mem_allocator_instance()
        torch.cuda.empty_cache()
        wakes = [
            data.handle[1]
            for data in allocator.pointer_to_data.values()
            if data.is_asleep and (tags is None or data.tag in tags or data.tag not in DEFERRABLE_TAGS)
        ]
        return sum(wakes), torch.cuda.mem_get_info()[0]

    def device_memory(self) -> tuple[int, int, int]:
        """Return bytes of the GPU: in use by all processes, allocated in memory that can sleep, and of the KV cache."""
        free, total = torch.cuda.mem_get_info()
        allocator: Any = get_mem_allocator_instance()
        allocated = sum(data.handle[1] for data in allocator.pointer_to_data.values() if not data.is_asleep)
        storages = {cache.untyped_storage().data_ptr(): cache for cache in self.model_runner.kv_caches}
        return total - free, allocated, sum(cache.untyped_storage().nbytes() for cache in storages.values())


def _private_bytes() -> int:
    memory = psutil.Process().memory_info()
    return int(memory.rss - memory.shared)
