"""Checks of options against each other. The range of a single option is beside its field."""

from __future__ import annotations

from operator import attrgetter

from rl_plugins.config.judge import check_deadline, judges_of, models_of_engines
from rl_plugins.config.models import RouterLossConfig
from rl_plugins.config.placement import CRITIC_POOLS, FROZEN, POOLS
from rl_plugins.config.precision import FLOAT16
from rl_plugins.config.recipe import GIVEN_RESPONSE_STAGES, SAMPLING_STAGES, RecipeConfig
from rl_plugins.config.rollout import ADAPTER_RANKS, ENGINE_GRACE_S, default_ready_timeout_s
from rl_plugins.config.stage_checks import needs_collecting
from rl_plugins.errors import ConfigError
from rl_plugins.extras import check_installed

_FOLLOWERS = ("reference", "teacher")
"""Models that can follow the policy."""
_WITHOUT_ZERO = {
    "strategy.tensor_parallel": "ZeRO has no tensor parallelism",
    "strategy.expert_parallel": "ZeRO has no expert parallelism",
    "strategy.workers_per_copy": "ZeRO shards one copy over all workers",
    "strategy.accumulate_shards": "stages 2 and 3 of ZeRO always accumulate shards",
}
"""Options that need FSDP2, and the reason."""
_PARTS = ("strategy.tensor_parallel", "strategy.expert_parallel")
_UNTRIED = {
    "model.compile": _PARTS,
    "model.liger": ("model.compile", *_PARTS),
    "model.float8": (
        "model.liger",
        *(f"{model}.lora.rank" for model in ("model", *CRITIC_POOLS)),
        *(f"placement.{model}.actors" for model in CRITIC_POOLS),
        *_PARTS,
    ),
    **dict.fromkeys(
        ("model.router_replay", "model.router_losses"),
        ("model.compile", "strategy.tensor_parallel", "strategy.sequence_parallel"),
    ),
    "model.lora.quantization": ("model.compile", "model.liger"),
    **{f"{of}.lora.quantization": ("model.compile", "model.liger", f"placement.{of}.actors") for of in CRITIC_POOLS},
    "average.keep": ("strategy.expert_parallel",),
}
"""Options, and the options that have not been tried with each of them."""
_EXCLUSIVE = {
    "strategy.workers_per_copy": ("strategy.tensor_parallel",),
    "strategy.tensor_parallel": ("strategy.sequence_parallel",),
    "strategy.expert_parallel": ("strategy.workers_per_copy", "strategy.tensor_parallel"),
}
"""Options, and the options that contradict each of them."""


def check_options(config: RecipeConfig) -> None:
    """Check the options of all groups against each other.

    Raises:
        ConfigError: two options contradict each other. The message names both, and the way out.
    """
    for check in (
        _check_validation,
        _check_launcher,
        _check_pairs,
        _check_kernels,
        _check_routes,
        _check_parallelism,
        _check_data,
        _check_schedule,
        _check_lora,
        _check_four_bits,
        _check_pools,
        _check_offload,
        _check_judges,
        _check_engine_deadlines,
    ):
        check(config)


def check_batch(config: RecipeConfig) -> None:
    """Check for equal shares of a step for all workers and all optimizer steps.

    Raises:
        ConfigError: a share is not a whole number. The message names the option, and the next number without this
            fault.
    """
    workers, batch = config.num_workers, config.batch
    if batch.prompts_per_step % workers:
        raise ConfigError(
            f"batch.prompts_per_step={batch.prompts_per_step} cannot be shared by {workers} workers: make it "
            f"{_next_multiple(batch.prompts_per_step, workers)}, or change placement.num_workers"
        )
    per_worker = batch.prompts_per_step // workers
    if config.stage in SAMPLING_STAGES and per_worker % batch.updates_per_step:
        fitting = _next_multiple(batch.prompts_per_step, workers * batch.updates_per_step)
        raise ConfigError(
            f"batch.updates_per_step={batch.updates_per_step} does not divide the {per_worker} prompts of each of "
            f"{workers} workers: make batch.prompts_per_step {fitting}, or change batch.updates_per_step"
        )


