"""Places for all roles of a run: the search against a search by brute force."""

from __future__ import annotations

import itertools
import random

from rl_plugins.planning.layout import ProcessBundle, role_without_place
from rl_plugins.tests.loops import for_each


def roles(sizes: list[float], gpus: float = 0.0) -> list[ProcessBundle]:
    return [ProcessBundle(f"role of {size:g}", size, gpus) for size in sizes]


def test_role_without_place_finds_layouts_that_first_fit_decreasing_misses() -> None:
    # First-fit decreasing leaves 1 CPU on each machine, and one bundle of 2.
    assert role_without_place(roles([4, 3, 3, 2, 2, 2]), [{"CPU": 8.0}] * 2) is None
    assert role_without_place(roles([4, 3, 3, 3, 2, 2]), [{"CPU": 8.0}] * 2) == "role of 2"


@for_each(
    ("parts", "machines", "fit"),
    [
        ([0.6, 0.6, 0.4, 0.4], [{"CPU": 4.0, "GPU": 2.0}], True),
        ([0.6, 0.6, 0.6], [{"CPU": 4.0, "GPU": 2.0}], False),
        ([1, 0.5, 0.5], [{"CPU": 4.0, "GPU": 2.0}], True),
        ([2, 0.5], [{"CPU": 4.0, "GPU": 1.0}, {"CPU": 4.0, "GPU": 1.0}], False),
        ([1, 1], [{"CPU": 1.0, "GPU": 4.0}], False),
        ([0.3, 0.3, 0.3, 0.1], [{"CPU": float("inf"), "GPU": 1.0}], True),
    ],
)
def test_role_without_place_keeps_parts_of_a_gpu_on_one_gpu(
    parts: list[float], machines: list[dict[str, float]], fit: bool
) -> None:
    bundles = [ProcessBundle("role", 1.0, part) for part in parts]
    assert (role_without_place(bundles, machines) is None) == fit


def test_role_without_place_gives_bundles_apart_a_machine_each() -> None:
    apart = [ProcessBundle("role", 1.0, 0.0, apart=True)] * 3
    assert role_without_place(apart, [{"CPU": 8.0}] * 3) is None
    assert role_without_place(apart, [{"CPU": 8.0}] * 2) == "role"


def test_role_without_place_agrees_with_all_layouts() -> None:
    numbers = random.Random(0)
    outcomes = []
    for _ in range(100):
        machines = [numbers.randint(3, 9) for _ in range(3)]
        sizes = [numbers.randint(1, 5) for _ in range(6)]
        fit = any(
            all(
                sum(size for size, on in zip(sizes, places, strict=True) if on == place) <= cpus
                for place, cpus in enumerate(machines)
            )
            for places in itertools.product(range(3), repeat=6)
        )
        found = role_without_place(roles(list(map(float, sizes))), [{"CPU": float(cpus)} for cpus in machines])
        assert (found is None) == fit, (machines, sizes)
        outcomes.append(fit)
    assert {True, False} == set(outcomes)


def test_role_without_place_refuses_nothing_if_the_search_is_too_large() -> None:
    assert role_without_place(roles([3.0] * 100), [{"CPU": 4.0}] * 99) is None
