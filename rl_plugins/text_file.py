"""Text, JSON and YAML of files that may be damaged, such as the files of a run. Each error names file and way out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_plugins.errors import ConfigError
from rl_plugins.json_text import read_foreign_json

if TYPE_CHECKING:
    from omegaconf import DictConfig

REPLACE = "replace the file with an intact copy"
"""Way out for a file that a command needs."""
REMOVE = "mend or remove the file"
"""Way out for a file that a command can do without."""
_REASON_CHARACTERS = 200


def read_text(file: Path, way_out: str) -> str:
    """Return the content of a text file.

    Args:
        file: path of the file.
        way_out: advice for the user in an error.

    Raises:
        ConfigError: the file cannot be read, or is not UTF-8.
    """
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not a readable text ({_reason(error)}): {way_out}") from None


def read_json_object(file: Path, way_out: str) -> dict[str, Any]:
    """Return the content of a JSON file with an object.

    Args:
        file: path of the file.
        way_out: advice for the user in an error.

    Raises:
        ConfigError: the file cannot be read or is damaged, or its content is no object.
    """
    try:
        content = read_foreign_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: not valid JSON ({_reason(error)}): {way_out}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: not a JSON object, but of type {type(content).__name__}: {way_out}")
    return content


def read_yaml(file: Path, way_out: str) -> DictConfig:
    """Return the content of a YAML file with a mapping, without a resolved interpolation.

    Args:
        file: path of the file.
        way_out: advice for the user in an error.

    Raises:
        ConfigError: the file cannot be read or is damaged, or its content is no mapping.
    """
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    # Errors of yaml for a value that does not fit its tag, such as `!!int x`.
    of_values = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
    try:
        content = OmegaConf.load(file)
    except (OSError, YAMLError, OmegaConfBaseException, *of_values) as error:
        raise ConfigError(f"{file}: not valid YAML ({_reason(error)}): {way_out}") from None
    if not isinstance(content, DictConfig):
        raise ConfigError(f"{file}: not a YAML mapping, but a list: {way_out}")
    return content


def _reason(error: Exception) -> str:
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return " ".join(text.split())[:_REASON_CHARACTERS]
