"""The rollout engine protocol and the records that cross it.

An engine samples from its own copy of the policy. `update_weights` replaces the copy, drops every cached prefix and
names the new policy version, in one call, because a cache that outlives its weights is a silent error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, Protocol

import numpy as np

from rl_plugins.errors import ConfigError
from rl_plugins.memory import MemoryChange
from rl_plugins.weights.source import WeightSource


@dataclass(frozen=True)
class SamplingConfig:
    """How responses are drawn. Log-probs are those of the distribution really sampled from (after temperature).

    Attributes:
        max_tokens: longest response, in tokens.
        num_samples: responses per prompt.
        temperature: 0 is greedy.
        top_p: nucleus; 1 keeps all.
        top_k: most likely tokens kept; -1 keeps all.
        stop_token_ids: tokens that end a response; the token itself belongs to the response.
        stop: strings that end a response.
    """

    max_tokens: int
    num_samples: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what no engine could sample.

        Raises:
            ConfigError: a value outside its range.
        """
        for name, value, good in (
            ("max_tokens", self.max_tokens, self.max_tokens >= 1),
            ("num_samples", self.num_samples, self.num_samples >= 1),
            ("temperature", self.temperature, self.temperature >= 0),
            ("top_p", self.top_p, 0 < self.top_p <= 1),
            ("top_k", self.top_k, self.top_k == -1 or self.top_k >= 1),
        ):
            if not good:
                raise ConfigError(f"sampling.{name}={value} is out of range; see SamplingConfig for what it means")


@dataclass(frozen=True)
class Generations:
    """Responses to a list of prompts, `num_samples` in a row for each prompt, stored flat.

    Attributes:
        token_ids: int64 [N], the tokens of all responses, one after the other.
        log_probs: float32 [N], of those tokens when they were sampled.
        policy_versions: int64 [N], version of the weights that sampled each token.
        lengths: int64 [R], tokens of each of the R responses.
        finish_reasons: [R], `stop`, `length` or `abort`.
        sampled: bool [N], False on the tokens of what an environment said; None where nobody else speaks.
        endings: [R], how each conversation with an environment ended; empty where there was none.
    """

    token_ids: np.ndarray
    log_probs: np.ndarray
    policy_versions: np.ndarray
    lengths: np.ndarray
    finish_reasons: list[str] = field(default_factory=list)
    sampled: np.ndarray | None = None
    endings: list[Any] = field(default_factory=list)

    def responses(self) -> list[list[int]]:
        """Token ids of each response."""
        return self._split(self.token_ids)

    def response_log_probs(self) -> list[list[float]]:
        """Log-probs of each response."""
        return self._split(self.log_probs)

    def response_versions(self) -> list[list[int]]:
        """Policy versions of each response."""
        return self._split(self.policy_versions)

    def response_masks(self) -> list[list[float]] | None:
        """1 on the tokens of each response that the policy sampled; None where it sampled them all."""
        return None if self.sampled is None else self._split(self.sampled.astype(np.float32))

    def _split(self, values_N: np.ndarray) -> list[list[Any]]:
        return [part.tolist() for part in np.split(values_N, np.cumsum(self.lengths))[:-1]]

    @classmethod
    def from_responses(
        cls,
        responses: Sequence[Sequence[int]],
        log_probs: Sequence[Sequence[float]],
        finish_reasons: Sequence[str],
        policy_versions: int | Sequence[Sequence[int]],
    ) -> Generations:
        """Flatten ragged lists; one version stands for all tokens."""
        tokens_N = np.fromiter((t for r in responses for t in r), dtype=np.int64)
        return cls(
            token_ids=tokens_N,
            log_probs=np.fromiter((p for r in log_probs for p in r), dtype=np.float32),
            policy_versions=np.full_like(tokens_N, policy_versions)
            if isinstance(policy_versions, int)
            else np.fromiter((v for r in policy_versions for v in r), dtype=np.int64),
            lengths=np.fromiter((len(r) for r in responses), dtype=np.int64),
            finish_reasons=list(finish_reasons),
        )

    def split(self, sizes: Sequence[int]) -> list[Generations]:
        """Cut into parts of so many responses each."""
        rows = [0, *accumulate(sizes)]
        starts = np.concatenate([[0], np.cumsum(self.lengths)])[rows].tolist()
        return [
            Generations(
                self.token_ids[start:stop],
                self.log_probs[start:stop],
                self.policy_versions[start:stop],
                self.lengths[row:end],
                self.finish_reasons[row:end],
                None if self.sampled is None else self.sampled[start:stop],
                self.endings[row:end],
            )
            for (start, stop), (row, end) in zip(pairwise(starts), pairwise(rows), strict=True)
        ]

    @classmethod
    def concat(cls, parts: Sequence[Generations]) -> Generations:
        """The responses of several, one behind the other."""
        return cls(
            token_ids=np.concatenate([part.token_ids for part in parts]),
            log_probs=np.concatenate([part.log_probs for part in parts]),
            policy_versions=np.concatenate([part.policy_versions for part in parts]),
            lengths=np.concatenate([part.lengths for part in parts]),
            finish_reasons=[reason for part in parts for reason in part.finish_reasons],
            sampled=np.concatenate(masks) if (masks := [p.sampled for p in parts if p.sampled is not None]) else None,
            endings=[ending for part in parts for ending in part.endings],
        )


