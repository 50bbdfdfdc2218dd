"""Section `cuda_ipc`: weights to a second process through CUDA IPC, by both ends of vLLM's `packed_tensor.py`.

The file needs torch alone. It is taken from an installed vLLM, or from a folder of PYTHONPATH.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterable, Mapping
from functools import partial
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from integration_tests.gpu.without_vllm.cases import Case, Place, Skipped

# Numbers of weights: 2 GiB in bfloat16, of which the embedding of Qwen2.5-0.5B is one tensor.
EMBEDDING, LAYER, LAYERS = 151_936 * 896, 2**24, 56
_ANSWER_TIMEOUT_S = 60.0
_MIB = 2**20


def cases(place: Place) -> Iterable[Case]:
    """Return a case for each size of the buffer, and the case of a tensor larger than the buffer."""
    yield Case("tensor above the buffer", lambda: check_large_tensor(place))
    for mib in (288, 512, 1024):
        yield Case(f"buffer of {mib} MiB", partial(send, place, mib * _MIB))


def check_large_tensor(place: Place) -> Mapping[str, Any]:
    """Check that vLLM refuses a tensor larger than the buffer, so that `make_cuda_sender` must know the largest."""
    packed = packed_tensor(place)
    tensor = torch.zeros(2 * _MIB, device="cuda", dtype=torch.uint8)
    try:
        list(packed.packed_ipc_producer(iter([("weight", tensor)]), _uuid(), lambda item: item[1], _MIB))
    except ValueError as error:
        return {"message": str(error).splitlines()[0]}
    raise AssertionError("vLLM sends a tensor that is larger than the buffer")


def send(place: Place, buffer_bytes: int) -> Mapping[str, Any]:
    """Send the weights twice, and compare the sums of all tensors in the other process.

    Returns:
        GB/s. The first time also starts CUDA in the other process.
    """
    packed = packed_tensor(place)
    tensors = {
        name: torch.randn(count, device="cuda", dtype=torch.bfloat16)
        for name, count in [("embedding", EMBEDDING), *((f"layer {i}", LAYER) for i in range(LAYERS))]
    }
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    receiver = context.Process(target=receive, args=(theirs, place), daemon=True)
    receiver.start()
    # With no other copy of its end, the pipe ends with the process.
    theirs.close()
    try:
        _answer(ours)
        rates = [_send_once(packed, ours, tensors, buffer_bytes) for _ in range(2)]
        ours.send(None)
        sums = _answer(ours)
    finally:
        receiver.kill()
        receiver.join()
    expected = {name: _sum(tensor) for name, tensor in tensors.items()}
    assert sums == expected, "the other process has other weights"
    return {"first_gb_per_s": rates[0], "gb_per_s": rates[1]}


def _send_once(packed: ModuleType, pipe: Connection, tensors: Mapping[str, Tensor], buffer_bytes: int) -> float:
    """Send all tensors; return GB/s."""
    start = time.perf_counter()
    for chunk in packed.packed_ipc_producer(iter(tensors.items()), _uuid(), lambda item: item[1], buffer_bytes):
        pipe.send(vars(chunk))
        _answer(pipe)
    return sum(tensor.nbytes for tensor in tensors.values()) / (time.perf_counter() - start) / 1e9


def receive(pipe: Connection, place: Place) -> None:
    """Receive chunks until None comes, and then answer with the sum of each tensor. The other process."""
    packed = packed_tensor(place)
    pipe.send("ready")
    importer, sums = packed.PackedBufferImporter(), {}
    while (chunk := pipe.recv()) is not None:
        for name, tensor in packed.packed_ipc_consumer(**chunk, device_index=0, importer=importer):
            sums[name] = _sum(tensor)
        pipe.send("received")
    importer.close()
    pipe.send(sums)


def packed_tensor(place: Place) -> ModuleType:
    """Import vLLM's file without vLLM.

    Raises:
        Skipped: there is no GPU or no file.
    """
    if not place.on_gpu:
        raise Skipped("CUDA IPC needs a GPU")
    spec = find_spec("packed_tensor")
    vllm = find_spec("vllm")
    if spec is None and vllm is not None and vllm.submodule_search_locations:
        file = Path(vllm.submodule_search_locations[0]) / "distributed" / "weight_transfer" / "packed_tensor.py"
        spec = spec_from_file_location("packed_tensor", file)
    if spec is None or spec.loader is None:
        raise Skipped("vLLM is not installed: put its distributed/weight_transfer/packed_tensor.py into PYTHONPATH")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _answer(pipe: Connection) -> Any:
    """Return the next message of the other process.

    Raises:
        AssertionError: the other process does not answer, or has ended.
    """
    assert pipe.poll(_ANSWER_TIMEOUT_S), f"the other process did not answer within {_ANSWER_TIMEOUT_S:g} s"
    try:
        return pipe.recv()
    except EOFError:
        raise AssertionError("the other process has ended: the end of this log has its error") from None


def _sum(tensor: Tensor) -> float:
    return float(tensor.double().sum())


def _uuid() -> str:
    return str(torch.cuda.get_device_properties(0).uuid)
