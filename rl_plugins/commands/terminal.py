"""Output of commands on a terminal, with text of policies and data files."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text
from typing_extensions import override

from rl_plugins.control_characters import without_controls


class Terminal(Console):
    """Console of rich that prints every text as it is: without markup, names of emoji and control characters.

    A style is an argument of `print`, or a `Text` of rich.
    """

    def __init__(self) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, soft_wrap=True)

    @override
    def render_str(self, text: str, **options: Any) -> Text:
        """Return the text for rich, also the text of a cell of a table."""
        return super().render_str(without_controls(text), **options)
