"""Trajectories of agents: calls of the endpoint become turns of a conversation, and rewards become scores.

The first call of an agent is the start of the conversation, and each further call is a reply to the policy. A call
that continues no earlier call begins a new sequence of tokens of its trajectory. The policy answers the calls of a
trajectory one after the other.
"""

from __future__ import annotations

import json
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rl_plugins.data.following_messages import FollowingMessages, ToolUse, check_shows_tools
from rl_plugins.data.tokenization import encode_prompts
from rl_plugins.environments.agent import AgentEnvironment
from rl_plugins.environments.agent_process import AgentArguments
from rl_plugins.environments.endpoint import Endpoint, HttpAnswer, Received
from rl_plugins.environments.object_host import ObjectHost
from rl_plugins.environments.step_result import Answer
from rl_plugins.environments.tools import parser_for
from rl_plugins.errors import ConfigError
from rl_plugins.rewards.loading import plain
from rl_plugins.rewards.records import AGENT_DETAILS, Score, ScoringRequest, failed
from rl_plugins.rewards.trajectory import EnvironmentAnswer, Reply, Start, Turn
from rl_plugins.rewards.turn_times import Work, unix_time
from rl_plugins.rollout.chat import (
    ChatAnswer,
    ChatCall,
    Message,
    NoRoom,
    NotContinued,
    Refused,
    continuation,
    for_template,
)
from rl_plugins.rollout.tool_calls import ParsedResponse, ResponseParser, decoded
from rl_plugins.rollout.vllm.call_formats import FORMATS, AnswerEvents
from rl_plugins.rollout.vllm.responses_protocol import with_previous

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_EVENTS = "text/event-stream"
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


@dataclass(frozen=True)
class _Answered:
    """Sequence up to the last answer of the policy.

    Attributes:
        messages: messages of the last call, and the answer.
        tools: JSON schemas of the tools.
        called: calls in the answer.
        last_token: last token of the answer.
        received: the last call.
        sent: the answer, as sent.
    """

    messages: Sequence[Message]
    tools: Sequence[Message]
    called: Sequence[ToolUse]
    last_token: int
    received: Received
    sent: HttpAnswer


