"""Bytes that a process has in each phase of a step, part by part: what the strategies and engines here allocate.

`P` is the number of parameters that are trained, `w` the number of workers, `b` the bytes of a number that training
computes with. DeepSpeed's optimizers keep float32 masters in every precision, and two moments of Adam.
"""

from __future__ import annotations

from collections.abc import Mapping

from rl_plugins.planning.devices import Device
from rl_plugins.planning.placement import Placement
from rl_plugins.planning.rows import Rows, rows_of
from rl_plugins.planning.shape import ModelShape
from rl_plugins.planning.workload import WIDTHS, Workload
from rl_plugins.rollout.vllm.config import CPU_BLOCK

Parts = dict[str, float]

REDUCE_BUCKET = 50_000_000
"""Numbers that ZeRO adds up over the workers at once."""
LIVE_PARAMETERS = 1_000_000_000
"""Numbers that ZeRO-3 keeps gathered between forward and backward."""
PREFETCHED = 50_000_000
"""Numbers that it gathers ahead."""
LOGITS_AT_ONCE = 2**24
"""Logits in float32 that the output head computes at a time."""
MAPPED_BYTES = 32 * 2**20
"""Blocks of at least so many bytes go back to the machine when a process on a CPU frees them."""
BLOCK = 16
"""Tokens of a block of vLLM's KV cache on an accelerator."""
PERSISTENT = 100_000
"""Parameters of at most so many numbers are whole on every worker under ZeRO-3."""


def trainer_memory(work: Workload, place: Placement, device: Device) -> dict[str, Parts]:
    """What a training worker has on its device while the engine samples, in passes without gradient, in the update."""
    kept = _states(work.policy, work, place, work.trained_parameters)
    if work.critic is not None:
        critic = _states(work.critic, work, place, work.critic.parameters)
        kept = {key: kept.get(key, 0.0) + critic.get(key, 0.0) for key in kept}
    frozen = {f"{name} parameters": _resident(shape, work, place) for name, shape in work.frozen.items()}
    models = [work.policy, *([work.critic] if work.critic else []), *work.frozen.values()]
    largest = max(models, key=lambda shape: shape.parameters)
    rows = rows_of(work, place.trainers)
    passes = {
        "gathered": _gathered(largest, work, place),
        **_head(work, rows),
        "activations": _forward_activations(work, rows),
    }
    sampling = {**kept, **frozen}
    if device.is_cpu:
        # The C library keeps what was freed in blocks of less than 32 MB for the next pass.
        sampling["activations"] = _activations(work, rows) * device.fragments
    elif place.offload == "while_sampling" and place.colocated:
        sampling = frozen
    return {
        "sampling": sampling,
        "log_probs": {**kept, **frozen, **passes},
        "update": {**kept, **frozen, **_update(work, place, device, rows)},
    }


