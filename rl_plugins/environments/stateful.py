"""Stateful environments: `StatefulEnvironment(Game)`, with an object of a user's class for each conversation.

The object starts the conversation with its first messages, answers each response of the policy, rewards turns, and
scores the conversation. The reward of a conversation is the sum of all rewards. An object that raises, hangs or dies is
a failed reward of its own conversation, which is counted by kind and left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rl_plugins.config.settings import ABOVE_0, AT_LEAST_1, FROM_0_TO_1, check_ranges
from rl_plugins.data.tokenization import TurnTokenizer, check_chat_template, encode_prompts
from rl_plugins.environments.object_host import ObjectHost
from rl_plugins.environments.object_process import ObjectTask
from rl_plugins.environments.step_result import Answer
from rl_plugins.errors import ConfigError
from rl_plugins.rewards.conversations import LastWords, Reply, Start, Turn
from rl_plugins.rewards.limits import WorkerLimits
from rl_plugins.rewards.loading import plain
from rl_plugins.rewards.records import Message, Score, ScoringRequest, failed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A response without an answer, as an untrained policy may give.
_NO_ANSWER = "?"


class StatefulEnvironment:
    """Class of the user, with an object in a process of its own for each conversation.

    The class has three coroutine functions:

    - `reset(row)` returns the first messages to the policy, which take the place of the row's prompt. The row has
      `prompt`, `data_source`, `ground_truth`, `extra_info` and `seed`, which is equal for all samples of a group.
    - `step(message)` takes a message of the policy, and returns messages to the policy, a final score, or a
      `StepResult` with messages and rewards.
    - `close()` releases all resources.

    A fourth, `score()`, is optional. It returns the final score of a conversation that ends without one, because the
    policy may not respond again.

    Example:
        class Guess:
            async def reset(self, row):
                self.number = row["ground_truth"]
                return "Guess my number."

            async def step(self, message):
                if message["content"] == self.number:
                    return 1.0
                return rl.StepResult("No.", reward=-0.1)

            async def close(self):
                pass

        stage = rl.PolicyOptimization(..., environment=rl.StatefulEnvironment(Guess))

    Args:
        environment: the class; its dotted name; or a mapping: `_target_`, or `path` and `name`, and the arguments of
            the constructor.
        max_turns: largest number of responses of the policy in a conversation.
        max_objects: largest number of objects at once; further conversations wait.
        deadline_s: seconds for one call of a method.
        load_timeout_s: seconds for loading the class.
        memory_mb: memory of an object, in MiB, beyond the loaded class; None is half of the free memory.
        pass_env: names of environment variables with secrets for the objects.
        max_observation_tokens: largest number of tokens of the texts of one answer; a longer text is cut at the end.
        max_prompt_tokens: largest number of tokens of the first messages.
        max_failure_rate: share of failed conversations above which the run ends.
        template_options: further variables of the chat template.

    Raises:
        ConfigError: an option is out of range, or the class cannot be loaded or is no stateful environment.
    """

    def __init__(
        self,
        environment: type | str | Mapping[str, Any],
        *,
        max_turns: int = 8,
        max_objects: int = 64,
        deadline_s: float = 10.0,
        load_timeout_s: float = 30.0,
        memory_mb: int | None = None,
        pass_env: Sequence[str] = (),
        max_observation_tokens: int = 256,
        max_prompt_tokens: int = 512,
        max_failure_rate: float = 0.0,
        template_options: Mapping[str, Any] | None = None,
    ) -> None:
        check_ranges(
            int,
            AT_LEAST_1,
            max_turns=max_turns,
            max_objects=max_objects,
            max_observation_tokens=max_observation_tokens,
            max_prompt_tokens=max_prompt_tokens,
        )
        check_ranges(float, ABOVE_0, deadline_s=deadline_s, load_timeout_s=load_timeout_s)
        check_ranges(float, FROM_0_TO_1, max_failure_rate=max_failure_rate)
        self.max_turns, self.max_failure_rate = max_turns, max_failure_rate
        self.max_observation_tokens, self.max_prompt_tokens = max_observation_tokens, max_prompt_tokens
        self.template_options = dict(template_options or {})
        limits = WorkerLimits.of(pass_env, memory_mb, "environment.pass_env")
        config = plain(environment) if isinstance(environment, Mapping) else {"_target_": environment}
        self._host = ObjectHost(ObjectTask(config, limits, deadline_s), max_objects, load_timeout_s)

    def connect(self, tokenizer: PreTrainedTokenizerBase) -> StatefulConversations:
        """Return the environment of the conversations of a policy.

        Raises:
            ConfigError: the chat template has no place for messages after a response.
        """
        return StatefulConversations(self._host, tokenizer, self)

    def try_out(self, request: ScoringRequest, tokenizer: PreTrainedTokenizerBase) -> None:
        """Let an object start with a row, and answer one response.

        Args:
            request: row of the data, without a response.
            tokenizer: tokenizer of the policy.

        Raises:
            ConfigError: the object fails, or the chat template refuses its messages.
        """
        talk = self.connect(tokenizer)
        talk.start(0, request, seed=0)
        answer = self._next_answer(talk, request)
        if isinstance(answer, Start):
            asked = replace(
                request, solution_str=_NO_ANSWER, prompt=list(answer.messages), turns_left=self.max_turns - 1
            )
            talk.begin(0, Turn(asked, answer.tokens, 0))
            self._next_answer(talk, request)
        talk.forget([0])

    @staticmethod
    def _next_answer(talk: StatefulConversations, request: ScoringRequest) -> object:
        while not (answers := talk.answers(1.0)):
            pass
        (answer,) = answers.values()
        if isinstance(answer, Score) and answer.failure is not None:
            raise ConfigError(
                f"the environment fails on a row of data_source {request.data_source!r}: {answer.failure}: "
                f"{answer.message}"
            )
        return answer

    def close(self) -> None:
        """Close all objects, and end all processes."""
        self._host.close()


@dataclass
class _Talk:
    """A conversation with an object.

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
        limits: limits of conversations.

    Raises:
        ConfigError: the chat template has no place for messages after a response.
    """

    counted: Sequence[str] = ()

    def __init__(self, host: ObjectHost, tokenizer: PreTrainedTokenizerBase, limits: StatefulEnvironment) -> None:
        check_chat_template(tokenizer)
        self._host, self._tokenizer, self._limits = host, tokenizer, limits
        self.max_failure_rate = limits.max_failure_rate
        self._turns = TurnTokenizer(tokenizer, limits.template_options)
        self._talks: dict[int, _Talk] = {}

    def start(self, key: int, request: ScoringRequest, seed: int) -> None:
        """Start an object."""
        names = ("data_source", "ground_truth", "extra_info", "prompt")
        self._talks[key] = _Talk()
        self._host.open(key, {**{name: plain(getattr(request, name)) for name in names}, "seed": seed})

    def begin(self, key: int, turn: Turn) -> None:
        """Send a response to its object; ask for the final score if the object has answered the response already."""
        talk = self._talks[key]
        talk.turn = turn
        number = 1 + sum(message["role"] == "assistant" for message in turn.request.turns)
        if number > talk.num_answered:
            talk.num_answered = number
            self._host.call(key, "step", {"role": "assistant", "content": turn.request.solution_str})
        else:
            self._ask_for_score(key, talk)

    def answers(self, wait_s: float) -> Mapping[int, Reply | Score | Start | LastWords]:
        """Return the answers of objects. An object whose conversation has ended is closed."""
        answers: dict[int, Reply | Score | Start | LastWords] = {}
        for key, answer in self._host.answers(wait_s).items():
            if key not in self._talks:
                continue
            if (read := self._read(key, self._talks[key], answer)) is not None:
                answers[key] = read
        self.forget([key for key, answer in answers.items() if isinstance(answer, Score | LastWords)])
        return answers

    def forget(self, keys: Sequence[int]) -> None:
        """Close the objects of conversations."""
        self._host.leave(keys)
        for key in keys:
            self._talks.pop(key, None)

    def _read(self, key: int, talk: _Talk, answer: Answer) -> Reply | Score | Start | LastWords | None:
        if answer.failure is not None:
            return failed(answer.failure, answer.fault)
        if talk.turn is None:
            return self._start(answer.messages)
        if answer.reward is not None:
            talk.reward = (talk.reward or 0.0) + answer.reward
        if answer.score is not None:
            return self._scored(talk, answer)
        if talk.is_ending:
            return self._without_score(talk)
        if not talk.turn.request.turns_left:
            self._ask_for_score(key, talk)
            return None
        try:
            tokens, was_cut = self._turns.tokens(
                answer.messages, talk.turn.tokens[-1], self._limits.max_observation_tokens
            )
        except ConfigError as error:
            return failed("raised", str(error))
        return Reply(answer.messages, tokens, was_cut, reward=answer.reward or 0.0)

    def _ask_for_score(self, key: int, talk: _Talk) -> None:
        talk.is_ending = True
        self._host.call(key, "score")

    def _start(self, messages: Sequence[Message]) -> Start | Score:
        from jinja2 import TemplateError

        try:
            (tokens,) = encode_prompts([messages], self._tokenizer, self._limits.template_options)
        except TemplateError as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            return failed("raised", f"the chat template refuses first messages of the roles {roles}: {error}")
        if len(tokens) > self._limits.max_prompt_tokens:
            return failed(
                "raised",
                f"the first messages of an environment have {len(tokens)} tokens, more than max_prompt_tokens="
                f"{self._limits.max_prompt_tokens} (data.max_prompt_tokens in a recipe)",
            )
        return Start(messages, tokens)

    def _scored(self, talk: _Talk, answer: Answer) -> Score | LastWords:
        assert answer.score is not None
        score = _finite((talk.reward or 0.0) + answer.score, answer.details)
        return LastWords(score, answer.messages) if answer.messages else score

    def _without_score(self, talk: _Talk) -> Score:
        if talk.reward is not None:
            return _finite(talk.reward, {})
        return failed(
            "raised",
            f"the conversation ended after {talk.num_answered} turns without a reward: write `async def score(self)`, "
            "return a StepResult with a reward for each turn, or raise max_turns (environment.max_turns in a recipe)",
        )


def _finite(value: float, details: Mapping[str, float]) -> Score:
    """Return the score of a value; the sum of finite rewards may be infinite."""
    if abs(value) == float("inf"):
        return failed("not_finite", f"the sum of the rewards is {value}")
    return Score(value, dict(details))