def check_device(config: RecipeConfig, device: str) -> None:
    """Check the options that need a GPU.

    Args:
        config: configuration of the run.
        device: device of the run, `cpu` or `cuda`.

    Raises:
        ConfigError: the kernels of Liger, 8-bit products, float16 under ZeRO, or the engine of a replay of routes, do
            not run on the device.
    """
    if device != "cpu":
        return
    if config.precision == FLOAT16 and config.launcher == "ray" and config.strategy.name == "zero":
        raise ConfigError(
            "model.precision=16-mixed: DeepSpeed trains in float16 on GPUs, and the run is on CPU: add "
            "strategy.name=fsdp, or use model.precision=32-true"
        )
    if config.model.float8:
        raise ConfigError(
            f"model.float8={config.model.float8}: 8-bit products run on GPUs, and the run is on CPU: leave it out"
        )
    if config.model.liger:
        raise ConfigError("model.liger=true: the kernels of Liger run on GPUs, and the run is on CPU: leave it out")
    if config.model.router_replay == "rollout" and config.rollout.engine == "vllm":
        raise ConfigError(
            "model.router_replay=rollout: vLLM returns experts on GPUs only, and the run is on CPU: use "
            "model.router_replay=recompute, or rollout.engine=transformers"
        )


def _check_validation(config: RecipeConfig) -> None:
    if config.validation.samples_per_prompt > 1 and config.validation.temperature == 0:
        raise ConfigError(
            f"validation.samples_per_prompt={config.validation.samples_per_prompt} with validation.temperature=0 gives "
            "the same response every time: give validation.temperature a value, such as 1"
        )


def _check_launcher(config: RecipeConfig) -> None:
    if config.launcher == "local" and config.rollout.engine == "vllm":
        raise ConfigError("launcher=local runs in one process, without Ray and vLLM: add rollout.engine=transformers")
    for option in (*_PARTS, "strategy.sequence_parallel", "strategy.workers_per_copy"):
        if config.launcher == "local" and (used := _option_in_use(config, option)):
            raise ConfigError(f"{used}: launcher=local runs in one process: leave it out, or use launcher=ray")
    if config.launcher == "ray" and not config.reward.num_workers:
        raise ConfigError(
            "reward.num_workers=0 calls rewards in the training process, where a reward can hang the run: set 1 or "
            "more, or debug with launcher=local"
        )


def _check_kernels(config: RecipeConfig) -> None:
    strategy, model = config.strategy, config.model
    gathers = config.launcher == "ray" and strategy.name == "zero" and strategy.zero_stage == 3
    if model.compile and gathers:
        raise ConfigError(
            "model.compile=true: torch.compile cannot follow the hooks in which ZeRO-3 gathers parameters: add "
            "strategy.zero_stage=2 or strategy.name=fsdp"
        )
    if model.liger:
        check_installed("liger_kernel", "liger", "model.liger=true")
    if model.float8:
        check_installed("torchao", "torchao", f"model.float8={model.float8}")
    if model.float8 and config.precision == FLOAT16:
        raise ConfigError(
            f"model.float8={model.float8}: products of 8 bits round more than bfloat16, so model.precision=16-mixed "
            "has no use: use bf16-mixed, or leave model.float8 out"
        )
    if model.float8 and gathers and not model.gradient_checkpointing:
        raise ConfigError(
            f"model.float8={model.float8}: from its forward pass to its backward pass, a layer with 8-bit products "
            "keeps the whole weight that ZeRO-3 has gathered: add model.gradient_checkpointing=true, "
            "strategy.zero_stage=2 or strategy.name=fsdp"
        )


def _check_routes(config: RecipeConfig) -> None:
    source = config.model.router_replay
    if source is not None:
        needs_collecting(config, f"model.router_replay={source}")
    if source == "rollout" and config.rollout.engine == "vllm" and not config.rollout.prefix_caching:
        raise ConfigError(
            "model.router_replay=rollout: vLLM returns experts with rollout.prefix_caching=true only: set it"
        )


def _check_parallelism(config: RecipeConfig) -> None:
    strategy, workers = config.strategy, config.placement.num_workers
    if strategy.name == "fsdp" and strategy.zero_stage != 3:
        raise ConfigError(
            f"strategy.zero_stage={strategy.zero_stage}: FSDP2 always shards parameters, as stage 3 does: leave the "
            "option out, or use strategy.name=zero"
        )
    _check_optimizers(config)
    for option, reason in _WITHOUT_ZERO.items():
        if strategy.name != "fsdp" and (used := _option_in_use(config, option)):
            raise ConfigError(f"{used}: {reason}: add strategy.name=fsdp")
    for option in ("workers_per_copy", "tensor_parallel", "sequence_parallel", "expert_parallel"):
        size = getattr(strategy, option)
        if size and workers % size:
            raise ConfigError(f"strategy.{option}={size} does not divide placement.num_workers={workers}: change one")
    size = config.rollout.tensor_parallel_size
    if config.has_engine_per_worker and workers % size:
        raise ConfigError(
            f"rollout.engines=per_worker: rollout.tensor_parallel_size={size} does not divide "
            f"placement.num_workers={workers}: change one"
        )


