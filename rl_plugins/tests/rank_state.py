"""What a function may leave changed in the process that runs it, set back for the next function.

What a function patches, such as attributes of modules, it gives back itself.
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
from deepspeed.utils import groups
from torch.distributed import distributed_c10d

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class RankState:
    """The state of this process when the object was made."""

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._folder = os.getcwd()
        self._handlers = {number: signal.getsignal(number) for number in _SIGNALS}
        self._random: tuple[Any, Any, Any] = random.getstate(), np.random.get_state(), torch.get_rng_state()
        self._groups = set(distributed_c10d._world.pg_map)
        self._deepspeed = {key: _copied(value) for key, value in vars(groups).items() if not callable(value)}
        # Of what has been imported nothing will be garbage, and to look at it would copy the pages of the fork.
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
        # Engines, which know their groups, go first. What is left has been imported or is kept.
        gc.collect()
        gc.freeze()
        vars(groups).update({key: _copied(value) for key, value in self._deepspeed.items()})
        for group in [group for group in distributed_c10d._world.pg_map if group not in self._groups]:
            torch.distributed.destroy_process_group(group)


def _copied(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else value
