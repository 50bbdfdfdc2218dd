"""Estimate memory and time of a step on some devices for each placement, and print the command of the best placement.

The estimate uses the config.json of the models, the lengths and the batch. No model is loaded, and the devices need not
exist. Placements are sorted by the time of a step. The command keeps the given options and searches over the
others. If no placement fits, the command names the missing memory and the options to change.

  rl-plugins plan grpo model.path=Qwen/Qwen2.5-7B-Instruct model.precision=bf16-true --device h100 --devices 8
  rl-plugins plan ppo model.path=MODEL strategy.zero_stage=3 sampling.max_tokens=8192 --device h200 --nodes 4
  rl-plugins plan grpo model.path=MODEL --device cpu
"""

from __future__ import annotations

import math
import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_plugins.commands.main import number, recipe_names
from rl_plugins.config.models import LANGUAGE_MODEL, CriticOptions, OptimizerConfig, ReferenceConfig, TeacherConfig
from rl_plugins.config.placement import CRITIC_POOLS
from rl_plugins.config.precision import dtype_of_passes
from rl_plugins.config.settings import AT_LEAST_1, NOT_NEGATIVE
from rl_plugins.errors import ConfigError
from rl_plugins.model_json import read_model_config
from rl_plugins.planning.devices import CPU_FILE, DEVICES, GIB, device_named
from rl_plugins.planning.search import Candidate, Cluster, advice, options_of, search
from rl_plugins.planning.shape import ModelShape, shape_of
from rl_plugins.planning.workload import PlannedCritic, Workload, trained_of

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from rl_plugins.config.recipe import RecipeConfig

