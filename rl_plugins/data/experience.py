"""Experience: the samples of one RL step with their tensors and Python objects.

A sample is token ids, log-probs and a loss mask; text is decoded from the token ids and never tokenised again. Prompts
are padded on the left and responses on the right, so a sample is contiguous in `input_ids`. Masks come from the
lengths, never from token values: a policy may sample the padding token.

Indexing, slicing, boolean masks, `select`, `chunk`, `split`, `to`, `clone` and pickling are tensordict's own. `columns`
holds one Python object per sample and follows every such operation.

Axes: `B` samples, `P` longest prompt, `T` longest response.
"""

# TensorClass reads the annotations, so they are not postponed.
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypedDict

import numpy as np
import torch
from tensordict import TensorClass
from torch import Tensor
from typing_extensions import override

from rl_plugins.data.images import IMAGE_INPUTS, ImageInputs
from rl_plugins.data.padding import fit_width, pad_ragged
from rl_plugins.plain_file import load_plain, save_plain
from rl_plugins.whole_file import write_whole

COMPUTED_FIELDS = (
    "token_level_rewards", "old_log_probs", "ref_log_probs", "teacher_log_probs", "teacher_top_ids",
    "teacher_top_log_probs", "teacher_top_weights", "entropy", "sum_pi_squared", "values", "cost_values",
    "process_rewards", "token_level_scores", "turns", "states", "sequences", "rollout_weights", "advantages", "returns",
    "cost_returns", "loss_mask", "selected",
)  # fmt: skip
TOKEN_FIELDS = ("responses", "response_mask", "rollout_log_probs", "policy_versions", *COMPUTED_FIELDS)
SAMPLE_FIELDS = (
    "prompt_lengths", "response_lengths", "groups", "valid", "scores", "costs", "baseline_scores",
    "component_scores", "is_positive", "rejected",
)  # fmt: skip
TENSOR_FIELDS = ("prompts", *TOKEN_FIELDS, *SAMPLE_FIELDS)
ROUTED_EXPERTS = "routed_experts"
"""Column with the experts of the tokens of each sample, prompt included [tokens, L, K]; see `RouterReplay`."""


class ForwardInputs(TypedDict):
    """Arguments of a forward pass over responses; see `rl_plugins.models.log_probs.response_log_probs`."""

    input_ids_BS: Tensor
    attention_mask_BS: Tensor
    position_ids_BS: Tensor
    response_width: int
    image_inputs_B: Sequence[ImageInputs | None] | None


class SharedColumns:
    """Python objects by name, one per row; batches cut from one another share the rows.

    Slicing and reordering a batch must not touch every object. The objects stay in place, and each sample holds the
    number of its row.

    Args:
        columns: sequences of equal length; copied, and never changed afterwards.
        count: number of rows.

    Raises:
        ValueError: a column has another length than `count`.
    """

    __slots__ = ("columns",)

    def __init__(self, columns: Mapping[str, Sequence[Any]], count: int) -> None:
        for name, values in columns.items():
            if len(values) != count:
                raise ValueError(f"column {name!r} has {len(values)} entries for {count} samples")
        self.columns = {name: list(values) for name, values in columns.items()}


class SampleColumns(Mapping[str, list[Any]]):
    """Columns of one batch: a list with one Python object per sample under each name.

    Args:
        shared: columns of the batch and of other batches.
        row_B: int64 [B], row of each sample in the shared columns.
    """

    def __init__(self, shared: SharedColumns, row_B: Tensor) -> None:
        self._columns, self._row_B = shared.columns, row_B.tolist()

    @override
    def __getitem__(self, name: str) -> list[Any]:
        column = self._columns[name]
        return [column[row] for row in self._row_B]

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    @override
    def __len__(self) -> int:
        return len(self._columns)


