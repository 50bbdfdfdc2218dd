"""Settings of the rollout engine."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from rl_plugins.config.models import LANGUAGE_MODEL, LoraConfig
from rl_plugins.config.settings import (
    ABOVE_0_TO_1,
    AT_LEAST_1,
    NOT_NEGATIVE,
    SECONDS,
    Range,
    Settings,
    one_of,
    or_null,
)
from rl_plugins.errors import ConfigError
from rl_plugins.model_json import reads_images, rotary_parameters

ENGINE_GRACE_S = 30.0
"""Seconds after the deadline of an engine, in which the actor of the engine can name the missing ranks."""
ADAPTER_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of adapters for which vLLM can reserve memory."""

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Widths of attention heads for which vLLM's build for CPUs has kernels."""

_OTHER_LOG_PROBS_ON_CPU = frozenset({"granitemoehybrid", "lfm2", "qwen3_next"})
"""Types of models for which vLLM's build for CPUs computes other log-probs than transformers (docs/models.md)."""

_UPDATED_IN_PART_ON_GPUS = frozenset({"gpt_oss", "mimo_v2_flash"})
"""Types of models whose experts vLLM loads past the loader of its weight updates on GPUs, so no update reaches them."""

_TRANSPOSED_EXPERTS = frozenset({"ernie4_5_vl_moe", "qwen3_vl_moe"})
"""Types of models whose experts transformers and vLLM's loader hold with another order of the axes."""

SPLIT_GPU_SHARE = 0.9
"""Default share of a GPU's memory for a rollout engine without training workers beside the engine."""

OWN_ARGUMENTS = {
    "model": "model.path",
    "tokenizer": "model.path",
    "trust_remote_code": "model.trust_remote_code",
    "dtype": "rollout.dtype",
    "max_model_len": "data.max_prompt_tokens and sampling.max_tokens",
    "max_num_seqs": "rollout.max_num_seqs",
    "tensor_parallel_size": "rollout.tensor_parallel_size",
    "pipeline_parallel_size": "rollout.tensor_parallel_size",
    "data_parallel_size": "rollout.engines",
    "enable_prefix_caching": "rollout.prefix_caching",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "enable_sleep_mode": "rollout.sleep",
    "sleep_preserve_parameter_names": None,
    "enable_lora": "model.lora.rank and rollout.lora",
    "max_lora_rank": "model.lora.rank",
    "enable_return_routed_experts": "model.router_replay",
    "logprobs_mode": None,
    "weight_transfer_config": "rollout.transport",
    "worker_extension_cls": None,
    "distributed_executor_backend": None,
    "use_tqdm_on_load": None,
}
"""Arguments of vLLM's engine that the package sets, with the option for the argument, if there is one."""

_ENGINES = Range(
    "use per_worker, or a number of at least 1",
    lambda value: value in (None, "per_worker") or (isinstance(value, int) and value >= 1),
)