@dataclass
class _TrajectoryState:
    """State of a trajectory.

    Attributes:
        received: call in progress, or the last call; None before the first.
        call: content of the call.
        before: last tokens before the answer.
        events: events of the answer; None for an answer without a stream.
        sequences: sequences of the trajectory.
        answered: messages up to each answer with an id, without instructions, by the id.
        current: number of the sequence of the call in progress.
        waiting: calls that wait for the call in progress.
        turns: number of answers.
        answered_at: time of the last answer, of `time.monotonic`.
        is_sampling: True while the policy answers.
        result: result of the agent; None until the agent has ended.
        counts: numbers of events.
    """

    received: Received | None = None
    call: ChatCall | None = None
    before: Sequence[int] = ()
    events: AnswerEvents | None = None
    sequences: list[_Answered] = field(default_factory=list)
    answered: dict[str, Sequence[Message]] = field(default_factory=dict)
    current: int = 0
    waiting: deque[Received] = field(default_factory=deque)
    turns: int = 0
    answered_at: float = 0.0
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
        self._states: dict[int, _TrajectoryState] = {}
        # Results of agents whose trajectories can end.
        self._results: dict[int, Answer] = {}
        self._tools: OrderedDict[str, _Tools] = OrderedDict()

    def start(self, key: int, request: ScoringRequest, seed: int) -> None:
        """Start an agent."""
        names = ("data_source", "ground_truth", "extra_info", "prompt")
        row = {**{name: plain(getattr(request, name)) for name in names}, "seed": seed}
        self._states[key] = _TrajectoryState()
        api_key = self._endpoint.open(key)
        self._host.open(key, AgentArguments(row=row, base_url=self._endpoint.base_url, api_key=api_key))

    def begin(self, key: int, turn: Turn) -> None:
        """Send a response to its agent; refuse the call if the conversation had no room for a response."""
        state = self._states[key]
        state.is_sampling = False
        if turn.number > state.turns:
            self._answer(state, turn)
        else:
            assert state.received is not None, "a call is in progress"
            reason = "the trajectory has no tokens left: raise max_tokens (sampling.max_tokens)"
            self._refuse(state, state.received, NoRoom(reason))
        state.answered_at = time.monotonic()
        self._host.go_on(key)
        if state.result is not None:
            self._results[key] = state.result

    def take_tokens(self, key: int, responses: Sequence[Sequence[int]]) -> None:
        """Send the new text of responses in progress to the agent."""
        state = self._states[key]
        assert state.received is not None and state.call is not None and state.events is not None, "a call streams"
        if events := state.events.more([self._text_so_far(state, state.call, ids) for ids in responses]):
            self._endpoint.send(state.received, events)

    def _text_so_far(self, state: _TrajectoryState, call: ChatCall, ids: Sequence[int]) -> str:
        if parser := self._parser_of(call):
            text = parser.text_before_calls(ids, state.before)
        else:
            text = decoded(self._tokenizer, ids, skip_special_tokens=True)
        # The next tokens may complete the last character.
        return text.rstrip("\ufffd")

    def answers(self, wait_s: float) -> Mapping[int, EnvironmentAnswer]:
        """Return calls of agents, and the scores of agents that have ended."""
        answers: dict[int, EnvironmentAnswer] = {}
        self._take_calls(answers)
        soon = answers or self._results
        for key, result in self._host.answers(0.0 if soon else wait_s, wake=(self._endpoint.fileno(),)).items():
            if key in self._states:
                state = self._states[key]
                state.result = result
                if not state.is_sampling:
                    self._results[key] = result
        self._take_calls(answers)
        results, self._results = self._results, {}
        scores = {key: _score(self._limits.name, self._states[key], result) for key, result in results.items()}
        self.forget(list(scores))
        return {**answers, **scores}

    def forget(self, keys: Sequence[int]) -> None:
        """End trajectories: their agents, and their keys of the endpoint."""
        self._host.leave(keys)
        for key in keys:
            self._endpoint.end(key)
            self._states.pop(key, None)
            self._results.pop(key, None)

    # Calls ------------------------------------------------------------------------------------------------------

    def _take_calls(self, answers: dict[int, EnvironmentAnswer]) -> None:
        """Read the calls that have arrived, and add the turns that they begin to `answers`."""
        for received in self._endpoint.take():
            self._receive(received.trajectory, self._states[received.trajectory], received)
        for key, state in self._states.items():
            while state.waiting and not state.is_sampling:
                self._take(key, state, state.waiting.popleft(), answers)

    def _receive(self, key: int, state: _TrajectoryState, received: Received) -> None:
        """Put a call to the calls that wait. A repeated call takes the place, or gets the answer, of an earlier one."""
        running = [state.received] if state.is_sampling and state.received is not None else []
        earlier = received.earlier([*running, *state.waiting, *(one.received for one in state.sequences)])
        if earlier is None:
            state.waiting.append(received)
        elif earlier in running:
            state.received = received
            if state.call is not None and state.call.stream:
                state.events = FORMATS[received.path].events(state.call)
        elif earlier in state.waiting:
            state.waiting[state.waiting.index(earlier)] = received
        else:
            earlier.retries = received.retries
            self._endpoint.answer(received, next(one.sent for one in state.sequences if one.received is earlier))
            if not state.is_sampling:
                self._leave_out_wait(key, state, received)

    def _take(
        self, key: int, state: _TrajectoryState, received: Received, answers: dict[int, EnvironmentAnswer]
    ) -> None:
        """Read a call, and add the turn of the call to `answers`."""
        state.counts["calls"] += 1
        try:
            call = with_previous(FORMATS[received.path].read(received.body), state.answered)
            turn = self._read(state, call)
        except (Refused, TypeError, ValueError) as error:
            # Templates and tools are not the package's.
            reason = f"the chat template refuses the messages or the tools: {str(error) or type(error).__name__}"
            self._refuse(state, received, error if isinstance(error, Refused) else Refused(reason))
            self._leave_out_wait(key, state, received)
            return
        if isinstance(turn, Reply):
            # The agent worked from the last answer to this call, which may have waited for another call since.
            seconds = max(0.0, received.at - state.answered_at)
            turn = replace(turn, work=[Work("agent", unix_time(state.answered_at), seconds)])
        answers[key] = turn
        state.received, state.call, state.before, state.is_sampling = received, call, turn.tokens, True
        state.events = FORMATS[received.path].events(call) if call.stream else None
        # The time in which a call waited for the call before is already left out.
        self._host.pause(key, since=max(received.at, state.answered_at))

    def _leave_out_wait(self, key: int, state: _TrajectoryState, received: Received) -> None:
        """Leave the wait of a call for its answer out of the deadline of the agent."""
        self._host.pause(key, since=max(received.at, state.answered_at))
        self._host.go_on(key)
        state.answered_at = time.monotonic()

    def _read(self, state: _TrajectoryState, call: ChatCall) -> Start | Reply:
        """Return the turn that a call begins.

        Raises:
            Refused: the call begins one sequence too many, or has too many tokens.
        """
        if state.result is not None:
            raise Refused("the agent has returned its reward: call the policy before")
        tools = self._tools_of(call.tools)
        if not state.turns:
            self._check_choices(state, call.num_choices, begins_sequence=True)
            return self._first(call, tools)
        state.current, new = self._continued(state, call)
        self._check_choices(state, call.num_choices, begins_sequence=state.current == len(state.sequences))
        if state.current == len(state.sequences):
            tokens = self._prompt(new, tools)
        else:
            before = state.sequences[state.current]
            try:
                tokens = tools.following.tokens(before.called, for_template(new), before.last_token)
            except ConfigError as error:
                raise Refused(str(error)) from error
        return Reply(
            new,
            tokens,
            max_tokens=call.max_tokens,
            sequence=state.current,
            num_responses=call.num_choices,
            reports_tokens=call.stream,
        )

    def _check_choices(self, state: _TrajectoryState, num_choices: int, *, begins_sequence: bool) -> None:
        """Check that the trajectory may have so many further answers, and sequences of the answers.

        Raises:
            Refused: there are too many.
        """
        limit = self._limits.max_turns
        if state.turns >= limit:
            raise NoRoom(
                f"the policy has given max_turns={limit} answers in the trajectory: raise max_turns "
                "(environment.max_turns in a recipe)"
            )
        if state.turns + num_choices > limit:
            raise Refused(
                f"n={num_choices}: the policy has given {state.turns} of max_turns={limit} answers in the trajectory: "
                "lower n, or raise max_turns (environment.max_turns in a recipe)"
            )
        limit = self._limits.max_sequences
        if num_choices > 1 and len(state.sequences) + begins_sequence + num_choices - 1 > limit:
            raise Refused(
                f"n={num_choices}: each choice but the first begins a sequence, and the trajectory has "
                f"{len(state.sequences)} of max_sequences={limit} sequences: lower n, or raise max_sequences "
                "(environment.max_sequences in a recipe)"
            )

    def _first(self, call: ChatCall, tools: _Tools) -> Start:
        tokens = self._prompt(call.messages, tools)
        if len(tokens) > self._limits.max_prompt_tokens:
            raise Refused(
                f"the messages of the first call have {len(tokens)} tokens, more than max_prompt_tokens="
                f"{self._limits.max_prompt_tokens} (data.max_prompt_tokens in a recipe)"
            )
        return Start(call.messages, tokens, call.max_tokens, call.num_choices, reports_tokens=call.stream)

    def _prompt(self, messages: Sequence[Message], tools: _Tools) -> list[int]:
        (tokens,) = encode_prompts([for_template(messages)], self._tokenizer, tools.options)
        return tokens

    def _continued(self, state: _TrajectoryState, call: ChatCall) -> tuple[int, Sequence[Message]]:
        """Return the number of the sequence that a call continues, or of a new sequence, and the new messages.

        Raises:
            NotContinued: the call continues no sequence, and no further sequence is allowed.
        """
        found: dict[int, Sequence[Message]] = {}
        reason = ""
        for number, sequence in enumerate(state.sequences):
            try:
                new = continuation(sequence.messages, call.messages)
            except NotContinued as error:
                reason = str(error)
            else:
                if call.tools == sequence.tools:
                    found[number] = new
                else:
                    reason = "the tools are not those of the earlier call, and the policy has read their schemas"
        if found:
            # The longest of the sequences, and the last of the longest.
            number = min(found, key=lambda number: (len(found[number]), -number))
            return number, found[number]
        if len(state.sequences) < self._limits.max_sequences:
            return len(state.sequences), call.messages
        raise NotContinued(
            f"the call continues no earlier call: {reason}. The trajectory has max_sequences={len(state.sequences)} "
            "sequences: send the earlier messages, the answer without a change, and new messages, or raise "
            "max_sequences (environment.max_sequences in a recipe)"
        )

    def _answer(self, state: _TrajectoryState, turn: Turn) -> None:
        """Send a response of the policy to the agent, or several responses as choices."""
        assert state.received is not None and state.call is not None, "a call asked for the response"
        call, turns = state.call, (turn, *turn.alternatives)
        parsed = [self._parsed(call, one) for one in turns]
        choices = [
            self._choice(state, call, one, read, place)
            for place, (one, read) in enumerate(zip(turns, parsed, strict=True))
        ]
        if state.events is None:
            sent = HttpAnswer(200, "application/json", FORMATS[state.received.path].body(call, choices))
        else:
            sent = HttpAnswer(200, _EVENTS, state.events.whole(choices))
        for one, read, choice in zip(turns, parsed, choices, strict=True):
            state.turns += 1
            state.counts["malformed"] += read.is_malformed
            sequence = _Answered(
                messages=[*call.messages, choice.message],
                tools=call.tools,
                called=[ToolUse(str(use["id"]), str(use["function"]["name"])) for use in choice.calls],
                last_token=one.tokens[-1],
                received=state.received,
                sent=sent,
            )
            if call.answer_id:
                state.answered[call.answer_id] = sequence.messages[call.has_instructions :]
            # Each choice but the first begins a sequence.
            if one is turn and state.current < len(state.sequences):
                state.sequences[state.current] = sequence
            else:
                state.sequences.append(sequence)
        if state.events is None:
            self._endpoint.answer(state.received, sent)
        elif all(choices[place].content.startswith(text) for place, text in state.events.sent.items()):
            self._endpoint.answer(state.received, HttpAnswer(200, _EVENTS, state.events.rest(choices)))
        else:
            reason = "a rollout engine was lost, and the policy has answered again: repeat the call"
            self._endpoint.refuse(state.received, reason, "server_error", status=503)

    def _choice(
        self, state: _TrajectoryState, call: ChatCall, turn: Turn, parsed: ParsedResponse, place: int
    ) -> ChatAnswer:
        """Return a response of the policy as a choice of an answer."""
        number, content = state.turns + place, parsed.content
        said = "" if state.events is None else state.events.sent.get(place, "")
        # Another response than the response in the stream comes after the loss of an engine.
        is_in_stream = bool(said) and self._text_so_far(state, call, turn.response).startswith(said)
        names = [name for name, _ in parsed.calls]
        one_call = call.one_call or (len(names) > 1 and not self._tools_of(call.tools).following.takes(names))
        calls = [
            # Nine letters or digits, which all templates accept.
            {"id": f"c{number:04d}{nth:04d}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for nth, (name, arguments) in enumerate(parsed.calls[:1] if one_call else parsed.calls)
        ]
        return ChatAnswer(
            # A parser may strip the text before a call, or add the text behind it, and the agent has got `said`.
            content=said if calls and is_in_stream and not content.startswith(said) else content,
            calls=calls,
            finish_reason="tool_calls" if calls else "length" if turn.finish_reason == "length" else "stop",
            prompt_ids=turn.before,
            tokens=turn.response,
            token_texts=[str(self._tokenizer.decode([token])) for token in turn.response] if call.logprobs else [],
            log_probs=turn.log_probs if call.logprobs else [],
        )

    def _parsed(self, call: ChatCall, turn: Turn) -> ParsedResponse:
        if parser := self._parser_of(call):
            return parser.parsed(turn.response, turn.before)
        return ParsedResponse(decoded(self._tokenizer, turn.response, skip_special_tokens=True))

    def _parser_of(self, call: ChatCall) -> ResponseParser | None:
        return self._tools_of(call.tools).parser if call.may_call else None

    def _refuse(self, state: _TrajectoryState, received: Received, refused: Refused) -> None:
        state.counts.update(refused=1, not_continued=isinstance(refused, NotContinued))
        self._endpoint.refuse(received, str(refused), refused.kind)

    def _tools_of(self, schemas: Sequence[Message]) -> _Tools:
        """Return the parser and the tokens of messages for a list of tools; raise `Refused` if they do not fit."""
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


def _score(name: str, state: _TrajectoryState, result: Answer) -> Score:
    """Return the score of an agent that has ended, with counts of its calls."""
    counts = {**state.counts, "sequences": len(state.sequences)}
    if result.failure is not None:
        score = failed(result.failure, result.fault)
    elif not state.turns:
        counts["without_call"] = 1
        reason = "the agent returned a reward without an answer of the policy: call the policy at `base_url`"
        score = failed("raised", f"{name}: {reason}")
    else:
        assert result.score is not None, "an agent without a failure has a score"
        score = Score(result.score, dict(result.details), token_rewards=result.token_rewards)
    own = {f"{AGENT_DETAILS}{name}": float(count) for name, count in {**counts, "seconds": result.seconds}.items()}
    return replace(score, details={**score.details, **own})
