"""Token ids of prompts and responses: tokenizer, length limit, digest.

The data modules tokenise every text once. Tokens sampled by a policy are never tokenised again, because the text of
sampled tokens need not give the same tokens.
"""

from __future__ import annotations

import hashlib
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np

from rl_plugins.control_characters import whole_characters
from rl_plugins.data.chat_template import Messages, TemplateRefusal, render
from rl_plugins.data.on_disk import MappedLists
from rl_plugins.data.parquet import PromptRows
from rl_plugins.errors import ConfigError
from rl_plugins.hub.files import model_folder
from rl_plugins.model_json import AGAIN
from rl_plugins.text_file import read_json_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

FilterOrError = Literal["filter", "error"]
"""Rows that cannot be used are left out, or refused."""
_CHUNK = 1024
# Patterns of the files with a tokenizer or its vocabulary.
_VOCABULARIES = ("tokenizer*", "vocab*", "*.model")
# Messages of the round trip, and characters of a message in an error.
_PROBES, _SHOWN = 32, 40
# Characters that Unicode keeps out of texts, around the number of a special token.
_MARK = "\ufdd0{}\ufdd1"
# Text of a response without a meaning for a chat template.
_RESPONSE = "text-of-the-policy"
_MARKS = re.compile("\ufdd0(\\d{1,9})\ufdd1", re.ASCII)
_Item = TypeVar("_Item")


class TokenizerRefusal(ConfigError):
    """Text that the tokenizer cannot encode.

    Attributes:
        number: position of the text among all texts.
    """

    def __init__(self, reason: str, number: int = 0) -> None:
        super().__init__(reason)
        self.number = number

    def __reduce__(self) -> tuple[type[TokenizerRefusal], tuple[str, int]]:
        """Pickle the arguments, because Ray carries errors from process to process."""
        return TokenizerRefusal, (str(self), self.number)


# Tokenizers -------------------------------------------------------------------------------------------------------


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder or a hub name. `check_round_trip` tries the tokenizer on data.

    Args:
        path: folder or hub name.
        trust_remote_code: run Python code that the folder's configuration names, with all rights of the user.

    Raises:
        ConfigError: there is no tokenizer in the folder, the tokenizer cannot be loaded, or the tokenizer has no
            end-of-sequence token.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder = model_folder(path, weights=False, trust_remote_code=trust_remote_code)
    if not Path(folder).is_dir():
        raise ConfigError(f"{path}: there is no such folder to load a tokenizer from: name the folder of a model")
    missing = f"{path}: there is no tokenizer in the folder: save the model's tokenizer there"
    try:
        # The tokenizers of mistral_common, a package of vLLM, have no chat template. The tokenizer.json beside its file
        # may have a wrong pattern.
        fixed: dict[str, Any] = {"fix_mistral_regex": True} if (Path(folder) / "tekken.json").is_file() else {}
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code, mistral_format=False, **fixed
        )
    except (OSError, ValueError) as error:
        if not any(found for pattern in _VOCABULARIES for found in Path(folder).glob(pattern)):
            raise ConfigError(missing) from None
        raise ConfigError(f"{path}: the tokenizer cannot be loaded: {' '.join(str(error).split())[:200]}") from None
    # Without a vocabulary, transformers makes a tokenizer of special tokens alone, such as <unk>, by the model type.
    if all(token[:1] + token[-1:] in ("<>", "[]") for token in tokenizer.get_vocab()):
        raise ConfigError(missing)
    if isinstance(tokenizer, PreTrainedTokenizerFast) and _has_another_decoder(Path(folder), tokenizer):
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, **fixed)
    return completed(tokenizer, path)


def _has_another_decoder(folder: Path, tokenizer: PreTrainedTokenizerFast) -> bool:
    """Return True if transformers has built a tokenizer of another kind than the tokenizer.json of the folder.

    For some repositories, such as DeepSeek-R1-Distill-Llama, transformers knows the right class by the name on the hub
    alone. The class of their tokenizer_config.json loses spaces.
    """
    if not (folder / "tokenizer.json").is_file():
        return False
    saved = read_json_object(folder / "tokenizer.json", AGAIN).get("decoder")
    built = tokenizer.backend_tokenizer.decoder
    return (saved and saved.get("type")) != (built and type(built).__name__)


