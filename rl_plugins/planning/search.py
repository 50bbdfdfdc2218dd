"""Every sensible placement of a step on some devices: what memory and time it takes, and why some cannot be.

This is the auto-mapping of HybridFlow (Sheng et al., arXiv:2409.19256, section 6) for the placements there are here:
there the search is over placements, parallel sizes of each model and devices, and is driven by simulators of each
phase, as it is here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rl_plugins.planning.devices import GIB, Device
from rl_plugins.planning.memory import engine_memory, kv_cache_needed, sample_cache, total, trainer_memory
from rl_plugins.planning.placement import Placement
from rl_plugins.planning.step_time import StepTime, step_time
from rl_plugins.planning.workload import Workload

_KEPT_FREE = 0.05
"""Share of an accelerator's memory that fragments of allocators take."""
_ENGINE_SHARE = "rollout.gpu_memory_utilization"
_SPLIT_SHARE = 0.9
"""Of an accelerator that an engine has to itself."""


@dataclass(frozen=True)
class Cluster:
    """What there is.

    Attributes:
        device: of one kind.
        per_node: devices of a machine.
        nodes: machines.
    """

    device: Device
    per_node: int
    nodes: int = 1

    @property
    def devices(self) -> int:
        """All of them."""
        return self.per_node * self.nodes


@dataclass(frozen=True)
class Candidate:
    """A placement, and what becomes of it.

    Attributes:
        place: who runs where.
        work: the step, with or without activations that are computed again.
        time: of its phases.
        memory: bytes by the kind of device (`trainer`, `engine`; of a CPU: `machine`) and phase.
        parts: of those of the fullest phase, the largest first.
        fullest: kind and phase that need most of what there is.
        short: bytes that it lacks; 0 if it fits.
        reason: why it cannot be; empty if it can.
    """

    place: Placement
    work: Workload
    time: StepTime
    memory: Mapping[str, Mapping[str, float]]
    parts: Mapping[str, float]
    fullest: tuple[str, str]
    short: float
    reason: str = ""

    @property
    def fits(self) -> bool:
        """Whether it can be."""
        return not self.reason


def search(
    work: Workload, cluster: Cluster, *, fsdp: bool = False, given: Mapping[str, Any] | None = None
) -> list[Candidate]:
    """Every placement, the fastest that fits first, then what does not fit, the least short first.

    Args:
        work: a step.
        cluster: to run it on.
        fsdp: with FSDP2 in place of ZeRO.
        given: values of options that are decided; placements with others are left out.
    """
    given = given or {}
    found = [
        judge(variant, place, cluster)
        for variant in (replace(work, gradient_checkpointing=again) for again in (False, True))
        for place in placements(work, cluster, fsdp=fsdp, engine_share=given.get(_ENGINE_SHARE))
        if _agrees(overrides(variant, place, cluster), given)
    ]
    return sorted(found, key=lambda one: (not one.fits, one.short, one.time.step, -one.place.zero_stage))


def placements(
    work: Workload, cluster: Cluster, *, fsdp: bool = False, engine_share: float | None = None
) -> Iterator[Placement]:
    """All that the launcher allows: every worker has as many prompts, and as many in each update.

    Args:
        work: a step.
        cluster: to run it on.
        fsdp: with FSDP2 in place of ZeRO.
        engine_share: of an accelerator that is an engine's; what is best by default.
    """
    for stage in (0,) if fsdp else (1, 2, 3):
        for trainers in _workers(work, cluster.devices):
            if cluster.device.is_cpu:
                yield from _on_cpu(trainers, stage)
            elif trainers == cluster.devices:
                for offload in ("while_sampling",) if fsdp else ("while_sampling", "cpu"):
                    # One engine on one device: more of them would need devices of their own.
                    place = Placement(trainers, 1, zero_stage=stage, offload=offload)
                    yield replace(place, engine_share=engine_share or _engine_share(work, place, cluster.device))
            else:
                for place in _split(work, cluster, trainers, stage):
                    yield replace(place, engine_share=engine_share or _SPLIT_SHARE)


def _on_cpu(trainers: int, stage: int) -> Iterator[Placement]:
    for engines in sorted({1, trainers}):
        for sleep in ("none", "kv_cache", "all"):
            yield Placement(trainers, engines, zero_stage=stage, sleep=sleep, offload="stay")


