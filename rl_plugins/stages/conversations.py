"""Groups of conversations, on the way between an engine that samples what the policy says and an environment.

A response is answered when it is finished, whatever the others do: while the environment works, the engine samples.
The first turns of a group are sampled together, as without an environment; later ones find in the engine's prefix
cache all that was said before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rl_plugins.data.tokenization import TurnTokenizer
from rl_plugins.errors import ConfigError
from rl_plugins.rewards.records import Score, ScoringRequest, check_failure_rate
from rl_plugins.rollout.engine import Generations, GroupRequest, RemoteSamples, RolloutEngine, SamplingConfig
from rl_plugins.stages.environment import Ending, Environment, EnvironmentConfig, Trajectory
from rl_plugins.stages.seeds import seed_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class Opening(GroupRequest):
    """A prompt that conversations begin with.

    Attributes:
        about: of a response to the prompt, without the response.
    """

    about: ScoringRequest


@dataclass(frozen=True)
class _Turn:
    """What an engine was asked for.

    Attributes:
        trajectories: that its responses belong to.
        request: as it was asked.
        sampling: as it was asked.
        ticket: of the group.
    """

    trajectories: Sequence[Trajectory]
    request: GroupRequest
    sampling: SamplingConfig
    ticket: int


class Conversations:
    """The groups of one rank: what `GroupSampler` is, by an engine and an environment.

    Args:
        environment: answers.
        tokenizer: of the policy.
        config: how long conversations may be.

    Raises:
        ConfigError: the environment cannot answer, or the chat template has no place for it.
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
        # What the engine has, by its own tickets.
        self._asked: dict[int, _Turn] = {}
        self._tickets = 0

    def by(self, engine: RolloutEngine) -> Conversations:
        """The same, with the engine that samples."""
        self._engine = engine
        return self

    def submit(self, requests: Sequence[GroupRequest], sampling: SamplingConfig, *, together: bool = True) -> None:
        """Begin `num_samples` conversations with each prompt."""
        first_turns = []
        for one in requests:
            assert isinstance(one, Opening)
            trajectories = [Trajectory(one.prompt, one.about, sampling) for _ in range(sampling.num_samples)]
            self._groups[one.ticket] = trajectories
            first_turns.append(self._ask(trajectories, one.ticket, GroupRequest(0, one.prompt, one.seed), sampling))
        self._engine.submit(first_turns, sampling, together=together)

    def collect(self, required: Sequence[int], count: int) -> dict[int, Generations]:
        """Go on with all conversations until those that are waited for have ended.

        Returns:
            Those that are required, and if that is not all that is waited for, all that have ended; by the tickets of
            their openings.
        """
        while True:
            ended = [ticket for ticket, group in self._groups.items() if all(one.ending for one in group)]
            if required or count:
                if len(ended) >= count and set(required) <= set(ended):
                    break
                self._advance(self._finished(1))
            elif not self._advance(self._finished(0)):
                break
        taken = ended if count or not required else required
        return {ticket: Generations.concat([one.generations() for one in self._groups.pop(ticket)]) for ticket in taken}

    def fetch(self, finished: Sequence[Generations | RemoteSamples]) -> list[Generations | None]:
        """They are in this process."""
        return [one for one in finished if isinstance(one, Generations)]

    def drop(self, tickets: Sequence[int]) -> None:
        """Break off conversations, and forget them."""
        gone = set(tickets)
        dropped = [own for own, turn in self._asked.items() if turn.ticket in gone]
        self._engine.drop(dropped)
        for own in dropped:
            del self._asked[own]
        for ticket in gone:
            self._groups.pop(ticket, None)

    def lost_tickets(self) -> list[int]:
        """None: a lost engine takes a turn with it, which is asked for again, and not what was said before."""
        lost = [self._asked[own] for own in self._engine.lost_tickets() if own in self._asked]
        self._send([(turn.request, turn.sampling) for turn in lost])
        return []

    def scores(self, endings: Sequence[Ending]) -> list[Score]:
        """What the environment gave in the end.

        Raises:
            RewardError: too many failures.
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
        """Responses by the engine's tickets, `count` of them at least; lost ones are asked for again."""
        held = self._engine.collect((), count)
        fetched = dict(zip(held, self._engine.fetch(list(held.values())), strict=True))
        lost = [self._asked[own] for own, responses in fetched.items() if responses is None and own in self._asked]
        self._send([(turn.request, turn.sampling) for turn in lost])
        return {own: responses for own, responses in fetched.items() if responses is not None}

    def _advance(self, finished: Mapping[int, Generations]) -> bool:
        """Have responses answered, and go on with those that are not at their end; whether there were any."""
        spoken: list[tuple[Trajectory, Generations, _Turn]] = []
        for own, generations in finished.items():
            # One that was dropped in the meantime is of no use.
            if turn := self._asked.pop(own, None):
                parts = generations.split([1] * len(turn.trajectories))
                spoken += [(one, part, turn) for one, part in zip(turn.trajectories, parts, strict=True)]
        asked = [one.respond(response, self._text(response), self._config.max_turns) for one, response, _ in spoken]
        next_turns: list[tuple[GroupRequest, SamplingConfig]] = []
        too_long: list[Trajectory] = []
        for (one, _, turn), score in zip(spoken, self._environment.answer(asked), strict=True):
            if score.reply is None:
                one.end(score)
            elif one.observe(score.reply, self._turns, self._config.max_observation_tokens):
                next_turns.append(self._next_turn(one, turn))
            else:
                too_long.append(one)
        scores = self._environment.answer([one.asking(turns_left=0) for one in too_long])
        for one, score in zip(too_long, scores, strict=True):
            one.end(score)
        self._send(next_turns)
        return bool(spoken)

    def _text(self, response: Generations) -> str:
        return str(self._tokenizer.decode(response.token_ids.tolist(), skip_special_tokens=True))

    def _next_turn(self, one: Trajectory, turn: _Turn) -> tuple[GroupRequest, SamplingConfig]:
        sample = next(place for place, other in enumerate(self._groups[turn.ticket]) if other is one)
        seed = seed_of(turn.request.seed, sample, one.turns)
        request = GroupRequest(0, one.tokens, seed, max_tokens=one.room)
        alone = replace(turn.sampling, num_samples=1)
        return self._ask([one], turn.ticket, request, alone), alone

    def _send(self, turns: Sequence[tuple[GroupRequest, SamplingConfig]]) -> None:
        alike: dict[SamplingConfig, list[GroupRequest]] = {}
        for request, sampling in turns:
            alike.setdefault(sampling, []).append(request)
        for sampling, requests in alike.items():
            self._engine.submit(requests, sampling, together=False)
