"""Token ids between a response of a policy and its next response, from messages in the chat template: replies of
environments (`TurnTokenizer`), results of tools (`ToolMessages`), and messages of agents (`FollowingMessages`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rl_plugins.data.chat_template import Messages, TemplateRefusal, check_chat_template, render
from rl_plugins.data.tokenization import PlainTexts
from rl_plugins.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Placeholders; no template changes a single word.
_MOST_ENDS = 1024
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
        token: special token at the end of the turn; empty if the turn ends with the word.
    """

    word: str
    count: int
    token: str


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
        if len(turns) < end.count or end.token not in text:
            raise self._refused(calls, "its text leaves the policy's turn out")
        if end.token:
            text = text[text.index(end.token) :]
        return self._texts.encode(self._texts.following(last_token, text))

    def end_of(self, calls: Sequence[ToolUse]) -> _EndOfTurn:
        """Return the end of a turn with calls.

        Raises:
            ConfigError: the chat template refuses the calls and their results, or drops a part of the conversation.
        """
        key = tuple(call.name for call in calls)
        if key not in self._ends:
            # A policy may invent names of tools.
            if len(self._ends) >= _MOST_ENDS:
                self._ends.clear()
            self._ends[key] = self._find_end(calls)
        return self._ends[key]

    def takes(self, names: Sequence[str]) -> bool:
        """Return False if the chat template refuses several calls in a turn.

        Args:
            names: name of the tool of each call.

        Raises:
            ConfigError: the chat template refuses a single call.
        """
        try:
            self.end_of(_calls(names))
        except ConfigError:
            if len(names) == 1:
                raise
            return False
        return True

    def _find_end(self, calls: Sequence[ToolUse]) -> _EndOfTurn:
        results = [
            {"role": "tool", "name": self._texts.hide(c.name), "tool_call_id": c.identity, "content": _NEXT}
            for c in calls
        ]
        text = self._render(calls, results or [{"role": "user", "content": _NEXT}])
        before, found, _ = text.partition(_NEXT)
        if not found:
            raise self._refused(calls, "its text leaves the result of a tool out")
        word = _ARGUMENT if _ARGUMENT in before else _SAID
        _, found, after = before.rpartition(word)
        token = self._end if self._end in after else ""
        if word == _ARGUMENT and not token:
            # The end of a turn may be another token than the end of the sequence, as in base models of Qwen.
            token = self._texts.first_special(after)
        if not found or (word == _ARGUMENT and not token):
            raise self._refused(calls, "its text does not end the policy's turn before the result of a tool")
        return _EndOfTurn(word, before.count(word), token)

    def _render(self, calls: Sequence[ToolUse], messages: Sequence[Mapping[str, Any]]) -> str:
        turn: dict[str, Any] = {"role": "assistant", "content": _SAID}
        if calls:
            turn["tool_calls"] = [
                {
                    "type": "function",
                    "id": c.identity,
                    # The policy may invent a name, with the text of a special token.
                    "function": {"name": self._texts.hide(c.name), "arguments": {"x": _ARGUMENT}},
                }
                for c in calls
            ]
        try:
            return render(self._tokenizer, [{"role": "user", "content": "?"}, turn, *messages], self._options)
        except TemplateRefusal as error:
            if calls:
                raise self._refused(calls, str(error)) from error
            raise ConfigError(
                f"the chat template of {self._tokenizer.name_or_path!r} refuses a message of the role "
                f"{', '.join(repr(message['role']) for message in messages)} after a response: {error}; change the "
                "message, or the template"
            ) from error

    def _refused(self, calls: Sequence[ToolUse], reason: str) -> ConfigError:
        name = self._tokenizer.name_or_path
        if calls:
            return ConfigError(
                f"the chat template of {name!r} has no tool role ({reason}): use the tokenizer of a model with tools, "
                "or set its `chat_template`"
            )
        return ConfigError(
            f"the chat template of {name!r} changes the text of the policy's responses, so no message can follow a "
            f"response ({reason}): use the tokenizer of an instruction-tuned model, or set its `chat_template`"
        )


