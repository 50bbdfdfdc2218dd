"""Conversations with the objects of a stateful environment: first messages, answers, rewards of turns, and scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl_plugins.data.chat_template import TemplateRefusal, check_chat_template, refused_messages
from rl_plugins.data.following_messages import TurnTokenizer
from rl_plugins.data.tokenization import TokenizerRefusal, encode_prompts
from rl_plugins.environments.object_host import ObjectHost
from rl_plugins.environments.stateful import StatefulEnvironment
from rl_plugins.environments.step_result import Answer
from rl_plugins.errors import ConfigError
from rl_plugins.rewards.loading import plain
from rl_plugins.rewards.records import Message, Score, ScoringRequest, both_kinds, failed, finite_score
from rl_plugins.rewards.trajectory import EnvironmentAnswer, Reply, ScoreWithMessages, Start, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class _ConversationState:
    """State of a conversation with an object.

    Attributes:
        turn: last response of the policy; None before the first.
        reward: sum of the rewards so far; None without a reward.
        num_answered: number of answered responses.
        is_ending: True while the object computes its final score.
    """

    turn: Turn | None = None
    reward: float | None = None
    num_answered: int = 0
    is_ending: bool = False


class StatefulConversations:
    """The `StartingEnvironment` of the objects.

    Args:
        host: processes of the objects.
        tokenizer: tokenizer of the policy.
        limits: environment with the limits of conversations.

    Raises:
        ConfigError: the chat template has no place for messages after a response.
    """

    counted: Sequence[str] = ()

    def __init__(self, host: ObjectHost, tokenizer: PreTrainedTokenizerBase, limits: StatefulEnvironment) -> None:
        check_chat_template(tokenizer)
        self._host, self._tokenizer, self._limits = host, tokenizer, limits
        self.max_failure_rate = limits.max_failure_rate
        self._turns = TurnTokenizer(tokenizer, limits.template_options)
        self._states: dict[int, _ConversationState] = {}

    def start(self, key: int, request: ScoringRequest, seed: int) -> None:
        """Start an object."""
        names = ("data_source", "ground_truth", "extra_info", "prompt")
        self._states[key] = _ConversationState()
        self._host.open(key, {**{name: plain(getattr(request, name)) for name in names}, "seed": seed})

    def begin(self, key: int, turn: Turn) -> None:
        """Send a response to its object; ask for the final score if the object has answered the response already."""
        state = self._states[key]
        state.turn = turn
        number = 1 + sum(message["role"] == "assistant" for message in turn.request.turns)
        if number > state.num_answered:
            state.num_answered = number
            content = {"role": "assistant", "content": turn.request.solution_str, "token_ids": turn.response}
            self._host.call(key, "step", content)
        else:
            self._ask_for_score(key, state)

    def answers(self, wait_s: float) -> Mapping[int, EnvironmentAnswer]:
        """Return the answers of objects. An object whose conversation has ended is closed."""
        answers: dict[int, EnvironmentAnswer] = {}
        for key, answer in self._host.answers(wait_s).items():
            if key not in self._states:
                continue
            if (read := self._read(key, self._states[key], answer)) is not None:
                answers[key] = read
        self.forget([key for key, answer in answers.items() if isinstance(answer, Score | ScoreWithMessages)])
        return answers

    def forget(self, keys: Sequence[int]) -> None:
        """Close the objects of conversations."""
        self._host.leave(keys)
        for key in keys:
            self._states.pop(key, None)

    def _read(self, key: int, state: _ConversationState, answer: Answer) -> EnvironmentAnswer | None:
        if answer.failure is not None:
            return failed(answer.failure, answer.fault)
        if state.turn is None:
            return self._start(answer.messages)
        if answer.reward is not None:
            state.reward = (state.reward or 0.0) + answer.reward
        if answer.score is not None:
            return self._scored(state, answer)
        if state.is_ending:
            return self._without_score(state)
        if not state.turn.request.turns_left:
            self._ask_for_score(key, state)
            return None
        try:
            tokens, was_cut = self._turns.tokens(
                answer.messages, state.turn.tokens[-1], self._limits.max_observation_tokens
            )
        except ConfigError as error:
            return failed("raised", str(error))
        return Reply(answer.messages, tokens, was_cut, reward=answer.reward or 0.0)

    def _ask_for_score(self, key: int, state: _ConversationState) -> None:
        state.is_ending = True
        self._host.call(key, "score")

    def _start(self, messages: Sequence[Message]) -> Start | Score:
        try:
            (tokens,) = encode_prompts([messages], self._tokenizer, self._limits.template_options)
        except TemplateRefusal as error:
            return failed("raised", refused_messages(self._tokenizer, messages, error))
        except TokenizerRefusal as error:
            return failed("raised", str(error))
        if len(tokens) > self._limits.max_prompt_tokens:
            return failed(
                "raised",
                f"the first messages of an environment have {len(tokens)} tokens, more than max_prompt_tokens="
                f"{self._limits.max_prompt_tokens} (data.max_prompt_tokens in a recipe)",
            )
        return Start(messages, tokens)

    def _scored(self, state: _ConversationState, answer: Answer) -> Score | ScoreWithMessages:
        assert answer.score is not None
        if answer.token_rewards is not None and state.reward:
            return both_kinds(Score(None))
        score = finite_score((state.reward or 0.0) + answer.score, answer.details, answer.token_rewards)
        return ScoreWithMessages(score, answer.messages) if answer.messages else score

    def _without_score(self, state: _ConversationState) -> Score:
        if state.reward is not None:
            return finite_score(state.reward, {})
        return failed(
            "raised",
            f"the conversation ended after {state.num_answered} turns without a reward: write `async def score(self)`, "
            "return a StepResult with a reward for each turn, or raise max_turns (environment.max_turns in a recipe)",
        )