@dataclass(frozen=True)
class RemoteSamples:
    """Responses that an engine in another process keeps until a rank, any one, fetches them.

    Attributes:
        engine: its number.
        rank: the one that had them sampled.
        ticket: that it gave them.
        lengths: int64 [R], tokens of each of the R responses.
    """

    engine: int
    rank: int
    ticket: int
    lengths: np.ndarray


@dataclass(frozen=True)
class GroupRequest:
    """A prompt to be sampled from some time.

    Attributes:
        ticket: the rank's own number for it.
        prompt: token ids.
        seed: the same seed, weights and prompt give the same responses.
        max_tokens: longest response, where it is less than that of the sampling.
    """

    ticket: int
    prompt: list[int]
    seed: int
    max_tokens: int | None = None

    def shortened(self, sampling: SamplingConfig) -> SamplingConfig:
        """How this group is sampled."""
        return sampling if self.max_tokens is None else replace(sampling, max_tokens=self.max_tokens)


class GroupSampler(Protocol):
    """Samples groups of responses, some time."""

    def submit(self, requests: Sequence[GroupRequest], sampling: SamplingConfig, *, together: bool = True) -> None:
        """Have groups of `num_samples` responses sampled; does not wait for them.

        Args:
            requests: this rank's.
            sampling: how to sample.
            together: every rank calls this, and all their groups begin at once: then what is sampled does not depend
                on who came first. Otherwise the groups begin now.
        """

    def collect(self, required: Sequence[int], count: int) -> Mapping[int, Generations | RemoteSamples]:
        """Wait for groups that this rank has submitted; returns those that are finished, by their tickets.

        Args:
            required: tickets that must be among them.
            count: how many there must be; with 0, and nothing required, all that are finished now.

        Raises:
            EngineLost: see `lost_tickets`.
        """

    def fetch(self, finished: Sequence[Generations | RemoteSamples]) -> list[Generations | None]:
        """Responses of finished groups, whichever rank collected them, once; None of what went with a lost engine."""

    def drop(self, tickets: Sequence[int]) -> None:
        """End groups, and forget them, finished ones too; when it returns, nothing of them is being sampled."""

    def lost_tickets(self) -> list[int]:
        """Of groups that went with a lost engine; whoever submitted them does so again."""


class RolloutEngine(GroupSampler, Protocol):
    """What a strategy drives between training steps. Every call has a deadline and raises when it passes."""

    @property
    def keeps_weights(self) -> bool:
        """Whether the weights outlive a sleep; if not, an update comes before the next samples."""

    @property
    def sleeps(self) -> bool:
        """Whether the engine gives way to the trainer, and the trainer to it; if not, both work at the same time."""

    @property
    def check_updates(self) -> int:
        """Every how many weight updates the strategy has them checked; 0 for never."""

    @property
    def log_prob_tolerance(self) -> float:
        """How far the mean log-prob of a few tokens may lie from an exact one, because of the engine's dtype."""

    def connect(self, rank: int, world_size: int) -> None:
        """Take a place among `world_size` training ranks; waits until the engine is ready to sample."""

    def generate(self, prompts: list[list[int]], sampling: SamplingConfig, seeds: list[int] | None) -> Generations:
        """Sample responses to this rank's prompts. Collective: every rank calls it, an empty list is fine.

        Args:
            prompts: token ids.
            sampling: how to sample; the same on every rank.
            seeds: one per prompt: the same seed, weights and prompt give the same responses. None: unseeded.
        """

    def drop_lost_engines(self) -> int:
        """Go on without the engines that any rank has lost; returns how many. Collective.

        They come back with a later weight update. The next one is due now.
        """

    @property
    def num_living(self) -> int:
        """Engines that work."""

    @property
    def busy_s(self) -> float:
        """Seconds that the engine of this rank has worked so far, as it said last."""

    def update_weights(self, source: WeightSource, version: int) -> None:
        """Replace the weights, drop cached prefixes, name the version. Collective.

        Groups that are being sampled go on with the new weights, from what has been sampled of them.

        Raises:
            EngineLost: not all engines have them now.
        """

    def check_weights(self, source: WeightSource) -> None:
        """Compare the engine's weights with the source, bit by bit where the engine can be read. Collective.

        Raises:
            WeightsDiffer: names the first tensor that differs.
        """

    def prompt_log_probs(self, prompt: list[int]) -> list[float]:
        """Log-probs of a prompt's tokens after the first, at temperature 1."""

    def sleep(self) -> MemoryChange | None:
        """Give memory back while the trainer works, cached prefixes included; what that did, where it was measured."""

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take memory back: `weights`, `kv_cache`, or both (None)."""

    def abort(self) -> None:
        """End unfinished requests; their tokens so far are returned with finish reason `abort`."""

    def close(self) -> None:
        """Free what this rank holds."""