def _check_optimizers(config: RecipeConfig) -> None:
    if config.launcher == "local":
        return
    optimizers = {"optimizer": ("policy", config.optimizer)}
    for critic in CRITIC_POOLS:
        if not getattr(config.placement, critic).actors:
            optimizers[f"{critic}.optimizer"] = (critic, getattr(config, critic).optimizer)
    for option, (model, optimizer) in optimizers.items():
        library, path = optimizer.path.partition(".")[0], f"{option}.name={optimizer.path}"
        if optimizer.is_muon and config.strategy.name == "zero":
            raise ConfigError(
                f"{path}: Muon needs whole matrices, and ZeRO shards optimizers by flat pieces of all parameters: add "
                "strategy.name=fsdp, or use another optimizer"
            )
        if library == "torchao" and config.strategy.name == "zero":
            raise ConfigError(
                f"{path}: ZeRO cuts parameters into flat pieces, of which torchao makes states of full size: use "
                "bitsandbytes.optim.AdamW8bit, or strategy.name=fsdp"
            )
        if library == "bitsandbytes" and config.strategy.name == "fsdp":
            raise ConfigError(
                f"{path}: bitsandbytes refuses DTensors, the shards of FSDP2: use torchao.optim.AdamW8bit, or "
                "strategy.name=zero"
            )
        if library == "bitsandbytes" and getattr(config.strategy.offload, model) == "nvme":
            raise ConfigError(f"{path} has not been tried with strategy.offload.{model}=nvme: use cpu")


def _check_data(config: RecipeConfig) -> None:
    data = config.data
    others = [option for option in ("train_files", "dataset") if getattr(data, option)]
    if data.mixture and others:
        raise ConfigError(f"data.mixture and data.{others[0]} both name the training data: leave one of them out")
    for option, has_order in {"data.mixture": data.mixture, "data.curriculum.share": data.curriculum.share}.items():
        if has_order and not data.shuffle:
            raise ConfigError(f"data.shuffle=false: {option} has an order of its own: leave one of the two out")
    if data.label_key is not None and config.stage in GIVEN_RESPONSE_STAGES:
        option = f"data.label_key={data.label_key}"
        if config.stage == "reward_modeling":
            raise ConfigError(f"{option}: a reward model learns from pairs or labelled steps: leave data.label_key out")
        if data.margin_key is not None:
            raise ConfigError(
                f"{option} is for single responses, and data.margin_key={data.margin_key} is for pairs: leave one out"
            )
    share = data.curriculum.share
    if share and config.stage not in SAMPLING_STAGES:
        raise ConfigError(f"data.curriculum.share={share}: stage={config.stage} sees no rewards: leave it at 0")
    if share and config.batch.samples_per_prompt < 2:
        raise ConfigError(
            f"data.curriculum.share={share} needs the variance of the rewards among the samples of a prompt: raise "
            "batch.samples_per_prompt to 2 or more"
        )


def _check_schedule(config: RecipeConfig) -> None:
    schedule = config.schedule
    if not schedule.active:
        return
    chosen = f"schedule.max_staleness={schedule.max_staleness}"
    if schedule.ahead:
        chosen += f", schedule.ahead={schedule.ahead:g}"
    needs_collecting(config, chosen)
    if config.debug.replay:
        raise ConfigError(f"{chosen} with debug.replay={config.debug.replay}: replayed samples need no sampling")


