"""Release of DeepSpeed's engines: the memory of an engine is free after the end of the strategy.

DeepSpeed keeps engines alive. The hooks of an engine's gradients are in nodes of autograd, where the garbage collector
finds no cycle. Under stage 3, a list of the process and the cache of a method have the modules of each engine.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn


def release_with(strategy: object, engine: Any) -> None:
    """Release an engine when the garbage collector frees the strategy.

    Args:
        strategy: strategy with the engine. No part of the engine may refer to the strategy.
        engine: DeepSpeed's engine of a trained model, or of a frozen model under stage 3.
    """
    hooks = getattr(engine.optimizer, "_grad_acc_hooks", ())
    # The end of the process frees everything.
    weakref.finalize(strategy, _release, hooks, engine.module).atexit = False


def _release(hooks: Iterable[Any], module: nn.Module) -> None:
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK, PartitionedParameterCoordinator

    for hook in hooks:
        hook.remove()
    cells = PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release.__closure__
    for cached in [cell.cell_contents for cell in cells if hasattr(cell.cell_contents, "cache_clear")]:
        cached.cache_clear()
    # Another strategy may have added the module again.
    for index, other in enumerate(FWD_MODULE_STACK):
        if other is module:
            del FWD_MODULE_STACK[index]
            break
