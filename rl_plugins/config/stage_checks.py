"""Checks of options against the stage and the engine: an option without an effect, or without its input, is refused."""

from __future__ import annotations

from pathlib import Path

from rl_plugins.config.recipe import COLLECTING_STAGES, SAMPLING_STAGES, RecipeConfig
from rl_plugins.errors import ConfigError


def check_stage_options(config: RecipeConfig) -> None:
    """Check that the stage and the engine of the run have a use for the options.

    Raises:
        ConfigError: an option has no effect, or its metric does not exist. The message names the option, and the way
            out.
    """
    for check in (
        _check_models,
        _check_conversations,
        _check_passes,
        _check_samples,
        _check_sampling,
        _check_engine,
        _check_registration,
        _check_best,
        _check_target,
        _check_debug,
    ):
        check(config)


def needs_collecting(config: RecipeConfig, option: str) -> None:
    """Refuse an option in a stage without an experience maker.

    Args:
        config: configuration of the run.
        option: option as `name=value`, for the message.

    Raises:
        ConfigError: the stage has no use for the option.
    """
    if config.stage not in COLLECTING_STAGES:
        raise ConfigError(
            f"{option}: is for the stages {' and '.join(COLLECTING_STAGES)}, not for {config.stage}: leave it out"
        )


def _check_models(config: RecipeConfig) -> None:
    paths = {
        "reward_model.path": config.reward_model.path,
        "cost_model.path": config.cost_model.path,
        "teacher.path": config.teacher.path,
        "teacher.paths": config.teacher.paths,
        "teacher.update_every": config.teacher.update_every,
    }
    for option, value in paths.items():
        if value:
            needs_collecting(config, f"{option}={value}")
    every = config.reference.update_every
    if every and config.stage in ("sft", "reward_modeling"):
        raise ConfigError(f"reference.update_every={every}: stage={config.stage} has no reference: leave it out")


def _check_conversations(config: RecipeConfig) -> None:
    data = config.data
    for_sft = {
        f"data.messages_key={data.messages_key}": data.messages_key is not None,
        "data.split_conversations=true": data.split_conversations,
    }
    for option, is_set in for_sft.items():
        if is_set and config.stage != "sft":
            raise ConfigError(f"{option}: is for stage=sft, not for {config.stage}: leave it out")
    if data.validate_on != "prompts" and config.stage not in ("sft", "preference_optimization"):
        raise ConfigError(
            f"data.validate_on={data.validate_on}: is for stage=sft and stage=preference_optimization, not for "
            f"{config.stage}: leave it out"
        )
    if data.split_conversations and data.messages_key is None:
        raise ConfigError(
            "data.split_conversations=true: splits whole conversations: name their column with data.messages_key, or "
            "leave it out"
        )


def _check_passes(config: RecipeConfig) -> None:
    updates = config.batch.updates_per_step
    if updates > 1 and config.stage not in SAMPLING_STAGES:
        raise ConfigError(
            f"batch.updates_per_step={updates}: stage={config.stage} takes one optimizer step of all rows of a step: "
            "lower batch.prompts_per_step, or leave batch.updates_per_step out"
        )
    if config.batch.passes_per_step > 1:
        needs_collecting(config, f"batch.passes_per_step={config.batch.passes_per_step}")


def _check_samples(config: RecipeConfig) -> None:
    samples, sampling = config.batch.samples_per_prompt, config.sampling
    if config.stage == "online_preference_optimization" and samples < 2:
        raise ConfigError(
            f"batch.samples_per_prompt={samples}: a pair needs at least two responses to a prompt: raise it to 2 or "
            "more"
        )
    # A stateful environment or an agent may lead equal policies to different responses.
    is_alike = sampling.temperature == 0 and config.debug.replay is None and not config.environment.scores_itself
    if config.stage in SAMPLING_STAGES and samples > 1 and is_alike:
        raise ConfigError(
            f"batch.samples_per_prompt={samples} with sampling.temperature=0 gives the same response every time: give "
            "sampling.temperature a value, such as 1"
        )


def _check_sampling(config: RecipeConfig) -> None:
    sampling = config.sampling
    if sampling.vllm and config.rollout.engine != "vllm":
        raise ConfigError(
            f"sampling.vllm.{next(iter(sampling.vllm))}: rollout.engine={config.rollout.engine} has no such argument: "
            "use rollout.engine=vllm, or leave it out"
        )
    if sampling.stop and config.rollout.engine == "transformers" and config.needs_engine:
        raise ConfigError(
            "sampling.stop: rollout.engine=transformers stops at tokens only: use sampling.stop_token_ids, or "
            "rollout.engine=vllm"
        )
    if config.rollout.vllm.get("speculative_config") and (sampling.min_p or "logit_bias" in sampling.vllm):
        raise ConfigError(
            "rollout.vllm.speculative_config: vLLM takes no sampling.min_p and no sampling.vllm.logit_bias with "
            "speculative decoding: leave it out, or leave out both"
        )
    least = sampling.vllm.get("min_tokens", 0)
    if least > sampling.max_tokens:
        raise ConfigError(
            f"sampling.vllm.min_tokens={least} is more than sampling.max_tokens={sampling.max_tokens}: lower it"
        )


