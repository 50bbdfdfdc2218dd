"""CUDA, CUDA IPC and NCCL on CPU, for vLLM's code of weight updates on both sides.

vLLM's trainer engines, workers, packing, IPC and communicators run without change. Only calls of drivers are replaced:
tensors on `cuda` are on the CPU, a stream waits only for its NCCL operations, files are the shared memory,
and a store carries the messages of NCCL. A thread is on one GPU, which has a made-up UUID. Training ranks and workers
of engines are threads or processes.

Example:
    with cuda_on_cpu():                                     # in every process
        engine = StubEngine("ipc", ["GPU-0"], policy)       # the engine with its workers, and the client of the engine
        with on_gpu("GPU-0"):                               # the training rank
            sender = make_cuda_sender(config, source, client=engine, rank=0)
            sender.send(1)
        engine.calls                                        # names of the calls, in their order
        engine.workers[0].model.weights()                   # the new weights

Several ranks: each function of `run_ranks` enters `cuda_on_cpu()` and `on_gpu(f"GPU-{rank}")`, and rank 0 has the
engines. A worker fails if it opens the memory of another GPU. `StubEngine.fail` lets a call fail before a worker takes
part; the operations of NCCL then wait until the communicator is aborted, as on a GPU.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import itertools
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.distributed import TCPStore
from torch.overrides import TorchFunctionMode
from vllm.config import VllmConfig, WeightTransferConfig
from vllm.distributed.device_communicators import pynccl
from vllm.distributed.device_communicators.pynccl_wrapper import ncclDataTypeEnum, ncclUniqueId
from vllm.distributed.weight_transfer import ipc_engine, packed_tensor
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading
from vllm.v1.worker.gpu_worker import Worker

from rl_plugins.rollout.vllm import plugin  # noqa: F401
from rl_plugins.rollout.vllm.config import VLLMConfig
from rl_plugins.tests.patience import patient

_HOST = "127.0.0.1"


# GPUs of threads --------------------------------------------------------------------------------------------------


class _Thread(threading.local):
    """The GPU, the current stream and the default stream of a thread."""

    gpu: str | None = None
    stream: _Stream | None = None
    default: _Stream | None = None


_thread = _Thread()


class _CudaOnCpu(TorchFunctionMode):
    """Make tensors of the device `cuda` on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


@contextmanager
def on_gpu(uuid: str) -> Iterator[None]:
    """Put the calling thread on a GPU.

    Args:
        uuid: made-up UUID of the GPU. Threads and processes with the same UUID share the GPU.
    """
    before, _thread.gpu = _thread.gpu, uuid
    try:
        with _CudaOnCpu():
            yield
    finally:
        _thread.gpu = before


def _properties(device: object = None) -> SimpleNamespace:
    assert _thread.gpu is not None, "the thread is on no GPU: enter on_gpu first"
    return SimpleNamespace(uuid=_thread.gpu)


class _Stream(threading.local):
    """A stream. Threads stand for processes: each thread has separate operations."""

    def __init__(self, device: object = None) -> None:
        self.cuda_stream = next(_numbers)
        self.pending: list[_Operation] = []
        self.waited_for: set[int] = set()
        _streams[self.cuda_stream] = self

    def synchronize(self) -> None:
        """Wait for the operations of NCCL."""
        while self.pending:
            self.pending.pop(0).wait()

    def wait_stream(self, other: _Stream) -> None:
        """Keep the number of the other stream."""
        self.waited_for.add(other.cuda_stream)


_numbers = itertools.count(1)
_streams: WeakValueDictionary[int, _Stream] = WeakValueDictionary()


def _default_stream(device: object = None) -> _Stream:
    if _thread.default is None:
        _thread.default = _Stream()
    return _thread.default


def _current_stream(device: object = None) -> _Stream:
    return _thread.stream or _default_stream()


@contextmanager
def _use_stream(stream: _Stream) -> Iterator[None]:
    before, _thread.stream = _thread.stream, stream
    try:
        yield
    finally:
        _thread.stream = before


# Memory between processes -----------------------------------------------------------------------------------------


class _SharedMemory:
    """Handles of CUDA IPC: a file is the memory, and its path is the handle."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def export(self, tensor: Tensor) -> tuple[None, tuple[Any, ...]]:
        """Replace `reduce_tensor`: move the memory of a tensor into a file, and return the handle."""
        path = self._folder / f"memory{next(_numbers)}"
        tensor.data = _mapped(str(path), tensor.nbytes, tensor.dtype, tensor.shape).copy_(tensor)
        # The seventh item is the index of the device, which vLLM overwrites.
        return None, (str(path), tensor.nbytes, tensor.dtype, tuple(tensor.shape), _thread.gpu, None, 0)

    @staticmethod
    def open(
        path: str, nbytes: int, dtype: torch.dtype, shape: Sequence[int], gpu: str, _: None, device: object
    ) -> Tensor:
        """Replace `rebuild_cuda_tensor`."""
        assert gpu == _thread.gpu, f"a worker on {_thread.gpu} opens memory of {gpu}"
        return _mapped(path, nbytes, dtype, shape)


def _mapped(path: str, nbytes: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Return a file as a tensor. A missing file is made."""
    return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8).view(dtype).view(*shape)


