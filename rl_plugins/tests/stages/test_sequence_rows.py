"""SequenceRows against a forward pass of each sequence by itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_plugins.data.experience import Experience, computed
from rl_plugins.data.images import IMAGE_INPUTS
from rl_plugins.models.log_probs import response_log_probs
from rl_plugins.ranks import Ranks
from rl_plugins.stages.forward_passes import SequenceRows
from rl_plugins.stages.micro_batches import Cutter, Lengths, most_sequences
from rl_plugins.stages.preference_examples import PreferenceExamples, mismatched
from rl_plugins.tests.loops import for_each
from rl_plugins.tests.models.samples import batch_of, forward_arguments, random_samples, tiny

# The first two samples have one prompt. The sequences take turns, one has one token, and one prompt has no response.
SEQUENCES = [[0, 0, 1, 1, 0, 1, 1, 2, 2], [0, 0, 0], [1, 1, 1, 2], [], [0, 1, 1, 0]]


def trajectories() -> Experience:
    samples = random_samples(*[(prompt, len(row)) for prompt, row in zip((4, 4, 1, 3, 2), SEQUENCES, strict=True)])
    samples[1] = (samples[0][0], samples[1][1])
    batch = batch_of(samples)
    batch.sequences = torch.zeros_like(batch.responses)
    for row_T, row in zip(batch.sequences, SEQUENCES, strict=True):
        row_T[: len(row)] = torch.tensor(row)
    return batch


def alone(model: Any, batch: Experience) -> tuple[Tensor, Tensor]:
    """Return the log-probs of each sequence's tokens after the first, [B, T], and their mask."""
    log_probs_BT, mask_BT = torch.zeros(batch.responses.shape, dtype=torch.float64), torch.zeros_like(batch.responses)
    for sample, row in enumerate(SEQUENCES):
        for number in set(row):
            places = [place for place, own in enumerate(row) if own == number]
            tokens = batch.responses[sample, places].tolist()
            if number == 0:
                tokens = batch.prompts[sample, -int(batch.prompt_lengths[sample]) :].tolist() + tokens
            else:
                # The first token of a new sequence is a prompt.
                places = places[1:]
            log_probs_KV = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(dim=-1)
            found_K = log_probs_KV.gather(-1, torch.tensor(tokens[1:])[:, None]).squeeze(-1)
            log_probs_BT[sample, places] = found_K[len(found_K) - len(places) :]
            mask_BT[sample, places] = 1
    return log_probs_BT, mask_BT.bool()


@for_each(("attention", "packed"), [("sdpa", False), ("sdpa", True), ("packed_sdpa", True)])
def test_log_probs_and_gradients_of_rows_equal_a_pass_of_each_sequence(attention: str, packed: bool) -> None:
    model, batch = tiny("Qwen2", attn_implementation=attention), trajectories()
    rows = SequenceRows.of(batch)
    assert len(rows.samples) == 10 and most_sequences(batch) == 3
    found = response_log_probs(model, **forward_arguments(rows.samples), packed=packed, top_k=2).mapped(rows.fold)
    expected_BT, mask_BT = alone(model, batch)
    torch.testing.assert_close(found.log_probs_BT[mask_BT], expected_BT[mask_BT], rtol=1e-10, atol=1e-10)
    # Tokens that are prompts, and padding, have 0.
    assert not found.log_probs_BT[~mask_BT].any() and not computed(found.entropy_BT)[~mask_BT].any()
    assert computed(found.top_ids_BTK).shape == (*batch.responses.shape, 2)
    weights_N = torch.randn(int(mask_BT.sum()), dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    gradients = []
    for log_probs_BT in (found.log_probs_BT, expected_BT):
        model.zero_grad()
        (weights_N * log_probs_BT[mask_BT]).sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_samples_of_one_sequence_are_the_rows() -> None:
    batch = trajectories()
    for sequences in (None, torch.zeros_like(batch.responses)):
        batch.sequences = sequences
        rows = SequenceRows.of(batch)
        assert rows.samples is batch and most_sequences(batch) == 1
        assert rows.fold(batch.responses) is batch.responses


def test_rows_have_the_tokens_of_the_teachers_at_places_of_the_samples() -> None:
    batch = trajectories()
    batch.teacher_top_ids = torch.stack([batch.responses, batch.responses + 1], dim=-1)
    rows = SequenceRows.of(batch)
    top_ids_RWK = computed(rows.samples.teacher_top_ids)
    assert torch.equal(top_ids_RWK[..., 0], rows.samples.responses)
    folded_BTK = rows.fold(top_ids_RWK)
    _, mask_BT = alone(tiny("Qwen2"), batch)
    assert torch.equal(folded_BTK[mask_BT], batch.teacher_top_ids[mask_BT]) and not folded_BTK[~mask_BT].any()


def test_rows_have_the_images_of_the_prompts_of_samples_alone() -> None:
    batch = trajectories()
    batch.set_column(IMAGE_INPUTS, ["a", "b", "c", None, "e"])
    rows = SequenceRows.of(batch)
    assert rows.samples.columns[IMAGE_INPUTS] == ["a", None, None, "b", "c", None, None, None, "e", None]


def test_padded_micro_batches_count_a_row_for_each_sequence() -> None:
    lengths = Lengths.of(trajectories())
    assert lengths.sequences_per_sample == 3
    # Two samples of three sequences, with the longest prompt and the longest response.
    cutter = Cutter(2 * 3 * (4 + 9), packing=False, shares_prompts=False, max_over_ranks=lambda counts: counts)
    assert cutter.common_number(lengths) == 3


def test_responses_keep_their_sequences_with_another_prompt() -> None:
    batch = trajectories()
    other = mismatched(PreferenceExamples.judged(batch, [True, False, True, False, True]), 0, Ranks())
    assert other is not None and other.sequences is not None
    kept = [row_T[:length].tolist() for row_T, length in zip(other.sequences, other.response_lengths, strict=True)]
    assert sorted(kept) == sorted(SEQUENCES) and kept != SEQUENCES
