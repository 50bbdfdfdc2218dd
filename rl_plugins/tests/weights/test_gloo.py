"""GlooSender and GlooReceiver: weights arrive in every process of every engine, and every wait ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl_plugins.errors import DeadlineExceeded, EngineLost
from rl_plugins.tests.listeners import listening_hosts
from rl_plugins.tests.patience import patient
from rl_plugins.weights.gloo import GlooReceiver, GlooSender, buckets
from rl_plugins.weights.source import ModuleWeightSource, WeightMeta

# Deadline of every wait for the other side. Passing tests never use the whole time.
DEADLINE_S = patient(120)


def make_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 33), nn.Linear(33, 64), nn.Linear(64, 3).bfloat16())
    model.register_parameter("scale", nn.Parameter(torch.randn(())))
    return model


class ThreadEngine:
    """An engine whose processes are threads of this one; each does one thing at a time, as a process does.

    Args:
        models: one for each process.
        error: raised by the first load of `fails_at`.
        fails_at: name of a tensor.
    """

    def __init__(self, *models: nn.Module, fails_at: str | None = None, error: BaseException | None = None) -> None:
        self._fails_at, self._error = fails_at, error
        self.receivers = [GlooReceiver(self.loader(model), number) for number, model in enumerate(models)]
        self._threads = [ThreadPoolExecutor(1) for _ in models]
        self.versions: list[int] = []

    def loader(self, model: nn.Module) -> Callable[[Iterable[tuple[str, Tensor]]], None]:
        parameters = dict(model.named_parameters())

        def load(weights: Iterable[tuple[str, Tensor]]) -> None:
            for name, tensor in weights:
                if name == self._fails_at and self._error is not None:
                    raise self._error
                with torch.no_grad():
                    parameters[name].copy_(tensor)

        return load

    def recover(self) -> None:
        self._error = None

    def listen(self, init_info: dict[str, Any]) -> None:
        self._each(lambda receiver: receiver.expect(**init_info))()

    def begin_update(self, version: int) -> Callable[[], None]:
        self.versions.append(version)
        return self._each(GlooReceiver.receive)

    def _each(self, work: Callable[[GlooReceiver], None]) -> Callable[[], None]:
        futures = [
            thread.submit(work, receiver) for thread, receiver in zip(self._threads, self.receivers, strict=True)
        ]

        def wait() -> None:
            for future in futures:
                future.result()

        return wait


class AbsentEngine(ThreadEngine):
    """An engine without a connection."""

    def begin_update(self, version: int) -> Callable[[], None]:
        return lambda: None


class RecordingSource(ModuleWeightSource):
    """Weights with a record of the names of the tensors read."""

    walked: list[str]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        self.walked = []
        for name, tensor in super().__iter__():
            self.walked.append(name)
            yield name, tensor


def find_no_lost_engine() -> None:
    pass


def make_sender(
    source: ModuleWeightSource, *engines: ThreadEngine, bucket_bytes: int = 600,
    find_lost: Callable[[], None] = find_no_lost_engine,
) -> GlooSender:  # fmt: skip
    return GlooSender(
        source, rank=0, share=lambda value: value, engines=engines, find_lost=find_lost, num_receivers=2,
        bucket_bytes=bucket_bytes, timeout_s=DEADLINE_S, host="127.0.0.1",
    )  # fmt: skip


def have_equal_weights(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


@pytest.mark.parametrize("bucket_bytes", [1, 600, 2**20])
def test_send_updates_every_process_of_every_engine(bucket_bytes: int) -> None:
    policy, copies = make_model(0), [make_model(seed) for seed in range(1, 5)]
    engines = ThreadEngine(*copies[:2]), ThreadEngine(*copies[2:])
    sender = make_sender(ModuleWeightSource(policy), *engines, bucket_bytes=bucket_bytes)
    assert not any(have_equal_weights(policy, copy) for copy in copies)
    sender.send(1)
    assert all(have_equal_weights(policy, copy) for copy in copies)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(-1.5)
    sender.send(2)
    assert all(have_equal_weights(policy, copy) for copy in copies)
    assert [engine.versions for engine in engines] == [[1, 2], [1, 2]]


def test_store_of_a_sender_ends_with_the_first_update() -> None:
    class Listed(ThreadEngine):
        port = 0

        def listen(self, init_info: dict[str, Any]) -> None:
            super().listen(init_info)
            self.port = init_info["store"]["port"]

    policy, copies = make_model(0), [make_model(1), make_model(2)]
    engine = Listed(*copies)
    sender = make_sender(ModuleWeightSource(policy), engine)
    assert listening_hosts(engine.port)
    sender.send(1)
    assert not listening_hosts(engine.port)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(-1.5)
    sender.send(2)
    assert all(have_equal_weights(policy, copy) for copy in copies)


def test_a_new_sender_replaces_a_closed_sender() -> None:
    copies = [make_model(1), make_model(2)]
    engine = ThreadEngine(*copies)
    first = make_sender(ModuleWeightSource(make_model(0)), engine)
    first.send(1)
    first.close()
    policy = make_model(5)
    make_sender(ModuleWeightSource(policy), engine).send(1)
    assert all(have_equal_weights(policy, copy) for copy in copies)


def test_a_new_sender_replaces_a_sender_that_was_not_closed() -> None:
    copies = [make_model(1), make_model(2)]
    engine = ThreadEngine(*copies)
    first = make_sender(ModuleWeightSource(make_model(0)), engine)
    first.send(1)
    policy = make_model(5)
    make_sender(ModuleWeightSource(policy), engine).send(1)
    assert all(have_equal_weights(policy, copy) for copy in copies)


@pytest.mark.parametrize(
    ("lost", "failed", "expectation"),
    [
        (False, False, nullcontext()),
        (False, True, pytest.raises(ConnectionError)),
        (True, True, pytest.raises(EngineLost)),
    ],
    ids=["sent", "failed", "engine lost"],
)
def test_send_on_other_ranks_walks_the_source_and_raises_the_failure_of_rank_0(
    lost: bool, failed: bool, expectation: Any
) -> None:
    source = RecordingSource(make_model(0))
    outcomes = iter([(False, False), (lost, failed)])
    sender = GlooSender(source, rank=1, share=lambda value: next(outcomes), engines=[], find_lost=find_no_lost_engine)
    with expectation:
        sender.send(1)
    assert source.walked == [name for name, _ in make_model(0).named_parameters()]


def test_send_walks_the_source_to_the_end_before_find_lost() -> None:
    source = RecordingSource(make_model(0))

    def find_lost() -> None:
        assert source.walked == [name for name, _ in make_model(0).named_parameters()]
        raise EngineLost("the second")

    engine = ThreadEngine(make_model(1), make_model(2), fails_at="0.weight", error=SystemExit("the process ends"))
    with pytest.raises(EngineLost, match="the second"):
        make_sender(source, engine, find_lost=find_lost).send(1)


def test_send_raises_the_error_of_a_process_that_leaves_and_not_the_broken_connections() -> None:
    class Left(BaseException):
        pass

    leaves = ThreadEngine(make_model(3), make_model(4), fails_at="0.weight", error=Left())
    sender = make_sender(ModuleWeightSource(make_model(0)), ThreadEngine(make_model(1), make_model(2)), leaves)
    with pytest.raises(Left):
        sender.send(1)


def test_send_raises_deadline_exceeded_if_an_engine_never_connects() -> None:
    sender = make_sender(ModuleWeightSource(make_model(0)), AbsentEngine(make_model(1), make_model(2)))
    # Only the wait for an absent engine is short.
    sender._timeout_s = 0.6
    with pytest.raises(DeadlineExceeded, match="rank 0 waited 1 s for the rollout engines to connect for new weights"):
        sender.send(1)


@pytest.mark.parametrize("bad_place", [0, 1, 2])
def test_send_raises_the_error_of_an_engine_that_cannot_load_and_updates_the_other_engines(bad_place: int) -> None:
    def make_large_model() -> nn.Module:
        return nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(12)))

    policy, models = make_large_model(), [[make_large_model(), make_large_model()] for _ in range(3)]
    engines = [ThreadEngine(*pair) for pair in models]
    engines[bad_place] = bad = ThreadEngine(*models[bad_place], fails_at="0.weight", error=ValueError("no room"))
    sender = make_sender(ModuleWeightSource(policy), *engines, bucket_bytes=2**20)
    with pytest.raises(ValueError, match="no room"):
        sender.send(1)
    good = [copy for place, pair in enumerate(models) if place != bad_place for copy in pair]
    # A new sender first waits for the end of the engine's earlier update.
    others = [engine for engine in engines if engine is not bad]
    second = make_sender(ModuleWeightSource(policy), *others)
    assert all(have_equal_weights(policy, copy) for copy in good)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(-1.5)
    second.send(2)
    assert all(have_equal_weights(policy, copy) for copy in good)


def test_send_works_after_an_engine_that_could_not_load() -> None:
    policy, copies = make_model(0), [make_model(seed) for seed in range(1, 5)]
    engine = ThreadEngine(*copies[:2], fails_at="1.weight", error=ValueError("no room"))
    sender = make_sender(ModuleWeightSource(policy), engine, ThreadEngine(*copies[2:]))
    with pytest.raises(ValueError, match="no room"):
        sender.send(1)
    engine.recover()
    sender.send(2)
    assert all(have_equal_weights(policy, copy) for copy in copies)


def test_buckets_keep_the_order_of_the_tensors_and_the_limit() -> None:
    sizes = [10, 200, 3, 0, 90, 1000, 5]
    metadata = [WeightMeta(str(number), torch.float32, (size,)) for number, size in enumerate(sizes)]
    cut = buckets(metadata, 1000)
    assert [meta for bucket in cut for meta in bucket.tensors] == metadata
    assert all(bucket.nbytes <= 1000 or len(bucket.tensors) == 1 for bucket in cut)
    assert [len(bucket.tensors) for bucket in cut] == [4, 1, 1, 1]
    assert buckets([], 1000) == []
