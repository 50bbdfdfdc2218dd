"""The answer in a response, for the vote of maj@k: two responses vote alike if they give the same answer."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def final_answer(response: str) -> str:
    r"""What stands in the last `\boxed{}`, else after the last `####`, else the last number, else the whole text."""
    boxed = _last_boxed(response)
    if boxed is not None:
        return "".join(boxed.split())
    _, marker, tail = response.rpartition("####")
    numbers = _NUMBER.findall(tail)
    if numbers:
        number: str = numbers[0] if marker else numbers[-1]
        return number.replace(",", "")
    return tail.strip()


def _last_boxed(text: str) -> str | None:
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    depth, first = 0, start + len(r"\boxed")
    for position in range(first, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[first + 1 : position]
    # The response ended inside it.
    return text[first + 1 :]
