"""Search over all placements of a step on given devices: memory, time, and the reason why a placement does not fit.

This is the auto-mapping of HybridFlow (Sheng et al., arXiv:2409.19256, section 6) for the placements of this project.
HybridFlow searches over placements and over parallel sizes and devices of each model. In both searches a simulator of
each phase returns the time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rl_plugins.config.placement import StrategyConfig
from rl_plugins.config.rollout import SPLIT_GPU_SHARE, EngineOptions, default_sleep
from rl_plugins.planning.devices import GIB, Device
from rl_plugins.planning.memory import engine_memory, kv_cache_needed, largest_sample_cache, total, trainer_memory
from rl_plugins.planning.step_time import StepTime, step_time
from rl_plugins.planning.workload import Plan, Workload, micro_batch_budgets

_KEPT_FREE = 0.05
"""Share of an accelerator's memory for fragmentation of the allocators."""
KEPT_BYTES = 4 * GIB
"""Memory beside a colocated engine for NCCL's communicators and buffers of training, which never leave the GPU."""
_DEADLINE_FACTOR, _LONGER_S = 3, 600
"""Planned seconds of sampling times this factor is the deadline; the deadline of collectives is longer."""
_GENERATE, _COLLECTIVE = "rollout.generate_timeout_s", "strategy.collective_timeout_s"
_ENGINE_SHARE = "rollout.gpu_memory_utilization"
_SLEEP = "rollout.sleep"
_OFFLOAD = "strategy.offload.policy"


@dataclass(frozen=True)
class Cluster:
    """Machines with devices of one kind.

    Attributes:
        device: device.
        per_node: devices of one machine.
        nodes: number of machines.
    """

    device: Device
    per_node: int
    nodes: int = 1

    @property
    def devices(self) -> int:
        """Devices of all machines."""
        return self.per_node * self.nodes


@dataclass(frozen=True)
class Candidate:
    """A placement with its memory and time.

    Attributes:
        plan: placement of the step.
        work: work of the step, with or without gradient checkpointing, and with a size of micro-batches.
        time: seconds of each phase.
        memory: bytes by kind of device (`trainer` and `engine`, `device` for both, or `machine` on a CPU) and by phase.
        parts: bytes of each part in the phase with the largest memory, the largest part first.
        short: missing bytes; 0 if the placement fits.
        reason: reason why the placement does not fit; empty if it fits.
    """

    plan: Plan
    work: Workload
    time: StepTime
    memory: Mapping[str, Mapping[str, float]]
    parts: Mapping[str, float]
    short: float
    reason: str = ""

    @property
    def fits(self) -> bool:
        """True if the memory suffices."""
        return not self.reason


def search(
    work: Workload,
    cluster: Cluster,
    *,
    fsdp: bool = False,
    accumulate_shards: bool = False,
    given: Mapping[str, Any] | None = None,
) -> list[Candidate]:
    """Return all placements: the fitting placements, fastest first, then the others, least short first.

    A placement has the best size of micro-batches.

    Args:
        work: work of the step.
        cluster: machines for the step.
        fsdp: use FSDP2 in place of ZeRO.
        accumulate_shards: FSDP2 accumulates gradients in shards.
        given: values of recipe options that must not change. Placements with other values are left out.
    """
    given = given or {}
    sizes = [replace(work, micro_batch_tokens=budget) for budget in micro_batch_budgets(work)]
    candidates = []
    stay = given.get(_OFFLOAD) == "stay"
    share, sleep = given.get(_ENGINE_SHARE), given.get(_SLEEP)
    for plan in plans(work, cluster, fsdp=fsdp, engine_share=share, sleep=sleep, stay=stay):
        plan = replace(plan, accumulate_shards=accumulate_shards)
        for checkpointing in (False, True):
            variants = [replace(size, gradient_checkpointing=checkpointing) for size in sizes]
            allowed = [variant for variant in variants if _agrees(overrides(variant, plan, cluster), given)]
            if allowed:
                candidates.append(min((evaluate(variant, plan, cluster) for variant in allowed), key=_order))
    return sorted(candidates, key=_order)


