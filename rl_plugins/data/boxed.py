r"""Answers in boxes: the content of `\boxed` in a solution or a response."""

from __future__ import annotations

import re

_BOX, _BRACED = re.compile(r"\\boxed"), re.compile(r"\\boxed(?=\s*\{)")
_END_OF_FORMULA = re.compile(r"\$|\\\]|\\\)|\n")


def last_box(text: str, *, braced: bool = False) -> tuple[str, bool] | None:
    r"""Return the content of the last `\boxed{...}`, nested braces included, and True; None without a box.

    A box without braces, as in `$\boxed 2$`, ends at the end of the formula. If the braces do not match, the content
    ends with the text, and comes with False.

    Args:
        text: solution or response.
        braced: True leaves out boxes without braces.
    """
    starts = [box.end() for box in (_BRACED if braced else _BOX).finditer(text)]
    if not starts:
        return None
    content = text[starts[-1] :].lstrip()
    if not content.startswith("{"):
        return _END_OF_FORMULA.split(content, maxsplit=1)[0].strip(), True
    depth = 0
    for position, character in enumerate(content):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return content[1:position], True
    return content[1:], False
