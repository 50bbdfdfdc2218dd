"""Fake cuda device for machines without a GPU: tensors of the CPU with the device `cuda:0`.

Inside `FakeCuda`, code computes real numbers, an operation over tensors of both devices raises, and `waits` has the
operations with a wait of the host for the GPU. A copy to the GPU waits, too, unless the copy is `non_blocking` and from
pinned memory. FakeTensorMode would need a device guard for cuda for gradients, and builds of torch for the CPU have no
such guard.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)

_aten = torch.ops.aten
_BETWEEN_DEVICES = {_aten.copy_.default, _aten._to_copy.default, _aten.set_.source_Storage}
_INDEXED = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default}
_WAITS = {
    _aten._local_scalar_dense.default,
    _aten.nonzero.default,
    _aten.masked_select.default,
    _aten.repeat_interleave.Tensor,
    _aten.unique_dim.default,
    _aten._unique2.default,
    _aten.equal.default,
}
_DEVICE, _IS_CUDA = (vars(torch._C.TensorBase)[name].__get__ for name in ("device", "is_cuda"))
_MOVES = {Tensor.to, Tensor.cpu, Tensor.cuda}
_FROM_DATA = {torch.tensor, Tensor.new_tensor}


class FakeCuda(TorchFunctionMode):
    """Context with `device="cuda"` as a separate device.

    Attributes:
        waits: names of the operations with a wait of the host for the fake GPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self._devices = _Devices(self.waits)
        # The storages are kept: no other storage gets their address.
        self._pinned: dict[int, torch.UntypedStorage] = {}
        # A Hopper without memory in use, and with the random state of the CPU.
        self._driver = mock.patch.multiple(
            torch.cuda,
            current_device=lambda: 0,
            current_stream=lambda device=None: mock.Mock(),
            device_count=lambda: 1,
            empty_cache=lambda: None,
            get_device_capability=lambda device=None: (9, 0),
            get_rng_state=lambda device=None: torch.get_rng_state(),
            max_memory_allocated=lambda device=None: 0,
            mem_get_info=lambda device=None: (80 * 2**30, 80 * 2**30),
            memory_allocated=lambda device=None: 0,
            reset_peak_memory_stats=lambda device=None: None,
            set_rng_state=lambda state, device=None: torch.set_rng_state(state),
            synchronize=lambda device=None: None,
        )

    def __enter__(self) -> FakeCuda:
        """Start the checks of devices."""
        self._driver.start()
        self._devices.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        """End the checks of devices."""
        super().__exit__(*raised)
        self._devices.__exit__(*raised)
        self._driver.stop()

    def device_of(self, tensor: Tensor) -> torch.device:
        """Return the device of a tensor, also below the functions of torch, where `tensor.device` is the CPU."""
        return self._devices.of(tensor)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer questions about devices, and make and move tensors on the CPU."""
        kwargs, devices = dict(kwargs or {}), self._devices
        if func == _DEVICE:
            return devices.of(args[0])
        if func == _IS_CUDA:
            return devices.of(args[0]).type == "cuda"
        if func in (Tensor.tolist, Tensor.numpy) and devices.of(args[0]).type == "cuda":
            self.waits.append(func.__name__)
            if func is Tensor.numpy:
                raise TypeError("can't convert cuda:0 device type tensor to numpy")
        if func in _MOVES:
            return self._move(func, *args, **kwargs)
        if func is Tensor.pin_memory:
            return self._pin(args[0])
        device = kwargs.pop("device", devices.of(args[0]) if func is Tensor.new_tensor else None)
        made = func(*args, **kwargs)
        is_new = isinstance(made, Tensor) and not any(isinstance(leaf, Tensor) for leaf in tree_leaves((args, kwargs)))
        if device is not None or is_new:
            devices.put(made, CPU if device is None else _whole(device))
        if func in _FROM_DATA and devices.of(made).type == "cuda":
            self.waits.append(func.__name__)
        return made

    def _pin(self, tensor: Tensor) -> Tensor:
        if self._devices.of(tensor).type == "cuda":
            raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
        pinned = tensor.clone()
        storage = pinned.untyped_storage()
        self._pinned[storage._cdata] = storage
        return pinned

    def _move(self, func: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        before, non_blocking = self._devices.of(tensor), bool(kwargs.get("non_blocking", False))
        if func is not Tensor.to:
            device, dtype = (CPU if func is Tensor.cpu else CUDA), tensor.dtype
        elif args and isinstance(args[0], Tensor):
            device, dtype = self._devices.of(args[0]), args[0].dtype
        else:
            copy = kwargs.pop("copy", False)
            found, kind, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
            device, dtype = before if found is None else _whole(found), kind or tensor.dtype
            kwargs["copy"] = copy
        if before == device:
            return tensor.to(dtype, copy=kwargs.get("copy", False))
        is_queued = device == CPU or tensor.untyped_storage()._cdata in self._pinned
        if not (non_blocking and is_queued):
            self.waits.append(f"to {device.type}")
        moved = tensor.to(dtype, copy=True)
        self._devices.put(moved, device)
        return moved


class _Devices(TorchDispatchMode):
    """Device of each tensor. Tensors with shared memory share their device."""

    def __init__(self, waits: list[str]) -> None:
        super().__init__()
        self._waits = waits
        # The storages are kept: no other storage gets their address.
        self._known: dict[int, tuple[torch.UntypedStorage, torch.device | None]] = {}

    def of(self, tensor: Tensor) -> torch.device:
        return self._find(tensor) or CPU

    def put(self, tensor: Tensor, device: torch.device | None) -> None:
        storage = tensor.untyped_storage()
        self._known[storage._cdata] = storage, device

    def _find(self, tensor: Tensor) -> torch.device | None:
        """Return None for a tensor made by torch inside an operation: such a tensor fits any device."""
        return self._known.get(tensor.untyped_storage()._cdata, (None, CPU))[1]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        devices = {self._find(tensor) for tensor in tensors if tensor.ndim} - {None}
        if func in _INDEXED:
            # Indices may be on the host, and are then copied to the GPU.
            devices = {self._find(args[0])} - {None}
        if len(devices) > 1 and func not in _BETWEEN_DEVICES:
            raise RuntimeError(f"{func}: expected all tensors to be on the same device, but found cuda:0 and cpu")
        on_gpu = CUDA in {self._find(tensor) for tensor in tensors}
        indices = [index for index in args[1] if index is not None] if func in _INDEXED else []
        reads_index = any(index.dtype == torch.bool or self._find(index) == CPU for index in indices)
        if on_gpu and (func in _WAITS or reads_index):
            self._waits.append(str(func))
        result = func(*args, **kwargs)
        shared = {tensor.untyped_storage()._cdata for tensor in tensors}
        device = self._find(args[0]) if func in _BETWEEN_DEVICES else CUDA if on_gpu else CPU if devices else None
        for made in tree_leaves(result):
            if isinstance(made, Tensor) and made.untyped_storage()._cdata not in shared:
                self.put(made, device)
        if func in _BETWEEN_DEVICES or not on_gpu:
            return result
        # A tensor made by torch inside an operation gets the device of the first operation that uses the tensor.
        for tensor in tensors:
            if tensor.ndim and self._find(tensor) is None:
                self.put(tensor, CUDA)
        return result


def _whole(device: torch.device | str | int) -> torch.device:
    found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    return CUDA if found.type == "cuda" else found
