"""Stand-in for the checks of NCCL on machines without a GPU: gloo takes tensors that NCCL refuses.

NCCL takes contiguous tensors on the GPU of the rank, of some dtypes. Inside `NcclTensors`, any other tensor of a
collective raises, also inside FSDP2 and DTensor, and in gradients. The collectives still run over gloo, or over a group
without communication. Collectives of objects pass: under NCCL, torch puts the bytes of objects on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rl_plugins.tests.fake_cuda import CUDA

DTYPES = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8,
    torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
}  # fmt: skip
"""Dtypes of torch with a dtype of NCCL."""
_NAMESPACES = {"c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor"}
_WITHOUT_DATA = {"barrier", "monitored_barrier_", "wait_tensor"}
_OF_OBJECTS = (
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
)


class NcclTensors(TorchDispatchMode):
    """Context in which a collective raises for a tensor that NCCL refuses.

    Args:
        device_of: function that returns the device of a tensor, such as `FakeCuda.device_of`.

    Attributes:
        collectives: names of the collectives so far.
    """

    def __init__(self, device_of: Callable[[Tensor], torch.device] = lambda tensor: tensor.device) -> None:
        super().__init__()
        self.collectives: list[str] = []
        self._device_of = device_of
        self._with_objects = 0
        self._patches = ExitStack()

    def __enter__(self) -> NcclTensors:
        """Start the checks."""
        for name in _OF_OBJECTS:
            without_checks = self._without_checks(getattr(torch.distributed, name))
            self._patches.enter_context(patch.object(torch.distributed, name, without_checks))
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        """End the checks."""
        super().__exit__(*raised)
        self._patches.close()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Check the tensors of a collective, and run any operation."""
        kwargs = kwargs or {}
        name = func._schema.name.rpartition("::")[2]
        if func.namespace in _NAMESPACES and name not in _WITHOUT_DATA and not self._with_objects:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor):
                    self.check(name, leaf)
            self.collectives.append(name)
        return func(*args, **kwargs)

    def check(self, name: str, tensor: Tensor) -> None:
        """Raise if NCCL refuses a tensor.

        Args:
            name: name of the collective, for the message.
            tensor: tensor that is sent or received.

        Raises:
            AssertionError: if NCCL refuses the tensor.
        """
        device = self._device_of(tensor)
        if device != CUDA:
            raise AssertionError(f"{name}: NCCL takes tensors on {CUDA}, not on {device}")
        if tensor.dtype not in DTYPES:
            raise AssertionError(f"{name}: NCCL has no {tensor.dtype}")
        if not tensor.is_contiguous():
            raise AssertionError(f"{name}: NCCL takes contiguous tensors, not strides {tensor.stride()}")

    def _without_checks(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self._with_objects += 1
            try:
                return collective(*args, **kwargs)
            finally:
                self._with_objects -= 1

        return run
