"""Weight updates over CUDA IPC and NCCL: vLLM's code on both sides, on CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from threading import Thread
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("vllm")
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer import packed_tensor
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from rl_plugins import ranks
from rl_plugins.errors import DeadlineExceeded, EngineLost
from rl_plugins.rollout.vllm.client import CudaWeightClient, VLLMRollout
from rl_plugins.rollout.vllm.config import VLLMConfig
from rl_plugins.rollout.vllm.cuda_transport import SeveralEngines, SourceAhead, make_cuda_sender
from rl_plugins.tests.loops import for_each
from rl_plugins.tests.patience import wait_until
from rl_plugins.tests.ranks import run_ranks
from rl_plugins.tests.rollout.cuda_stubs import StubEngine, StubModel, cuda_on_cpu, on_gpu
from rl_plugins.weights.source import ModuleWeightSource

GPUS = ["GPU-0", "GPU-1", "GPU-2", "GPU-3"]


@pytest.fixture
def communicators() -> Iterator[list[Any]]:
    with cuda_on_cpu() as communicators:
        yield communicators


def make_policy() -> torch.nn.Module:
    """A policy with an embedding of 1.2 MB, in two dtypes."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(600, 512), torch.nn.Linear(512, 96), torch.nn.LayerNorm(96))
    model[1].bfloat16()
    return model


def sender_of(
    transport: str, policy: torch.nn.Module, engines: list[StubEngine], source: Any = ModuleWeightSource, rank: int = 0
) -> Any:
    """Return the sender of a rank to engines of equal size."""
    processes = len(engines[0].workers) if engines else 1
    config = VLLMConfig("model", device="cuda", transport=transport, bucket_mb=1, tensor_parallel_size=processes)
    client = SeveralEngines(engines, processes)
    return make_cuda_sender(config, source(policy), client=client, rank=rank, num_engines=len(engines))


def update_calls(chunks: int) -> list[str]:
    """Return the calls of a weight update in order."""
    return ["start_weight_update", *["update_weights"] * chunks, "finish_weight_update", "set_policy_version"]


def assert_has_weights(engine: StubEngine, policy: torch.nn.Module, version: int) -> None:
    for worker in engine.workers:
        weights = worker.model.weights()
        for name, parameter in policy.named_parameters():
            assert torch.equal(weights[name], parameter), f"{name} on {worker.gpu}"
    assert engine.version == version


def send_in_time(sender: Any, version: int) -> None:
    """Send from a thread on the GPU of the trainer, because NCCL waits for ever if nothing ends the group."""
    outcome: list[BaseException | None] = []

    def send() -> None:
        try:
            with on_gpu("GPU-trainer"):
                sender.send(version)
            outcome.append(None)
        except BaseException as error:
            outcome.append(error)

    Thread(target=send, daemon=True).start()
    wait_until(lambda: bool(outcome), "the end of the weight update", 60)
    if outcome[0] is not None:
        raise outcome[0]


@pytest.mark.parametrize("backend", ["ipc", "nccl"])
@pytest.mark.usefixtures("communicators")
def test_make_cuda_sender_gives_an_engine_the_weights_of_each_update(backend: str) -> None:
    policy = make_policy()
    engine = StubEngine(backend, GPUS[:1], policy)
    addresses = {name: weight.data_ptr() for name, weight in engine.workers[0].model.weights().items()}
    with on_gpu(GPUS[0]), closing(sender_of(backend, policy, [engine])) as sender:
        sender.send(1)
        assert_has_weights(engine, policy, 1)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(1)
        sender.send(2)
    assert_has_weights(engine, policy, 2)
    # CUDA graphs replay addresses.
    assert addresses == {name: weight.data_ptr() for name, weight in engine.workers[0].model.weights().items()}
    update = update_calls(2 if backend == "ipc" else 1)
    assert engine.calls == ["init_weight_transfer_engine", *update, *update]


