"""Conversation of a policy with an environment: a reward function that may reply before it returns a score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np

from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.data.tokenization import TurnTokenizer
from rl_plugins.rewards.records import Message, Score, ScoringRequest
from rl_plugins.rollout.engine import Generations


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
