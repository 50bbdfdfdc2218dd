"""Token ids of the results of tools, in the tool role of a chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rl_plugins.data.tokenization import PlainTexts, check_chat_template
from rl_plugins.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROBE = "whatever-came-back"


class ToolMessages:
    """Tokens between a response with calls and the next response.

    The tokens are the end of the policy's turn, the results, and the start of the policy's next turn. They are the
    difference of two texts of the chat template: a conversation with the results, and the conversation before. Both
    have calls of the same tools without arguments, so the tokens do not depend on sampled text.

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
        self._before: dict[tuple[str, ...], str] = {}
        question = [{"role": "user", "content": "?"}]
        without = {**self._options, "tools": None}
        if self._render(question, self._options) == self._render(question, without):
            raise ConfigError(
                f"the chat template of {tokenizer.name_or_path!r} does not show tools to the policy: use the tokenizer "
                "of a model with tools, or set its `chat_template`"
            )
        name = self._options["tools"][0]["function"]["name"]
        if _PROBE not in self._text([name], [_PROBE]):
            raise self._no_role("its text leaves the result of a tool out")

    def tokens(self, names: Sequence[str], results: Sequence[str], last_token: int) -> list[int]:
        """Return the token ids after a response with calls.

        Args:
            names: name of the tool of each call.
            results: text of each result. Special tokens in results are plain text.
            last_token: last token of the response; an end-of-sequence token is not repeated.
        """
        text = self._text(names, [self._texts.hide(result) for result in results])
        if last_token == self._tokenizer.eos_token_id:
            text = text.removeprefix(self._end)
        return self._texts.encode(text)

    def messages(self, names: Sequence[str], results: Sequence[str]) -> list[dict[str, Any]]:
        """Return a message for each result."""
        return [
            {"role": "tool", "name": name, "tool_call_id": _identity(place), "content": result}
            for place, (name, result) in enumerate(zip(names, results, strict=True))
        ]

    def _text(self, names: Sequence[str], results: Sequence[str]) -> str:
        calls = [
            {"type": "function", "id": _identity(place), "function": {"name": name, "arguments": {}}}
            for place, name in enumerate(names)
        ]
        conversation: list[Any] = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "", "tool_calls": calls},
        ]
        if tuple(names) not in self._before:
            self._before[tuple(names)] = self._render(conversation, self._options, starts_turn=False)
        before = self._before[tuple(names)]
        whole = self._render([*conversation, *self.messages(names, results)], self._options)
        if not whole.startswith(before):
            raise self._no_role("the result of a tool changes the text of earlier messages")
        return self._end_of_turn(before) + whole[len(before) :]

    def _end_of_turn(self, before: str) -> str:
        """Return the text from the end-of-sequence token on, if the policy's turn ends with this token."""
        _, found, after = before.rpartition(self._end)
        return found + after if found and not after.strip() else ""

    def _render(self, conversation: list[Any], options: Mapping[str, Any], *, starts_turn: bool = True) -> str:
        from jinja2 import TemplateError

        try:
            return str(
                self._tokenizer.apply_chat_template(
                    conversation, add_generation_prompt=starts_turn, tokenize=False, **options
                )
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
