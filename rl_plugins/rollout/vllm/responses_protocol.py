"""Calls of `/v1/responses` and their answers, in the classes of vLLM's own server.

vLLM's server makes tokens from the text of each call, so a further call would not have the sampled tokens. Here the
items of a call become messages of a chat, and a call continues an earlier call as in `/v1/chat/completions`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from openai.types.responses.response_output_text import Logprob
from pydantic import ValidationError
from vllm import SamplingParams
from vllm.entrypoints.generate.base.protocol import DeltaFunctionCall, DeltaMessage, DeltaToolCall, FunctionCall
from vllm.entrypoints.openai.responses.protocol import (
    InputTokensDetails,
    OutputTokensDetails,
    ResponseCompletedEvent,
    ResponseCreatedEvent,
    ResponseInProgressEvent,
    ResponsesRequest,
    ResponsesResponse,
    ResponseUsage,
)
from vllm.entrypoints.openai.responses.streaming_events import SimpleStreamingEventProcessor
from vllm.entrypoints.openai.responses.utils import (
    build_response_output_items,
    construct_input_messages,
    reuse_streamed_item_ids,
)
from vllm.exceptions import VLLMValidationError

from rl_plugins.json_text import read_foreign_json
from rl_plugins.rollout.chat import ChatAnswer, ChatCall, Message, Refused, canonical
from rl_plugins.rollout.vllm.chat_protocol import MODEL, OF_THE_RUN

_NO_LIMIT = 2**31 - 1
"""`max_output_tokens` of an answer to a call without a limit; the class needs a number."""
_LOG_PROBS = "message.output_text.logprobs"
_REFUSED = {
    "background": "an answer comes with its call: leave background out",
    "stop": f"{OF_THE_RUN}: set sampling.stop of the run",
    "stop_token_ids": f"{OF_THE_RUN}: set sampling.stop_token_ids of the run",
    "structured_outputs": f"a grammar changes the distribution, and {OF_THE_RUN}: leave structured_outputs out",
    "logit_bias": f"{OF_THE_RUN}: leave logit_bias out",
    "ignore_eos": f"{OF_THE_RUN}: leave ignore_eos out",
    "top_logprobs": "there are log-probs of the sampled tokens alone: leave top_logprobs out",
    "max_tool_calls": "the agent runs its tools: leave max_tool_calls out",
    "truncation": "a cut prompt continues no earlier call: leave truncation out",
    "chat_template_kwargs": "the variables of the chat template are those of the run: set data.chat_template_kwargs",
    "previous_input_messages": "the messages are in the input: leave previous_input_messages out",
}
"""Options of a call that are refused, and the reason."""


@dataclass(frozen=True, kw_only=True)
class ResponsesCall(ChatCall):
    """A call of `/v1/responses`.

    Attributes:
        request: the call, in vLLM's class.
    """

    request: ResponsesRequest


def read_responses_call(body: bytes) -> ResponsesCall:
    """Read the body of a call.

    Raises:
        Refused: the body is no valid call, or has an option that is refused.
    """
    try:
        request = ResponsesRequest.model_validate(read_foreign_json(body))
        messages = construct_input_messages(request_instructions=request.instructions, request_input=request.input)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise Refused(f"{place}: {first['msg']}" if place else str(first["msg"])) from error
    except (VLLMValidationError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise Refused(f"the body is no call of the Responses API ({type(error).__name__}: {error})") from error
    _check(request)
    tools: list[dict[str, Any]] = [
        {
            "type": "function",
            "function": tool.model_dump(include={"name", "description", "parameters"}, exclude_none=True),
        }
        for tool in request.tools
    ]
    return ResponsesCall(
        messages=[canonical(message) for message in messages],
        tools=tools,
        may_call=bool(tools) and request.tool_choice != "none",
        one_call=request.parallel_tool_calls is False,
        max_tokens=request.max_output_tokens,
        logprobs=_LOG_PROBS in (request.include or ()),
        stream=bool(request.stream),
        stream_usage=True,
        model=request.model or MODEL,
        num_choices=1,
        token_ids=False,
        answer_id=request.request_id,
        previous_id=request.previous_response_id,
        has_instructions=bool(request.instructions),
        request=request,
    )


def _check(request: ResponsesRequest) -> None:
    for name, reason in _REFUSED.items():
        value, usual = getattr(request, name), ResponsesRequest.model_fields[name].default
        if value not in (None, usual, [], {}):
            raise Refused(f"{name}: {reason}")
    if request.text is not None and request.text.format is not None and request.text.format.type != "text":
        raise Refused(f"text.format: a grammar changes the distribution, and {OF_THE_RUN}: leave text.format out")
    if request.tool_choice not in ("none", "auto"):
        raise Refused(f"tool_choice: a forced call is not sampled from the policy, and {OF_THE_RUN}: use auto or none")
    for tool in request.tools:
        if tool.type != "function":
            raise Refused(f"tools: a tool of the type {tool.type} runs on a server of OpenAI: use functions")
    if request.max_output_tokens is not None and request.max_output_tokens < 1:
        raise Refused(f"max_output_tokens={request.max_output_tokens}: must be at least 1")


def with_previous(call: ChatCall, answered: Mapping[str, Sequence[Message]]) -> ChatCall:
    """Return a call with all messages: its instructions, the messages up to `previous_id`, and its other messages.

    Args:
        call: the call.
        answered: messages up to each answer without the instructions of its call, by the id of the answer.

    Raises:
        Refused: there is no such answer.
    """
    if call.previous_id is None:
        return call
    if call.previous_id not in answered:
        raise Refused(
            f"previous_response_id={call.previous_id}: the trajectory has no such response: send all items as input"
        )
    begin = int(call.has_instructions)
    return replace(call, messages=[*call.messages[:begin], *answered[call.previous_id], *call.messages[begin:]])


def response(call: ChatCall, choices: Sequence[ChatAnswer]) -> bytes:
    """Return the body of the answer to a call."""
    return _response(call, choices[0]).model_dump_json(by_alias=True).encode()


class ResponseEvents:
    """Server-sent events of the answer to a call, which may begin while the policy samples.

    Args:
        call: the call.

    Attributes:
        sent: text in the events so far, by the number of the choice, which is 0.
    """

    def __init__(self, call: ChatCall) -> None:
        self._call = call
        self._processor = SimpleStreamingEventProcessor()
        self._count = 0
        self.sent: dict[int, str] = {}

    def more(self, texts: Sequence[str]) -> bytes:
        """Return events with the new text; empty without new text.

        Args:
            texts: text so far.
        """
        (text,), sent = texts, self.sent.get(0, "")
        if len(text) <= len(sent) or not text.startswith(sent):
            return b""
        events = [*self._first_events(), *self._of(DeltaMessage(content=text[len(sent) :]))]
        self.sent[0] = text
        return self._written(events)

    def rest(self, choices: Sequence[ChatAnswer]) -> bytes:
        """Return the events after the events so far: the rest of the text, the calls, and the whole answer.

        Args:
            choices: the answer. The text begins with the text in `sent`.
        """
        (answer,) = choices
        events, text = self._first_events(), answer.content[len(self.sent.get(0, "")) :]
        events += self._of(DeltaMessage(content=text)) if text else []
        for place, one in enumerate(answer.calls):
            function = DeltaFunctionCall(name=one["function"]["name"], arguments=one["function"]["arguments"])
            called = DeltaToolCall(index=place, id=one["id"], type="function", function=function)
            events += self._of(DeltaMessage(tool_calls=[called]))
        events += self._processor.close_current()
        whole = _response(self._call, answer)
        reuse_streamed_item_ids(whole.output, self._processor.output_items)
        events.append(ResponseCompletedEvent(type="response.completed", sequence_number=-1, response=whole))
        return self._written(events)

    def whole(self, choices: Sequence[ChatAnswer]) -> bytes:
        """Return all events, for a client that asks again."""
        return ResponseEvents(self._call).rest(choices)

    def _first_events(self) -> list[Any]:
        """Return the first events; empty if an event has been returned."""
        if self.sent:
            return []
        self.sent[0] = ""
        started: Any = _response(self._call, None).model_dump(mode="json", by_alias=True)
        return [
            ResponseCreatedEvent(type="response.created", sequence_number=-1, response=started),
            ResponseInProgressEvent(type="response.in_progress", sequence_number=-1, response=started),
        ]

    def _of(self, delta: DeltaMessage) -> list[Any]:
        """Return the events of a part of the message."""
        target, called = self._processor.resolve_target_state(delta)
        events: list[Any] = []
        if self._processor.needs_transition(target, called):
            events += self._processor.close_current()
            events += self._processor.open(target, called)
        no_output: Any = None
        return [*events, *self._processor.emit_delta(delta, no_output)]

    def _written(self, events: Sequence[Any]) -> bytes:
        lines = []
        for event in events:
            event.sequence_number = self._count
            self._count += 1
            lines.append(f"event: {event.type}\ndata: {event.model_dump_json(by_alias=True)}\n\n")
        return "".join(lines).encode()


def _response(call: ChatCall, answer: ChatAnswer | None) -> ResponsesResponse:
    """Return the answer in vLLM's class; without an answer, the start of one."""
    assert isinstance(call, ResponsesCall)
    output: list[Any] = []
    status: Literal["in_progress", "incomplete", "completed"] = "in_progress"
    usage: ResponseUsage | None = None
    if answer is not None:
        status = "incomplete" if answer.finish_reason == "length" else "completed"
        called = [FunctionCall(id=one["id"], **one["function"]) for one in answer.calls]
        output = build_response_output_items(None, answer.content, called, _log_probs(call, answer))
        prompt, sampled = len(answer.prompt_ids), len(answer.tokens)
        usage = ResponseUsage(
            input_tokens=prompt,
            input_tokens_details=InputTokensDetails(cached_tokens=0, cache_write_tokens=0),
            output_tokens=sampled,
            output_tokens_details=OutputTokensDetails(),
            total_tokens=prompt + sampled,
        )
    settings = SamplingParams(max_tokens=call.max_tokens or _NO_LIMIT, logprobs=0)
    return ResponsesResponse.from_request(call.request, settings, call.model, call.created, output, status, usage)


def _log_probs(call: ChatCall, answer: ChatAnswer) -> list[Logprob] | None:
    if not call.logprobs:
        return None
    return [
        Logprob(token=text, bytes=list(text.encode()), logprob=log_prob, top_logprobs=[])
        for text, log_prob in zip(answer.token_texts, answer.log_probs, strict=True)
    ]
