"""Parts of the adapters of Gymnasium and OpenEnv: the first messages, the seed of an episode, and own functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rl_plugins.rewards.loading import find_callable
from rl_plugins.rewards.records import Message


def first_messages(row: Mapping[str, Any], observation: str) -> list[Message]:
    """Return the prompt of a row with the first observation."""
    messages = list(row["prompt"] or ())
    # A chat template may refuse two messages of the user in a row.
    if messages and messages[-1]["role"] == "user":
        observation = f"{messages.pop()['content']}\n\n{observation}"
    return [*messages, {"role": "user", "content": observation}]


def seed_of(row: Mapping[str, Any]) -> int:
    """Return the seed of an episode: `seed` of the row's `extra_info`, or else the seed of the group."""
    # Parquet gives all rows the same keys, so a row without a seed has null.
    seed = (row["extra_info"] or {}).get("seed")
    return int(row["seed"] if seed is None else seed)


def own_function(function: Callable[[Any], Any] | str | None) -> Callable[[Any], Any] | None:
    """Return a function of the user, or the function of a dotted name."""
    return find_callable({"_target_": function}, "function")[1] if isinstance(function, str) else function
