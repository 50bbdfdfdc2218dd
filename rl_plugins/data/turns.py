"""What is said to a policy in a conversation becomes tokens behind those that it sampled.

What has been sampled is never tokenised again: text that is put back into tokens need not give the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rl_plugins.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Stands for what the policy said; no template changes a word.
_SAID = "whatever-was-said"


class TurnTokenizer:
    """The tokens between two responses of a policy.

    Args:
        tokenizer: of the policy.
        template_options: further arguments of its chat template.

    Raises:
        ConfigError: the chat template does not give back what it is given.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_options: Mapping[str, Any] | None = None) -> None:
        self._tokenizer, self._options = tokenizer, dict(template_options or {})
        self._end = str(tokenizer.eos_token)
        self._text_after({"role": "user", "content": "and then?"})

    def tokens(self, message: Mapping[str, Any], last_token: int, max_tokens: int) -> tuple[list[int], bool]:
        """Return the end of the policy's turn, a message to it, and the start of its next turn.

        Args:
            message: what is said, with its role.
            last_token: of the response before it; the end of sequence is not repeated.
            max_tokens: of the text said; what is longer is cut behind them.

        Returns:
            The token ids, and whether the text was cut.

        Raises:
            ConfigError: the chat template does not know the role.
        """
        said = self._encode(str(message["content"]))
        was_cut = len(said) > max_tokens
        if was_cut:
            message = {**message, "content": self._tokenizer.decode(said[:max_tokens])}
        text = self._text_after(message)
        if last_token == self._tokenizer.eos_token_id:
            text = text.removeprefix(self._end)
        return self._encode(text), was_cut

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _text_after(self, message: Mapping[str, Any]) -> str:
        from jinja2 import TemplateError

        conversation = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _SAID}, dict(message)]
        try:
            text = str(
                self._tokenizer.apply_chat_template(
                    conversation, add_generation_prompt=True, tokenize=False, **self._options
                )
            )
        except TemplateError as error:
            raise ConfigError(
                f"the chat template of {self._tokenizer.name_or_path!r} refuses a message of the role "
                f"{message['role']!r} behind a response: {error}; answer with a role that it knows"
            ) from error
        _, found, after = text.partition(_SAID)
        if not found:
            raise ConfigError(
                f"the chat template of {self._tokenizer.name_or_path!r} does not give back what the policy said, so "
                "nothing can be put behind it: an environment needs another template"
            )
        return after
