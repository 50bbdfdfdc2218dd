"""The rollout engine protocol and the records that cross it.

An engine samples from a separate copy of the policy. One call, `update_weights`, replaces the copy, drops all cached
prefixes and sets the new policy version, because a cache of old weights would cause a silent error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np

from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.data.images import PromptImages
from rl_plugins.memory import MemoryChange
from rl_plugins.ranks import Ranks
from rl_plugins.weights.source import WeightSource

Key = TypeVar("Key", int, str)


@dataclass(frozen=True)
class Generations:
    """Responses to a list of prompts, stored flat. The `num_samples` responses to a prompt are neighbours.

    Attributes:
        token_ids: int64 [N], concatenated tokens of all responses.
        log_probs: float32 [N], log-prob of each token at the time of sampling.
        policy_versions: int64 [N], version of the weights for each token.
        lengths: int64 [R], number of tokens of each response.
        finish_reasons: [R], `stop`, `length` or `abort`.
        sampled: bool [N], False for tokens from an environment; None without an environment.
        endings: [R], ending of each conversation with an environment; empty without an environment.
        experts: [R], experts of the tokens of prompt and response, int16 [tokens, L, K], as `RouterReplay` takes them;
            -1 for a token without a route, such as the last. Empty if the engine returns no routes.
    """

    token_ids: np.ndarray
    log_probs: np.ndarray
    policy_versions: np.ndarray
    lengths: np.ndarray
    finish_reasons: list[str] = field(default_factory=list)
    sampled: np.ndarray | None = None
    endings: list[Any] = field(default_factory=list)
    experts: list[np.ndarray] = field(default_factory=list)

    def responses(self) -> list[list[int]]:
        """Return the token ids of each response."""
        return self._split(self.token_ids)

    def response_log_probs(self) -> list[list[float]]:
        """Return the log-probs of each response."""
        return self._split(self.log_probs)

    def response_versions(self) -> list[list[int]]:
        """Return the policy versions of each response."""
        return self._split(self.policy_versions)

    def response_masks(self) -> list[list[float]] | None:
        """Return 1 for each token sampled by the policy and 0 for others; None if the policy sampled all tokens."""
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
        experts: Sequence[np.ndarray] = (),
    ) -> Generations:
        """Flatten ragged lists. An integer version applies to all tokens."""
        tokens_N = np.fromiter((t for r in responses for t in r), dtype=np.int64)
        return cls(
            token_ids=tokens_N,
            log_probs=np.fromiter((p for r in log_probs for p in r), dtype=np.float32),
            policy_versions=np.full_like(tokens_N, policy_versions)
            if isinstance(policy_versions, int)
            else np.fromiter((v for r in policy_versions for v in r), dtype=np.int64),
            lengths=np.fromiter((len(r) for r in responses), dtype=np.int64),
            finish_reasons=list(finish_reasons),
            experts=list(experts),
        )

    def split(self, sizes: Sequence[int]) -> list[Generations]:
        """Split into parts; `sizes` has the number of responses of each part."""
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
                self.experts[row:end],
            )
            for (start, stop), (row, end) in zip(pairwise(starts), pairwise(rows), strict=True)
        ]

    @classmethod
    def concat(cls, parts: Sequence[Generations]) -> Generations:
        """Return the concatenated responses of all parts."""
        # A conversation without a response has no routes.
        nothing = next((experts[:0] for part in parts for experts in part.experts), None)
        return cls(
            token_ids=np.concatenate([part.token_ids for part in parts]),
            log_probs=np.concatenate([part.log_probs for part in parts]),
            policy_versions=np.concatenate([part.policy_versions for part in parts]),
            lengths=np.concatenate([part.lengths for part in parts]),
            finish_reasons=[reason for part in parts for reason in part.finish_reasons],
            sampled=np.concatenate(masks) if (masks := [p.sampled for p in parts if p.sampled is not None]) else None,
            endings=[ending for part in parts for ending in part.endings],
            experts=[]
            if nothing is None
            else [experts for part in parts for experts in part.experts or [nothing] * len(part.lengths)],
        )


def padded_routes(experts: np.ndarray, num_tokens: int) -> np.ndarray:
    """Return the experts of the first tokens of a sequence, padded with -1 to all tokens, int16 [tokens, L, K]."""
    if len(experts) == num_tokens and experts.dtype == np.int16:
        return experts
    padded = np.full((num_tokens, *experts.shape[1:]), -1, dtype=np.int16)
    padded[: len(experts)] = experts[:num_tokens]
    return padded


@dataclass(frozen=True)
class RemoteSamples:
    """Reference to the responses of a group in an engine's process. Any rank can fetch the responses.

    Attributes:
        engine: index of the engine.
        rank: rank that submitted the group.
        ticket: ticket of the group on that rank.
        lengths: int64 [R], number of tokens of each response.
    """

    engine: int
    rank: int
    ticket: int
    lengths: np.ndarray


@dataclass(frozen=True)
class GroupRequest:
    """Request for a group of responses to one prompt.

    Attributes:
        ticket: key of the request, unique on the rank.
        prompt: token ids.
        seed: seed of the samples. The same seed, weights and prompt give the same responses.
        max_tokens: longest response in tokens, if shorter than in the SamplingConfig.
        images: images of the prompt, or of the prompt at the start of a conversation; None without images.
        reports_tokens: True if `ReportingSampler.tokens_so_far` gives the tokens while the engine samples.
        engine: number of the engine with the beginning of the prompt in its prefix cache; None for any engine.
    """

    ticket: int
    prompt: list[int]
    seed: int
    max_tokens: int | None = None
    images: PromptImages | None = None
    reports_tokens: bool = False
    engine: int | None = None

    def shortened(self, sampling: SamplingConfig) -> SamplingConfig:
        """Return the sampling options of this group."""
        return sampling if self.max_tokens is None else replace(sampling, max_tokens=self.max_tokens)


def sample_seed(*numbers: int) -> int:
    """Return the seed of a sample from the numbers that identify the sample, such as its prompt and its turn."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0]) >> 1


