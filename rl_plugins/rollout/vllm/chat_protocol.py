"""Calls of `/v1/chat/completions` and their answers, in the classes of vLLM's own server.

The settings of sampling are those of the run, because log-probs belong to the sampled distribution. So a call may set
its length and the number of answers alone. Other settings of sampling (temperature, top_p, seed, penalties, ...) are
ignored, and options that change the form of an answer (stop, a forced call, a grammar, ...) are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError
from vllm.entrypoints.generate.base.protocol import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    FunctionCall,
    ToolCall,
)
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionLogProbs,
    ChatCompletionLogProbsContent,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatCompletionResponseStreamChoice,
    ChatCompletionStreamResponse,
    ChatMessage,
)
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse, ModelCard, ModelList, UsageInfo
from vllm.exceptions import VLLMValidationError

from rl_plugins.json_text import read_foreign_json
from rl_plugins.rollout.chat import ChatAnswer, ChatCall, Refused, canonical

MODEL = "policy"
"""Name of the policy in `/v1/models`. A call may give any name."""
OF_THE_RUN = "the settings of sampling are those of the run"
_REFUSED = {
    "stop": f"{OF_THE_RUN}: set sampling.stop of the run",
    "stop_token_ids": f"{OF_THE_RUN}: set sampling.stop_token_ids of the run",
    "response_format": f"a grammar changes the distribution, and {OF_THE_RUN}: leave response_format out",
    "structured_outputs": f"a grammar changes the distribution, and {OF_THE_RUN}: leave structured_outputs out",
    "logit_bias": f"{OF_THE_RUN}: leave logit_bias out",
    "allowed_token_ids": f"{OF_THE_RUN}: leave allowed_token_ids out",
    "bad_words": f"{OF_THE_RUN}: leave bad_words out",
    "min_tokens": f"{OF_THE_RUN}: leave min_tokens out",
    "ignore_eos": f"{OF_THE_RUN}: leave ignore_eos out",
    "use_beam_search": f"{OF_THE_RUN}: leave use_beam_search out",
    "top_logprobs": "there are log-probs of the sampled tokens alone: leave top_logprobs out",
    "logprob_token_ids": "there are log-probs of the sampled tokens alone: leave logprob_token_ids out",
    "prompt_logprobs": "there are log-probs of the sampled tokens alone: leave prompt_logprobs out",
    "echo": "an answer has sampled tokens alone: leave echo out",
    "add_generation_prompt": "an answer is a new message: leave add_generation_prompt out",
    "continue_final_message": "an answer is a new message: leave continue_final_message out",
    "chat_template": "the chat template is that of the tokenizer: leave chat_template out",
    "chat_template_kwargs": "the variables of the chat template are those of the run: set data.chat_template_kwargs",
    "documents": "the variables of the chat template are those of the run: set data.chat_template_kwargs",
    "truncate_prompt_tokens": "a cut prompt continues no earlier call: leave truncate_prompt_tokens out",
}
"""Options of a call that are refused, and the reason."""


def read_chat_call(body: bytes) -> ChatCall:
    """Read the body of a call.

    Raises:
        Refused: the body is no valid call, or has an option that is refused.
    """
    try:
        content = read_foreign_json(body)
        messages = [canonical(message) for message in content["messages"]]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Refused(f"the body is no chat completion ({type(error).__name__}: {error})") from error
    try:
        # Clients also send fields of messages that are null.
        request = ChatCompletionRequest.model_validate({**content, "messages": messages})
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise Refused(f"{place}: {first['msg']}" if place else str(first["msg"])) from error
    except (VLLMValidationError, ValueError) as error:
        raise Refused(str(error)) from error
    # Some validators of vLLM read the body before its types are checked.
    except (AttributeError, LookupError, TypeError) as error:
        raise Refused(f"the body is no chat completion ({type(error).__name__}: {error})") from error
    _check(request)
    tools = [tool.model_dump(exclude_none=True) for tool in request.tools or []]
    return ChatCall(
        messages=messages,
        tools=tools,
        may_call=bool(tools) and request.tool_choice != "none",
        one_call=request.parallel_tool_calls is False,
        max_tokens=_longest(request),
        logprobs=bool(request.logprobs),
        stream=bool(request.stream),
        stream_usage=bool(request.stream_options and request.stream_options.include_usage),
        model=request.model or MODEL,
        num_choices=1 if request.n is None else request.n,
        token_ids=bool(request.return_token_ids),
    )


def _check(request: ChatCompletionRequest) -> None:
    if not request.messages:
        raise Refused("messages: a call has at least one message")
    for name, reason in _REFUSED.items():
        if name not in request.model_fields_set:
            continue
        value, usual = getattr(request, name), ChatCompletionRequest.model_fields[name].default
        is_text = name == "response_format" and getattr(value, "type", "") == "text"
        if value not in (None, usual, [], {}) and not is_text:
            raise Refused(f"{name}: {reason}")
    if request.tool_choice not in (None, "none", "auto"):
        raise Refused(f"tool_choice: a forced call is not sampled from the policy, and {OF_THE_RUN}: use auto or none")
    if request.n is not None and request.n < 1:
        raise Refused(f"n={request.n}: must be at least 1")
    longest = _longest(request)
    if longest is not None and longest < 1:
        raise Refused(f"max_tokens={longest}: must be at least 1")


def _longest(request: ChatCompletionRequest) -> int | None:
    """Return the longest answer of a request, in tokens; None without a limit."""
    # The attribute of the older name warns.
    fields = vars(request)
    newer: int | None = fields["max_completion_tokens"]
    older: int | None = fields["max_tokens"]
    return older if newer is None else newer


def completion(call: ChatCall, choices: Sequence[ChatAnswer]) -> bytes:
    """Return the body of the answers to a call."""
    response = ChatCompletionResponse(
        model=call.model,
        choices=[
            ChatCompletionResponseChoice(
                index=index,
                message=ChatMessage(
                    role="assistant", content=one.content or (None if one.calls else ""), tool_calls=_calls(one)
                ),
                logprobs=_log_probs(call, one),
                finish_reason=one.finish_reason,
                token_ids=list(one.tokens) if call.token_ids else None,
            )
            for index, one in enumerate(choices)
        ],
        usage=_usage(choices),
        prompt_token_ids=list(choices[0].prompt_ids) if call.token_ids else None,
    )
    return response.model_dump_json().encode()


def models() -> bytes:
    """Return the body of `/v1/models`."""
    return ModelList(data=[ModelCard(id=MODEL)]).model_dump_json().encode()


def error_body(status: int, reason: str, kind: str) -> bytes:
    """Return the body of an error.

    Args:
        status: status of HTTP.
        reason: reason for the client.
        kind: type of the error in OpenAI's protocol.
    """
    return ErrorResponse(error=ErrorInfo(message=reason, type=kind, code=status)).model_dump_json().encode()


class ChatEvents:
    """Server-sent events of the answers to a call, which may begin while the policy samples.

    Args:
        call: the call.

    Attributes:
        sent: text of each choice in the events so far, by the number of the choice.
    """

    def __init__(self, call: ChatCall) -> None:
        self._call = call
        first = ChatCompletionStreamResponse(model=call.model, choices=[])
        self._shared: dict[str, Any] = {name: getattr(first, name) for name in ("id", "object", "created", "model")}
        self.sent: dict[int, str] = {}

    def more(self, texts: Sequence[str]) -> bytes:
        """Return events with the new text of each choice; empty without new text.

        Args:
            texts: text of each choice so far.
        """
        parts: list[ChatCompletionResponseStreamChoice] = []
        for index, text in enumerate(texts):
            sent = self.sent.get(index, "")
            if len(text) > len(sent) and text.startswith(sent):
                parts += self._first_parts(index)
                parts.append(_part(index, DeltaMessage(content=text[len(sent) :])))
                self.sent[index] = text
        return self._written(self._chunks(parts))

    def rest(self, choices: Sequence[ChatAnswer]) -> bytes:
        """Return the events after the events so far: the rest of the texts, the calls, the ends, and the usage.

        Args:
            choices: the answers. Each text begins with its text in `sent`.
        """
        parts: list[ChatCompletionResponseStreamChoice] = []
        for index, one in enumerate(choices):
            sent = self.sent.get(index, "")
            parts += [*self._first_parts(index), *_last_parts(self._call, index, one, one.content[len(sent) :])]
        chunks = self._chunks(parts)
        if self._call.token_ids:
            chunks[0].prompt_token_ids = list(choices[0].prompt_ids)
        if self._call.stream_usage:
            chunks.append(ChatCompletionStreamResponse(**self._shared, choices=[], usage=_usage(choices)))
        return self._written(chunks) + b"data: [DONE]\n\n"

    def whole(self, choices: Sequence[ChatAnswer]) -> bytes:
        """Return all events, for a client that asks again."""
        again = ChatEvents(self._call)
        again._shared = self._shared
        return again.rest(choices)

    def _first_parts(self, index: int) -> list[ChatCompletionResponseStreamChoice]:
        """Return the first part of a choice; empty if a part has been returned."""
        if index in self.sent:
            return []
        self.sent[index] = ""
        return [_part(index, DeltaMessage(role="assistant", content=""))]

    def _chunks(self, parts: Sequence[ChatCompletionResponseStreamChoice]) -> list[ChatCompletionStreamResponse]:
        return [ChatCompletionStreamResponse(**self._shared, choices=[part]) for part in parts]

    @staticmethod
    def _written(chunks: Sequence[ChatCompletionStreamResponse]) -> bytes:
        return "".join(f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n" for chunk in chunks).encode()


def _part(index: int, delta: DeltaMessage) -> ChatCompletionResponseStreamChoice:
    return ChatCompletionResponseStreamChoice(index=index, delta=delta)


def _last_parts(call: ChatCall, index: int, answer: ChatAnswer, text: str) -> list[ChatCompletionResponseStreamChoice]:
    """Return the last parts of one choice in a stream: text, calls, and the end."""
    calls = [
        DeltaToolCall(
            index=place,
            id=one["id"],
            type="function",
            function=DeltaFunctionCall(name=one["function"]["name"], arguments=one["function"]["arguments"]),
        )
        for place, one in enumerate(answer.calls)
    ]
    deltas = [DeltaMessage(content=text)] if text else []
    deltas += [DeltaMessage(tool_calls=calls)] if calls else []
    end = ChatCompletionResponseStreamChoice(
        index=index, delta=DeltaMessage(), logprobs=_log_probs(call, answer), finish_reason=answer.finish_reason
    )
    if call.token_ids:
        end.token_ids = list(answer.tokens)
    return [*(_part(index, delta) for delta in deltas), end]


def _calls(answer: ChatAnswer) -> list[ToolCall]:
    return [ToolCall(id=one["id"], function=FunctionCall(**one["function"])) for one in answer.calls]


def _usage(choices: Sequence[ChatAnswer]) -> UsageInfo:
    prompt, sampled = len(choices[0].prompt_ids), sum(len(one.tokens) for one in choices)
    return UsageInfo(prompt_tokens=prompt, completion_tokens=sampled, total_tokens=prompt + sampled)


def _log_probs(call: ChatCall, answer: ChatAnswer) -> ChatCompletionLogProbs | None:
    if not call.logprobs:
        return None
    content = [
        ChatCompletionLogProbsContent(token=text, logprob=log_prob, bytes=list(text.encode()))
        for text, log_prob in zip(answer.token_texts, answer.log_probs, strict=True)
    ]
    return ChatCompletionLogProbs(content=content)
