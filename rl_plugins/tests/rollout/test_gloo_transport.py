"""Weights in buckets over gloo: what is sent arrives in every process of every engine, and every wait ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl_plugins.errors import DeadlineExceeded
from rl_plugins.rollout.engine import EngineLost
from rl_plugins.rollout.gloo_transport import GlooReceiver, GlooSender, buckets
from rl_plugins.rollout.weights import ModuleWeightSource, WeightMeta


def module(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 33), nn.Linear(33, 64), nn.Linear(64, 3).bfloat16())
    model.register_parameter("scale", nn.Parameter(torch.randn(())))
    return model


class Threads:
    """An engine whose processes are threads of this one."""

    def __init__(self, *models: nn.Module, fails_at: str | None = None) -> None:
        self._fails_at = fails_at
        self.receivers = [GlooReceiver(self.loader(model), number) for number, model in enumerate(models)]
        self._pool = ThreadPoolExecutor(len(models))
        self.versions: list[int] = []

    def loader(self, model: nn.Module) -> Callable[[Iterable[tuple[str, Tensor]]], None]:
        parameters = dict(model.named_parameters())

        def load(weights: Iterable[tuple[str, Tensor]]) -> None:
            for name, tensor in weights:
                if name == self._fails_at:
                    raise ValueError(f"no room for {name}")
                with torch.no_grad():
                    parameters[name].copy_(tensor)

        return load

    def init(self, init_info: dict[str, Any]) -> None:
        for receiver in self.receivers:
            receiver.expect(**init_info)

    def load(self, version: int) -> Callable[[], None]:
        self.versions.append(version)
        futures = [self._pool.submit(receiver.receive) for receiver in self.receivers]

        def wait() -> None:
            for future in futures:
                future.result()

        return wait


def all_answer() -> None:
    pass


def sender(
    source: ModuleWeightSource, *engines: Any, timeout_s: float = 20.0, bucket_bytes: int = 600,
    find_lost: Callable[[], None] = all_answer,
) -> GlooSender:  # fmt: skip
    return GlooSender(
        source, rank=0, share=lambda value: value, engines=engines, find_lost=find_lost, num_receivers=2,
        bucket_bytes=bucket_bytes, timeout_s=timeout_s, host="127.0.0.1",
    )  # fmt: skip


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


@pytest.mark.parametrize("bucket_bytes", [1, 600, 2**20])
def test_every_process_of_every_engine_gets_every_update(bucket_bytes: int) -> None:
    policy, copies = module(0), [module(seed) for seed in range(1, 5)]
    engines = Threads(*copies[:2]), Threads(*copies[2:])
    sending = sender(ModuleWeightSource(policy), *engines, bucket_bytes=bucket_bytes)
    assert not any(same(policy, copy) for copy in copies)
    sending.send(1)
    assert all(same(policy, copy) for copy in copies)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(-1.5)
    sending.send(2)
    assert all(same(policy, copy) for copy in copies)
    assert [engine.versions for engine in engines] == [[1, 2], [1, 2]]


def test_a_new_sender_takes_the_place_of_one_that_is_gone() -> None:
    copies = [module(1), module(2)]
    engine = Threads(*copies)
    first = sender(ModuleWeightSource(module(0)), engine)
    first.send(1)
    policy = module(5)
    sender(ModuleWeightSource(policy), engine).send(1)
    assert all(same(policy, copy) for copy in copies)


@pytest.mark.parametrize(
    ("lost", "failed", "heard"),
    [
        (False, False, nullcontext()),
        (False, True, pytest.raises(ConnectionError)),
        (True, True, pytest.raises(EngineLost)),
    ],
)
def test_other_ranks_walk_the_source_and_hear_how_it_ended(lost: bool, failed: bool, heard: Any) -> None:
    walked: list[str] = []

    class Source(ModuleWeightSource):
        def __iter__(self) -> Any:
            for name, tensor in super().__iter__():
                walked.append(name)
                yield name, tensor

    ended = iter([(False, False), (lost, failed)])
    other = GlooSender(
        Source(module(0)), rank=1, share=lambda value: next(ended), engines=[], find_lost=all_answer
    )  # fmt: skip
    with heard:
        other.send(1)
    assert walked == [name for name, _ in module(0).named_parameters()]


def test_rank_0_walks_to_the_end_before_it_looks_for_who_is_lost() -> None:
    walked: list[str] = []

    class Source(ModuleWeightSource):
        def __iter__(self) -> Any:
            for name, tensor in super().__iter__():
                walked.append(name)
                yield name, tensor

    def find_lost() -> None:
        assert walked == [name for name, _ in module(0).named_parameters()]
        raise EngineLost("the second")

    bad = Threads(module(1), module(2), fails_at="0.weight")
    with pytest.raises(EngineLost, match="the second"):
        sender(Source(module(0)), bad, find_lost=find_lost).send(1)


def test_an_engine_that_does_not_come_is_named_by_a_deadline() -> None:
    class Absent(Threads):
        def load(self, version: int) -> Callable[[], None]:
            return lambda: None

    sending = sender(ModuleWeightSource(module(0)), Absent(module(1), module(2)), timeout_s=1.0)
    with pytest.raises(DeadlineExceeded, match="rank 0 waited 1 s for the rollout engines to connect for new weights"):
        sending.send(1)


@pytest.mark.parametrize("bad_place", [0, 1, 2])
def test_the_engine_that_fails_says_why_and_the_others_go_on(bad_place: int) -> None:
    def large() -> nn.Module:
        # More than lies in sockets: rank 0 is not done before the engines are.
        return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(12)))

    policy, models = large(), [[large(), large()] for _ in range(3)]
    engines = [Threads(*pair, fails_at="0.weight" if place == bad_place else None) for place, pair in enumerate(models)]
    broken = sender(ModuleWeightSource(policy), *engines, timeout_s=8.0, bucket_bytes=2**22)
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"no room for 0\.weight"):
        broken.send(1)
    # The others take the weights of a new group without it, when they have left the old one: nearly always at once, and
    # within a deadline if gloo does not tell them.
    del engines[bad_place], models[bad_place]
    sender(ModuleWeightSource(policy), *engines, timeout_s=8.0).send(2)
    assert time.monotonic() - began < 20
    assert all(same(policy, copy) for pair in models for copy in pair)


def test_buckets_keep_the_order_and_the_limit() -> None:
    sizes = [10, 200, 3, 0, 90, 1000, 5]
    metadata = [WeightMeta(str(number), torch.float32, (size,)) for number, size in enumerate(sizes)]
    cut = buckets(metadata, 1000)
    assert [meta for bucket in cut for meta in bucket.tensors] == metadata
    assert all(bucket.nbytes <= 1000 or len(bucket.tensors) == 1 for bucket in cut)
    assert [len(bucket.tensors) for bucket in cut] == [4, 1, 1, 1]
    assert buckets([], 1000) == []