def step_seed(seed: int, step: int) -> int:
    """Return the seed of random choices in a step, equal on all ranks."""
    return seed * 1_000_003 + step


class GroupSampler(Protocol):
    """Asynchronous sampling of groups of responses."""

    def submit(self, requests: Sequence[GroupRequest], sampling: SamplingConfig, *, together: bool = True) -> None:
        """Start sampling `num_samples` responses to each request, without waiting.

        Args:
            requests: requests of this rank.
            sampling: options of sampling.
            together: True if every rank calls `submit` and all groups start in one batch. The responses then do not
                depend on the order of the calls. If False, the groups start immediately.
        """

    def collect(self, required: Sequence[int], count: int) -> Mapping[int, Generations | RemoteSamples]:
        """Wait for submitted groups of this rank, and remove them.

        Args:
            required: tickets to wait for.
            count: least number of groups to wait for. With 0 and no required ticket, return without waiting.

        Returns:
            Groups by ticket: all finished groups; or the required groups alone, if there are any and `count` is 0.

        Raises:
            EngineLost: an engine was lost. `lost_tickets` returns its groups.
        """

    def fetch(self, finished: Sequence[Generations | RemoteSamples]) -> list[Generations | None]:
        """Return and release the responses of groups collected by any rank; None for groups of a lost engine."""

    def drop(self, tickets: Sequence[int]) -> None:
        """End and remove groups, finished groups included. No sampling of the groups continues after the call."""

    def lost_tickets(self, among: Container[int] | None = None) -> list[int]:
        """Return the tickets of groups on lost engines, once. The caller submits the groups again.

        Args:
            among: tickets of the caller. Other lost tickets stay for another caller. None stands for all tickets.
        """


