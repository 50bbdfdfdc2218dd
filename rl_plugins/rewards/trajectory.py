"""Trajectories: conversations between a policy and an environment, as messages and as tokens.

A trajectory has one sequence of tokens after its prompt, or several, if the environment begins new ones. The tokens of
all sequences are in the order of time. The policy responds to one sequence at a time, and does not see the others.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

import numpy as np

from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.control_characters import whole_characters
from rl_plugins.rewards.records import Message, Score, ScoringRequest, both_kinds, for_tokens
from rl_plugins.rewards.turn_times import TurnTimes, Work, unix_time
from rl_plugins.rollout.engine import Generations, padded_routes

ALTERNATIVE = "alternative"
"""Key of a message of the policy with the number of the response, if the response is not the first to its prompt."""


@dataclass(frozen=True)
class Turn:
    """A response of the policy, for an environment.

    Attributes:
        request: scoring request with the text of the response, the earlier messages, and the number of turns left.
        tokens: token ids of the response's sequence: its prompt and all its messages. The response is at the end.
        length: number of tokens of the response.
        log_probs: log-prob of each token of the response.
        finish_reason: end of the response: `stop`, `length` or `abort`.
        number: number of responses of the policy in the conversation so far.
        alternatives: further responses to the same prompt, each in a sequence of its own.
    """

    request: ScoringRequest
    tokens: Sequence[int]
    length: int
    log_probs: Sequence[float] = ()
    finish_reason: str = ""
    number: int = 1
    alternatives: Sequence[Turn] = ()

    @property
    def before(self) -> Sequence[int]:
        """Token ids before the response."""
        return self.tokens[: len(self.tokens) - self.length]

    @property
    def response(self) -> list[int]:
        """Token ids of the response."""
        return list(self.tokens[len(self.tokens) - self.length :])


@dataclass(frozen=True)
class Reply:
    """Messages of an environment to the policy, which then responds again.

    Attributes:
        messages: the messages.
        tokens: token ids of the end of the policy's turn, of the messages, and of the start of the policy's next turn.
        was_cut: True if a text was cut because it was too long.
        counts: numbers of events, by the names in `Environment.counted`.
        reward: reward of the turn.
        max_tokens: longest next response in tokens, if shorter than the rest of the conversation's tokens.
        sequence: number of the sequence that the messages continue. The first sequence is 0, and the messages begin the
            sequence of a new number, so `tokens` are its prompt.
        work: work of the environment on the response; empty if the environment does not report its work.
        num_responses: number of responses to the messages. The first response continues the sequence of the messages,
            and each other response begins a new sequence with a copy of all tokens before it.
        reports_tokens: True if the environment, a `WatchingEnvironment`, sees the tokens while the policy responds.
    """

    messages: Sequence[Message]
    tokens: Sequence[int]
    was_cut: bool = False
    counts: Mapping[str, int] = field(default_factory=dict)
    reward: float = 0.0
    max_tokens: int | None = None
    sequence: int = 0
    work: Sequence[Work] = ()
    num_responses: int = 1
    reports_tokens: bool = False


@dataclass(frozen=True)
class Start:
    """First messages of an environment to the policy, in place of the prompt of the row.

    Attributes:
        messages: the messages.
        tokens: token ids of the messages and of the start of the policy's turn.
        max_tokens: longest first response in tokens, if shorter than the conversation's tokens.
        num_responses: number of first responses, as in a `Reply`.
        reports_tokens: as in a `Reply`.
    """

    messages: Sequence[Message]
    tokens: Sequence[int]
    max_tokens: int | None = None
    num_responses: int = 1
    reports_tokens: bool = False


@dataclass(frozen=True)
class ScoreWithMessages:
    """Score of an environment with messages that the policy does not answer. Tables show the messages.

    Attributes:
        score: score of the whole conversation.
        messages: the messages.
    """

    score: Score
    messages: Sequence[Message]


EnvironmentAnswer = Reply | Score | Start | ScoreWithMessages
"""Answer of an environment to a response, or to the start of a conversation."""


@dataclass(frozen=True)
class Ending:
    """Result of a finished conversation.

    Attributes:
        score: score of the whole conversation.
        said: messages of the policy and of the environment, in turns.
        cut: number of replies that were cut because they were too long.
        turns: number of responses of the policy.
        counts: numbers of events, by the names in `Environment.counted`.
        prompt: messages of the environment in place of the prompt; None with the prompt of the row.
        prompt_ids: token ids of `prompt`.
        turn_ends: position of the last token of each response, counted from the end of the prompt.
        turn_rewards: reward of each turn, or sum of the rewards of the turn's tokens, with the rest of the score in the
            last; their sum is the score.
        sequence_changes: position and new sequence of each token whose sequence is not that of the token before,
            counted from the end of the prompt.
        times: times of each turn.
    """

    score: Score
    said: Sequence[Message]
    cut: int
    turns: int
    counts: Mapping[str, int] = field(default_factory=dict)
    prompt: Sequence[Message] | None = None
    prompt_ids: Sequence[int] = ()
    turn_ends: Sequence[int] = ()
    turn_rewards: Sequence[float] = ()
    sequence_changes: Sequence[tuple[int, int]] = ()
    times: Sequence[TurnTimes] = field(default=(), compare=False)

    @property
    def last(self) -> str:
        """Text of the last response of the policy; empty without a response."""
        responses = [message["content"] for message in self.said if message["role"] == "assistant"]
        return str(responses[-1]) if responses else ""

    def transcript(self) -> str:
        """Return all messages as readable text."""
        said = [f"[{message['role']}] {message['content']}" for message in self.said]
        return "\n".join([*(message["content"] for message in self.said[:1]), *said[1:]])


RECORDS = (Score, Ending, TurnTimes, Work)
"""Classes in files of samples, beside plain values."""


class Trajectory:
    """A conversation so far, as messages and as tokens, in one or several sequences.

    Args:
        prompt: token ids of the prompt.
        request: scoring request for a response to the prompt, without the response.
        sampling: options of sampling; `max_tokens` is the limit of all turns together, replies included.
        counted: names of the events that replies count.
        key: number of the conversation, unique on the rank.

    Attributes:
        turns: number of responses of the policy.
        ending: result of the conversation; None until the conversation has ended.
    """

    def __init__(
        self, prompt: list[int], request: ScoringRequest, sampling: SamplingConfig, counted: Sequence[str], key: int
    ) -> None:
        self._request, self._sampling, self.key = request, sampling, key
        self._start: Start | None = None
        self._turn_ends: list[int] = []
        self._turn_rewards: list[float] = []
        self._token_ids: list[int] = []
        self._sampled_ids = array("i")
        self._log_probs: list[float] = []
        self._versions: list[int] = []
        self._sampled: list[bool] = []
        self._sequence = 0
        self._sequence_changes: list[tuple[int, int]] = []
        # Tokens of each sequence. The first sequence begins with the prompt.
        self._tokens = defaultdict[int, list[int]](list, {0: list(prompt)})
        # Routes of the last request of each sequence: they are the routes of the whole sequence before.
        self._experts: dict[int, np.ndarray] = {}
        self._said: list[Message] = []
        self._asked = unix_time()
        self._times: list[TurnTimes] = []
        self._cut = 0
        self._counts = Counter(dict.fromkeys(counted, 0))
        self._length = 0
        self._finish_reason = ""
        # True if the environment limits the next response, or the last, to fewer tokens than are left.
        self._is_shortened = False
        self.turns = 0
        self.ending: Ending | None = None

    @property
    def tokens(self) -> list[int]:
        """Token ids of the current sequence: its prompt and all its messages."""
        return list(self._tokens[self._sequence])

    @property
    def room(self) -> int:
        """Largest number of tokens of the next response."""
        return self._sampling.max_tokens - len(self._token_ids)

    def room_of_each(self, num_responses: int) -> int:
        """Largest number of tokens of each of several next responses, beside the copies of the tokens before them."""
        return (self.room - (num_responses - 1) * len(self._tokens[self._sequence])) // num_responses

    def start(self, start: Start) -> bool:
        """Replace the prompt of the row by messages of the environment.

        Returns:
            False if the conversation has too few tokens for the responses.
        """
        self._start = replace(start, messages=_whole(start.messages))
        self._tokens[0] = list(start.tokens)
        self._request = replace(self._request, prompt=self._start.messages)
        self._is_shortened = self._shortens(start)
        return self.room_of_each(start.num_responses) > 0

    def ask(self) -> None:
        """Keep the time of the request for the next response."""
        self._asked = unix_time()

    def respond(self, responses: Sequence[Generations], texts: Sequence[str], max_turns: int) -> Turn:
        """Add responses of the policy to one prompt, and return the responses for the environment.

        Args:
            responses: the responses, one in each part.
            texts: decoded text of each response.
            max_turns: largest number of responses of the policy in the conversation.
        """
        before = self.tokens
        first, *others = [
            self._respond(response, text, max_turns, place, before)
            for place, (response, text) in enumerate(zip(responses, texts, strict=True))
        ]
        return replace(first, alternatives=others)

    def _respond(self, response: Generations, text: str, max_turns: int, place: int, before: Sequence[int]) -> Turn:
        if place:
            self._add_tokens(before, sequence=1 + max(self._tokens))
        token_ids = response.token_ids.tolist()
        self._extend_sequence(token_ids)
        self._sampled_ids.extend(token_ids)
        self._log_probs += response.log_probs.tolist()
        self._versions += response.policy_versions.tolist()
        self._length = len(response.token_ids)
        self._sampled += [True] * self._length
        if response.experts:
            (self._experts[self._sequence],) = response.experts
        (self._finish_reason,) = response.finish_reasons
        now = unix_time()
        self._times.append(TurnTimes(len(self._said), self._asked, now, now))
        # The time of sampling counts for the first of several responses.
        self._asked = now
        said = {"role": "assistant", "content": text}
        self._said.append({**said, ALTERNATIVE: place} if place else said)
        self._turn_ends.append(len(self._token_ids) - 1)
        self._turn_rewards.append(0.0)
        self.turns += 1
        # A response that was cut off is incomplete, so no further turn follows.
        return self.last_turn(max_turns - self.turns if self._finish_reason == "stop" else 0)

    def last_turn(self, turns_left: int) -> Turn:
        """Return the last response for the environment; before the first response, an empty one."""
        *before, last = self._said or [{"content": ""}]
        end = self._turn_ends[-1] + 1 if self._turn_ends else 0
        log_probs = self._log_probs[end - self._length :][: self._length]
        request = replace(
            self._request,
            solution_str=last["content"],
            turns=tuple(before),
            turns_left=max(0, turns_left),
            # Later responses extend the ids.
            token_ids=self._sampled_ids[:],
        )
        return Turn(request, self.tokens, self._length, log_probs, self._finish_reason, self.turns)

    def observe(self, reply: Reply) -> bool:
        """Add a reply of the environment.

        Returns:
            False if no tokens are left for the responses to the reply; the reply is then not added.
        """
        self._counts.update(reply.counts)
        self._turn_rewards[-1] += reply.reward
        self._answered(reply.work)
        copied = len(self._tokens.get(reply.sequence, ())) + len(reply.tokens)
        if len(reply.tokens) + (reply.num_responses - 1) * copied + reply.num_responses > self.room:
            self._finish_reason, self._is_shortened = "length", False
            return False
        self._add_tokens(reply.tokens, reply.sequence)
        self._said += _whole(reply.messages)
        self._cut += reply.was_cut
        self._is_shortened = self._shortens(reply)
        return True

    def _shortens(self, answer: Start | Reply) -> bool:
        return answer.max_tokens is not None and answer.max_tokens < self.room_of_each(answer.num_responses)

    def _add_tokens(self, tokens: Sequence[int], sequence: int) -> None:
        """Add tokens to a sequence that the policy does not learn."""
        self._sequence = sequence
        self._extend_sequence(tokens)
        self._log_probs += [0.0] * len(tokens)
        self._versions += [self._versions[-1] if self._versions else 0] * len(tokens)
        self._sampled += [False] * len(tokens)

    def _extend_sequence(self, tokens: Sequence[int]) -> None:
        before = self._sequence_changes[-1][1] if self._sequence_changes else 0
        if tokens and self._sequence != before:
            self._sequence_changes.append((len(self._token_ids), self._sequence))
        self._token_ids += tokens
        self._tokens[self._sequence] += tokens

    def end(self, answer: Score | ScoreWithMessages) -> None:
        """End the conversation with the score, or the failure, of the environment."""
        score, messages = (answer.score, answer.messages) if isinstance(answer, ScoreWithMessages) else (answer, ())
        score = self._fitting(score)
        if self._turn_rewards:
            self._turn_rewards[-1] += (score.value or 0.0) - sum(self._turn_rewards)
            self._answered(())
        else:
            self._finish_reason = "abort"
        self.ending = Ending(
            score,
            (*self._said, *_whole(messages)),
            self._cut,
            self.turns,
            dict(self._counts),
            prompt=None if self._start is None else self._start.messages,
            prompt_ids=() if self._start is None else tuple(self._start.tokens),
            turn_ends=tuple(self._turn_ends),
            turn_rewards=tuple(self._turn_rewards),
            sequence_changes=tuple(self._sequence_changes),
            times=tuple(self._times),
        )

    def _fitting(self, score: Score) -> Score:
        """Divide rewards of tokens among the turns; return the score, or a failure if the rewards do not fit."""
        if score.token_rewards is None:
            return score
        if any(self._turn_rewards):
            return both_kinds(score)
        score = for_tokens(score, sum(self._sampled))
        if score.token_rewards is not None:
            num_sampled = [0, *accumulate(self._sampled)]
            places = [0, *(num_sampled[end + 1] for end in self._turn_ends)]
            self._turn_rewards = [sum(score.token_rewards[start:end]) for start, end in pairwise(places)]
        return score

    def _answered(self, work: Sequence[Work]) -> None:
        turn, now = self._times[-1], unix_time()
        if turn.work and not work:
            # The last answer follows a reply without room, and the environment reports no work on the last answer.
            work = (Work("environment", turn.answered, now - turn.answered),)
        self._times[-1] = replace(turn, answered=now, work=(*turn.work, *work))

    def generations(self) -> Generations:
        """Return the whole conversation as one response."""
        assert self.ending is not None
        return Generations(
            token_ids=np.array(self._token_ids, dtype=np.int64),
            log_probs=np.array(self._log_probs, dtype=np.float32),
            policy_versions=np.array(self._versions, dtype=np.int64),
            lengths=np.array([len(self._token_ids)], dtype=np.int64),
            # A limit of the environment for its last call cuts no conversation.
            finish_reasons=["stop" if self._is_shortened and self._finish_reason == "length" else self._finish_reason],
            sampled=np.array(self._sampled, dtype=bool),
            endings=[self.ending],
            experts=self._routes(),
        )

    def _routes(self) -> list[np.ndarray]:
        """Return the routes of all sequences, one sequence after the other, as `SequenceRows` orders the tokens."""
        if not self._experts:
            return []
        nothing = next(iter(self._experts.values()))[:0]
        parts = [
            padded_routes(self._experts.get(number, nothing), len(tokens))
            for number, tokens in sorted(self._tokens.items())
        ]
        return [np.concatenate(parts)]


def _whole(messages: Sequence[Message]) -> list[Message]:
    """Return messages with texts of whole characters: files and servers refuse others, and so does a tokenizer."""
    return [{**message, "content": whole_characters(str(message["content"]))} for message in messages]
