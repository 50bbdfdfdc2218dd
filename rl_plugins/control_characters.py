"""Text for terminals, pages and files without control characters, and text of whole characters.

A terminal obeys control characters: text of a policy or of a data file could clear the screen or change its title.
JSON and Python have halves of characters (lone surrogates), which tokenizers and files in UTF-8 refuse.
"""

from __future__ import annotations

import json
import re

# Pictures (U+2400 and on), or U+FFFD. A page of XML cannot hold the last ones.
_SHOWN = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}
_SHOWN |= {0x7F: 0x2421} | dict.fromkeys([*range(0x80, 0xA0), *range(0xD800, 0xE000), 0xFFFE, 0xFFFF], 0xFFFD)
_HALVES = re.compile("[\\ud800-\\udfff]")
_UNSAFE = re.compile("[\\x7f-\\x9f\\u2028\\u2029\\ud800-\\udfff\\ufffe\\uffff]")


def without_controls(text: str) -> str:
    """Return a text with a picture, such as `␛`, in place of each control character but tabs and line ends."""
    return text.replace("\r\n", "\n").translate(_SHOWN)


def whole_characters(text: str) -> str:
    """Return a text with U+FFFD in place of each half of a character."""
    return _HALVES.sub("\ufffd", text)


def json_without_controls(value: object) -> str:
    """Return a value as JSON, with escapes in place of control characters and lone surrogates; other letters stay."""
    text = json.dumps(value, indent=1, ensure_ascii=False)
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
