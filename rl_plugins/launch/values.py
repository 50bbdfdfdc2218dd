"""What the schema's types cannot say: which words an option knows, and in which range a number lies."""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

from rl_plugins.errors import ConfigError
from rl_plugins.launch.config import RecipeConfig, rollout_sleep
from rl_plugins.launch.duration import seconds_of
from rl_plugins.rollout.vllm.config import check_adapter
from rl_plugins.stages.schedule import Schedule

SAMPLING_STAGES = ("policy_optimization", "prime", "online_preference_optimization")
"""Stages that train on samples of their own."""
COLLECTING_STAGES = ("policy_optimization", "prime")
"""Those of them that make experience."""
GIVEN_RESPONSE_STAGES = ("reward_modeling", "preference_optimization")
"""Stages whose training rows hold preferences or labels in place of a reward."""
STAGES = ("sft", *GIVEN_RESPONSE_STAGES, *SAMPLING_STAGES)


def generates(config: RecipeConfig) -> bool:
    """Whether the stage samples from its model, to train on it or to validate; a reward model says nothing."""
    return config.stage != "reward_modeling"


def needs_engine(config: RecipeConfig) -> bool:
    """Whether there is a rollout engine; what is replayed is not sampled."""
    return generates(config) and config.debug.replay is None


POOLS = ("reward_model", "teacher", "reference", "critic")
"""Models that may have a pool of processes; all but the critic are frozen."""

_CHOICES: dict[str, tuple[Any, ...]] = {
    "stage": STAGES,
    "launcher": ("ray", "local"),
    "rollout.engine": ("vllm", "transformers"),
    "rollout.dtype": (None, "float32", "bfloat16", "float16"),
    "rollout.sleep": (None, "kv_cache", "all", "none"),
    "rollout.lora": ("merged", "adapter"),
    "rollout.transport": ("auto", "shared_memory", "gloo", "ipc", "nccl"),
    "placement.device": ("auto", "cpu", "cuda"),
    "placement.rollout": ("colocated", "split"),
    "placement.strategy": ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"),
    "strategy.name": ("zero", "fsdp"),
    "strategy.zero_stage": (1, 2, 3),
    "model.precision": ("32-true", "bf16-true", "bf16-mixed"),
    "data.overlong_prompts": ("filter", "error"),
    "run.export_lora": ("merged", "adapter"),
    "run.best_mode": ("max", "min"),
    "guard.action": ("warn", "stop", "roll_back"),
}

# Written so that NaN is in no range.
_RANGES: tuple[tuple[str, Callable[[Any], bool], tuple[str, ...]], ...] = (
    (
        "must be at least 1",
        lambda value: value >= 1,
        (
            "run.steps", "run.checkpoint_every", "run.keep_checkpoints", "data.max_prompt_tokens",
            "data.eval_batch_size", "batch.prompts_per_step", "batch.samples_per_prompt",
            "batch.tokens_per_micro_batch", "batch.updates_per_step", "batch.passes_per_step",
            "sampling.max_tokens", "environment.max_turns", "environment.max_observation_tokens",
            "validation.samples_per_prompt", "rollout.max_num_seqs",
            "rollout.cpu_kv_cache_gib", "rollout.tensor_parallel_size", "rollout.bucket_mb", "reward.num_workers",
            "placement.num_workers", "strategy.tensor_parallel", "strategy.sequence_parallel", "guard.reward_window",
        ),
    ),
    (
        "must be above 0",
        lambda value: value > 0,
        (
            "rollout.ready_timeout_s", "rollout.generate_timeout_s", "rollout.stall_timeout_s",
            "rollout.update_timeout_s", "reward.deadline_s",
            "strategy.collective_timeout_s", "placement.cpus_per_worker", "model.lora.alpha", "critic.lora.alpha",
            "placement.engine_cpus", *(f"placement.{name}.deadline_s" for name in POOLS),
        ),
    ),
    (
        "must be 0 or more",
        lambda value: value >= 0,
        (
            "run.seed", "run.eval_every", "run.keep_best", "guard.max_rollbacks", "debug.dump_rollouts",
            "reference.update_every", "critic.warmup_steps", "critic.optimizer.lr",
            "rollout.check_updates", "model.lora.rank", "critic.lora.rank",
            "sampling.temperature", "validation.temperature", "optimizer.lr", "optimizer.weight_decay",
            "optimizer.warmup_steps", "optimizer.decay_steps", "optimizer.lr_end", "optimizer.gradient_clip",
            "placement.gpus_per_worker", "placement.engine_gpus", "placement.max_restarts", "tracking.samples",
            "tracking.traces", "tracking.upload_best", "placement.wait_for_nodes_s",
            *(f"placement.{name}.{part}" for name in POOLS for part in ("actors", "cpus", "gpus")),
        ),
    ),
    (
        "must be above 0 and at most 1",
        lambda value: 0 < value <= 1,
        ("sampling.top_p", "validation.top_p", "rollout.gpu_memory_utilization"),
    ),
    (
        "must be from 0 to below 1",
        lambda value: 0 <= value < 1,
        ("model.lora.dropout", "critic.lora.dropout", "average.keep", "data.curriculum.share", "data.curriculum.keep"),
    ),
    (
        "must be all-linear, a list of layers' names, or a regular expression",
        lambda value: bool(value) and isinstance(value, str | list) and all(isinstance(name, str) for name in value),
        ("model.lora.target_modules", "critic.lora.target_modules"),
    ),
    (
        "must be above 0, or null",
        lambda value: value is None or value > 0,
        (
            "guard.kl", "guard.ppo_kl", "guard.entropy_min", "guard.entropy_max", "guard.rollout_gap",
            "guard.gradient_norm", "guard.reward_drop", "placement.peak_tflops",
        ),
    ),
    ("must be between 0 and 1", lambda value: 0 <= value <= 1, ("reward.max_failure_rate",)),
    ("must be at least 1, or -1 to keep all", lambda value: value == -1 or value >= 1, ("sampling.top_k",)),
    (
        "must be two numbers from 0 to below 1",
        lambda value: len(value) == 2 and all(0 <= beta < 1 for beta in value),
        ("optimizer.betas",),
    ),
)  # fmt: skip


