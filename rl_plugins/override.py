"""Overrides for Hydra from Python values. Hydra's grammar gives `(`, `#` and other characters a meaning."""

from __future__ import annotations


def override(key: str, value: object) -> str:
    """Return `key=value`, with quotes around the value if Hydra would otherwise refuse or change the value.

    Args:
        key: name of the option.
        value: path, other text, or list of texts.
    """
    if isinstance(value, list):
        return f"{key}=[{','.join(_quoted(str(item)) for item in value)}]"
    return f"{key}={_quoted(str(value))}"


def _quoted(text: str) -> str:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import Quote, QuotedString
    from hydra.errors import HydraException

    try:
        # In a list, commas and brackets have a meaning, too.
        read = OverridesParser.create().parse_override(f"key=[{text}]").value()
    except HydraException:
        read = None
    return text if read == [text] else QuotedString(text, Quote.double).with_quotes()