@dataclass(kw_only=True)
class EngineOptions(Settings):
    """Size, memory and deadlines of a vLLM engine.

    Attributes:
        prefix_caching: share the KV cache of common prefixes. Every weight update drops the cache.
        cpu_kv_cache_gib: size of the KV cache of each process in GiB (CPU).
        tensor_parallel_size: number of devices of the engine; on CPU, of its processes.
        check_updates: number of weight updates between two comparisons of the engine with the policy, tensor by tensor
            and by the log-probs of a short prompt; 0 disables comparisons.
        transport: weight transport: `auto`, `shared_memory` (CPU, one machine), `gloo` (CPU, several machines), `ipc`
            (CUDA, colocated), or `nccl` (CUDA, split).
        generate_timeout_s: deadline for the sampling of one step, in seconds.
        update_timeout_s: deadline for each call of a weight update, in seconds.
        max_num_seqs: largest number of responses sampled at once by an engine; null is 256, or 1024 on GPUs.
        vllm: further arguments of vLLM's engine (`vllm.EngineArgs`), such as `max_num_batched_tokens`,
            `kv_cache_dtype`, `quantization`, `speculative_config` or `compilation_config`.
    """

    prefix_caching: bool = True
    cpu_kv_cache_gib: Annotated[int, AT_LEAST_1] = 1
    tensor_parallel_size: Annotated[int, AT_LEAST_1] = 1
    check_updates: Annotated[int, NOT_NEGATIVE] = 0
    transport: Annotated[str, one_of("auto", "shared_memory", "gloo", "ipc", "nccl")] = "auto"
    generate_timeout_s: Annotated[float, SECONDS] = 1800.0
    update_timeout_s: Annotated[float, SECONDS] = 300.0
    max_num_seqs: Annotated[int | None, or_null(AT_LEAST_1)] = None
    vllm: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check all settings.

        Raises:
            ConfigError: a setting is out of its range, or `vllm` has an argument that vLLM does not know, or that the
                package sets.
        """
        super().__post_init__()
        check_engine_arguments(self.vllm)


@dataclass
class RolloutConfig(EngineOptions):
    """Rollout engine.

    Attributes:
        engine: `vllm` or `transformers`.
        engines: number of vLLM engines, or `per_worker`: one for every `rollout.tensor_parallel_size` workers. Each
            engine samples for its share of the prompts. On CPU, a colocated engine has its share of the cores of the
            workers, which wait in the meantime. Null is `per_worker` for colocated engines on GPUs, otherwise 1.
        dtype: dtype of the engine's weights; null follows `model.precision`.
        sleep: memory freed by vLLM engines while the workers train: `kv_cache`; `all`, which also frees the weights,
            so every rollout needs all weights again; `none`, which saves the time to allocate the KV cache. Null is
            `none` with `schedule.max_staleness`, because engines then sample at the same time; else `all` on GPUs if
            all weights are sent, because `kv_cache` would copy the weights to the host and back; else `kv_cache`.
        lora: weights sent to vLLM for a policy with an adapter: `adapter`, which the engine adds to the weights of
            `model.path` at every token, or `merged`, all weights with the adapter merged into them. A vision-language
            model needs `merged`, or `model.lora.target_modules=language-model`.
        gpu_memory_utilization: share of a GPU's memory for weights and KV cache (CUDA); null is 0.6, or 0.1 less for
            each frozen model that stays on the workers' GPUs while the engine samples, but at least 0.4
            (`strategy.offload.reference` and so on); or 0.4 if states of a trained model stay on the GPU
            (`strategy.offload.policy`), or the engine keeps its memory while the workers train (`rollout.sleep=none`);
            or 0.9 with `placement.rollout=split`.
        bucket_mb: memory for weights in transit, in MiB (unused by `shared_memory`, which writes to the final place);
            null is 64, or 256 on GPUs.
        ready_timeout_s: deadline for the start of the engine, in seconds; null is 300, or 900 on GPUs.
        stall_timeout_s: longest time without an answer, in seconds; null is 120. On GPUs, where the first batch of an
            engine compiles kernels, the time is at least 900 before the first samples. An engine without an answer for
            longer is lost: it is started again, and the other engines get its prompts.
    """

    engine: Annotated[str, one_of("vllm", "transformers")] = "vllm"
    engines: Annotated[int | str | None, _ENGINES] = None
    dtype: Annotated[str | None, one_of(None, "float32", "bfloat16", "float16")] = None
    sleep: Annotated[str | None, one_of(None, "kv_cache", "all", "none")] = None
    lora: Annotated[str, one_of("merged", "adapter")] = "adapter"
    gpu_memory_utilization: Annotated[float | None, or_null(ABOVE_0_TO_1)] = None
    bucket_mb: Annotated[int | None, or_null(AT_LEAST_1)] = None
    ready_timeout_s: Annotated[float | None, or_null(SECONDS)] = None
    stall_timeout_s: Annotated[float | None, or_null(SECONDS)] = None

    @property
    def quantizes(self) -> bool:
        """True if the engine computes with fewer bits than the trainer, so its log-probs differ."""
        cache = str(self.vllm.get("kv_cache_dtype", "auto"))
        return self.vllm.get("quantization") is not None or cache not in ("auto", "bfloat16", "float16", "float32")

    def limits(self, *, on_gpus: bool, gpu_share: float) -> dict[str, Any]:
        """Return size, memory and deadlines of an engine, with the defaults of the device, by the option's name.

        Args:
            on_gpus: True if the engine is on GPUs.
            gpu_share: default of `gpu_memory_utilization`; see `default_gpu_share`.
        """
        return {
            "max_num_seqs": self.max_num_seqs or default_max_num_seqs(on_gpus=on_gpus),
            "gpu_memory_utilization": self.gpu_memory_utilization or gpu_share,
            "bucket_mb": self.bucket_mb or (256 if on_gpus else 64),
            "ready_timeout_s": self.ready_timeout_s or default_ready_timeout_s(on_gpus=on_gpus),
            "stall_timeout_s": self.stall_timeout_s or 120.0,
        }

    def check_policy(
        self, path: str, model: Mapping[str, Any], *, lora: LoraConfig, tokens: int, is_on_cpu: bool
    ) -> None:
        """Check if the engine can sample from the policy, with the log-probs of the policy.

        Args:
            path: name or folder of the policy, for messages.
            model: content of the policy's config.json.
            lora: settings of the policy's adapter.
            tokens: longest sequence of the engine, in tokens.
            is_on_cpu: True if the engine runs on CPU.

        Raises:
            ConfigError: the engine cannot; see `check_engine_adapter`, `check_cpu_engine`, `check_engine_updates`
                and `check_engine_positions`.
        """
        if self.vllm.get("speculative_config") and reads_images(model):
            raise ConfigError(
                f"rollout.vllm.speculative_config: {path} reads images, and the token of an image is never sampled, "
                "which vLLM cannot do with speculative decoding: leave the option out"
            )
        if self.engine == "vllm" and self.lora == "adapter":
            check_engine_adapter(path, model, lora)
        if self.engine == "vllm" and is_on_cpu:
            check_cpu_engine(path, model)
        sends_weights = not lora.rank or self.lora == "merged"
        if self.engine == "vllm" and sends_weights:
            check_engine_updates(path, model, is_on_cpu=is_on_cpu)
        check_engine_positions(path, model, tokens)


def default_sleep(*, on_gpus: bool, sends_adapter: bool) -> str:
    """Return the memory that colocated engines free while the workers train; see `RolloutConfig.sleep`.

    Args:
        on_gpus: True if the engines are on GPUs.
        sends_adapter: True if a weight update sends an adapter alone, and cannot restore freed weights.
    """
    return "all" if on_gpus and not sends_adapter else "kv_cache"


def default_gpu_share(*, split: bool, takes_turns: bool, staying: int) -> float:
    """Return the share of a GPU's memory for a rollout engine; see `RolloutConfig.gpu_memory_utilization`.

    Args:
        split: True if the engine has GPUs of its own.
        takes_turns: True if the states of trained models leave the GPU while the engine samples, and the engine's
            memory while the workers train.
        staying: number of frozen models that stay on the GPU while the engine samples.
    """
    if split:
        return SPLIT_GPU_SHARE
    return max(4, 6 - staying) / 10 if takes_turns else 0.4


def default_max_num_seqs(*, on_gpus: bool) -> int:
    """Return the largest number of responses that an engine samples at once."""
    return 1024 if on_gpus else 256


def default_ready_timeout_s(*, on_gpus: bool) -> float:
    """Return the deadline for the start of an engine or of an actor with a model, in seconds."""
    return 900.0 if on_gpus else 300.0


def check_engine_arguments(arguments: Mapping[str, Any], own: Mapping[str, str | None] = OWN_ARGUMENTS) -> None:
    """Check the names of arguments of vLLM's engine, without an import of vLLM.

    Args:
        arguments: arguments by name.
        own: arguments that the package sets, with the option for the argument, if there is one.

    Raises:
        ConfigError: vLLM does not know an argument, or the package sets the argument.
    """
    known = engine_argument_names()
    for name in arguments:
        if name in own:
            way_out = f"use {own[name]}" if own[name] else "leave it out"
            raise ConfigError(f"vllm.{name}: the package sets this argument of vLLM: {way_out}")
        if known and name not in known:
            close = difflib.get_close_matches(name, known, n=3)
            raise ConfigError(
                f"vllm.{name}: the installed vLLM has no such engine argument: "
                + (f"did you mean {' or '.join(close)}?" if close else "see vllm.EngineArgs")
            )


def check_cpu_head_size(path: str, model: Mapping[str, Any]) -> None:
    """Check the width of a model's heads for an engine on CPU.

    Args:
        path: name or folder of the model, for the message.
        model: content of the model's config.json.

    Raises:
        ConfigError: vLLM's build for CPUs has no kernel for the width.
    """
    text = model.get("text_config") or model
    heads, width = text.get("num_attention_heads"), text.get("hidden_size")
    size = text.get("head_dim") or (width // heads if heads and width else None)
    # Latent attention has other kernels.
    if size is not None and "kv_lora_rank" not in text and size not in CPU_HEAD_SIZES:
        raise ConfigError(
            f"{path}: the attention heads have a width of {size}, and vLLM on CPU has kernels for "
            f"{', '.join(map(str, CPU_HEAD_SIZES))}: use another model, a GPU, or rollout.engine=transformers "
            "(TransformersRollout)"
        )


def check_cpu_engine(path: str, model: Mapping[str, Any]) -> None:
    """Check that an engine on CPU computes the log-probs of the policy.

    Args:
        path: name or folder of the model, for the message.
        model: content of the model's config.json.

    Raises:
        ConfigError: vLLM's build for CPUs has no kernel for the width of the heads, or computes other log-probs than
            transformers.
    """
    check_cpu_head_size(path, model)
    text = model.get("text_config") or model
    is_latent = text.get("kv_lora_rank") is not None
    if is_latent or text.get("model_type") in _OTHER_LOG_PROBS_ON_CPU:
        kind = "latent attention" if is_latent else f"models of the type {text['model_type']}"
        raise ConfigError(
            f"{path}: for {kind}, vLLM on CPU computes other log-probs than transformers: use another model, a GPU, or "
            "rollout.engine=transformers (TransformersRollout)"
        )


def check_engine_updates(path: str, model: Mapping[str, Any], *, is_on_cpu: bool) -> None:
    """Check that updates of an engine reach all weights of a model.

    Args:
        path: name or folder of the model, for the message.
        model: content of the model's config.json.
        is_on_cpu: True if the engine runs on CPU.

    Raises:
        ConfigError: vLLM would keep the experts of the first policy, or refuse the experts.
    """
    kind, fault = model.get("model_type"), None
    if kind in _UPDATED_IN_PART_ON_GPUS and not is_on_cpu:
        fault = "on GPUs, weight updates of vLLM do not reach the experts"
    elif kind in _TRANSPOSED_EXPERTS:
        fault = "weight updates of vLLM take other shapes of the experts"
    if fault is not None:
        raise ConfigError(
            f"{path}: {fault} of models of the type {kind}: use rollout.lora=adapter with model.lora.rank, or "
            "rollout.engine=transformers (TransformersRollout)"
        )


def check_engine_adapter(path: str, model: Mapping[str, Any], lora: LoraConfig) -> None:
    """Check that an engine can apply the policy's adapter to the weights of a model.

    Args:
        path: name or folder of the model, for the message.
        model: content of the model's config.json.
        lora: settings of the adapter, which the engine applies.

    Raises:
        ConfigError: the weights under the adapter are in 4 bits; or experts have an adapter; or the model is a
            vision-language model, and other layers than those of its language model may have an adapter. vLLM leaves
            out the adapter of the vision tower.
    """
    if lora.quantization:
        raise ConfigError(
            f"model.lora.quantization={lora.quantization}: vLLM would apply the adapter to weights that are not "
            "quantised: use rollout.lora=merged"
        )
    if lora.rank and lora.experts:
        raise ConfigError(
            "model.lora.experts=true: vLLM applies no adapter to experts: use rollout.lora=merged, which sends whole "
            "weights"
        )
    if lora.rank and lora.target_modules != LANGUAGE_MODEL and reads_images(model):
        raise ConfigError(
            f"{path}: vLLM applies adapters to the language model of a vision-language model alone: use "
            "model.lora.target_modules=language-model or rollout.lora=merged"
        )


def check_engine_positions(path: str, model: Mapping[str, Any], tokens: int) -> None:
    """Check if a rollout engine rotates positions as the policy does.

    With `longrope`, an engine takes one set of rotary frequencies for all responses, chosen by the longest sequence.
    The policy takes the set for short sequences, or the set for long sequences, sample by sample.

    Args:
        path: name or folder of the model, for the message.
        model: content of the model's config.json.
        tokens: longest sequence of the engine, in tokens.

    Raises:
        ConfigError: the model has `longrope`, and the engine would take the frequencies for long sequences.
    """
    text, rotary = model.get("text_config") or model, rotary_parameters(model)
    short = rotary.get("original_max_position_embeddings") or text.get("original_max_position_embeddings")
    # Older files of Phi-3 say `su`.
    if rotary.get("rope_type", rotary.get("type")) in ("longrope", "su") and isinstance(short, int) and tokens > short:
        raise ConfigError(
            f"{path} has the rotary positions longrope: above {short} tokens, engine and policy would rotate short "
            f"samples differently, and data.max_prompt_tokens and sampling.max_tokens make {tokens} tokens: lower one "
            "of the two"
        )


@cache
def engine_argument_names() -> frozenset[str]:
    """Return the fields of `vllm.EngineArgs` from vLLM's source; no fields if vLLM is not installed."""
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return frozenset()
    source = Path(spec.submodule_search_locations[0]) / "engine" / "arg_utils.py"
    (record,) = [
        node
        for node in ast.parse(source.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs"
    ]
    fields = [node.target for node in record.body if isinstance(node, ast.AnnAssign)]
    return frozenset(target.id for target in fields if isinstance(target, ast.Name))