def check_values(config: RecipeConfig) -> None:
    """Check every option that has a list of words or a range.

    Raises:
        ConfigError: names the option, its value and what it may be.
    """
    for option, known in _CHOICES.items():
        value = attrgetter(option)(config)
        if value not in known:
            words = ", ".join("null" if word is None else str(word) for word in known)
            raise ConfigError(f"{option}={value}: use one of {words}")
    for demand, holds, options in _RANGES:
        for option in options:
            value = attrgetter(option)(config)
            if not holds(value):
                raise ConfigError(f"{option}={value}: {demand}")
    if config.validation.samples_per_prompt > 1 and config.validation.temperature == 0:
        raise ConfigError(
            f"validation.samples_per_prompt={config.validation.samples_per_prompt} with validation.temperature=0 gives "
            "the same response every time: give validation.temperature a value, such as 1"
        )
    engines, workers = config.rollout.engines, config.placement.num_workers
    if engines != "per_worker" and not (isinstance(engines, int) and engines >= 1):
        raise ConfigError(f"rollout.engines={engines}: use per_worker, or a number of at least 1")
    if config.launcher == "local" and config.rollout.engine == "vllm":
        raise ConfigError("launcher=local runs in one process, without Ray and vLLM: add rollout.engine=transformers")
    if config.strategy.name == "fsdp" and config.strategy.zero_stage != 3:
        raise ConfigError(
            f"strategy.zero_stage={config.strategy.zero_stage}: FSDP2 always shards parameters, as stage 3 does: leave "
            "it out, or use strategy.name=zero"
        )
    tensor_parallel = config.strategy.tensor_parallel
    if tensor_parallel > 1 and config.strategy.name != "fsdp":
        raise ConfigError(f"strategy.tensor_parallel={tensor_parallel}: ZeRO cuts no blocks: add strategy.name=fsdp")
    sequence_parallel = config.strategy.sequence_parallel
    if min(tensor_parallel, sequence_parallel) > 1:
        raise ConfigError(
            f"strategy.tensor_parallel={tensor_parallel} and strategy.sequence_parallel={sequence_parallel} do not go "
            "together: set one of them to 1"
        )
    for option, size in (("tensor_parallel", tensor_parallel), ("sequence_parallel", sequence_parallel)):
        if workers % size:
            raise ConfigError(f"strategy.{option}={size} does not divide placement.num_workers={workers}: change one")
    _check_data(config)
    _check_schedule(config)
    _check_lora(config)
    _check_registration(config)
    _check_best(config)
    _check_debug(config)
    _check_pools(config)
    if config.run.time_limit is not None:
        seconds_of("run.time_limit", config.run.time_limit)


def _check_schedule(config: RecipeConfig) -> None:
    schedule = config.schedule
    Schedule(**vars(schedule))
    if not (schedule.max_staleness or schedule.ahead):
        return
    chosen = f"schedule.max_staleness={schedule.max_staleness}"
    if schedule.ahead:
        chosen += f", schedule.ahead={schedule.ahead:g}"
    if config.stage not in COLLECTING_STAGES:
        raise ConfigError(f"{chosen}: is of {' and '.join(COLLECTING_STAGES)}, and not of {config.stage}")
    if config.rollout.engine == "vllm" and schedule.max_staleness and rollout_sleep(config) != "none":
        raise ConfigError(
            f"{chosen} has engines sample while the workers train, and rollout.sleep={config.rollout.sleep} has them "
            "sleep then: leave rollout.sleep out"
        )
    if config.debug.replay:
        raise ConfigError(f"{chosen} with debug.replay={config.debug.replay}: what is replayed is not sampled")


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
    if not generates(config):
        raise ConfigError(f"tracking.register_as={name}: stage={config.stage} makes no policy: leave it out")
    if not name or set(name) & set("/:@"):
        raise ConfigError(f"tracking.register_as={name}: a name without / : and @")