@pytest.mark.usefixtures("communicators")
def test_sender_over_nccl_gathers_on_one_stream_and_each_bucket_waits_for_the_stream() -> None:
    streams = list[Any]()

    class Parts(ModuleWeightSource):
        """A source that gathers the embedding once, for several buckets."""

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            for item in super().__iter__():
                streams.append(torch.cuda.current_stream())
                yield item

    policy = torch.nn.Sequential(*(torch.nn.Linear(512, 600) for _ in range(4)))
    engine = StubEngine("nccl", GPUS[:1], policy)
    read = list[Any]()
    pack = packed_tensor.pack_tensors

    def packed(*arguments: Any) -> Any:
        read.append(torch.cuda.current_stream())
        return pack(*arguments)

    with on_gpu("GPU-trainer"), closing(sender_of("nccl", policy, [engine], Parts)) as sender:
        with patch.object(packed_tensor, "pack_tensors", packed):
            sender.send(1)
        own = torch.cuda.current_stream()
        assert {stream.cuda_stream for stream in streams} == {own.cuda_stream}
        assert len({stream.cuda_stream for stream in read}) == 2
        assert all(own.cuda_stream in stream.waited_for for stream in read)
    assert_has_weights(engine, policy, 1)


def test_several_engines_over_nccl_have_separate_ranks_and_leave_the_group_with_the_sender(
    communicators: list[Any],
) -> None:
    policy = make_policy()
    engines = [StubEngine("nccl", GPUS[:2], policy), StubEngine("nccl", GPUS[2:], policy)]
    with on_gpu("GPU-trainer"), closing(sender_of("nccl", policy, engines)) as sender:
        sender.send(7)
        assert sorted(communicator.rank for communicator in communicators) == [0, 1, 2, 3, 4]
    for engine in engines:
        assert_has_weights(engine, policy, 7)
        assert engine.calls == ["init_weight_transfer_engine", *update_calls(1)]
    wait_until(lambda: not communicators, "all processes to free their communicators", 60)


@pytest.mark.usefixtures("communicators")
def test_processes_of_nccl_read_no_object_from_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise AssertionError("an object of a store is code of everybody who reaches the store")

    for method in ("recv_obj", "broadcast_obj"):
        monkeypatch.setattr(StatelessProcessGroup, method, refuse)
    policy = make_policy()
    engine = StubEngine("nccl", GPUS[:1], policy)
    with on_gpu("GPU-trainer"), closing(sender_of("nccl", policy, [engine])) as sender:
        sender.send(1)
    assert_has_weights(engine, policy, 1)


