"""Rollout engines of a training rank, with notes about received samples."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rl_plugins.data.experience import Experience
from rl_plugins.ranks import Ranks
from rl_plugins.rollout.engine import Generations
from rl_plugins.rollout.vllm.fleet import Fleet

NOTES = "SAMPLE_PATH_NOTES"
"""Environment variable: the folder for the notes."""
STRETCH = 8
"""Tokens by which a response is recognised."""

_exchange = Ranks.exchange


class WatchedFleet(Fleet):
    """Fleet that writes a line for samples from an engine, and for samples to another rank."""

    def begin(self, engine: int, method: str, *arguments: Any, **options: Any) -> Callable[[], Any]:
        """See `Fleet.begin`."""
        if method == "fetch":
            asked_by = [rank for rank, _ in arguments[0]]
            self._note(groups=len(asked_by), of_others=sum(rank != self.rank for rank in asked_by))
        return super().begin(engine, method, *arguments, **options)

    def result(self, engine: int, reference: Any, timeout_s: float | None = None) -> Any:
        """See `Fleet.result`."""
        result = super().result(engine, reference, timeout_s)
        for part in result if isinstance(result, tuple) else ():
            if isinstance(part, Generations):
                self._note_samples(part, self.actors[engine]._actor_id.hex())
                self._watch_exchange()
        return result

    def _note_samples(self, samples: Generations, actor: str) -> None:
        arrays = (samples.token_ids, samples.log_probs, samples.policy_versions)
        store = _object_store()
        self._note(
            actor=actor,
            samples=len(samples.lengths),
            bytes=sum(array.nbytes for array in arrays),
            bytes_in_store=sum(array.nbytes for array in arrays if any(_address(array) in part for part in store)),
            referred=len(returned_by(actor, references())),
            stretches=[response[:STRETCH] for response in samples.responses() if len(response) >= STRETCH][:2],
        )

    def _watch_exchange(self) -> None:
        fleet = self

        def exchange(ranks: Ranks, parcels: list[Any]) -> list[Any]:
            fleet._note(moved=sum(_samples_in(parcel) for to, parcel in enumerate(parcels) if to != ranks.rank))
            return _exchange(ranks, parcels)

        setattr(Ranks, "exchange", exchange)  # noqa: B010

    def _note(self, **values: Any) -> None:
        with (Path(os.environ[NOTES]) / f"{self.rank}.jsonl").open("a") as notes:
            notes.write(json.dumps(values) + "\n")


def _samples_in(parcel: Any) -> int:
    """Return the number of samples in a parcel. Samples held by a rollout engine do not count."""
    if isinstance(parcel, Experience):
        return len(parcel)
    return sum(len(one.generations.lengths) for one in parcel or () if isinstance(one.generations, Generations))


def _object_store() -> list[range]:
    """Return the address ranges of Ray's object store in this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    bounds = [line.split()[0].split("-") for line in lines if "plasma" in line]
    return [range(int(start, 16), int(stop, 16)) for start, stop in bounds]


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def references() -> set[str]:
    """Return the ids of all objects with a reference in this process."""
    from ray._private.worker import global_worker

    worker: Any = global_worker
    return {identity.decode() for identity in worker.core_worker.get_all_reference_counts()}


def returned_by(actor: str, objects: set[str]) -> set[str]:
    """Return the objects from methods of an actor, without the handle of the actor."""
    # An object's id has eight bytes of its task, the actor's id, and a number. All bits of a creation task are ones.
    return {one for one in objects if one[16:].startswith(actor) and not one.startswith("f" * 16)}
