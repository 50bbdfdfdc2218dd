"""FleetSampling: a rank's numbers of the engines that sample for the rank."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.data.images import PromptImages
from rl_plugins.errors import EngineLost
from rl_plugins.rollout.engine import Generations, GroupRequest
from rl_plugins.rollout.vllm import fleet_sampling
from rl_plugins.rollout.vllm.fleet_sampling import FleetSampling
from rl_plugins.tests.pictures import picture

pytestmark = pytest.mark.unit


class Fleet:
    """Two engines, the first assigned to the rank. Each returns one token and its working time in seconds."""

    def __init__(self) -> None:
        self.rank, self.engines_of_rank, self.busy_s, self.on_lost = 0, [0], [4.0, 60.0], None
        self.submitted: list[GroupRequest] = []
        self.warm: list[int] = []
        self.mark_warm = self.warm.append
        actor = SimpleNamespace(
            generate=SimpleNamespace(remote=lambda *_: object()),
            submit=SimpleNamespace(remote=lambda rank, ranks, requests, sampling: self.submitted.extend(requests)),
        )
        self.actors = [actor, actor]

    def check_lost(self) -> None: ...

    def sampling_deadline(self) -> None: ...

    def shares(self, count: int) -> dict[int, range]:
        return {engine: range(count) for engine in self.engines_of_rank}

    def ranks_of_engine(self, engine: int) -> list[int]:
        return [0]

    def first(self, waiting: Mapping[Any, int], phase: str, deadline: Any) -> Any:
        return next(iter(waiting))

    def result(self, engine: int, reference: Any) -> tuple[Generations, float]:
        return Generations.from_responses([[1]], [[-1.0]], ["stop"], 0), self.busy_s[engine]


def test_busy_s_grows_by_the_work_of_the_engines_of_the_rank() -> None:
    fleet: Any = Fleet()
    sampling = FleetSampling(fleet)
    assert sampling.busy_s == 0
    seen = []
    # The second engine, which has worked for another rank, samples while the first is lost and starts again.
    for engine, busy_s in ((0, 4.0), (1, 60.0), (1, 63.0), (0, 1.0), (0, 3.0), (1, 90.0)):
        if fleet.engines_of_rank == [0] and engine == 1:
            fleet.on_lost(0)
        fleet.engines_of_rank, fleet.busy_s[engine] = [engine], busy_s
        sampling.generate([[5]], SamplingConfig(max_tokens=1), None)
        seen.append(sampling.busy_s)
    assert seen == [4.0, 4.0, 7.0, 8.0, 10.0, 10.0]
    assert fleet.warm == [0, 1, 1, 0, 0, 1]


def test_submit_sends_images_without_the_inputs_of_the_policy() -> None:
    fleet: Any = Fleet()
    images = PromptImages({"pixel_values": torch.zeros(1)}, [picture()], [5], 4)
    requests = [GroupRequest(0, [5, 5, 5, 6], 1, images=images), GroupRequest(1, [5], 2)]
    FleetSampling(fleet).submit(requests, SamplingConfig(max_tokens=1))
    with_images, plain = fleet.submitted
    assert with_images.images.images == images.images and not with_images.images.inputs
    assert plain is requests[1]


def test_submit_keeps_conversations_on_engines_and_levels_other_single_requests() -> None:
    fleet: Any = Fleet()
    fleet.engines_of_rank, fleet.living = [0, 1], [0, 1]
    submitted: dict[int, list[GroupRequest]] = {0: [], 1: []}
    fleet.actors = [
        SimpleNamespace(
            submit=SimpleNamespace(remote=lambda rank, ranks, requests, sampling, to=to: to.extend(requests))
        )
        for to in submitted.values()
    ]
    sampling, options = FleetSampling(fleet), SamplingConfig(max_tokens=1)
    for ticket in range(4):
        sampling.submit([GroupRequest(ticket, [5], 1)], options, together=False)
    # Engine 7 is lost.
    later = [GroupRequest(ticket, [5, 6], 1, engine=engine) for ticket, engine in ((4, 1), (5, 1), (6, 7), (7, None))]
    sampling.submit(later, options, together=False)
    assert {engine: [one.ticket for one in requests] for engine, requests in submitted.items()} == {
        0: [0, 2, 6, 7],
        1: [1, 3, 4, 5],
    }


def test_generate_calls_all_engines_before_a_loss_is_raised() -> None:
    fleet: Any = Fleet()
    called: list[Any] = []

    def lose() -> None:
        raise EngineLost("engine 1 is lost")

    fleet.check_lost, fleet.actors[0].generate.remote = lose, lambda *arguments: called.append(arguments)
    with pytest.raises(EngineLost):
        FleetSampling(fleet).generate([[5]], SamplingConfig(max_tokens=1), None)
    assert len(called) == 1


def test_collect_leaves_groups_of_other_callers() -> None:
    fleet: Any = Fleet()
    sampling = FleetSampling(fleet)
    fleet.actors[0].collect = SimpleNamespace(remote=lambda *_: object())
    fleet.result = lambda engine, reference: ({-1: [1], 7: [1], 8: [1]}, 1.0)
    sampling._engine_of |= {-1: 0, 7: 0, 8: 0}
    assert [*sampling.collect([-1], 0)] == [-1]
    assert [*sampling.collect([7], 1)] == [7, 8]


def test_collect_of_nothing_checks_engines_whose_calls_have_not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet: Any = Fleet()
    clock, checked, pending = [100.0], [], object()
    fleet.stall_timeout_s = {0: 120.0, 1: 900.0}.__getitem__

    def check(engine: int) -> None:
        checked.append((engine, clock[0]))
        if clock[0] > 300:
            raise EngineLost("engine 0 is lost")

    fleet.check_answers = check
    monkeypatch.setattr(fleet_sampling, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr("ray.wait", lambda calls, num_returns, timeout: ([], calls))
    sampling = FleetSampling(fleet)
    # Somebody has waited for both engines before, and waits no more.
    sampling._engine_of |= {7: 0, 8: 1}
    sampling._polls |= {pending: 0, object(): 1}
    sampling._heard |= {0: 100.0, 1: 100.0}
    for clock[0] in (101.0, 219.0, 221.0, 222.0):
        assert sampling.collect([], 0) == {}
    assert checked == [(0, 221.0)]
    clock[0] = 342.0
    with pytest.raises(EngineLost):
        sampling.collect([], 0)


def test_dropped_tickets_of_a_lost_engine_are_not_submitted_again() -> None:
    fleet: Any = Fleet()
    fleet.living, fleet.config = [], SimpleNamespace(update_timeout_s=1.0)
    sampling = FleetSampling(fleet)
    sampling._engine_of |= {7: 0, 8: 0}
    fleet.on_lost(0)
    sampling.drop([7])
    assert sampling.lost_tickets() == [8]


def test_lost_tickets_of_other_callers_stay() -> None:
    fleet: Any = Fleet()
    sampling = FleetSampling(fleet)
    sampling._engine_of |= {-1: 0, 7: 0, 8: 1}
    fleet.on_lost(0)
    assert sampling.lost_tickets({-1}) == [-1] and sampling.lost_tickets() == [7] and sampling.lost_tickets() == []
