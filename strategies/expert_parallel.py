"""Expert parallelism: the experts of each layer are divided over a group of neighbouring ranks.

Stage, data and rollout engine need no change: each rank keeps its own samples, and all layers but the experts run on
the rank of the sample. The router chooses experts as before. Each token travels to the ranks of its experts and back
(all-to-all), and its own rank weighs the results. The exchange is that of transformers: `EpDispatchExpertsParallel`,
by the plan of the model family (`base_model_ep_plan`). FSDP2 shards the experts of a rank over the ranks with the same
experts, and all other parameters over all ranks.

An expert gets tokens from all ranks of a group, so its gradient on one rank is already the sum over the group. The sum
over the ranks with the same experts is therefore divided by the number of all ranks, as for all other parameters.

Source: GShard, arXiv 2006.16668.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers.distributed.tensor_parallel import apply_expert_parallelism, replace_layer_number_by_wildcard

from rl_plugins.errors import ConfigError
from rl_plugins.model_json import expert_count
from rl_plugins.models.lora import adapted_layers, has_adapter
from rl_plugins.vision_language import is_vision_language

SHARDS, EXPERTS = "expert_shards", "experts"
"""Dimensions of the mesh: ranks with the same experts, and ranks that share the experts of a layer."""
_EXCHANGE, _CUT = "ep_dispatch_experts", "grouped_gemm"
"""Styles of transformers: exchange of the tokens of a module, and a parameter cut along the axis of the experts."""


def expert_mesh(device_type: str, world_size: int, size: int) -> DeviceMesh:
    """Return the mesh of the ranks, in which `size` neighbouring ranks share the experts. Collective."""
    return init_device_mesh(device_type, (world_size // size, size), mesh_dim_names=(SHARDS, EXPERTS))


def divide_experts(model: nn.Module, name: str, mesh: DeviceMesh) -> list[nn.Module]:
    """Give each rank of a group its share of the experts, and let tokens travel between the ranks.

    Args:
        model: whole model on the device `meta`.
        name: name of the model, for errors.
        mesh: mesh of `expert_mesh`.

    Returns:
        The modules with experts, one for each layer; empty for a model without experts.

    Raises:
        ConfigError: see `experts_of`.
    """
    size = mesh.size(1)
    experts = experts_of(model, name, size)
    if experts:
        whole: Any = model.get_base_model() if has_adapter(model) else model
        # Each rank has its own samples, so no second mesh has ranks with equal tokens.
        apply_expert_parallelism(whole, mesh[EXPERTS], None, whole.ep_plan)  # type: ignore[arg-type]
    return list(experts.values())


def check_experts(models: Mapping[str, nn.Module], size: int) -> None:
    """Check the experts of all models before a model is sharded.

    Args:
        models: models by name. A model without experts is sharded over all ranks.
        size: number of ranks that share the experts of a layer.

    Raises:
        ConfigError: no model has experts; or see `experts_of`.
    """
    if not [key for name, model in models.items() for key in experts_of(model, name, size)]:
        raise ConfigError(f"expert_parallel={size}: no model has experts: set expert_parallel=1")


def experts_of(model: nn.Module, name: str, size: int) -> dict[str, nn.Module]:
    """Return the modules with experts, by name; none for a model without experts.

    Args:
        model: model of transformers, with or without an adapter.
        name: name of the model, for errors.
        size: number of ranks that share the experts of a layer.

    Raises:
        ConfigError: `size` does not divide the number of experts; or the family has no plan for the exchange of tokens,
            the model reads images, or experts have an adapter.
    """
    whole: Any = model.get_base_model() if has_adapter(model) else model
    number = expert_count(whole.config.get_text_config().to_dict()) if hasattr(whole, "config") else 0
    if not number:
        return {}
    way_out = f"set expert_parallel=1, or use another model for the {name}"
    if has_adapter(model) and any(not layer.endswith(".weight") for layer in adapted_layers(model)):
        raise ConfigError(
            f"expert_parallel={size}: the experts of the {name} have an adapter, which stays whole on each rank: leave "
            "experts out of the adapter, or set expert_parallel=1"
        )
    if number % size:
        raise ConfigError(
            f"expert_parallel={size}: {size} ranks cannot share the {number} experts of the {name}: {way_out}"
        )
    plan: dict[str, str] = getattr(whole, "ep_plan", {})
    found = {key: module for key, module in whole.named_modules() if plan.get(_in_plan(key)) == _EXCHANGE}
    whole_parameters = [
        f"{key}.{parameter}"
        for key, module in found.items()
        for parameter, _ in module.named_parameters()
        if plan.get(_in_plan(f"{key}.{parameter}")) != _CUT
    ]
    # Tokens of images have not been tried.
    if not found or whole_parameters or set(plan.values()) != {_EXCHANGE, _CUT} or is_vision_language(whole):
        raise ConfigError(f"{type(whole).__name__} has no plan for expert parallelism: {way_out}")
    return found


def divides_experts(model: nn.Module) -> bool:
    """Return True if the ranks share the experts of a sharded model."""
    meshes = [parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor)]
    return any(EXPERTS in (mesh.mesh_dim_names or ()) for mesh in meshes)


def shard_experts(experts: Sequence[nn.Module], mesh: DeviceMesh, options: dict[str, Any]) -> None:
    """Shard the experts of each rank over the ranks with the same experts. Call before their blocks are sharded.

    Args:
        experts: modules of `divide_experts`.
        mesh: mesh of `expert_mesh`.
        options: further options of `fully_shard`.
    """
    policy: MixedPrecisionPolicy = options["mp_policy"]
    # The weights of a token's experts keep the dtype of the router.
    options = {**options, "mp_policy": replace(policy, cast_forward_inputs=False)}
    for module in experts:
        sharded = fully_shard(module, mesh=mesh[SHARDS], **options)
        sharded.set_gradient_divide_factor(float(mesh.size()))
        if mesh.size(0) > 1:
            # Gloo has no sum that divides. On a single rank, FSDP2 would divide twice.
            sharded.set_force_sum_reduction_for_comms(True)


def _in_plan(name: str) -> str:
    wildcards: str = replace_layer_number_by_wildcard(name)
    return wildcards
