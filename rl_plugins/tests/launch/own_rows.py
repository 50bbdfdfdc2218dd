"""A data set of Python, as a user writes one."""

from __future__ import annotations

from typing import Any


class Rows:
    """Additions of one to the numbers below `length`."""

    def __init__(self, length: int = 64) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "data_source": "addition",
            "ability": "math",
            "prompt": [{"role": "user", "content": f"{index}+1="}],
            "reward_model": {"style": "rule", "ground_truth": str(index + 1)},
            "extra_info": {"index": index},
        }