def _order(candidate: Candidate) -> tuple[Any, ...]:
    return not candidate.fits, candidate.short, candidate.time.step, -candidate.plan.zero_stage


def plans(
    work: Workload,
    cluster: Cluster,
    *,
    fsdp: bool = False,
    engine_share: float | None = None,
    sleep: str | None = None,
    stay: bool = False,
) -> Iterator[Plan]:
    """Yield all placements that the launcher allows: every worker has the same number of prompts in each update.

    Args:
        work: work of the step.
        cluster: machines for the step.
        fsdp: use FSDP2 in place of ZeRO.
        engine_share: share of an accelerator's memory for an engine; by default the best share.
        sleep: memory that colocated engines on accelerators free while the workers train; by default that of a run.
        stay: states of trained models stay on accelerators while colocated engines sample.
    """
    sleep = sleep or default_sleep(on_gpus=True, sends_adapter=work.sends_adapter)
    for stage in (0,) if fsdp else (1, 2, 3):
        for trainers in _workers(work, cluster.devices):
            if cluster.device.is_cpu:
                yield from _on_cpu(trainers, stage)
            elif trainers == cluster.devices:
                for plan in _colocated(work, cluster, stage, sleep, stay=stay):
                    yield replace(plan, engine_share=engine_share or _engine_share(work, plan, cluster.device))
            else:
                for plan in _split(work, cluster, trainers, stage):
                    yield replace(plan, engine_share=engine_share or _split_share(work, cluster.device))


def _on_cpu(trainers: int, stage: int) -> Iterator[Plan]:
    for engines in sorted({1, trainers}):
        for sleep in ("none", "kv_cache", "all"):
            yield Plan(trainers, engines, zero_stage=stage, sleep=sleep, offload="stay")


def _colocated(work: Workload, cluster: Cluster, stage: int, sleep: str, *, stay: bool) -> Iterator[Plan]:
    """Yield plans with trainers and engines on all accelerators."""
    at_hand = "stay" if stay else "while_sampling"
    for size in _sizes(work, cluster, cluster.devices):
        for offload in (at_hand, "cpu") if stage else (at_hand,):
            engines = cluster.devices // size
            yield Plan(cluster.devices, engines, size, zero_stage=stage, offload=offload, sleep=sleep)


def _sizes(work: Workload, cluster: Cluster, devices: int) -> Iterator[int]:
    """Yield the possible sizes of an engine within a machine. Its devices share the heads evenly, or copy KV heads.

    Args:
        work: work of the step.
        cluster: machines for the step.
        devices: devices of all engines together.
    """
    heads, kv_heads = work.policy.heads, work.policy.kv_heads
    for size in (1, 2, 4, 8):
        within = cluster.nodes * (cluster.per_node // size)
        shares_heads = heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)
        if shares_heads and devices % size == 0 and devices // size <= within:
            yield size


def _split(work: Workload, cluster: Cluster, trainers: int, stage: int) -> Iterator[Plan]:
    """Yield plans with engines on all other devices."""
    engine_devices = cluster.devices - trainers
    for size in _sizes(work, cluster, engine_devices):
        for ahead in (0, 1):
            for offload in ("stay", "cpu") if stage else ("stay",):
                yield Plan(
                    trainers, engine_devices // size, size, colocated=False, zero_stage=stage, offload=offload,
                    sleep="none", ahead=ahead,
                )  # fmt: skip