def _check_lora(config: RecipeConfig) -> None:
    adapters = {"model.lora": config.model.lora}
    for critic in CRITIC_POOLS:
        if not getattr(config.placement, critic).actors:
            adapters[f"{critic}.lora"] = getattr(config, critic).lora
    for option, lora in adapters.items():
        if lora.rank and config.strategy.tensor_parallel > 1:
            raise ConfigError(
                f"{option}.rank={lora.rank}: tensor parallelism does not support adapters: use "
                "strategy.tensor_parallel=1"
            )
        if lora.rank and lora.experts and config.strategy.expert_parallel > 1:
            raise ConfigError(
                f"{option}.experts=true: expert parallelism does not support adapters of experts: use "
                f"strategy.expert_parallel=1, or {option}.experts=false"
            )
    rank, dropout = config.model.lora.rank, config.model.lora.dropout
    if rank and dropout and config.stage not in ("sft", "reward_modeling"):
        raise ConfigError(
            f"model.lora.dropout={dropout:g}: stage={config.stage} compares log-probs, and dropout would change one "
            "side of the comparison: leave it out"
        )
    for critic in CRITIC_POOLS:
        if (lora := getattr(config, critic).lora).rank and lora.dropout:
            raise ConfigError(
                f"{critic}.lora.dropout={lora.dropout:g}: the loss compares values of two passes, and dropout would "
                "change both: leave it out"
            )
    if config.rollout.lora == "adapter" and rank and config.rollout_sleep == "all":
        raise ConfigError(
            "rollout.sleep=all frees the weights, and an update of the adapter alone does not send the weights: use "
            "rollout.sleep=kv_cache, or rollout.lora=merged"
        )
    applies_adapter = config.needs_vllm and config.rollout.lora == "adapter"
    if applies_adapter and rank > ADAPTER_RANKS[-1]:
        raise ConfigError(
            f"rollout.lora=adapter: vLLM applies adapters of rank {ADAPTER_RANKS[-1]} at most, not {rank}: use "
            "rollout.lora=merged"
        )
    if rank == 0 and config.run.export_lora == "adapter":
        raise ConfigError("run.export_lora=adapter, and there is no adapter: give model.lora.rank a value")
    actors = config.placement.reference.actors
    if config.model.lora.path and actors and not config.reference.path:
        raise ConfigError(
            f"placement.reference.actors={actors}: models of a pool have no adapter, and the reference is the policy "
            "with the adapter at model.lora.path: leave the pool out, or name a model with reference.path"
        )
    for model, every in (("reference", config.reference.update_every), ("teacher", config.teacher.update_every)):
        if rank and every:
            raise ConfigError(
                f"{model}.update_every={every} moves the {model} towards the policy, and with model.lora.rank the "
                f"policy has an adapter, and the {model} has none: leave {model}.update_every at 0"
            )


def _check_four_bits(config: RecipeConfig) -> None:
    actors = config.placement.reference.actors
    if config.model.lora.quantization and actors and config.reference.path in (None, config.model.path):
        raise ConfigError(
            f"placement.reference.actors={actors}: weights of a pool are not quantised, and the policy has "
            "model.lora.quantization: leave the pool out, and the policy with its adapter off is the reference"
        )


def _check_pairs(config: RecipeConfig) -> None:
    for pairs, relation in ((_EXCLUSIVE, "cannot be combined"), (_UNTRIED, "have not been tried together")):
        for option, others in pairs.items():
            for other in others:
                if (one := _option_in_use(config, option)) and (two := _option_in_use(config, other)):
                    raise ConfigError(f"{one} and {two} {relation}: leave one of them out")


def _option_in_use(config: RecipeConfig, option: str) -> str | None:
    """Return `option=value` of an option in use, and None for an option that is off."""
    value = attrgetter(option)(config)
    if isinstance(value, RouterLossConfig):
        return option if value.active else None
    is_used = value > 1 if option.endswith("_parallel") else bool(value)
    return f"{option}={str(value).lower()}" if is_used else None


def _check_offload(config: RecipeConfig) -> None:
    strategy, offload = config.strategy, config.strategy.offload
    for model, place in offload.places.items():
        if place not in ("cpu", "nvme"):
            continue
        option = f"strategy.offload.{model}={place}"
        frozen = model in FROZEN and not (model == "reward_model" and config.stage == "reward_modeling")
        if strategy.name == "fsdp" and place == "nvme":
            raise ConfigError(f"{option} needs DeepSpeed: use strategy.name=zero, or cpu")
        if config.launcher == "local":
            raise ConfigError(f"{option}: launcher=local keeps all on one device; use launcher=ray, or leave it out")
        if strategy.zero_stage != 3 and (frozen or place == "nvme"):
            raise ConfigError(f"{option} needs strategy.zero_stage=3, not {strategy.zero_stage}")
        if place == "nvme" and not offload.folder:
            raise ConfigError(f"{option} needs strategy.offload.folder, a folder on the drive")
    for model in _FOLLOWERS:
        if getattr(offload, model) == "nvme" and getattr(config, model).update_every:
            raise ConfigError(f"strategy.offload.{model}=nvme: a {model} that follows the policy cannot be in files")


