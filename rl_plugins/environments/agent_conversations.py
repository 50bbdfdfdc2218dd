"""Trajectories of agents: calls of the endpoint become turns of a conversation, and rewards become scores.

The first call of an agent is the start of the conversation, and each further call is a reply to the policy. A
trajectory is one sequence of tokens: a call that does not continue the call before is refused. Several sequences of a
trajectory would be several conversations of one key here; calls and answers would stay as they are.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rl_plugins.data.following_messages import FollowingMessages, ToolUse
from rl_plugins.data.tokenization import encode_prompts
from rl_plugins.data.tool_messages import check_shows_tools
from rl_plugins.environments.agent import AgentEnvironment
from rl_plugins.environments.agent_process import AgentArguments
from rl_plugins.environments.endpoint import Endpoint, HttpAnswer, Received
from rl_plugins.environments.object_host import ObjectHost
from rl_plugins.environments.step_result import Answer
from rl_plugins.environments.tools import parser_for
from rl_plugins.errors import ConfigError
from rl_plugins.rewards.loading import plain
from rl_plugins.rewards.records import AGENT_DETAILS, Score, ScoringRequest, failed
from rl_plugins.rewards.trajectory import LastWords, Reply, Start, Turn
from rl_plugins.rollout.chat import ChatAnswer, ChatCall, Message, Refused, continuation, for_template
from rl_plugins.rollout.tool_calls import ParsedResponse, ResponseParser, decoded
from rl_plugins.rollout.vllm.chat_protocol import completion, read_chat_call

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOOL_SETS = 64
"""Largest number of different lists of tools whose parsers are kept."""
_COUNTED = ("calls", "refused", "not_continued", "malformed", "without_call")


@dataclass
class _Tools:
    """Tools of a trajectory.

    Attributes:
        parser: reader of calls; None without tools.
        options: variables of the chat template, with the tools.
        following: tokens after an answer.
    """

    parser: ResponseParser | None
    options: Mapping[str, Any]
    following: FollowingMessages


@dataclass
class _AgentTalk:
    """A trajectory.

    Attributes:
        received: call in progress, or the last call; None before the first.
        call: content of the call.
        sent: answer to the last call.
        messages: messages of the last answered call, and the answer; empty before the first answer.
        tools: JSON schemas of the tools in the first call.
        called: calls in the last answer.
        last_token: last token of the last answer.
        turns: number of answers.
        length: number of tokens up to the end of the last answer.
        is_sampling: True while the policy answers.
        result: result of the agent; None until the agent has ended.
        counts: numbers of events.
    """

    received: Received | None = None
    call: ChatCall | None = None
    sent: HttpAnswer | None = None
    messages: Sequence[Message] = ()
    tools: Sequence[Message] = ()
    called: Sequence[ToolUse] = ()
    last_token: int = -1
    turns: int = 0
    length: int = 0
    is_sampling: bool = False
    result: Answer | None = None
    counts: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(_COUNTED, 0)))


class AgentConversations:
    """The `StartingEnvironment` of agents.

    Args:
        host: processes of the agents.
        endpoint: server of their calls.
        tokenizer: tokenizer of the policy.
        limits: environment with the limits of trajectories.
    """

    counted: Sequence[str] = ()

    def __init__(
        self, host: ObjectHost, endpoint: Endpoint, tokenizer: PreTrainedTokenizerBase, limits: AgentEnvironment
    ) -> None:
        self._host, self._endpoint, self._tokenizer, self._limits = host, endpoint, tokenizer, limits
        self.max_failure_rate = limits.max_failure_rate
        self._talks: dict[int, _AgentTalk] = {}
        # Results of agents whose trajectories can end.
        self._results: dict[int, Answer] = {}
        self._tools: OrderedDict[str, _Tools] = OrderedDict()

    def start(self, key: int, request: ScoringRequest, seed: int) -> None:
        """Start an agent."""
        names = ("data_source", "ground_truth", "extra_info", "prompt")
        row = {**{name: plain(getattr(request, name)) for name in names}, "seed": seed}
        self._talks[key] = _AgentTalk()
        api_key = self._endpoint.open(key)
        self._host.open(key, AgentArguments(row=row, base_url=self._endpoint.base_url, api_key=api_key))

    def begin(self, key: int, turn: Turn) -> None:
        """Send a response to its agent; refuse the call if the conversation had no room for a response."""
        talk = self._talks[key]
        talk.is_sampling = False
        if not talk.turns or len(turn.tokens) > talk.length:
            self._answer(talk, turn)
        else:
            self._refuse(talk, Refused("the trajectory has no tokens left: raise max_tokens (sampling.max_tokens)"))
        self._host.go_on(key)
        if talk.result is not None:
            self._results[key] = talk.result

    def answers(self, wait_s: float) -> Mapping[int, Reply | Score | Start | LastWords]:
        """Return calls of agents, and the scores of agents that have ended."""
        answers: dict[int, Reply | Score | Start | LastWords] = {}
        self._take_calls(answers)
        soon = answers or self._results
        for key, result in self._host.answers(0.0 if soon else wait_s, wake=(self._endpoint.fileno(),)).items():
            if key in self._talks:
                talk = self._talks[key]
                talk.result = result
                if not talk.is_sampling:
                    self._results[key] = result
        self._take_calls(answers)
        results, self._results = self._results, {}
        scores = {key: _score(self._talks[key], result) for key, result in results.items()}
        self.forget(list(scores))
        return {**answers, **scores}

    def forget(self, keys: Sequence[int]) -> None:
        """End trajectories: their agents, and their keys of the endpoint."""
        self._host.leave(keys)
        for key in keys:
            self._endpoint.end(key)
            self._talks.pop(key, None)
            self._results.pop(key, None)

    # Calls ------------------------------------------------------------------------------------------------------

    def _take_calls(self, answers: dict[int, Reply | Score | Start | LastWords]) -> None:
        """Read the calls that have arrived, and add the turns that they begin to `answers`."""
        from jinja2 import TemplateError

        for received in self._endpoint.take():
            key, talk = received.trajectory, self._talks[received.trajectory]
            if received.is_repeated and talk.received is not None and received.body == talk.received.body:
                self._repeat(talk, received)
                continue
            talk.counts["calls"] += 1
            try:
                call = read_chat_call(received.body)
                answers[key] = self._read(talk, call)
            except (Refused, TemplateError, TypeError, ValueError) as error:
                # Templates and tools are not the package's, and a template raises what its expressions raise.
                reason = f"the chat template refuses the messages or the tools: {str(error) or type(error).__name__}"
                refused = error if isinstance(error, Refused) else Refused(reason)
                self._count(talk, refused)
                self._endpoint.refuse(received, str(refused))
                continue
            talk.received, talk.call, talk.sent, talk.is_sampling = received, call, None, True
            self._host.pause(key, since=received.at)

    def _repeat(self, talk: _AgentTalk, received: Received) -> None:
        """Answer a call that the client sends again, because the client has not got the answer."""
        talk.received = received
        if talk.sent is not None:
            self._endpoint.answer(received, talk.sent)

    def _read(self, talk: _AgentTalk, call: ChatCall) -> Start | Reply:
        """Return the turn that a call begins.

        Raises:
            Refused: the call does not continue the trajectory, or has too many tokens.
        """
        if talk.result is not None:
            raise Refused("the agent has returned its reward: call the policy before")
        if talk.is_sampling:
            raise Refused(
                "another call of the trajectory is in progress: make one call after the other, because a trajectory is "
                "one sequence of tokens",
                is_no_continuation=True,
            )
        tools = self._tools_of(call.tools)
        return self._next(talk, call, tools) if talk.turns else self._first(talk, call, tools)

    def _first(self, talk: _AgentTalk, call: ChatCall, tools: _Tools) -> Start:
        (tokens,) = encode_prompts([for_template(call.messages)], self._tokenizer, tools.options)
        if len(tokens) > self._limits.max_prompt_tokens:
            raise Refused(
                f"the messages of the first call have {len(tokens)} tokens, more than max_prompt_tokens="
                f"{self._limits.max_prompt_tokens} (data.max_prompt_tokens in a recipe)"
            )
        talk.tools = call.tools
        return Start(call.messages, tokens, call.max_tokens)

    def _next(self, talk: _AgentTalk, call: ChatCall, tools: _Tools) -> Reply:
        new = continuation(talk.messages, call.messages)
        if call.tools != talk.tools:
            raise Refused(
                "the tools are not those of the first call: the policy has read their schemas already",
                is_no_continuation=True,
            )
        if talk.turns >= self._limits.max_turns:
            raise Refused(
                f"the policy has given max_turns={talk.turns} answers in the trajectory: raise max_turns "
                "(environment.max_turns in a recipe)"
            )
        try:
            tokens = tools.following.tokens(talk.called, for_template(new), talk.last_token)
        except ConfigError as error:
            raise Refused(str(error)) from error
        return Reply(new, tokens, max_tokens=call.max_tokens)

    def _answer(self, talk: _AgentTalk, turn: Turn) -> None:
        """Send a response of the policy to the agent."""
        assert talk.received is not None and talk.call is not None, "a call asked for the response"
        call, ids = talk.call, turn.response
        parsed = self._parsed(call, ids)
        calls = [
            # Nine letters or digits, which all templates accept.
            {
                "id": f"c{talk.turns:04d}{place:04d}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for place, (name, arguments) in enumerate(parsed.calls[:1] if call.one_call else parsed.calls)
        ]
        answer = ChatAnswer(
            content=parsed.content,
            calls=calls,
            finish_reason="tool_calls" if calls else "length" if turn.finish_reason == "length" else "stop",
            prompt_tokens=len(turn.tokens) - turn.length,
            tokens=ids,
            token_texts=[str(self._tokenizer.decode([token])) for token in ids] if call.logprobs else [],
            log_probs=turn.log_probs if call.logprobs else [],
        )
        talk.turns += 1
        talk.length, talk.last_token = len(turn.tokens), turn.tokens[-1]
        talk.counts["malformed"] += parsed.is_malformed
        talk.messages = [*call.messages, answer.message]
        talk.called = [ToolUse(str(one["id"]), name) for one, (name, _) in zip(calls, parsed.calls, strict=False)]
        talk.sent = HttpAnswer(200, *completion(call, answer))
        self._endpoint.answer(talk.received, talk.sent)

    def _parsed(self, call: ChatCall, ids: Sequence[int]) -> ParsedResponse:
        parser = self._tools_of(call.tools).parser
        if parser is None or not call.may_call:
            return ParsedResponse(decoded(self._tokenizer, ids, skip_special_tokens=True))
        return parser.parsed(ids)

    def _refuse(self, talk: _AgentTalk, refused: Refused) -> None:
        assert talk.received is not None, "a call is in progress"
        self._count(talk, refused)
        self._endpoint.refuse(talk.received, str(refused))

    @staticmethod
    def _count(talk: _AgentTalk, refused: Refused) -> None:
        talk.counts["refused"] += 1
        talk.counts["not_continued"] += refused.is_no_continuation

    def _tools_of(self, schemas: Sequence[Message]) -> _Tools:
        """Return the parser and the tokens of messages for a list of tools.

        Raises:
            Refused: the chat template shows no tools, or the parser does not fit the tokenizer or its chat template.
        """
        name = json.dumps(schemas)
        if name not in self._tools:
            try:
                self._tools[name] = self._make_tools(schemas)
            except ConfigError as error:
                raise Refused(str(error)) from error
            if len(self._tools) > _TOOL_SETS:
                self._tools.popitem(last=False)
        self._tools.move_to_end(name)
        return self._tools[name]

    def _make_tools(self, schemas: Sequence[Message]) -> _Tools:
        options, parser = dict(self._limits.template_options), None
        if schemas:
            options["tools"] = list(schemas)
            check_shows_tools(self._tokenizer, options)
            parser = parser_for(self._limits.parser, self._tokenizer, schemas, options)
        return _Tools(parser, options, FollowingMessages(self._tokenizer, options))


def _score(talk: _AgentTalk, result: Answer) -> Score:
    """Return the score of an agent that has ended, with counts of its calls."""
    counts = dict(talk.counts)
    if result.failure is not None:
        score = failed(result.failure, result.fault)
    elif not talk.turns:
        counts["without_call"] = 1
        score = failed(
            "raised", "the agent returned a reward without an answer of the policy: call the policy at `base_url`"
        )
    else:
        assert result.score is not None, "an agent without a failure has a score"
        score = Score(result.score, dict(result.details))
    own = {f"{AGENT_DETAILS}{name}": float(count) for name, count in {**counts, "seconds": result.seconds}.items()}
    return replace(score, details={**score.details, **own})