def evaluate(work: Workload, plan: Plan, cluster: Cluster) -> Candidate:
    """Return memory and time of a placement, and the reason if the placement does not fit."""
    device = cluster.device
    needs = memory_needs(work, plan, device)
    available = device.memory if device.is_cpu else device.memory * (1 - _KEPT_FREE)
    totals = {kind: {phase: total(parts) for phase, parts in phases.items()} for kind, phases in needs.items()}
    kind, phase = max(((kind, phase) for kind in totals for phase in totals[kind]), key=lambda at: totals[at[0]][at[1]])
    parts = dict(sorted(needs[kind][phase].items(), key=lambda item: -item[1]))
    short = max(0.0, totals[kind][phase] - available)
    reason = ""
    if short:
        reason = f"{_PHASES[phase]} lacks {short / GIB:.1f} GiB on each {kind}"
    else:
        cache = engine_memory(work, plan, device)["start"]["KV cache"]
        if (lacking := largest_sample_cache(work, plan) - cache) > 0:
            short = lacking
            reason = f"the KV cache lacks {lacking / GIB:.2f} GiB for one sample of {work.max_tokens} tokens"
    return Candidate(plan, work, step_time(work, plan, device, cluster.per_node), totals, parts, short, reason)


def memory_needs(work: Workload, plan: Plan, device: Device) -> dict[str, dict[str, dict[str, float]]]:
    """Return bytes by kind of device, by phase and by part."""
    trainer = trainer_memory(work, plan, device)
    engine = engine_memory(work, plan, device)
    bases = {"libraries of the trainer": device.trainer_base, "libraries of the engine": device.engine_base}
    if device.is_cpu:
        processes = plan.trainers * device.trainer_base + plan.engines * device.engine_base
        bases = {"libraries": processes + device.machine_base}

        def machine(trainer_phase: str | None, engine_phase: str) -> dict[str, float]:
            trainers = _times(trainer[trainer_phase], plan.trainers) if trainer_phase else {}
            engines = _times(engine[engine_phase], plan.engines)
            return {**bases, **trainers, **{f"engine's {name}": value for name, value in engines.items()}}

        phases = {"start": machine(None, "start"), "sampling": machine("sampling", "sampling")}
        phases |= {"log_probs": machine("log_probs", "asleep"), "update": machine("update", "asleep")}
        return {"machine": phases}
    if not plan.colocated:
        base = {"libraries": device.trainer_base}
        return {
            "trainer": {phase: {**base, **parts} for phase, parts in trainer.items() if phase != "sampling"},
            "engine": {
                "sampling": {"libraries": device.engine_base, **engine["sampling"], "bucket": work.bucket_bytes}
            },
        }
    weights = {f"engine's {name}": value for name, value in engine["sampling"].items()}
    # A bucket holds the largest tensor. The engine has a copy of it, and the next bucket is gathered meanwhile.
    bucket = max(work.bucket_bytes, work.policy.largest * work.width)
    moving = {"engine's weights": weights["engine's weights"], "bucket": 3 * bucket}
    # Only optimizer states leave the device before a weight update.
    states = ("parameters", "gradients", "average", *(("masters", "moments") if plan.offload == "stay" else ()))
    kept = {name: value for name, value in trainer["log_probs"].items() if name.endswith(states)}
    asleep = {"engine's rest": engine["asleep"]["left"]}
    return {
        "device": {
            "update_weights": {**bases, **kept, **moving},
            "sampling": {**bases, **trainer["sampling"], **weights},
            "log_probs": {**bases, **trainer["log_probs"], **asleep},
            "update": {**bases, **trainer["update"], **asleep},
        }
    }


def overrides(work: Workload, plan: Plan, cluster: Cluster) -> dict[str, Any]:
    """Return the values of the recipe options that select a placement."""
    options = {
        "placement.num_workers": plan.trainers,
        "placement.rollout": "colocated" if plan.colocated else "split",
        "rollout.engines": plan.engines,
        "rollout.tensor_parallel_size": plan.tensor_parallel,
        "schedule.max_staleness": plan.ahead,
        "model.gradient_checkpointing": work.gradient_checkpointing,
        "batch.tokens_per_micro_batch": work.micro_batch_tokens,
    }
    options |= {"strategy.zero_stage": plan.zero_stage} if plan.zero_stage else {"strategy.name": "fsdp"}
    if cluster.device.is_cpu:
        return {**options, _SLEEP: plan.sleep}
    trained = ("policy", *(critic.name for critic in work.critics))
    places = {f"strategy.offload.{model}": plan.offload for model in trained}
    return {**options, **places, _ENGINE_SHARE: plan.engine_share}