def _split(work: Workload, cluster: Cluster, trainers: int, stage: int) -> Iterator[Placement]:
    """Engines on all other devices; each is within a machine, and divides the heads."""
    rest = cluster.devices - trainers
    for size in (1, 2, 4, 8):
        within = cluster.nodes * (cluster.per_node // size)
        if work.policy.kv_heads % size or rest % size or rest // size > within:
            continue
        for ahead in (0, 1):
            for offload in ("stay", "cpu") if stage else ("stay",):
                yield Placement(
                    trainers, rest // size, size, colocated=False, zero_stage=stage, offload=offload, sleep="none",
                    ahead=ahead,
                )  # fmt: skip


def judge(work: Workload, place: Placement, cluster: Cluster) -> Candidate:
    """Memory and time of a placement."""
    device = cluster.device
    needs = memory_needs(work, place, device)
    room = device.memory if device.is_cpu else device.memory * (1 - _KEPT_FREE)
    sums = {kind: {phase: total(parts) for phase, parts in phases.items()} for kind, phases in needs.items()}
    fullest = max(((kind, phase) for kind in sums for phase in sums[kind]), key=lambda at: sums[at[0]][at[1]])
    parts = dict(sorted(needs[fullest[0]][fullest[1]].items(), key=lambda item: -item[1]))
    short = max(0.0, sums[fullest[0]][fullest[1]] - room)
    reason = ""
    if short:
        reason = f"{_PHASES[fullest[1]]} lacks {short / GIB:.1f} GiB on each {fullest[0]}"
    else:
        cache = engine_memory(work, place, device)["start"]["KV cache"]
        if (lacking := sample_cache(work, place) - cache) > 0:
            short, reason = (
                lacking,
                f"the KV cache lacks {lacking / GIB:.2f} GiB for one sample of {work.max_tokens} tokens",
            )
    return Candidate(place, work, step_time(work, place, device, cluster.per_node), sums, parts, fullest, short, reason)


def memory_needs(work: Workload, place: Placement, device: Device) -> dict[str, dict[str, dict[str, float]]]:
    """Bytes by the kind of device, phase and part."""
    trainer = trainer_memory(work, place, device)
    engine = engine_memory(work, place, device)
    bases = {"libraries of the trainer": device.trainer_base, "libraries of the engine": device.engine_base}
    if device.is_cpu:
        processes = place.trainers * device.trainer_base + place.engines * device.engine_base
        bases = {"libraries": processes + device.machine_base}

        def machine(of_trainer: str | None, of_engine: str) -> dict[str, float]:
            mine = _times(trainer[of_trainer], place.trainers) if of_trainer else {}
            return {
                **bases,
                **mine,
                **{f"engine's {k}": v for k, v in _times(engine[of_engine], place.engines).items()},
            }

        phases = {"start": machine(None, "start"), "sampling": machine("sampling", "sampling")}
        phases |= {"log_probs": machine("log_probs", "asleep"), "update": machine("update", "asleep")}
        return {"machine": phases}
    if not place.colocated:
        base = {"libraries": device.trainer_base}
        return {
            "trainer": {phase: {**base, **parts} for phase, parts in trainer.items() if phase != "sampling"},
            "engine": {
                "sampling": {"libraries": device.engine_base, **engine["sampling"], "bucket": work.bucket_bytes}
            },
        }
    weights = {f"engine's {name}": value for name, value in engine["sampling"].items()}
    moving = {"engine's weights": weights["engine's weights"], "bucket": work.bucket_bytes}
    kept = {name: value for name, value in trainer["log_probs"].items() if name in ("parameters", "gradients")}
    asleep = {"engine's rest": engine["asleep"]["left"]}
    return {
        "device": {
            "update_weights": {**bases, **kept, **moving},
            "sampling": {**bases, **trainer["sampling"], **weights},
            "log_probs": {**bases, **trainer["log_probs"], **asleep},
            "update": {**bases, **trainer["update"], **asleep},
        }
    }


def overrides(work: Workload, place: Placement, cluster: Cluster) -> dict[str, Any]:
    """The options of a recipe that make a placement so, with their values."""
    options = {
        "placement.num_workers": place.trainers,
        "placement.rollout": "colocated" if place.colocated else "split",
        "rollout.engines": place.engines,
        "rollout.tensor_parallel_size": place.tensor_parallel,
        "schedule.max_staleness": place.ahead,
        "model.gradient_checkpointing": work.gradient_checkpointing,
    }
    options |= {"strategy.zero_stage": place.zero_stage} if place.zero_stage else {"strategy.name": "fsdp"}
    if cluster.device.is_cpu:
        return {**options, "rollout.sleep": place.sleep}
    return {**options, "strategy.offload.policy": place.offload, _ENGINE_SHARE: place.engine_share}


def advice(candidate: Candidate) -> str:
    """What to change, by what takes most of the memory that is short."""
    work, place = candidate.work, candidate.place
    for part in candidate.parts:
        if part == "activations" and not work.gradient_checkpointing:
            return "set model.gradient_checkpointing=true"
        if part == "activations" and work.micro_batch_tokens > work.max_tokens:
            return f"lower batch.tokens_per_micro_batch, down to {work.max_tokens}"
        if part in ("masters", "moments") and place.offload != "cpu" and place.zero_stage:
            return "set strategy.offload.policy=cpu"
        if part in ("parameters", "gradients", "bucket") and place.zero_stage in (1, 2):
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


def _engine_share(work: Workload, place: Placement, device: Device) -> float:
    """What sampling leaves on a device that trainers have given up, in steps of a twentieth; no more than is used."""
    left = trainer_memory(work, place, device)["sampling"]
    free = 1 - _KEPT_FREE - (total(left) + device.trainer_base + device.engine_base) / device.memory
    weights = engine_memory(work, place, device)["sampling"]["weights"]
    useful = (weights + kv_cache_needed(work, place, on_cpu=False)) / device.memory + _KEPT_FREE
    return max(0.05, int(min(free, useful + 0.05, 0.9) * 20) / 20)


def _agrees(options: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    wanted = dict(given)
    if wanted.get("rollout.engines") == "per_worker":
        wanted["rollout.engines"] = options["placement.num_workers"]
    return all(wanted.get(key, value) == value for key, value in options.items())


def _times(parts: Mapping[str, float], count: int) -> dict[str, float]:
    return {name: value * count for name, value in parts.items()}


def _workers(work: Workload, most: int) -> list[int]:
    """Numbers of workers that share the prompts of every update evenly."""
    return [one for one in range(1, most + 1) if work.prompts % (one * work.updates) == 0]
