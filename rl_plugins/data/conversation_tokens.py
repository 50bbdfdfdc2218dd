"""Token ids of whole conversations in the chat template, with a mask of the policy's turns.

A turn begins where the template begins the policy's turn after the messages before, and ends with the end-of-turn
token. So the policy learns each turn behind the text that the policy reads before this turn in a rollout. A template
may write a turn otherwise once messages follow, for example without its reasoning. Such a turn is refused, or gets a
sample of its own, which ends with the turn.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rl_plugins.data.chat_template import TemplateRefusal, refused_messages, render
from rl_plugins.data.conversations import ASSISTANT, CALLS, MESSAGES, REASONING, REASONING_KEYS, TOOLS, Message
from rl_plugins.data.following_messages import check_shows_tools
from rl_plugins.data.image_prompts import Processor, has_image_processor, tokenizer_of
from rl_plugins.data.images import in_parts
from rl_plugins.data.reasoning import END_OF_THOUGHT, THINK
from rl_plugins.data.tokenization import PlainTexts, TokenizerRefusal, encode_with_places
from rl_plugins.errors import ConfigError, RowError

if TYPE_CHECKING:
    from rl_plugins.data.parquet import PromptRows, Row

_NAMES = re.compile(r"(?:\.|['\"])([A-Za-z_]\w*)")
"""Keys that a template reads: `message.content` or `message['content']`, and no words of its texts."""
_COLUMN = "conversation"
_READ_ROLES = ("system", "developer", "user")
"""Roles of messages that each template writes unchanged."""


class ConversationSample(NamedTuple):
    """Tokens of a conversation, up to the end of a turn of the policy.

    Attributes:
        ids: token ids.
        mask: 1 for each token of a turn to learn, else 0.
    """

    ids: list[int]
    mask: list[int]


class _Turn(NamedTuple):
    """Text of the chat template up to a turn of the policy, and the turn's place in the text."""

    text: str
    start: int
    end: int


@dataclass(frozen=True)
class _Text:
    """Text of a sample, and the places of the turns to learn."""

    text: str
    turns: list[tuple[int, int]] = field(default_factory=list)


