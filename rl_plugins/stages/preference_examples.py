"""Training examples of preference optimization: samples in pairs, or single judged responses.

Axes: `N` examples, `K` samples of an example (2 of a pair, the chosen first; 1 of a judged response), `R` samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rl_plugins.data.experience import Experience
from rl_plugins.data.images import IMAGE_INPUTS
from rl_plugins.data.padding import pad_ragged
from rl_plugins.data.preferences import PairBatch, UnpairedBatch
from rl_plugins.device_copies import to_device
from rl_plugins.ranks import Ranks
from rl_plugins.stages.micro_batches import Lengths


@dataclass(frozen=True)
class PreferenceExamples:
    """Pairs or judged responses of one rank.

    Attributes:
        samples: R samples; `groups` holds the row number of each prompt.
        members_NK: int64, indices of the samples of each example; K is 2 or 1.
        margins_N: margin by which the chosen response of a pair is better; 0 for judged responses.
        desirable_N: bool, True for good judged responses.
        counted_N: bool, False for filler examples, which make ranks run equally many micro-batches.
        ref_log_probs_R: log-prob of each sample under the reference, if the loss needs the reference.
        reference_point: scalar, if the loss needs a reference point.
    """

    samples: Experience
    members_NK: Tensor
    margins_N: Tensor
    desirable_N: Tensor
    counted_N: Tensor
    ref_log_probs_R: Tensor | None = None
    reference_point: Tensor | None = None

    @classmethod
    def pairs(cls, samples: Experience, members_N2: Tensor, margins: Sequence[float]) -> PreferenceExamples:
        """Return examples made of pairs of samples."""
        count = len(members_N2)
        return cls(
            samples,
            members_N2,
            torch.tensor(margins, dtype=torch.float32),
            torch.ones(count, dtype=torch.bool),
            torch.ones(count, dtype=torch.bool),
        )

    @classmethod
    def judged(cls, samples: Experience, labels: Sequence[bool]) -> PreferenceExamples:
        """Return examples of one sample each, good or bad."""
        count = len(labels)
        return cls(
            samples,
            torch.arange(count)[:, None],
            torch.zeros(count),
            torch.tensor(labels, dtype=torch.bool),
            torch.ones(count, dtype=torch.bool),
        )

    def split(self) -> PreferenceExamples:
        """Return judged responses made from pairs: chosen responses are good, rejected responses are bad."""
        return replace(
            self,
            members_NK=self.members_NK.T.reshape(-1, 1),
            margins_N=self.margins_N.repeat(2),
            desirable_N=torch.arange(2).repeat_interleave(len(self)) == 0,
            counted_N=self.counted_N.repeat(2),
        )

    def padded(self, count: int) -> PreferenceExamples:
        """Return the examples, filled up to `count` with uncounted examples."""
        missing = max(0, count - len(self))
        shortest = int(self.samples.sequence_lengths.argmin())
        filler_MK = torch.full((missing, self.members_NK.shape[1]), shortest)
        return replace(
            self,
            members_NK=torch.cat([self.members_NK, filler_MK]),
            margins_N=torch.cat([self.margins_N, torch.zeros(missing)]),
            desirable_N=torch.cat([self.desirable_N, torch.ones(missing, dtype=torch.bool)]),
            counted_N=torch.cat([self.counted_N, torch.zeros(missing, dtype=torch.bool)]),
        )

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self.members_NK)

    @property
    def lengths(self) -> Lengths:
        """Lengths of the examples."""
        return Lengths.of_examples(self.samples, self.members_NK)

    def members(self, indices_N: Tensor) -> Tensor:
        """Return the indices of the samples of some examples: all first samples, then all second samples."""
        return self.members_NK[indices_N].T.flatten()

    def loss_inputs(self, log_probs_R: Tensor, indices_N: Tensor) -> dict[str, Any]:
        """Return the loss inputs of some examples.

        Args:
            log_probs_R: log-prob of each sample of `members(indices_N)`, with gradient.
            indices_N: indices of the examples.
        """
        members_R = self.members(indices_N)

        def beside(values: Tensor) -> Tensor:
            return to_device(values.to(log_probs_R.dtype), log_probs_R.device)

        lengths_R = beside(self.samples.response_mask[members_R].sum(dim=-1))
        columns = {"{}log_probs_N": log_probs_R, "{}lengths_N": lengths_R}
        if self.ref_log_probs_R is not None:
            columns["ref_{}log_probs_N"] = beside(self.ref_log_probs_R[members_R])
        if self.members_NK.shape[1] == 1:
            desirable_N = to_device(self.desirable_N[indices_N], log_probs_R.device)
            judged = {name.format(""): column_N for name, column_N in columns.items()}
            return {**judged, "desirable_N": desirable_N, "reference_point": self.reference_point}
        inputs: dict[str, Any] = {"margins_N": beside(self.margins_N[indices_N])}
        for name, column_R in columns.items():
            inputs[name.format("chosen_")], inputs[name.format("rejected_")] = column_R.chunk(2)
        return inputs


def preference_examples(batch: PairBatch | UnpairedBatch, pad_token_id: int) -> PreferenceExamples:
    """Return the examples of a batch from the data module, which may have no rows."""
    samples = batch.samples(pad_token_id)
    if not len(samples):
        # A rank without rows keeps one sample, to take part in forward passes.
        samples = samples.placeholder(pad_token_id)
    if isinstance(batch, UnpairedBatch):
        return PreferenceExamples.judged(samples, batch.labels)
    return PreferenceExamples.pairs(samples, torch.arange(2 * len(batch.margins)).view(2, -1).T, batch.margins)


def best_against_worst(experience: Experience, num_samples: int) -> PreferenceExamples:
    """Return the pair of the best and the worst sample of each group; the first sample wins a tie.

    Groups with equal scores give no pair. Invalid samples and empty responses are left out.

    Args:
        experience: scored samples, at least one; the `num_samples` samples of a prompt are consecutive.
        num_samples: number of samples of a group.
    """
    assert experience.scores is not None
    usable_B = experience.valid & experience.response_mask.bool().any(dim=-1)
    scores_GS, usable_GS = experience.scores.view(-1, num_samples), usable_B.view(-1, num_samples)
    best_G = scores_GS.masked_fill(~usable_GS, -torch.inf).argmax(dim=1)
    worst_G = scores_GS.masked_fill(~usable_GS, torch.inf).argmin(dim=1)
    members_G2 = torch.stack([best_G, worst_G], dim=1) + num_samples * torch.arange(len(scores_GS))[:, None]
    differ_G = usable_GS.any(dim=1) & (experience.scores[members_G2[:, 0]] > experience.scores[members_G2[:, 1]])
    best_N, worst_N = members_G2[differ_G].unbind(dim=1)
    margins_N = experience.scores[best_N] - experience.scores[worst_N]
    # A rank without pairs keeps one sample, to take part in forward passes.
    samples = experience[torch.cat([best_N, worst_N])] if len(best_N) else experience[:1]
    members_N2 = torch.arange(2 * len(best_N)).view(2, -1).T
    return PreferenceExamples.pairs(samples, members_N2, margins_N.tolist())


def mismatched(examples: PreferenceExamples, pad_token_id: int, ranks: Ranks) -> Experience | None:
    """Return the prompts of judged responses, each with the response to another prompt. Collective.

    The responses of all ranks are ordered: good responses by row, then bad responses by row. A prompt gets the response
    after its own, and the last prompt gets the first response. So the assignment does not depend on the number of
    ranks.

    Returns:
        One sample for each example of this rank; None, on all ranks, if the global batch has fewer than two prompts.
    """
    samples, places = examples.samples, examples.members_NK[:, 0].tolist()
    keys = [
        (0 if desirable else 1, int(samples.groups[place]), ranks.rank, index)
        for index, (place, desirable) in enumerate(zip(places, examples.desirable_N.tolist(), strict=True))
    ]
    own = dict(zip(keys, (_response(samples, place) for place in places), strict=True))
    responses_of = {key: response for gathered in ranks.gather(own) for key, response in gathered.items()}
    if len({row for _, row, _, _ in responses_of}) < 2:
        return None
    order = sorted(responses_of)
    after = dict(zip(order, [*order[1:], order[0]], strict=True))
    responses, images = [responses_of[after[key]] for key in keys], samples.columns.get(IMAGE_INPUTS)
    other = Experience.from_responses(
        [_prompt(samples, place) for place in places],
        [ids for ids, _, _ in responses],
        pad_token_id,
        groups=[int(samples.groups[place]) for place in places],
        response_masks=[mask for _, mask, _ in responses],
        image_inputs=None if images is None else [images[place] for place in places],
    )
    if samples.sequences is not None:
        sequences = [numbers for _, _, numbers in responses]
        other.sequences, _ = pad_ragged(sequences, value=0, dtype=torch.int64, side="right")
    return other


def _prompt(samples: Experience, place: int) -> list[int]:
    ids: list[int] = samples.prompts[place, samples.prompts.shape[1] - int(samples.prompt_lengths[place]) :].tolist()
    return ids


def _response(samples: Experience, place: int) -> tuple[list[int], list[float], list[int]]:
    """Return the tokens of a response, their mask, and their sequences, if the samples have sequences."""
    length = int(samples.response_lengths[place])
    sequences = [] if samples.sequences is None else samples.sequences[place, :length].tolist()
    return samples.responses[place, :length].tolist(), samples.response_mask[place, :length].tolist(), sequences
