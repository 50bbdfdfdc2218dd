"""Groups of conversations between a policy, sampled by a rollout engine, and an environment.

The environment gets each response as soon as the response is finished, so the rollout engine samples while the
environment works. An environment answers each response when it can, so a slow answer delays its own conversation alone.
The first turns of a group are sampled together, as without an environment. Later turns find all earlier messages in the
prefix cache of the engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.rewards.records import Message, Score, ScoringRequest, check_failure_rate
from rl_plugins.rollout.engine import Generations, GroupRequest, RemoteSamples, RolloutEngine, sample_seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_POLL_S = 0.005
# Environments have deadlines of their own.
_LONG_S = 1.0


@dataclass(frozen=True)
class Turn:
    """A response of the policy, for an environment.

    Attributes:
        request: scoring request with the text of the response, the earlier messages, and the number of turns left.
        tokens: token ids of the prompt and of all messages. The response is at the end.
        length: number of tokens of the response.
    """

    request: ScoringRequest
    tokens: Sequence[int]
    length: int

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
    """

    messages: Sequence[Message]
    tokens: Sequence[int]
    was_cut: bool = False
    counts: Mapping[str, int] = field(default_factory=dict)
    reward: float = 0.0


@dataclass(frozen=True)
class Start:
    """First messages of an environment to the policy, in place of the prompt of the row.

    Attributes:
        messages: the messages.
        tokens: token ids of the messages and of the start of the policy's turn.
    """

    messages: Sequence[Message]
    tokens: Sequence[int]


@dataclass(frozen=True)
class LastWords:
    """Score of an environment with messages that the policy does not answer. Tables show the messages.

    Attributes:
        score: score of the whole conversation.
        messages: the messages.
    """

    score: Score
    messages: Sequence[Message]


class Environment(Protocol):
    """Answers responses of the policy with replies or scores. Answers may come in any order.

    Attributes:
        max_failure_rate: share of failed scores above which the run ends.
        counted: names of the events that replies count.
    """

    max_failure_rate: float
    counted: Sequence[str]

    def begin(self, key: int, turn: Turn) -> None:
        """Start to answer a response, without waiting. An environment gives a score if no turn is left.

        Args:
            key: number of the conversation, unique on the rank.
            turn: the response.
        """

    def answers(self, wait_s: float) -> Mapping[int, Reply | Score | Start | LastWords]:
        """Return the finished answers by key; wait at most `wait_s` seconds for the first."""

    def forget(self, keys: Sequence[int]) -> None:
        """Drop conversations, and the answers to their responses."""


@runtime_checkable
class StartingEnvironment(Environment, Protocol):
    """Starts each conversation with messages of its own, and may reward each turn.

    The score of a conversation is the sum of all its rewards.
    """

    def start(self, key: int, request: ScoringRequest, seed: int) -> None:
        """Start a conversation, without waiting. The answer is a `Start`, or a score of a failure.

        Args:
            key: number of the conversation, unique on the rank.
            request: scoring request for a response to the prompt, without the response.
            seed: seed of the group.
        """


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
        turn_rewards: reward of each turn, with the final score in the last; their sum is the score.
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

    @property
    def last(self) -> str:
        """Text of the last response of the policy; empty without a response."""
        responses = [message["content"] for message in self.said if message["role"] == "assistant"]
        return str(responses[-1]) if responses else ""

    def transcript(self) -> str:
        """Return all messages as readable text."""
        said = [f"[{message['role']}] {message['content']}" for message in self.said]
        return "\n".join([*(message["content"] for message in self.said[:1]), *said[1:]])


RECORDS = (Score, Ending)
"""Classes in files of samples, beside plain values."""