def _check_pools(config: RecipeConfig) -> None:
    models = {
        "reward_model": config.reward_model.path,
        "cost_model": config.cost_model.path,
        "teacher": config.teacher.path,
        "reference": config.model.path,
        **dict.fromkeys(CRITIC_POOLS, config.model.path),
    }
    for role in POOLS:
        pool = getattr(config.placement, role)
        option = f"placement.{role}.actors={pool.actors}"
        if not pool.actors:
            continue
        _needs_ray(config, option)
        needs_collecting(config, option)
        if models[role] is None:
            raise ConfigError(f"{option}, and there is no such model: name it with {role}.path, or leave the pool out")
    for model in _FOLLOWERS:
        actors, every = getattr(config.placement, model).actors, getattr(config, model).update_every
        if actors and every:
            raise ConfigError(
                f"placement.{model}.actors={actors}: a {model} that follows the policy ({model}.update_every={every}) "
                "moves in the training workers: leave one out"
            )
    for critic in CRITIC_POOLS:
        actors, place = getattr(config.placement, critic).actors, config.strategy.offload.places[critic]
        if actors and place in ("cpu", "nvme"):
            raise ConfigError(
                f"placement.{critic}.actors={actors}: the critic of a pool keeps its states in the pool: leave "
                f"strategy.offload.{critic}={place} out"
            )


def _check_judges(config: RecipeConfig) -> None:
    _check_judge_engines(config)
    if not config.scores:
        return
    check_deadline(config.rewards, config.reward.deadline_s, "reward.deadline_s")
    collective_s = config.strategy.collective_timeout_s
    # The other workers wait in a collective for the worker with the slow judge.
    if config.num_workers > 1 and any(judges_of(config.rewards)) and config.reward.deadline_s >= collective_s:
        raise ConfigError(
            f"reward.deadline_s={config.reward.deadline_s:g}: while a worker waits for its judge, the others wait for "
            f"the worker, at most strategy.collective_timeout_s={collective_s:g}: raise this option, or lower "
            "reward.judge.wait_s and reward.deadline_s"
        )


def _check_engine_deadlines(config: RecipeConfig) -> None:
    if config.num_workers == 1 or not config.needs_vllm:
        return
    longest_s = config.strategy.collective_timeout_s
    rollout = config.rollout
    # `placement.device=auto` may choose GPUs.
    ready_s = rollout.ready_timeout_s or default_ready_timeout_s(on_gpus=config.placement.device != "cpu")
    for option, seconds in {
        "generate_timeout_s": rollout.generate_timeout_s,
        "update_timeout_s": rollout.update_timeout_s,
        "ready_timeout_s": ready_s,
    }.items():
        if seconds + ENGINE_GRACE_S >= longest_s:
            raise ConfigError(
                f"rollout.{option}={seconds:g}: while a worker waits for its engine, the others wait for the worker, "
                f"at most strategy.collective_timeout_s={longest_s:g}: make strategy.collective_timeout_s larger than "
                f"{seconds + ENGINE_GRACE_S:g}, or lower rollout.{option}"
            )


def _check_judge_engines(config: RecipeConfig) -> None:
    judge, option = config.reward.judge, f"placement.judge.actors={config.placement.judge.actors}"
    if not config.placement.judge.actors:
        return
    _needs_ray(config, option)
    asking = models_of_engines(config.rewards) if config.scores else []
    if not asking:
        raise ConfigError(
            f"{option}: no reward of the run asks a judge without address: add reward=judge and leave "
            "reward.judge.url out, or leave the engines out"
        )
    if judge.model is None:
        raise ConfigError(f"{option}: add reward.judge.model, a folder or a name on the hub")
    if others := [model for model in asking if model not in (None, judge.model)]:
        raise ConfigError(
            f"{option}: the engines have the model of reward.judge.model, and a judge without url has "
            f"model={others[0]}: leave this model out, or give this judge a url"
        )


def _needs_ray(config: RecipeConfig, option: str) -> None:
    if config.launcher == "local":
        raise ConfigError(f"{option}: launcher=local runs in one process: use launcher=ray, or leave it out")


def _next_multiple(value: int, of: int) -> int:
    return -(-value // of) * of
