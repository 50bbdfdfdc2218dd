"""The search over placements: order, given options, and the reason for a placement too large for the machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rl_plugins.commands.plan import words_of
from rl_plugins.config.checks import check_batch, check_options
from rl_plugins.errors import ConfigError
from rl_plugins.launch.placement import check_fit, roles_of
from rl_plugins.planning.devices import DEVICES, GIB, device_named
from rl_plugins.planning.memory import token_cache, trainer_memory
from rl_plugins.planning.search import KEPT_BYTES, Cluster, advice, memory_needs, overrides, plans, search
from rl_plugins.planning.shape import ModelShape
from rl_plugins.planning.step_time import step_time
from rl_plugins.planning.workload import Plan, Workload
from rl_plugins.rollout.vllm.gpu_binding import RankGPU, engine_places
from rl_plugins.tests.launch.configurations import configured

QWEN_7B = ModelShape(28, 3584, 18944, 28, 4, 128, 152064, attention_bias=28 * 128 + 8 * 128, norms=2 * 3584)
WORK = Workload(QWEN_7B)
NODE = Cluster(DEVICES["h100"], 8)


def test_search_puts_fitting_placements_first_in_order_of_step_time():
    found = search(WORK, NODE)
    fitting = [candidate.time.step for candidate in found if candidate.fits]
    assert fitting and fitting == sorted(fitting)
    assert [candidate.fits for candidate in found] == sorted((candidate.fits for candidate in found), reverse=True)
    for candidate in found:
        fullest = max(max(phases.values()) for phases in candidate.memory.values())
        assert (
            candidate.short == pytest.approx(max(0.0, fullest - 0.95 * NODE.device.memory))
            or "KV cache" in candidate.reason
        )


def test_plans_use_all_devices_and_divide_prompts_and_heads():
    for plan in plans(WORK, NODE):
        assert plan.devices == 8
        assert WORK.prompts % plan.trainers == 0
        assert 4 % plan.tensor_parallel == 0
        if plan.colocated:
            assert plan.trainers == plan.engines * plan.tensor_parallel == 8
        else:
            assert plan.trainers < 8


def test_plans_leave_memory_for_communicators_and_buffers_beside_a_colocated_engine():
    work, shares = replace(WORK, policy=replace(QWEN_7B, layers=2)), []
    for name in ("h100", "l4", "b200"):
        cluster = Cluster(DEVICES[name], 8)
        device = cluster.device
        for plan in plans(work, cluster):
            if plan.colocated and plan.engine_share > 0.05:
                held = sum(trainer_memory(work, plan, device)["sampling"].values())
                used = held + device.trainer_base + device.engine_base + plan.engine_share * device.memory
                assert device.memory - used >= KEPT_BYTES, (name, plan)
                shares.append(plan.engine_share)
    assert shares


def test_plans_leave_memory_for_libraries_and_bucket_beside_a_split_engine():
    work, shares = replace(WORK, bucket_bytes=2**28), {}
    for name in ("h100", "a100-40gb", "l40s", "a40", "l4", "4090"):
        device = DEVICES[name]
        split = [plan for plan in plans(work, Cluster(device, 2)) if not plan.colocated]
        (shares[name],) = {plan.engine_share for plan in split}
        for plan in split:
            engine = memory_needs(work, plan, device)["engine"]["sampling"]
            assert sum(engine.values()) <= 0.95 * device.memory
    assert shares == {"h100": 0.9, "a100-40gb": 0.85, "l40s": 0.85, "a40": 0.85, "l4": 0.8, "4090": 0.85}


def test_plans_keep_an_engine_within_a_machine():
    # Sixteen devices beside two trainers are four engines of four; three machines of six have room for three.
    sizes = {plan.tensor_parallel for plan in plans(WORK, Cluster(DEVICES["h100"], 6, 3))}
    assert sizes == {1, 2}


def test_plans_share_or_copy_heads_as_engines_do():
    def heads_of(heads: int, kv_heads: int) -> ModelShape:
        return replace(QWEN_7B, heads=heads, kv_heads=kv_heads)

    def sizes(heads: int, kv_heads: int) -> set[int]:
        return {plan.tensor_parallel for plan in plans(replace(WORK, policy=heads_of(heads, kv_heads)), NODE)}

    assert sizes(32, 4) == sizes(32, 1) == {1, 2, 4, 8}
    assert sizes(28, 4) == {1, 2, 4} and sizes(24, 3) == {1}
    # Eight devices have copies of four KV heads.
    work, eight = replace(WORK, policy=heads_of(32, 4)), Plan(8, 1, 8)
    assert token_cache(work, eight) == token_cache(work, replace(eight, tensor_parallel=4)) == work.sample_bytes / 4


def test_plans_keep_states_beside_colocated_engines_if_given():
    given = {"strategy.offload.policy": "stay", "placement.rollout": "colocated", "strategy.zero_stage": 2}
    found = search(WORK, NODE, given=given)
    assert found and {candidate.plan.offload for candidate in found} == {"stay"}
    needs = memory_needs(WORK, found[0].plan, NODE.device)["device"]
    for phase in ("sampling", "update_weights"):
        assert needs[phase]["masters"] + needs[phase]["moments"] == 12 * QWEN_7B.parameters / 8


def test_plans_give_workers_equal_prompts_in_every_update():
    work = replace(WORK, prompts=32, updates=16)
    assert {plan.trainers for plan in plans(work, NODE)} == {1, 2}


@pytest.mark.parametrize(
    ("cluster", "fsdp"),
    [
        (Cluster(DEVICES["h100"], 1), False),
        (Cluster(DEVICES["h100"], 2), False),
        (Cluster(DEVICES["h100"], 2, 2), True),
        (Cluster(DEVICES["h100"], 8), True),
        (Cluster(device_named("cpu"), 2), False),
        (Cluster(device_named("cpu"), 4), True),
    ],
)
def test_overrides_of_every_placement_pass_the_checks_of_a_run(cluster: Cluster, fsdp: bool):
    on_cpu = cluster.device.is_cpu
    machine = {"CPU": float(cluster.per_node)} if on_cpu else {"CPU": 64.0, "GPU": float(cluster.per_node)}
    device = "placement.device=cpu" if on_cpu else "placement.device=cuda"
    run = ("model.path=none", "batch.prompts_per_step=8", "batch.updates_per_step=2", device)
    found = list(plans(replace(WORK, prompts=8, updates=2), cluster, fsdp=fsdp))
    assert found
    for plan in found:
        config = configured("grpo", *run, *words_of(overrides(WORK, plan, cluster)))
        check_options(config)
        check_batch(config)
        check_fit(roles_of(config), [machine] * cluster.nodes, "the cluster")


def test_search_finds_engines_on_all_gpus_for_a_model_of_7b_on_a_node_of_8():
    work = replace(WORK, prompts=512, samples=8, prompt_tokens=1024, response_tokens=2048, max_tokens=3072)
    best = search(work, NODE)[0]
    options = overrides(best.work, best.plan, NODE)
    assert best.fits and options["placement.rollout"] == "colocated" and options["rollout.engines"] == 8
    batch = ("batch.prompts_per_step=512", "batch.samples_per_prompt=8", "sampling.max_tokens=2048")
    config = configured("grpo", "model.path=none", "placement.device=cuda", *batch, *words_of(options))
    check_options(config)
    check_batch(config)
    roles = roles_of(config)
    check_fit(roles, [{"CPU": 64.0, "GPU": 8.0}], "the node")
    (engines,) = [role for role in roles if role.name == "rollout engines"]
    gpus = [RankGPU("0" * 56, str(number)) for number in range(config.placement.num_workers)]
    places = engine_places(gpus, engines.shared_gpus)
    assert [place["environment"]["CUDA_VISIBLE_DEVICES"] for place in places] == list("01234567")
    # The passes of training, which are the same, are the larger part of the step with all engines.
    alone = step_time(best.work, replace(best.plan, engines=1), NODE.device, NODE.per_node)
    assert alone.training == best.time.training > best.time.rollout
    assert alone.rollout > 7.9 * best.time.rollout and alone.step > 4 * best.time.step


def test_search_finds_the_size_of_micro_batches_whose_activations_need_no_second_forward_pass():
    work = replace(WORK, prompts=512, samples=8, prompt_tokens=1024, response_tokens=2048, max_tokens=3072)
    best = search(work, NODE)[0]
    options = overrides(best.work, best.plan, NODE)
    assert not options["model.gradient_checkpointing"] and 3072 <= options["batch.tokens_per_micro_batch"] < 16384
    (kept,) = {
        candidate.work.micro_batch_tokens
        for candidate in search(work, NODE, given={"batch.tokens_per_micro_batch": work.micro_batch_tokens})
    }
    assert kept == work.micro_batch_tokens


def test_memory_needs_of_an_update_hold_three_buckets_of_the_largest_tensor():
    plan = next(plan for plan in plans(WORK, NODE) if plan.colocated)
    small, large = (
        memory_needs(replace(WORK, bucket_bytes=size), plan, NODE.device)["device"]["update_weights"]["bucket"]
        for size in (2**20, 2**31)
    )
    assert small == 3 * 2 * 152064 * 3584 and large == 3 * 2**31


def test_memory_needs_of_a_weight_update_has_the_parameters_of_frozen_models():
    plan = next(plan for plan in plans(WORK, NODE) if plan.colocated and plan.zero_stage == 1)
    needs = memory_needs(replace(WORK, frozen={"reference": QWEN_7B}), plan, NODE.device)["device"]
    assert needs["update_weights"]["reference parameters"] == 2 * QWEN_7B.parameters
    assert not {"masters", "moments", "activations"} & needs["update_weights"].keys()


def test_plans_of_colocated_engines_on_accelerators_sleep_as_in_a_run():
    def sleeps(work: Workload, sleep: str | None = None) -> set[str]:
        return {plan.sleep for plan in plans(work, NODE, sleep=sleep) if plan.colocated}

    assert sleeps(WORK) == sleeps(replace(WORK, lora_rank=8, merged=True)) == {"all"}
    assert sleeps(replace(WORK, lora_rank=8)) == {"kv_cache"}
    # With an engine in memory there is less memory for training.
    assert sleeps(WORK, "none") == {"none"}
    given = {"placement.rollout": "colocated", "rollout.sleep": "none", "rollout.gpu_memory_utilization": 0.4}
    peaks = {
        sleep: [candidate.memory["device"]["update"] for candidate in search(WORK, NODE, given={**given, **other})]
        for sleep, other in {"none": {}, "all": {"rollout.sleep": "all"}}.items()
    }
    assert min(peaks["none"]) > min(peaks["all"]) + 0.39 * NODE.device.memory


def test_search_keeps_given_options():
    given = {"strategy.zero_stage": 2, "placement.num_workers": 4, "rollout.engines": "per_worker"}
    found = search(WORK, NODE, given=given)
    assert found
    for candidate in found:
        options = overrides(candidate.work, candidate.plan, NODE)
        assert options["strategy.zero_stage"] == 2
        assert options["rollout.engines"] * options["rollout.tensor_parallel_size"] == 4
    assert search(WORK, NODE, given={"placement.num_workers": 7}) == []


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("placement.rollout", "split"),
        ("placement.rollout", "colocated"),
        ("rollout.gpu_memory_utilization", 0.87),
        ("schedule.max_staleness", 1),
        ("model.gradient_checkpointing", True),
    ],
)
def test_search_gives_every_placement_the_given_option(option: str, value: object):
    found = search(WORK, NODE, given={option: value})
    assert found and all(overrides(candidate.work, candidate.plan, NODE)[option] == value for candidate in found)


def test_search_and_advice_name_lacking_memory_and_the_option_to_change():
    small = Cluster(DEVICES["l4"], 1)
    found = search(WORK, small, given={"strategy.zero_stage": 1, "strategy.offload.policy": "while_sampling"})
    first = found[0]
    assert not first.fits
    needed = max(first.memory["device"].values())
    assert first.reason == f"the update lacks {(needed - 0.95 * 22 * GIB) / GIB:.1f} GiB on each device"
    assert next(iter(first.parts)) == "moments"
    assert advice(first) == "set strategy.offload.policy=cpu"


def test_search_finds_no_room_for_the_kv_cache_of_too_long_samples():
    long = replace(WORK, max_tokens=8_000_000, micro_batch_tokens=1)
    given = {"model.gradient_checkpointing": False}
    assert all(not candidate.fits for candidate in search(long, NODE, given=given))


def test_overrides_set_max_staleness_and_fsdp():
    ahead = next(candidate for candidate in search(WORK, NODE) if candidate.plan.ahead)
    assert overrides(ahead.work, ahead.plan, NODE)["schedule.max_staleness"] == 1
    sharded = search(WORK, NODE, fsdp=True)[0]
    assert overrides(sharded.work, sharded.plan, NODE)["strategy.name"] == "fsdp"


def test_search_on_a_cpu_counts_engines_and_trainers_on_the_same_machine():
    machine = Cluster(device_named("cpu"), 2)
    small = replace(WORK, policy=ModelShape(2, 64, 128, 4, 4, 16, 1000), engine_dtype="float32")
    found = search(small, machine)
    assert {candidate.plan.engines for candidate in found} == {1, 2} and all(
        set(candidate.memory) == {"machine"} for candidate in found
    )
    two = [candidate for candidate in found if candidate.plan.engines == 2]
    assert all(candidate.memory["machine"]["start"] > 2 * WORK.kv_cache_bytes for candidate in two)


def test_device_named_suggests_the_nearest_device():
    with pytest.raises(ConfigError, match="device h10 is unknown: did you mean h100"):
        device_named("h10")
