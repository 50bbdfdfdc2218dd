"""SharedMemorySender and SharedMemoryReceiver in one process: weights arrive bit for bit."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_plugins.errors import DeadlineExceeded
from rl_plugins.tests.other_user import needs_root, run_as_other_user
from rl_plugins.tests.patience import patient
from rl_plugins.weights.check import WeightsDiffer
from rl_plugins.weights.shared_memory import ElementRange, ReceiverLost, SharedMemoryReceiver, SharedMemorySender
from rl_plugins.weights.source import ModuleWeightSource, WeightMeta

# Deadline of waits for the other side; in passing tests, such waits end before.
DEADLINE_S = patient(60)

# Finds the sockets of an engine, as any user can, and takes the memory, as a rank does.
TAKE_MEMORY = """
names = {line.split("@")[1].strip() for line in open("/proc/net/unix") if "@" + sys.argv[1] in line}
connections = []
for name in names:
    for rank in range(8):
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(2)
        connections.append(connection)
        try:
            connection.connect("\\0" + name)
            connection.sendall(rank.to_bytes(8, "big"))
            answer, descriptors, _, _ = socket.recv_fds(connection, 8, 2)
        except OSError:
            continue
        if descriptors:
            sys.exit("has the memory")
print("no memory" if names else "no socket")
"""

SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "scalar": ((), torch.float32),
    "one": ((1,), torch.bfloat16),
    "odd": ((7, 13), torch.bfloat16),
    "three_bytes": ((3,), torch.uint8),
    "wide": ((5, 3), torch.float64),
    "nothing": ((0, 4), torch.float32),
    "query": ((6, 50), torch.float32),
    "key": ((3, 50), torch.float32),
    "value": ((3, 50), torch.float32),
    "turned": ((33, 5), torch.float16),
    "padded": ((5, 129), torch.float32),
    "narrowed": ((64, 2), torch.float32),
}
FUSED = {"query": (0, 6), "key": (6, 9), "value": (9, 12)}


def make_module(seed: int) -> torch.nn.Module:
    """Return the trainer's parameters, of many sizes and dtypes, with random bits."""
    generator = torch.Generator().manual_seed(seed)
    result = torch.nn.Module()
    for name, (shape, dtype) in SHAPES.items():
        count = WeightMeta(name, dtype, shape).nbytes
        values = torch.randint(256, (count,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)
        if name == "narrowed":
            values = torch.randn(shape, generator=generator)
        result.register_parameter(name, torch.nn.Parameter(values, requires_grad=False))
    return result


class EngineModel(torch.nn.Module):
    """The form of the same weights in an engine: fused, transposed, padded, and in another dtype."""

    fused: torch.nn.Parameter
    odd: torch.nn.Parameter
    turned: torch.nn.Parameter
    padded: torch.nn.Parameter
    narrowed: torch.nn.Parameter
    tied: torch.nn.Parameter

    def __init__(self) -> None:
        super().__init__()
        for name, (shape, dtype) in SHAPES.items():
            if name not in (*FUSED, "turned", "padded", "narrowed"):
                self._add(name, torch.zeros(shape, dtype=dtype))
        self._add("fused", torch.zeros(12, 50))
        self._add("turned", torch.zeros(5, 33, dtype=torch.float16))
        self._add("padded", torch.zeros(8, 129))
        self._add("narrowed", torch.zeros(64, 2, dtype=torch.bfloat16))
        self.tied = self.padded

    def _add(self, name: str, value: Tensor) -> None:
        self.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if name in FUSED:
                start, stop = FUSED[name]
                self.fused.data[start:stop].copy_(tensor)
            elif name == "turned":
                self.turned.data.copy_(tensor.t())
            elif name == "padded":
                self.padded.data[:5].copy_(tensor)
            else:
                self.get_parameter(name).data.copy_(tensor)

    def taken_apart(self) -> dict[str, Tensor]:
        """The weights in the trainer's form."""
        weights = {name: self.fused[start:stop] for name, (start, stop) in FUSED.items()}
        weights |= {"turned": self.turned.t(), "padded": self.tied[:5], "narrowed": self.narrowed.float()}
        return {name: weights[name] if name in weights else self.get_parameter(name) for name in SHAPES}


class EngineInThread:
    """The engine on the side of rank 0."""

    def __init__(self, model: EngineModel | None = None) -> None:
        self.model = model or EngineModel()
        self.receiver = SharedMemoryReceiver(self.model, self.model.load_weights)
        self.versions: list[int] = []
        self._pool = ThreadPoolExecutor(1)

    def listen(self, init_info: dict[str, Any]) -> None:
        # An engine does one thing at a time: this call runs after the earlier update.
        self._pool.submit(lambda: self.receiver.expect(**init_info)).result(timeout=DEADLINE_S)

    def begin_update(self, version: int) -> Callable[[], None]:
        def receive() -> None:
            self.receiver.receive()
            self.versions.append(version)

        loading: Future[None] = self._pool.submit(receive)
        return lambda: loading.result(timeout=DEADLINE_S)


def make_senders(
    sources: list[torch.nn.Module], *engines: EngineInThread, timeout_s: float = DEADLINE_S
) -> list[SharedMemorySender]:
    """One sender per rank, built in one thread each as the ranks would."""
    world_size = len(sources)
    barrier = threading.Barrier(world_size, timeout=DEADLINE_S)
    box: list[Any] = [None]

    def make(rank: int) -> SharedMemorySender:
        def broadcast(value: Any) -> Any:
            if rank == 0:
                box[0] = value
            barrier.wait()
            value = box[0]
            barrier.wait()
            return value

        return SharedMemorySender(
            ModuleWeightSource(sources[rank], rank, world_size),
            rank=rank,
            world_size=world_size,
            broadcast=broadcast,
            engines=engines if rank == 0 else (),
            num_engines=len(engines),
            timeout_s=timeout_s,
        )

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(make, range(world_size)))


