"""Chat template of a tokenizer: the text of messages, and checks before a run.

A chat template is a program from the folder of a model. It may raise any exception for messages that it does not
expect: each becomes a `TemplateRefusal`.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_plugins.data.conversations import without_nulls
from rl_plugins.data.images import COLUMN, has_images
from rl_plugins.data.parquet import PromptRows
from rl_plugins.errors import ConfigError, RowError
from rl_plugins.model_json import AGAIN
from rl_plugins.text_file import read_json_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

Messages = Sequence[Mapping[str, Any]]
_PLAIN = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
_NAMES = re.compile(r"[A-Za-z_]\w*")
_SYSTEM_ROLES = ("system", "developer")
_PROBE = "text of a user"
_PARTS_ALONE: dict[str, bool] = {}
"""For each chat template: True if the template reads lists of parts alone."""
_TEMPLATE_VARIABLES = frozenset({"tools", "documents"})
"""Arguments of `apply_chat_template` for variables of the template."""


class TemplateRefusal(ConfigError):
    """Exception of a chat template for messages, with the text of the exception."""


def render(
    template: PreTrainedTokenizerBase | ProcessorMixin,
    messages: Messages,
    options: Mapping[str, Any],
    *,
    begins_answer: bool = True,
) -> str:
    """Return messages as the chat template writes them.

    Keys without a value leave the messages: Parquet gives all messages the same keys, and a template may ask whether a
    message has `tool_calls`. A template that reads lists of parts alone, as of many vision-language models, gets texts
    as parts. A template without the role `developer` gets `system`: before the first answer one message with all texts,
    as in vLLM's server.

    Args:
        template: tokenizer or processor with the template.
        messages: the messages.
        options: further variables of the template, such as `tools`.
        begins_answer: add the start of the policy's turn.

    Raises:
        TemplateRefusal: the template refuses the messages.
    """
    conversation: list[Any] = without_nulls([*messages])
    if any(message["role"] == "developer" for message in conversation) and not _names_developer(template):
        conversation = _with_system_first(conversation)
    if _reads_parts_alone(template):
        conversation = [_with_parts(message) for message in conversation]
    arguments: dict[str, Any] = {"add_generation_prompt": begins_answer, "tokenize": False, **options}
    try:
        return str(template.apply_chat_template(conversation, **arguments))
    except (ImportError, MemoryError):
        raise
    # A template raises what its expressions raise, such as a TypeError for a text in place of a list.
    except Exception as error:
        raise TemplateRefusal(str(error) or type(error).__name__) from error


def _names_developer(template: PreTrainedTokenizerBase | ProcessorMixin) -> bool:
    text = str(template.chat_template)
    return "'developer'" in text or '"developer"' in text


def _with_system_first(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return messages without the role `developer`: before the first answer, one system message has all texts."""
    first = next((place for place, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
    begin, rest = messages[:first], messages[first:]
    texts = [message["content"] for message in begin if message["role"] in _SYSTEM_ROLES and message["content"]]
    system = [{"role": "system", "content": "\n\n".join(map(_text, texts))}] if texts else []
    others = [message for message in begin if message["role"] not in _SYSTEM_ROLES]
    later = [{**message, "role": "system"} if message["role"] == "developer" else message for message in rest]
    return [*system, *others, *later]


def _text(content: str | Sequence[Mapping[str, str]]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content if "text" in part)


def _with_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _reads_parts_alone(template: PreTrainedTokenizerBase | ProcessorMixin) -> bool:
    """Return True if the template leaves out a text that is no list of parts. Jinja loops over its characters."""
    key = str(template.chat_template)
    if key not in _PARTS_ALONE:
        message = {"role": "user", "content": _PROBE}
        _PARTS_ALONE[key] = not _writes(template, message) and _writes(template, _with_parts(message))
    return _PARTS_ALONE[key]


def _writes(template: PreTrainedTokenizerBase | ProcessorMixin, message: Mapping[str, Any]) -> bool:
    conversation: list[Any] = [message]
    try:
        text = str(template.apply_chat_template(conversation, tokenize=False))
    except (ImportError, MemoryError):
        raise
    # A template raises what its expressions raise.
    except Exception:
        return False
    # A template for texts writes a list as Python does.
    return _PROBE in text and "'text'" not in text


def with_plain_template(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return a copy of a tokenizer whose chat template writes the texts of messages, and nothing around the texts.

    The copy is for a policy that was trained on plain texts. The copy begins a prompt with the token that the tokenizer
    puts before each text, if there is such a token.

    Raises:
        ConfigError: the object is no tokenizer of transformers.
    """
    check_of_transformers(tokenizer)
    begins = tokenizer.bos_token_id is not None and tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]
    plain = copy.deepcopy(tokenizer)
    plain.chat_template = ("{{ bos_token }}" if begins else "") + _PLAIN
    return plain


def check_of_transformers(tokenizer: object) -> None:
    """Raise a ConfigError if an object is no tokenizer (or processor) of transformers."""
    if not hasattr(tokenizer, "apply_chat_template"):
        raise ConfigError(
            f"the tokenizer is a {type(tokenizer).__name__}, and no tokenizer of transformers: wrap a Tokenizer of the "
            "library tokenizers in transformers.PreTrainedTokenizerFast(tokenizer_object=..., eos_token=...), or "
            "derive your own class from transformers.PreTrainedTokenizer"
        )


def check_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise a ConfigError if the tokenizer has no chat template."""
    if not tokenizer.chat_template:
        name = repr(tokenizer.name_or_path) if tokenizer.name_or_path else f"({type(tokenizer).__name__})"
        raise ConfigError(
            f"the tokenizer {name} has no chat template, which messages need: use the tokenizer of an "
            "instruction-tuned model, set its `chat_template` (in a recipe: data.chat_template), or wrap the "
            "tokenizer of a policy of plain texts with rl.with_plain_template(tokenizer)"
        )


def template_of_processor(folder: Path) -> str | None:
    """Return the chat template in a file of the processor, which tokenizers do not read; None without such a file.

    Raises:
        ConfigError: a file is damaged.
    """
    files = [folder / name for name in ("chat_template.json", "processor_config.json")]
    found = (read_json_object(file, AGAIN).get("chat_template") for file in files if file.is_file())
    return next((template for template in found if isinstance(template, str)), None)


def check_template_options(tokenizer: PreTrainedTokenizerBase, template_options: Mapping[str, Any]) -> None:
    """Check the names of further variables of the chat template.

    Raises:
        ConfigError: the package itself sets an argument, the template has no variable of a name, or the options have
            another template.
    """
    if not template_options:
        return
    if "chat_template" in template_options:
        raise ConfigError(
            "chat_template_kwargs.chat_template: an exported policy would have another template: set `chat_template` "
            "of the tokenizer (in a recipe: data.chat_template)"
        )
    arguments = inspect.signature(tokenizer.apply_chat_template).parameters.keys() - {"kwargs"}
    words = set(_NAMES.findall(tokenizer.get_chat_template(tools=template_options.get("tools")))) | _TEMPLATE_VARIABLES
    for name in template_options:
        if name in arguments - _TEMPLATE_VARIABLES:
            raise ConfigError(
                f"chat_template_kwargs.{name}: the package sets this argument of apply_chat_template: leave it out"
            )
        if name not in words:
            close = get_close_matches(name, words, n=1)
            raise ConfigError(
                f"chat_template_kwargs.{name}: the chat template of {tokenizer.name_or_path!r} reads no such variable: "
                + (f"did you mean {close[0]!r}?" if close else "leave it out, or correct the name")
            )


class TemplateCheck:
    """Trial of a chat template on the roles of prompts; a sequence of roles is tried until the template accepts it.

    Args:
        tokenizer: tokenizer with the template.
        template_options: further variables of the template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_options: Mapping[str, Any]) -> None:
        self._tokenizer, self._options = tokenizer, template_options
        self._accepted = set[tuple[str, ...]]()

    def refusal(self, messages: Messages) -> str | None:
        """Return the reason why the template refuses the messages, or None."""
        roles = tuple(message["role"] for message in messages)
        if roles in self._accepted:
            return None
        try:
            render(self._tokenizer, messages, self._options)
        except TemplateRefusal as error:
            return refused_messages(self._tokenizer, messages, error)
        self._accepted.add(roles)
        return None


def accepted_messages(
    rows: PromptRows, tokenizer: PreTrainedTokenizerBase, template_options: Mapping[str, Any]
) -> Iterator[Messages]:
    """Yield the messages of each row, for a policy that reads text alone.

    Raises:
        RowError: the chat template refuses a row's sequence of roles, or a row has images.
    """
    check = TemplateCheck(tokenizer, template_options)
    for number, row in enumerate(rows):
        if has_images(row):
            raise RowError(
                rows.location(number),
                COLUMN,
                "the row has images, which a vision-language model reads: name such a model, or leave the column out",
            )
        if reason := check.refusal(row["prompt"]):
            raise RowError(rows.location(number), "column 'prompt'", reason)
        yield row["prompt"]


def check_texts(rows: PromptRows, tokenizer: PreTrainedTokenizerBase, template_options: Mapping[str, Any]) -> None:
    """Render the messages of each row.

    Raises:
        RowError: the chat template refuses the messages of a row.
    """
    for number, row in enumerate(rows):
        try:
            render(tokenizer, row["prompt"], template_options)
        except TemplateRefusal as error:
            reason = refused_messages(tokenizer, row["prompt"], error)
            raise RowError(rows.location(number), "column 'prompt'", reason) from None


def refused_messages(tokenizer: PreTrainedTokenizerBase, messages: Messages, error: TemplateRefusal) -> str:
    """Return the reason and the way out, for the message of an error."""
    roles = ", ".join(str(message["role"]) for message in messages)
    return (
        f"the chat template of {tokenizer.name_or_path!r} refuses messages of the roles {roles}: {error}. "
        "Change the messages, or the template"
    )