def completed(tokenizer: PreTrainedTokenizerBase, path: str | None = None) -> PreTrainedTokenizerBase:
    """Give a tokenizer its name, and a padding token if there is none.

    Args:
        tokenizer: the tokenizer.
        path: folder or hub name of a loaded tokenizer; None for a tokenizer made by the user.

    Raises:
        ConfigError: the tokenizer has no end-of-sequence token.
    """
    if path is not None:
        tokenizer.name_or_path = path
    if tokenizer.eos_token_id is None:
        name = f"({type(tokenizer).__name__})" if path is None else f"in {path}"
        raise ConfigError(
            f"the tokenizer {name} has no eos_token: the policy could never end a response: set tokenizer.eos_token"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def check_round_trip(tokenizer: PreTrainedTokenizerBase, conversations: Iterable[Messages]) -> None:
    """Check the text of a round trip on the first messages of the data.

    One unchanged message is enough: tokenizers may change some spaces and accents. transformers may silently build
    another tokenizer than that of the files, by the model type of the folder, and such a tokenizer changes all.

    Raises:
        ConfigError: encoding and decoding changes each message.
    """
    texts = (str(message["content"]) for messages in conversations for message in messages)
    changed = None
    for text in islice(filter(str.strip, texts), _PROBES):
        (ids,) = encode_texts([text], tokenizer)
        back = str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
        if unicodedata.normalize("NFKC", back).strip() == unicodedata.normalize("NFKC", text).strip():
            return
        changed = changed or (text[:_SHOWN], back[:_SHOWN])
    if changed:
        raise ConfigError(
            f"the tokenizer {tokenizer.name_or_path!r} changes the texts of the data: {changed[0]!r} becomes "
            f"{changed[1]!r}. Its vocabulary lacks characters of the data, or its tokenizer_config.json names a "
            "tokenizer_class that does not fit its files"
        )


def check_same_tokens(
    tokenizer: PreTrainedTokenizerBase, path: str, role: str, *, trust_remote_code: bool = False
) -> None:
    """Check the vocabulary of a model beside the policy.

    Args:
        tokenizer: tokenizer of the policy.
        path: folder or hub name of the model.
        role: role of the model for the message, such as "teacher".
        trust_remote_code: see `load_tokenizer`.

    Raises:
        ConfigError: the model has another vocabulary than the policy.
    """
    if load_tokenizer(path, trust_remote_code=trust_remote_code).get_vocab() != tokenizer.get_vocab():
        raise ConfigError(
            f"the {role} {path} has another vocabulary than the policy's {tokenizer.name_or_path!r}, so it cannot read "
            "the policy's tokens: use a model of the same family, or score text in workers of its own with "
            "rl_plugins.rewards.model.ModelReward"
        )


def check_end_of_sequence(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise a ConfigError if the tokenizer has no end-of-sequence token."""
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"the tokenizer {tokenizer.name_or_path!r} has no end-of-sequence token: set one")


@contextmanager
def tokenizer_threads() -> Iterator[None]:
    """Let the library tokenizers use the processors of this machine, divided among its training workers.

    Other code of training workers runs without these threads: a process that a worker forks could wait for them.
    """
    variables = ("TOKENIZERS_PARALLELISM", "RAYON_NUM_THREADS")
    before = {name: os.environ.get(name) for name in variables}
    workers = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    os.environ.setdefault("RAYON_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})


# Prompts ----------------------------------------------------------------------------------------------------------


class PlainTexts:
    """Texts of data in which a special token of the tokenizer is a text like any other.

    A text with the end token of a chat template could otherwise end its own turn, and write turns of the policy. The
    special tokens of the chat template itself stay special tokens.

    Args:
        tokenizer: tokenizer with the special tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer: Any = tokenizer
        special = {str(token) for token in self._tokenizer.added_tokens_decoder.values() if token.special}
        self._special = sorted(special | set(map(str, self._tokenizer.all_special_tokens)), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._special)) or r"(?!)")

    def hide(self, value: Any) -> Any:
        """Replace special tokens in a text, or in all texts of messages, by marks without a meaning for a template.

        Half of a character becomes U+FFFD.
        """
        if isinstance(value, str):
            text = whole_characters(value)
            return self._pattern.sub(lambda found: _MARK.format(self._special.index(found.group())), text)
        if isinstance(value, Mapping):
            return {key: self.hide(item) for key, item in value.items()}
        return [self.hide(item) for item in value] if isinstance(value, list | tuple) else value

    def first_special(self, text: str) -> str:
        """Return the first special token in a text of the chat template; an empty text without one."""
        found = self._pattern.search(text)
        return found.group() if found else ""

    def following(self, last_token: int, text: str) -> str:
        """Return the text after a response, without the response's last token if this special token would come twice.

        The last token may be another one than the end of the sequence, such as the end of a turn.
        """
        word = str(self._tokenizer.convert_ids_to_tokens(last_token))
        return text.removeprefix(word) if word in self._special else text

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text of the chat template with marks.

        Raises:
            TokenizerRefusal: the tokenizer cannot encode the text.
        """
        ids: list[int] = []
        for _, part, is_mark in self.parts(text):
            (of_part,) = encode_texts([part], self._tokenizer, split_special_tokens=is_mark)
            ids += of_part
        return ids

    def parts(self, text: str) -> Iterator[tuple[int, str, bool]]:
        """Yield the parts of a text with marks: place of the part, the part in words, and True for a plain word."""
        end = 0
        for found in [*_MARKS.finditer(text), None]:
            start = len(text) if found is None else found.start()
            if start > end:
                yield end, text[end:start], False
            if found is not None:
                number, end = int(found[1]), found.end()
                yield start, self._special[number] if number < len(self._special) else _MARK.format(number), True

    def ends_with_token(self, text: str) -> bool:
        """Return True if a text of the chat template ends with a special token."""
        return text.endswith(tuple(self._special))


def encode_texts(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, **options: bool) -> list[list[int]]:
    """Return the token ids of each text, without special tokens around the text.

    Args:
        texts: the texts.
        tokenizer: the tokenizer.
        options: further options of the call of the tokenizer.

    Raises:
        TokenizerRefusal: the tokenizer cannot encode a text.
    """
    return [list(ids) for ids in _encoded(texts, tokenizer, **options)["input_ids"]]


def encode_with_places(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, **options: bool
) -> list[tuple[list[int], list[int]]]:
    """Return the token ids of each text, and the place in the text at which each token begins.

    White space before a token that no token has belongs to the token.

    Raises:
        TokenizerRefusal: the tokenizer cannot encode a text.
    """
    found, encoded = [], _encoded(texts, tokenizer, return_offsets_mapping=True, **options)
    for ids, offsets in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
        places, end = [], 0
        for start, stop in offsets:
            places.append(min(start, end))
            end = max(end, stop)
        found.append((list(ids), places))
    return found


def _encoded(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, **options: bool) -> Mapping[str, Any]:
    try:
        return tokenizer(list(texts), add_special_tokens=False, **options)
    # The library tokenizers raises plain exceptions.
    except Exception as error:
        if type(error) is not Exception:
            raise
        raise TokenizerRefusal(
            f"the tokenizer {tokenizer.name_or_path!r} cannot encode the text ({error}): change the text, or give the "
            "tokenizer a token for unknown characters (unk_token)"
        ) from None


def encode_prompts(
    prompts: Sequence[Messages], tokenizer: PreTrainedTokenizerBase, template_options: Mapping[str, Any]
) -> list[list[int]]:
    """Return the token ids of each prompt's messages, up to and including the start of the assistant's turn.

    Special tokens in the messages are plain text (see `PlainTexts`).

    Raises:
        TemplateRefusal: the chat template refuses the messages of a prompt.
        TokenizerRefusal: the tokenizer cannot encode the messages of a prompt.
    """
    texts = PlainTexts(tokenizer)
    conversations: list[Any] = [list(messages) for messages in prompts]
    hidden = [texts.hide(messages) for messages in conversations]
    rendered = [render(tokenizer, messages, template_options) for messages in hidden]
    clean = [place for place, messages in enumerate(conversations) if messages == hidden[place]]
    encoded: Iterator[list[int]] = iter(())
    if clean:
        # The tokenizer takes many texts at once in threads of its own.
        encoded = iter(encode_texts([rendered[place] for place in clean], tokenizer))
    ids_of = {place: next(encoded) for place in clean}
    return [ids_of[place] if place in ids_of else texts.encode(text) for place, text in enumerate(rendered)]


def tokenize_prompts(
    prompts: Iterable[Messages], tokenizer: PreTrainedTokenizerBase, template_options: Mapping[str, Any]
) -> MappedLists:
    """Return the token ids of `encode_prompts` on disk."""
    return _tokenize_in_chunks(prompts, lambda chunk: encode_prompts(chunk, tokenizer, template_options))


def tokenize_responses(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> MappedLists:
    """Return the token ids of each response with one end, which the text may have already."""
    end = ResponseEnd.of(tokenizer)

    def tokenize(chunk: list[str]) -> list[list[int]]:
        return [end.added_to(ids) for ids in encode_texts(chunk, tokenizer)]

    return _tokenize_in_chunks(texts, tokenize)


class ResponseEnd(NamedTuple):
    """End of a response as the policy writes it.

    Attributes:
        token: token that the chat template writes behind a response, if sampling from the model ends there; else the
            end of the sequence. The templates of Gemma end a turn with another token.
        known: all tokens at which sampling ends.
    """

    token: int
    known: frozenset[int]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> ResponseEnd:
        """Return the end of responses of the tokenizer's model."""
        known = ending_tokens(tokenizer)
        token = _token_behind_a_response(tokenizer)
        return cls(token if token in known else int(tokenizer.eos_token_id), known)

    def added_to(self, ids: Sequence[int]) -> list[int]:
        """Return the token ids of a response with one end."""
        return [*ids] if ids and ids[-1] in self.known else [*ids, self.token]


