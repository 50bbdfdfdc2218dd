"""Optimizers of trained models: each model's optimizer, its states, and checks for ZeRO and FSDP2."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor, nn
from torch.optim import Muon, Optimizer

from rl_plugins.errors import ConfigError
from rl_plugins.models.muon import MuonAndAdamW


def optimizers_of(models: Mapping[str, nn.Module], optimizers: Sequence[Optimizer]) -> dict[str, Optimizer]:
    """Return the optimizer of each trained model.

    Raises:
        ConfigError: a model has several optimizers.
    """
    trained = {}
    for name, model in models.items():
        parameters = {id(p) for p in model.parameters()}
        own = [o for o in optimizers if any(id(p) in parameters for group in o.param_groups for p in group["params"])]
        if len(own) > 1:
            raise ConfigError(
                f"model {name!r} has {len(own)} optimizers: return one optimizer for each model in configure_optimizers"
            )
        if own:
            trained[name] = own[0]
    return trained


def optimizer_states(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the tensors of an optimizer's states."""
    return (value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))


def library_of(optimizer: Optimizer) -> str:
    """Return the top package of the optimizer's class, such as `torch`."""
    return type(optimizer).__module__.partition(".")[0]


def check_optimizer_of_zero(optimizer: Optimizer) -> None:
    """Check an optimizer for flat pieces of all parameters, which ZeRO gives to an optimizer.

    Raises:
        ConfigError: the optimizer needs whole parameters.
    """
    if isinstance(optimizer, Muon | MuonAndAdamW):
        raise ConfigError("Muon needs whole matrices, which ZeRO cuts into flat pieces: use RayFSDPStrategy")
    if library_of(optimizer) == "torchao":
        raise ConfigError(
            f"torchao's {type(optimizer).__name__} has states of full size under ZeRO, which cuts parameters into flat "
            "pieces: use RayFSDPStrategy, or bitsandbytes.optim.AdamW8bit"
        )


def check_optimizer_of_fsdp(optimizer: Optimizer) -> None:
    """Check an optimizer for DTensors, the shards of FSDP2.

    Raises:
        ConfigError: the optimizer's kernels refuse DTensors.
    """
    if library_of(optimizer) == "bitsandbytes":
        raise ConfigError(
            f"bitsandbytes' {type(optimizer).__name__} refuses DTensors, the shards of FSDP2: use "
            "torchao.optim.AdamW8bit, or RayZeroStrategy"
        )
