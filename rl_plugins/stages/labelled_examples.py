"""Training examples of a reward model, ready for forward passes: pairs of responses, or responses with labelled steps.

Axes: `B` examples (a pair is one), `R` samples (a pair has two), `T` response tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_plugins.data.experience import Experience
from rl_plugins.data.padding import pad_ragged
from rl_plugins.data.preferences import PairBatch
from rl_plugins.data.process_rewards import ProcessRewardBatch
from rl_plugins.errors import ConfigError
from rl_plugins.models.scalar_head import last_token_scores
from rl_plugins.stages.micro_batches import Lengths


class Pairs:
    """Pairs of responses to one prompt; both responses of a pair are always in the same micro-batch."""

    given = frozenset({"chosen_scores_B", "rejected_scores_B", "margins_B"})

    def __init__(self, batch: PairBatch, pad_token_id: int) -> None:
        """Pad the pairs."""
        responses = [*batch.chosen_ids, *batch.rejected_ids]
        self._count = len(batch.chosen_ids)
        self._samples = Experience.from_responses([*batch.prompt_ids, *batch.prompt_ids], responses, pad_token_id)
        self._margins_B = torch.tensor(batch.margins, dtype=torch.float32)

    @property
    def lengths(self) -> Lengths:
        """Lengths of the pairs."""
        return Lengths.of_examples(self._samples, self._both(torch.arange(self._count)).view(2, -1).T)

    @property
    def tokens(self) -> Tensor:
        """Number of tokens of all samples together."""
        return self._samples.sequence_lengths.sum()

    def __len__(self) -> int:
        """Return the number of pairs."""
        return self._count

    def samples(self, indices_B: Tensor) -> Experience:
        """Return the samples of some pairs: the chosen responses, then the rejected responses."""
        return self._samples[self._both(indices_B)].trimmed()

    def _both(self, indices_B: Tensor) -> Tensor:
        return torch.cat([indices_B, indices_B + self._count])

    def label_mask(self, indices_B: Tensor) -> Tensor:
        """Return the mask of counted pairs [B]: every pair counts."""
        return torch.ones(len(indices_B))

    def loss_inputs(self, scores_RT: Tensor, indices_B: Tensor) -> dict[str, Tensor]:
        """Return the loss inputs: scores of whole responses [B] and margins [B]."""
        lengths_R = self._samples.response_lengths[self._both(indices_B)].to(scores_RT.device)
        chosen_B, rejected_B = last_token_scores(scores_RT, lengths_R).chunk(2)
        margins_B = self._margins_B[indices_B].to(scores_RT)
        return {"chosen_scores_B": chosen_B, "rejected_scores_B": rejected_B, "margins_B": margins_B}


class Steps:
    """Responses with a label at the end of each step."""

    given = frozenset({"scores_BT", "labels_BT", "label_mask_BT"})

    def __init__(self, batch: ProcessRewardBatch, pad_token_id: int) -> None:
        """Pad the responses and the labels."""
        self._samples = Experience.from_responses(batch.prompt_ids, batch.response_ids, pad_token_id)
        self._labels_BT, _ = pad_ragged(batch.labels, value=float("nan"), dtype=torch.float32, side="right")

    @property
    def lengths(self) -> Lengths:
        """Lengths of the responses."""
        return Lengths.of(self._samples)

    @property
    def tokens(self) -> Tensor:
        """Number of tokens of all samples together."""
        return self._samples.sequence_lengths.sum()

    def __len__(self) -> int:
        """Return the number of responses."""
        return len(self._samples)

    def samples(self, indices_B: Tensor) -> Experience:
        """Return the samples of some examples."""
        return self._samples[indices_B].trimmed()

    def label_mask(self, indices_B: Tensor) -> Tensor:
        """Return the mask of counted tokens [B, T]: labelled tokens count."""
        return (~self._labels(indices_B).isnan()).float()

    def loss_inputs(self, scores_RT: Tensor, indices_B: Tensor) -> dict[str, Tensor]:
        """Return the loss inputs: scores, labels and label mask of tokens [B, T]."""
        return {
            "scores_BT": scores_RT,
            "labels_BT": self._labels(indices_B).to(scores_RT),
            "label_mask_BT": self.label_mask(indices_B).to(scores_RT),
        }

    def _labels(self, indices_B: Tensor) -> Tensor:
        return self._labels_BT[indices_B, : int(self._samples.response_lengths[indices_B].max())]


def labelled_examples(batch: object, pad_token_id: int) -> Pairs | Steps:
    """Return the examples of a batch.

    Raises:
        ConfigError: the batch holds neither pairs nor labelled steps.
    """
    if isinstance(batch, PairBatch):
        return Pairs(batch, pad_token_id)
    if isinstance(batch, ProcessRewardBatch):
        return Steps(batch, pad_token_id)
    raise ConfigError(
        f"a reward model learns from pairs or labelled steps, not from a {type(batch).__name__}: serve them with "
        "PreferenceDataModule(..., validate_on='pairs') or ProcessRewardDataModule"
    )


def placeholder(pad_token_id: int) -> Experience:
    """Return one sample of two tokens, for the forward pass of a rank without examples."""
    return Experience.from_responses([[pad_token_id]], [[pad_token_id]], pad_token_id)