def ending_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the tokens at which sampling from the tokenizer's model ends: in generation_config.json, and the eos."""
    named = _ends_named_at(str(tokenizer.name_or_path)) if tokenizer.name_or_path else []
    return frozenset(end for end in (tokenizer.eos_token_id, *named) if isinstance(end, int))


@cache
def _ends_named_at(name: str) -> list[Any]:
    # A tokenizer of the user need not have a folder.
    with suppress(ConfigError):
        file = Path(model_folder(name, weights=False)) / "generation_config.json"
        named = read_json_object(file, AGAIN).get("eos_token_id") if file.is_file() else None
        return named if isinstance(named, list) else [named]
    return []


def _token_behind_a_response(tokenizer: PreTrainedTokenizerBase) -> int | None:
    question = {"role": "user", "content": "?"}
    messages = [question, {"role": "assistant", "content": _RESPONSE}]
    # The template of GLM-4 writes the end of a turn as the beginning of the next turn.
    for following in ([], [question]):
        try:
            conversation = [*messages, *following]
            text = render(tokenizer, conversation, {}, begins_answer=False) if tokenizer.chat_template else ""
        except TemplateRefusal:
            continue
        behind = text.rpartition(_RESPONSE)[2].lstrip() if _RESPONSE in text else ""
        word = PlainTexts(tokenizer).first_special(behind)
        if word and behind.startswith(word):
            found: Any = tokenizer.convert_tokens_to_ids(word)
            return found if isinstance(found, int) else None
    return None


