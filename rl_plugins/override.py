"""Options that are put together here, for Hydra to read what was meant: its grammar knows `(`, `#` and many others."""

from __future__ import annotations


def override(key: str, value: object) -> str:
    """`key=value`, with Hydra's quotes around what its grammar would refuse or read as something else.

    Args:
        key: of the option.
        value: a path or another text; or a list of them.
    """
    if isinstance(value, list):
        return f"{key}=[{','.join(_quoted(str(item)) for item in value)}]"
    return f"{key}={_quoted(str(value))}"


def _quoted(text: str) -> str:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import Quote, QuotedString
    from hydra.errors import HydraException

    try:
        # Within a list, where commas and brackets mean something as well.
        read = OverridesParser.create().parse_override(f"key=[{text}]").value()
    except HydraException:
        read = None
    return text if read == [text] else QuotedString(text, Quote.double).with_quotes()
