"""Seconds of each phase of a step.

Sampling follows a roofline model, training the number of its operations, and collectives the number of their bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from rl_plugins.memory import SPARE_SHARE
from rl_plugins.planning.devices import Device
from rl_plugins.planning.memory import (
    engine_memory,
    prompt_tokens_of_sample,
    sample_cache,
    token_cache,
    total,
    trainer_memory,
)
from rl_plugins.planning.shape import ModelShape
from rl_plugins.planning.workload import Plan, Workload, log_prob_sizes, micro_batch_sizes


@dataclass(frozen=True)
class StepTime:
    """Seconds of the phases of a step.

    Attributes:
        rollout: sampling.
        log_probs: passes without gradient: of frozen models, of the critic, and of the policy if a step has several
            updates.
        update: passes with gradient, and the optimizer.
        update_weights: transfer of weights from the trainers to the engines.
        move: transfer of states to the host and back.
        other: rewards, advantages and bookkeeping.
        ahead: the samples of the next step are drawn during training.
    """

    rollout: float
    log_probs: float
    update: float
    update_weights: float
    move: float
    other: float
    ahead: bool = False

    @property
    def training(self) -> float:
        """Seconds of the work of the trainers."""
        return self.log_probs + self.update + self.other

    @property
    def step(self) -> float:
        """Seconds from the start of a step to the start of the next step."""
        between = self.update_weights + self.move
        return between + (max(self.rollout, self.training) if self.ahead else self.rollout + self.training)


def step_time(work: Workload, plan: Plan, device: Device, devices_per_node: int) -> StepTime:
    """Return the seconds of each phase of a step.

    Args:
        work: work of the step.
        plan: placement of the step.
        device: device of trainers and engines.
        devices_per_node: devices of one machine.
    """
    busy = _slowdown(device, plan.trainers) / _speedup_beside_idle_cores(device, plan.trainers)
    return StepTime(
        rollout=rollout_seconds(work, plan, device),
        log_probs=_log_probs(work, plan, device, devices_per_node) * busy,
        update=_updates(work, plan, device, devices_per_node) * busy,
        update_weights=_update_weights(work, plan, device, devices_per_node),
        move=_move(work, plan, device),
        other=device.step_s,
        ahead=plan.ahead > 0 and not plan.colocated,
    )


def rollout_seconds(work: Workload, plan: Plan, device: Device) -> float:
    """Return the seconds of sampling of the engine with the most responses.

    The engine reads the prompts (prefill), and decodes in as many waves as its slots require. A decoding step reads the
    weights and the KV cache of all responses, and multiplies each token by every matrix. An accelerator reads and
    multiplies at the same time, a CPU one after the other. Each decoding step has an overhead of the engine, too.

    Args:
        work: work of the step.
        plan: placement of the step.
        device: device of the engine.
    """
    responses = math.ceil(work.responses / plan.engines)
    cache = engine_memory(work, plan, device)["start"]["KV cache"]
    slots = max(1, min(work.max_num_seqs, int(cache / sample_cache(work, plan, on_cpu=device.is_cpu))))
    waves = math.ceil(responses / slots)
    sequences = math.ceil(responses / waves)
    shape, width = work.policy, work.engine_width
    devices = engine_devices(plan, device)
    flops, bandwidth = (rates[work.engine_dtype] * devices for rates in (device.sample_flops, device.sample_bandwidth))
    read = responses * prompt_tokens_of_sample(work, on_cpu=device.is_cpu)
    # The engine keeps the features of an image for the other responses to the prompt.
    images = math.ceil(work.sampled_prompts / plan.engines) * work.image_flops(shape)
    prefill = (shape.forward_flops(read, work.prompt_tokens / 2) + images) / flops
    context = work.prompt_tokens + work.response_tokens / 2
    cached = sequences * context * token_cache(work, plan) * plan.tensor_parallel
    reading = (work.read_bytes(sequences) + cached) / bandwidth
    multiplying = shape.forward_flops(sequences, context) / flops
    communication = 0.0
    if plan.tensor_parallel > 1:
        # Two all-reduces over the devices of the engine in each block.
        communication = 2 * shape.layers * (2 * sequences * shape.hidden * width / device.link + 1e-5)
    computing = reading + multiplying if device.is_cpu else max(reading, multiplying)
    step = computing + communication + device.decode_step_s + sequences * device.decode_sequence_s
    busy = _slowdown(device, plan.engines * devices)
    return (prefill + waves * work.response_tokens * step) * busy


def engine_devices(plan: Plan, device: Device) -> int:
    """Return the number of devices of an engine, or of its cores on a CPU.

    A colocated engine on a CPU also uses the cores of the trainers that wait for the engine.
    """
    if not (device.is_cpu and plan.colocated):
        return plan.tensor_parallel
    return plan.tensor_parallel * max(1, plan.trainers // (plan.engines * plan.tensor_parallel))


def training_flops(work: Workload, shape: ModelShape, trainers: int) -> float:
    """Return the operations of forward and backward passes of each trainer.

    A policy with an adapter needs no gradients of its own weights. A frozen vision tower has no backward pass. The
    towers of other models are trained.

    Args:
        work: work of the step.
        shape: shape of the trained model.
        trainers: number of training workers.
    """
    sizes = micro_batch_sizes(work, trainers)
    forward = shape.forward_flops(sizes.tokens, sizes.context)
    passes = 3.0 - (1.0 if work.lora_rank and shape is work.policy else 0.0)
    passes += 1.0 if work.gradient_checkpointing else 0.0
    trains_tower = work.trains_tower and (work.adapts_tower or not work.lora_rank)
    is_frozen = shape is work.policy and not trains_tower
    return forward * passes + sizes.prompts * work.image_flops(shape) * (1.0 if is_frozen else passes)


def _updates(work: Workload, plan: Plan, device: Device, per_node: int) -> float:
    rate = device.train_flops[work.dtype]
    seconds = 0.0
    models = [(work.policy, work.trained_parameters), *((critic.shape, critic.trained) for critic in work.critics)]
    for shape, trained in models:
        arithmetic = training_flops(work, shape, plan.trainers) / rate
        collectives = _collectives(work, shape, trained, plan, device, per_node)
        # The optimizer reads and writes master weights, moments and gradients.
        optimizer = work.updates * 32 * trained / plan.trainers / device.bandwidth
        if plan.offload == "cpu":
            optimizer = work.updates * trained / plan.trainers * (32 / 20e9 + 4 / device.host_link)
        overhead = micro_batch_sizes(work, plan.trainers).passes * shape.tensors * device.tensor_s
        seconds += arithmetic + collectives + optimizer + overhead
    return seconds * work.passes


def _collectives(work: Workload, shape: ModelShape, trained: int, plan: Plan, device: Device, per_node: int) -> float:
    """Return the seconds of the collectives in one pass over the samples."""
    workers, width = plan.trainers, work.width
    if workers == 1:
        return 0.0
    moved = (workers - 1) / workers / _link(device, workers, per_node)
    whole, gradients = shape.parameters * width * moved, trained * width * moved
    elsewhere = shape.sparse_blocks * shape.experts_elsewhere(work.expert_parallel) * width * moved
    passes = micro_batch_sizes(work, plan.trainers).passes
    if plan.zero_stage == 1:
        return work.updates * (2 * gradients + gradients)
    if plan.zero_stage == 2:
        return passes * 2 * gradients + work.updates * gradients
    if plan.zero_stage == 0:
        reduced = passes if plan.accumulate_shards else work.updates
        if not (work.lora_rank and shape is work.policy):
            gradients -= elsewhere
        times = 6 if work.gradient_checkpointing else 4
        exchanged = _exchange(work, shape, plan, device, per_node, times)
        return passes * 2 * (whole - elsewhere) + reduced * gradients + exchanged
    gathered = 1 if shape.parameters < 1e9 else 2
    # Hooks run in forward and backward passes, and when activations are computed again.
    hooks = (3 if work.gradient_checkpointing else 2) * shape.tensors * device.gather_s
    return passes * (gathered * whole + gradients + hooks)


def _exchange(work: Workload, shape: ModelShape, plan: Plan, device: Device, per_node: int, times: int) -> float:
    """Return the seconds in which the tokens of a trainer travel `times` times between ranks, to experts or back."""
    ranks = work.expert_parallel
    if shape.experts is None or ranks == 1:
        return 0.0
    tokens = micro_batch_sizes(work, plan.trainers).tokens * shape.experts.chosen * (1 - 1 / ranks)
    return times * shape.sparse_blocks * tokens * shape.hidden * work.width / _link(device, ranks, per_node)


def _log_probs(work: Workload, plan: Plan, device: Device, per_node: int) -> float:
    sizes = log_prob_sizes(work, plan.trainers)
    shapes = list(work.frozen.values())
    if work.updates * work.passes > 1:
        shapes.append(work.policy)
    shapes += [critic.shape for critic in work.critics]
    seconds = 0.0
    for shape in shapes:
        flops = shape.forward_flops(sizes.tokens, sizes.context) + sizes.prompts * work.image_flops(shape)
        seconds += flops / device.train_flops[work.dtype]
        if plan.zero_stage in (0, 3) and plan.trainers > 1:
            elsewhere = shape.sparse_blocks * shape.experts_elsewhere(work.expert_parallel)
            whole = (shape.parameters - elsewhere) * work.width * (plan.trainers - 1) / plan.trainers
            seconds += _exchange(work, shape, plan, device, per_node, times=2)
            hooks = shape.tensors * device.gather_s if plan.zero_stage == 3 else 0.0
            seconds += sizes.passes * (whole / _link(device, plan.trainers, per_node) + hooks)
    on_host = sum(shape.parameters for name, shape in work.frozen.items() if work.places.get(name) == "cpu")
    if not device.is_cpu:
        # Every pass fetches the shards.
        seconds += sizes.passes * on_host * work.width / plan.trainers / device.host_link
    return seconds


def _update_weights(work: Workload, plan: Plan, device: Device, per_node: int) -> float:
    sent = work.sent_parameters * work.width
    if device.is_cpu:
        # Every rank writes its part of the weights to every engine.
        return 0.005 + plan.engines * sent / device.bandwidth
    # Under ZeRO-1 and ZeRO-2 every rank has the whole weights.
    sharded = plan.trainers > 1 and plan.zero_stage in (0, 3)
    gathered = sent / _link(device, plan.trainers, per_node) if sharded else 0.0
    if plan.colocated:
        return 0.05 + gathered + sent / device.bandwidth
    apart = plan.devices > per_node
    return 0.05 + gathered + sent / (device.network if apart else device.link)


def _move(work: Workload, plan: Plan, device: Device) -> float:
    """Return the seconds in which colocated trainers and engines move states to the host and back."""
    if device.is_cpu or not plan.colocated:
        return 0.0
    seconds = 0.2
    if plan.offload == "while_sampling" and _is_crowded(work, plan, device):
        shard = work.trained_parameters / plan.trainers
        kept = work.policy.parameters * work.width / (plan.trainers if plan.zero_stage in (0, 3) else 1)
        seconds += 2 * (12 * shard + kept) / device.host_link
    if plan.sleep == "kv_cache":
        weights = work.engine_bytes / plan.tensor_parallel
        seconds += 2 * weights / device.host_link
    return seconds


def _is_crowded(work: Workload, plan: Plan, device: Device) -> bool:
    """Return True if an engine has no room beside the states of a trainer."""
    states = total(trainer_memory(work, replace(plan, offload="stay"), device)["sampling"])
    return states + (plan.engine_share + SPARE_SHARE) * device.memory > device.memory


def _link(device: Device, workers: int, per_node: int) -> float:
    """Return the bytes per second of the slowest connection of a collective over all workers."""
    return device.network if workers > per_node else device.link


def _speedup_beside_idle_cores(device: Device, trainers: int) -> float:
    """Return the speed of trainers beside idle cores, divided by the speed of trainers on all cores."""
    idle = max(0, device.cores - trainers)
    return 1.0 + (device.alone - 1.0) * idle / max(1, device.cores - 1)


def _slowdown(device: Device, processes: int) -> float:
    """Return the seconds of one of several processes on the same cores, divided by the seconds of a lone process."""
    return max(1.0, processes / device.cores) if device.is_cpu else 1.0
