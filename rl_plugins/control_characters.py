"""Text for terminals and pages without control characters.

A terminal obeys control characters: text of a policy or of a data file could clear the screen or change its title.
"""

from __future__ import annotations

# Pictures (U+2400 and on), or U+FFFD. A page of XML cannot hold the last ones.
_SHOWN = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}
_SHOWN |= {0x7F: 0x2421} | dict.fromkeys([*range(0x80, 0xA0), *range(0xD800, 0xE000), 0xFFFE, 0xFFFF], 0xFFFD)


def without_controls(text: str) -> str:
    """Return a text with a picture, such as `␛`, in place of each control character but tabs and line ends."""
    return text.replace("\r\n", "\n").translate(_SHOWN)
