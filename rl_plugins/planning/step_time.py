"""Seconds of a step, phase by phase: sampling by roofline, training by its operations, collectives by their bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rl_plugins.planning.devices import Device
from rl_plugins.planning.memory import engine_memory, prompt_tokens_of_sample, sample_cache
from rl_plugins.planning.placement import Placement
from rl_plugins.planning.rows import rows_of
from rl_plugins.planning.shape import ModelShape
from rl_plugins.planning.workload import WIDTHS, Workload


@dataclass(frozen=True)
class StepTime:
    """Seconds of the phases of a step.

    Attributes:
        rollout: sampling.
        log_probs: passes without gradient: frozen models, and the policy's own where it is updated more than once.
        update: passes with gradient and the optimizer.
        update_weights: from the trainers to the engines.
        move: states given to the host and taken back.
        other: rewards, advantages, bookkeeping.
        ahead: the next step's samples are drawn meanwhile.
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
        """What trainers do."""
        return self.log_probs + self.update + self.other

    @property
    def step(self) -> float:
        """From one step to the next."""
        between = self.update_weights + self.move
        return between + (max(self.rollout, self.training) if self.ahead else self.rollout + self.training)


def step_time(work: Workload, place: Placement, device: Device, devices_per_node: int) -> StepTime:
    """The phases of a step."""
    busy = _slowdown(device, place.trainers) / _idle_cores(device, place.trainers)
    return StepTime(
        rollout=rollout_seconds(work, place, device),
        log_probs=_log_probs(work, place, device, devices_per_node) * busy,
        update=_updates(work, place, device, devices_per_node) * busy,
        update_weights=_update_weights(work, place, device, devices_per_node),
        move=_move(work, place, device),
        other=device.step_s,
        ahead=place.ahead > 0 and not place.colocated,
    )


def rollout_seconds(work: Workload, place: Placement, device: Device) -> float:
    """Sampling of the engine that has most to do: prefill, then decoding in as many waves as it needs.

    A step of decoding reads the weights and the KV cache of all responses, and multiplies each token by every matrix.
    An accelerator does both at once, a CPU one after the other; and the engine takes something for itself.
    """
    share = math.ceil(work.responses / place.engines)
    cache = engine_memory(work, place, device)["start"]["KV cache"]
    most = max(1, min(work.max_num_seqs, int(cache / sample_cache(work, place))))
    waves = math.ceil(share / most)
    at_once = math.ceil(share / waves)
    shape, width = work.policy, WIDTHS[work.engine_dtype]
    parts = engine_parts(place, device)
    flops, bandwidth = (rates[work.engine_dtype] * parts for rates in (device.sample_flops, device.sample_bandwidth))
    read = share * prompt_tokens_of_sample(work, on_cpu=device.is_cpu)
    prefill = shape.forward_flops(read, work.prompt_tokens / 2) / flops
    context = work.prompt_tokens + work.response_tokens / 2
    reading = (shape.multiplied * width + at_once * context * shape.kv_bytes(width)) / bandwidth
    multiplying = shape.forward_flops(at_once, context) / flops
    exchanged = 0.0
    if place.tensor_parallel > 1:
        # Two sums over the engine's devices in each block.
        exchanged = 2 * shape.layers * (2 * at_once * shape.hidden * width / device.link + 1e-5)
    computing = reading + multiplying if device.is_cpu else max(reading, multiplying)
    step = computing + exchanged + device.decode_step_s + at_once * device.decode_sequence_s
    busy = _slowdown(device, place.engines * parts)
    return (prefill + waves * work.response_tokens * step) * busy