@pytest.mark.usefixtures("communicators")
def test_nccl_receiver_drops_the_tensors_of_a_failed_update(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make_policy()
    engine = StubEngine("nccl", GPUS[:1], policy)
    load = StubModel.load_weights

    def fail_before_the_bias(model: StubModel, weights: Any) -> None:
        for name, tensor in weights:
            if "bias" in name:
                raise MemoryError("no memory for the bias")
            load(model, [(name, tensor)])

    monkeypatch.setattr(StubModel, "load_weights", fail_before_the_bias)
    with on_gpu("GPU-trainer"):
        sender = sender_of("nccl", policy, [engine])
        with pytest.raises(MemoryError, match="no memory for the bias"):
            sender.send(1)
        sender.close()
    waiting = [layer for layer in engine.workers[0].model.modules() if get_layerwise_info(layer).can_load()]
    assert waiting == []


@pytest.mark.parametrize("call", ["update_weights", "init_weight_transfer_engine"])
def test_send_over_nccl_raises_if_an_engine_is_lost_and_the_other_engine_gets_the_next_update(
    communicators: list[Any], call: str
) -> None:
    policy, passed = make_policy(), []

    class Source(ModuleWeightSource):
        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in super().__iter__():
                yield name, tensor
                passed.append(name)

    living, lost = (StubEngine("nccl", [gpu], policy) for gpu in GPUS[:2])
    lost.fail(call, EngineLost("engine 1 is lost"))
    with on_gpu("GPU-trainer"):
        sender = sender_of("nccl", policy, [living, lost], Source)
        with pytest.raises(EngineLost, match="engine 1 is lost"):
            send_in_time(sender, 1)
        sender.close()
        # Other ranks gather the weights with rank 0.
        assert passed == [name for name, _ in policy.named_parameters()]
        assert living.version is None
        if call == "init_weight_transfer_engine":
            return
        wait_until(lambda: not communicators, "both sides to free their communicators", 60)
        with closing(sender_of("nccl", policy, [living])) as sender:
            sender.send(2)
    assert_has_weights(living, policy, 2)


def _send_over_ipc(rank: int, workers: list[list[str]], lost: int | None = None) -> list[list[str]]:
    """Send the weights from this rank on its GPU; return the calls of each engine.

    Args:
        rank: number of this rank.
        workers: GPU of each worker of each engine.
        lost: number of the engine lost in the update.
    """
    policy = make_policy()
    with cuda_on_cpu(), on_gpu(GPUS[rank]):
        # Rank 0 alone calls engines.
        engines = [StubEngine("ipc", gpus, policy) for gpus in workers] if rank == 0 else []
        if engines and lost is not None:
            engines[lost].fail("update_weights", EngineLost(f"engine {lost} is lost"))
        sender = sender_of("ipc", policy, engines, rank=rank)
        if lost is not None and rank == 0:
            with pytest.raises(EngineLost, match=f"engine {lost} is lost"):
                sender.send(4)
        else:
            sender.send(4)
            for engine in engines:
                assert_has_weights(engine, policy, 4)
        return [engine.calls for engine in engines]


@pytest.mark.parametrize("workers", [[GPUS[:2]], [GPUS[:1], GPUS[1:2]]], ids=["one engine", "two engines"])
def test_send_over_ipc_gives_each_worker_memory_of_the_same_gpu(workers: list[list[str]]) -> None:
    (calls, _), _ = run_ranks(_send_over_ipc, workers)
    assert calls == [["init_weight_transfer_engine", *update_calls(2)]] * len(workers)


def _waits_of_send_over_ipc(rank: int) -> list[str]:
    """Send the weights of two ranks; return the waits of this rank and their places."""
    policy, waits = make_policy(), list[str]()
    collectives = (torch.distributed, "all_gather_object"), (torch.distributed, "barrier"), (torch.cuda, "synchronize")

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            on_hosts = options.get("group") is hosts
            waits.append(f"{name} on hosts" if on_hosts else name)
            return function(*arguments, **options)

        return run

    with cuda_on_cpu(), on_gpu(GPUS[rank]), ExitStack() as stack:
        hosts = torch.distributed.new_group(backend="gloo")
        stack.enter_context(patch.object(ranks, "_hosts", (torch.distributed.group.WORLD, hosts)))
        engines = [StubEngine("ipc", GPUS[:2], policy)] if rank == 0 else []
        sender = sender_of("ipc", policy, engines, rank=rank)
        for owner, name in collectives:
            stack.enter_context(patch.object(owner, name, noted(name, getattr(owner, name))))
        sender.send(1)
        for engine in engines:
            assert_has_weights(engine, policy, 1)
    return waits


def test_send_over_ipc_waits_on_the_hosts_after_the_bucket_of_each_rank_is_complete() -> None:
    for waits, _ in run_ranks(_waits_of_send_over_ipc):
        own = [wait for wait in waits if wait != "synchronize"]
        assert own == ["all_gather_object on hosts", "barrier on hosts"] * 2 + ["barrier on hosts"]
        for place, wait in enumerate(waits):
            assert not wait.startswith("all_gather") or waits[place - 1] == "synchronize"


@pytest.mark.usefixtures("communicators")
def test_send_over_ipc_gathers_the_next_bucket_while_an_engine_loads_a_bucket() -> None:
    policy, passed = make_policy(), []

    class Layers(ModuleWeightSource):
        """A source with memory for one tensor, as for one layer of a sharded model."""

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in super().__iter__():
                passed.append(name)
                gathered = tensor.clone()
                yield name, gathered
                gathered.fill_(-1)

    class SlowEngine(StubEngine):
        def update_weights(self, update_info: Any) -> None:
            if len(self.payloads.get("update_weights", [])) == 0:
                wait_until(lambda: passed == names, "the gather of the tensors of the next bucket", 60)
            super().update_weights(update_info)

    # The embedding fills the first bucket.
    names = [name for name, _ in policy.named_parameters()]
    engine = SlowEngine("ipc", GPUS[:1], policy)
    with on_gpu(GPUS[0]), closing(sender_of("ipc", policy, [engine], Layers)) as sender:
        for version in (1, 2):
            passed.clear()
            engine.payloads.clear()
            sender.send(version)
            assert [payload["names"] for payload in engine.payloads["update_weights"]] == [names[:1], names[1:]]
            assert_has_weights(engine, policy, version)


def test_source_ahead_gathers_at_most_a_bucket_and_keeps_the_order() -> None:
    class Counted(ModuleWeightSource):
        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in super().__iter__():
                passed.append(name)
                yield name, tensor

    passed: list[str] = []
    policy = torch.nn.Sequential(*(torch.nn.Linear(2, 4, bias=False) for _ in range(6)))
    names = [name for name, _ in policy.named_parameters()]
    source = SourceAhead(Counted(policy))
    for _ in range(2):
        passed.clear()
        weights = iter(source)
        assert next(weights)[0] == names[0]
        # A tensor has 32 bytes.
        source.gather(64)
        assert passed == names[:3]
        source.gather(64)
        assert passed == names[:3]
        assert [name for name, _ in weights] == names[1:]
        source.gather(64)


def test_send_over_ipc_ends_on_all_ranks_if_an_engine_is_lost() -> None:
    (calls, _), _ = run_ranks(_send_over_ipc, [GPUS[:1], GPUS[1:2]], 1, timeout_s=30)
    assert calls[1] == ["init_weight_transfer_engine", "start_weight_update", "update_weights"]


def test_vllm_rollout_closes_the_sender_after_a_loss_at_the_end_and_for_another_policy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sender that stays open keeps the communicator of its group, and the memory of the communicator on each GPU."""
    rollout = VLLMRollout(VLLMConfig("model", device="cuda", transport="nccl"))
    monkeypatch.setattr(rollout._fleet, "drop_lost", lambda: 1)
    closed: list[str] = []
    for call in ("start", "wait_until_ready", "each"):
        monkeypatch.setattr(rollout._fleet, call, lambda *_: None)
    begin = partial(rollout.connect, 0, 1)
    for name, end in (("loss", rollout.drop_lost_engines), ("end", rollout.close), ("another policy", begin)):
        sender: Any = SimpleNamespace(close=lambda name=name: closed.append(name))
        rollout._sender = sender
        end()
        assert rollout._sender is None
    assert closed == ["loss", "end", "another policy"]


def test_cuda_weight_client_takes_an_engine_without_an_answer_for_lost() -> None:
    lost = []

    class Fleet:
        config = VLLMConfig("model", device="cuda", update_timeout_s=7)

        def begin(self, engine: int, method: str, *, timeout_s: float, phase: str, must_answer: bool) -> Any:
            def wait() -> None:
                raise DeadlineExceeded(f"waited {timeout_s:g} s in {phase}")

            return wait

        def mark_lost(self, engine: int, *, silent: bool, cause: Exception) -> EngineLost:
            lost.append((engine, silent))
            return EngineLost(f"engine {engine} is lost")

    fleet: Any = Fleet()
    with pytest.raises(EngineLost, match="engine 3 is lost"):
        CudaWeightClient(fleet, 3).start_weight_update()
    assert lost == [(3, True)]


@for_each(("transport", "must_answer"), [("ipc", True), ("nccl", False)])
def test_cuda_weight_client_asks_no_engine_for_an_answer_while_nccl_sends_all_weights(
    transport: str, must_answer: bool
) -> None:
    asked: dict[str, bool] = {}

    class Fleet:
        config = VLLMConfig("model", device="cuda", transport=transport)

        def begin(self, engine: int, method: str, *arguments: Any, must_answer: bool, **options: Any) -> Any:
            asked[method] = must_answer
            return lambda: None

    fleet: Any = Fleet()
    client = CudaWeightClient(fleet, 0)
    client.start_weight_update()
    client.update_weights({})
    client.finish_weight_update()
    expected = {"start_weight_update": True, "update_weights": must_answer, "finish_weight_update": True}
    assert asked == expected