class Trajectory:
    """A conversation so far, as messages and as tokens.

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
        self._prompt, self._request, self._sampling, self.key = prompt, request, sampling, key
        self._start: Start | None = None
        self._turn_ends: list[int] = []
        self._turn_rewards: list[float] = []
        self._token_ids: list[int] = []
        self._log_probs: list[float] = []
        self._versions: list[int] = []
        self._sampled: list[bool] = []
        self._said: list[Message] = []
        self._cut = 0
        self._counts = Counter(dict.fromkeys(counted, 0))
        self._length = 0
        self._finish_reason = ""
        self.turns = 0
        self.ending: Ending | None = None

    @property
    def tokens(self) -> list[int]:
        """Token ids of the prompt and of all messages."""
        return [*self._prompt, *self._token_ids]

    @property
    def room(self) -> int:
        """Largest number of tokens of the next response."""
        return self._sampling.max_tokens - len(self._token_ids)

    def start(self, start: Start) -> None:
        """Replace the prompt of the row by messages of the environment."""
        self._start, self._prompt = start, list(start.tokens)
        self._request = replace(self._request, prompt=list(start.messages))

    def respond(self, response: Generations, text: str, max_turns: int) -> Turn:
        """Add a response of the policy, and return the response for the environment.

        Args:
            response: one response.
            text: decoded text of the response.
            max_turns: largest number of responses of the policy in the conversation.
        """
        self._token_ids += response.token_ids.tolist()
        self._log_probs += response.log_probs.tolist()
        self._versions += response.policy_versions.tolist()
        self._length = len(response.token_ids)
        self._sampled += [True] * self._length
        (self._finish_reason,) = response.finish_reasons
        self._said.append({"role": "assistant", "content": text})
        self._turn_ends.append(len(self._token_ids) - 1)
        self._turn_rewards.append(0.0)
        self.turns += 1
        # A response that was cut off is incomplete, so no further turn follows.
        return self.last_turn(max_turns - self.turns if self._finish_reason == "stop" else 0)

    def last_turn(self, turns_left: int) -> Turn:
        """Return the last response for the environment."""
        *before, last = self._said
        request = replace(
            self._request, solution_str=last["content"], turns=tuple(before), turns_left=max(0, turns_left)
        )
        return Turn(request, self.tokens, self._length)

    def observe(self, reply: Reply) -> bool:
        """Add a reply of the environment.

        Returns:
            False if no tokens are left for a response to the reply; the reply is then not added.
        """
        self._counts.update(reply.counts)
        self._turn_rewards[-1] += reply.reward
        if len(reply.tokens) >= self.room:
            self._finish_reason = "length"
            return False
        self._token_ids += reply.tokens
        self._log_probs += [0.0] * len(reply.tokens)
        self._versions += [self._versions[-1] if self._versions else 0] * len(reply.tokens)
        self._sampled += [False] * len(reply.tokens)
        self._said += reply.messages
        self._cut += reply.was_cut
        return True

    def end(self, answer: Score | LastWords) -> None:
        """End the conversation with the score, or the failure, of the environment."""
        score, messages = (answer.score, answer.messages) if isinstance(answer, LastWords) else (answer, ())
        if self._turn_rewards:
            self._turn_rewards[-1] += (score.value or 0.0) - sum(self._turn_rewards)
        else:
            self._finish_reason = "abort"
        self.ending = Ending(
            score,
            (*self._said, *messages),
            self._cut,
            self.turns,
            dict(self._counts),
            prompt=None if self._start is None else list(self._start.messages),
            prompt_ids=() if self._start is None else tuple(self._start.tokens),
            turn_ends=tuple(self._turn_ends),
            turn_rewards=tuple(self._turn_rewards),
        )

    def generations(self) -> Generations:
        """Return the whole conversation as one response."""
        assert self.ending is not None
        return Generations(
            token_ids=np.array(self._token_ids, dtype=np.int64),
            log_probs=np.array(self._log_probs, dtype=np.float32),
            policy_versions=np.array(self._versions, dtype=np.int64),
            lengths=np.array([len(self._token_ids)], dtype=np.int64),
            finish_reasons=[self._finish_reason],
            sampled=np.array(self._sampled, dtype=bool),
            endings=[self.ending],
        )


@dataclass(frozen=True, kw_only=True)
class Opening(GroupRequest):
    """Prompt that starts a group of conversations.

    Attributes:
        about: scoring request for a response to the prompt, without the response.
    """

    about: ScoringRequest


@dataclass(frozen=True)
class _Asked:
    """A turn that was submitted to the rollout engine.

    Attributes:
        trajectories: conversations that the responses continue.
        request: submitted request.
        sampling: submitted options of sampling.
        ticket: ticket of the group.
    """

    trajectories: Sequence[Trajectory]
    request: GroupRequest
    sampling: SamplingConfig
    ticket: int


class Conversations:
    """Groups of conversations of one rank: a `GroupSampler` that uses a rollout engine and an environment.

    Args:
        environment: environment that answers the responses.
        tokenizer: tokenizer of the policy.
        max_turns: largest number of responses of the policy in a conversation.
    """

    def __init__(self, environment: Environment, tokenizer: PreTrainedTokenizerBase, max_turns: int) -> None:
        self._environment, self._tokenizer, self._max_turns = environment, tokenizer, max_turns
        self._groups: dict[int, list[Trajectory]] = {}
        # Turns that the engine samples, by the engine's tickets.
        self._asked: dict[int, _Asked] = {}
        # Conversations that the environment answers, by key.
        self._answering: dict[int, tuple[Trajectory, _Asked]] = {}
        self._tickets = self._keys = 0

    @property
    def rewards_turns(self) -> bool:
        """True if the environment may reward each turn."""
        return isinstance(self._environment, StartingEnvironment)

    def by(self, engine: RolloutEngine) -> Conversations:
        """Set the rollout engine that samples, and return this object."""
        self._engine: RolloutEngine = engine
        return self

    def submit(self, requests: Sequence[GroupRequest], sampling: SamplingConfig, *, together: bool = True) -> None:
        """Start `num_samples` conversations with each prompt."""
        first_turns = []
        for opening in requests:
            assert isinstance(opening, Opening)
            trajectories = [self._trajectory(opening, sampling) for _ in range(sampling.num_samples)]
            self._groups[opening.ticket] = trajectories
            request = GroupRequest(0, opening.prompt, opening.seed)
            if isinstance(self._environment, StartingEnvironment):
                for trajectory in trajectories:
                    self._answering[trajectory.key] = (
                        trajectory,
                        _Asked([trajectory], request, sampling, opening.ticket),
                    )
                    self._environment.start(trajectory.key, opening.about, opening.seed)
            else:
                first_turns.append(self._ask(trajectories, opening.ticket, request, sampling))
        # Every rank takes part, also a rank whose environments start first.
        self._engine.submit(first_turns, sampling, together=together)

    def collect(self, required: Sequence[int], count: int) -> dict[int, Generations]:
        """Continue all conversations until the awaited groups have ended.

        Args:
            required: tickets of groups that must have ended.
            count: smallest number of groups that must have ended.

        Returns:
            Samples by ticket of the opening: the required groups, or all groups that have ended if `count` is not 0 or
            nothing is required.
        """
        while True:
            ended = [ticket for ticket, group in self._groups.items() if all(trajectory.ending for trajectory in group)]
            if required or count:
                if len(ended) >= count and set(required) <= set(ended):
                    break
                self._advance(wait=True)
            elif not self._advance(wait=False):
                break
        taken = ended if count or not required else required
        return {
            ticket: Generations.concat([trajectory.generations() for trajectory in self._groups.pop(ticket)])
            for ticket in taken
        }

    def fetch(self, finished: Sequence[Generations | RemoteSamples]) -> list[Generations | None]:
        """Return the samples, which are already in this process."""
        return [samples for samples in finished if isinstance(samples, Generations)]

    def drop(self, tickets: Sequence[int]) -> None:
        """Stop conversations, and remove them."""
        gone = set(tickets)
        dropped = [own for own, turn in self._asked.items() if turn.ticket in gone]
        self._engine.drop(dropped)
        for own in dropped:
            del self._asked[own]
        keys = [trajectory.key for ticket in gone for trajectory in self._groups.pop(ticket, ())]
        self._environment.forget(keys)
        for key in keys:
            self._answering.pop(key, None)

    def lost_tickets(self) -> list[int]:
        """Return an empty list: only a turn is lost with an engine, and this method submits the turn again."""
        lost = [self._asked[own] for own in self._engine.lost_tickets() if own in self._asked]
        self._send([(turn.request, turn.sampling) for turn in lost])
        return []

    def scores(self, endings: Sequence[Ending]) -> list[Score]:
        """Return the score of each conversation.

        Raises:
            RewardError: too many scores are failures.
        """
        scores = [ending.score for ending in endings]
        check_failure_rate(scores, self._environment.max_failure_rate)
        return scores

    def _trajectory(self, opening: Opening, sampling: SamplingConfig) -> Trajectory:
        self._keys += 1
        return Trajectory(opening.prompt, opening.about, sampling, self._environment.counted, self._keys)

    def _ask(
        self, trajectories: Sequence[Trajectory], ticket: int, request: GroupRequest, sampling: SamplingConfig
    ) -> GroupRequest:
        self._tickets += 1
        own = replace(request, ticket=self._tickets)
        self._asked[own.ticket] = _Asked(trajectories, own, sampling, ticket)
        return own

    def _finished(self, count: int) -> dict[int, Generations]:
        """Return at least `count` responses by the engine's tickets, and submit lost turns again."""
        held = self._engine.collect((), count)
        fetched = dict(zip(held, self._engine.fetch(list(held.values())), strict=True))
        lost = [self._asked[own] for own, responses in fetched.items() if responses is None and own in self._asked]
        self._send([(turn.request, turn.sampling) for turn in lost])
        return {own: responses for own, responses in fetched.items() if responses is not None}

    def _advance(self, *, wait: bool) -> bool:
        """Continue conversations with finished responses and answers; return True if there were any.

        Args:
            wait: wait for a response or an answer.
        """
        responses = self._finished(1 if wait and not self._answering else 0)
        for own, generations in responses.items():
            # A turn of a dropped group is no longer in `_asked`.
            if turn := self._asked.pop(own, None):
                parts = generations.split([1] * len(turn.trajectories))
                for trajectory, part in zip(turn.trajectories, parts, strict=True):
                    self._begin(trajectory, turn, trajectory.respond(part, self._text(part), self._max_turns))
        if not self._answering:
            return bool(responses)
        wait_s = 0.0
        if wait and not responses:
            # The engine and the environment cannot be awaited together.
            wait_s = _POLL_S if self._asked else _LONG_S
        answers = self._environment.answers(wait_s)
        next_turns: list[tuple[GroupRequest, SamplingConfig]] = []
        for key, answer in answers.items():
            trajectory, turn = self._answering.pop(key)
            if isinstance(answer, Score | LastWords):
                trajectory.end(answer)
            elif isinstance(answer, Start):
                trajectory.start(answer)
                next_turns.append(self._next_turn(trajectory, turn))
            elif trajectory.observe(answer):
                next_turns.append(self._next_turn(trajectory, turn))
            else:
                self._begin(trajectory, turn, trajectory.last_turn(turns_left=0))
        self._send(next_turns)
        return bool(responses or answers)

    def _begin(self, trajectory: Trajectory, asked: _Asked, turn: Turn) -> None:
        self._answering[trajectory.key] = (trajectory, asked)
        self._environment.begin(trajectory.key, turn)

    def _text(self, response: Generations) -> str:
        return str(self._tokenizer.decode(response.token_ids.tolist(), skip_special_tokens=True))

    def _next_turn(self, trajectory: Trajectory, turn: _Asked) -> tuple[GroupRequest, SamplingConfig]:
        sample = next(place for place, member in enumerate(self._groups[turn.ticket]) if member is trajectory)
        seed = sample_seed(turn.request.seed, sample, trajectory.turns)
        request = GroupRequest(0, trajectory.tokens, seed, max_tokens=trajectory.room)
        single = replace(turn.sampling, num_samples=1)
        return self._ask([trajectory], turn.ticket, request, single), single

    def _send(self, turns: Sequence[tuple[GroupRequest, SamplingConfig]]) -> None:
        by_sampling: dict[SamplingConfig, list[GroupRequest]] = {}
        for request, sampling in turns:
            by_sampling.setdefault(sampling, []).append(request)
        for sampling, requests in by_sampling.items():
            self._engine.submit(requests, sampling, together=False)
