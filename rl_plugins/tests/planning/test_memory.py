"""Memory against sums made by hand, for a model with a million parameters in all its matrices."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rl_plugins.models.token_distributions import logits_at_once
from rl_plugins.planning.devices import DEVICES
from rl_plugins.planning.memory import (
    LOGITS_ON_CPU,
    LOGITS_ON_GPU,
    engine_memory,
    kv_cache_needed,
    total,
    trainer_memory,
)
from rl_plugins.planning.shape import Experts, ModelShape
from rl_plugins.planning.tower import Tower
from rl_plugins.planning.workload import Plan, PlannedCritic, Workload

# A block: 4 x 64 x 64 of attention, 3 x 64 x 128 of the MLP, 2 x 64 of norms.
SHAPE = ModelShape(layers=2, hidden=64, intermediate=128, heads=4, kv_heads=4, head_dim=16, vocab=1000, norms=128)
P = 2 * (4 * 64 * 64 + 3 * 64 * 128 + 128) + 64 + 2 * 64 * 1000
WORK = Workload(
    SHAPE, prompts=4, samples=2, prompt_tokens=32, response_tokens=32, max_tokens=64, micro_batch_tokens=128,
    kv_cache_bytes=2**20,
)  # fmt: skip
GPU = DEVICES["h100"]
CPU = replace(GPU, cores=2, fragments=1.5)


def test_model_shape_parameters_by_hand():
    assert SHAPE.parameters == P


@pytest.mark.parametrize(
    ("stage", "precision", "kept"),
    [
        # Weights are whole, masters and two moments of four bytes are divided by two workers.
        (1, "bf16-true", 2 * P + 12 * P / 2),
        (2, "32-true", 4 * P + 12 * P / 2),
        # Weights and gradients are divided, too. All tensors are small: each is whole beside its parts.
        (3, "bf16-true", 2 * P / 2 + 2 * P + 12 * P / 2 + 4 * P / 2),
        # FSDP2: all in bfloat16; or float32 shards.
        (0, "bf16-true", 6 * P / 2),
        (0, "bf16-mixed", 12 * P / 2),
        (0, "16-mixed", 12 * P / 2),
    ],
)
def test_trainer_memory_of_states_while_engines_sample(stage, precision, kept):
    plan = Plan(2, 1, zero_stage=stage, offload="stay")
    work = replace(WORK, precision=precision)
    assert total(trainer_memory(work, plan, GPU)["sampling"]) == pytest.approx(kept)


def test_trainer_memory_of_colocated_trainers_is_frozen_models_while_engines_sample():
    work = replace(WORK, frozen={"reference": SHAPE})
    plan = Plan(2, 2, zero_stage=1)
    assert trainer_memory(work, plan, GPU)["sampling"] == {"reference parameters": 2 * P}
    apart = replace(plan, colocated=False)
    assert total(trainer_memory(work, apart, GPU)["sampling"]) == pytest.approx(2 * P + 12 * P / 2 + 2 * P)


def test_trainer_memory_of_frozen_models_elsewhere_and_of_averages():
    work = replace(WORK, frozen={"reference": SHAPE, "teacher": SHAPE}, averages={"policy": P, "reference": P})
    work = replace(work, places={"reference": "cpu", "teacher": "while_sampling"})
    for stage, small, average in ((3, 2 * P, 4 * P / 2), (0, 0.0, 4 * P / 2), (1, P, 4 * P)):
        phases = trainer_memory(work, Plan(2, 2, zero_stage=stage), GPU)
        kept = {"policy average": average, "reference average": average, "reference parameters": small}
        assert phases["sampling"] == pytest.approx(kept)
        for phase in ("log_probs", "update"):
            assert {name: phases[phase][name] for name in kept} == pytest.approx(kept)
            assert phases[phase]["teacher parameters"] > 0
    on_cpu = trainer_memory(work, Plan(2, 2, zero_stage=3, offload="stay"), CPU)["sampling"]
    assert on_cpu["reference parameters"] == on_cpu["teacher parameters"] == 2 * P / 2 + 2 * P


def test_trainer_memory_of_an_adapter_has_states_of_the_adapter_only():
    adapter = 2 * 8 * (4 * 128 + 3 * 192)
    plan = Plan(2, 1, zero_stage=1, offload="stay")
    states = trainer_memory(replace(WORK, lora_rank=8), plan, GPU)["sampling"]
    assert total(states) == pytest.approx(2 * P + 2 * adapter + 12 * adapter / 2)


def test_trainer_memory_of_muon_has_one_moment_for_matrices_of_hidden_layers():
    experts = Experts(number=4, chosen=2, intermediate=32)
    of_experts = 4 * 3 * 64 * 32
    mixture = replace(SHAPE, experts=experts)
    for shape, others in ((SHAPE, 2 * 64 * 1000), (mixture, 2 * 64 * 1000 + 2 * of_experts)):
        work = replace(WORK, policy=shape, muon=True)
        states = trainer_memory(work, Plan(2, 1, zero_stage=0, offload="stay"), GPU)["sampling"]
        assert states["moments"] == 2 * (shape.parameters + others) / 2
        critic = PlannedCritic("critic", shape, shape.adapter(8), muon=True)
        both = trainer_memory(replace(work, critics=[critic]), Plan(2, 1, zero_stage=0, offload="stay"), GPU)
        assert both["sampling"]["moments"] - states["moments"] == 2 * critic.trained / 2


def test_trainer_memory_of_a_frozen_tower_has_the_parameters_alone():
    tower = Tower(1, ((64, 64),), (), (), width=64, patches=16, multiplied=0)
    work = replace(WORK, policy=replace(SHAPE, tower=tower), trains_tower=False)
    for stage, kept in ((1, 2 * (P + 64 * 64) + 12 * P / 2), (0, 2 * (P + 64 * 64) / 2 + 4 * P / 2)):
        states = trainer_memory(work, Plan(2, 1, zero_stage=stage, offload="stay"), GPU)["sampling"]
        assert total(states) == pytest.approx(kept)
    # The adapter of a frozen tower is frozen, too.
    assert replace(work, lora_rank=8).trained_parameters == SHAPE.adapter(8)


def test_trainer_memory_of_quantised_moments_has_a_byte_and_a_share_of_a_scale():
    work = replace(WORK, precision="bf16-mixed", moment_width=1 + 4 / 256)
    for stage, others in ((0, 4 * P / 2), (1, 2 * P + 4 * P / 2)):
        states = trainer_memory(work, Plan(2, 1, zero_stage=stage, offload="stay"), GPU)["sampling"]
        assert total(states) == pytest.approx(others + 2 * (1 + 4 / 256) * P / 2)


# All matrices of the blocks.
ADAPTED = 2 * (4 * 64 * 64 + 3 * 64 * 128)
SCALES = ADAPTED / 64 + 4 * ADAPTED / (64 * 256)


@pytest.mark.parametrize(
    ("stage", "saved"),
    [
        (1, 1.5 * ADAPTED - SCALES),
        (2, 1.5 * ADAPTED - SCALES),
        # Codes are in parts on two workers, and scales are whole.
        (3, 1.5 * ADAPTED / 2 - SCALES),
        (0, 1.5 * ADAPTED / 2 - SCALES),
    ],
)
def test_trainer_memory_of_layers_in_four_bits(stage, saved):
    plan, work = Plan(2, 1, zero_stage=stage, offload="stay"), replace(WORK, lora_rank=8)
    plain, packed = (trainer_memory(one, plan, GPU) for one in (work, replace(work, four_bits=True)))
    assert total(plain["sampling"]) - total(packed["sampling"]) == pytest.approx(saved)
    # A pass makes the numbers of the largest layer, and FSDP2 gathers two blocks in 4 bits.
    largest, gathered = 2 * 64 * 128, {0: 1.5 * ADAPTED}.get(stage, 0.0)
    for phase in ("log_probs", "update"):
        assert packed[phase]["gathered"] == pytest.approx(plain[phase]["gathered"] - gathered + largest)


def test_trainer_memory_of_a_critic_in_four_bits():
    critic = PlannedCritic("critic", SHAPE, SHAPE.adapter(8))
    plain, packed = (
        trainer_memory(replace(WORK, lora_rank=8, critics=[one]), Plan(2, 1, zero_stage=1, offload="stay"), GPU)
        for one in (critic, replace(critic, four_bits=True))
    )
    for phase in plain:
        assert plain[phase]["parameters"] - packed[phase]["parameters"] == pytest.approx(1.5 * ADAPTED - SCALES)


def test_trainer_memory_gathers_a_reference_in_whole_numbers():
    work = replace(WORK, lora_rank=8, frozen={"reference": SHAPE})
    plain, packed = (
        trainer_memory(one, Plan(2, 1, zero_stage=0), GPU)["log_probs"]["gathered"]
        for one in (work, replace(work, four_bits=True))
    )
    assert plain == packed


def test_trainer_memory_of_an_update_by_hand():
    plan = Plan(2, 1, zero_stage=2, offload="stay")
    parts = trainer_memory(WORK, plan, GPU)["update"]
    # A micro-batch of a prompt and its two responses. Bytes of a block and a token in bfloat16: two norms of 4 + 2 + 2
    # bytes, and two bytes each of q, of twice attention's output, of four times the MLP's width, and of 4 / 3
    # times k and v, because 96 tokens of a row make samples of 128.
    block = 2 * 64 * 8 + 2 * (3 * 64 + 4 * 128 + 4 / 3 * 2 * 64)
    ends = 64 * 8 + 2 * (2 * 64 + 3 * 128)
    assert parts["activations"] == pytest.approx(96 * (2 * block + ends))
    assert parts["bucket"] == 2 * P and parts["gradients"] == 4 * P / 2
    # Logits and their gradient in bfloat16, and two blocks in float32.
    assert parts["logits"] == pytest.approx(64 * 1000 * (2 * 2 + 2 * 4))
    again = trainer_memory(replace(WORK, gradient_checkpointing=True), plan, GPU)["update"]
    assert again["activations"] == pytest.approx(96 * (2 * 64 * 2 + block + ends))


def test_trainer_memory_has_the_activations_of_the_largest_model():
    plan, deep = Plan(2, 1, zero_stage=2, offload="stay"), replace(SHAPE, layers=6, intermediate=1024)
    # The critic trains an adapter, so the policy trains more parameters.
    critic = PlannedCritic("critic", deep, deep.adapter(2))
    both = trainer_memory(replace(WORK, critics=[critic]), plan, GPU)["update"]
    alone = trainer_memory(replace(WORK, policy=deep), plan, GPU)["update"]
    assert both["activations"] == alone["activations"] > trainer_memory(WORK, plan, GPU)["update"]["activations"]
    assert both["logits"] == trainer_memory(WORK, plan, GPU)["update"]["logits"]
    frozen = trainer_memory(replace(WORK, frozen={"teacher": deep}), plan, GPU)["log_probs"]
    assert frozen["activations"] == trainer_memory(replace(WORK, policy=deep), plan, GPU)["log_probs"]["activations"]


def test_trainer_memory_of_stage_1_has_whole_gradients_with_several_micro_batches():
    plan = Plan(2, 1, zero_stage=1, offload="stay")
    once = replace(WORK, micro_batch_tokens=10_000)
    # Stage 1 adds up in float32 if the passes are in float16.
    for precision, width in {"bf16-mixed": 2, "16-mixed": 4}.items():
        several, one = (
            trainer_memory(replace(work, precision=precision), plan, GPU)["update"] for work in (WORK, once)
        )
        assert several["gradients"] == width * P + width * P / 2
        assert one["gradients"] == width * P / 2
        assert several["bucket"] == width * P


def test_trainer_memory_of_an_update_has_the_gradients_of_all_models_under_stage_3():
    critic = PlannedCritic("critic", SHAPE, P)
    plan = Plan(2, 1, zero_stage=3, offload="stay")
    for critics in (), (critic,), (critic, critic):
        phases = trainer_memory(replace(WORK, critics=critics), plan, GPU)
        assert phases["update"]["gradients"] == phases["log_probs"]["gradients"] == (1 + len(critics)) * 4 * P / 2
        # DeepSpeed keeps the buffer beside the master weights.
        on_host = trainer_memory(replace(WORK, critics=critics), replace(plan, offload="cpu"), GPU)
        assert on_host["update"]["gradients"] == 0 and "gradients" not in on_host["log_probs"]


def test_trainer_memory_of_fsdp2_has_whole_gradients_with_several_micro_batches():
    plan = Plan(2, 1, zero_stage=0, offload="stay")
    once = replace(WORK, micro_batch_tokens=10_000)
    for precision, width in {"bf16-true": 2, "bf16-mixed": 4, "32-true": 4}.items():
        several, one = (replace(work, precision=precision) for work in (WORK, once))
        for work, shards, size in (several, False, 4 * P), (several, True, width * P / 2), (one, False, width * P / 2):
            update = trainer_memory(work, replace(plan, accumulate_shards=shards), GPU)["update"]
            assert update["gradients"] == size


def test_trainer_memory_of_a_large_model_peaks_in_the_optimizer_step():
    # The optimizer step works with the gradients in float32.
    work = replace(WORK, micro_batch_tokens=1, prompts=1, samples=1, prompt_tokens=1, response_tokens=1, max_tokens=1)
    parts = trainer_memory(work, Plan(1, 1, zero_stage=2, offload="stay"), GPU)["update"]
    assert "activations" not in parts and parts["float32 gradients"] == 4 * P
    on_host = trainer_memory(work, Plan(1, 1, zero_stage=2, offload="cpu"), GPU)["update"]
    assert "float32 gradients" not in on_host and on_host["masters"] == 0


def test_engine_memory_on_a_cpu_by_hand():
    plan = Plan(2, 2, sleep="kv_cache")
    weights, token = 2 * P, 2 * 2 * 64 * 2
    memory = engine_memory(WORK, plan, CPU)
    packed = 2 * WORK.policy.multiplied
    # Four responses; prompts are not longer than a block of the cache: no block is shared.
    cache = 4 * 64 * token
    assert memory["start"]["packed weights"] + memory["start"]["freed by loading"] == weights
    assert memory["start"]["KV cache"] == 2**20
    assert memory["sampling"] == {"weights": weights, "packed weights": packed, "KV cache": cache}
    assert memory["asleep"] == {"weights": weights}
    assert engine_memory(WORK, replace(plan, sleep="none"), CPU)["asleep"] == memory["start"]
    assert engine_memory(WORK, replace(plan, sleep="all"), CPU)["asleep"] == {}
    longer = replace(WORK, prompt_tokens=130.0)
    assert kv_cache_needed(longer, plan, on_cpu=True) == pytest.approx(4 * (2 + 64 + 32) * token)


def test_engine_memory_on_an_accelerator_is_the_engine_share():
    plan = Plan(2, 1, 2, engine_share=0.5)
    memory = engine_memory(WORK, plan, GPU)
    assert memory["sampling"] == {"weights": P, "KV cache": 0.5 * GPU.memory - P}
    assert memory["asleep"] == {"left": 0.0}
    assert engine_memory(WORK, replace(plan, colocated=False), GPU)["asleep"]["left"] == 0.5 * GPU.memory


def test_engine_memory_of_quantised_matrices_and_keys_by_hand():
    plan = Plan(trainers=1, engines=1, zero_stage=3, colocated=False, engine_share=0.5)
    quantised = replace(WORK, matrix_width=0.5, cache_width=1.0)
    heads = 2 * 64 * 1000
    parts = engine_memory(quantised, plan, GPU)["sampling"]
    assert parts["weights"] == 2 * heads + 0.5 * (P - heads)
    assert total(parts) == pytest.approx(0.5 * GPU.memory)
    assert 2 * kv_cache_needed(quantised, plan, on_cpu=False) == kv_cache_needed(WORK, plan, on_cpu=False)
    assert quantised.read_bytes(1) == quantised.engine_bytes - 2 * heads / 2


def test_trainer_memory_on_a_cpu_includes_fragments_of_freed_memory():
    plan = Plan(2, 1, zero_stage=1, offload="stay")
    update, sampling = (trainer_memory(WORK, plan, CPU)[phase] for phase in ("update", "sampling"))
    held = update["gradients"] + update["gathered"] + update["activations"]
    assert update["fragments"] == pytest.approx(held / 2)
    assert sampling["activations"] == pytest.approx(1.5 * update["activations"])


def test_trainer_memory_has_the_logits_of_the_output_head():
    assert logits_at_once(torch.device("cpu")) == LOGITS_ON_CPU
    assert logits_at_once(torch.device("cuda")) == LOGITS_ON_GPU
    plan = Plan(trainers=1, engines=1, zero_stage=3)
    large = replace(WORK, policy=replace(SHAPE, vocab=150_000), prompts=512, response_tokens=1024, max_tokens=1024)
    large = replace(large, micro_batch_tokens=2**16, precision="bf16-true")
    # Logits and their gradient in bfloat16, and two float32 blocks.
    for device, (chunk, block) in ((CPU, LOGITS_ON_CPU), (GPU, LOGITS_ON_GPU)):
        assert trainer_memory(large, plan, device)["update"]["logits"] == 4 * chunk + 8 * block


def test_trainer_memory_of_divided_experts():
    experts = Experts(number=4, chosen=2, intermediate=32, shared=0, is_gated=False, biased=False, dense_blocks=1)
    mixture = replace(SHAPE, layers=3, experts=experts)
    of_block = 4 * 3 * 64 * 32
    plan, work = Plan(4, 1, zero_stage=0), replace(WORK, policy=mixture, precision="bf16-true")
    work = replace(work, micro_batch_tokens=32)
    whole, divided = (trainer_memory(replace(work, expert_parallel=ranks), plan, GPU)["update"] for ranks in (1, 4))
    # Two blocks are gathered at a time, and two blocks have experts. Three quarters of the experts are elsewhere.
    assert whole["gathered"] - divided["gathered"] == pytest.approx(2 * 2 * of_block * 3 / 4)
    # Whole gradients are added up in float32.
    assert whole["gradients"] - divided["gradients"] == pytest.approx(4 * 2 * of_block * 3 / 4)
    assert {name: divided[name] for name in ("parameters", "moments")} == {
        name: whole[name] for name in ("parameters", "moments")
    }
    adapter = replace(work, lora_rank=4)
    whole, divided = (trainer_memory(replace(adapter, expert_parallel=ranks), plan, GPU)["update"] for ranks in (1, 4))
    assert whole["gathered"] > divided["gathered"] and whole["gradients"] == divided["gradients"]
