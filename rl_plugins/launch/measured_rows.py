"""Rows of training or of validation before a run: format, values beside the prompt, and lengths in tokens."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rl_plugins.config.recipe import GIVEN_RESPONSE_STAGES, RecipeConfig
from rl_plugins.errors import ConfigError, RowError

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerBase

    from rl_plugins.data.chat_template import Messages
    from rl_plugins.data.image_prompts import ImagePromptEncoder
    from rl_plugins.data.parquet import PromptRows, Row

_ROWS_MEASURED = 1000
# Name of an argument with a dotted key; the option has the same name in the group `data`.
_KEY = re.compile(r"\b\w+_key=")


def kinds_of(config: RecipeConfig) -> tuple[str, str]:
    """Return the names of the formats (`FORMATS`) of training rows and of validation rows."""
    if config.stage == "sft":
        kind = "sft" if config.data.messages_key is None else "conversations"
        return kind, kind if config.validates_on_responses else "prompts"
    if config.stage not in GIVEN_RESPONSE_STAGES:
        return "prompts", "prompts"
    kind = "judged" if config.data.label_key is not None else "preferences"
    if config.loss.name == "process_reward":
        kind = "steps"
    return kind, "prompts" if config.scores else kind


@contextmanager
def options_in_errors() -> Iterator[None]:
    """Name options in place of arguments in the error of a row.

    Raises:
        RowError: the context raised one.
    """
    try:
        yield
    except RowError as error:
        named = (_KEY.sub(r"data.\g<0>", text) for text in (error.field, error.reason))
        raise RowError(error.where, *named) from None


class MeasuredRows:
    """Rows of training or of validation.

    Args:
        rows: the rows.
        kind: name of their format.
        needed: smallest number of rows with a prompt and responses within the limits.
        config: configuration of the run.

    Raises:
        ConfigError: a value beside the prompt is missing or wrong.
    """

    def __init__(self, rows: PromptRows, kind: str, needed: int, config: RecipeConfig) -> None:
        from rl_plugins.data.formats import CONVERSATIONS, FORMATS

        self.rows, self._format, self._needed, self._config = rows, FORMATS[kind], needed, config
        self._are_conversations = kind == CONVERSATIONS
        self._limits = {"data.max_prompt_tokens": config.data.max_prompt_tokens}
        # Characters of the longest response of each row.
        self._response_characters: list[int] = []
        if kind == "prompts":
            return
        self._limits["sampling.max_tokens"] = config.sampling.max_tokens
        for number, row in enumerate(rows):
            responses = self._responses(row, rows.location(number))
            self._response_characters.append(max(sum(map(len, texts)) for texts in responses))

    def _responses(self, row: Row, location: str) -> Sequence[Sequence[str]]:
        with options_in_errors():
            return self._format.responses(self._format.read(row, self._config.data, location))

    def check_lengths(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template_options: Mapping[str, Any],
        images: ImagePromptEncoder | None = None,
    ) -> None:
        """Try the chat template on every order of roles, and measure texts in tokens.

        To limit the time for a large data set, with `data.overlong_prompts=filter` only the shortest rows are measured,
        until enough rows are within the limits; with `error`, only the rows with the most characters.

        Args:
            tokenizer: tokenizer of the policy.
            template_options: further variables of its chat template.
            images: maker of prompts with images; None if no row has images.

        Raises:
            ConfigError: the tokenizer changes all texts, the template refuses messages, too few rows are within the
                limits, or a row is too long.
        """
        import numpy as np

        from rl_plugins.data.chat_template import accepted_messages
        from rl_plugins.data.conversation_tokens import TriedConversations
        from rl_plugins.data.tokenization import check_round_trip, within_limit

        self._template_options, self._images = template_options, images
        accepted: Iterator[Messages] = (
            accepted_messages(self.rows, tokenizer, template_options)
            if images is None
            else (row.columns["prompt"] for row in images.accepted_rows(self.rows, template_options))
        )
        check_round_trip(tokenizer, (row["prompt"] for row in self.rows))
        if self._are_conversations:
            self._conversations = TriedConversations(
                self.rows, tokenizer, template_options, split=self._config.data.split_conversations
            )
        characters = np.asarray([
            list(map(_characters, accepted)),
            *([self._response_characters] if self._response_characters else []),
        ])  # fmt: skip
        lengths = np.zeros_like(characters)

        def measure(numbers: np.ndarray) -> None:
            for one, measured in zip(lengths, self._measured(numbers.tolist(), tokenizer), strict=True):
                one[numbers] = measured

        refuse = self._config.data.overlong_prompts == "error"
        if refuse:
            for of_text in characters:
                measure(np.argsort(of_text, kind="stable")[-_ROWS_MEASURED:])
        else:
            limits, fitting = np.asarray(list(self._limits.values()))[:, None], 0
            shortest = np.argsort(characters.sum(axis=0), kind="stable")
            for first in range(0, len(shortest), _ROWS_MEASURED):
                numbers = shortest[first : first + _ROWS_MEASURED]
                measure(numbers)
                fitting += int((lengths[:, numbers] <= limits).all(axis=0).sum())
                if fitting >= self._needed:
                    return
        for (option, limit), of_text in zip(self._limits.items(), lengths, strict=True):
            within_limit(self.rows, of_text, option=option, limit=limit, overlong="error" if refuse else "filter")
        if not refuse:
            options = " and ".join(f"{option}={limit}" for option, limit in self._limits.items())
            raise ConfigError(
                f"{fitting} of {len(self.rows)} rows are within {options}, fewer than "
                f"{self._config.size_of_step}: raise a limit, lower batch.prompts_per_step, or add data"
            )

    def _measured(self, numbers: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> Iterator[Sequence[int]]:
        """Yield the tokens of each prompt, then of each longest response."""
        from rl_plugins.data.tokenization import TokenizerRefusal, tokenize_prompts

        if self._are_conversations:
            yield from self._conversations.lengths(numbers)
            return
        if self._images is None:
            prompts = (self.rows.rows[number]["prompt"] for number in numbers)
            try:
                lengths: list[int] = tokenize_prompts(prompts, tokenizer, self._template_options).lengths.tolist()
            except TokenizerRefusal as refusal:
                place = self.rows.location(numbers[refusal.number])
                raise RowError(place, "column 'prompt'", str(refusal)) from None
            yield lengths
        else:
            rows = map(self.rows.located, numbers)
            # A row that is left out has no tokens. To count the others, the row is too long.
            left_out = 0 if self._config.data.overlong_prompts == "error" else sys.maxsize
            yield [len(self._images.encode_row(row, self._template_options)) or left_out for row in rows]
        if self._response_characters:
            yield [self._tokens_of_longest_response(number, tokenizer) for number in numbers]

    def _tokens_of_longest_response(self, number: int, tokenizer: PreTrainedTokenizerBase) -> int:
        from rl_plugins.data.tokenization import TokenizerRefusal, encode_texts

        location = self.rows.location(number)
        responses = self._responses(self.rows.rows[number], location)
        try:
            # The end of a response is one more token.
            return 1 + max(sum(map(len, encode_texts(texts, tokenizer))) for texts in responses)
        except TokenizerRefusal as refusal:
            raise RowError(location, "response", str(refusal)) from None


def _characters(messages: Iterable[Mapping[str, Any]]) -> int:
    return sum(len(message["content"]) for message in messages)