def _check_best(config: RecipeConfig) -> None:
    if config.run.keep_best and config.run.best_metric.startswith("val/") and not validates(config):
        raise ConfigError(
            f"run.keep_best={config.run.keep_best} goes by run.best_metric={config.run.best_metric}, and nothing is "
            "validated: name data.val_files and run.eval_every, or a metric of training such as train/reward"
        )
    if config.tracking.upload_best > config.run.keep_best:
        raise ConfigError(
            f"tracking.upload_best={config.tracking.upload_best} is more than run.keep_best={config.run.keep_best}, "
            "the best checkpoints that there are: raise run.keep_best"
        )


def _check_debug(config: RecipeConfig) -> None:
    debug = config.debug
    for option, value in {"debug.dump_rollouts": debug.dump_rollouts, "debug.replay": debug.replay}.items():
        if value and config.stage not in COLLECTING_STAGES:
            raise ConfigError(f"{option}={value}: is of {' and '.join(COLLECTING_STAGES)}, and not of {config.stage}")
    if debug.replay and validates(config):
        raise ConfigError(f"debug.replay={debug.replay} samples nothing, nor can it validate: add run.eval_every=0")
    if debug.replay and not Path(debug.replay).is_dir():
        raise ConfigError(f"debug.replay={debug.replay}: there is no such folder; it is `rollouts` of a run's folder")


def _check_pools(config: RecipeConfig) -> None:
    models = {
        "reward_model": config.reward_model.path,
        "teacher": config.teacher.path,
        "reference": config.model.path,
        "critic": config.model.path,
    }
    for name in POOLS:
        pool = getattr(config.placement, name)
        option = f"placement.{name}.actors={pool.actors}"
        if not pool.actors:
            continue
        if config.launcher == "local":
            raise ConfigError(f"{option}: launcher=local runs in one process: use launcher=ray, or leave it out")
        if config.stage not in COLLECTING_STAGES:
            raise ConfigError(f"{option}: is of {' and '.join(COLLECTING_STAGES)}, and not of {config.stage}")
        if models[name] is None:
            raise ConfigError(f"{option}, and there is no such model: name it with {name}.path, or leave the pool out")
    if config.placement.reference.actors and config.reference.update_every:
        raise ConfigError(
            f"placement.reference.actors={config.placement.reference.actors}: a reference that follows the policy "
            f"(reference.update_every={config.reference.update_every}) moves in the training workers: leave one out"
        )
    if config.placement.critic.actors and config.strategy.offload.critic in ("cpu", "nvme"):
        raise ConfigError(
            f"placement.critic.actors={config.placement.critic.actors}: a critic with processes of its own keeps its "
            f"states there: leave strategy.offload.critic={config.strategy.offload.critic} out"
        )


def validates(config: RecipeConfig) -> bool:
    """Whether the run validates at all."""
    return bool(config.data.val_files) and config.run.eval_every > 0


def _check_data(config: RecipeConfig) -> None:
    data = config.data
    others = [option for option in ("train_files", "dataset") if getattr(data, option)]
    if data.mixture and others:
        raise ConfigError(f"data.mixture and data.{others[0]} both name the training data: leave one of them out")
    for name, part in data.mixture.items():
        if not part.files:
            raise ConfigError(f"data.mixture.{name}.files is empty: name one or more parquet files")
        if not (part.weight > 0 and math.isfinite(part.weight)):
            raise ConfigError(f"data.mixture.{name}.weight={part.weight}: must be above 0")
    share = data.curriculum.share
    if share and config.stage not in SAMPLING_STAGES:
        raise ConfigError(f"data.curriculum.share={share}: stage={config.stage} has no rewards to see: leave it at 0")
    if share and config.batch.samples_per_prompt < 2:
        raise ConfigError(
            f"data.curriculum.share={share} goes by how rewards vary among the samples of a prompt: raise "
            "batch.samples_per_prompt to 2 or more"
        )


def _check_lora(config: RecipeConfig) -> None:
    ranks = {"model.lora.rank": config.model.lora.rank}
    if not config.placement.critic.actors:
        ranks["critic.lora.rank"] = config.critic.lora.rank
    for option, rank in ranks.items():
        if rank and config.strategy.tensor_parallel > 1:
            raise ConfigError(f"{option}={rank}: blocks with adapters are not cut: use strategy.tensor_parallel=1")
    if config.rollout.lora == "adapter":
        check_adapter(config.model.lora.rank, rollout_sleep(config))
    if config.model.lora.rank == 0:
        if config.run.export_lora == "adapter":
            raise ConfigError("run.export_lora=adapter, and there is no adapter: give model.lora.rank a value")
    elif config.reference.update_every and config.reference.path in (None, config.model.path):
        raise ConfigError(
            f"reference.update_every={config.reference.update_every} moves the reference towards the policy, and with "
            "model.lora.rank the reference is the policy with its adapter off: leave reference.update_every at 0"
        )
