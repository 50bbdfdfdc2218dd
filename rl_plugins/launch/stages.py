"""The stages that a recipe can name: how each is built, and on what data. Imports what is heavy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hydra.utils import instantiate

from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.config.models import RewardModelConfig
from rl_plugins.config.recipe import RecipeConfig
from rl_plugins.config.sampling import EnvironmentConfig, SamplingConfig
from rl_plugins.data.datamodule import PromptDataModule, StepDataModule
from rl_plugins.data.preferences import PreferenceDataModule
from rl_plugins.data.process_rewards import ProcessRewardDataModule
from rl_plugins.data.sft import SFTDataModule
from rl_plugins.data.tokenization import check_same_tokens
from rl_plugins.launch.trials import training_data
from rl_plugins.models.pool import ModelPool
from rl_plugins.stages.critic_pool import CriticPool
from rl_plugins.stages.policy_optimization import PolicyOptimization
from rl_plugins.stages.preference_optimization import OnlinePreferenceOptimization, PreferenceOptimization
from rl_plugins.stages.process_rewards import ProcessRewardConfig
from rl_plugins.stages.reward_modeling import RewardModeling
from rl_plugins.stages.sampling import greedy
from rl_plugins.stages.scoring import Scorer
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


# Stages ---------------------------------------------------------------------------------------------------------


def _common(config: RecipeConfig, tokenizer: Any) -> dict[str, Any]:
    return {
        "tokenizer": tokenizer,
        "tokens_per_micro_batch": config.batch.tokens_per_micro_batch,
        "packing": config.batch.packing,
        "optimizer": config.optimizer,
        "gradient_checkpointing": config.model.gradient_checkpointing,
        "lora": config.model.lora,
        "max_steps": config.run.steps,
    }


def _sampling(config: RecipeConfig, tokenizer: Any) -> SamplingConfig:
    return SamplingConfig(
        **vars(config.sampling),
        num_samples=config.batch.samples_per_prompt,
        stop_token_ids=(tokenizer.eos_token_id,),
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
    return {
        **_validating(config, tokenizer, scorer),
        "sampling": _sampling(config, tokenizer),
        "algorithm": algorithm,
        "reference": config.reference.path,
        "teacher": config.teacher.path,
        "critic": config.critic,
        "reward_model": RewardModelConfig(**vars(model), max_failure_rate=config.reward.max_failure_rate)
        if model.path
        else None,
        "schedule": config.schedule,
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
    return PromptDataModule(train, curriculum=config.data.curriculum, **options)


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