# NCCL -------------------------------------------------------------------------------------------------------------


class _Operation:
    """An operation with its end when all ranks take part, or when this rank aborts its communicator."""

    def __init__(self, communicator: _Communicator, name: str) -> None:
        self._communicator, self._name = communicator, name
        communicator.store.add(name, 1)

    def wait(self) -> None:
        communicator = self._communicator
        while communicator.store.add(self._name, 0) < communicator.world_size and not communicator.aborted.wait(0.001):
            pass


class _Communicator:
    """One rank of a group. A store carries the messages of ranks."""

    def __init__(self, port: int, rank: int, world_size: int) -> None:
        self.rank, self.world_size, self.aborted = rank, world_size, threading.Event()
        # A thread may come after the end of the group, and this process would wait for the thread.
        self.store = TCPStore(_HOST, port, is_master=False, timeout=timedelta(seconds=patient(30)))
        self._operations = itertools.count()
        self.join().wait()

    def join(self) -> _Operation:
        """Start an operation without data, such as the first sum of a new communicator."""
        return _Operation(self, f"operation {next(self._operations)}")

    def broadcast(self, address: int, nbytes: int, root: int) -> _Operation:
        """Start a broadcast of memory. A receiver has the data at once: on the CPU, vLLM's next line reads the data."""
        name = f"operation {next(self._operations)}"
        if self.rank == root:
            self.store.set(f"data of {name}", ctypes.string_at(address, nbytes))  # type: ignore[arg-type]
            return _Operation(self, name)
        while not self.store.check([f"data of {name}"]):
            if self.aborted.wait(0.001):
                return _Operation(self, name)
        ctypes.memmove(address, self.store.get(f"data of {name}"), nbytes)
        return _Operation(self, name)


class _NCCL:
    """The functions of NCCL's library called by vLLM's communicator."""

    communicators: ClassVar[list[_Communicator]] = []
    """Communicators of all threads of this process, except aborted ones."""

    def __init__(self, library: str | None = None) -> None:
        self._bytes_of = {number: dtype.itemsize for dtype, number in ncclDataTypeEnum._torch_to_nccl_map().items()}

    def ncclGetRawVersion(self) -> int:
        return 22907

    def ncclGetVersion(self) -> str:
        return "2.29.7"

    def ncclGetUniqueId(self) -> ncclUniqueId:
        store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
        _stores.append(store)
        unique_id = ncclUniqueId()
        for place, digit in enumerate(str(store.port).encode()):
            unique_id.internal[place] = digit
        return unique_id

    def unique_id_from_bytes(self, data: bytes) -> ncclUniqueId:
        return ncclUniqueId.from_buffer_copy(data)

    def ncclCommInitRank(self, world_size: int, unique_id: ncclUniqueId, rank: int) -> _Communicator:
        port = int(bytes(unique_id.internal).rstrip(b"\0"))
        communicator = _Communicator(port, rank, world_size)
        self.communicators.append(communicator)
        return communicator

    def ncclAllReduce(
        self, send: Any, receive: Any, count: int, dtype: int, op: int, comm: _Communicator, stream: Any
    ) -> None:
        _streams[stream.value].pending.append(comm.join())

    def ncclBroadcast(
        self, send: Any, receive: Any, count: int, dtype: int, root: int, comm: _Communicator, stream: Any
    ) -> None:
        assert not comm.aborted.is_set(), "the communicator is aborted"
        operation = comm.broadcast(receive.value, count * self._bytes_of[dtype], root)
        _streams[stream.value].pending.append(operation)

    def ncclCommAbort(self, comm: _Communicator) -> None:
        assert not comm.aborted.is_set(), "the communicator is aborted already"
        comm.aborted.set()
        if comm in self.communicators:
            self.communicators.remove(comm)


_stores: list[TCPStore] = []


