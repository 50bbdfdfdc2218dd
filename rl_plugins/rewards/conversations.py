"""Groups of conversations between a policy, sampled by a rollout engine, and an environment.

The environment answers each response as soon as the response is finished, so the rollout engine samples while the
environment works. The first turns of a group are sampled together, as without an environment. Later turns find all
earlier messages in the prefix cache of the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from rl_plugins.config.sampling import EnvironmentConfig, SamplingConfig
from rl_plugins.data.tokenization import TurnTokenizer
from rl_plugins.errors import ConfigError
from rl_plugins.rewards.records import Message, Score, ScoringRequest, check_failure_rate
from rl_plugins.rollout.engine import Generations, GroupRequest, RemoteSamples, RolloutEngine, sample_seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@runtime_checkable
class Environment(Protocol):
    """Replies to responses, or scores them; see `rl_plugins.rewards`."""

    max_failure_rate: float

    def answer(self, requests: Sequence[ScoringRequest]) -> list[Score]:
        """Return a reply or a score for each response, in order. A failure is recorded in its score."""


@dataclass(frozen=True)
class Ending:
    """Result of a finished conversation.

    Attributes:
        score: score of the whole conversation.
        said: messages of the policy and of the environment, in turns.
        cut: number of replies that were cut because they were too long.
    """

    score: Score
    said: Sequence[Message]
    cut: int

    @property
    def turns(self) -> int:
        """Number of responses of the policy."""
        return len(self.said) // 2 + 1

    @property
    def last(self) -> str:
        """Text of the last response of the policy."""
        return str(self.said[-1]["content"])

    def transcript(self) -> str:
        """Return all messages as readable text."""
        first, *rest = self.said
        return "\n".join([first["content"], *(f"[{message['role']}] {message['content']}" for message in rest)])


RECORDS = (Score, Ending)
"""Classes in files of samples, beside plain values."""


class Trajectory:
    """A conversation so far, as messages and as tokens.

    Args:
        prompt: token ids of the prompt.
        request: scoring request for a response to the prompt, without the response.
        sampling: options of sampling; `max_tokens` is the limit of all turns together, replies included.

    Attributes:
        ending: result of the conversation; None until the conversation has ended.
    """

    def __init__(self, prompt: list[int], request: ScoringRequest, sampling: SamplingConfig) -> None:
        self._prompt, self._request, self._sampling = prompt, request, sampling
        self._token_ids: list[int] = []
        self._log_probs: list[float] = []
        self._versions: list[int] = []
        self._sampled: list[bool] = []
        self._said: list[Message] = []
        self._cut = 0
        self._finish_reason = ""
        self.ending: Ending | None = None

    @property
    def turns(self) -> int:
        """Number of responses of the policy."""
        return (len(self._said) + 1) // 2

    @property
    def tokens(self) -> list[int]:
        """Token ids of the prompt and of all messages."""
        return [*self._prompt, *self._token_ids]

    @property
    def room(self) -> int:
        """Largest number of tokens of the next response."""
        return self._sampling.max_tokens - len(self._token_ids)

    def respond(self, response: Generations, text: str, max_turns: int) -> ScoringRequest:
        """Add a response of the policy, and return the request to the environment.

        Args:
            response: one response.
            text: decoded text of the response.
            max_turns: largest number of responses of the policy in the conversation.
        """
        self._token_ids += response.token_ids.tolist()
        self._log_probs += response.log_probs.tolist()
        self._versions += response.policy_versions.tolist()
        self._sampled += [True] * len(response.token_ids)
        (self._finish_reason,) = response.finish_reasons
        self._said.append({"role": "assistant", "content": text})
        # A response that was cut off is incomplete, so no further turn follows.
        left = max_turns - self.turns if self._finish_reason == "stop" else 0
        return self.asking(left)

    def asking(self, turns_left: int) -> ScoringRequest:
        """Return the request to the environment for the last response."""
        *before, last = self._said
        return replace(self._request, solution_str=last["content"], turns=tuple(before), turns_left=turns_left)

    def observe(self, reply: Message, tokenizer: TurnTokenizer, max_tokens: int) -> bool:
        """Add a reply of the environment.

        Args:
            reply: message of the environment.
            tokenizer: turn tokenizer of the policy.
            max_tokens: largest number of tokens of the reply.

        Returns:
            False if no tokens are left for a response to the reply; the reply is then not added.
        """
        last = self._token_ids[-1] if self._token_ids else -1
        tokens, was_cut = tokenizer.tokens(reply, last, max_tokens)
        if len(tokens) >= self.room:
            self._finish_reason = "length"
            return False
        self._token_ids += tokens
        self._log_probs += [0.0] * len(tokens)
        self._versions += [self._versions[-1] if self._versions else 0] * len(tokens)
        self._sampled += [False] * len(tokens)
        self._said.append(reply)
        self._cut += was_cut
        return True

    def end(self, score: Score) -> None:
        """End the conversation with the score, or the failure, of the environment."""
        self.ending = Ending(score, tuple(self._said), self._cut)

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
class _Turn:
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
        environment: scorer that can reply to responses.
        tokenizer: tokenizer of the policy.
        config: limits of conversations.

    Raises:
        ConfigError: the environment cannot reply, or the chat template has no place for a reply.
    """

    def __init__(self, environment: Any, tokenizer: PreTrainedTokenizerBase, config: EnvironmentConfig) -> None:
        if not isinstance(environment, Environment):
            raise ConfigError(
                f"environment.max_turns={config.max_turns}: the scorer {type(environment).__name__} cannot answer: "
                "use RewardPool or InlineScorer"
            )
        self._environment, self._tokenizer, self._config = environment, tokenizer, config
        self._turns = TurnTokenizer(tokenizer, config.template_options)
        self._engine: Any = None
        self._groups: dict[int, list[Trajectory]] = {}
        # Turns that the engine samples, by the engine's tickets.
        self._asked: dict[int, _Turn] = {}
        self._tickets = 0

    def by(self, engine: RolloutEngine) -> Conversations:
        """Set the rollout engine that samples, and return this object."""
        self._engine = engine
        return self

    def submit(self, requests: Sequence[GroupRequest], sampling: SamplingConfig, *, together: bool = True) -> None:
        """Start `num_samples` conversations with each prompt."""
        first_turns = []
        for opening in requests:
            assert isinstance(opening, Opening)
            trajectories = [Trajectory(opening.prompt, opening.about, sampling) for _ in range(sampling.num_samples)]
            self._groups[opening.ticket] = trajectories
            request = GroupRequest(0, opening.prompt, opening.seed)
            first_turns.append(self._ask(trajectories, opening.ticket, request, sampling))
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
                self._advance(self._finished(1))
            elif not self._advance(self._finished(0)):
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
        for ticket in gone:
            self._groups.pop(ticket, None)

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

    def _ask(
        self, trajectories: Sequence[Trajectory], ticket: int, request: GroupRequest, sampling: SamplingConfig
    ) -> GroupRequest:
        self._tickets += 1
        own = replace(request, ticket=self._tickets)
        self._asked[own.ticket] = _Turn(trajectories, own, sampling, ticket)
        return own

    def _finished(self, count: int) -> dict[int, Generations]:
        """Return at least `count` responses by the engine's tickets, and submit lost turns again."""
        held = self._engine.collect((), count)
        fetched = dict(zip(held, self._engine.fetch(list(held.values())), strict=True))
        lost = [self._asked[own] for own, responses in fetched.items() if responses is None and own in self._asked]
        self._send([(turn.request, turn.sampling) for turn in lost])
        return {own: responses for own, responses in fetched.items() if responses is not None}

    def _advance(self, finished: Mapping[int, Generations]) -> bool:
        """Let the environment answer responses, and submit the next turns; return True if there were responses."""
        spoken: list[tuple[Trajectory, Generations, _Turn]] = []
        for own, generations in finished.items():
            # A turn of a dropped group is no longer in `_asked`.
            if turn := self._asked.pop(own, None):
                parts = generations.split([1] * len(turn.trajectories))
                spoken += [(trajectory, part, turn) for trajectory, part in zip(turn.trajectories, parts, strict=True)]
        max_turns = self._config.max_turns
        asked = [trajectory.respond(response, self._text(response), max_turns) for trajectory, response, _ in spoken]
        next_turns: list[tuple[GroupRequest, SamplingConfig]] = []
        too_long: list[Trajectory] = []
        for (trajectory, _, turn), score in zip(spoken, self._environment.answer(asked), strict=True):
            if score.reply is None:
                trajectory.end(score)
            elif trajectory.observe(score.reply, self._turns, self._config.max_observation_tokens):
                next_turns.append(self._next_turn(trajectory, turn))
            else:
                too_long.append(trajectory)
        scores = self._environment.answer([trajectory.asking(turns_left=0) for trajectory in too_long])
        for trajectory, score in zip(too_long, scores, strict=True):
            trajectory.end(score)
        self._send(next_turns)
        return bool(spoken)

    def _text(self, response: Generations) -> str:
        return str(self._tokenizer.decode(response.token_ids.tolist(), skip_special_tokens=True))

    def _next_turn(self, trajectory: Trajectory, turn: _Turn) -> tuple[GroupRequest, SamplingConfig]:
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
