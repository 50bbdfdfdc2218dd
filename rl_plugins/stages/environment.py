"""A conversation of a policy with an environment: a reward function that may answer before it gives a score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from rl_plugins.data.tokenization import TurnTokenizer
from rl_plugins.errors import ConfigError
from rl_plugins.rewards.records import Message, Score, ScoringRequest
from rl_plugins.rollout.engine import Generations, SamplingConfig


@dataclass(frozen=True)
class EnvironmentConfig:
    """How long conversations may be.

    Attributes:
        max_turns: how often the policy speaks, at most; 1 is a response without a conversation.
        max_observation_tokens: of what is said to it in one turn; what is longer is cut behind them.
        template_options: further arguments of the chat template.
    """

    max_turns: int = 1
    max_observation_tokens: int = 256
    template_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what is no conversation.

        Raises:
            ConfigError: a number below 1.
        """
        for name, value in (("max_turns", self.max_turns), ("max_observation_tokens", self.max_observation_tokens)):
            if value < 1:
                raise ConfigError(f"environment.{name}={value}: must be at least 1")


@runtime_checkable
class Environment(Protocol):
    """Answers responses; see `rl_plugins.rewards`."""

    max_failure_rate: float

    def answer(self, requests: Sequence[ScoringRequest]) -> list[Score]:
        """A reply or a score for each response, in order; failures are recorded."""


@dataclass(frozen=True)
class Ending:
    """How a conversation ended.

    Attributes:
        score: of the whole.
        said: by the policy and to it, in turns.
        cut: how many answers of the environment were too long.
    """

    score: Score
    said: Sequence[Message]
    cut: int

    @property
    def turns(self) -> int:
        """How often the policy spoke."""
        return len(self.said) // 2 + 1

    @property
    def last(self) -> str:
        """What the policy said in the end."""
        return str(self.said[-1]["content"])

    def transcript(self) -> str:
        """All that was said, for people."""
        first, *others = self.said
        return "\n".join([first["content"], *(f"[{one['role']}] {one['content']}" for one in others)])


class Trajectory:
    """What was said so far, as messages and as tokens.

    Args:
        prompt: token ids.
        request: of a response to the prompt, without the response.
        sampling: `max_tokens` is for all turns, what is said to the policy included.

    Attributes:
        ending: when it has ended.
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
        """How often the policy spoke."""
        return (len(self._said) + 1) // 2

    @property
    def tokens(self) -> list[int]:
        """Prompt and all that was said."""
        return [*self._prompt, *self._token_ids]

    @property
    def room(self) -> int:
        """Tokens that the next response may have."""
        return self._sampling.max_tokens - len(self._token_ids)

    def respond(self, response: Generations, text: str, max_turns: int) -> ScoringRequest:
        """The policy has spoken; returns what the environment is asked.

        Args:
            response: one.
            text: the same as text.
            max_turns: how often it may speak in all.
        """
        self._token_ids += response.token_ids.tolist()
        self._log_probs += response.log_probs.tolist()
        self._versions += response.policy_versions.tolist()
        self._sampled += [True] * len(response.token_ids)
        (self._finish_reason,) = response.finish_reasons
        # Who was interrupted has not said all.
        self._said.append({"role": "assistant", "content": text})
        left = max_turns - self.turns if self._finish_reason == "stop" else 0
        return self.asking(left)

    def asking(self, turns_left: int) -> ScoringRequest:
        """What the environment is asked about the last response."""
        *before, last = self._said
        return replace(self._request, solution_str=last["content"], turns=tuple(before), turns_left=turns_left)

    def observe(self, reply: Message, tokenizer: TurnTokenizer, max_tokens: int) -> bool:
        """Take in what the environment says; False, and nothing is taken in, if no room is left for a response to it.

        Args:
            reply: the message.
            tokenizer: of the policy.
            max_tokens: of the message.
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
        """The environment has given a score, or failed."""
        self.ending = Ending(score, tuple(self._said), self._cut)

    def generations(self) -> Generations:
        """The whole as one response."""
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