def collected(finished: Iterable[Key], required: Collection[Key], count: int) -> list[Key]:
    """Return the groups among the finished groups that `GroupSampler.collect` returns, by ticket or by name."""
    return list(required if required and not count else finished)


@runtime_checkable
class ReportingSampler(GroupSampler, Protocol):
    """Gives the tokens of groups while it samples."""

    def tokens_so_far(self, tickets: Sequence[int]) -> Mapping[int, list[list[int]]]:
        """Return the sampled tokens of each response of groups in progress, by ticket, without waiting.

        Args:
            tickets: tickets of requests with `reports_tokens`. A group without a report yet is left out.
        """


@runtime_checkable
class HasPolicyCheck(Protocol):
    """A rollout engine that cannot sample from every policy."""

    def check_policy(self, weight_source: Callable[[], WeightSource]) -> None:
        """Check the policy before the engine connects.

        Args:
            weight_source: function that returns the weights of the policy.

        Raises:
            ConfigError: the engine cannot sample from the policy.
        """


class RolloutEngine(GroupSampler, Protocol):
    """Rollout engine of a strategy. Every call has a deadline and raises after the deadline."""

    @property
    def keeps_weights(self) -> bool:
        """True if the engine keeps the weights during sleep. If False, an update must precede the next sampling."""

    @property
    def sleeps(self) -> bool:
        """True if the engine and the trainer take turns, False if both work at the same time."""

    @property
    def gpu_share(self) -> float | None:
        """Largest share of a GPU's memory in use by the engine; None if unknown."""

    @property
    def shares_gpus(self) -> bool:
        """True if `prepare` starts the engine in processes of its own on the GPUs of the ranks."""

    @property
    def check_updates(self) -> int:
        """Number of weight updates between two checks; 0 disables checks."""

    @property
    def log_prob_tolerance(self) -> float:
        """Allowed mean error of the log-probs of a few tokens in the engine's dtype, in nats."""

    def prepare(self, ranks: Ranks) -> None:
        """Start the engine, or start lost engines again, if the engine shares the GPUs of the ranks. Collective.

        The ranks must not use their GPUs during the call. Other engines start without waiting.
        """

    def connect(self, rank: int, world_size: int) -> None:
        """Connect training rank `rank`, and wait until the engine can sample. A second call is for another policy."""

    def generate(self, prompts: list[list[int]], sampling: SamplingConfig, seeds: list[int] | None) -> Generations:
        """Sample responses to the prompts of this rank. Collective; an empty list is allowed.

        Args:
            prompts: token ids.
            sampling: options of sampling, equal on all ranks.
            seeds: one seed per prompt. The same seed, weights and prompt give the same responses. None: no seeds.
        """

    def drop_lost_engines(self) -> int:
        """Stop using the engines lost by any rank; return the number of lost engines. Collective.

        The caller must update the weights next. Restarted engines return in a later weight update.
        """

    @property
    def num_living(self) -> int:
        """Number of working engines."""

    @property
    def busy_s(self) -> float:
        """Mean working time of this rank's engines, in seconds."""

    def update_weights(self, source: WeightSource, version: int) -> None:
        """Replace the weights, drop cached prefixes and set the policy version. Collective.

        Unfinished groups keep their tokens and continue with the new weights.

        Raises:
            EngineLost: an engine did not get the new weights.
        """

    def check_weights(self, source: WeightSource) -> None:
        """Compare the engine's weights with the source, bit by bit if the engine is readable. Collective.

        Raises:
            WeightsDiffer: a tensor differs. The message names the first such tensor.
        """

    def prompt_log_probs(self, prompt: list[int]) -> list[float]:
        """Return the log-probs of a prompt's tokens after the first token, at temperature 1."""

    def sleep(self) -> MemoryChange | None:
        """Free memory and drop cached prefixes while the trainer works; return the measured change, or None."""

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the freed memory again: `weights`, `kv_cache`, or both (None)."""

    def close(self) -> None:
        """Free the resources of this rank."""