def _check_engine(config: RecipeConfig) -> None:
    if config.rollout.engine != "transformers":
        return
    if config.placement.rollout == "split":
        raise ConfigError(
            "placement.rollout=split: rollout.engine=transformers samples in the training workers: leave it out, or "
            "use rollout.engine=vllm"
        )
    if config.rollout.engines is not None:
        raise ConfigError(
            f"rollout.engines={config.rollout.engines}: rollout.engine=transformers is in every training worker: leave "
            "rollout.engines out, or use rollout.engine=vllm"
        )


def _check_registration(config: RecipeConfig) -> None:
    name = config.tracking.register_as
    if name is None:
        return
    needed = {
        "tracking.enabled=true": config.tracking.enabled,
        "run.export=true": config.run.export,
        "run.export_lora=merged": config.run.export_lora == "merged",
    }
    for option, holds in needed.items():
        if not holds:
            raise ConfigError(f"tracking.register_as={name} registers the exported policy: it needs {option}")
    if not config.generates:
        raise ConfigError(f"tracking.register_as={name}: stage={config.stage} makes no policy: leave it out")
    if not name or set(name) & set("/:@"):
        raise ConfigError(f"tracking.register_as={name}: use a name without / : and @")


def _check_best(config: RecipeConfig) -> None:
    keep, metric = config.run.keep_best, config.run.best_metric
    if keep and metric.startswith("val/") and not config.validates:
        raise ConfigError(
            f"run.keep_best={keep} needs run.best_metric={metric}, and the run does not validate: name data.val_files "
            "and run.eval_every, or a metric of training such as train/reward"
        )
    if keep and metric == "val/reward" and not config.generates:
        raise ConfigError(
            f"run.keep_best={keep}: stage={config.stage} has no run.best_metric={metric}: use "
            "run.best_metric=val/accuracy, or run.best_metric=val/loss with run.best_mode=min"
        )
    if keep and metric.endswith("loss") and config.run.best_mode == "max":
        raise ConfigError(
            f"run.keep_best={keep}: the best run.best_metric={metric} is the smallest: use run.best_mode=min"
        )
    if keep and metric == "val/loss" and config.generates and not config.validates_on_responses:
        raise ConfigError(
            f"run.keep_best={keep}: there is no run.best_metric={metric} with data.validate_on=prompts: use "
            "run.best_metric=val/reward, or data.validate_on=responses in SFT and preference_optimization"
        )
    if keep and metric == "val/reward" and config.validates_on_responses:
        raise ConfigError(
            f"run.keep_best={keep}: data.validate_on=responses has no run.best_metric={metric}: use "
            "run.best_metric=val/loss with run.best_mode=min"
        )
    if config.tracking.upload_best > keep:
        raise ConfigError(
            f"tracking.upload_best={config.tracking.upload_best} is more than run.keep_best={keep}, the number of best "
            "checkpoints: raise run.keep_best"
        )


def _check_target(config: RecipeConfig) -> None:
    if config.run.target_reward is None:
        return
    option = f"run.target_reward={config.run.target_reward:g}"
    if not config.generates:
        raise ConfigError(f"{option}: stage={config.stage} has no val/reward: leave it out")
    if config.validates_on_responses:
        raise ConfigError(f"{option}: data.validate_on=responses has no val/reward: leave one of the two out")
    if not config.validates:
        raise ConfigError(
            f"{option} ends the run after a validation, and the run does not validate: name data.val_files and "
            "run.eval_every, or use run.target_reward=null"
        )


def _check_debug(config: RecipeConfig) -> None:
    debug = config.debug
    for option, value in {"debug.dump_rollouts": debug.dump_rollouts, "debug.replay": debug.replay}.items():
        if value:
            needs_collecting(config, f"{option}={value}")
    if debug.replay and config.validates:
        raise ConfigError(
            f"debug.replay={debug.replay}: a run on replayed samples cannot validate: add run.eval_every=0"
        )
    if debug.replay and not Path(debug.replay).is_dir():
        raise ConfigError(f"debug.replay={debug.replay}: there is no such folder; name `rollouts` of a run's folder")
