"""One sentence for each error of Hydra and OmegaConf: the option at fault, what is wrong with it, and the way out.

Their own messages run over several lines, name internals, and hide the option in them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONFIG_FOLDER = Path(__file__).resolve().parent.parent / "recipes" / "conf"
_WANTED = {"Integer": "a whole number", "Float": "a number", "bool": "true or false", "String": "a text"}
_NOT_SIMILAR = 1.0
# A list, or what begins neither as a list or a mapping nor with a quote.
_VALUE_WITHOUT_QUOTES = re.compile(r"([\w+~@./$-]+)=(\[.*\]|[^\[{'\"].*)", re.DOTALL)


def explain(error: BaseException, known_keys: Callable[[], list[str]] = list) -> str:
    """Say in one sentence what the user has to mend.

    Args:
        error: what composing or parsing a configuration raised.
        known_keys: gives every key there is, to name the nearest one to an unknown key.
    """
    from hydra.errors import MissingConfigException, OverrideParseException
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException, ValidationError

    if isinstance(error, OverrideParseException):
        return _unreadable(str(error.override))
    if match := re.search(r"Ambiguous value for argument '(.*)'$", str(error), re.MULTILINE):
        key, _, values = match.group(1).partition("=")
        return (
            f"option {key!r}: {values!r} has a comma: write '{key}=[...]' for a list, '{key}=\"...\"' for one value, "
            "or add --multirun for a run with each"
        )
    if isinstance(error, MissingConfigException):
        return _no_such_file(error)
    if "Config group override" in str(error):
        return "a group, such as algorithm or reward, takes the name of one of its files: --help lists them"
    # An error of OmegaConf names the option; it has a cause under debuggers only, and that names nothing.
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__ or error
    key = getattr(cause, "full_key", None) or _overridden(error)
    if isinstance(cause, MissingMandatoryValue):
        return f"option {key!r} has no value{_meaning(cause)}: add {key}=... to the command line"
    if isinstance(cause, ValidationError):
        return f"option {key!r}{_meaning(cause)}: {_mismatch(cause)}"
    if key and re.search(r"not in (struct|')|does not exist", str(cause)):
        overridden = _overridden(error) or key
        inside = key.startswith(f"{overridden}.")
        hint = _nearest(key if inside else overridden, known_keys())
        if "is not in struct" in str(cause):
            # An open mapping, such as the arguments of a reward.
            hint += f" To add it, write ++{overridden}=..."
        return f"there is no option {key if inside else overridden!r}; {hint}"
    where = f"option {key!r}" if key else "configuration"
    return f"{where}: {str(cause).splitlines()[0]}"


def keys_of(config: Any) -> list[str]:
    """The keys of every group and option, with dots."""
    from omegaconf import OmegaConf

    return _dotted(OmegaConf.to_container(config, throw_on_missing=False))


def _dotted(node: Any, prefix: str = "") -> list[str]:
    if not isinstance(node, dict):
        return []
    keys = {f"{prefix}{name}": child for name, child in node.items()}
    return [*keys, *(key for name, child in keys.items() for key in _dotted(child, f"{name}."))]


def _unreadable(override: str) -> str:
    """Of what is no option, and of a value that needs Hydra's quotes, such as a path with brackets."""
    if match := _VALUE_WITHOUT_QUOTES.fullmatch(override):
        key, value = match.groups()
        quoted = '["..."]' if value.startswith("[") else '"..."'
        return f"cannot read {override!r}: put such a value into double quotes inside the shell's: '{key}={quoted}'"
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
    return f"there is no {group or 'recipe'} {name!r}; there is: {', '.join(sorted(choices))}"


def _mismatch(error: Any) -> str:
    text, key = str(error).splitlines()[0], error.full_key
    if match := re.search(r"Value '(.*?)' .*(?:converted to|not a valid) (\w+)", text):
        return f"{match.group(1)!r} is not {_WANTED.get(match.group(2), match.group(2))}"
    if "is not a ListConfig" in text:
        return f"it must be a list, as in {key}=[...]"
    if "is not a subclass" in text:
        return f"it is a group; set its options, as in {key}.name=value"
    return text


def _meaning(error: Any) -> str:
    """What the docstring of the option's group says about it."""
    leaf = str(error.full_key).rpartition(".")[2]
    match = re.search(rf"^\s+{re.escape(leaf)}: (.*?)[.;]?$", getattr(error.object_type, "__doc__", "") or "", re.M)
    return f" ({match.group(1)})" if match else ""


def _nearest(key: str, known: list[str]) -> str:
    def similarity(other: str) -> float:
        pairs = ((key, other), (key.rpartition(".")[2], other.rpartition(".")[2]))
        return sum(difflib.SequenceMatcher(None, *pair).ratio() for pair in pairs)

    closest = max(known, key=similarity, default="")
    return f"did you mean {closest!r}?" if similarity(closest) > _NOT_SIMILAR else "--cfg job shows all there are."
