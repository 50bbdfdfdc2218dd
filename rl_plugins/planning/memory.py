"""Bytes of each process in each phase of a step, part by part, as the strategies and engines of this project allocate.

DeepSpeed's optimizers keep float32 master weights in every precision, and the two moments of Adam, in float32 unless
the optimizer quantises its states.
"""

from __future__ import annotations

from collections.abc import Mapping

from rl_plugins.config.precision import FLOAT16, MIXED
from rl_plugins.planning.devices import Device
from rl_plugins.planning.shape import ModelShape
from rl_plugins.planning.workload import MicroBatchSizes, Plan, Workload, log_prob_sizes, micro_batch_sizes
from rl_plugins.rollout.vllm.config import CPU_BLOCK

Parts = dict[str, float]
"""Bytes by the name of the part."""

REDUCE_BUCKET = 50_000_000
"""Number of gradients in one reduction of ZeRO over the workers."""
LIVE_PARAMETERS = 1_000_000_000
"""Number of parameters kept gathered between forward and backward under ZeRO-3."""
PREFETCHED = 50_000_000
"""Number of parameters gathered in advance under ZeRO-3."""
LOGITS_ON_CPU, LOGITS_ON_GPU = (2**24, 2**18), (2**27, 2**26)
"""Number of logits in a chunk of the output head, and in a float32 block."""
MAPPED_BYTES = 32 * 2**20
"""Bytes of the smallest block that the C library returns to the machine when the block is freed."""
BLOCK = 16
"""Tokens of a block of vLLM's KV cache on an accelerator."""
CODE_WIDTH, SCALE_WIDTH = 0.5, 1 / 64 + 4 / (64 * 256)
"""Bytes of a number in 4 bits, and its share of the scale of 64 numbers in 8 bits and of the scale of 256 scales."""
PERSISTENT = 100_000
"""Largest tensor (in elements) that ZeRO-3 keeps whole on every worker."""


def trainer_memory(work: Workload, plan: Plan, device: Device) -> dict[str, Parts]:
    """Return the memory of a training worker on its device in each phase of the step.

    Args:
        work: work of the step.
        plan: placement of the step.
        device: device of the worker.

    Returns:
        Bytes of each part by phase: `sampling` (while the engine samples), `log_probs` (passes without gradient) and
        `update`.
    """
    states = _states(work.policy, work, plan, work.trained_parameters, work.moment_width, muon=work.muon)
    if work.four_bits:
        states["parameters"] -= _saved_by_four_bits(work.policy, work, plan)
    for critic in work.critics:
        further = _states(critic.shape, work, plan, critic.trained, critic.moment_width, muon=critic.muon)
        if critic.four_bits:
            further["parameters"] -= _saved_by_four_bits(critic.shape, work, plan)
        states = {key: states.get(key, 0.0) + further.get(key, 0.0) for key in states}
    frozen = _untrained(work, plan, device)
    models = [(work.policy, work.four_bits), *((critic.shape, critic.four_bits) for critic in work.critics)]
    models += [(shape, False) for shape in work.frozen.values()]
    sizes = micro_batch_sizes(work, plan.trainers)
    without_gradient = log_prob_sizes(work, plan.trainers)
    passes = {
        "gathered": max(_gathered(shape, work, plan, four_bits=four_bits) for shape, four_bits in models),
        **_head(work, device, without_gradient),
        "activations": max(_forward_activations(shape, work, without_gradient) for shape, _ in models),
    }
    sampling = {**states, **frozen}
    if device.is_cpu:
        # The C library keeps freed blocks of less than 32 MB for the next pass.
        sampling["activations"] = _largest_activations(work, sizes) * device.fragments
    elif plan.colocated:
        sampling = frozen if plan.offload == "while_sampling" else sampling
        leaving = {f"{name} parameters" for name, place in work.places.items() if place == "while_sampling"}
        sampling = {name: size for name, size in sampling.items() if name not in leaving}
    return {
        "sampling": sampling,
        "log_probs": {**states, **frozen, **passes},
        "update": {**states, **frozen, **_update(work, plan, device, sizes, states.get("gradients", 0.0))},
    }


