"""The settings of a vLLM engine: a small record that crosses processes, from which the heavy object is built there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rl_plugins.errors import ConfigError

CPU_ENVIRONMENT = {
    # One process: three imports of vLLM in helper processes cost more than the whole start.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Threads that spin while they wait take the trainers' time.
    "OMP_WAIT_POLICY": "PASSIVE",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}

CPU_BLOCK = 32
"""Tokens of a block of the KV cache on CPU. Prompts are shared by whole blocks, and vLLM's 128 exceed many a prompt."""

# What vLLM reserves room for.
_ADAPTER_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


@dataclass(frozen=True)
class VLLMConfig:
    """One vLLM engine.

    Attributes:
        model: Hugging Face name or folder; gives the architecture and the first weights.
        device: `cpu` or `cuda`.
        dtype: of weights and activations; the same as the trainer's for the smallest log-prob gap.
        max_model_len: longest prompt plus response, in tokens.
        max_num_seqs: responses sampled at once.
        tensor_parallel_size: devices of the engine.
        gpu_memory_utilization: share of a GPU's memory for weights and KV cache (CUDA).
        threads: of each process of the engine (CPU).
        cpu_kv_cache_gib: KV cache, in GiB (CPU).
        prefix_caching: share the KV cache of common prefixes; dropped at every weight update.
        enforce_eager: no CUDA graphs.
        sleep: what the engine gives back while the trainers work: `kv_cache`; `all`, the weights too, which then come
            anew with an update before the next samples; `none`. (`kv_cache` on CUDA keeps the weights on the host.)
        check_updates: every how many weight updates the engine's weights are compared with the policy's; 0 for never.
        transport: how weights arrive: `shared_memory` (CPU, one machine), `gloo` (CPU, several machines), `ipc` (CUDA,
            colocated), `nccl` (CUDA, split).
        lora_rank: of the policy's adapter, if updates bring it alone, and the engine adds it to the weights of `model`
            with every token; 0: updates bring all weights, an adapter merged into them.
        bucket_mb: memory for weights in flight (not in shared memory, where they are written to where they belong).
        ready_timeout_s: deadline for the start of the engine.
        generate_timeout_s: deadline for one `generate`.
        stall_timeout_s: an engine that does not answer for so long between two of its steps is lost.
        update_timeout_s: deadline for each call of a weight update.
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
        """Refuse combinations that cannot run.

        Raises:
            ConfigError: a transport that the device does not have, or an adapter for an engine that gives its weights
                back or does not serve one so large.
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
        """The weight-transfer backend, by vLLM's registered name."""
        if self.transport != "auto":
            return self.transport
        return "shared_memory" if self.device == "cpu" else "ipc"

    @property
    def sleeps(self) -> bool:
        """Whether there is anything to give back; an engine on GPUs of its own shares them with nobody."""
        return self.sleep != "none" and self.backend != "nccl"

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the engine's process."""
        if self.device == "cuda":
            # The engine shares its GPU with a trainer; in-process weight updates carry CUDA IPC handles.
            return {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
        return {
            **CPU_ENVIRONMENT,
            "OMP_NUM_THREADS": str(self.threads),
            "VLLM_LOGGING_LEVEL": "ERROR",
            # The CPU build tells of its memory binding with a warning.
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            # vLLM registers Triton kernels on machines without Triton, too.
            "TORCH_LOGS": "-torch._library",
            "VLLM_CPU_KVCACHE_SPACE": str(self.cpu_kv_cache_gib),
        }

    def engine_arguments(self) -> dict[str, Any]:
        """Arguments of `vllm.LLM`."""
        arguments: dict[str, Any] = {
            "model": self.model,
            "dtype": self.dtype,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "tensor_parallel_size": self.tensor_parallel_size,
            "enable_prefix_caching": self.prefix_caching,
            "use_tqdm_on_load": False,
            # What the ratio of the policy loss needs: after temperature, top-k and top-p.
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
                # A prompt in one piece: between pieces vLLM sets back the generators of seeded requests, which
                # those of a CPU do not know.
                "enable_chunked_prefill": False,
            }
        return {
            **arguments,
            "enforce_eager": self.enforce_eager,
            "enable_sleep_mode": self.sleeps,
            "gpu_memory_utilization": self.gpu_memory_utilization,
        }


def check_adapter(rank: int, sleep: str) -> None:
    """Refuse an adapter that an engine could not serve.

    Args:
        rank: of the adapter that updates bring alone; 0 for none.
        sleep: see `VLLMConfig`.

    Raises:
        ConfigError: the engine would give its weights back, or has no room for an adapter so large.
    """
    if rank and sleep == "all":
        raise ConfigError(
            "rollout.sleep=all gives back weights that an update of the adapter alone does not bring: use "
            "rollout.sleep=kv_cache, or rollout.lora=merged"
        )
    if rank > _ADAPTER_RANKS[-1]:
        raise ConfigError(
            f"rollout.lora=adapter: vLLM serves adapters of rank {_ADAPTER_RANKS[-1]} at most, not {rank}: use "
            "rollout.lora=merged"
        )
