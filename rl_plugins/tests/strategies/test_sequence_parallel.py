"""Ranks with parts of one row compute the same as each rank on its samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM

from rl_plugins.errors import ConfigError
from rl_plugins.models.packed_attention import boundaries, use_packed_attention
from rl_plugins.strategies.rank_groups import refuse_joint_passes
from rl_plugins.strategies.sequence_parallel import SequenceShards, body_of, overlaps, part_of
from rl_plugins.strategies.tensor_parallel import GroupBatch
from rl_plugins.tests.models.samples import LONGROPE, tiny
from rl_plugins.tests.ranks import run_ranks

# Sample lengths of four ranks: one sample is longer than all others together, and one rank has a single token.
LENGTHS = [[19], [2, 3], [1], [4, 1, 4]]
# Starts of positions, if some samples continue after the prompt of the sample before.
BEHIND_PROMPTS = [[0], [0, 1], [0], [0, 3, 2]]
VARIANTS: dict[str, dict[str, Any]] = {
    "as many keys as queries": {"num_key_value_heads": 4},
    "ranks that share keys": {"num_key_value_heads": 2},
    "a window": {"num_key_value_heads": 1, "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
}


def model_of(**options: Any) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 20, "num_hidden_layers": 2, "vocab_size": 30}
    config = AutoConfig.for_model("qwen2", num_attention_heads=4, initializer_range=0.3, **sizes, **options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
    use_packed_attention(model)
    return model


def row_of(lengths: list[int], begins: list[int] | None = None) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(sum(lengths))
    starts = zip(begins or [0] * len(lengths), lengths, strict=True)
    positions = torch.cat([torch.arange(begin, begin + length) for begin, length in starts])
    ids = torch.randint(30, (1, sum(lengths)), generator=generator)
    return {"input_ids": ids, "position_ids": positions[None], **boundaries(positions)}


def padded_of(lengths: list[int]) -> dict[str, Any]:
    """The samples of `row_of`, the first half of each padded on the left, as prompts are."""
    row, width = row_of(lengths)["input_ids"][0], max(lengths) + 2
    samples = row.split(lengths)
    ids, mask = torch.zeros(2, len(lengths), width, dtype=torch.long)
    for place, sample in enumerate(samples):
        start = (width - len(sample)) // 2
        ids[place, start : start + len(sample)] = sample
        mask[place, start : start + len(sample)] = 1
    return {"input_ids": ids, "attention_mask": mask}


def run(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """Logits of the real tokens, with gradients."""
    logits = model(**inputs, use_cache=False).logits
    real = logits[inputs["attention_mask"].bool()] if "attention_mask" in inputs else logits[0]
    (real.double() ** 2).sum().backward()
    return real.detach()


def compare(rank: int, options: dict[str, Any], dtype: torch.dtype, checkpointing: bool) -> None:

    def expected(rows: list[dict[str, Any]]) -> tuple[Tensor, list[Tensor]]:
        """The logits of this rank's row, and the gradient of all ranks'."""
        whole = model_of(**options).to(dtype)
        logits = [run(whole, row) for row in rows][rank]
        return logits, [parameter.grad for parameter in whole.parameters()]

    whole_rows = [row_of(lengths) for lengths in LENGTHS]
    shared_rows = [row_of(lengths, begins) for lengths, begins in zip(LENGTHS, BEHIND_PROMPTS, strict=True)]
    model = model_of(**options).to(dtype)
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.train()
    group, _ = torch.distributed.new_subgroups(4)
    shards = SequenceShards(model, "policy", group)
    seen: list[int] = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[1]))
    tolerance: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.1, "atol": 0.1}
    cases = (whole_rows[rank], whole_rows), (padded_of(LENGTHS[rank]), whole_rows), (shared_rows[rank], shared_rows)
    for inputs, rows in cases:
        model.zero_grad()
        logits, gradients = expected(rows)
        torch.testing.assert_close(run(model, inputs), logits, **tolerance)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            assert parameter.grad is not None
            torch.distributed.all_reduce(parameter.grad)
            error = (parameter.grad - gradient).norm() / gradient.norm()
            assert error < (1e-5 if dtype == torch.float32 else 0.05)
    # No rank has more than a quarter of all tokens, for any samples.
    tokens = sum(map(sum, LENGTHS))
    assert set(seen) <= {tokens // 4, tokens // 4 + 1}
    shards.remove()
    torch.testing.assert_close(run(model, whole_rows[rank]), expected(whole_rows)[0], **tolerance)


@pytest.mark.parametrize("variant", VARIANTS)
def test_sequence_shards_give_logits_and_gradients_of_whole_rows(variant: str) -> None:
    run_ranks(compare, VARIANTS[variant], torch.float32, False, world_size=4)


def test_sequence_shards_with_gradient_checkpointing_in_bfloat16() -> None:
    run_ranks(compare, VARIANTS["ranks that share keys"], torch.bfloat16, True, world_size=4)


def refuse_passes(rank: int) -> None:
    group, _ = torch.distributed.new_subgroups(4)
    model = tiny("StableLm", num_key_value_heads=4)
    use_packed_attention(model)
    SequenceShards(model, "critic", group)
    with pytest.raises(ConfigError, match=r"2 of the 2 layers of StableLmModel see only .* another model for the crit"):
        run(model, padded_of(LENGTHS[rank]))
    # The rank with a single token refuses the long sample of another rank.
    for option, join in (
        ("sequence_parallel", lambda model: SequenceShards(model, "policy", group)),
        ("tensor_parallel", lambda model: GroupBatch(model, init_device_mesh("cpu", (4,)))),
    ):
        model = tiny("Phi3", **LONGROPE)
        use_packed_attention(model)
        refuse_joint_passes(model, "router_replay")
        join(model)
        with pytest.raises(ConfigError, match="router_replay has not been tried with tensor_parallel and sequence_par"):
            refuse_joint_passes(model, "router_replay")
        with pytest.raises(ConfigError, match=f"rotary positions longrope, .*, or set {option}=1"):
            run(model, row_of(LENGTHS[rank]))


def test_joint_passes_refuse_layers_without_exchange_and_long_rotary_positions() -> None:
    run_ranks(refuse_passes, world_size=4)


def test_overlaps_and_part_of_deal_tokens_to_ranks() -> None:
    assert overlaps([4, 4, 4], [10, 0, 2]) == [[4, 0, 0], [4, 0, 0], [2, 0, 2]]
    assert [part_of(10, rank, 4) for rank in range(4)] == [slice(0, 2), slice(2, 5), slice(5, 7), slice(7, 10)]


def test_body_of_refuses_models_without_packed_sdpa_or_enough_heads() -> None:
    message = "sequence_parallel=8: the critic has num_attention_heads=4 and num_key_value_heads=2"
    with pytest.raises(ConfigError, match=message):
        body_of(model_of(num_key_value_heads=2), "critic", 8)
    with pytest.raises(ConfigError, match="Linear does not attend by packed_sdpa below a head: set"):
        body_of(nn.Linear(2, 2), "policy", 2)
    with pytest.raises(ConfigError, match="Qwen2Model does not attend by packed_sdpa"):
        body_of(model_of(num_key_value_heads=2).model, "policy", 2)
