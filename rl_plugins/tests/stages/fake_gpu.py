"""Stages with training on a fake GPU, alone or as ranks with a whole model each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from typing_extensions import override

from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.tests.fake_cuda import CUDA, FakeCuda
from rl_plugins.tests.models.plain_varlen import plain_varlen
from rl_plugins.tests.nccl_tensors import NcclTensors
from rl_plugins.tests.stages import canned


class FakeGpu(CPUAccelerator):
    """Accelerator for Lightning's training on `cuda:0` of a machine without a GPU."""

    @override
    def setup_device(self, device: torch.device) -> None:
        assert device == CUDA

    @staticmethod
    @override
    def name() -> str:
        return CUDA.type


class Observed(NamedTuple):
    """Observations of training on a fake GPU.

    Attributes:
        collectives: names of the collectives; see `NcclTensors`.
        waits: names of the operations with a wait of the host for the GPU; see `FakeCuda`.
    """

    collectives: list[str]
    waits: list[str]


@contextmanager
def training_on_fake_gpu() -> Iterator[Observed]:
    """Let strategies of one process, and trainers of `canned.quiet_trainer`, use a fake GPU inside the block.

    Ranks of `canned.AllReduceStrategy` have a fake GPU each, and communicate only tensors that NCCL takes.
    """
    quiet_trainer = canned.quiet_trainer

    def on_fake_gpu(strategy: Any, **options: Any) -> Trainer:
        return quiet_trainer(strategy, **{**options, "accelerator": FakeGpu()})

    with ExitStack() as stack:
        # The checks of devices see one thread, and transformers would load weights in others.
        stack.enter_context(patch.dict(os.environ, HF_DEACTIVATE_ASYNC_LOAD="1"))
        stack.enter_context(patch.object(SingleDeviceRolloutStrategy.__init__, "__defaults__", ("cuda",)))
        stack.enter_context(patch.object(canned, "quiet_trainer", on_fake_gpu))
        stack.enter_context(plain_varlen())
        gpu = stack.enter_context(FakeCuda())
        nccl = stack.enter_context(NcclTensors(gpu.device_of))
        yield Observed(nccl.collectives, gpu.waits)
