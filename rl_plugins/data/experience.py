"""Experience: the samples of one RL step, their tensors, and everything that rides along with them.

A trajectory's currency is token ids, log-probs and a loss mask; text is derived and never tokenised again.
Prompts are padded on the left and responses on the right, so that a sample is contiguous in `input_ids`.
Masks come from the lengths, never from token values: a padding token may also be a token that was sampled.
Indexing, slicing, boolean masks, `select`, `chunk`, `split`, `to`, `clone` and pickling are tensordict's own;
`columns` gives one Python object per sample and follows each of them, `meta` is carried unchanged.

Axes: `B` samples, `P` longest prompt, `T` longest response.
"""

# TensorClass reads the annotations, so they are not postponed.
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from tensordict import TensorClass
from torch import Tensor

from rl_plugins.data.merging import merge
from rl_plugins.data.padding import fit_width, pad_ragged
from rl_plugins.data.sample_columns import Columns, Rows

COMPUTED_FIELDS = (
    "token_level_rewards", "old_log_probs", "ref_log_probs", "teacher_log_probs", "teacher_top_ids",
    "teacher_top_log_probs", "entropy", "sum_pi_squared", "values", "process_rewards",
    "rollout_weights", "advantages", "returns", "loss_mask", "selected",
)  # fmt: skip
TOKEN_FIELDS = ("responses", "response_mask", "rollout_log_probs", "policy_versions", *COMPUTED_FIELDS)
SAMPLE_FIELDS = (
    "prompt_lengths", "response_lengths", "groups", "valid", "scores", "baseline_scores",
    "component_scores",
)  # fmt: skip
TENSOR_FIELDS = ("prompts", *TOKEN_FIELDS, *SAMPLE_FIELDS)