class ConversationTokenizer:
    """Makes the samples of conversations.

    Args:
        processor: tokenizer of the policy, or processor of a vision-language model.
        template_options: further variables of its chat template. The tools of a row replace `tools`.
        split: True to make a sample of its own of a turn that the template writes otherwise once messages follow.

    Raises:
        ConfigError: the tokenizer gives no places of tokens.
    """

    def __init__(self, processor: Processor, template_options: Mapping[str, Any], *, split: bool = False) -> None:
        self._processor, self._options, self._split = processor, dict(template_options), split
        self._tokenizer = tokenizer_of(processor)
        if not self._tokenizer.is_fast:
            raise ConfigError(
                f"the tokenizer {self._tokenizer.name_or_path!r} is no fast tokenizer, so the tokens of a turn are "
                "unknown: use a model with a tokenizer.json"
            )
        self._texts, self._has_parts = PlainTexts(self._tokenizer), has_image_processor(processor)
        self._words: dict[bool, set[str]] = {}

    def encode(self, rows: Sequence[tuple[Row, str]]) -> list[list[ConversationSample]]:
        """Return the samples of each row, the whole conversation first.

        Args:
            rows: rows of `conversation_row` with their locations.

        Raises:
            RowError: the template refuses the messages, drops a part of the messages, or writes no end of a turn; or a
                turn is written otherwise once messages follow, and is not split off.
        """
        texts = [self._samples(row, location) for row, location in rows]
        try:
            encoded = self._encode([sample.text for of_row in texts for sample in of_row])
        except TokenizerRefusal as refusal:
            for (_, location), of_row in zip(rows, texts, strict=True):
                try:
                    self._encode([sample.text for sample in of_row])
                except TokenizerRefusal:
                    raise RowError(location, _COLUMN, str(refusal)) from None
            raise
        return [[_sample(sample, *next(encoded)) for sample in of_row] for of_row in texts]

    def _samples(self, row: Row, location: str) -> list[_Text]:
        """Return the texts of the samples of a row."""
        tools = row[TOOLS]
        options = {**self._options, **({} if tools is None else {TOOLS: self._texts.hide(tools)})}
        messages = self._messages(row[MESSAGES], options, location)
        numbers = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
        turns = [self._turn(messages, number, options, location) for number in numbers]
        for number, message in enumerate(messages):
            # Templates may write results of tools as JSON.
            if message["role"] in _READ_ROLES and message["content"].strip() not in turns[-1].text:
                raise self._refused(location, number, "not, or in other words. Change the role of the message")
        samples: list[_Text] = []
        for number, turn in zip(reversed(numbers), reversed(turns), strict=True):
            fitting = (sample for sample in reversed(samples) if sample.text.startswith(turn.text[: turn.end]))
            sample = next(fitting, None)
            if sample is None:
                if samples and not self._split:
                    raise self._refused(
                        location,
                        number,
                        "otherwise once messages follow, for example without its reasoning: set split_conversations "
                        "(in a recipe: data.split_conversations=true), which makes it a sample of its own",
                    )
                sample = _Text(turn.text)
                samples.append(sample)
            sample.turns.append((turn.start, turn.end))
        return samples

    def _messages(self, messages: Iterable[Message], options: Mapping[str, Any], location: str) -> list[Message]:
        """Return the messages for the template: special tokens of others are plain text, reasoning has a known key."""
        words = self._words_of(options, location)
        reasoning = next((key for key in REASONING_KEYS if key in words), None)
        found = []
        for number, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                found.append(self._texts.hide(message))
                continue
            if CALLS in message and CALLS not in words:
                raise self._refused(location, number, "without its tool_calls. Use the tokenizer of a model with tools")
            written = {key: value for key, value in message.items() if key != REASONING}
            if thoughts := message.get(REASONING):
                if reasoning is None:
                    text = message["content"].lstrip("\n")
                    written["content"] = f"{THINK}\n" + thoughts.strip("\n") + f"\n{END_OF_THOUGHT}\n\n{text}"
                else:
                    written[reasoning] = thoughts
            found.append(written)
        return found

    def _words_of(self, options: Mapping[str, Any], location: str) -> set[str]:
        """Return the keys that the chat template reads, and check that the template shows tools."""
        tools = options.get(TOOLS)
        if bool(tools) not in self._words:
            if tools:
                try:
                    check_shows_tools(self._tokenizer, options)
                except ConfigError as error:
                    raise RowError(location, _COLUMN, f"the row has tools, and {error}") from None
            template = self._tokenizer.get_chat_template(tools=tools)
            self._words[bool(tools)] = set(_NAMES.findall(template))
        return self._words[bool(tools)]

    def _turn(self, messages: Sequence[Message], number: int, options: Mapping[str, Any], location: str) -> _Turn:
        """Return the text up to a turn of the policy."""
        before = self._render(messages[:number], options, location, begins_answer=True)
        text = self._render(messages[: number + 1], options, location, begins_answer=False)
        if not text.startswith(before):
            raise self._refused(
                location, number, f"otherwise than it begins the policy's turn ({before[-40:]!r}). Change the messages"
            )
        turn = text[len(before) :].rstrip()
        for written in _words_of_turn(messages[number]):
            if written.strip() not in turn:
                raise self._refused(location, number, f"without the text {written.strip()[:40]!r}. Change the messages")
        if not _has_all_calls(messages[number], turn):
            raise self._refused(location, number, f"without all of its {len(messages[number][CALLS])} calls")
        if not self._texts.ends_with_token(turn):
            raise self._refused(
                location, number, "without a special token at its end, so the policy would not learn to end a turn"
            )
        return _Turn(text, len(before), len(before) + len(turn))

    def _render(
        self, messages: Sequence[Message], options: Mapping[str, Any], location: str, *, begins_answer: bool
    ) -> str:
        written = in_parts(messages, images=False) if self._has_parts else messages
        try:
            return render(self._processor, written, options, begins_answer=begins_answer)
        except TemplateRefusal as error:
            raise RowError(location, _COLUMN, refused_messages(self._tokenizer, messages, error)) from None

    def _refused(self, location: str, number: int, reason: str) -> RowError:
        name = self._tokenizer.name_or_path
        return RowError(
            location,
            _COLUMN,
            f"the chat template of {name!r} writes message {number} {reason}, or set another "
            "`chat_template` (in a recipe: data.chat_template)",
        )

    def _encode(self, texts: Sequence[str]) -> Iterator[tuple[list[int], list[int]]]:
        """Return the token ids of texts with marks, and the place at which each token begins."""
        parts = [(number, *part) for number, text in enumerate(texts) for part in self._texts.parts(text)]
        of_kind = {
            is_mark: iter(
                encode_with_places(
                    [text for *_, text, mark in parts if mark == is_mark],
                    self._tokenizer,
                    split_special_tokens=is_mark,
                )
            )
            for is_mark in {part[-1] for part in parts}
        }
        joined: list[tuple[list[int], list[int]]] = [([], []) for _ in texts]
        for number, start, _, is_mark in parts:
            ids, places = next(of_kind[is_mark])
            joined[number][0].extend(ids)
            # A special token in plain text is shorter or longer than its mark, so all its tokens are at its start.
            joined[number][1].extend(start if is_mark else start + place for place in places)
        return iter(joined)


