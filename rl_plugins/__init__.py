"""RL post-training of language models as plugins for Lightning, Ray Train, DeepSpeed and vLLM.

`import rl_plugins as rl` offers every stage, strategy, callback and config record by name, such as
`rl.PolicyOptimization`. A name is loaded at its first use. The import of this package loads nothing heavy.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

PUBLIC: dict[str, dict[str, str]] = {
    "Stages": {
        "PolicyOptimization": "stages.policy_optimization",
        "SFT": "stages.sft",
        "PreferenceOptimization": "stages.preference_optimization",
        "OnlinePreferenceOptimization": "stages.preference_optimization",
        "RewardModeling": "stages.reward_modeling",
        "Stage": "stages.stage",
        "clock": "stages.clock",
        "step_metrics": "stages.clock",
        "OptimizerConfig": "config.models",
        "LoraConfig": "config.models",
        "CriticConfig": "config.models",
        "TeacherConfig": "config.models",
        "RewardModelConfig": "config.models",
        "ProcessRewardConfig": "stages.process_rewards",
        "Schedule": "config.sampling",
    },
    "Algorithms": {
        "Algorithm": "algorithms.algorithm",
        "KLConfig": "algorithms.regularization",
        "EntropyConfig": "algorithms.regularization",
        "LossModifiers": "algorithms.algorithm",
        "RewardShaping": "algorithms.reward_shaping",
        "OverlongPenalty": "algorithms.reward_shaping",
        "RolloutCorrection": "algorithms.rollout_correction",
        "Rejection": "algorithms.rollout_correction",
        "CostConstraint": "algorithms.constraint",
        "GroupFilter": "algorithms.filtering",
        "Resampling": "algorithms.filtering",
    },
    "Strategies": {
        "ZeroStrategy": "strategies.zero",
        "RayZeroStrategy": "strategies.ray",
        "FSDPStrategy": "strategies.fsdp",
        "RayFSDPStrategy": "strategies.ray",
        "SingleDeviceRolloutStrategy": "strategies.single_device",
        "Strategy": "strategies.contract",
        "PrivateTorchConfig": "process_group",
    },
    "Rollout": {
        "SamplingConfig": "config.sampling",
        "VLLMRollout": "rollout.vllm.client",
        "VLLMConfig": "rollout.vllm.config",
        "TransformersRollout": "rollout.transformers_engine",
    },
    "Data": {
        "PromptDataModule": "data.datamodule",
        "prompt_row": "data.parquet",
        "with_plain_template": "data.chat_template",
        "SFTDataModule": "data.sft",
        "PreferenceDataModule": "data.preferences",
        "ProcessRewardDataModule": "data.process_rewards",
        "MixturePart": "config.data",
        "CurriculumConfig": "config.data",
    },
    "Rewards": {
        "RewardPool": "rewards.pool",
        "InlineScorer": "rewards.inline",
        "WeightedSum": "rewards.mixing",
        "ModelReward": "rewards.model",
        "Judge": "rewards.judge",
        "JudgeConfig": "config.judge",
        "ScoringRequest": "rewards.records",
        "Score": "rewards.records",
    },
    "Sandbox": {
        "CodeSandbox": "sandbox.sandbox",
        "SandboxLimits": "sandbox.records",
        "SandboxResult": "sandbox.records",
        "SandboxError": "sandbox.records",
    },
    "Environments": {
        "EnvironmentConfig": "config.sampling",
        "ToolEnvironment": "environments.tools",
        "ToolResult": "environments.tool_functions",
        "StatefulEnvironment": "environments.stateful",
        "StepResult": "environments.step_result",
        "AgentEnvironment": "environments.agent",
    },
    "Callbacks": {
        "DivergenceGuard": "callbacks.divergence_guard",
        "Bounds": "config.run",
        "CompiledBlocks": "callbacks.compiled_blocks",
        "LigerKernels": "callbacks.liger_kernels",
        "RouterLosses": "callbacks.router_losses",
        "RolloutDump": "callbacks.rollout_dump",
        "RolloutReplay": "callbacks.rollout_dump",
        "ReferenceUpdate": "callbacks.averages",
        "PolicyAverage": "callbacks.averages",
        "PolicyCheckpoint": "callbacks.checkpoint",
        "BestCheckpoints": "callbacks.best_checkpoints",
        "CheckpointReference": "callbacks.checkpoint_artifacts",
        "RolloutTraces": "callbacks.samples",
        "Curves": "callbacks.report",
        "BestUpload": "callbacks.checkpoint_artifacts",
        "SystemMetrics": "callbacks.system_metrics",
        "GracefulStop": "callbacks.graceful_stop",
        "Throughput": "callbacks.throughput",
        "DataReport": "callbacks.progress",
        "SampleTable": "callbacks.samples",
        "RunReport": "callbacks.report",
        "StepProgress": "callbacks.progress",
        "TargetReward": "callbacks.target_reward",
    },
    "Tracking": {
        "JsonLinesLogger": "tracking.loggers",
        "MLflowTracking": "tracking.loggers",
        "RunDescription": "tracking.run",
        "RunFolder": "run_folder",
    },
    "Errors": {
        "UserError": "errors",
        "ConfigError": "errors",
        "DataError": "errors",
        "CheckpointError": "errors",
        "TrainingDiverged": "errors",
        "RewardError": "errors",
        "DeadlineExceeded": "errors",
    },
}
"""The public names and their modules, by the section of docs/api.md that describes them."""

_MODULES = {name: module for section in PUBLIC.values() for name, module in section.items()}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