def send(senders: list[SharedMemorySender], version: int) -> None:
    with ThreadPoolExecutor(len(senders)) as pool:
        list(pool.map(lambda sender: sender.send(version), senders))


def bits(tensor: Tensor) -> list[int]:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()


def assert_received(engine: EngineInThread, sent: torch.nn.Module) -> None:
    for name, received in engine.model.taken_apart().items():
        expected = sent.get_parameter(name).data
        if name == "narrowed":
            expected = expected.bfloat16().float()
        assert (received.dtype, received.shape) == (expected.dtype, expected.shape), name
        assert bits(received) == bits(expected), name


@pytest.fixture(autouse=True)
def _no_named_memory_is_left() -> Iterator[None]:
    before = mapped_named_memory()
    yield
    assert mapped_named_memory() <= before


def mapped_named_memory() -> set[str]:
    """Return the paths of named shared memory in this process."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {line[line.index("/dev/shm/") :] for line in maps if "/dev/shm/" in line}


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_send_writes_weights_that_are_bit_equal(world_size: int) -> None:
    # Every rank trusts only its part: elsewhere the rank's copy has other weights.
    copies = [make_module(0) for _ in range(world_size)]
    for rank, copy in enumerate(copies):
        _spoil_other_parts(copy, rank, world_size)
    engine, second = EngineInThread(), make_module(1)
    senders = make_senders(copies, engine)
    send(senders, 1)
    assert_received(engine, make_module(0))
    for copy in copies:
        for name, parameter in copy.named_parameters():
            parameter.copy_(second.get_parameter(name))
    send(senders, 2)
    assert_received(engine, second)
    assert engine.versions == [1, 2]
    assert engine.model.padded[5:].eq(0).all()


def test_send_writes_frozen_tensors_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ModuleWeightSource.metadata
    # One part of a fused parameter, one tensor through the staging memory, one with a separate place.
    frozen = {"key", "turned", "odd"}
    monkeypatch.setattr(
        ModuleWeightSource,
        "metadata",
        lambda source: [replace(meta, frozen=meta.name in frozen) for meta in plain(source)],
    )
    copies, first, second = [make_module(0), make_module(0)], make_module(0), make_module(1)
    engine = EngineInThread()
    senders = make_senders(copies, engine)
    send(senders, 1)
    assert_received(engine, first)
    for copy in copies:
        for name, parameter in copy.named_parameters():
            parameter.copy_(second.get_parameter(name))
    send(senders, 2)
    for name in frozen:
        second.get_parameter(name).copy_(first.get_parameter(name))
    assert_received(engine, second)


def _spoil_other_parts(copy: torch.nn.Module, rank: int, world_size: int) -> None:
    for name, start, part in list(ModuleWeightSource(copy, rank, world_size).shards()):
        flat = copy.get_parameter(name).view(-1)
        mine = part.clone()
        flat.view(torch.uint8).fill_(0xA5)
        flat[start : start + len(mine)] = mine


def test_new_senders_replace_closed_senders_in_the_same_memory() -> None:
    engine = EngineInThread()
    before = make_senders([make_module(0), make_module(0)], engine)
    send(before, 1)
    for sender in before:
        sender.close()
    memory = engine.model.fused.data_ptr()
    send(make_senders([make_module(1)], engine), 2)
    assert_received(engine, make_module(1))
    assert engine.model.fused.data_ptr() == memory


def test_send_raises_connection_error_that_names_the_rank_that_ended() -> None:
    engine = EngineInThread()
    first, second = make_senders([make_module(0), make_module(0)], engine)
    second.close()
    with pytest.raises(ConnectionError, match="rank 1 ended before its first weight update"):
        first.send(1)
    with pytest.raises(ConnectionError, match="lost its connection to the ranks in an earlier weight update"):
        first.send(2)

    engine = EngineInThread()
    senders = make_senders([make_module(0), make_module(0)], engine)
    send(senders, 1)
    senders[1].close()
    with pytest.raises(ConnectionError, match=r"rank 1 ended before (a weight update|it had written its weights)"):
        senders[0].send(2)


def test_send_raises_the_error_of_load_weights_of_the_engine() -> None:
    class Picky(EngineModel):
        pleased = True

        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
            if not self.pleased:
                raise ValueError("these weights do not suit me")
            super().load_weights(weights)

    model = Picky()
    senders = make_senders([make_module(0)], EngineInThread(model))
    model.pleased = False
    with pytest.raises(ValueError, match="do not suit me"):
        senders[0].send(1)


def test_send_writes_the_weights_of_all_ranks_to_every_engine() -> None:
    engines = [EngineInThread(), EngineInThread(), EngineInThread()]
    senders = make_senders([make_module(0), make_module(0)], *engines)
    send(senders, 1)
    for engine in engines:
        assert_received(engine, make_module(0))
        assert engine.versions == [1]


def test_send_raises_the_error_of_an_engine_before_any_deadline() -> None:
    class Full(EngineInThread):
        fails = True

        def begin_update(self, version: int) -> Callable[[], None]:
            if not self.fails:
                return super().begin_update(version)

            def fail() -> None:
                self.receiver.disconnect()
                raise MemoryError("no room")

            loading: Future[None] = self._pool.submit(fail)
            return lambda: loading.result(timeout=DEADLINE_S)

    well, full = EngineInThread(), Full()
    (sender,) = make_senders([make_module(0)], well, full)
    # A wait ended by its deadline would raise ReceiverLost.
    with pytest.raises(MemoryError, match="no room"):
        sender.send(1)
    with pytest.raises(ConnectionError, match=r"rank 0 (ended|has left)|lost its connection"):
        sender.send(2)
    # New ranks find both engines intact.
    full.fails = False
    send(make_senders([make_module(1)], well, full), 3)
    for engine in (well, full):
        assert_received(engine, make_module(1))


def test_check_names_the_engine_and_the_tensor_that_differ() -> None:
    engines = [EngineInThread(), EngineInThread()]
    sources = [make_module(0), make_module(0)]
    senders = make_senders(sources, *engines)
    send(senders, 1)

    def ask(position: int, ranges: list[ElementRange]) -> list[list[int]]:
        return [engines[position].receiver.checksums(ranges)]

    shards = [ModuleWeightSource(source, rank, 2) for rank, source in enumerate(sources)]
    for sender, source in zip(senders, shards, strict=True):
        sender.check(source, ask)
    # Elements of `key`, which lies in the middle of a fused parameter, and in the second rank's half.
    engines[1].model.fused.data[8, 49] = 0
    senders[0].check(shards[0], ask)
    with pytest.raises(WeightsDiffer, match=r"key of rollout engine 1 differs .* elements 75 to 149"):
        senders[1].check(shards[1], ask)
    engines[1].model.odd.data = engines[1].model.odd.data.clone()
    with pytest.raises(WeightsDiffer, match="odd of the rollout engine is not in the memory"):
        senders[0].check(shards[0], ask)


def test_give_back_frees_the_weights_until_the_next_send() -> None:
    class WithOwn(EngineModel):
        own: torch.nn.Parameter

        def __init__(self) -> None:
            super().__init__()
            self._add("own", torch.full((5000,), 0.5))

    model = WithOwn()
    engine = EngineInThread(model)
    senders = make_senders([make_module(0)], engine)
    send(senders, 1)
    model.padded.data[5:] = 3.0
    before = engine.receiver.resident_bytes
    assert 0 < engine.receiver.give_back() < before
    assert engine.receiver.resident_bytes < before
    assert not model.fused.any() and not model.padded[:5].any()
    # Bytes without a write by any rank are unchanged.
    assert model.own.eq(0.5).all() and model.padded[5:].eq(3).all()
    send(senders, 2)
    assert_received(engine, make_module(0))


def test_sender_refuses_a_tensor_that_the_engine_does_not_have() -> None:
    stranger = torch.nn.Linear(2, 2)
    with pytest.raises(AttributeError, match="weight"):
        make_senders([stranger], EngineInThread())


def test_send_raises_receiver_lost_after_the_deadline_if_the_engine_never_stops() -> None:
    class Deaf(EngineInThread):
        def begin_update(self, version: int) -> Callable[[], None]:
            return lambda: None

    (sender,) = make_senders([make_module(0)], Deaf(), timeout_s=0.1)
    with pytest.raises(ReceiverLost, match=r"engine 0 was lost .* rank 0 waited 0 s for the engine to stop"):
        sender.send(1)


def test_receive_raises_deadline_exceeded_if_no_rank_connects() -> None:
    engine = EngineInThread()
    engine.listen(
        {
            "name": f"no-rank-connects-{uuid.uuid4().hex}",
            "secret": "00",
            "num_ranks": 2,
            "tensors": [],
            "timeout_s": 0.1,
        }
    )
    with pytest.raises(DeadlineExceeded, match=r"for 2 ranks to connect; ranks \[\] did"):
        engine.receiver.receive()


def test_receive_raises_deadline_exceeded_if_a_rank_never_writes() -> None:
    engine = EngineInThread()
    senders = make_senders([make_module(0)], engine, timeout_s=1.0)
    assert engine.receiver._listener is not None
    engine.receiver._listener.wait(DEADLINE_S)
    with pytest.raises(DeadlineExceeded, match="for rank 0 to write its weights"):
        engine.receiver.receive()
    senders[0].close()


def test_memory_of_the_weights_has_no_name() -> None:
    engine = EngineInThread()
    make_senders([make_module(0)], engine)
    for memory in (engine.receiver._memory, engine.receiver._staging):
        assert os.readlink(f"/proc/self/fd/{memory.fd}").startswith("/memfd:")


@needs_root
def test_send_keeps_the_weights_from_other_users_of_the_machine() -> None:
    class Attacked(EngineInThread):
        answer = ""

        def listen(self, init_info: dict[str, Any]) -> None:
            super().listen(init_info)
            self.answer = run_as_other_user(TAKE_MEMORY, init_info["name"])

    engine = Attacked()
    send(make_senders([make_module(0), make_module(0)], engine), 1)
    assert engine.answer == "no memory\n"
    assert_received(engine, make_module(0))


def test_memory_of_the_weights_keeps_one_size() -> None:
    engine = EngineInThread()
    make_senders([make_module(0)], engine)
    for memory in (engine.receiver._memory, engine.receiver._staging):
        for size in (0, memory.size + 1):
            with pytest.raises(PermissionError):
                os.ftruncate(memory.fd, size)


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_module_weight_source_shards_tile_every_parameter(world_size: int) -> None:
    whole = make_module(2)
    covered = {name: [0] * p.numel() for name, p in whole.named_parameters()}
    for rank in range(world_size):
        source = ModuleWeightSource(whole, rank, world_size)
        names = []
        for name, start, part in source.shards():
            names.append(name)
            for position in range(start, start + part.numel()):
                covered[name][position] += 1
        assert names == [meta.name for meta in source.metadata()] == [name for name, _ in source]
    assert all(count == 1 for counts in covered.values() for count in counts)
