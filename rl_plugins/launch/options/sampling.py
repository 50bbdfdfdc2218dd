"""Options of sampling: how, by which engines, and how far ahead."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class SamplingOptions:
    """How responses are drawn.

    Attributes:
        max_tokens: longest response.
        temperature: of training samples; see `validation` for the others.
        top_p: nucleus; 1 where the policy is compared with what sampled: with `schedule.max_staleness`,
            `algorithm.correction` or `algorithm.modifiers.off_policy_mask`.
        top_k: most likely tokens kept; -1 keeps all, as with `top_p=1`.
        stop: strings that end a response, besides the tokenizer's end-of-sequence token.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: list[str] = field(default_factory=list)


@dataclass
class EnvironmentOptions:
    """Conversations with a reward that answers before it gives a score.

    Attributes:
        max_turns: how often the policy speaks, at most; `sampling.max_tokens` is for the whole conversation. 1 is a
            response without a conversation.
        max_observation_tokens: of one answer; what is longer is cut behind them.
    """

    max_turns: int = 1
    max_observation_tokens: int = 256


@dataclass
class ValidationOptions:
    """How validation samples; by default one most likely response per prompt.

    Attributes:
        samples_per_prompt: responses to each prompt; of several, mean@k, best@k and maj@k are logged by data source.
        temperature: 0 is greedy.
        top_p: nucleus.
    """

    samples_per_prompt: int = 1
    temperature: float = 0.0
    top_p: float = 1.0


@dataclass
class RolloutConfig:
    """The rollout engine.

    Attributes:
        engine: `vllm` or `transformers`.
        engines: how many vLLM engines, or `per_worker`. Each samples for its share of the prompts, on CPU with its
            share of the cores of the workers, which wait for it; more than one run on CPU only.
        dtype: of the engine's weights; null follows `model.precision`.
        max_num_seqs: responses sampled at once.
        prefix_caching: share the KV cache of common prefixes.
        gpu_memory_utilization: share of a GPU's memory for the engine.
        cpu_kv_cache_gib: KV cache on CPU.
        tensor_parallel_size: GPUs of the engine, or on CPU its processes.
        sleep: what vLLM engines give back while the workers train: `kv_cache`; `all`, the weights too, which are then
            sent anew for every rollout; `none`, which saves the time of taking the KV cache back. Null is `kv_cache`,
            or `none` where `schedule.max_staleness` has them work at the same time.
        lora: what vLLM is sent of a policy with an adapter: `adapter`, which the engine adds to the weights of
            `model.path` with every token, or `merged`, all weights with the adapter in them.
        check_updates: every how many weight updates the engine's weights are compared with the policy's, tensor by
            tensor and by the log-probs of a short prompt; 0 for never.
        transport: of weights: `auto`; `shared_memory` (CPU, one machine) or `gloo` (CPU, several); `ipc` (CUDA,
            colocated) or `nccl` (CUDA, split).
        bucket_mb: memory for weights in flight, but in shared memory, where there are none.
        ready_timeout_s: deadline for the engine's start.
        generate_timeout_s: deadline for sampling one step.
        stall_timeout_s: an engine that does not answer for so long is lost: it is started again, and its prompts go to
            the others.
        update_timeout_s: deadline for each call of a weight update.
    """

    engine: str = "vllm"
    engines: int | str = 1
    dtype: str | None = None
    max_num_seqs: int = 256
    prefix_caching: bool = True
    gpu_memory_utilization: float = 0.4
    cpu_kv_cache_gib: int = 1
    tensor_parallel_size: int = 1
    sleep: str | None = None
    lora: str = "adapter"
    check_updates: int = 0
    transport: str = "auto"
    bucket_mb: int = 64
    ready_timeout_s: float = 300.0
    generate_timeout_s: float = 1800.0
    stall_timeout_s: float = 120.0
    update_timeout_s: float = 300.0


@dataclass
class ScheduleOptions:
    """How far sampling runs ahead of training.

    Attributes:
        max_staleness: how many steps may lie between the policy with which the sampling of a group began and the one
            that is trained on it. 0 is synchronous: each step samples, then trains. From 1 on, engines sample for the
            steps to come while the workers train, and weights change in flight; ratios are then to the policies that
            sampled, unless `algorithm.correction` is another remedy.
        ahead: how many steps' worth of groups are in flight beyond those of a step; null is `max_staleness`. With less,
            such as 0.25, stragglers are left for a later step; with `max_staleness=0` they are dropped.
        max_token_age: how many steps old the policy may be that sampled a token that is trained on; older tokens of a
            response are masked. Null masks none.
    """

    max_staleness: int = 0
    ahead: float | None = None
    max_token_age: int | None = None
