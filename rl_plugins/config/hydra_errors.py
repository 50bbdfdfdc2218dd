"""One sentence for each error of Hydra and OmegaConf: the option, the mistake, and the correction.

The original messages have several lines, name internals, and hide the option.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

_FOREIGN_NAMES = Path(__file__).resolve().parent / "foreign_names.json"
"""Options of other projects, written by docs/foreign_names.py."""
CONFIG_FOLDER = Path(__file__).resolve().parent.parent / "recipes" / "conf"
_WANTED = {"Integer": "a whole number", "Float": "a number", "bool": "true or false", "String": "a text"}
_NOT_SIMILAR = 1.0
# A key with a list, or with a value without a bracket or a quote at its beginning.
_VALUE_WITHOUT_QUOTES = re.compile(r"([\w+~@./$-]+)=(\[.*\]|[^\[{'\"].*)", re.DOTALL)


def explain(error: BaseException, known_keys: Callable[[], list[str]] = list) -> str:
    """Return one sentence for the user: the option, the mistake, and the correction.

    Args:
        error: error of composing or parsing a configuration.
        known_keys: function that returns all keys, to suggest a similar key for an unknown key.
    """
    from hydra.errors import MissingConfigException, OverrideParseException
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException, ValidationError

    if isinstance(error, OverrideParseException):
        return _unreadable(str(error.override))
    if match := re.search(r"Ambiguous value for argument '(.*)'$", str(error), re.MULTILINE):
        key, _, values = match.group(1).partition("=")
        return (
            f"option {key!r}: {values!r} has a comma: write '{key}=[...]' for a list, '{key}=\"...\"' for one value, "
            "or add --multirun for a run with each value"
        )
    if isinstance(error, MissingConfigException):
        return _no_such_file(error)
    if "Config group override" in str(error):
        return "a group, such as algorithm or reward, takes the name of one of its files: --help lists the names"
    # An error of OmegaConf has the name of the option. Its cause, which exists under debuggers only, does not.
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__ or error
    key = getattr(cause, "full_key", None) or _overridden(error)
    if isinstance(cause, MissingMandatoryValue):
        # A list without a value has one missing item.
        option = str(key).removesuffix("[0]")
        return f"option {option!r} has no value{_meaning(cause)}: add {option}=... to the command line"
    if isinstance(cause, ValidationError):
        return f"option {key!r}{_meaning(cause)}: {_mismatch(cause)}"
    if key and re.search(r"not in (struct|')|does not exist", str(cause)):
        overridden = _overridden(error) or key
        if hint := foreign_name(overridden):
            return f"there is no option {overridden!r}; {hint}"
        inside = key.startswith(f"{overridden}.")
        hint = _nearest(key if inside else overridden, known_keys())
        if "is not in struct" in str(cause):
            # Some options are open mappings, such as the arguments of a reward.
            hint += f" To add it, write ++{overridden}=..."
        return f"there is no option {key if inside else overridden!r}; {hint}"
    where = f"option {key!r}" if key else "configuration"
    return f"{where}: {str(cause).splitlines()[0]}"


def foreign_name(name: str) -> str | None:
    """Return the sentence for an option of verl, TRL or OpenRLHF; None for another name.

    Args:
        name: name of the option, of OpenRLHF with its two dashes, and of TRL with or without them.
    """
    names = json.loads(_FOREIGN_NAMES.read_text(encoding="utf-8"))
    name = name if name in names else name.removeprefix("--")
    # An option of a group in the table, such as verl's `algorithm.filter_groups.enable`.
    while name not in names and "." in name.rpartition(".")[0]:
        name = name.rpartition(".")[0]
    if name not in names:
        return None
    project, here = names[name]
    return f"{project} has it, and here it is {here}: docs/coming_from.md has the table"


def keys_of(config: object) -> list[str]:
    """Return the dotted keys of all groups and options."""
    from omegaconf import OmegaConf

    return _dotted(OmegaConf.to_container(config, throw_on_missing=False))


def _dotted(node: object, prefix: str = "") -> list[str]:
    if not isinstance(node, dict):
        return []
    keys = {f"{prefix}{name}": child for name, child in node.items()}
    return [*keys, *(key for name, child in keys.items() for key in _dotted(child, f"{name}."))]


def _unreadable(override: str) -> str:
    """Return the sentence for a malformed option, or for a value without the necessary quotes."""
    if match := _VALUE_WITHOUT_QUOTES.fullmatch(override):
        key, value = match.groups()
        quoted = '["..."]' if value.startswith("[") else '"..."'
        return f"cannot read {override!r}: put this value into double quotes inside the shell's: '{key}={quoted}'"
    return (
        f"cannot read {override!r}: an option is key=value; quote lists and spaces for the shell, "
        "as in 'data.train_files=[a.parquet,b.parquet]'"
    )


def _overridden(error: BaseException) -> str | None:
    match = re.search(r"Could not \w+ (?:from config\. )?'([^']+)'|merging override \+*([^=\s]+)=", str(error))
    return match and (match.group(1) or match.group(2))


def _no_such_file(error: Any) -> str:
    group, _, name = str(error.missing_cfg_file).rpartition("/")
    choices = error.options or (path.stem for path in CONFIG_FOLDER.glob("*.yaml"))
    return f"there is no {group or 'recipe'} {name!r}: choose one of {', '.join(sorted(choices))}"


def _mismatch(error: Any) -> str:
    text, key = str(error).splitlines()[0], error.full_key
    if match := re.search(r"Value '(.*?)' .*(?:converted to|not a valid) (\w+)", text):
        return f"{match.group(1)!r} is not {_WANTED.get(match.group(2), match.group(2))}"
    if "is not a ListConfig" in text:
        return f"the value must be a list, as in {key}=[...]"
    if "is not a subclass" in text:
        return f"this is a group of options: set one of its options, as in {key}.name=value"
    return text


def _meaning(error: Any) -> str:
    """Return the description of an option in the docstring of its group, in brackets."""
    leaf = str(error.full_key).rpartition(".")[2]
    match = re.search(rf"^\s+{re.escape(leaf)}: (.*?)[.;]?$", getattr(error.object_type, "__doc__", "") or "", re.M)
    return f" ({match.group(1)})" if match else ""


def _nearest(key: str, known: list[str]) -> str:
    def similarity(other: str) -> float:
        pairs = ((key, other), (key.rpartition(".")[2], other.rpartition(".")[2]))
        return sum(difflib.SequenceMatcher(None, *pair).ratio() for pair in pairs)

    closest = max(known, key=similarity, default="")
    return f"did you mean {closest!r}?" if similarity(closest) > _NOT_SIMILAR else "--cfg job shows all options."