def options_of(candidate: Candidate, cluster: Cluster, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the option of the recipe for each value of a placement, and longer deadlines for long sampling.

    Args:
        candidate: placement with its time.
        cluster: devices of the run.
        given: options of the user.
    """
    return {**overrides(candidate.work, candidate.plan, cluster), **deadlines(candidate, given)}


def deadlines(candidate: Candidate, given: Mapping[str, Any]) -> dict[str, float]:
    """Return the values of the options for deadlines, if the defaults are short for the sampling of a step.

    Args:
        candidate: placement with its time.
        given: options of the user, which stay.
    """
    default = {_GENERATE: EngineOptions.generate_timeout_s, _COLLECTIVE: StrategyConfig.collective_timeout_s}
    wait = given.get(_GENERATE, max(math.ceil(_DEADLINE_FACTOR * candidate.time.rollout), default[_GENERATE]))
    longest = given.get(_COLLECTIVE, max(wait + _LONGER_S, default[_COLLECTIVE]))
    options = {_GENERATE: min(wait, longest - _LONGER_S), _COLLECTIVE: longest}
    return {name: value for name, value in options.items() if name not in given and value > default[name]}


def advice(candidate: Candidate) -> str:
    """Return the recipe option that reduces the largest reducible part of the memory."""
    work, plan = candidate.work, candidate.plan
    for part in candidate.parts:
        if part == "activations" and not work.gradient_checkpointing:
            return "set model.gradient_checkpointing=true"
        if part == "activations" and work.micro_batch_tokens > work.max_tokens:
            return f"lower batch.tokens_per_micro_batch, down to {work.max_tokens}"
        if part in ("masters", "moments") and plan.offload != "cpu" and plan.zero_stage:
            return "set strategy.offload.policy=cpu"
        if part in ("parameters", "gradients", "bucket") and plan.zero_stage in (1, 2):
            return "set strategy.zero_stage=3"
        if part.endswith("KV cache") and work.kv_cache_bytes > GIB:
            return "lower rollout.cpu_kv_cache_gib"
    if not work.lora_rank:
        return "train an adapter (model.lora.rank=16), or take more devices"
    return "take more or larger devices, or a smaller model"


_PHASES = {
    "start": "the start",
    "update_weights": "the weight update",
    "sampling": "sampling",
    "log_probs": "the log-probs phase",
    "update": "the update",
}


def _engine_share(work: Workload, plan: Plan, device: Device) -> float:
    """Return the share of a device for a colocated engine, in steps of 0.05.

    The share is the memory left by trainers during sampling, but not more than weights and KV cache need.
    """
    trainer = trainer_memory(work, plan, device)["sampling"]
    held = total(trainer) + device.trainer_base + device.engine_base + KEPT_BYTES
    free = 1 - _KEPT_FREE - held / device.memory
    weights = engine_memory(work, plan, device)["sampling"]["weights"]
    useful = (weights + kv_cache_needed(work, plan, on_cpu=False)) / device.memory + _KEPT_FREE
    return max(0.05, int(min(free, useful + 0.05, 0.9) * 20) / 20)


def _split_share(work: Workload, device: Device) -> float:
    """Return the share of a device for an engine without trainers, in steps of 0.05: at most the default of a run."""
    besides = (device.engine_base + work.bucket_bytes) / device.memory
    return min(SPLIT_GPU_SHARE, int((1 - _KEPT_FREE - besides) * 20) / 20)


def _agrees(options: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    wanted = dict(given)
    if wanted.get("rollout.engines") == "per_worker":
        wanted["rollout.engines"] = options["placement.num_workers"] // options["rollout.tensor_parallel_size"]
    return all(wanted.get(key, value) == value for key, value in options.items())


def _times(parts: Mapping[str, float], count: int) -> dict[str, float]:
    return {name: value * count for name, value in parts.items()}


def _workers(work: Workload, devices: int) -> list[int]:
    """Return the numbers of workers that divide the prompts of every update evenly."""
    return [workers for workers in range(1, devices + 1) if work.prompts % (workers * work.updates) == 0]
