"""Turns and sequences of conversations as tensors: numbers and states."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from rl_plugins.data.experience import Experience
from rl_plugins.rewards.trajectory import ALTERNATIVE, Ending


def sequences(samples: Experience) -> Tensor:
    """Return the number of the sequence of each token, [B, T]."""
    sequences_BT = torch.zeros_like(samples.policy_versions)
    ended: list[Ending] = samples.columns["ending"]
    for row_T, ending in zip(sequences_BT, ended, strict=True):
        for position, number in ending.sequence_changes:
            row_T[position:] = number
    return sequences_BT


def timed_turns(ending: Ending) -> list[dict[str, Any]]:
    """Return texts and times of the turns of a conversation in plain values, with Unix times and seconds."""
    rows: list[dict[str, Any]] = []
    reached = 0
    for turn in ending.times:
        # Other keys of a message may have values that JSON does not have.
        before = [{key: message[key] for key in ("role", "content")} for message in ending.said[reached : turn.place]]
        rows.append({
            "messages": before,
            "response": ending.said[turn.place]["content"],
            "start": turn.asked,
            "end": turn.answered,
            "sampling_s": turn.sampling_s,
            "environment_s": turn.environment_s,
            "queue_s": turn.queue_s,
            "work": [vars(work) for work in turn.work],
        })  # fmt: skip
        reached = turn.place + 1
    return rows


def add_turns(samples: Experience) -> None:
    """Fill `turns` and `states`. A response without an environment is one turn.

    Turns of equal states have equal messages of the environment before the turn, and first turns equal prompts. The
    number of a state is a hash, equal on all ranks and in all runs.
    """
    turns_BT = torch.zeros_like(samples.policy_versions)
    states_BT = torch.zeros_like(turns_BT)
    positions_T = torch.arange(turns_BT.shape[1], device=turns_BT.device)
    ended: list[Ending] = samples.columns.get("ending", [])
    for turns_T, states_T, ending in zip(turns_BT, states_BT, ended, strict=False):
        ends_K = torch.tensor(ending.turn_ends, dtype=torch.int64, device=turns_BT.device)
        states_K = torch.tensor(_states(ending), dtype=torch.int64, device=turns_BT.device)
        if len(ends_K):
            # Observations after the last turn are masked.
            turns_T[:] = torch.searchsorted(ends_K, positions_T).clamp(max=len(ends_K) - 1)
            states_T[:] = states_K[turns_T]
    samples.turns, samples.states = turns_BT, states_BT


def _states(ending: Ending) -> list[int]:
    """Return the number of the state before each turn."""
    states, before, reached = list[int](), list(ending.prompt or ()), 0
    for turn in ending.times:
        if ALTERNATIVE in ending.said[turn.place]:
            # The response has the same state as the first response to its prompt.
            states.append(states[-1])
        else:
            # An environment may repeat messages of the policy.
            states.append(_hash([*before, *ending.said[reached : turn.place]]))
            before = []
        reached = turn.place + 1
    return states


def _hash(messages: Sequence[Mapping[str, object]]) -> int:
    text = json.dumps([*map(dict, messages)], sort_keys=True, default=str)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)
