"""Token ids between a response of a policy and its next response, from messages in the chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rl_plugins.data.chat_template import TemplateRefusal, check_chat_template, render
from rl_plugins.data.tokenization import PlainTexts
from rl_plugins.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Placeholders; no template changes a single word.
_SAID, _ARGUMENT, _NEXT = "whatever-was-said", "whatever-was-asked", "whatever-came-back"


@dataclass(frozen=True)
class ToolUse:
    """Call of a tool in a response.

    Attributes:
        identity: name of the call, to which its result refers.
        name: name of the tool.
    """

    identity: str
    name: str


@dataclass(frozen=True)
class _EndOfTurn:
    """Place at which the policy's turn ends in a text of the template.

    Attributes:
        word: last placeholder of the turn.
        count: number of times that the turn has the word.
        has_token: True if an end-of-sequence token follows the word in the turn.
    """

    word: str
    count: int
    has_token: bool


class FollowingMessages:
    """Tokens between a response and the next response.

    The tokens are the end of the policy's turn, the messages, and the start of the policy's next turn. They are a part
    of the template's text for a conversation with the messages. In this conversation, the policy's turn has
    placeholders, so the tokens depend on the names of the called tools, and never on sampled text.

    Args:
        tokenizer: tokenizer of the policy.
        template_options: further variables of its chat template; `tools` has the schemas.

    Raises:
        ConfigError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_options: Mapping[str, Any]) -> None:
        check_chat_template(tokenizer)
        self._tokenizer, self._options = tokenizer, dict(template_options)
        self._end, self._texts = str(tokenizer.eos_token), PlainTexts(tokenizer)
        self._ends: dict[tuple[str, ...], _EndOfTurn] = {}

    def tokens(self, calls: Sequence[ToolUse], messages: Sequence[Mapping[str, Any]], last_token: int) -> list[int]:
        """Return the token ids after a response.

        Args:
            calls: calls of the response.
            messages: messages after the response. Special tokens in their texts are plain text.
            last_token: last token of the response; a special token is not repeated.

        Raises:
            ConfigError: the chat template refuses the messages, or drops a part of the conversation.
        """
        end = self.end_of(calls)
        hidden = [self._texts.hide(dict(message)) for message in messages]
        *turns, text = self._render(calls, hidden).split(end.word, end.count)
        if len(turns) < end.count or (end.has_token and self._end not in text):
            raise self._refused(calls, "its text leaves the policy's turn out")
        if end.has_token:
            text = text[text.index(self._end) :]
        return self._texts.encode(self._texts.following(last_token, text))

    def end_of(self, calls: Sequence[ToolUse]) -> _EndOfTurn:
        """Return the end of a turn with calls.

        Raises:
            ConfigError: the chat template refuses the calls and their results, or drops a part of the conversation.
        """
        key = tuple(call.name for call in calls)
        if key not in self._ends:
            self._ends[key] = self._find_end(calls)
        return self._ends[key]

    def _find_end(self, calls: Sequence[ToolUse]) -> _EndOfTurn:
        results = [{"role": "tool", "name": c.name, "tool_call_id": c.identity, "content": _NEXT} for c in calls]
        text = self._render(calls, results or [{"role": "user", "content": _NEXT}])
        before, found, _ = text.partition(_NEXT)
        if not found:
            raise self._refused(calls, "its text leaves the result of a tool out")
        word = _ARGUMENT if _ARGUMENT in before else _SAID
        _, found, after = before.rpartition(word)
        if not found or (word == _ARGUMENT and self._end not in after):
            raise self._refused(calls, "its text does not end the policy's turn before the result of a tool")
        return _EndOfTurn(word, before.count(word), self._end in after)

    def _render(self, calls: Sequence[ToolUse], messages: Sequence[Mapping[str, Any]]) -> str:
        turn: dict[str, Any] = {"role": "assistant", "content": _SAID}
        if calls:
            turn["tool_calls"] = [
                {"type": "function", "id": c.identity, "function": {"name": c.name, "arguments": {"x": _ARGUMENT}}}
                for c in calls
            ]
        try:
            return render(self._tokenizer, [{"role": "user", "content": "?"}, turn, *messages], self._options)
        except TemplateRefusal as error:
            raise self._refused(calls, str(error)) from error

    def _refused(self, calls: Sequence[ToolUse], reason: str) -> ConfigError:
        name = self._tokenizer.name_or_path
        if calls:
            return ConfigError(
                f"the chat template of {name!r} has no tool role ({reason}): use the tokenizer of a model with tools, "
                "or set its `chat_template`"
            )
        return ConfigError(
            f"the chat template of {name!r} takes no message after a response ({reason}): use the tokenizer of an "
            "instruction-tuned model, or set its `chat_template`"
        )