_MOMENT_WIDTHS = {
    **dict.fromkeys(("Adam8bit", "AdamW8bit", "AdamFp8", "AdamWFp8"), 1 + 4 / 256),
    **dict.fromkeys(("Adam4bit", "AdamW4bit"), 0.5 + 4 / 128),
}
"""Bytes of a number, with its share of a block's scale, in the moments of optimizers of torchao and bitsandbytes."""
WITH_VALUES = {"gae", "bilevel_gae"}
"""Advantages that need a critic."""
_UNPLANNED = {
    "workers_per_copy": (0, "divide a model over all workers: leave the option out, and plan the devices of one copy"),
    "tensor_parallel": (1, "divide no layer of training: leave the option out"),
    "sequence_parallel": (1, "give each worker whole samples: leave the option out"),
}
"""Options of `strategy` which are not planned: the value without an effect, and the end of the message."""
_SCORING = {"reward_model", "cost_model"}
"""Frozen models with a scalar head."""
_QUANTIZED = {
    **dict.fromkeys(("fp8", "fp8_per_tensor", "fp8_per_block", "fp8_per_channel", "mxfp8"), 1.0),
    "bitsandbytes": 0.56,
}
"""Bytes of a number, with its scale, in the matrices of an engine, by `rollout.vllm.quantization`.

Methods that quantise some matrices alone count as no quantisation.
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("recipe", help="grpo, ppo, prime or safe_rlhf")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="options of the recipe")
    parser.add_argument("--device", default="cpu", help=f"{', '.join(DEVICES)}, or cpu (default: %(default)s)")
    parser.add_argument(
        "--devices",
        type=number(int, AT_LEAST_1),
        help="devices per machine; cores of a cpu (default: 8, or as measured)",
    )
    parser.add_argument("--nodes", type=number(int, AT_LEAST_1), default=1, help="machines (default: %(default)s)")
    parser.add_argument(
        "--prompt-tokens",
        type=number(float, AT_LEAST_1),
        help="mean tokens of a prompt (default: data.max_prompt_tokens)",
    )
    parser.add_argument(
        "--response-tokens",
        type=number(float, AT_LEAST_1),
        help="mean tokens of a response (default: sampling.max_tokens)",
    )
    parser.add_argument(
        "--images",
        type=number(float, NOT_NEGATIVE),
        help="mean images of a prompt (default: 1 for a vision-language model)",
    )
    parser.add_argument(
        "--image-patches",
        type=number(float, AT_LEAST_1),
        help="mean patches of an image (default: of the model's image size, or 448 x 448 pixels)",
    )
    parser.add_argument("--calibration", type=Path, default=CPU_FILE, help="file with the measured rates of a cpu")
    parser.add_argument(
        "--rows", type=number(int, AT_LEAST_1), default=12, help="rows of the table (default: %(default)s)"
    )


def run(arguments: Namespace) -> int:
    """Search over placements, and print a table and the command line of the best placement.

    Raises:
        ConfigError: the run has no engine of vLLM, or no placement fits. The message then names the placement with the
            least missing memory, and the options to change.
    """
    from rl_plugins.config.recipe import parse_config
    from rl_plugins.launch.compose import compose_config

    cluster = _build_cluster(arguments)
    composed = compose_config(arguments.recipe, arguments.overrides)
    config = parse_config(composed)
    if config.rollout.engine != "vllm":
        raise ConfigError(
            f"rollout.engine={config.rollout.engine}: plan places engines of vLLM: use rollout.engine=vllm and "
            "launcher=ray"
        )
    config.placement.device = "cpu" if cluster.device.is_cpu else "cuda"
    work = workload_of(
        config,
        prompt_tokens=arguments.prompt_tokens,
        response_tokens=arguments.response_tokens,
        images=arguments.images,
        image_patches=arguments.image_patches,
    )
    given = given_values(composed, arguments.overrides)
    candidates = search(
        work,
        cluster,
        fsdp=config.strategy.name == "fsdp",
        accumulate_shards=config.strategy.accumulate_shards,
        given=given,
    )
    candidates = _allowed_candidates(config, candidates, cluster, given)
    print(_describe_workload(work, cluster))
    print(*table(candidates[: arguments.rows]), sep="\n")
    too_large = [candidate for candidate in candidates if not candidate.fits]
    if not candidates[0].fits:
        nearest = too_large[0]
        parts = ", ".join(f"{name} {value / GIB:.1f}" for name, value in list(nearest.parts.items())[:4])
        raise ConfigError(
            f"none of {len(candidates)} placements fits; the nearest, {_describe_placement(nearest)}: {nearest.reason} "
            f"(GiB: {parts}): {advice(nearest)}"
        )
    note = f"; {len(too_large)} of {len(candidates)} placements do not fit" if too_large else ""
    options = options_of(candidates[0], cluster, given)
    print(f"\nbest{note}:\n  {command_line(arguments.recipe, arguments.overrides, options)}")
    return 0


def _build_cluster(arguments: Namespace) -> Cluster:
    """Return the devices of the arguments.

    Raises:
        ConfigError: several machines are asked for, and the device is a CPU.
    """
    device = device_named(arguments.device, arguments.calibration)
    if device.is_cpu and arguments.nodes > 1:
        raise ConfigError("--nodes: a plan for CPUs is for one machine: leave --nodes out, or name an accelerator")
    devices = (device.cores or 8) if arguments.devices is None else arguments.devices
    return Cluster(device, devices, arguments.nodes)


def given_values(composed: DictConfig, words: Sequence[str]) -> dict[str, Any]:
    """Return the options of the command line with the values in the composed recipe, without options that are null.

    Args:
        composed: composed configuration.
        words: overrides of the command line, each `key=value`.
    """
    from omegaconf import OmegaConf

    names = [word.lstrip("+").partition("=")[0] for word in words]
    values = {name: OmegaConf.select(composed, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def command_line(recipe: str, words: Sequence[str], options: Mapping[str, Any]) -> str:
    """Return the command line of a recipe, to be pasted into a shell.

    Args:
        recipe: name of the recipe, or of a configuration of the recipe `grpo`.
        words: overrides of the command line, each `key=value`.
        options: options of a placement with their values. The options replace equal keys of `words`.
    """
    named = [f"rl_plugins.recipes.{recipe}"]
    module = named if recipe in recipe_names() else ["rl_plugins.recipes.grpo", "--config-name", recipe]
    kept = [word for word in words if word.partition("=")[0].lstrip("+") not in options]
    return shlex.join(["python", "-m", *module, *kept, *words_of(options)])


def words_of(options: Mapping[str, Any]) -> list[str]:
    """Return options as words of a command line."""
    return [f"{name}={str(value).lower()}" for name, value in options.items()]


def _allowed_candidates(
    config: RecipeConfig, candidates: Sequence[Candidate], cluster: Cluster, given: Mapping[str, Any]
) -> list[Candidate]:
    """Return the placements that a run accepts.

    Raises:
        ConfigError: a run would refuse every placement.
    """
    if not candidates:
        raise ConfigError(
            f"no placement on {cluster.devices} devices agrees with the given options: leave out some options of "
            "placement, strategy, schedule (plan supports max_staleness 0, and 1 for engines on GPUs of their own) and "
            "rollout, or make batch.prompts_per_step a multiple of the workers times batch.updates_per_step"
        )
    refusals = [refusal(config, options_of(candidate, cluster, given), cluster) for candidate in candidates]
    if all(refusals):
        raise ConfigError(f"a run would refuse every placement, the first with the message: {refusals[0]}")
    return [candidate for candidate, reason in zip(candidates, refusals, strict=True) if not reason]


def refusal(config: RecipeConfig, options: Mapping[str, Any], cluster: Cluster) -> str:
    """Return the message with which a run refuses a configuration; empty if the run accepts the configuration.

    Args:
        config: configuration of the recipe.
        options: options to change, with their new values.
        cluster: devices of the run.
    """
    from rl_plugins.config.checks import check_batch, check_options
    from rl_plugins.launch.placement import check_fit, roles_of

    planned = deepcopy(config)
    for option, value in options.items():
        group, _, name = option.rpartition(".")
        setattr(attrgetter(group)(planned), name, value)
    on_cpu = cluster.device.is_cpu
    planned.set_device("cpu" if on_cpu else "cuda")
    if planned.schedule.max_staleness and (reason := _refusal_of_stale_samples(planned)):
        return reason
    # The number of CPU cores beside accelerators is unknown.
    machine = {"CPU": cluster.per_node} if on_cpu else {"CPU": math.inf, "GPU": cluster.per_node}
    try:
        check_options(planned)
        check_batch(planned)
        check_fit(roles_of(planned), [machine] * cluster.nodes, "the planned cluster")
    except ConfigError as error:
        return str(error)
    return ""


def _refusal_of_stale_samples(config: RecipeConfig) -> str:
    """Return the message with which a run refuses stale samples; empty if the run accepts stale samples.

    A run asks the algorithm itself, whose import takes seconds.
    """
    chosen, algorithm = "schedule.max_staleness=1", config.algorithm or {}
    if changes := config.sampling.reshaping:
        return f"{chosen} corrects for stale samples, and cannot with sampling.{changes[0]}"
    if config.oversampling > 1:
        return f"{chosen} cannot be combined with algorithm.group_filter.oversampling={config.oversampling}"
    if config.model.router_replay == "recompute" and algorithm.get("correction") == "none":
        return f"{chosen} compares the policy with the sampler, and model.router_replay=recompute needs old log-probs"
    return ""


def workload_of(
    config: RecipeConfig,
    *,
    prompt_tokens: float | None = None,
    response_tokens: float | None = None,
    images: float | None = None,
    image_patches: float | None = None,
) -> Workload:
    """Return the work of one step.

    Args:
        config: configuration of a recipe that samples.
        prompt_tokens: mean tokens of a prompt. By default the longest allowed prompt.
        response_tokens: mean tokens of a response. By default the longest allowed response.
        images: mean images of a prompt. By default one for a vision-language model.
        image_patches: mean patches of an image. By default the patches of an image of the model's size.

    Raises:
        ConfigError: the recipe does not sample its training data, plans do not know an option or the architecture of a
            model, or there are images for a model of text.
    """
    from rl_plugins.config.recipe import COLLECTING_STAGES

    if config.stage not in COLLECTING_STAGES:
        raise ConfigError(f"plan is for the stages {' and '.join(COLLECTING_STAGES)}, and not for {config.stage}")
    dtypes = {"model.precision": dtype_of_passes(config.precision), "rollout.dtype": config.rollout_dtype}
    for option, dtype in dtypes.items():
        if dtype == "float16" and config.placement.device == "cpu":
            raise ConfigError(f"{option}: plan has no rates of a CPU for float16: use another {option}")
    _refuse_unplanned(config)
    policy = read_shape("model.path", config.model.path)
    for argument, value in {"--images": images, "--image-patches": image_patches}.items():
        if value and policy.tower is None:
            raise ConfigError(
                f"{argument}={value:g}: model.path={config.model.path} reads text alone: leave {argument} out"
            )
    longest = config.data.max_prompt_tokens + config.sampling.max_tokens
    frozen, places = _frozen_models(config), config.strategy.offload.places
    work = Workload(
        policy,
        precision=config.precision,
        engine_dtype=config.rollout_dtype,
        matrix_width=_QUANTIZED.get(str(config.rollout.vllm.get("quantization"))),
        cache_width=1.0 if str(config.rollout.vllm.get("kv_cache_dtype")).startswith("fp8") else None,
        moment_width=_moment_width(config.optimizer),
        muon=config.optimizer.is_muon,
        prompts=config.batch.prompts_per_step,
        oversampling=config.oversampling,
        samples=config.batch.samples_per_prompt,
        prompt_tokens=prompt_tokens or config.data.max_prompt_tokens,
        response_tokens=response_tokens or config.sampling.max_tokens,
        images=images if images is not None else float(policy.tower is not None),
        image_patches=image_patches,
        max_tokens=longest,
        packing=config.batch.packing,
        micro_batch_tokens=config.batch.tokens_per_micro_batch,
        log_prob_tokens=config.batch.tokens_per_log_prob_batch,
        updates=config.batch.updates_per_step,
        passes=config.batch.passes_per_step,
        gradient_checkpointing=config.model.gradient_checkpointing,
        four_bits=config.model.lora.quantization is not None,
        lora_rank=config.model.lora.rank,
        adapts_tower=config.model.lora.target_modules != LANGUAGE_MODEL,
        trains_tower=config.optimizer.vision_lr != 0,
        adapts_experts=config.model.lora.experts,
        expert_parallel=config.strategy.expert_parallel,
        merged=config.rollout.lora == "merged",
        frozen=frozen,
        places={name: place for name in frozen if (place := places.get(name.partition(".")[0], "stay")) != "stay"},
        critics=_critics(config),
        max_num_seqs=config.engine_limits["max_num_seqs"],
        prefix_caching=config.rollout.prefix_caching,
        kv_cache_bytes=config.rollout.cpu_kv_cache_gib * GIB,
        bucket_bytes=config.engine_limits["bucket_mb"] * 2**20,
    )
    return replace(work, averages=_averages(config, work))


def _refuse_unplanned(config: RecipeConfig) -> None:
    """Refuse options which change memory and time in a way unknown to plans."""
    for option, (unused, reason) in _UNPLANNED.items():
        if (value := getattr(config.strategy, option)) != unused:
            raise ConfigError(f"strategy.{option}={value}: plans {reason}")
    for model, place in config.strategy.offload.places.items():
        if place == "nvme":
            raise ConfigError(f"strategy.offload.{model}=nvme: plan has no rates of drives: plan with cpu")


def _frozen_models(config: RecipeConfig) -> dict[str, ModelShape]:
    """Return the shapes of the models beside the policy that the training workers do not train, by name."""
    frozen, paths = {}, config.model_paths
    for role in (role for role, count in config.frozen_models.items() if count):
        group = "process_reward_model" if role == "process_reference" else role
        # A model without a path of its own starts from the policy.
        for option in [option for option in paths if option.startswith(f"{group}.")] or ["model.path"]:
            name = option if option.startswith("teacher.paths.") else role
            shape = read_shape(option, paths[option])
            frozen[name] = _with_scalar_head(shape) if role in _SCORING else shape
    return frozen


def _averages(config: RecipeConfig, work: Workload) -> dict[str, int]:
    """Return the numbers in the averages of models in float32, by model."""
    averages = {"policy": work.trained_parameters} if config.average.keep else {}
    for name in ("reference", "teacher"):
        options: ReferenceConfig | TeacherConfig = getattr(config, name)
        # A model in float32 is its own average, and the average of a model on the host is there, too.
        in_low_precision = name in work.frozen and work.width < 4 and work.places.get(name) != "cpu"
        if options.update_every and options.keep and in_low_precision:
            averages[name] = work.frozen[name].parameters
    return averages


def _critics(config: RecipeConfig) -> list[PlannedCritic]:
    """Return the models that the training workers train beside the policy."""
    algorithm: Mapping[str, Any] = config.algorithm or {}
    critics = []
    if config.stage == "prime":
        option = "process_reward_model.path"
        shape = read_shape(option, config.model_paths.get(option, config.model.path))
        critics.append(PlannedCritic("process_reward_model", shape, shape.parameters))
    if algorithm.get("advantage") not in WITH_VALUES:
        return critics
    for name in CRITIC_POOLS if algorithm.get("constraint") else CRITIC_POOLS[:1]:
        if name not in config.placement.pools:
            options: CriticOptions = getattr(config, name)
            shape = _with_scalar_head(read_shape(f"{name}.path", options.path or config.model.path))
            lora, four_bits = options.lora, options.lora.quantization is not None
            with_tower = options.optimizer.vision_lr != 0 and not (lora.rank and lora.target_modules == LANGUAGE_MODEL)
            trained = trained_of(shape, lora.rank, with_tower=with_tower, with_experts=lora.experts)
            width, muon = _moment_width(options.optimizer), options.optimizer.is_muon
            critics.append(PlannedCritic(name, shape, trained, width, four_bits, muon))
    return critics


def _with_scalar_head(shape: ModelShape) -> ModelShape:
    """Return the shape of a model whose output head is replaced by a single row, which plans leave out."""
    return replace(shape, tied=True)


def _moment_width(optimizer: OptimizerConfig) -> float | None:
    """Return the bytes of a number in the moments of an optimizer that quantises its states; None for others."""
    library, _, name = optimizer.path.partition(".")
    return _MOMENT_WIDTHS.get(name.rpartition(".")[2]) if library in ("torchao", "bitsandbytes") else None


def read_shape(option: str, path: str) -> ModelShape:
    """Return the shape of a model.

    Args:
        option: name of the option, for the message of an error.
        path: folder of the model, a file like config.json, or a name on the Hugging Face hub.

    Raises:
        ConfigError: the model or the architecture is unknown, the file is damaged, or the hub does not give the model.
    """
    file = Path(path)
    if not file.is_file():
        from rl_plugins.hub.files import model_folder

        file = Path(model_folder(path, option=option, weights=False)) / "config.json"
    if not file.is_file():
        raise ConfigError(
            f"{option}={path}: there is no such folder or file: name a folder, a model of the Hugging Face hub, or a "
            "file like config.json"
        )
    return shape_of(read_model_config(file), f"{option}={path}")


def table(candidates: Sequence[Candidate]) -> list[str]:
    """Return one line for each placement: processes, seconds of a step, GiB of the fullest phase, and the misfit."""
    names = [_describe_placement(candidate) for candidate in candidates]
    width = max(map(len, names)) + 2
    lines = [f"  {'placement':{width}}{'s/step':>9}{'rollout':>9}{'training':>9}{'weights':>9}  GiB"]
    for name, candidate in zip(names, candidates, strict=True):
        time = candidate.time
        seconds = (time.step, time.rollout, time.training, time.update_weights + time.move)
        fullest = {kind: max(phases.items(), key=lambda item: item[1]) for kind, phases in candidate.memory.items()}
        memory = ", ".join(f"{kind} {size / GIB:.1f} ({phase})" for kind, (phase, size) in fullest.items())
        mark, reason = ("  ", "") if candidate.fits else ("- ", f": {candidate.reason}")
        lines.append(f"{mark}{name:{width}}" + "".join(f"{value:9.1f}" for value in seconds) + f"  {memory}{reason}")
    return lines


def _describe_placement(candidate: Candidate) -> str:
    plan = candidate.plan
    processes = f"{plan.trainers} trainers, {plan.engines} engine{'s' if plan.engines > 1 else ''}"
    processes += f" of {plan.tensor_parallel}" if plan.tensor_parallel > 1 else ""
    strategy = "FSDP2" if plan.zero_stage == 0 else f"ZeRO-{plan.zero_stage}"
    marks = ["" if plan.colocated else "split", "ahead" if plan.ahead else ""]
    # On GPUs, colocated engines always give back their weights, too.
    whole = plan.sleep == "all" and "machine" in candidate.memory
    marks += ["optimizer on host" if plan.offload == "cpu" else "", "sleeps wholly" if whole else ""]
    marks += ["recomputing" if candidate.work.gradient_checkpointing else ""]
    marks += [f"micro-batches of {candidate.work.micro_batch_tokens}"]
    marks += ["no sleep" if plan.sleep == "none" and plan.colocated else ""]
    return ", ".join([processes, strategy, *filter(None, marks)])


def _describe_workload(work: Workload, cluster: Cluster) -> str:
    active = ""
    if work.policy.experts is not None:
        active = f" ({_format_count(int(work.policy.multiplied_by(1)))} for a token)"
    images = ""
    if work.images and work.policy.tower is not None:
        images = f", {work.images:g} images of {work.image_patches or work.policy.tower.patches:g} patches"
    return (
        f"{_format_count(work.policy.parameters)} parameters{active}, {work.prompts} x {work.samples} samples of "
        f"{work.prompt_tokens:g} + {work.response_tokens:g} tokens{images}, {work.precision}, on {cluster.nodes} x "
        f"{cluster.per_node} {cluster.device.name}"
    )


def _format_count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e8 else f"{parameters / 1e6:.2f} M"