def engine_memory(work: Workload, plan: Plan, device: Device) -> dict[str, Parts]:
    """Return the memory of a process of a rollout engine: weights, and the filled part of the KV cache.

    On an accelerator a sampling engine takes its whole share of the memory. On a CPU vLLM writes to the whole KV cache
    at the start. vLLM moves the weights after loading, which leaves freed memory in the process, and matrix products
    use a packed copy of the weights. A sleeping engine gives back the packed copy and the memory left from loading.

    Args:
        work: work of the step.
        plan: placement of the step.
        device: device of the engine.

    Returns:
        Bytes of each part by phase: `start`, `sampling` and `asleep`.
    """
    width = work.engine_width
    weights = work.engine_bytes / plan.tensor_parallel
    if work.sends_adapter:
        weights += work.trained_parameters * width / plan.tensor_parallel
    if not device.is_cpu:
        cache = max(0.0, plan.engine_share * device.memory - weights)
        sampling = {"weights": weights, "KV cache": cache}
        # An engine with devices of its own does not sleep. A sleeping engine with weights has the weights on the host.
        left = 0.0 if plan.colocated and plan.sleep != "none" else weights + cache
        return {"start": sampling, "sampling": sampling, "asleep": {"left": left}}
    packed = work.policy.multiplied * width / plan.tensor_parallel
    loaded = weights - work.policy.large(MAPPED_BYTES // width) * width
    start = {
        "weights": weights,
        "packed weights": packed,
        "freed by loading": max(0.0, loaded - packed),
        "KV cache": work.kv_cache_bytes,
    }
    if plan.sleep == "none":
        return {"start": start, "sampling": start, "asleep": start}
    used = min(kv_cache_needed(work, plan, on_cpu=True), work.kv_cache_bytes)
    return {
        "start": start,
        "sampling": {"weights": weights, "packed weights": packed, "KV cache": used},
        "asleep": {"weights": weights} if plan.sleep == "kv_cache" else {},
    }


def kv_cache_needed(work: Workload, plan: Plan, *, on_cpu: bool) -> float:
    """Return the bytes of KV cache on each device of an engine when all its responses have the full length."""
    sequences = min(work.max_num_seqs, -(-work.responses // plan.engines))
    return sequences * sample_cache(work, plan, on_cpu=on_cpu)


def sample_cache(work: Workload, plan: Plan, *, on_cpu: bool) -> float:
    """Return the bytes of KV cache of one sample of the mean length, on each device of an engine.

    vLLM reserves nothing for the largest length: a sample gets blocks while its response grows, and the samples of a
    prompt share the blocks of the prompt.
    """
    tokens = prompt_tokens_of_sample(work, on_cpu=on_cpu) + work.response_tokens
    return tokens * token_cache(work, plan)


def token_cache(work: Workload, plan: Plan) -> float:
    """Return the bytes of KV cache of a token on each device of an engine; a device has at least one KV head."""
    return work.sample_bytes / min(plan.tensor_parallel, work.policy.kv_heads)


def prompt_tokens_of_sample(work: Workload, *, on_cpu: bool) -> float:
    """Return the mean number of prompt tokens that an engine reads and keeps for each sample.

    The samples of a prompt share the whole blocks of the prompt, except for the block with the last token, which the
    engine reads for each sample.
    """
    block = CPU_BLOCK if on_cpu else BLOCK
    shared = (work.prompt_tokens - 1) // block * block if work.prefix_caching else 0.0
    return work.prompt_tokens - shared + shared / work.samples


def largest_sample_cache(work: Workload, plan: Plan) -> float:
    """Return the bytes of KV cache of one sample of the largest length, on each device of an engine."""
    return work.max_tokens * token_cache(work, plan)


def total(parts: Mapping[str, float]) -> float:
    """Return the sum of the parts."""
    return sum(parts.values())


def _states(
    shape: ModelShape, work: Workload, plan: Plan, trained: int, moment_width: float | None, *, muon: bool
) -> Parts:
    """Return the weights, master weights and moments of a trained model between the passes of a step."""
    workers, width = plan.trainers, work.width
    if plan.zero_stage == 0:
        # FSDP2 keeps shards in the dtype of training, which is float32 in mixed precision.
        stored = 4 if work.precision in MIXED else width
        frozen = (shape.parameters - trained if trained < shape.parameters else 0) * width / workers
        numbers = 2 * trained
        if muon:
            # Matrices of hidden layers have one moment. AdamW takes the steps of the ends, and of stacks of experts.
            others = shape.embedding * (1 if shape.tied else 2) + shape.sparse_blocks * shape.experts_of_block
            numbers = trained + (0 if _is_adapter(shape, trained) else others)
        moments = numbers * (moment_width or stored) / workers
        return {"parameters": trained * stored / workers + frozen, "moments": moments}
    optimizer = 0.0 if plan.offload == "cpu" else trained / workers
    parts = {
        "parameters": _resident(shape, work, plan),
        "masters": 4 * optimizer,
        "moments": 2 * (moment_width or 4) * optimizer,
    }
    if _is_adapter(shape, trained):
        parts["parameters"] += trained * width
    if plan.zero_stage == 3 and plan.offload != "cpu":
        # ZeRO-3 never frees the buffer of gradients, which are added up in float32. The buffer is beside the masters.
        parts["gradients"] = trained * 4 / workers
    return parts


def _is_adapter(shape: ModelShape, trained: int) -> bool:
    """Return True for the parameters of an adapter, and False for those of a model with or without its vision tower."""
    return trained < shape.parameters - (0 if shape.tower is None else sum(shape.tower.matrices))


def _untrained(work: Workload, plan: Plan, device: Device) -> Parts:
    """Return the parameters of frozen models, and the averages, on a worker between passes."""
    shards = plan.trainers if plan.zero_stage in (0, 3) else 1
    parts = {f"{name} average": 4 * numbers / shards for name, numbers in work.averages.items()}
    for name, shape in work.frozen.items():
        parts[f"{name} parameters"] = _resident(shape, work, plan)
        if work.places.get(name) == "cpu" and not device.is_cpu:
            # The shards are on the host.
            parts[f"{name} parameters"] -= shape.parameters * work.width / plan.trainers
    return parts


def _resident(shape: ModelShape, work: Workload, plan: Plan) -> float:
    """Return the bytes of the weights of a model on a worker between passes."""
    if plan.zero_stage == 3:
        # Small tensors stay whole in addition to their shards.
        small = shape.parameters - shape.large(PERSISTENT)
        return (shape.parameters / plan.trainers + small) * work.width
    return shape.parameters * work.width / (plan.trainers if plan.zero_stage == 0 else 1)


def _saved_by_four_bits(shape: ModelShape, work: Workload, plan: Plan) -> float:
    """Return the bytes that a worker saves between passes: the codes are sharded as other weights, the scales not."""
    adapted = shape.layers * sum(_sizes(shape.adapted_layers))
    if shape.tower is not None and (work.adapts_tower or shape is not work.policy):
        adapted += sum(_sizes(shape.tower.linear_layers))
    shards = plan.trainers if plan.zero_stage in (0, 3) else 1
    return adapted * ((work.width - CODE_WIDTH) / shards - SCALE_WIDTH)


def _sizes(layers: list[tuple[int, int]]) -> list[int]:
    return [before * after for before, after in layers]


def _gathered(shape: ModelShape, work: Workload, plan: Plan, *, four_bits: bool = False) -> float:
    """Return the bytes of the weights gathered in a pass.

    Args:
        shape: model of the pass.
        work: work of the step.
        plan: placement of the step.
        four_bits: the weights under an adapter are gathered in 4 bits. A pass makes the numbers of one layer at a time.
    """
    layers = _sizes(shape.adapted_layers) if four_bits else []
    saved, numbers = 1 - CODE_WIDTH / work.width, max(layers, default=0) * work.width
    if plan.zero_stage == 3:
        in_codes = shape.layers * sum(size for size in layers if size > PERSISTENT)
        large = shape.large(PERSISTENT) - in_codes * saved
        return min(large, LIVE_PARAMETERS + PREFETCHED) * work.width + numbers
    if plan.zero_stage == 0:
        # The current block, the prefetched block, and the parameters of the root module.
        root = shape.embedding * (1 if shape.tied else 2)
        block = shape.block_parameters - shape.experts_elsewhere(work.expert_parallel) - sum(layers) * saved
        return (2 * block + root) * work.width + numbers
    return numbers


def _update(work: Workload, plan: Plan, device: Device, sizes: MicroBatchSizes, buffers: float) -> Parts:
    """Return the peak memory of an update in addition to the states of the models.

    The peak is in a pass or in the optimizer step. The model is the one of policy and critics that trains the most
    parameters.

    Args:
        work: work of the step.
        plan: placement of the step.
        device: device of the worker.
        sizes: micro-batches of the worker.
        buffers: bytes of the gradients that the models keep between updates.
    """
    shape, trained, workers, width = work.policy, work.trained_parameters, plan.trainers, work.width
    four_bits = work.four_bits
    for critic in work.critics:
        if critic.trained > trained:
            shape, trained, four_bits = critic.shape, critic.trained, critic.four_bits
    shard = trained / workers
    if plan.zero_stage == 0:
        summed = 4 if work.precision != "bf16-true" else width
        elsewhere = shape.sparse_blocks * shape.experts_elsewhere(work.expert_parallel)
        elsewhere = 0.0 if _is_adapter(shape, trained) else elsewhere
        # FSDP2 adds up whole gradients in float32 until the last pass.
        is_whole = sizes.passes > work.updates and not plan.accumulate_shards
        gradients = (trained - elsewhere) * 4 if is_whole else shard * summed
        bucket, in_step = 0.0, shard * summed
    else:
        # ZeRO-1 accumulates whole gradients until the last pass; ZeRO-2 accumulates shards in float32.
        summed = width if plan.zero_stage == 1 and work.precision != FLOAT16 else 4
        bucket = min(trained, REDUCE_BUCKET) * (summed if plan.zero_stage == 1 else width)
        gradients = shard * summed
        if plan.zero_stage == 1 and sizes.passes > work.updates:
            gradients += trained * summed
        if plan.zero_stage == 3:
            gradients = buffers
            # ZeRO-3 copies a bucket before sending, and gathers parameters into one buffer before splitting.
            bucket = 2 * bucket + min(shape.large(PERSISTENT), PREFETCHED) * width
        in_step = shard * 4
    held: Parts = {
        "gradients": gradients,
        "gathered": _gathered(shape, work, plan, four_bits=four_bits),
        "activations": _largest_activations(work, sizes),
    }
    passing: Parts = {"bucket": bucket, **_head(work, device, sizes)}
    # An optimizer on the host needs no memory of the device.
    stepping: Parts = {"float32 gradients": in_step} if plan.offload != "cpu" else {}
    if device.is_cpu:
        # The process keeps the memory of a pass, and the optimizer needs memory in addition.
        held["fragments"] = (device.fragments - 1) * total(held)
        return {**held, **_larger(passing, stepping)}
    return _larger({**held, **passing}, {"gradients": gradients, **stepping})


def _larger(first: Parts, second: Parts) -> Parts:
    return first if total(first) >= total(second) else second


def _largest_activations(work: Workload, sizes: MicroBatchSizes) -> float:
    return max(_activations(shape, work, sizes) for shape in (work.policy, *(critic.shape for critic in work.critics)))


def _activations(shape: ModelShape, work: Workload, sizes: MicroBatchSizes) -> float:
    """Return the bytes that autograd keeps of a micro-batch, including the last norm and gradients inside a block."""
    width, tokens = work.width, sizes.largest
    block = shape.activation_bytes(width, sizes.copies)
    ends = shape.hidden * (4 + 2 * width) + width * (2 * shape.hidden + 3 * shape.mlp_width)
    # peft makes changed experts in each pass.
    adapts_experts = shape is work.policy and work.lora_rank and work.adapts_experts
    changed = shape.experts_of_block * width if adapts_experts else 0.0
    if work.gradient_checkpointing:
        return tokens * (shape.layers * shape.hidden * width + block + ends) + changed
    return tokens * (shape.layers * block + ends) + shape.layers * changed


def _forward_activations(shape: ModelShape, work: Workload, sizes: MicroBatchSizes) -> float:
    """Return the bytes of intermediate results of a block, of attention or of the MLP, in a pass without gradient."""
    attention = 2 * (shape.q_width + sizes.copies * shape.kv_width)
    return sizes.largest * work.width * (2 * shape.hidden + max(attention, 3 * shape.mlp_width))


def _head(work: Workload, device: Device, sizes: MicroBatchSizes) -> Parts:
    """Return the bytes of a chunk of logits of the output head, of their gradient, and of two float32 blocks."""
    responses = sizes.largest * sizes.copies * work.response_tokens / work.sample_tokens
    chunk, block = LOGITS_ON_CPU if device.is_cpu else LOGITS_ON_GPU
    logits = responses * work.policy.vocab
    return {"logits": min(logits, chunk) * 2 * work.width + min(logits, block) * 2 * 4}
