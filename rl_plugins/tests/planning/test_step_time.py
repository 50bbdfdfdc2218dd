"""Seconds against sums made by hand, on a device of round numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rl_plugins.planning.devices import Device
from rl_plugins.planning.shape import Experts, ModelShape
from rl_plugins.planning.step_time import rollout_seconds, step_time
from rl_plugins.planning.tower import Tower
from rl_plugins.planning.workload import Plan, Workload, micro_batch_sizes

SHAPE = ModelShape(layers=1, hidden=100, intermediate=200, heads=1, kv_heads=1, head_dim=100, vocab=1000)
N = 4 * 100 * 100 + 3 * 100 * 200 + 100 + 100 * 1000
WORK = Workload(
    SHAPE, prompts=2, samples=2, prompt_tokens=10, response_tokens=20, max_tokens=30, micro_batch_tokens=1000
)
RATES = {"bfloat16": 1e6, "float32": 1e5}
DEVICE = Device(
    "round", memory=2**34, train_flops=RATES, sample_flops=RATES,
    sample_bandwidth={"bfloat16": 1e6}, bandwidth=1e6, link=1e6, network=1e5, host_link=1e6,
    decode_step_s=0.5, decode_sequence_s=0.25, tensor_s=0.0, step_s=2.0,
)  # fmt: skip
APART = Plan(1, 1, colocated=False, zero_stage=1, engine_share=0.9)


def test_rollout_seconds_take_the_longer_of_reading_and_multiplying():
    # Prompts, too short to share a block, and twenty tokens of four responses. A token sees twenty others on average.
    prefill = 40 * (2 * N + 4 * 100 * 5) / 1e6
    multiplying = 4 * (2 * N + 4 * 100 * 20) / 1e6
    assert rollout_seconds(WORK, APART, DEVICE) == pytest.approx(prefill + 20 * (multiplying + 0.5 + 4 * 0.25))
    slow = replace(DEVICE, sample_bandwidth={"bfloat16": 1e5})
    reading = (2 * N + 4 * 20 * 2 * 100 * 2) / 1e5
    assert rollout_seconds(WORK, APART, slow) == pytest.approx(prefill + 20 * (reading + 0.5 + 4 * 0.25))
    both = rollout_seconds(WORK, APART, replace(slow, cores=1))
    assert both == pytest.approx(prefill + 20 * (reading + multiplying + 0.5 + 4 * 0.25))


def test_rollout_seconds_of_samples_that_do_not_fit_at_once_add_up_in_waves():
    single = rollout_seconds(replace(WORK, samples=1), APART, DEVICE)
    double = rollout_seconds(replace(WORK, max_num_seqs=2), APART, DEVICE)
    prefill = 20 * (2 * N + 4 * 100 * 5) / 1e6
    assert double - 2 * prefill == pytest.approx(2 * (single - prefill))
    # A cache with room for two samples does the same.
    weights, sample = 2 * SHAPE.parameters, 30 * 2 * 100 * 2
    small = replace(DEVICE, memory=2 * (weights + 2.5 * sample))
    assert rollout_seconds(WORK, replace(APART, engine_share=0.5), small) == pytest.approx(double)


def test_step_time_of_oversampled_prompts_is_longer_in_sampling_alone():
    time, filtered = (step_time(replace(WORK, oversampling=n), APART, DEVICE, 8) for n in (1, 3))
    assert filtered.rollout == rollout_seconds(replace(WORK, prompts=3 * WORK.prompts), APART, DEVICE) > time.rollout
    assert filtered.training == time.training


def test_rollout_seconds_count_the_kept_tokens_of_a_sample_and_share_the_blocks_of_a_prompt():
    # Both samples of a prompt keep 48 of its 49 tokens together, and responses of 20 tokens: (1 + 24 + 20) tokens each.
    work = replace(WORK, prompt_tokens=49, max_tokens=1000)
    weights, sample = 2 * SHAPE.parameters, 45 * 2 * 100 * 2
    roomy = replace(DEVICE, memory=2 * (weights + 4 * sample))
    plan = replace(APART, engine_share=0.5)
    assert rollout_seconds(work, plan, roomy) == rollout_seconds(work, APART, DEVICE)
    assert rollout_seconds(work, plan, replace(roomy, memory=roomy.memory - 2)) > rollout_seconds(work, plan, roomy)


def test_rollout_seconds_share_whole_blocks_of_the_prompt_except_the_last():
    def read(prompt_tokens: int, prefix_caching: bool = True) -> float:
        long = replace(WORK, prompt_tokens=float(prompt_tokens), prefix_caching=prefix_caching)
        context = prompt_tokens + 10
        decoding = 20 * (4 * (2 * N + 4 * 100 * context) / 1e6 + 0.5 + 4 * 0.25)
        return (rollout_seconds(long, APART, DEVICE) - decoding) * 1e6 / (2 * N + 4 * 100 * prompt_tokens / 2)

    assert read(48) == pytest.approx(4 * 16 + 2 * 32)
    assert read(49) == pytest.approx(4 * 1 + 2 * 48)
    assert read(49, prefix_caching=False) == pytest.approx(4 * 49)


def test_step_time_update_is_three_forward_passes_and_four_with_checkpointing():
    # Prompts once for both samples.
    forward = ((2 * 10 + 4 * 20) * 2 * N + (2 * 10 * 5 + 4 * 20 * 20) * 4 * 100) / 1e6
    optimizer = 32 * SHAPE.parameters / 1e6
    assert step_time(WORK, APART, DEVICE, 8).update == pytest.approx(3 * forward + optimizer)
    again = step_time(replace(WORK, gradient_checkpointing=True), APART, DEVICE, 8)
    assert again.update == pytest.approx(4 * forward + optimizer)


def test_step_time_has_the_vision_tower_once_for_each_prompt_of_a_micro_batch():
    tower = Tower(2, ((10, 10),), (), (), width=10, patches=16, multiplied=300)
    image = 16 * (2 * (300 + 2 * 100) + 4 * 10 * 2 * 16)
    assert tower.forward_flops(16) == image
    work = replace(WORK, policy=replace(SHAPE, tower=tower), updates=2)

    def seconds(**options: Any) -> tuple[float, float, float]:
        with_images, without = (replace(work, **options, images=images) for images in (3.0, 0.0))
        times = [step_time(item, APART, DEVICE, 8) for item in (with_images, without)]
        slow, fast = ((time.rollout, time.log_probs, time.update) for time in times)
        first, second, third = ((one - other) * 1e6 / (3 * image) for one, other in zip(slow, fast, strict=True))
        return first, second, third

    # Two prompts: the engine, the old log-probs, and forward and backward passes.
    assert seconds() == pytest.approx((2, 2, 2 * 3))
    assert seconds(gradient_checkpointing=True) == pytest.approx((2, 2, 2 * 4))
    assert seconds(trains_tower=False) == pytest.approx((2, 2, 2))
    assert seconds(lora_rank=1, adapts_tower=False) == pytest.approx((2, 2, 2))
    assert seconds(lora_rank=1) == pytest.approx((2, 2, 2 * 2))
    # Each sample has a micro-batch of its own.
    assert seconds(micro_batch_tokens=30) == pytest.approx((2, 4, 4 * 3))
    assert seconds(image_patches=32.0) == pytest.approx(
        [count * tower.forward_flops(32) / image for count in (2, 2, 6)]
    )


def test_step_time_of_collectives_by_zero_stage():
    work = replace(WORK, micro_batch_tokens=30)
    sizes = {}
    for stage in (1, 2, 3):
        plan = replace(APART, trainers=2, zero_stage=stage)
        with_link = step_time(work, plan, DEVICE, 8).update
        sizes[stage] = (with_link - step_time(work, plan, replace(DEVICE, link=1e30), 8).update) * 1e6
    # Two workers, two micro-batches each: half of the weights' bytes goes over the link each time.
    half = SHAPE.parameters * 2 / 2
    assert sizes == {1: pytest.approx(3 * half), 2: pytest.approx(5 * half), 3: pytest.approx(4 * half)}


def test_step_time_gathers_weights_for_an_update_only_from_shards():
    fast = replace(DEVICE, link=1e30)
    gathering = {}
    for stage in (0, 1, 2, 3):
        plan = replace(APART, trainers=2, engines=2, colocated=True, zero_stage=stage)
        gathering[stage] = [step_time(WORK, plan, item, 8).update_weights for item in (DEVICE, fast)]
    seconds = {stage: slow - quick for stage, (slow, quick) in gathering.items()}
    sent = 2 * SHAPE.parameters / 1e6
    assert seconds == {0: pytest.approx(sent), 1: 0, 2: 0, 3: pytest.approx(sent)}


def test_step_time_one_step_ahead_is_the_longer_of_sampling_and_training():
    waiting = step_time(WORK, APART, DEVICE, 8)
    ahead = step_time(WORK, replace(APART, ahead=1), DEVICE, 8)
    between = waiting.update_weights + waiting.move
    assert waiting.step == pytest.approx(waiting.rollout + waiting.training + between)
    assert ahead.step == pytest.approx(max(waiting.rollout, waiting.training) + between)


def test_step_time_fetches_a_reference_on_the_host_in_every_pass():
    work = replace(WORK, frozen={"reference": SHAPE}, micro_batch_tokens=1)
    plan = Plan(2, 1, colocated=False, zero_stage=3)
    fetched = replace(work, places={"reference": "cpu"})
    here, there = (step_time(one, plan, DEVICE, 8).log_probs for one in (work, fetched))
    passes = micro_batch_sizes(work, 2).passes
    assert passes > 1 and there - here == pytest.approx(passes * 2 * SHAPE.parameters / 2 / 1e6)


def test_step_time_moves_states_only_if_an_engine_has_no_room_beside_the_states():
    plan = Plan(2, 2, zero_stage=3, sleep="all", engine_share=0.4)
    stays = step_time(WORK, replace(plan, offload="stay"), DEVICE, 2).move
    assert step_time(WORK, plan, DEVICE, 2).move == stays
    assert step_time(WORK, plan, replace(DEVICE, memory=16 * N), 2).move > stays


def test_rollout_seconds_of_engines_on_a_cpu_share_the_cores():
    cpu = replace(DEVICE, cores=1)
    double = rollout_seconds(WORK, replace(APART, engines=2), cpu)
    assert double == pytest.approx(2 * rollout_seconds(WORK, replace(APART, engines=2), replace(DEVICE, cores=2)))


def test_step_time_of_a_trainer_is_lower_beside_idle_cores():
    machine = replace(DEVICE, cores=4, alone=1.3)
    several = [step_time(WORK, replace(APART, trainers=count), machine, 4).update * count for count in (1, 2, 4)]
    whole = step_time(WORK, APART, replace(machine, alone=1.0), 4).update
    assert several[0] == pytest.approx(whole / 1.3)
    assert whole / 1.3 < several[1] < several[2]


def test_step_time_of_divided_experts_moves_tokens_in_place_of_experts():
    mixture = replace(SHAPE, experts=Experts(number=4, chosen=2, intermediate=50))
    elsewhere = 4 * 3 * 100 * 50 * 3 / 4
    work, plan = replace(WORK, policy=mixture), Plan(4, 1, zero_stage=0, colocated=False)
    sizes = micro_batch_sizes(work, 4)
    whole, divided = (step_time(replace(work, expert_parallel=ranks), plan, DEVICE, 8).update for ranks in (1, 4))
    # Forward and backward passes gather the experts, and one sum of gradients has the experts.
    saved = (2 * sizes.passes + work.updates) * elsewhere * work.width * (3 / 4) / DEVICE.link
    # Each token travels to two experts and back, in both directions.
    spent = 4 * sizes.tokens * 2 * (3 / 4) * 100 * work.width / DEVICE.link
    assert whole - divided == pytest.approx(saved - spent)
