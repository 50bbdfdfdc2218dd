"""RL post-training of language models as plugins for Lightning, Ray Train, DeepSpeed and vLLM.

What a project needs for RL is here by name (`import rl_plugins as rl`, then `rl.PolicyOptimization`), and is
loaded when first used: importing this package loads nothing heavy.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_MODULES = {
    "Algorithm": "algorithms.algorithm",
    "CurriculumConfig": "data.curriculum",
    "EnvironmentConfig": "stages.environment",
    "FSDPStrategy": "strategies.fsdp",
    "InlineScorer": "rewards.inline",
    "MixturePart": "data.orders",
    "OptimizerConfig": "stages.optimizer",
    "PolicyOptimization": "stages.policy_optimization",
    "PromptDataModule": "data.datamodule",
    "RayFSDPStrategy": "strategies.ray",
    "RayZeroStrategy": "strategies.ray",
    "RewardPool": "rewards.pool",
    "SFT": "stages.sft",
    "SFTDataModule": "data.sft",
    "SamplingConfig": "rollout.engine",
    "SingleDeviceRolloutStrategy": "strategies.single_device",
    "TransformersRollout": "rollout.transformers_engine",
    "VLLMConfig": "rollout.vllm.config",
    "VLLMRollout": "rollout.vllm.client",
    "ZeroStrategy": "strategies.zero",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
