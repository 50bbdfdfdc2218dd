"""Release of memory that DeepSpeed keeps: engines after the end of the strategy, and gathered parameters.

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


def release_gathered(engine: Any) -> None:
    """Release all parameters that DeepSpeed has gathered, also the small parameters that stay between passes.

    Args:
        engine: engine of a model. Only an engine of ZeRO-3 gathers parameters.
    """
    optimizer: Any = getattr(engine, "optimizer", None)
    if hasattr(optimizer, "empty_partition_cache"):
        optimizer.empty_partition_cache()


def release_in_flight(engine: Any) -> None:
    """Release all gathered parameters if DeepSpeed gathers some of the parameters ahead.

    A pass without gradient is the beginning of a recorded training step, so DeepSpeed already gathers parameters for
    the backward pass, which does not follow. Such a parameter cannot be read or partitioned.

    Args:
        engine: engine of a model under ZeRO-3.
    """
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    if any(parameter.ds_status == ZeroParamStatus.INFLIGHT for parameter in engine.module.parameters()):
        release_gathered(engine)