# `shadow` lets the field `values` hide the mapping method of that name.
class Experience(TensorClass, shadow=True):
    """A batch of B samples, `batch_size` [B].

    Attributes:
        prompts: int64 [B, P], padded on the left.
        prompt_lengths: int64 [B], tokens of each prompt.
        responses: int64 [B, T], padded on the right.
        response_lengths: int64 [B], tokens of each response, observations included.
        response_mask: float32 [B, T], 1 on tokens sampled by the policy and to be learnt, 0 on padding and observation
            tokens.
        rollout_log_probs: float32 [B, T], log-probs in nats reported by the rollout engine.
        policy_versions: int64 [B, T], version of the policy that sampled each token: the number of steps before it.
        groups: int64 [B], equal for the samples of one prompt.
        valid: bool [B], False if the reward failed or the row is padding: excluded from every statistic.
        rows: storage of `columns`: Python objects, possibly shared with other batches. Pass a mapping of sequences of
            length B; read a list with `experience.columns["data_source"]`, add a list with `set_column`.
        row: int64 [B], row of each sample in `rows`.
        scores: float32 [B], reward of the whole sample. None until computed, like all fields below.
        costs: float32 [B], cost of the whole sample, for a bound on the mean cost.
        baseline_scores: float32 [B], reward of a greedy response to the same prompt.
        component_scores: float32 [B, K], components of `scores`.
        is_positive: bool [B], True if the score before shaping is a success (`LossModifiers.positive_above`).
        rejected: bool [B], True if a rollout correction rejected every token of the sample.
        token_level_rewards: float32 [B, T], reward at each token, penalties included.
        old_log_probs: float32 [B, T], log-probs under the policy before the first optimizer step of the RL step. A loss
            that compares with the sampler gets `rollout_log_probs` instead. None if no part of the step needs them.
        ref_log_probs: float32 [B, T], log-probs under the reference model.
        teacher_log_probs: float32 [B, T], log-probs under the teacher, or their weighted sum over teachers.
        teacher_top_ids: int64 [B, T, K], the teacher's most likely tokens, the likeliest first; the tokens of weighted
            teachers side by side.
        teacher_top_log_probs: float32 [B, T, K], log-probs of `teacher_top_ids` under their teacher.
        teacher_top_weights: float32 [B, T, K], weight of the teacher of each token in `teacher_top_ids`.
        entropy: float32 [B, T], entropy in nats of the policy's distribution at the start of the update.
        sum_pi_squared: float32 [B, T], sum of the squared probabilities of the same distribution.
        values: float32 [B, T], the critic's value before each token.
        cost_values: float32 [B, T], the cost critic's value before each token.
        process_rewards: float32 [B, T], a process reward model's reward of each token.
        token_level_scores: float32 [B, T], the score before shaping, divided among the tokens: rewards of tokens,
            rewards of turns at their last tokens, and the rest of the score at the last token.
        turns: int64 [B, T], number of the turn of each token.
        states: int64 [B, T], number of the state in which the turn of each token begins.
        sequences: int64 [B, T], number of the sequence of each token: 0 continues the prompt, and every other number
            is a sequence with a prompt of its own among the response tokens. None if all responses continue the prompt.
        rollout_weights: float32 [B, T], importance weights for the gap between trainer and sampler.
        advantages: float32 [B, T], advantage of each token.
        returns: float32 [B, T], the critic's target.
        cost_returns: float32 [B, T], the cost critic's target.
        loss_mask: float32 [B, T], 0 on tokens without a policy loss; averages still count such tokens.
        selected: bool [B, T], tokens with a loss of their own, as the policy loss defines.
    """

    prompts: Tensor
    prompt_lengths: Tensor
    responses: Tensor
    response_lengths: Tensor
    response_mask: Tensor
    rollout_log_probs: Tensor
    policy_versions: Tensor
    groups: Tensor
    valid: Tensor
    rows: Any = None
    row: Tensor | None = None
    scores: Tensor | None = None
    costs: Tensor | None = None
    baseline_scores: Tensor | None = None
    component_scores: Tensor | None = None
    is_positive: Tensor | None = None
    rejected: Tensor | None = None
    token_level_rewards: Tensor | None = None
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    teacher_log_probs: Tensor | None = None
    teacher_top_ids: Tensor | None = None
    teacher_top_log_probs: Tensor | None = None
    teacher_top_weights: Tensor | None = None
    entropy: Tensor | None = None
    sum_pi_squared: Tensor | None = None
    values: Tensor | None = None  # type: ignore[assignment]
    cost_values: Tensor | None = None
    process_rewards: Tensor | None = None
    token_level_scores: Tensor | None = None
    turns: Tensor | None = None
    states: Tensor | None = None
    sequences: Tensor | None = None
    rollout_weights: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None
    cost_returns: Tensor | None = None
    loss_mask: Tensor | None = None
    selected: Tensor | None = None

    def __post_init__(self) -> None:
        """Put plain columns into a form indexing can follow."""
        if not isinstance(self.rows, SharedColumns):
            self._set_columns(self.rows or {})

    @classmethod
    def from_samples(
        cls,
        prompt_ids: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        rollout_log_probs: Sequence[Sequence[float]],
        groups: Sequence[int],
        policy_versions: int | Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]] | None = None,
        pad_token_id: int = 0,
        *,
        response_masks: Sequence[Sequence[float]] | None = None,
    ) -> Self:
        """Pad ragged samples into an Experience on the CPU.

        Args:
            prompt_ids: B lists of token ids.
            responses: B lists of token ids, with the end-of-sequence token if the policy sampled one.
            rollout_log_probs: B lists, one log-prob per response token (any number on observation tokens).
            groups: B numbers, equal for the samples of one prompt.
            policy_versions: one number for all tokens, or B lists as long as the responses.
            columns: sequences of length B.
            pad_token_id: token id of the padding; no function reads the padding.
            response_masks: B lists of 0 and 1 as long as the responses; all ones by default.

        Raises:
            ValueError: the lists differ in the number of samples, or in the length of a response.
        """
        count = len(prompt_ids)
        versions: Sequence[Sequence[float]]
        if isinstance(policy_versions, int):
            versions = [[policy_versions] * len(response) for response in responses]
        else:
            versions = policy_versions
        for name, values in {"responses": responses, "groups": groups}.items():
            if len(values) != count:
                raise ValueError(f"{name} has {len(values)} entries for {count} prompts")
        per_token = {"log-probs": rollout_log_probs, "versions": versions, "mask": response_masks or responses}
        for name, ragged in per_token.items():
            expected, lengths = [len(row) for row in responses], [len(row) for row in ragged]
            if expected != lengths:
                raise ValueError(f"responses and their {name} differ in length: {expected} and {lengths}")
        prompts, prompt_lengths = pad_ragged(prompt_ids, value=pad_token_id, dtype=torch.int64, side="left")
        tokens_BT, response_lengths = pad_ragged(responses, value=pad_token_id, dtype=torch.int64, side="right")
        if response_masks is None:
            mask_BT = (torch.arange(tokens_BT.shape[1]) < response_lengths[:, None]).float()
        else:
            mask_BT, _ = pad_ragged(response_masks, value=0, dtype=torch.float32, side="right")
        return cls(
            prompts=prompts,
            prompt_lengths=prompt_lengths,
            responses=tokens_BT,
            response_lengths=response_lengths,
            response_mask=mask_BT,
            rollout_log_probs=pad_ragged(rollout_log_probs, value=0, dtype=torch.float32, side="right")[0],
            policy_versions=pad_ragged(versions, value=0, dtype=torch.int64, side="right")[0],
            groups=torch.tensor(groups, dtype=torch.int64),
            valid=torch.ones(count, dtype=torch.bool),
            rows=dict(columns or {}),
            batch_size=[count],
        )

    @classmethod
    def from_responses(
        cls,
        prompt_ids: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        pad_token_id: int,
        *,
        groups: Sequence[int] | None = None,
        response_masks: Sequence[Sequence[float]] | None = None,
        image_inputs: Sequence[ImageInputs | None] | None = None,
    ) -> Self:
        """Return given responses in the form of samples; by default, each response is a group of its own."""
        return cls.from_samples(
            prompt_ids=prompt_ids,
            responses=responses,
            rollout_log_probs=[[0.0] * len(response) for response in responses],
            groups=range(len(responses)) if groups is None else groups,
            policy_versions=0,
            pad_token_id=pad_token_id,
            response_masks=response_masks,
            columns=None if image_inputs is None else {IMAGE_INPUTS: image_inputs},
        )

    def placeholder(self, pad_token_id: int) -> Self:
        """Return one sample of two tokens, for the forward pass of a rank that has no samples left.

        If these samples may have images, the one sample has a column for images, without an image.
        """
        images = [None] if IMAGE_INPUTS in self.columns else None
        return self.from_responses([[pad_token_id]], [[pad_token_id]], pad_token_id, image_inputs=images)

    @property
    def columns(self) -> SampleColumns:
        """Lists of Python objects by name, one object per sample."""
        # A `select` may have left out `row` and `rows`.
        if self.row is None:
            return SampleColumns(SharedColumns({}, 0), self.groups[:0])
        return SampleColumns(self.rows, self.row)

    @property
    def input_ids(self) -> Tensor:
        """Prompt and response tokens, int64 [B, P+T]."""
        return torch.cat([self.prompts, self.responses], dim=1)

    @property
    def sequence_lengths(self) -> Tensor:
        """Tokens of prompt and response together, int64 [B]."""
        return self.prompt_lengths + self.response_lengths

    @property
    def truncated(self) -> Tensor:
        """True for a response cut off at the length limit, bool [B]; from the column `finish_reason`."""
        return torch.tensor([reason == "length" for reason in self.columns["finish_reason"]], dtype=torch.bool)

    @property
    def position_ids(self) -> Tensor:
        """Position of each token in its sample, int64 [B, P+T]; 0 before the sample, the last position after it."""
        last = (self.sequence_lengths - 1).clamp(min=0)
        return self._offsets().clamp(min=0).minimum(last[:, None])

    @property
    def attention_mask(self) -> Tensor:
        """True on the tokens of prompt and response, bool [B, P+T]; from the lengths alone."""
        offsets = self._offsets()
        return (offsets >= 0) & (offsets < self.sequence_lengths[:, None])

    @property
    def forward_inputs(self) -> ForwardInputs:
        """Arguments of a forward pass over the responses."""
        return {
            "input_ids_BS": self.input_ids,
            "attention_mask_BS": self.attention_mask,
            "position_ids_BS": self.position_ids,
            "response_width": self.responses.shape[1],
            "image_inputs_B": self.columns.get(IMAGE_INPUTS),
        }

    def _offsets(self) -> Tensor:
        width = self.prompts.shape[1] + self.responses.shape[1]
        start = self.prompts.shape[1] - self.prompt_lengths
        return torch.arange(width, device=start.device) - start[:, None]

    def named_tensors(self) -> dict[str, Tensor | None]:
        """Return the inputs of algorithms by name, such as `scores_B`; see `rl_plugins.algorithms.inputs`."""
        return {
            "scores_B": self.scores,
            "costs_B": self.costs,
            "baseline_rewards_B": self.baseline_scores,
            "component_rewards_BK": self.component_scores,
            "is_positive_B": self.is_positive,
            "groups_B": self.groups,
            "valid_B": self.valid,
            "response_lengths_B": self.response_lengths,
            "response_mask_BT": self.response_mask,
            "rollout_log_probs_BT": self.rollout_log_probs,
            "old_log_probs_BT": self.old_log_probs,
            "ref_log_probs_BT": self.ref_log_probs,
            "teacher_log_probs_BT": self.teacher_log_probs,
            "teacher_top_log_probs_BTK": self.teacher_top_log_probs,
            "teacher_top_weights_BTK": self.teacher_top_weights,
            "entropy_BT": self.entropy,
            "sum_pi_squared_BT": self.sum_pi_squared,
            "values_BT": self.values,
            "cost_values_BT": self.cost_values,
            "process_rewards_BT": self.process_rewards,
            "token_level_scores_BT": self.token_level_scores,
            "turns_BT": self.turns,
            "states_BT": self.states,
            "rollout_weights_BT": self.rollout_weights,
            "advantages_BT": self.advantages,
            "returns_BT": self.returns,
            "loss_mask_BT": self.loss_mask,
            "selected_BT": self.selected,
        }

    def set_column(self, name: str, values: Sequence[Any]) -> None:
        """Add or replace a column of B Python objects, in place."""
        self._set_columns({**self.columns, name: values})

    def compact(self) -> Self:
        """Return the batch without the Python objects of other samples, for sending and storing."""
        compacted = self.copy()
        compacted._set_columns(self.columns)
        return compacted

    def _set_columns(self, columns: Mapping[str, Sequence[Any]]) -> None:
        """Replace all columns by columns of this batch alone."""
        self.rows, self.row = SharedColumns(columns, len(self)), torch.arange(len(self))

    def trimmed(self) -> Self:
        """Return the batch without token positions that are padding in every sample."""
        if len(self) == 0:
            return self
        return self._resized(int(self.prompt_lengths.max()), int(self.response_lengths.max()))

    def _resized(self, prompt_width: int, response_width: int) -> Self:
        resized = self.copy()
        for name in ("prompts", *TOKEN_FIELDS):
            value = getattr(self, name)
            if value is not None:
                left = name == "prompts"
                width = prompt_width if left else response_width
                setattr(resized, name, fit_width(value, width, "left" if left else "right"))
        return resized

    @classmethod
    def concat(cls, parts: "Sequence[Experience]") -> Self:
        """Join batches along B, padded (with zeros) to the widest prompt and the widest response.

        Raises:
            ValueError: there are no parts, or only some parts have a field or a column.
        """
        if not parts:
            raise ValueError("there is nothing to concatenate: pass at least one batch")
        first, *others = parts
        for other in others:
            unshared = sorted(_names(first) ^ _names(other)) or sorted(set(first.columns) ^ set(other.columns))
            if unshared:
                raise ValueError(f"only some of the parts have {unshared[0]!r}")
        prompt_width = max(part.prompts.shape[1] for part in parts)
        response_width = max(part.responses.shape[1] for part in parts)
        resized = [part._resized(prompt_width, response_width) for part in parts]
        fields: dict[str, Any] = {name: torch.cat([getattr(part, name) for part in resized]) for name in _names(first)}
        columns = {name: [value for part in parts for value in part.columns[name]] for name in first.columns}
        return cls(**fields, rows=columns, batch_size=[sum(map(len, parts))])

    def reorder(self, indices: Tensor | np.ndarray | Sequence[int]) -> Self:
        """Return the samples at `indices` (integers), in their order; an index may be absent or appear twice."""
        return self[torch.as_tensor(indices, dtype=torch.int64)]

    def save(self, path: str | os.PathLike[str], records: Sequence[type] = ()) -> None:  # type: ignore[override]
        """Write the batch to one file, which gets its name when complete; see `save_plain` for `records`."""
        target = Path(path)
        # A clone, because torch writes the whole storage behind a slice.
        fields = {name: getattr(self, name).clone() for name in _names(self)}
        content = fields | {"rows": dict(self.columns), "batch_size": [len(self)]}
        write_whole(target, lambda file: save_plain(content, file, records=records))

    @classmethod
    def load(cls, path: str | os.PathLike[str], records: Sequence[type] = ()) -> Self:
        """Read a file of `save` onto the CPU, as data; see `load_plain`."""
        return cls(**load_plain(Path(path), records=records))


def computed(field: Tensor | None) -> Tensor:
    """Return a field that an earlier part of the step has computed, and assert that the field is set."""
    assert field is not None, "the parts of the step ran out of order"
    return field


def _names(experience: Experience) -> set[str]:
    return {name for name in TENSOR_FIELDS if getattr(experience, name) is not None}
