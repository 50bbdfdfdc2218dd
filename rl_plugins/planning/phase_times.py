"""What the simulator is fed with: phases as planned from a device's rates, or as a run has measured them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import median

from rl_plugins.planning.devices import Device
from rl_plugins.planning.memory import prompt_tokens_of_sample
from rl_plugins.planning.placement import Placement
from rl_plugins.planning.simulator import PhaseTimes
from rl_plugins.planning.step_time import engine_parts, step_time
from rl_plugins.planning.workload import WIDTHS, Workload


def planned(work: Workload, place: Placement, device: Device, devices_per_node: int) -> PhaseTimes:
    """Seconds by the same arithmetic as a plan's."""
    time = step_time(work, place, device, devices_per_node)
    tokens = work.responses * work.sample_tokens / place.trainers
    width, parts = WIDTHS[work.engine_dtype], engine_parts(place, device)
    bandwidth, flops = (rates[work.engine_dtype] * parts for rates in (device.sample_bandwidth, device.sample_flops))
    read = work.samples * prompt_tokens_of_sample(work, on_cpu=device.is_cpu) / work.prompt_tokens
    context = work.prompt_tokens + work.response_tokens / 2
    of_each = context * work.policy.kv_bytes(width) / bandwidth
    multiplying = work.policy.forward_flops(1, context) / flops
    return PhaseTimes(
        decode_step_s=device.decode_step_s + work.policy.multiplied * width / bandwidth,
        # An accelerator multiplies while it reads.
        decode_sequence_s=device.decode_sequence_s + of_each + (multiplying if device.is_cpu else 0.0),
        prefill_token_s=read * work.policy.forward_flops(1, work.prompt_tokens / 2) / flops,
        train_token_s=(time.update + time.log_probs) / tokens,
        train_fixed_s=time.other,
        update_weights_s=time.update_weights,
        move_s=time.move,
    )


def corrected(
    times: PhaseTimes, work: Workload, place: Placement, device: Device, metrics: Mapping[str, Mapping[int, float]]
) -> PhaseTimes:
    """Planned seconds, brought to what a run has measured.

    Args:
        times: planned for the run's own work and placement, or another one of the same model and device.
        work: of the run.
        place: of the run.
        device: that it had.
        metrics: of the run, as `read_metrics` gives them.
    """
    seen = {name: median(list(series.values())[1:] or series.values()) for name, series in metrics.items()}
    plan = step_time(work, place, device, place.trainers)
    sampling = seen["time/rollout"] / plan.rollout
    training = seen["time/update_policy"] / plan.update
    phases = ("time/rollout", "time/update_policy", "time/update_weights")
    return replace(
        times,
        decode_step_s=times.decode_step_s * sampling,
        decode_sequence_s=times.decode_sequence_s * sampling,
        prefill_token_s=times.prefill_token_s * sampling,
        train_token_s=times.train_token_s * training,
        train_fixed_s=seen["time/step"] - sum(seen.get(phase, 0.0) for phase in phases),
        update_weights_s=times.update_weights_s * seen.get("time/update_weights", 0.0) / plan.update_weights,
    )