class TurnTokenizer:
    """Tokens of messages after a response without calls, with a limit; see `FollowingMessages`.

    Args:
        tokenizer: tokenizer of the policy.
        template_options: further variables of its chat template.

    Raises:
        ConfigError: the tokenizer has no chat template, or the template changes or drops the text of a response.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_options: Mapping[str, Any] | None = None) -> None:
        self._tokenizer, self._texts = tokenizer, PlainTexts(tokenizer)
        self._following = FollowingMessages(tokenizer, template_options or {})
        self._following.end_of(())

    def tokens(self, messages: Messages, last_token: int, max_tokens: int) -> tuple[list[int], bool]:
        """Return the token ids after a response, and True if a text was cut off.

        Args:
            messages: the messages with their roles.
            last_token: last token of the response before the messages; a special token is not repeated.
            max_tokens: largest number of tokens of all texts of the messages; a text beyond is cut off.

        Raises:
            ConfigError: the chat template does not accept the role of a message.
        """
        room, was_cut, kept = max_tokens, False, []
        for message in messages:
            content_ids = self._texts.encode(self._texts.hide(str(message["content"])))
            if len(content_ids) > room:
                was_cut, message = True, {**message, "content": self._tokenizer.decode(content_ids[:room])}
            room -= min(room, len(content_ids))
            kept.append(message)
        return self._following.tokens((), kept, last_token), was_cut


class ToolMessages:
    """Tokens between a response with calls and the next response; see `FollowingMessages`.

    Args:
        tokenizer: tokenizer of the policy.
        template_options: further variables of its chat template; `tools` has the schemas.

    Raises:
        ConfigError: the chat template shows no tools, or has no tool role.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_options: Mapping[str, Any]) -> None:
        self._following = FollowingMessages(tokenizer, template_options)
        check_shows_tools(tokenizer, template_options)
        self._following.end_of(_calls([template_options["tools"][0]["function"]["name"]]))

    def tokens(self, names: Sequence[str], results: Sequence[str], last_token: int) -> list[int]:
        """Return the token ids after a response with calls.

        Args:
            names: name of the tool of each call.
            results: text of each result. Special tokens in results are plain text.
            last_token: last token of the response; a special token is not repeated.
        """
        if not self._following.takes(names):
            names, results = names[:1], ["\n".join(results)]
        return self._following.tokens(_calls(names), self.messages(names, results), last_token)

    def messages(self, names: Sequence[str], results: Sequence[str]) -> list[dict[str, Any]]:
        """Return a message for each result."""
        return [
            {"role": "tool", "name": call.name, "tool_call_id": call.identity, "content": result}
            for call, result in zip(_calls(names), results, strict=True)
        ]


def check_shows_tools(tokenizer: PreTrainedTokenizerBase, template_options: Mapping[str, Any]) -> None:
    """Raise a ConfigError if the chat template does not show the tools of `template_options`."""
    question = [{"role": "user", "content": "?"}]
    try:
        with_tools, without = (
            render(tokenizer, question, {**template_options, "tools": tools})
            for tools in (template_options["tools"], None)
        )
    except TemplateRefusal as error:
        raise ConfigError(
            f"the chat template of {tokenizer.name_or_path!r} has no tool role ({error}): use the tokenizer of a model "
            "with tools, or set its `chat_template`"
        ) from error
    if with_tools == without:
        raise ConfigError(
            f"the chat template of {tokenizer.name_or_path!r} does not show tools to the policy: use the tokenizer "
            "of a model with tools, or set its `chat_template`"
        )


def _calls(names: Sequence[str]) -> list[ToolUse]:
    # Nine letters or digits, which all templates accept.
    return [ToolUse(f"call{place:05d}", name) for place, name in enumerate(names)]
