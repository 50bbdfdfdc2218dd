"""Settings of a vLLM engine: a small record that is sent to the actor, which builds the engine from the record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rl_plugins.errors import ConfigError

CPU_ENVIRONMENT = {
    # One process, because imports of vLLM in three helper processes take longer than the start.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Threads that spin in a wait slow down the trainers.
    "OMP_WAIT_POLICY": "PASSIVE",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}

CPU_BLOCK = 32
"""Tokens of a KV cache block on CPU. Prompts share whole blocks; vLLM's 128 tokens exceed many prompts."""

# Adapter ranks for which vLLM can reserve memory.
_ADAPTER_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


@dataclass(frozen=True)
class VLLMConfig:
    """Settings of one vLLM engine.

    Attributes:
        model: Hugging Face name or folder; gives the architecture and the first weights.
        device: `cpu` or `cuda`.
        dtype: dtype of weights and activations. The trainer's dtype gives the smallest log-prob gap.
        max_model_len: largest length of prompt plus response, in tokens.
        max_num_seqs: largest number of responses sampled at once.
        tensor_parallel_size: number of devices of the engine.
        gpu_memory_utilization: share of a GPU's memory for weights and KV cache (CUDA).
        threads: number of threads of each process of the engine (CPU).
        cpu_kv_cache_gib: size of the KV cache in GiB (CPU).
        prefix_caching: True to share the KV cache of common prefixes. Every weight update drops the cache.
        enforce_eager: True to disable CUDA graphs.
        sleep: memory that the engine frees while the trainers work: `none`, `kv_cache`, or `all` (KV cache and weights;
            an update must then precede the next sampling). `kv_cache` on CUDA moves the weights to the host.
        check_updates: number of weight updates between two comparisons with the policy; 0 disables comparisons.
        transport: weight transport: `shared_memory` (CPU, one machine), `gloo` (CPU, several machines), `ipc` (CUDA,
            colocated), `nccl` (CUDA, split).
        lora_rank: rank of the policy's adapter, if updates send the adapter alone and the engine applies the adapter to
            the weights of `model`. 0: updates send all weights, with an adapter merged into the weights.
        bucket_mb: memory for weights in transit, in MiB (unused by `shared_memory`, which writes to the final place).
        ready_timeout_s: deadline for the start of the engine, in seconds.
        generate_timeout_s: deadline for one `generate`, in seconds.
        stall_timeout_s: longest time between two steps, in seconds. An engine without an answer for longer is lost.
        update_timeout_s: deadline for each call of a weight update, in seconds.
    """

    model: str
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: str = "float32"
    max_model_len: int = 1024
    max_num_seqs: int = 256
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.5
    threads: int = 1
    cpu_kv_cache_gib: int = 1
    prefix_caching: bool = True
    enforce_eager: bool = False
    sleep: Literal["none", "kv_cache", "all"] = "kv_cache"
    check_updates: int = 0
    transport: Literal["auto", "shared_memory", "gloo", "ipc", "nccl"] = "auto"
    lora_rank: int = 0
    bucket_mb: int = 64
    ready_timeout_s: float = 300.0
    generate_timeout_s: float = 1800.0
    stall_timeout_s: float = 120.0
    update_timeout_s: float = 300.0

    def __post_init__(self) -> None:
        """Check the combination of settings.

        Raises:
            ConfigError: `transport` does not run on `device`, or see `check_adapter`.
        """
        on_cpu = self.device == "cpu"
        words = "shared_memory (one machine) or gloo (several)" if on_cpu else "ipc (colocated) or nccl (split)"
        if self.transport != "auto" and on_cpu != (self.transport in ("shared_memory", "gloo")):
            raise ConfigError(
                f"rollout.transport={self.transport} does not run with rollout.device={self.device}: "
                f"use {words}, or auto"
            )

        check_adapter(self.lora_rank, self.sleep)

    @property
    def backend(self) -> str:
        """Name of the weight-transfer backend in vLLM's registry."""
        if self.transport != "auto":
            return self.transport
        return "shared_memory" if self.device == "cpu" else "ipc"

    @property
    def sleeps(self) -> bool:
        """True if the engine frees memory during sleep. An engine on separate GPUs never sleeps."""
        return self.sleep != "none" and self.backend != "nccl"

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the engine's process."""
        if self.device == "cuda":
            # Weight updates send CUDA IPC handles, because engine and trainer share a GPU.
            return {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
        return {
            **CPU_ENVIRONMENT,
            "OMP_NUM_THREADS": str(self.threads),
            "VLLM_LOGGING_LEVEL": "ERROR",
            # Hides a warning of the CPU build about memory binding.
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            # Hides warnings about Triton kernels on machines without Triton.
            "TORCH_LOGS": "-torch._library",
            "VLLM_CPU_KVCACHE_SPACE": str(self.cpu_kv_cache_gib),
        }

    def engine_arguments(self) -> dict[str, Any]:
        """Return the arguments of `vllm.LLM`."""
        arguments: dict[str, Any] = {
            "model": self.model,
            "dtype": self.dtype,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "tensor_parallel_size": self.tensor_parallel_size,
            "enable_prefix_caching": self.prefix_caching,
            "use_tqdm_on_load": False,
            # The ratio of the policy loss needs log-probs after temperature, top-k and top-p.
            "logprobs_mode": "processed_logprobs",
            "weight_transfer_config": {"backend": self.backend},
            "worker_extension_cls": "rl_plugins.rollout.vllm.plugin.WorkerExtension",
        }
        if self.tensor_parallel_size > 1:
            arguments["distributed_executor_backend"] = "rl_plugins.rollout.vllm.executor.OneForAllExecutor"
        if self.lora_rank:
            largest = next(rank for rank in _ADAPTER_RANKS if rank >= self.lora_rank)
            arguments |= {"enable_lora": True, "max_lora_rank": largest}
        if self.device == "cpu":
            return {
                **arguments,
                "quantization": "plain_weights",
                "block_size": CPU_BLOCK,
                "enforce_eager": True,
                # Prompts run in one piece. Between pieces vLLM resets the generators of seeded requests, and generators
                # on CPU do not support the reset.
                "enable_chunked_prefill": False,
            }
        return {
            **arguments,
            "enforce_eager": self.enforce_eager,
            "enable_sleep_mode": self.sleeps,
            "gpu_memory_utilization": self.gpu_memory_utilization,
        }


def check_adapter(rank: int, sleep: str) -> None:
    """Check an adapter for an engine.

    Args:
        rank: rank of an adapter that updates send alone; 0 without such an adapter.
        sleep: `sleep` of `VLLMConfig`.

    Raises:
        ConfigError: the engine frees its weights during sleep, or `rank` is too large for vLLM.
    """
    if rank and sleep == "all":
        raise ConfigError(
            "rollout.sleep=all frees the weights, and an update of the adapter alone does not send the weights: use "
            "rollout.sleep=kv_cache, or rollout.lora=merged"
        )
    if rank > _ADAPTER_RANKS[-1]:
        raise ConfigError(
            f"rollout.lora=adapter: vLLM serves adapters of rank {_ADAPTER_RANKS[-1]} at most, not {rank}: use "
            "rollout.lora=merged"
        )
