"""Search for places for all processes of a run on the machines of a cluster, as Ray reserves CPUs and GPUs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

# Decimal places of Ray's resource amounts.
DECIMALS = 4
_MOST_STATES = 5_000
"""Number of states after which the exact search gives up."""
_MOST_BUNDLES = 64
"""Largest number of bundles for the exact search."""


@dataclass(frozen=True)
class ProcessBundle:
    """Processes of one role that must be on one machine.

    Attributes:
        role: name of the role.
        cpus: CPUs of all processes.
        gpus: GPUs of one process. A fraction is on one GPU.
        count: number of processes.
        apart: True if each bundle of the role needs a machine of its own.
    """

    role: str
    cpus: float
    gpus: float
    count: int = 1
    apart: bool = False


@dataclass(frozen=True, order=True)
class _FreeMachine:
    """Free resources of a machine: its CPUs, the free part of each GPU, and the roles that need it for one bundle."""

    cpus: float
    gpus: tuple[float, ...]
    roles: tuple[str, ...] = ()

    def with_bundle(self, bundle: ProcessBundle) -> Iterator[_FreeMachine]:
        """Yield the machine with a bundle, once for each choice of GPUs; the fullest GPUs come first."""
        cpus = round(self.cpus - bundle.cpus, DECIMALS)
        if cpus < 0 or (bundle.apart and bundle.role in self.roles):
            return
        roles = (*self.roles, bundle.role) if bundle.apart else self.roles
        for gpus in _choices(self.gpus, bundle.gpus, bundle.count):
            yield _FreeMachine(cpus, gpus, roles)


def role_without_place(bundles: Sequence[ProcessBundle], machines: Sequence[Mapping[str, float]]) -> str | None:
    """Return the name of a role that finds no place beside the other roles; None if all bundles fit together.

    First-fit decreasing finds most layouts. If it fails, a search tries all layouts. Too large a search counts as a
    layout, because nothing is known.

    Args:
        bundles: bundles of all roles.
        machines: all resources of each machine.
    """
    cpus, gpus = (max((machine.get(kind, 0.0) for machine in machines), default=0.0) for kind in ("CPU", "GPU"))

    def size(bundle: ProcessBundle) -> float:
        return max(bundle.cpus / (cpus or 1.0), bundle.gpus * bundle.count / (gpus or 1.0))

    ordered = sorted(bundles, key=size, reverse=True)
    start = [_FreeMachine(machine.get("CPU", 0.0), _whole_gpus(machine.get("GPU", 0.0))) for machine in machines]
    left_over = _first_left_over(ordered, start)
    if left_over is None or len(ordered) > _MOST_BUNDLES or _search(ordered, start):
        return None
    return left_over.role


def _first_left_over(bundles: Sequence[ProcessBundle], start: Sequence[_FreeMachine]) -> ProcessBundle | None:
    """Give each bundle the first machine with room; return the first bundle without a machine."""
    machines = list(start)
    for bundle in bundles:
        for place, machine in enumerate(machines):
            if (filled := next(machine.with_bundle(bundle), None)) is not None:
                machines[place] = filled
                break
        else:
            return bundle
    return None


def _search(bundles: Sequence[ProcessBundle], start: Sequence[_FreeMachine]) -> bool:
    """Return True if some layout has all bundles, or if there are too many layouts to try."""
    failed: set[tuple[int, tuple[_FreeMachine, ...]]] = set()

    def fits(number: int, machines: tuple[_FreeMachine, ...]) -> bool:
        if number == len(bundles) or len(failed) >= _MOST_STATES:
            return True
        if (number, machines) in failed:
            return False
        for machine in dict.fromkeys(machines):
            others = list(machines)
            others.remove(machine)
            for filled in machine.with_bundle(bundles[number]):
                if fits(number + 1, tuple(sorted([*others, filled]))):
                    return True
        failed.add((number, machines))
        return False

    return fits(0, tuple(sorted(start)))


def _whole_gpus(amount: float) -> tuple[float, ...]:
    whole = int(amount)
    part = round(amount - whole, DECIMALS)
    return (*([part] if part else []), *[1.0] * whole)


def _choices(free: tuple[float, ...], amount: float, count: int) -> Iterator[tuple[float, ...]]:
    """Yield the free parts of the GPUs of a machine with the processes on them, once for each choice.

    Args:
        free: free part of each GPU, in ascending order.
        amount: GPUs of one process.
        count: number of processes.
    """
    if not amount or not count:
        yield free
    elif amount >= 1:
        taken = math.ceil(amount) * count
        if free.count(1.0) >= taken:
            yield tuple(sorted([*free[: len(free) - taken], *[0.0] * taken]))
    else:
        for part in dict.fromkeys(free):
            if part >= amount:
                rest = list(free)
                rest.remove(part)
                left = tuple(sorted([*rest, round(part - amount, DECIMALS)]))
                yield from _choices(left, amount, count - 1)
