"""What one look at the installation or the machine finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One line of the diagnosis.

    Attributes:
        name: what was looked at.
        state: `good`; `absent`, which something needs but not everything; `broken`, which every run needs.
        said: what was found.
        cure: the way out, where something is to be done.
    """

    name: str
    state: Literal["good", "absent", "broken"]
    said: str
    cure: str = ""