def engine_memory(work: Workload, place: Placement, device: Device) -> dict[str, Parts]:
    """What a process of a rollout engine has: weights, and the KV cache as far as a step fills it.

    On an accelerator the engine takes the whole of its share for itself while it samples. On a CPU vLLM writes the
    whole KV cache when it starts, and loads weights into memory from which they move; products use a packed copy of
    the weights, which an engine that sleeps gives up together with what loading has left.
    """
    width = WIDTHS[work.engine_dtype]
    weights = work.policy.parameters * width / place.tensor_parallel
    if work.lora_rank and not work.merged:
        weights += work.trained_parameters * width / place.tensor_parallel
    if not device.is_cpu:
        cache = max(0.0, place.engine_share * device.memory - weights)
        sampling = {"weights": weights, "KV cache": cache}
        # An engine on devices of its own does not sleep; one that keeps its weights has them on the host.
        left = 0.0 if place.colocated and place.sleep != "none" else weights + cache
        return {"start": sampling, "sampling": sampling, "asleep": {"left": left}}
    packed = work.policy.multiplied * width / place.tensor_parallel
    loaded = weights - work.policy.large(MAPPED_BYTES // width) * width
    start = {
        "weights": weights,
        "packed weights": packed,
        "freed by loading": max(0.0, loaded - packed),
        "KV cache": work.kv_cache_bytes,
    }
    if place.sleep == "none":
        return {"start": start, "sampling": start, "asleep": start}
    used = min(kv_cache_needed(work, place, on_cpu=True), work.kv_cache_bytes)
    return {
        "start": start,
        "sampling": {"weights": weights, "packed weights": packed, "KV cache": used},
        "asleep": {"weights": weights} if place.sleep == "kv_cache" else {},
    }


def kv_cache_needed(work: Workload, place: Placement, *, on_cpu: bool) -> float:
    """Bytes of KV cache on each device of an engine when all that it samples at once is at its full length."""
    at_once = min(work.max_num_seqs, -(-work.responses // place.engines))
    tokens = at_once * (prompt_tokens_of_sample(work, on_cpu=on_cpu) + work.response_tokens)
    return tokens * work.policy.kv_bytes(WIDTHS[work.engine_dtype]) / place.tensor_parallel


def prompt_tokens_of_sample(work: Workload, *, on_cpu: bool) -> float:
    """Tokens of its prompt that an engine reads and keeps for each sample, on average.

    Samples of a prompt share its whole blocks, but for that with the last token, which each of them reads.
    """
    block = CPU_BLOCK if on_cpu else BLOCK
    shared = (work.prompt_tokens - 1) // block * block if work.prefix_caching else 0.0
    return work.prompt_tokens - shared + shared / work.samples


def sample_cache(work: Workload, place: Placement) -> float:
    """Bytes of KV cache of one sample of the longest kind, on each device of an engine."""
    return work.max_tokens * work.policy.kv_bytes(WIDTHS[work.engine_dtype]) / place.tensor_parallel


def total(parts: Mapping[str, float]) -> float:
    """The sum of the parts."""
    return sum(parts.values())


def _states(shape: ModelShape, work: Workload, place: Placement, trained: int) -> Parts:
    """Weights, masters and moments of a trained model between the passes of a step."""
    workers, width = place.trainers, work.width
    if place.zero_stage == 0:
        # FSDP2 keeps shards in what they are trained in; under `bf16-mixed` that is float32.
        stored = 4 if work.precision == "bf16-mixed" else width
        frozen = (shape.parameters - trained if trained < shape.parameters else 0) * width / workers
        return {"parameters": trained * stored / workers + frozen, "moments": 2 * trained * stored / workers}
    optimizer = 0.0 if place.offload == "cpu" else trained / workers
    parts = {"parameters": _resident(shape, work, place), "masters": 4 * optimizer, "moments": 8 * optimizer}
    if trained < shape.parameters:
        parts["parameters"] += trained * width
    if place.zero_stage == 3:
        # The buffer in which gradients are added up is always there.
        parts["gradients"] = trained * width / workers
    return parts


def _resident(shape: ModelShape, work: Workload, place: Placement) -> float:
    """Bytes of a model's weights on a worker between passes."""
    if place.zero_stage == 3:
        # Small tensors stay whole beside their shards.
        small = shape.parameters - shape.large(PERSISTENT)
        return (shape.parameters / place.trainers + small) * work.width
    return shape.parameters * work.width / (place.trainers if place.zero_stage == 0 else 1)


def _gathered(shape: ModelShape, work: Workload, place: Placement) -> float:
    """Bytes of weights that a pass gathers."""
    if place.zero_stage == 3:
        return min(shape.large(PERSISTENT), LIVE_PARAMETERS + PREFETCHED) * work.width
    if place.zero_stage == 0:
        # The blocks that are at work and on their way, and the root's own.
        root = shape.embedding * (1 if shape.tied else 2)
        return (2 * shape.block_parameters + root) * work.width
    return 0.0


def _update(work: Workload, place: Placement, device: Device, rows: Rows) -> Parts:
    """What the update of a trained model has besides its states, at its largest: in a pass or in the optimizer."""
    shape, trained, workers, width = work.policy, work.trained_parameters, place.trainers, work.width
    if work.critic is not None and work.critic.parameters > trained:
        shape, trained = work.critic, work.critic.parameters
    shard = trained / workers
    if place.zero_stage == 0:
        summed = 4 if work.precision != "bf16-true" else width
        gradients = (shard if place.accumulate_shards else trained) * summed
        bucket, in_step = 0.0, shard * summed
    else:
        bucket = min(trained, REDUCE_BUCKET) * width
        # Stage 1 adds up whole gradients until the last pass, the others parts of them.
        gradients = shard * width
        if place.zero_stage == 1 and rows.passes > work.updates:
            gradients += trained * width
        if place.zero_stage == 3:
            # A bucket is put together anew before it is sent, and what is gathered before it is taken apart.
            bucket = 2 * bucket + min(shape.large(PERSISTENT), PREFETCHED) * width
        in_step = shard * 4
    held: Parts = {
        "gradients": gradients,
        "gathered": _gathered(shape, work, place),
        "activations": _activations(work, rows),
    }
    passing: Parts = {"bucket": bucket, **_head(work, rows)}
    # An optimizer on the host does not work here.
    stepping: Parts = {"float32 gradients": in_step} if place.offload != "cpu" else {}
    if device.is_cpu:
        # What a pass had stays with the process, and the optimizer needs room besides.
        held["fragments"] = (device.fragments - 1) * total(held)
        return {**held, **_larger(passing, stepping)}
    return _larger({**held, **passing}, {"gradients": gradients, **stepping})


def _larger(one: Parts, other: Parts) -> Parts:
    return one if total(one) >= total(other) else other


def _activations(work: Workload, rows: Rows) -> float:
    """Bytes that autograd keeps of a micro-batch, with the last norm, and with the gradients inside a block."""
    shape, width, tokens = work.policy, work.width, rows.largest
    block = shape.activation_bytes(width, rows.copies)
    ends = shape.hidden * (4 + 2 * width) + width * (2 * shape.hidden + 3 * shape.intermediate)
    if work.gradient_checkpointing:
        return tokens * (shape.layers * shape.hidden * width + block + ends)
    return tokens * (shape.layers * block + ends)


def _forward_activations(work: Workload, rows: Rows) -> float:
    """Bytes of a block's intermediate results in a pass that keeps none: of its attention or its MLP."""
    shape = work.policy
    attention = 2 * (shape.q_width + rows.copies * shape.kv_width)
    return rows.largest * work.width * (2 * shape.hidden + max(attention, 3 * shape.intermediate))


def _head(work: Workload, rows: Rows) -> Parts:
    """Bytes of the output head's logits and their gradient, as many as there are at a time."""
    responses = rows.largest * rows.copies * work.response_tokens / work.sample_tokens
    logits = min(responses * work.policy.vocab, LOGITS_AT_ONCE)
    return {"logits": logits * 2 * work.width}
