"""Groups of conversations between a policy, sampled by a rollout engine, and an environment.

The environment gets each response as soon as the response is finished, so the rollout engine samples while the
environment works. An environment answers each response when it can, so a slow answer delays its own conversation alone.
The first turns of a group are sampled together, as without an environment. Later turns find all earlier messages in the
prefix cache of the engine.
"""

from __future__ import annotations

import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.data.images import UNSEEN
from rl_plugins.errors import ConfigError
from rl_plugins.rewards.records import FailureRate, Score, ScoringRequest
from rl_plugins.rewards.trajectory import Ending, EnvironmentAnswer, Reply, ScoreWithMessages, Start, Trajectory, Turn
from rl_plugins.rollout.engine import (
    Generations,
    GroupRequest,
    GroupSampler,
    RemoteSamples,
    ReportingSampler,
    collected,
    sample_seed,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The engine and the environment cannot be awaited together, because the references of Ray have no file descriptor. A
# finished response therefore waits up to 5 ms, while the environment works on other responses.
_POLL_S = 0.005
# Time between two reports of tokens.
_REPORT_S = 0.02
# Reports of tokens take at most a tenth of the time.
_REPORTS_APART = 9
# Environments have deadlines of their own.
_LONG_S = 1.0


class Environment(Protocol):
    """Answers responses of the policy with replies or scores. Answers may come in any order.

    A reply may reward the turn. The score of a conversation is the sum of all its rewards.

    Attributes:
        max_failure_rate: share of failed scores above which the run ends; see `FailureRate`.
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

    def answers(self, wait_s: float) -> Mapping[int, EnvironmentAnswer]:
        """Return the finished answers by key; wait at most `wait_s` seconds for the first."""

    def forget(self, keys: Sequence[int]) -> None:
        """Drop conversations, and the answers to their responses."""


@runtime_checkable
class StartingEnvironment(Environment, Protocol):
    """Starts each conversation with messages of its own, in one or several sequences."""

    def start(self, key: int, request: ScoringRequest, seed: int) -> None:
        """Start a conversation, without waiting. The answer is a `Start`, or a score of a failure.

        Args:
            key: number of the conversation, unique on the rank.
            request: scoring request for a response to the prompt, without the response.
            seed: seed of the group.
        """


@runtime_checkable
class WatchingEnvironment(Environment, Protocol):
    """Sees the tokens of responses while the policy responds, if the rollout engine reports tokens."""

    def take_tokens(self, key: int, responses: Sequence[Sequence[int]]) -> None:
        """Take the tokens so far of the responses to a `Reply` or a `Start` with `reports_tokens`.

        Args:
            key: number of the conversation, unique on the rank.
            responses: token ids of each response so far.
        """


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
        self._failure_rate = FailureRate(environment.max_failure_rate)
        self._groups: dict[int, list[Trajectory]] = {}
        # Turns that the engine samples, by the engine's tickets.
        self._asked: dict[int, _Asked] = {}
        # Conversations that the environment answers, by key.
        self._answering: dict[int, tuple[Trajectory, _Asked]] = {}
        self._tickets = self._keys = 0
        self._next_report = 0.0

    @property
    def starts_itself(self) -> bool:
        """True if the environment starts the conversations, so it may begin sequences."""
        return isinstance(self._environment, StartingEnvironment)

    def by(self, engine: GroupSampler) -> Conversations:
        """Set the rollout engine that samples, and return this object."""
        self._engine: GroupSampler = engine
        return self

    def submit(self, requests: Sequence[GroupRequest], sampling: SamplingConfig, *, together: bool = True) -> None:
        """Start `num_samples` conversations with each prompt."""
        first_turns = []
        for opening in requests:
            assert isinstance(opening, Opening)
            trajectories = [self._trajectory(opening, sampling) for _ in range(sampling.num_samples)]
            self._groups[opening.ticket] = trajectories
            if self.starts_itself and opening.images is not None:
                raise ConfigError(UNSEEN)
            request = GroupRequest(0, opening.prompt, opening.seed, images=opening.images)
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
        # With many conversations, a response has always just ended.
        deadline = time.monotonic() + _LONG_S
        while True:
            ended = [ticket for ticket, group in self._groups.items() if all(trajectory.ending for trajectory in group)]
            if required or count:
                if len(ended) >= count and set(required) <= set(ended):
                    break
                self._advance(wait=True)
            elif time.monotonic() > deadline or not self._advance(wait=False):
                break
        return {
            ticket: Generations.concat([trajectory.generations() for trajectory in self._groups.pop(ticket)])
            for ticket in collected(ended, required, count)
        }

    def fetch(self, finished: Sequence[Generations | RemoteSamples]) -> list[Generations | None]:
        """Return the samples, which are already in this process."""
        return [samples for samples in finished if isinstance(samples, Generations)]

    def drop(self, tickets: Sequence[int]) -> None:
        """Stop conversations, and remove them."""
        self._engine.drop(self.forget(tickets))

    def forget_all(self) -> None:
        """Remove all conversations, because the engine of their turns is gone."""
        self.forget(list(self._groups))

    def forget(self, tickets: Sequence[int]) -> list[int]:
        """Remove conversations; return the engine's tickets of their turns, which an engine may still sample."""
        gone = set(tickets)
        dropped = [own for own, turn in self._asked.items() if turn.ticket in gone]
        for own in dropped:
            del self._asked[own]
        keys = [trajectory.key for ticket in gone for trajectory in self._groups.pop(ticket, ())]
        self._environment.forget(keys)
        for key in keys:
            self._answering.pop(key, None)
        return dropped

    def lost_tickets(self, among: Container[int] | None = None) -> list[int]:
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
        self._failure_rate.add(scores)
        return scores

    def _trajectory(self, opening: Opening, sampling: SamplingConfig) -> Trajectory:
        self._keys += 1
        return Trajectory(opening.prompt, opening.about, sampling, self._environment.counted, self._keys)

    def _ask(
        self, trajectories: Sequence[Trajectory], ticket: int, request: GroupRequest, sampling: SamplingConfig
    ) -> GroupRequest:
        self._tickets += 1
        own = replace(request, ticket=self._tickets)
        for trajectory in trajectories:
            trajectory.ask()
        self._asked[own.ticket] = _Asked(trajectories, own, sampling, ticket)
        return own

    def _finished(self, count: int) -> dict[int, Generations]:
        """Return at least `count` responses by the engine's tickets, and submit lost turns again."""
        held = self._engine.collect((), count)
        for own, samples in held.items():
            if isinstance(samples, RemoteSamples) and (asked := self._asked.get(own)):
                # The next turn finds this one in the prefix cache.
                self._asked[own] = replace(asked, request=replace(asked.request, engine=samples.engine))
        fetched = dict(zip(held, self._engine.fetch(list(held.values())), strict=True))
        lost = [self._asked[own] for own, responses in fetched.items() if responses is None and own in self._asked]
        self._send([(turn.request, turn.sampling) for turn in lost])
        return {own: responses for own, responses in fetched.items() if responses is not None}

    def _advance(self, *, wait: bool) -> bool:
        """Continue conversations with finished responses and answers; return True if there were any.

        Args:
            wait: wait for a response or an answer.
        """
        reporting = [own for own, turn in self._asked.items() if turn.request.reports_tokens]
        responses = self._finished(1 if wait and not self._answering and not reporting else 0)
        for own, generations in responses.items():
            # A turn of a dropped group is no longer in `_asked`.
            if turn := self._asked.pop(own, None):
                parts = generations.split([1] * len(generations.lengths))
                size = len(parts) // len(turn.trajectories)
                for place, trajectory in enumerate(turn.trajectories):
                    given = parts[place * size : (place + 1) * size]
                    texts = [self._text(part) for part in given]
                    self._begin(trajectory, turn, trajectory.respond(given, texts, self._max_turns))
        if reporting:
            self._show_tokens(reporting)
        if not self._answering:
            if reporting and wait and not responses:
                time.sleep(_REPORT_S)
            return bool(responses)
        wait_s = 0.0
        if wait and not responses:
            wait_s = _POLL_S if self._asked else _LONG_S
        answers = self._environment.answers(wait_s)
        next_turns: list[tuple[GroupRequest, SamplingConfig]] = []
        for key, answer in answers.items():
            trajectory, turn = self._answering.pop(key)
            if isinstance(answer, Score | ScoreWithMessages):
                trajectory.end(answer)
            elif trajectory.start(answer) if isinstance(answer, Start) else trajectory.observe(answer):
                next_turns.append(self._next_turn(trajectory, turn, answer))
            else:
                self._begin(trajectory, turn, trajectory.last_turn(turns_left=0))
        self._send(next_turns)
        return bool(responses or answers)

    def _show_tokens(self, reporting: Sequence[int]) -> None:
        """Let the environment see the tokens of responses in progress."""
        assert isinstance(self._engine, ReportingSampler) and isinstance(self._environment, WatchingEnvironment)
        start = time.monotonic()
        if start < self._next_report:
            return
        for own, responses in self._engine.tokens_so_far(reporting).items():
            # The responses may be finished.
            if turn := self._asked.get(own):
                self._environment.take_tokens(turn.trajectories[0].key, responses)
        # A report has all tokens of a response so far: many long streams must not fill the time.
        end = time.monotonic()
        self._next_report = end + min(_REPORTS_APART * (end - start), _LONG_S)

    def _begin(self, trajectory: Trajectory, asked: _Asked, turn: Turn) -> None:
        self._answering[trajectory.key] = (trajectory, asked)
        self._environment.begin(trajectory.key, turn)

    def _text(self, response: Generations) -> str:
        return str(self._tokenizer.decode(response.token_ids.tolist(), skip_special_tokens=True))

    def _next_turn(
        self, trajectory: Trajectory, turn: _Asked, answer: Start | Reply
    ) -> tuple[GroupRequest, SamplingConfig]:
        sample = next(place for place, member in enumerate(self._groups[turn.ticket]) if member is trajectory)
        seed = sample_seed(turn.request.seed, sample, trajectory.turns)
        room = trajectory.room_of_each(answer.num_responses)
        longest = room if answer.max_tokens is None else min(room, answer.max_tokens)
        images = turn.request.images
        reports_tokens = answer.reports_tokens and isinstance(self._engine, ReportingSampler)
        request = GroupRequest(
            0,
            trajectory.tokens,
            seed,
            max_tokens=longest,
            images=images,
            reports_tokens=reports_tokens,
            engine=turn.request.engine,
        )
        sampling = turn.sampling
        if sampling.num_samples != answer.num_responses:
            sampling = replace(sampling, num_samples=answer.num_responses)
        return self._ask([trajectory], turn.ticket, request, sampling), sampling

    def _send(self, turns: Sequence[tuple[GroupRequest, SamplingConfig]]) -> None:
        by_sampling: dict[SamplingConfig, list[GroupRequest]] = {}
        for request, sampling in turns:
            by_sampling.setdefault(sampling, []).append(request)
        for sampling, requests in by_sampling.items():
            self._engine.submit(requests, sampling, together=False)
