"""Sequences of trajectories as rows of a forward pass.

The trajectory of an agent may have several sequences, because an agent shortens its history or calls other agents. A
sample has the tokens of all sequences in the order of time, so rewards, advantages and averages count the trajectory as
one sample. In a forward pass each sequence is a row, because the tokens of one sequence must not see another.

Axes: `B` samples, `P` longest prompt, `T` longest response, `R` rows, `W` longest response of a row, `N` response
tokens of all samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_plugins.data.experience import Experience
from rl_plugins.data.images import IMAGE_INPUTS
from rl_plugins.device_copies import to_device

_FIELDS = ("responses", "response_mask", "rollout_log_probs", "policy_versions", "teacher_top_ids")
"""Fields [B, T, ...] that a forward pass, or an `Experience`, needs."""


@dataclass(frozen=True)
class _TokenPlaces:
    """Places of the tokens in response columns of the rows, flattened.

    Attributes:
        rows_N: index in [R, W] of each token.
        samples_N: index in [B, T] of each token.
    """

    rows_N: Tensor
    samples_N: Tensor


@dataclass(frozen=True)
class SequenceRows:
    """Samples as rows of one sequence each.

    Attributes:
        samples: the rows. The prompt of a sequence that does not continue the prompt of its sample is its first token.
        shape: B and T.
        tokens_B: number of tokens of each sample in its rows, prompts included.
        places: places of the tokens; None if the rows are the samples.
    """

    samples: Experience
    shape: torch.Size
    tokens_B: Tensor
    places: _TokenPlaces | None = None

    @classmethod
    def of(cls, samples: Experience) -> SequenceRows:
        """Make the rows of samples."""
        shape = samples.responses.shape
        if samples.sequences is None or not bool(samples.sequences.any()):
            return cls(samples, shape, samples.sequence_lengths)
        return cls(*_split(samples, samples.sequences))

    def fold(self, values_RW: Tensor) -> Tensor:
        """Return numbers of the rows' response tokens in the shape of the samples, [B, T, ...].

        Padding, and tokens that are prompts of rows, get 0.
        """
        if self.places is None:
            return values_RW
        return _moved(values_RW, self.places.rows_N, self.places.samples_N, self.shape)


def most_sequences(samples: Experience) -> int:
    """Return the largest number of sequences of a sample."""
    if samples.sequences is None or not samples.sequences.numel():
        return 1
    return 1 + int(samples.sequences.max())


def _split(samples: Experience, sequences_BT: Tensor) -> tuple[Experience, torch.Size, Tensor, _TokenPlaces]:
    (count, width), device = sequences_BT.shape, sequences_BT.device
    nth_T, nth_B = torch.arange(width, device=device), torch.arange(count, device=device)
    samples_N = (nth_T < samples.response_lengths[:, None]).flatten().nonzero().squeeze(-1)
    most = most_sequences(samples)
    keys_N = samples_N.div(width, rounding_mode="floor") * most + sequences_BT.flatten()[samples_N]
    # Each sample has a row for its prompt, also without a response to the prompt.
    keys_R = torch.cat([keys_N, nth_B * most]).unique()
    sample_R, has_own_prompt_R = keys_R.div(most, rounding_mode="floor"), keys_R % most > 0
    row_N = torch.searchsorted(keys_R, keys_N)
    sizes_R = row_N.bincount(minlength=len(keys_R))
    order_N = row_N.argsort(stable=True)
    first_R = sizes_R.cumsum(dim=0) - sizes_R
    column_N = torch.empty_like(row_N)
    column_N[order_N] = torch.arange(len(row_N), device=device) - first_R[row_N[order_N]]
    column_N -= has_own_prompt_R[row_N].long()
    is_prompt_N = column_N < 0
    lengths_R = sizes_R - has_own_prompt_R.long()
    shape = torch.Size([len(keys_R), max(1, int(lengths_R.max()))])
    places = _TokenPlaces((row_N * shape[1] + column_N)[~is_prompt_N], samples_N[~is_prompt_N])

    prompts_RP = samples.prompts[sample_R]
    prompts_RP[row_N[is_prompt_N], -1] = samples.responses.flatten()[samples_N[is_prompt_N]]
    fields: dict[str, Any] = {
        name: _moved(values, places.samples_N, places.rows_N, shape)
        for name in _FIELDS
        if (values := getattr(samples, name)) is not None
    }
    columns: dict[str, Any] = {}
    if (images_B := samples.columns.get(IMAGE_INPUTS)) is not None:
        sources = zip(sample_R.tolist(), has_own_prompt_R.tolist(), strict=True)
        columns[IMAGE_INPUTS] = [None if has_own_prompt else images_B[sample] for sample, has_own_prompt in sources]
    rows = Experience(
        prompts=prompts_RP,
        prompt_lengths=samples.prompt_lengths[sample_R].masked_fill(has_own_prompt_R, 1),
        response_lengths=lengths_R,
        groups=samples.groups[sample_R],
        valid=samples.valid[sample_R],
        rows=columns,
        batch_size=[len(keys_R)],
        **fields,
    )
    tokens_B = rows.sequence_lengths.new_zeros(count).index_add(0, sample_R, rows.sequence_lengths)
    return rows, sequences_BT.shape, tokens_B, places


def _moved(values: Tensor, from_N: Tensor, to_N: Tensor, shape: torch.Size) -> Tensor:
    """Return a tensor of two axes (and the further axes of `values`) with values at other places, and 0 elsewhere."""
    from_N, to_N = to_device(from_N, values.device), to_device(to_N, values.device)
    moved = values.new_zeros(shape.numel(), *values.shape[2:])
    moved[to_N] = values.flatten(0, 1)[from_N]
    return moved.view(*shape, *values.shape[2:])