def _words_of_turn(message: Message) -> Iterator[str]:
    """Yield texts of a message of the policy, which every template writes unchanged."""
    yield from re.split(f"{THINK}|{END_OF_THOUGHT}", message["content"])
    yield from (message.get(key, "") for key in REASONING_KEYS)
    yield from (call["function"]["name"] for call in message.get(CALLS, ()))


def _has_all_calls(message: Message, turn: str) -> bool:
    """Return True if a text has the name of each call: a template may write the first call alone."""
    names = Counter(call["function"]["name"] for call in message.get(CALLS, ()))
    return all(turn.count(name) >= number for name, number in names.items())


def _sample(text: _Text, ids: list[int], places: list[int]) -> ConversationSample:
    mask = [0] * len(ids)
    for turn in text.turns:
        first, last = (bisect_left(places, place) for place in turn)
        mask[first:last] = [1] * (last - first)
    return ConversationSample(ids, mask)


def lengths_of(samples: Sequence[ConversationSample]) -> tuple[int, int]:
    """Return the tokens of a conversation before the first turn of the policy, and from this turn on."""
    before = min(sample.mask.index(1) for sample in samples)
    return before, max(len(sample.ids) for sample in samples) - before


def last_learned(sample: ConversationSample) -> int:
    """Return the last token to learn, the end of a turn."""
    return sample.ids[len(sample.mask) - 1 - sample.mask[::-1].index(1)]


class TriedConversations:
    """Conversations that the chat template takes.

    A template treats conversations of one shape alike, so one row of each shape is tried.

    Args:
        rows: rows with conversations.
        tokenizer: tokenizer of the policy, or processor of a vision-language model.
        template_options: further variables of its chat template.
        split: see `ConversationTokenizer`.

    Raises:
        RowError: the chat template refuses a conversation.
    """

    def __init__(
        self, rows: PromptRows, tokenizer: Processor, template_options: Mapping[str, Any], *, split: bool
    ) -> None:
        self._rows = rows
        self._tokenizer = ConversationTokenizer(tokenizer, template_options, split=split)
        # A number for each shape: rows of agents have nearly as many shapes as rows.
        tried = set[int]()
        for number, row in enumerate(rows):
            shape = hash(_shape(row))
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


# Samples of a row as one list of numbers --------------------------------------------------------------------------


def packed_samples(samples: Iterable[ConversationSample]) -> list[int]:
    """Return samples as one list: of each sample the number of runs, the lengths of the runs of its mask, and its ids.

    The first run has the mask 0.
    """
    packed: list[int] = []
    for sample in samples:
        runs = [len(list(run)) for _, run in groupby(sample.mask)]
        packed += [len(runs), *runs, *sample.ids]
    return packed


def unpacked_samples(packed: Sequence[int]) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """Yield of each packed sample: tokens before the first learnt token, tokens behind, and the mask of these."""
    place = 0
    while place < len(packed):
        count = packed[place]
        runs = packed[place + 1 : place + 1 + count]
        start = place + 1 + count
        place = start + sum(runs)
        mask = [number % 2 for number, run in enumerate(runs) for _ in range(run)]
        yield [*packed[start : start + runs[0]]], [*packed[start + runs[0] : place]], mask[runs[0] :]
