"""Token ids of the results of tools, in the tool role of a chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rl_plugins.data.chat_template import TemplateRefusal, render
from rl_plugins.data.following_messages import FollowingMessages, ToolUse
from rl_plugins.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
            last_token: last token of the response; an end-of-sequence token is not repeated.
        """
        if not self._takes(names):
            names, results = names[:1], ["\n".join(results)]
        return self._following.tokens(_calls(names), self.messages(names, results), last_token)

    def messages(self, names: Sequence[str], results: Sequence[str]) -> list[dict[str, Any]]:
        """Return a message for each result."""
        return [
            {"role": "tool", "name": call.name, "tool_call_id": call.identity, "content": result}
            for call, result in zip(_calls(names), results, strict=True)
        ]

    def _takes(self, names: Sequence[str]) -> bool:
        """Return False if the template refuses several calls in a turn."""
        try:
            self._following.end_of(_calls(names))
        except ConfigError:
            if len(names) == 1:
                raise
            return False
        return True


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