# `shadow` lets the field `values` hide the mapping method of that name.
class Experience(TensorClass, shadow=True):
    """A batch of B samples, `batch_size` [B].

    Attributes:
        prompts: int64 [B, P], padded on the left.
        prompt_lengths: int64 [B], tokens of each prompt.
        responses: int64 [B, T], padded on the right.
        response_lengths: int64 [B], tokens of each response, observations included.
        response_mask: float32 [B, T], 1 where the policy sampled the token and shall learn from it, 0 on
            padding and on observation tokens.
        rollout_log_probs: float32 [B, T], log-probs in nats as the rollout engine reported them.
        policy_versions: int64 [B, T], the number of steps behind the policy that sampled each token.
        groups: int64 [B], equal for the samples of one prompt.
        valid: bool [B], False where the reward failed or the row is padding: excluded from every statistic.
        rows: Python objects of these samples and of others: give a mapping of sequences of length B, read a list with
            `experience.columns["data_source"]`, add one with `set_column`.
        row: int64 [B], the row of each sample in `rows`.
        meta: one mapping for the whole batch.
        scores: float32 [B], the reward of the whole sample. None until computed, and so are all that follow.
        baseline_scores: float32 [B], the reward of a greedy response to the same prompt.
        component_scores: float32 [B, K], the rewards that `scores` is made of.
        token_level_rewards: float32 [B, T], the reward at each token, penalties included.
        old_log_probs: float32 [B, T], log-probs under the policy at the start of the update.
        ref_log_probs: float32 [B, T], log-probs under the reference model.
        teacher_log_probs: float32 [B, T], log-probs under a teacher.
        teacher_top_ids: int64 [B, T, K], the tokens that the teacher finds most likely, the likeliest first.
        teacher_top_log_probs: float32 [B, T, K], their log-probs under the teacher.
        entropy: float32 [B, T], entropy in nats of the policy's distribution at the start of the update.
        sum_pi_squared: float32 [B, T], sum of the squared probabilities of that distribution.
        values: float32 [B, T], the critic's value before each token.
        process_rewards: float32 [B, T], what a process reward model gives for each token.
        rollout_weights: float32 [B, T], importance weights for the gap between trainer and sampler.
        advantages: float32 [B, T].
        returns: float32 [B, T], the critic's target.
        loss_mask: float32 [B, T], 0 on tokens whose policy loss is switched off, though they count.
        selected: bool [B, T], tokens that the policy loss treats apart.
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
    meta: Any = None
    scores: Tensor | None = None
    baseline_scores: Tensor | None = None
    component_scores: Tensor | None = None
    token_level_rewards: Tensor | None = None
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    teacher_log_probs: Tensor | None = None
    teacher_top_ids: Tensor | None = None
    teacher_top_log_probs: Tensor | None = None
    entropy: Tensor | None = None
    sum_pi_squared: Tensor | None = None
    values: Tensor | None = None  # type: ignore[assignment]
    process_rewards: Tensor | None = None
    rollout_weights: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None
    loss_mask: Tensor | None = None
    selected: Tensor | None = None

    def __post_init__(self) -> None:
        """Turn plain columns into a form that follows indexing; an Experience always has rows and meta."""
        if not isinstance(self.rows, Rows):
            self._hold(self.rows or {})
        if self.meta is None:
            self.meta = {}

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
        meta: Mapping[str, Any] | None = None,
    ) -> Self:
        """Pad ragged samples into an Experience on the CPU.

        Args:
            prompt_ids: B lists of token ids.
            responses: B lists of token ids, the end-of-sequence token included where it was sampled.
            rollout_log_probs: B lists, one log-prob per response token (anything on observation tokens).
            groups: B numbers, equal for the samples of one prompt.
            policy_versions: one number for all tokens, or B lists as long as the responses.
            columns: sequences of length B.
            pad_token_id: what fills the padding; nothing reads it.
            response_masks: B lists of 0 and 1 as long as the responses; all ones by default.
            meta: a mapping that rides along.

        Raises:
            ValueError: the lists disagree about the number of samples, or about the length of one response.
        """
        count = len(prompt_ids)
        versions: Sequence[Sequence[float]]
        if isinstance(policy_versions, int):
            versions = [[policy_versions] * len(response) for response in responses]
        else:
            versions = policy_versions
        for name, values in {"responses": responses, "groups": groups}.items():
            if len(values) != count:
                raise ValueError(f"{name} has {len(values)} entries for {count} prompts.")
        per_token = {"log-probs": rollout_log_probs, "versions": versions, "mask": response_masks or responses}
        for name, ragged in per_token.items():
            ours, theirs = [len(row) for row in responses], [len(row) for row in ragged]
            if ours != theirs:
                raise ValueError(f"responses and their {name} differ in length: {ours} and {theirs}.")
        prompts, prompt_lengths = pad_ragged(prompt_ids, value=pad_token_id, dtype=torch.int64, side="left")
        tokens_BT, lengths = pad_ragged(responses, value=pad_token_id, dtype=torch.int64, side="right")
        if response_masks is None:
            mask_BT = (torch.arange(tokens_BT.shape[1]) < lengths[:, None]).float()
        else:
            mask_BT, _ = pad_ragged(response_masks, value=0, dtype=torch.float32, side="right")
        return cls(
            prompts=prompts,
            prompt_lengths=prompt_lengths,
            responses=tokens_BT,
            response_lengths=lengths,
            response_mask=mask_BT,
            rollout_log_probs=pad_ragged(rollout_log_probs, value=0, dtype=torch.float32, side="right")[0],
            policy_versions=pad_ragged(versions, value=0, dtype=torch.int64, side="right")[0],
            groups=torch.tensor(groups, dtype=torch.int64),
            valid=torch.ones(count, dtype=torch.bool),
            rows=dict(columns or {}),
            meta=dict(meta or {}),
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
    ) -> Self:
        """Responses that are given, not sampled, in the form of samples; each is a group of its own by default."""
        return cls.from_samples(
            prompt_ids=prompt_ids,
            responses=responses,
            rollout_log_probs=[[0.0] * len(response) for response in responses],
            groups=range(len(responses)) if groups is None else groups,
            policy_versions=0,
            pad_token_id=pad_token_id,
            response_masks=response_masks,
        )

    @property
    def columns(self) -> Columns:
        """One Python object per sample under each name, as lists."""
        # They may have been left out by a `select`.
        return Columns(Rows({}, 0), self.groups[:0]) if self.row is None else Columns(self.rows, self.row)

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
        """Whose response was cut off at the length limit, bool [B]; from the column `finish_reason`."""
        return torch.tensor([reason == "length" for reason in self.columns["finish_reason"]], dtype=torch.bool)

    @property
    def position_ids(self) -> Tensor:
        """Position of each token in its sample, int64 [B, P+T]; 0 before it, its last one after it."""
        last = (self.sequence_lengths - 1).clamp(min=0)
        return self._offsets().clamp(min=0).minimum(last[:, None])

    @property
    def attention_mask(self) -> Tensor:
        """True on the tokens of prompt and response, bool [B, P+T]; from the lengths alone."""
        offsets = self._offsets()
        return (offsets >= 0) & (offsets < self.sequence_lengths[:, None])

    def _offsets(self) -> Tensor:
        width = self.prompts.shape[1] + self.responses.shape[1]
        start = self.prompts.shape[1] - self.prompt_lengths
        return torch.arange(width, device=start.device) - start[:, None]

    def set_column(self, name: str, values: Sequence[Any]) -> None:
        """Add or replace a column of B Python objects, in place."""
        self._hold({**self.columns, name: values})

    def compact(self) -> Self:
        """The same samples without the Python objects of others: to be sent or kept."""
        compacted = self.copy()
        compacted._hold(self.columns)
        return compacted

    def _hold(self, columns: Mapping[str, Sequence[Any]]) -> None:
        """Have these columns, and rows that no other batch shares."""
        self.rows, self.row = Rows(columns, len(self)), torch.arange(len(self))

    def trimmed(self) -> Self:
        """Return the batch without the columns that are padding in every row of it."""
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
            ValueError: no parts; a field or a column is there in some parts only; or a key of `meta` differs.
        """
        if not parts:
            raise ValueError("there is nothing to concatenate.")
        first, *others = parts
        for other in others:
            odd = sorted(_names(first) ^ _names(other)) or sorted(set(first.columns) ^ set(other.columns))
            if odd:
                raise ValueError(f"{odd[0]!r} is there in some of the parts only.")
        meta: dict[str, Any] = {}
        for part in parts:
            merge("meta", meta, part.meta or {})
        prompt_width = max(part.prompts.shape[1] for part in parts)
        response_width = max(part.responses.shape[1] for part in parts)
        joined = _cat([part._resized(prompt_width, response_width) for part in parts])
        joined.meta = meta
        return joined

    def union(self, other: "Experience") -> Self:
        """Return this batch with the fields, columns and meta that only `other` has.

        Raises:
            ValueError: the batches differ in size, or in the values of a common field, column or meta key.
        """
        if self.batch_size != other.batch_size:
            raise ValueError(f"a batch of {len(self)} samples cannot take fields of one of {len(other)}.")
        fields = {name: getattr(self, name) for name in _names(self)}
        merge("field", fields, {name: getattr(other, name) for name in _names(other)})
        columns, meta = dict(self.columns), dict(self.meta or {})
        merge("column", columns, other.columns)
        merge("meta", meta, other.meta or {})
        return type(self)(**fields, rows=columns, meta=meta, batch_size=self.batch_size)

    def repeat(self, n: int, interleave: bool = True) -> Self:  # type: ignore[override]
        """Return each sample `n` times: a a b b when interleaved, a b a b when not."""
        return self.repeat_interleave(n, dim=0) if interleave else _cat([self] * n)

    def reorder(self, indices: Tensor | np.ndarray | Sequence[int]) -> Self:
        """Return the samples in the order of `indices` (integers; an index may be absent or appear twice)."""
        return self[torch.as_tensor(indices, dtype=torch.int64)]

    def pad_to_multiple(self, k: int) -> tuple[Self, int]:
        """Append copies of the first samples until k divides B; return the batch and how many were appended.

        The copies are not `valid` and their `response_mask` is zero, so they neither learn nor count.
        """
        extra = -len(self) % k
        if extra == 0:
            return self, 0
        padding = self[torch.arange(extra) % len(self)]
        padding.valid = torch.zeros_like(padding.valid)
        padding.response_mask = torch.zeros_like(padding.response_mask)
        return _cat([self, padding]), extra

    def unpad(self, extra: int) -> Self:
        """Drop the last `extra` samples: the inverse of `pad_to_multiple`."""
        return self[: len(self) - extra]

    def save(self, path: str | os.PathLike[str]) -> None:  # type: ignore[override]
        """Write everything to one file, which appears when complete; columns and `meta` are pickled."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
        # A clone, because torch writes the whole storage behind a slice.
        fields = {name: getattr(self, name).clone() for name in _names(self)}
        content = fields | {"rows": dict(self.columns), "meta": self.meta, "batch_size": [len(self)]}
        try:
            torch.save(content, temporary)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what `save` wrote, onto the CPU. The file is unpickled: load only files that you trust."""
        return cls(**torch.load(path, map_location="cpu", weights_only=False))


def _cat(parts: "Sequence[Experience]") -> Any:
    """Batches of the same fields, columns, widths and meta, one behind the other."""
    first = parts[0]
    fields: dict[str, Any] = {name: torch.cat([getattr(part, name) for part in parts]) for name in _names(first)}
    columns = {name: [value for part in parts for value in part.columns[name]] for name in first.columns}
    return type(first)(**fields, rows=columns, meta=first.meta, batch_size=[sum(map(len, parts))])


def _names(experience: Experience) -> set[str]:
    return {name for name in TENSOR_FIELDS if getattr(experience, name) is not None}
