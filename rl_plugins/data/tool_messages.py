"""Token ids of the results of tools, in the tool role of a chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rl_plugins.data.tokenization import PlainTexts, check_chat_template
from rl_plugins.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Placeholders; no template changes a single word.
_SAID, _ARGUMENT, _RESULT = "whatever-was-said", "whatever-was-asked", "whatever-came-back"


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


class ToolMessages:
    """Tokens between a response with calls and the next response.

    The tokens are the end of the policy's turn, the results, and the start of the policy's next turn. They are a part
    of the template's text for a conversation with the results. In this conversation, the policy's turn has
    placeholders, so the tokens depend on the names of the called tools, and never on sampled text.

    Args:
        tokenizer: tokenizer of the policy.
        template_options: further variables of its chat template; `tools` has the schemas.

    Raises:
        ConfigError: the chat template shows no tools, or has no tool role.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_options: Mapping[str, Any]) -> None:
        check_chat_template(tokenizer)
        self._tokenizer, self._options = tokenizer, dict(template_options)
        self._end, self._texts = str(tokenizer.eos_token), PlainTexts(tokenizer)
        self._ends: dict[tuple[str, ...], _EndOfTurn | None] = {}
        question = [{"role": "user", "content": "?"}]
        if self._render(question, self._options) == self._render(question, {**self._options, "tools": None}):
            raise ConfigError(
                f"the chat template of {tokenizer.name_or_path!r} does not show tools to the policy: use the tokenizer "
                "of a model with tools, or set its `chat_template`"
            )
        self._find_end([self._options["tools"][0]["function"]["name"]])

    def tokens(self, names: Sequence[str], results: Sequence[str], last_token: int) -> list[int]:
        """Return the token ids after a response with calls.

        Args:
            names: name of the tool of each call.
            results: text of each result. Special tokens in results are plain text.
            last_token: last token of the response; an end-of-sequence token is not repeated.
        """
        end = self._end_of(names)
        if end is None:
            names, results = names[:1], ["\n".join(results)]
            end = self._end_of(names)
        assert end is not None, "the check of the template had one call"
        hidden = [self._texts.hide(result) for result in results]
        text = self._render(self._conversation(names, hidden), self._options).split(end.word, end.count)[end.count]
        if end.has_token:
            text = text[text.index(self._end) :]
        if last_token == self._tokenizer.eos_token_id:
            text = text.removeprefix(self._end)
        return self._texts.encode(text)

    def messages(self, names: Sequence[str], results: Sequence[str]) -> list[dict[str, Any]]:
        """Return a message for each result."""
        return [
            {"role": "tool", "name": name, "tool_call_id": _identity(place), "content": result}
            for place, (name, result) in enumerate(zip(names, results, strict=True))
        ]

    def _end_of(self, names: Sequence[str]) -> _EndOfTurn | None:
        """Return the end of a turn with calls; None if the template refuses several calls in a turn."""
        key = tuple(names)
        if key not in self._ends:
            try:
                self._ends[key] = self._find_end(names)
            except ConfigError:
                if len(names) == 1:
                    raise
                self._ends[key] = None
        return self._ends[key]

    def _find_end(self, names: Sequence[str]) -> _EndOfTurn:
        text = self._render(self._conversation(names, [_RESULT] * len(names)), self._options)
        before, found, _ = text.partition(_RESULT)
        if not found:
            raise self._no_role("its text leaves the result of a tool out")
        word = _ARGUMENT if _ARGUMENT in before else _SAID
        _, found, after = before.rpartition(word)
        if not found or (word == _ARGUMENT and self._end not in after):
            raise self._no_role("its text does not end the policy's turn before the result of a tool")
        return _EndOfTurn(word, before.count(word), self._end in after)

    def _conversation(self, names: Sequence[str], results: Sequence[str]) -> list[Any]:
        calls = [
            {"type": "function", "id": _identity(place), "function": {"name": name, "arguments": {"x": _ARGUMENT}}}
            for place, name in enumerate(names)
        ]
        return [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": _SAID, "tool_calls": calls},
            *self.messages(names, results),
        ]

    def _render(self, conversation: list[Any], options: Mapping[str, Any]) -> str:
        from jinja2 import TemplateError

        try:
            return str(
                self._tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False, **options)
            )
        except TemplateError as error:
            raise self._no_role(str(error)) from error

    def _no_role(self, reason: str) -> ConfigError:
        return ConfigError(
            f"the chat template of {self._tokenizer.name_or_path!r} has no tool role ({reason}): use the tokenizer of "
            "a model with tools, or set its `chat_template`"
        )


def _identity(place: int) -> str:
    # Nine letters or digits, which all templates accept.
    return f"call{place:05d}"