def _tokenize_in_chunks(items: Iterable[_Item], tokenize: Callable[[list[_Item]], Iterable[list[int]]]) -> MappedLists:
    remaining = iter(items)
    chunks = iter(lambda: list(islice(remaining, _CHUNK)), [])

    def ids_of(first: int, chunk: list[_Item]) -> Iterable[list[int]]:
        try:
            return tokenize(chunk)
        except TokenizerRefusal:
            for number, item in enumerate(chunk, first):
                try:
                    tokenize([item])
                except TokenizerRefusal as refusal:
                    raise TokenizerRefusal(str(refusal), number) from None
            raise

    return MappedLists(ids for first, chunk in zip(count(0, _CHUNK), chunks) for ids in ids_of(first, chunk))


def within_limit(
    rows: PromptRows, lengths: np.ndarray, *, option: str, limit: int, overlong: FilterOrError
) -> np.ndarray:
    """Return the numbers of the rows of at most `limit` tokens.

    Args:
        rows: the rows, for messages.
        lengths: int64 [N], tokens of each row.
        option: name of the option that sets the limit, for messages.
        limit: largest number of tokens.
        overlong: "filter" leaves longer rows out; "error" raises a ConfigError.

    Raises:
        ConfigError: a row is longer and `overlong` is "error", or every row is longer.
    """
    kept = np.flatnonzero(lengths <= limit)
    if len(kept) < len(lengths) and overlong == "error":
        worst = int(np.argmax(lengths))
        raise ConfigError(
            f"{rows.location(worst)}: {lengths[worst]} tokens, more than {option}={limit} "
            f"({len(lengths) - len(kept)} such rows). Raise {option}, or set overlong_prompts=filter"
        )
    if not len(kept):
        raise ConfigError(f"every row has more tokens than {option}={limit} (the shortest {min(lengths)}): raise it")
    return kept


def digest(sequences: Iterable[Sequence[int] | np.ndarray]) -> str:
    """Return a short digest of token sequences and their order."""
    hasher = hashlib.blake2b(digest_size=8)
    for ids in sequences:
        hasher.update(len(ids).to_bytes(8, "little") + np.asarray(ids, dtype=np.int64).tobytes())
    return hasher.hexdigest()
