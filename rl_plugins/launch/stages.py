"""The stages that a recipe can name: how each is built, and on what data. Imports what is heavy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hydra.utils import instantiate

from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.data.datamodule import PromptDataModule, StepDataModule
from rl_plugins.data.preferences import PreferenceDataModule
from rl_plugins.data.process_rewards import ProcessRewardDataModule
from rl_plugins.data.sft import SFTDataModule
from rl_plugins.data.tokenization import check_same_tokens
from rl_plugins.launch.config import RecipeConfig
from rl_plugins.launch.options.models import LoraOptions, OptimizerOptions
from rl_plugins.launch.trials import curriculum_config, training_data
from rl_plugins.models.lora import LoraConfig
from rl_plugins.models.pool import ModelPool
from rl_plugins.rewards.environment import EnvironmentConfig
from rl_plugins.rollout.engine import SamplingConfig
from rl_plugins.stages.critic import CriticConfig
from rl_plugins.stages.critic_pool import CriticPool
from rl_plugins.stages.optimizer import OptimizerConfig
from rl_plugins.stages.policy_optimization import PolicyOptimization
from rl_plugins.stages.preference_optimization import OnlinePreferenceOptimization, PreferenceOptimization
from rl_plugins.stages.process_rewards import ProcessRewardConfig
from rl_plugins.stages.reward_modeling import RewardModeling
from rl_plugins.stages.sampling import greedy
from rl_plugins.stages.schedule import Schedule
from rl_plugins.stages.scoring import RewardModelConfig, Scorer
from rl_plugins.stages.sft import SFT
from rl_plugins.stages.stage import Stage


def build_stage(config: RecipeConfig, tokenizer: Any, scorer: Scorer | None, pools: Sequence[ModelPool] = ()) -> Stage:
    """The stage that `config.stage` names.

    Args:
        config: the run's.
        tokenizer: the policy's.
        scorer: gives each sample its reward.
        pools: models that run in processes of their own.
    """
    stage = _STAGES[config.stage](config, tokenizer, scorer)
    for pool in pools:
        # A stage loads no model that it has.
        setattr(stage, pool.config.role, pool)
        if not isinstance(pool, CriticPool):
            check_same_tokens(tokenizer, pool.config.model, pool.config.role.replace("_", " "))
            stage.further_metrics.append(pool.metrics)
    return stage


def build_data(config: RecipeConfig, tokenizer: Any) -> StepDataModule[Any]:
    """The data module of the stage."""
    data = config.data
    return _DATA[config.stage](
        config,
        training_data(config),
        {
            "validation": list(data.val_files) or None,
            "tokenizer": tokenizer,
            "prompts_per_step": config.batch.prompts_per_step * _oversampling(config),
            "eval_batch_size": data.eval_batch_size,
            "overlong_prompts": data.overlong_prompts,
            "seed": config.run.seed,
            "max_prompt_tokens": data.max_prompt_tokens,
        },
    )


def optimizer_config(options: OptimizerOptions) -> OptimizerConfig:
    """The settings of an optimizer."""
    return OptimizerConfig(**(vars(options) | {"betas": tuple(options.betas)}))


def lora_config(options: LoraOptions) -> LoraConfig | None:
    """The settings of an adapter; None where the model itself is trained."""
    return LoraConfig(**vars(options)) if options.rank else None


# Stages ---------------------------------------------------------------------------------------------------------


def _common(config: RecipeConfig, tokenizer: Any) -> dict[str, Any]:
    return {
        "tokenizer": tokenizer,
        "tokens_per_micro_batch": config.batch.tokens_per_micro_batch,
        "packing": config.batch.packing,
        "optimizer": optimizer_config(config.optimizer),
        "gradient_checkpointing": config.model.gradient_checkpointing,
        "lora": lora_config(config.model.lora),
        "max_steps": config.run.steps,
    }


def _sampling(config: RecipeConfig, tokenizer: Any) -> SamplingConfig:
    return SamplingConfig(
        max_tokens=config.sampling.max_tokens,
        num_samples=config.batch.samples_per_prompt,
        temperature=config.sampling.temperature,
        top_p=config.sampling.top_p,
        top_k=config.sampling.top_k,
        stop_token_ids=(tokenizer.eos_token_id,),
        stop=tuple(config.sampling.stop),
    )


def _validating(config: RecipeConfig, tokenizer: Any, scorer: Scorer | None) -> dict[str, Any]:
    """What stages need that validate by generation."""
    options = config.validation
    eval_sampling = replace(
        greedy(_sampling(config, tokenizer)),
        num_samples=options.samples_per_prompt,
        temperature=options.temperature,
        top_p=options.top_p,
    )
    return {
        **_common(config, tokenizer),
        "scorer": scorer,
        "eval_sampling": eval_sampling,
        "environment": EnvironmentConfig(**vars(config.environment)),
        "seed": config.run.seed,
    }


def _sft(config: RecipeConfig, tokenizer: Any, scorer: Scorer | None) -> Stage:
    return SFT(config.model.path, **_validating(config, tokenizer, scorer))


def _policy_optimization_options(config: RecipeConfig, tokenizer: Any, scorer: Scorer | None) -> dict[str, Any]:
    algorithm: Algorithm = instantiate(config.algorithm, _convert_="all")
    model = config.reward_model
    critic = config.critic
    return {
        **_validating(config, tokenizer, scorer),
        "sampling": _sampling(config, tokenizer),
        "algorithm": algorithm,
        "reference": config.reference.path,
        "teacher": config.teacher.path,
        "critic": CriticConfig(
            critic.path, optimizer_config(critic.optimizer), critic.warmup_steps, lora_config(critic.lora)
        ),
        "reward_model": RewardModelConfig(model.path, model.weight, model.rule_weight, config.reward.max_failure_rate)
        if model.path
        else None,
        "schedule": Schedule(**vars(config.schedule)),
        "updates_per_step": config.batch.updates_per_step,
        "passes_per_step": config.batch.passes_per_step,
    }


def _policy_optimization(config: RecipeConfig, tokenizer: Any, scorer: Scorer | None) -> Stage:
    return PolicyOptimization(config.model.path, **_policy_optimization_options(config, tokenizer, scorer))


def _prime(config: RecipeConfig, tokenizer: Any, scorer: Scorer | None) -> Stage:
    options = _policy_optimization_options(config, tokenizer, scorer)
    process_reward_model = instantiate(config.process_reward_model, _convert_="all") or ProcessRewardConfig()
    return PolicyOptimization(config.model.path, process_reward_model=process_reward_model, **options)


def _reward_modeling(config: RecipeConfig, tokenizer: Any, scorer: Scorer | None) -> Stage:
    return RewardModeling(
        config.model.path,
        loss=config.loss.name or "bradley_terry",
        loss_options=config.loss.options,
        **_common(config, tokenizer),
    )


def _preference_options(config: RecipeConfig, tokenizer: Any, scorer: Scorer | None) -> dict[str, Any]:
    return {
        **_validating(config, tokenizer, scorer),
        "loss": config.loss.name or "dpo",
        "loss_options": config.loss.options,
        "reference": config.reference.path,
    }


def _preference_optimization(config: RecipeConfig, tokenizer: Any, scorer: Scorer | None) -> Stage:
    return PreferenceOptimization(config.model.path, **_preference_options(config, tokenizer, scorer))


def _online_preference_optimization(config: RecipeConfig, tokenizer: Any, scorer: Scorer | None) -> Stage:
    return OnlinePreferenceOptimization(
        config.model.path,
        sampling=_sampling(config, tokenizer),
        updates_per_step=config.batch.updates_per_step,
        **_preference_options(config, tokenizer, scorer),
    )


_STAGES: dict[str, Callable[[RecipeConfig, Any, Scorer | None], Stage]] = {
    "sft": _sft,
    "policy_optimization": _policy_optimization,
    "prime": _prime,
    "reward_modeling": _reward_modeling,
    "preference_optimization": _preference_optimization,
    "online_preference_optimization": _online_preference_optimization,
}

# Data -----------------------------------------------------------------------------------------------------------


def _oversampling(config: RecipeConfig) -> int:
    node = config.algorithm if isinstance(config.algorithm, dict) else {}
    group_filter = node.get("group_filter") or {}
    return int(group_filter.get("oversampling", 1)) if config.stage in ("policy_optimization", "prime") else 1


def _prompts(config: RecipeConfig, train: Any, options: dict[str, Any]) -> StepDataModule[Any]:
    curriculum = curriculum_config(config) if config.data.curriculum.share else None
    return PromptDataModule(train, curriculum=curriculum, **options)


def _responses(config: RecipeConfig, train: Any, options: dict[str, Any]) -> StepDataModule[Any]:
    return SFTDataModule(
        train, response_key=config.data.response_key, max_response_tokens=config.sampling.max_tokens, **options
    )


def _pairs(config: RecipeConfig, train: Any, options: dict[str, Any]) -> StepDataModule[Any]:
    data = config.data
    return PreferenceDataModule(
        train,
        chosen_key=data.chosen_key,
        rejected_key=data.rejected_key,
        margin_key=data.margin_key,
        label_key=data.label_key,
        response_key=data.response_key,
        validate_on="pairs" if config.stage == "reward_modeling" else "prompts",
        max_response_tokens=config.sampling.max_tokens,
        **options,
    )


def _labelled(config: RecipeConfig, train: Any, options: dict[str, Any]) -> StepDataModule[Any]:
    """Pairs, or steps with labels, as the loss of the reward model asks for."""
    if config.loss.name != "process_reward":
        return _pairs(config, train, options)
    return ProcessRewardDataModule(
        train,
        steps_key=config.data.steps_key,
        labels_key=config.data.labels_key,
        max_response_tokens=config.sampling.max_tokens,
        **options,
    )


_DATA: dict[str, Callable[[RecipeConfig, Any, dict[str, Any]], StepDataModule[Any]]] = {
    "sft": _responses,
    "policy_optimization": _prompts,
    "prime": _prompts,
    "reward_modeling": _labelled,
    "preference_optimization": _pairs,
    "online_preference_optimization": _prompts,
}
