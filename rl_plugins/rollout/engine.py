"""The rollout engine protocol and the records that cross it.

An engine samples from its own copy of the policy. `update_weights` replaces the copy, drops every cached prefix and
names the new policy version, in one call, because a cache that outlives its weights is a silent error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from rl_plugins.errors import ConfigError
from rl_plugins.rollout.memory import MemoryChange
from rl_plugins.rollout.weights import WeightSource


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
        lengths: int64 [R], tokens of each of the R responses.
        finish_reasons: [R], `stop`, `length` or `abort`.
        policy_version: version of the weights that sampled them.
    """

    token_ids: np.ndarray
    log_probs: np.ndarray
    lengths: np.ndarray
    finish_reasons: list[str] = field(default_factory=list)
    policy_version: int = 0

    def responses(self) -> list[list[int]]:
        """Token ids of each response."""
        return [part.tolist() for part in np.split(self.token_ids, np.cumsum(self.lengths))[:-1]]

    def response_log_probs(self) -> list[list[float]]:
        """Log-probs of each response."""
        return [part.tolist() for part in np.split(self.log_probs, np.cumsum(self.lengths))[:-1]]

    @classmethod
    def from_responses(
        cls,
        responses: Sequence[Sequence[int]],
        log_probs: Sequence[Sequence[float]],
        finish_reasons: Sequence[str],
        policy_version: int,
    ) -> Generations:
        """Flatten ragged lists."""
        return cls(
            token_ids=np.fromiter((t for r in responses for t in r), dtype=np.int64),
            log_probs=np.fromiter((p for r in log_probs for p in r), dtype=np.float32),
            lengths=np.fromiter((len(r) for r in responses), dtype=np.int64),
            finish_reasons=list(finish_reasons),
            policy_version=policy_version,
        )


class RolloutEngine(Protocol):
    """What a strategy drives between training steps. Every call has a deadline and raises when it passes."""

    @property
    def keeps_weights(self) -> bool:
        """Whether the weights outlive a sleep; if not, an update comes before the next samples."""

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

    def update_weights(self, source: WeightSource, version: int) -> None:
        """Replace the weights, drop cached prefixes, name the version. Collective."""

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
