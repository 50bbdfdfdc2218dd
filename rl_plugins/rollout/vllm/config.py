"""Settings of a vLLM engine: a small record that is sent to the actor, which builds the engine from the record."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from rl_plugins.config.rollout import (
    ADAPTER_RANKS,
    EngineOptions,
    check_cpu_engine,
    check_engine_updates,
    default_max_num_seqs,
)
from rl_plugins.config.settings import ABOVE_0_TO_1, AT_LEAST_1, NOT_NEGATIVE, SECONDS, one_of
from rl_plugins.errors import ConfigError
from rl_plugins.model_json import read_model_config

CPU_ENVIRONMENT = {
    # One process, because imports of vLLM in three helper processes take longer than the start.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}

INTERRUPTIBLE_NCCL = "interruptible_nccl"
"""Name of the engines' side of the transport `nccl` in vLLM's registry of weight-transfer backends."""

_COMPILATION_S = 900.0
"""Least time without an answer on CUDA before the first samples of an engine, in seconds: kernels are compiled."""

_LEAST_SHARE = 0.01
"""Share of a GPU for an engine with a given KV cache: vLLM only checks at the start that the share is free."""

CPU_BLOCK = 32
"""Tokens of a KV cache block on CPU. Prompts share whole blocks; vLLM's 128 tokens exceed many prompts."""

CPU_ARGUMENTS = {
    "quantization": "plain_weights",
    "block_size": CPU_BLOCK,
    "enforce_eager": True,
    # Prompts run in one piece. Between pieces vLLM resets the generators of seeded requests, and generators on CPU do
    # not support the reset.
    "enable_chunked_prefill": False,
}
"""Arguments of engines on CPU."""


