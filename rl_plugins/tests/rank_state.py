"""State of a process that a function may change, restored for the next function.

A function restores its own patches, such as attributes of modules. Process groups of a function stay, because torch
uses the operations of the old groups for tensors sharded over the same ranks in a later function.
"""

from __future__ import annotations

import gc
import os
import random
import signal
from typing import Any

import deepspeed
import numpy as np
import torch
from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
from torch.distributed import distributed_c10d

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class RankState:
    """The state of this process when the object was made."""

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._folder = os.getcwd()
        self._handlers = {number: signal.getsignal(number) for number in _SIGNALS}
        self._random: tuple[Any, Any, Any] = random.getstate(), np.random.get_state(), torch.get_rng_state()
        self._linear = torch.nn.functional.linear
        self._deadlines = distributed_c10d.default_pg_timeout, distributed_c10d.default_pg_nccl_timeout
        # No imported object becomes garbage, and a look at these objects would copy the pages of the fork.
        gc.freeze()

    def restore(self) -> None:
        """Set the process back."""
        assert not torch.is_autocast_enabled("cpu"), "the function has left autocast on"
        assert torch.is_grad_enabled(), "the function has left gradients off"
        assert torch.get_default_dtype() == torch.float32, "the function has left another default dtype"
        assert deepspeed.zero.partition_parameters.zero_init_context == 0, "the function has left zero.Init on"
        os.environ.clear()
        os.environ.update(self._environment)
        os.chdir(self._folder)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        python, numpy, default = self._random
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(default)
        torch.set_num_threads(1)
        distributed_c10d.default_pg_timeout, distributed_c10d.default_pg_nccl_timeout = self._deadlines
        # State left by stage 3 of ZeRO: a replaced function of torch, and the modules of its passes.
        torch.nn.functional.linear = self._linear
        FWD_MODULE_STACK.clear()
        # Engines of this function end. The other objects are imported or kept.
        gc.collect()
        gc.freeze()
