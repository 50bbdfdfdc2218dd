"""Tools of the policy: `ToolEnvironment([search])`, and the conversation with the results.

A response is read as token ids by a parser. All calls of a response run at once. Their results come back as token ids
in the tool role of the chat template, and the policy responds again. A response without a call is the answer, which the
reward function scores. A call that fails in any way gives the policy a short text, and is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any

from rl_plugins.config.sampling import EnvironmentOptions
from rl_plugins.data.following_messages import ToolMessages
from rl_plugins.environments.tool_functions import shortened
from rl_plugins.environments.tool_host import Result, ToolHost
from rl_plugins.environments.tool_process import ToolTask
from rl_plugins.errors import ConfigError
from rl_plugins.rewards.limits import WorkerLimits
from rl_plugins.rewards.loading import load_callable
from rl_plugins.rewards.records import Score, failed
from rl_plugins.rewards.replies import ReplyingScorer, TurnRewards, TurnScoring, replying
from rl_plugins.rewards.trajectory import Reply, Turn
from rl_plugins.rollout.tool_calls import FunctionParser, ResponseParser, ToolCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KINDS = tuple(f"tools/{kind}" for kind in ("calls", "malformed", "unknown", "late", "raised", "died"))
"""Counted events: calls, and failures of calls by kind."""
_NAMES_SHOWN = 20
_NAME_SHOWN = 80
"""Characters of an unknown name."""
# A wait for tools ends early while scores are computed.
_POLL_S = 0.005
_MOST_CALLS = 32
"""Calls of a response that run. A response in a loop would keep the calls of all other conversations waiting."""

Parser = str | Callable[[str], Sequence[Mapping[str, Any]]] | Mapping[str, Any]


class ToolEnvironment:
    """Tools of a policy, in a process of their own.

    Example:
        def search(query: str) -> str:
            '''Search the encyclopedia.

            Args:
                query: words to search for.
            '''
            ...

        tools = rl.ToolEnvironment([search, {"mcp": "http://localhost:8000/mcp"}])
        data = rl.PromptDataModule(..., chat_template_kwargs=tools.template_options)
        stage = rl.PolicyOptimization(..., environment=tools)

    A result with a reward of the turn is a `ToolResult`.

    Args:
        tools: functions with type hints and docstrings, plain or async; dotted names of functions; or mappings:
            `_target_`, or `path` and `name`, with arguments of every call (of the constructor of a class), or `mcp`
            with the command or the address of an MCP server.
        parser: name of a tool parser of vLLM; or a function, or its dotted name, from the text of a response to a list
            of calls, which are mappings with `name` and `arguments`.
        max_turns: largest number of responses of the policy in a conversation, 2 or more.
        deadline_s: seconds for one call.
        max_characters: largest number of characters of a result.
        left_out: part left out of a longer result: `beginning`, `middle` or `end`.
        load_timeout_s: seconds for the start of an MCP server.
        memory_mb: memory of the process of the tools, in MiB, beyond the process itself; None is half of the free
            memory.
        pass_env: names of environment variables with secrets for the tools.
        template_options: further variables of the chat template.

    Attributes:
        schemas: JSON schema of each tool.

    Raises:
        ConfigError: an option is out of range, a tool cannot be loaded or has no docstring or type hints, two tools
            have one name, or an MCP server does not start.
    """

    def __init__(
        self,
        tools: Sequence[Any],
        *,
        parser: Parser = "hermes",
        max_turns: int = 8,
        deadline_s: float = 10.0,
        max_characters: int = 2000,
        left_out: str = "middle",
        load_timeout_s: float = 30.0,
        memory_mb: int | None = None,
        pass_env: Sequence[str] = (),
        template_options: Mapping[str, Any] | None = None,
    ) -> None:
        EnvironmentOptions.check_fields(
            max_turns=max_turns,
            max_characters=max_characters,
            left_out=left_out,
            deadline_s=deadline_s,
            load_timeout_s=load_timeout_s,
        )
        if max_turns < 2:
            raise ConfigError(f"max_turns={max_turns}: the policy responds again after a call: set 2 or more")
        if not tools:
            raise ConfigError("tools=[]: name at least one tool")
        self.max_turns, self._parser = max_turns, load_parser(parser)
        self._template_options = dict(template_options or {})
        limits = WorkerLimits.of(pass_env, memory_mb, option="pass_env")
        self._host = ToolHost(ToolTask(list(tools), limits, deadline_s, max_characters, load_timeout_s, left_out))
        self.schemas = self._host.schemas
        if not self.schemas:
            raise ConfigError("tools: the MCP servers offer no tool: name at least one tool")

    @property
    def template_options(self) -> dict[str, Any]:
        """Variables of the chat template with the tools, for data modules (`chat_template_kwargs`)."""
        return {**self._template_options, "tools": list(self.schemas)}

    def connect(self, scorer: Any, tokenizer: PreTrainedTokenizerBase) -> ToolConversations:
        """Return the environment of the conversations of a policy.

        Args:
            scorer: scorer of whole conversations.
            tokenizer: tokenizer of the policy.

        Raises:
            ConfigError: the scorer cannot answer, or the tokenizer has no place for tools; see `check`.
        """
        parser, messages = self.check(tokenizer)
        return ToolConversations(self._host, parser, messages, replying(scorer, self.max_turns), tokenizer)

    def check(self, tokenizer: PreTrainedTokenizerBase) -> tuple[ResponseParser, ToolMessages]:
        """Return the parser and the tokens of results for a tokenizer.

        Raises:
            ConfigError: the chat template shows no tools or has no tool role, or the parser does not exist or does not
                fit the tokenizer.
        """
        messages = ToolMessages(tokenizer, self.template_options)
        return parser_for(self._parser, tokenizer, self.schemas, self.template_options), messages

    def close(self) -> None:
        """End the process of the tools."""
        self._host.close()


def load_parser(parser: Parser) -> str | Callable[[str], Sequence[Mapping[str, Any]]]:
    """Return the function of a parser, or the name of a parser of vLLM."""
    if callable(parser) or (isinstance(parser, str) and "." not in parser):
        return parser
    config = {"_target_": parser} if isinstance(parser, str) else parser
    _, function, fixed = load_callable(config, "parser")
    return partial(function, **fixed) if fixed else function


def parser_for(
    parser: str | Callable[[str], Sequence[Mapping[str, Any]]],
    tokenizer: PreTrainedTokenizerBase,
    schemas: Sequence[Mapping[str, Any]],
    template_options: Mapping[str, Any],
) -> ResponseParser:
    """Return the parser for a tokenizer and tools.

    Raises:
        ConfigError: vLLM has no parser of this name, or the parser does not fit the tokenizer or its chat template.
    """
    if not isinstance(parser, str):
        return FunctionParser(parser, tokenizer)
    from rl_plugins.rollout.vllm.tool_parser import VLLMToolParser

    return VLLMToolParser(parser, tokenizer, schemas, template_options)


@dataclass
class _Calls:
    """Calls of one response.

    Attributes:
        turn: the response.
        calls: the calls.
        results: result of each finished call by its place.
    """

    turn: Turn
    calls: Sequence[ToolCall]
    results: dict[int, Result] = field(default_factory=dict)


class ToolConversations:
    """The `Environment` of a policy with tools.

    Args:
        host: process of the tools.
        parser: reader of calls.
        messages: tokens of results.
        scorer: scorer of finished conversations.
        tokenizer: tokenizer of the policy.
    """

    counted: Sequence[str] = KINDS

    def __init__(
        self,
        host: ToolHost,
        parser: ResponseParser,
        messages: ToolMessages,
        scorer: ReplyingScorer,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self._host, self._parser, self._messages = host, parser, messages
        self._tokenizer = tokenizer
        self.max_failure_rate = scorer.max_failure_rate
        self._names = [str(schema["function"]["name"]) for schema in host.schemas]
        self._scoring = TurnScoring(scorer)
        self._open: dict[int, _Calls] = {}
        # Key of the response, and place of the call in the response, by the number of the call.
        self._places: dict[int, tuple[int, int]] = {}
        self._rewards = TurnRewards()
        self._prompt_checked = False

    def begin(self, key: int, turn: Turn) -> None:
        """Start the calls of a response."""
        if not self._prompt_checked:
            self._check_prompt(turn)
        calls = self._parser.calls(turn.response, turn.before) if turn.request.turns_left else []
        if not calls:
            # The reward function has the last word, so it may not reply.
            self._scoring.add(key, turn, replace(turn.request, turns_left=0))
            return
        self._open[key] = opened = _Calls(turn, calls)
        for place, call in enumerate(calls):
            if fault := self._fault(place, call):
                opened.results[place] = fault
            else:
                self._places[self._host.call(call.name, call.arguments)] = (key, place)

    def answers(self, wait_s: float) -> Mapping[int, Reply | Score]:
        """Return scores of answers without a call, and replies with the results of calls."""
        faulty = any(len(opened.results) == len(opened.calls) for opened in self._open.values())
        finished = self._scoring.take(0.0 if self._places or faulty else wait_s)
        answers: dict[int, Reply | Score] = {key: self._rewards.ended(key, score) for key, _, score in finished}
        if self._places:
            if self._scoring.is_running:
                wait_s = min(wait_s, _POLL_S)
            for number, result in self._host.results(0.0 if answers or faulty else wait_s).items():
                # The calls of a forgotten response have no place.
                if (found := self._places.pop(number, None)) and found[0] in self._open:
                    self._open[found[0]].results[found[1]] = result
        done = [key for key, opened in self._open.items() if len(opened.results) == len(opened.calls)]
        return {**answers, **{key: self._reply(key, self._open.pop(key)) for key in done}}

    def forget(self, keys: Sequence[int]) -> None:
        """Drop the calls of responses."""
        gone = set(keys)
        numbers = [number for number, (key, _) in self._places.items() if key in gone]
        self._host.forget(numbers)
        for number in numbers:
            del self._places[number]
        for key in gone:
            self._open.pop(key, None)
        self._scoring.forget(keys)
        self._rewards.forget(keys)

    def _fault(self, place: int, call: ToolCall) -> Result | None:
        if place >= _MOST_CALLS:
            return Result("malformed", f"a response has at most {_MOST_CALLS} calls")
        if call.fault:
            return Result("malformed", call.fault)
        if call.name in self._names:
            return None
        name = shortened(call.name, _NAME_SHOWN, "end")
        known = get_close_matches(name, self._names, n=1) or self._names[:_NAMES_SHOWN]
        return Result("unknown", f"there is no tool {name!r}, but {', '.join(known)}")

    def _reply(self, key: int, opened: _Calls) -> Reply | Score:
        results = [opened.results[place] for place in range(len(opened.calls))]
        texts = [f"error: {result.text}" if result.kind else result.text for result in results]
        # A template may look for the name of the tool, so a call without a name gets one.
        names = [call.name if call.name in self._names else self._names[0] for call in opened.calls]
        counts = Counter({"tools/calls": len(results)})
        counts.update(f"tools/{result.kind}" for result in results if result.kind)
        faults = [result.reward for result in results if result.reward.value is None]
        try:
            tokens = self._messages.tokens(names, texts, opened.turn.tokens[-1])
        except ConfigError as error:
            faults.append(failed("raised", str(error)))
        if faults:
            return self._rewards.ended(key, faults[0])
        reward = sum(result.reward.value or 0.0 for result in results)
        self._rewards.add(key, reward)
        work = tuple(result.work for result in results if result.work is not None)
        return Reply(self._messages.messages(names, texts), tokens, counts=counts, reward=reward, work=work)

    def _check_prompt(self, turn: Turn) -> None:
        """Look for the names of all tools in a prompt.

        Raises:
            ConfigError: the prompt does not show the tools.
        """
        text = str(self._tokenizer.decode(list(turn.before)))
        if missing := [name for name in self._names if name not in text]:
            raise ConfigError(
                f"the prompts do not show the tool {missing[0]!r} to the policy: give the data module "
                "chat_template_kwargs=tools.template_options, where `tools` is the ToolEnvironment"
            )
        self._prompt_checked = True
