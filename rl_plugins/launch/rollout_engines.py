"""Rollout engines of a recipe: `rollout.engine=vllm` in actors of Ray, or `transformers` in the training worker."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from rl_plugins.config.recipe import RecipeConfig
from rl_plugins.config.rollout import EngineOptions

if TYPE_CHECKING:
    from rl_plugins.rollout.transformers_engine import TransformersRollout
    from rl_plugins.rollout.vllm.client import VLLMRollout


def vllm_rollout(config: RecipeConfig) -> VLLMRollout:
    """Return the configured rollout engines. Ray must be initialized."""
    from rl_plugins.launch.placement import alive_nodes, engine_threads, weight_transport
    from rl_plugins.rollout.vllm.client import VLLMRollout
    from rl_plugins.rollout.vllm.config import VLLMConfig

    rollout, device, split = config.rollout, config.placement.device, config.placement.rollout == "split"
    hosts = len({node["NodeManagerAddress"] for node in alive_nodes()})
    options = {field.name: getattr(rollout, field.name) for field in fields(EngineOptions)}
    options["transport"] = weight_transport(rollout.transport, device, split=split, hosts=hosts)
    options |= config.engine_limits
    return VLLMRollout(
        VLLMConfig(
            model=config.model.path,
            device=device,
            dtype=config.rollout_dtype,
            max_model_len=config.data.max_prompt_tokens + config.sampling.max_tokens,
            threads=engine_threads(config, hosts),
            sleep=config.rollout_sleep,
            lora_rank=config.model.lora.rank if rollout.lora == "adapter" else 0,
            trust_remote_code=config.model.trust_remote_code,
            return_experts=config.model.router_replay == "rollout",
            **options,
        ),
        num_engines=config.num_engines,
        num_gpus=rollout.tensor_parallel_size if config.on_gpus else 0,
    )


def transformers_rollout(config: RecipeConfig, device: str) -> TransformersRollout | None:
    """Return the rollout engine of `rollout.engine=transformers`; None if the run needs no engine.

    Args:
        config: options of the run.
        device: `cpu` or `cuda`.
    """
    if not config.needs_engine:
        return None
    import torch

    from rl_plugins.rollout.transformers_engine import TransformersRollout

    dtype: torch.dtype = getattr(torch, config.rollout_dtype)
    return TransformersRollout(
        config.model.path,
        dtype=dtype,
        device=device,
        check_updates=config.rollout.check_updates,
        trust_remote_code=config.model.trust_remote_code,
        return_experts=config.model.router_replay == "rollout",
    )
