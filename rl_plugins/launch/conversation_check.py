"""Trial of the chat template on the conversations of SFT, before a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rl_plugins.config.data import DataConfig
from rl_plugins.data.conversation_tokens import ConversationTokenizer, lengths_of
from rl_plugins.data.conversations import CALLS, MESSAGES, REASONING, TOOLS
from rl_plugins.data.image_prompts import Processor
from rl_plugins.data.parquet import PromptRows, Row
from rl_plugins.data.reasoning import END_OF_THOUGHT


class TriedConversations:
    """Conversations that the chat template takes.

    A template treats conversations of one shape alike, so one row of each shape is tried.

    Args:
        rows: rows with conversations.
        tokenizer: tokenizer of the policy, or processor of a vision-language model.
        template_options: further variables of its chat template.
        data: options of the data.

    Raises:
        RowError: the chat template refuses a conversation.
    """

    def __init__(
        self, rows: PromptRows, tokenizer: Processor, template_options: Mapping[str, Any], data: DataConfig
    ) -> None:
        self._rows = rows
        self._tokenizer = ConversationTokenizer(tokenizer, template_options, split=data.split_conversations)
        tried = set[tuple[object, ...]]()
        for number, row in enumerate(rows):
            shape = _shape(row)
            if shape not in tried:
                self._tokenizer.encode([(row, rows.location(number))])
                tried.add(shape)

    def lengths(self, numbers: Sequence[int]) -> np.ndarray:
        """Return the tokens before the first reply, and the tokens from the first reply on, of some rows [2, N]."""
        located = [(self._rows.rows[number], self._rows.location(number)) for number in numbers]
        lengths = list(map(lengths_of, self._tokenizer.encode(located)))
        return np.asarray(lengths, dtype=np.int64).reshape(-1, 2).T


def _shape(row: Row) -> tuple[object, ...]:
    """Return everything in a conversation by which templates choose a branch."""
    return row[TOOLS] is not None, *(
        (
            message["role"],
            bool(message["content"].strip()),
            END_OF_THOUGHT in message["content"],
            REASONING in message,
            len(message.get(CALLS, ())),
        )
        for message in row[MESSAGES]
    )