@dataclass
class VLLMConfig(EngineOptions):
    """Settings of one vLLM engine.

    Attributes:
        model: Hugging Face name or folder; gives the architecture and the first weights.
        device: `cpu` or `cuda`.
        dtype: dtype of weights and activations. The trainer's dtype gives the smallest log-prob gap.
        max_model_len: largest length of prompt plus response, in tokens.
        gpu_memory_utilization: share of a GPU's memory for weights and KV cache (CUDA).
        threads: number of threads of each process of the engine (CPU).
        enforce_eager: True to disable CUDA graphs.
        sleep: memory that the engine frees while the trainers work: `none`, `kv_cache`, or `all` (KV cache and weights;
            an update must then precede the next sampling). `kv_cache` on CUDA moves the weights to the host.
        lora_rank: rank of the policy's adapter, if updates send the adapter alone and the engine applies the adapter to
            the weights of `model`. 0: updates send all weights, with an adapter merged into the weights.
        bucket_mb: memory for weights in transit, in MiB.
        ready_timeout_s: deadline for the start of the engine, in seconds.
        stall_timeout_s: longest time without an answer, in seconds. See `first_stall_timeout_s`.
        trust_remote_code: run Python code that the model's config.json names (`auto_map`) in the engine.
        return_experts: return the experts of a mixture's tokens, for a replay of routes in training (CUDA).
    """

    model: str
    device: Annotated[str, one_of("cpu", "cuda")] = "cpu"
    dtype: Annotated[str, one_of("float32", "bfloat16", "float16")] = "float32"
    max_model_len: Annotated[int, AT_LEAST_1] = 1024
    gpu_memory_utilization: Annotated[float, ABOVE_0_TO_1] = field(default=0.5, kw_only=True)
    threads: Annotated[int, AT_LEAST_1] = 1
    enforce_eager: bool = False
    sleep: Annotated[str, one_of("none", "kv_cache", "all")] = "kv_cache"
    lora_rank: Annotated[int, NOT_NEGATIVE] = 0
    bucket_mb: Annotated[int, AT_LEAST_1] = 64
    ready_timeout_s: Annotated[float, SECONDS] = 300.0
    stall_timeout_s: Annotated[float, SECONDS] = 120.0
    trust_remote_code: bool = False
    return_experts: bool = False

    def __post_init__(self) -> None:
        """Check all settings.

        Raises:
            ConfigError: a setting is out of its range, `transport` does not run on `device`, or the engine cannot
                apply the adapter: the engine frees its weights during sleep, or the rank is too large for vLLM.
        """
        super().__post_init__()
        on_cpu = self.device == "cpu"
        words = "shared_memory (one machine) or gloo (several)" if on_cpu else "ipc (colocated) or nccl (split)"
        if self.transport != "auto" and on_cpu != (self.transport in ("shared_memory", "gloo")):
            raise ConfigError(f"transport={self.transport} does not run on device={self.device}: use {words}, or auto")
        if self.return_experts and (on_cpu or not self.prefix_caching):
            raise ConfigError(
                "return_experts=True: vLLM returns experts on GPUs and with prefix_caching=True only: repeat the "
                "routes of the old log-probs (router_replay=recompute), or use the transformers engine"
            )
        if self.lora_rank and self.sleep == "all":
            raise ConfigError(
                "sleep=all frees the weights, and an update of the adapter alone does not send the weights: use "
                "sleep=kv_cache, or lora_rank=0"
            )
        if fixed := sorted(self.vllm.keys() & CPU_ARGUMENTS.keys() if on_cpu else ()):
            raise ConfigError(f"vllm.{fixed[0]}: engines on CPU have a value of their own: leave it out")
        if self.lora_rank > ADAPTER_RANKS[-1]:
            raise ConfigError(
                f"lora_rank={self.lora_rank}: vLLM applies adapters of rank {ADAPTER_RANKS[-1]} at most: use "
                "lora_rank=0, which merges the adapter into the weights"
            )

    @property
    def backend(self) -> str:
        """Weight transport; `auto` is replaced."""
        if self.transport != "auto":
            return self.transport
        return "shared_memory" if self.device == "cpu" else "ipc"

    @property
    def shares_gpus(self) -> bool:
        """True if the engines share the GPUs of the training ranks."""
        return self.backend == "ipc"

    def check_model(self) -> None:
        """Check the files of the model for a fault in sampling by vLLM, or in updates of the weights.

        Raises:
            ConfigError: see `check_cpu_engine` and `check_engine_updates`; or config.json is damaged.
        """
        file = Path(self.model) / "config.json"
        if not file.is_file():
            return
        model, is_on_cpu = read_model_config(file), self.device == "cpu"
        if is_on_cpu:
            check_cpu_engine(self.model, model)
        if not self.lora_rank:
            check_engine_updates(self.model, model, is_on_cpu=is_on_cpu)

    @property
    def sleeps(self) -> bool:
        """True if the engine frees memory during sleep. An engine on separate GPUs never sleeps."""
        return self.sleep != "none" and self.backend != "nccl"

    @property
    def first_stall_timeout_s(self) -> float:
        """Longest time without an answer before the first samples of an engine, in seconds."""
        return self.stall_timeout_s if self.device == "cpu" else max(self.stall_timeout_s, _COMPILATION_S)

    @property
    def kv_cache_bytes(self) -> int | None:
        """Size of the KV cache on each GPU, in bytes, if an argument of vLLM sets the size."""
        size = self.vllm.get("kv_cache_memory_bytes")
        return size if isinstance(size, int) and size else None

    @property
    def memory_option(self) -> str:
        """Setting for the memory of the engine on a GPU (CUDA), its value, and its option in a recipe, for messages."""
        if self.kv_cache_bytes is not None:
            setting, value = "vllm.kv_cache_memory_bytes", str(self.kv_cache_bytes)
        else:
            setting, value = "gpu_memory_utilization", f"{self.gpu_memory_utilization:g}"
        return f"{setting}={value} (in a recipe: rollout.{setting})"

    def needed_bytes(self, total_bytes: int) -> float:
        """Return the free bytes of a GPU that the engine needs at least: its KV cache, or its share of the memory."""
        return self.gpu_memory_utilization * total_bytes if self.kv_cache_bytes is None else self.kv_cache_bytes

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the engine's process."""
        common = engine_environment(self.device, self.threads, self.cpu_kv_cache_gib)
        if self.device == "cpu":
            return common
        # Only this model runner returns experts.
        runner = {"VLLM_USE_V2_MODEL_RUNNER": "1"} if self.return_experts else {}
        # Weight updates send CUDA IPC handles, because engine and trainer share a GPU.
        return {**common, **runner, "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}

    def engine_arguments(self) -> dict[str, Any]:
        """Return the arguments of `vllm.LLM`."""
        arguments: dict[str, Any] = {
            "model": self.model,
            "trust_remote_code": self.trust_remote_code,
            "dtype": self.dtype,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs or default_max_num_seqs(on_gpus=self.device == "cuda"),
            "tensor_parallel_size": self.tensor_parallel_size,
            "enable_prefix_caching": self.prefix_caching,
            "use_tqdm_on_load": False,
            # The ratio of the policy loss needs log-probs after temperature, top-k and top-p.
            "logprobs_mode": "processed_logprobs",
            "weight_transfer_config": {"backend": INTERRUPTIBLE_NCCL if self.backend == "nccl" else self.backend},
            "worker_extension_cls": "rl_plugins.rollout.vllm.plugin.WorkerExtension",
            "distributed_executor_backend": executor_name(self.tensor_parallel_size),
        }
        if self.lora_rank:
            largest = next(rank for rank in ADAPTER_RANKS if rank >= self.lora_rank)
            arguments |= {"enable_lora": True, "max_lora_rank": largest}
        if self.return_experts:
            arguments["enable_return_routed_experts"] = True
        if self.device == "cpu":
            return {**arguments, **CPU_ARGUMENTS, **self.vllm}
        return {
            **arguments,
            "enforce_eager": self.enforce_eager,
            "enable_sleep_mode": self.sleeps,
            "gpu_memory_utilization": self.gpu_memory_utilization if self.kv_cache_bytes is None else _LEAST_SHARE,
            **self.vllm,
        }


def engine_environment(device: str, threads: int, cpu_kv_cache_gib: int = 1) -> dict[str, str]:
    """Return the environment variables of the process of any vLLM engine.

    Args:
        device: `cpu` or `cuda`.
        threads: number of threads of the process (CPU).
        cpu_kv_cache_gib: size of the KV cache in GiB (CPU).
    """
    # vLLM sends no usage report, unless the user wants the report.
    usage = {"VLLM_NO_USAGE_STATS": os.environ.get("VLLM_NO_USAGE_STATS", "1")}
    if device == "cuda":
        return {**usage, "VLLM_LOGGING_LEVEL": "WARNING"}
    return {
        **usage,
        **CPU_ENVIRONMENT,
        "OMP_NUM_THREADS": str(threads),
        "VLLM_LOGGING_LEVEL": "ERROR",
        # Hides a warning of the CPU build about memory binding.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        # Hides warnings about Triton kernels on machines without Triton.
        "TORCH_LOGS": "-torch._library",
        "VLLM_CPU_KVCACHE_SPACE": str(cpu_kv_cache_gib),
    }


def executor_name(processes: int) -> str:
    """Return the name of the executor of an engine, for vLLM's argument `distributed_executor_backend`.

    Args:
        processes: number of processes with parts of the model.
    """
    executor = "OneProcessExecutor" if processes == 1 else "OneForAllExecutor"
    return f"rl_plugins.rollout.vllm.executor.{executor}"
