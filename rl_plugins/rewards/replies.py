"""Environment of a reward function, which may reply to a response before it returns a score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from rl_plugins.config.sampling import EnvironmentConfig
from rl_plugins.data.following_messages import TurnTokenizer
from rl_plugins.errors import ConfigError
from rl_plugins.rewards.records import Score, ScoringRequest, failed, finite_score
from rl_plugins.rewards.trajectory import Reply, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@runtime_checkable
class ReplyingScorer(Protocol):
    """Replies to responses, or scores them: `RewardPool` or `InlineScorer`."""

    max_failure_rate: float

    def answer(self, requests: Sequence[ScoringRequest]) -> list[Score]:
        """Return a reply or a score for each response, in order. A failure is recorded in its score."""


def replying(scorer: Any, max_turns: int) -> ReplyingScorer:
    """Return the scorer.

    Raises:
        ConfigError: the scorer cannot reply.
    """
    if not isinstance(scorer, ReplyingScorer):
        raise ConfigError(
            f"max_turns={max_turns}: the scorer {type(scorer).__name__} cannot answer: use RewardPool or InlineScorer"
        )
    return scorer


class TurnRewards:
    """Rewards of the turns of conversations whose scores come from a reward function."""

    def __init__(self) -> None:
        self._sums: dict[int, float] = {}

    def add(self, key: int, reward: float) -> None:
        """Add the reward of a turn of a conversation."""
        self._sums[key] = self._sums.get(key, 0.0) + reward

    def ended(self, key: int, score: Score) -> Score:
        """Return the score of a finished conversation with the rewards of its turns."""
        reward = self._sums.pop(key, 0.0)
        if score.value is None:
            return score
        return finite_score(score.value + reward, score.details, score.token_rewards)

    def forget(self, keys: Sequence[int]) -> None:
        """Drop conversations."""
        for key in keys:
            self._sums.pop(key, None)


class ReplyingReward:
    """The `Environment` of a reward function. All responses that wait are answered in one call of the scorer.

    Args:
        scorer: scorer that can reply to responses.
        tokenizer: tokenizer of the policy.
        config: limits of conversations.

    Raises:
        ConfigError: the scorer cannot reply, or the chat template has no place for a reply.
    """

    counted: Sequence[str] = ()

    def __init__(self, scorer: Any, tokenizer: PreTrainedTokenizerBase, config: EnvironmentConfig) -> None:
        self._scorer, self._max_tokens = replying(scorer, config.max_turns), config.max_observation_tokens
        self.max_failure_rate = self._scorer.max_failure_rate
        self._tokenizer = TurnTokenizer(tokenizer, config.template_options)
        self._turns: dict[int, Turn] = {}
        self._rewards = TurnRewards()

    def begin(self, key: int, turn: Turn) -> None:
        """Let the next call of `answers` answer a response."""
        self._turns[key] = turn

    def answers(self, wait_s: float) -> Mapping[int, Reply | Score]:
        """Return the answers to all responses."""
        turns, self._turns = self._turns, {}
        scores = self._scorer.answer([turn.request for turn in turns.values()])
        return {key: self._answer(key, turn, score) for (key, turn), score in zip(turns.items(), scores, strict=True)}

    def _answer(self, key: int, turn: Turn, score: Score) -> Reply | Score:
        if score.reply is None:
            return self._rewards.ended(key, score)
        try:
            tokens, was_cut = self._tokenizer.tokens([score.reply], turn.tokens[-1], self._max_tokens)
        except ConfigError as error:
            return self._rewards.ended(key, failed("raised", str(error)))
        self._rewards.add(key, score.reward)
        return Reply([score.reply], tokens, was_cut, reward=score.reward)

    def forget(self, keys: Sequence[int]) -> None:
        """Drop responses without an answer."""
        for key in keys:
            self._turns.pop(key, None)
        self._rewards.forget(keys)
