"""Environment of a reward function, which may reply to a response before it returns a score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from threading import Thread
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from rl_plugins.config.sampling import EnvironmentConfig
from rl_plugins.data.following_messages import TurnTokenizer
from rl_plugins.errors import ConfigError
from rl_plugins.rewards.pool import RewardPool
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


class TurnScoring:
    """Answers of a scorer to turns, while the environment goes on with other conversations.

    A pool of workers answers in a thread. Any other scorer answers at once: the deadlines of `InlineScorer` need the
    main thread. Turns that come during a call are answered together in the next call.

    Args:
        scorer: scorer of the turns.
    """

    def __init__(self, scorer: ReplyingScorer) -> None:
        self._scorer = scorer
        self._waiting: dict[int, tuple[Turn, ScoringRequest]] = {}
        # Turns of the running call, and the keys among them that are not dropped.
        self._asked: dict[int, Turn] = {}
        self._wanted = set[int]()
        self._call: Future[list[Score]] | None = None

    def add(self, key: int, turn: Turn, request: ScoringRequest) -> None:
        """Ask for the answer to a turn."""
        self._waiting[key] = (turn, request)

    @property
    def is_running(self) -> bool:
        """True while the scorer answers."""
        return self._call is not None

    def take(self, wait_s: float) -> list[tuple[int, Turn, Score]]:
        """Return finished answers; wait for some up to `wait_s` seconds."""
        if self._call is None and self._waiting:
            self._start()
        if self._call is None:
            return []
        with suppress(TimeoutError):
            self._call.exception(wait_s)
        if not self._call.done():
            return []
        call, self._call = self._call, None
        answers = zip(self._asked.items(), call.result(), strict=True)
        found = [(key, turn, score) for (key, turn), score in answers if key in self._wanted]
        if self._waiting:
            self._start()
        return found

    def forget(self, keys: Sequence[int]) -> None:
        """Drop turns. The answer of a running call to a dropped turn is left out."""
        self._wanted.difference_update(keys)
        for key in keys:
            self._waiting.pop(key, None)

    def _start(self) -> None:
        waiting, self._waiting = self._waiting, {}
        self._asked = {key: turn for key, (turn, _) in waiting.items()}
        self._wanted = set(waiting)
        requests = [request for _, request in waiting.values()]
        self._call = call = Future[list[Score]]()

        def answer() -> None:
            try:
                call.set_result(self._scorer.answer(requests))
            # The main thread raises the error.
            except BaseException as error:
                call.set_exception(error)

        if isinstance(self._scorer, RewardPool):
            # The end of the process does not wait for a reward.
            Thread(target=answer, daemon=True, name="scores of turns").start()
        else:
            answer()


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
    """The `Environment` of a reward function. Responses that wait are answered together (`TurnScoring`).

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
        self._scoring, self._rewards = TurnScoring(self._scorer), TurnRewards()

    def begin(self, key: int, turn: Turn) -> None:
        """Ask for the answer to a response."""
        self._scoring.add(key, turn, turn.request)

    def answers(self, wait_s: float) -> Mapping[int, Reply | Score]:
        """Return finished answers."""
        return {key: self._answer(key, turn, score) for key, turn, score in self._scoring.take(wait_s)}

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
        self._scoring.forget(keys)
        self._rewards.forget(keys)