@contextmanager
def cuda_on_cpu() -> Iterator[list[_Communicator]]:
    """Replace the calls of CUDA and NCCL in this process.

    Yields:
        Communicators of this process that are not aborted.
    """
    with ExitStack() as stack:
        memory = _SharedMemory(Path(stack.enter_context(TemporaryDirectory(prefix="cuda-ipc-"))))
        reductions = torch.multiprocessing.reductions
        stubs: dict[Any, dict[str, Any]] = {
            torch.accelerator: {
                # vLLM makes `cuda:N` of a number, and does not change a device.
                "current_device_index": lambda: torch.device("cpu"),
                "device_index": lambda device: nullcontext(),
                "synchronize": lambda device=None: _current_stream().synchronize(),
            },
            torch.cuda: {
                "Stream": _Stream,
                "stream": _use_stream,
                "current_stream": _current_stream,
                "default_stream": _default_stream,
                "synchronize": lambda device=None: None,
                "ipc_collect": lambda: None,
                "get_device_properties": _properties,
            },
            torch.Tensor: {"record_stream": lambda tensor, stream: None},
            reductions: {"reduce_tensor": memory.export, "rebuild_cuda_tensor": memory.open},
            ipc_engine: {"reduce_tensor": memory.export, "rebuild_cuda_tensor": memory.open},
            packed_tensor: {"reduce_tensor": memory.export},
            pynccl: {"NCCLLibrary": _NCCL, "current_stream": _current_stream},
        }
        for owner, replaced in stubs.items():
            for name, value in replaced.items():
                stack.enter_context(patch.object(owner, name, value))
        # vLLM keeps its streams.
        packed_tensor._get_streams.cache_clear()
        stack.callback(packed_tensor._get_streams.cache_clear)
        stack.callback(_stores.clear)
        stack.callback(_NCCL.communicators.clear)
        # Stores of earlier groups in wait for the garbage collection delay the connections of a new store.
        gc.collect()
        yield _NCCL.communicators


# Engines ----------------------------------------------------------------------------------------------------------


class StubModel(torch.nn.Module):
    """A copy of a module with other weights, which loads weights as vLLM's models do."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(module).requires_grad_(False)
        for parameter in self.module.parameters():
            parameter.zero_()

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            parameter = self.module.get_parameter(name)
            getattr(parameter, "weight_loader", _copy)(parameter, tensor)

    def weights(self) -> dict[str, Tensor]:
        """Return the weights by name."""
        return dict(self.module.named_parameters())


def _copy(param: Tensor, loaded_weight: Tensor) -> None:
    param.data.copy_(loaded_weight)


class StubWorker(Worker):
    """vLLM's worker on a GPU, with weight updates only.

    Args:
        transport: `ipc` or `nccl`.
        gpu: UUID of the worker's GPU.
        rank: number of the worker in its engine.
        world_size: number of workers of the engine.
        model: module with the names and shapes of the worker's model.
    """

    def __init__(self, transport: str, gpu: str, rank: int, world_size: int, model: torch.nn.Module) -> None:
        self.gpu, self.rank = gpu, rank
        self.vllm_config = VllmConfig()
        self.vllm_config.parallel_config = SimpleNamespace(  # type: ignore[assignment]
            rank=rank, world_size=world_size, data_parallel_index=0
        )
        self.model = StubModel(model)
        record_metadata_for_reloading(self.model)
        self.model_runner: Any = SimpleNamespace(reset_lora_state=lambda: None)
        self._weight_update_active = self._weight_update_is_draft = False
        arguments = VLLMConfig("model", device="cuda", transport=transport).engine_arguments()
        self.weight_transfer_engine = WeightTransferEngineFactory.create_engine(
            WeightTransferConfig(**arguments["weight_transfer_config"]),
            self.vllm_config,
            torch.device("cpu"),
            self.model,
        )


class StubEngine:
    """The actor of an engine with all workers, and vLLM's client of the engine in one. A call runs on all workers.

    Args:
        transport: `ipc` or `nccl`.
        gpus: UUID of the GPU of each worker.
        model: module with the names and shapes of the workers' models.

    Attributes:
        workers: workers in the order of their ranks.
        calls: names of the calls so far.
        payloads: first argument of each call with arguments, by name of the call.
    """

    def __init__(self, transport: str, gpus: Sequence[str], model: torch.nn.Module) -> None:
        self.workers = [StubWorker(transport, gpu, rank, len(gpus), model) for rank, gpu in enumerate(gpus)]
        self.calls: list[str] = []
        self.payloads: dict[str, list[Any]] = {}
        self.version: int | None = None
        self._failures: dict[str, BaseException] = {}

    def fail(self, method: str, error: BaseException) -> None:
        """Let the next call of a method raise, before a worker takes part."""
        self._failures[method] = error

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._each("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        # As in `VLLMActor`: a worker may have received all weights before the loss of another engine.
        for worker in self.workers:
            if worker._weight_update_active:
                with on_gpu(worker.gpu):
                    worker.finish_weight_update()
        self._each("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self._each("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._each("finish_weight_update")

    def set_policy_version(self, version: int) -> None:
        self.calls.append("set_policy_version")
        self.version = version

    def _each(self, method: str, *arguments: Any) -> None:
        self.calls.append(method)
        self.payloads.setdefault(method, []).extend(arguments)
        if method in self._failures:
            raise self._failures.pop(method)

        def call(worker: StubWorker) -> None:
            with on_gpu(worker.gpu):
                getattr(worker, method)(*arguments)

        with ThreadPoolExecutor(len(self.workers)) as threads:
            for result in [threads.submit(call, worker) for worker in self.workers]:
                result.result()