def engine_parts(place: Placement, device: Device) -> int:
    """What an engine works on: devices, and on CPU cores, of which it has those of the trainers that wait for it."""
    if not (device.is_cpu and place.colocated):
        return place.tensor_parallel
    return place.tensor_parallel * max(1, place.trainers // (place.engines * place.tensor_parallel))


def training_flops(work: Workload, shape: ModelShape, trainers: int) -> float:
    """Forward and backward, of each trainer; of a model whose own weights are frozen, no gradients of those."""
    rows = rows_of(work, trainers)
    forward = shape.forward_flops(rows.tokens, rows.context)
    passes = 3.0 - (1.0 if work.lora_rank and shape is work.policy else 0.0)
    return forward * (passes + (1.0 if work.gradient_checkpointing else 0.0))


def _updates(work: Workload, place: Placement, device: Device, per_node: int) -> float:
    rate = device.train_flops[work.dtype]
    seconds = 0.0
    models = [(work.policy, work.trained_parameters)]
    if work.critic is not None:
        models.append((work.critic, work.critic.parameters))
    for shape, trained in models:
        arithmetic = training_flops(work, shape, place.trainers) / rate
        collectives = _collectives(work, shape, trained, place, device, per_node)
        # The optimizer reads and writes masters, moments and gradients.
        optimizer = work.updates * 32 * trained / place.trainers / device.bandwidth
        if place.offload == "cpu":
            optimizer = work.updates * trained / place.trainers * (32 / 20e9 + 4 / device.host_link)
        overhead = rows_of(work, place.trainers).passes * shape.tensors * device.tensor_s
        seconds += arithmetic + collectives + optimizer + overhead
    return seconds * work.passes


def _collectives(
    work: Workload, shape: ModelShape, trained: int, place: Placement, device: Device, per_node: int
) -> float:
    """Seconds in collectives of one pass over the samples."""
    workers, width = place.trainers, work.width
    if workers == 1:
        return 0.0
    moved = (workers - 1) / workers / _link(device, workers, per_node)
    whole, gradients = shape.parameters * width * moved, trained * width * moved
    passes = rows_of(work, place.trainers).passes
    if place.zero_stage == 1:
        return work.updates * (2 * gradients + gradients)
    if place.zero_stage == 2:
        return passes * 2 * gradients + work.updates * gradients
    if place.zero_stage == 0:
        reduced = passes if place.accumulate_shards else work.updates
        return passes * 2 * whole + reduced * gradients
    gathered = 1 if shape.parameters < 1e9 else 2
    # Hooks run in the forward and the backward pass, and where activations are computed again.
    hooks = (3 if work.gradient_checkpointing else 2) * shape.tensors * device.gather_s
    return passes * (gathered * whole + gradients + hooks)


def _log_probs(work: Workload, place: Placement, device: Device, per_node: int) -> float:
    rows = rows_of(work, place.trainers)
    shapes = list(work.frozen.values())
    if work.updates * work.passes > 1:
        shapes.append(work.policy)
    if work.critic is not None:
        shapes.append(work.critic)
    seconds = 0.0
    for shape in shapes:
        seconds += shape.forward_flops(rows.tokens, rows.context) / device.train_flops[work.dtype]
        if place.zero_stage in (0, 3) and place.trainers > 1:
            whole = shape.parameters * work.width * (place.trainers - 1) / place.trainers
            hooks = shape.tensors * device.gather_s if place.zero_stage == 3 else 0.0
            seconds += rows.passes * (whole / _link(device, place.trainers, per_node) + hooks)
    return seconds


def _update_weights(work: Workload, place: Placement, device: Device, per_node: int) -> float:
    sent = work.sent_parameters * work.width
    if device.is_cpu:
        # Every rank writes its part into every engine.
        return 0.005 + place.engines * sent / device.bandwidth
    gathered = sent / _link(device, place.trainers, per_node) if place.trainers > 1 else 0.0
    if place.colocated:
        return 0.05 + gathered + sent / device.bandwidth
    apart = place.devices > per_node
    return 0.05 + gathered + sent / (device.network if apart else device.link)


def _move(work: Workload, place: Placement, device: Device) -> float:
    """States to the host and back, of trainers that make room for engines."""
    if device.is_cpu or not place.colocated:
        return 0.0
    seconds = 0.2
    if place.offload == "while_sampling":
        shard = work.trained_parameters / place.trainers
        kept = work.policy.parameters * work.width / (place.trainers if place.zero_stage in (0, 3) else 1)
        seconds += 2 * (12 * shard + kept) / device.host_link
    if place.sleep == "kv_cache":
        weights = work.policy.parameters * WIDTHS[work.engine_dtype] / place.tensor_parallel
        seconds += 2 * weights / device.host_link
    return seconds


def _link(device: Device, workers: int, per_node: int) -> float:
    """Bytes a second of a collective over so many workers: the slowest connection among them decides."""
    return device.network if workers > per_node else device.link


def _idle_cores(device: Device, trainers: int) -> float:
    """By how much trainers are faster than as many as there are cores, whose rate is known."""
    idle = max(0, device.cores - trainers)
    return 1.0 + (device.alone - 1.0) * idle / max(1, device.cores - 1)


def _slowdown(device: Device, processes: int) -> float:
    """By how much processes that work at the same time are slower than one alone."""
    return max(1.0, processes / device.cores) if device.is_cpu else 1.0
