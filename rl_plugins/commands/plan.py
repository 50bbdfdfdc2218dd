"""Say how much memory and time a step would take on some devices, and which placement is best.

From the models' config.json, lengths and batch alone: nothing is loaded, and the devices need not be there. Placements
are sorted by the time of a step; the options that make the best one so are printed, to be copied. What is given on the
command line is kept, the rest is searched. What cannot be is refused, with what it lacks and what to change.

  rl-plugins plan grpo model.path=Qwen/Qwen2.5-7B-Instruct model.precision=bf16-true --device h100 --devices 8
  rl-plugins plan ppo model.path=MODEL strategy.zero_stage=3 sampling.max_tokens=8192 --device h200 --nodes 4
  rl-plugins plan grpo model.path=MODEL --device cpu
"""

from __future__ import annotations

import json
import math
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from copy import deepcopy
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_plugins.errors import ConfigError
from rl_plugins.planning.devices import CPU_FILE, DEVICES, GIB, device_named
from rl_plugins.planning.search import Candidate, Cluster, advice, overrides, search
from rl_plugins.planning.shape import ModelShape, shape_of
from rl_plugins.planning.workload import WIDTHS, Workload

if TYPE_CHECKING:
    from rl_plugins.launch.config import RecipeConfig

WITH_VALUES = {"gae"}
"""Advantages that ask for a critic."""
_ROWS = 12


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("recipe", help="grpo, ppo or another that samples")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="options of the recipe")
    parser.add_argument("--device", default="cpu", help=f"{', '.join(DEVICES)}, or cpu (default: %(default)s)")
    parser.add_argument("--devices", type=int, help="of a machine; of a cpu: its cores (default: 8, or as measured)")
    parser.add_argument("--nodes", type=int, default=1, help="machines (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=float, help="of a prompt on average (default: data.max_prompt_tokens)")
    parser.add_argument("--response-tokens", type=float, help="of a response on average (default: sampling.max_tokens)")
    parser.add_argument("--calibration", type=Path, default=CPU_FILE, help="measured rates of a cpu")
    parser.add_argument("--rows", type=int, default=_ROWS, help="rows of the table (default: %(default)s)")


def run(arguments: Namespace) -> int:
    """Plan and print.

    Raises:
        ConfigError: nothing fits: the least that is short of memory, by how much, and what to change.
    """
    from rl_plugins.launch.command_line import compose_config
    from rl_plugins.launch.config import parse_config
    from rl_plugins.launch.values import check_values

    cluster = _cluster(arguments)
    composed = compose_config(arguments.recipe, arguments.overrides)
    config = parse_config(composed)
    check_values(config)
    work = workload_of(config, prompt_tokens=arguments.prompt_tokens, response_tokens=arguments.response_tokens)
    given = given_values(composed, arguments.overrides)
    found = _allowed(config, search(work, cluster, fsdp=config.strategy.name == "fsdp", given=given), cluster)
    print(_described(work, cluster))
    for line in table(found[: arguments.rows]):
        print(line)
    refused = [one for one in found if not one.fits]
    if not found[0].fits:
        nearest = refused[0]
        parts = ", ".join(f"{name} {value / GIB:.1f}" for name, value in list(nearest.parts.items())[:4])
        raise ConfigError(
            f"none of {len(found)} placements fits; the nearest, {_named(nearest)}: {nearest.reason} "
            f"(GiB: {parts}): {advice(nearest)}"
        )
    left = f"; {len(refused)} of {len(found)} placements do not fit" if refused else ""
    options = overrides(found[0].work, found[0].place, cluster)
    print(f"\nbest{left}:\n  " + " ".join(words_of(options)))
    return 0


def _cluster(arguments: Namespace) -> Cluster:
    """The devices that are asked for; refuses numbers that cannot be, those of the table and the lengths as well."""
    device = device_named(arguments.device, arguments.calibration)
    if device.is_cpu and arguments.nodes > 1:
        raise ConfigError("--nodes: CPUs are planned for on one machine: leave it out, or name an accelerator")
    devices = (device.cores or 8) if arguments.devices is None else arguments.devices
    if min(devices, arguments.nodes) < 1:
        raise ConfigError(f"--devices {devices} --nodes {arguments.nodes}: both must be 1 or more")
    if arguments.rows < 1:
        raise ConfigError(f"--rows {arguments.rows}: must be 1 or more")
    for flag, tokens in {"prompt": arguments.prompt_tokens, "response": arguments.response_tokens}.items():
        if tokens is not None and not tokens >= 1:
            raise ConfigError(f"--{flag}-tokens {tokens:g}: must be 1 or more")
    return Cluster(device, devices, arguments.nodes)


def given_values(composed: Any, words: Sequence[str]) -> dict[str, Any]:
    """What the command line says of options, as the recipe reads it; null leaves an option open."""
    from omegaconf import OmegaConf

    names = [word.lstrip("+").partition("=")[0] for word in words]
    values = {name: OmegaConf.select(composed, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def words_of(options: Mapping[str, Any]) -> list[str]:
    """Options as they are typed."""
    return [f"{name}={str(value).lower()}" for name, value in options.items()]


def _allowed(config: RecipeConfig, candidates: Sequence[Candidate], cluster: Cluster) -> list[Candidate]:
    """The placements that a run does not refuse.

    Raises:
        ConfigError: there is none.
    """
    if not candidates:
        raise ConfigError(
            f"no placement on {cluster.devices} devices agrees with the options that are given: leave out some of "
            "those of placement, strategy, schedule (plans know max_staleness 0 and, on GPUs, 1) and rollout, or make "
            "batch.prompts_per_step a multiple of the workers times batch.updates_per_step"
        )
    refusals = [refusal(config, overrides(one.work, one.place, cluster), cluster) for one in candidates]
    if all(refusals):
        raise ConfigError(f"a run would refuse every placement, the first as follows: {refusals[0]}")
    return [one for one, reason in zip(candidates, refusals, strict=True) if not reason]


def refusal(config: RecipeConfig, options: Mapping[str, Any], cluster: Cluster) -> str:
    """Why a run would refuse a configuration with these options on these devices; empty if it would not."""
    from rl_plugins.launch.batch import check_batch
    from rl_plugins.launch.placement import check_fit, roles_of
    from rl_plugins.launch.values import check_values

    planned = deepcopy(config)
    for option, value in options.items():
        group, _, name = option.rpartition(".")
        setattr(attrgetter(group)(planned), name, value)
    if planned.schedule.max_staleness and (planned.sampling.top_p < 1 or planned.sampling.top_k > 0):
        return "schedule.max_staleness=1 compares the policy with what sampled: it needs top_p=1 and top_k=-1"
    on_cpu = cluster.device.is_cpu
    # How many cores there are beside accelerators is not known.
    machine = {"CPU": cluster.per_node} if on_cpu else {"CPU": math.inf, "GPU": cluster.per_node}
    try:
        check_values(planned)
        check_batch(planned)
        check_fit(roles_of(planned, "cpu" if on_cpu else "cuda"), [machine] * cluster.nodes, "what is planned for")
    except ConfigError as error:
        return str(error)
    return ""


def workload_of(
    config: RecipeConfig, *, prompt_tokens: float | None = None, response_tokens: float | None = None
) -> Workload:
    """The step that a configuration describes.

    Args:
        config: of a recipe that samples.
        prompt_tokens: of a prompt on average; the longest there may be by default.
        response_tokens: of a response on average; the longest there may be by default.

    Raises:
        ConfigError: the recipe does not sample and train, or a model is not understood.
    """
    from rl_plugins.launch.config import rollout_dtype
    from rl_plugins.launch.values import COLLECTING_STAGES

    if config.stage not in COLLECTING_STAGES:
        raise ConfigError(f"plan is for stages that sample what they train on ({', '.join(COLLECTING_STAGES)})")
    if rollout_dtype(config) not in WIDTHS:
        raise ConfigError(
            f"rollout.dtype={rollout_dtype(config)}: plan knows the rates of {' and '.join(WIDTHS)}: use one of them"
        )
    policy = read_shape("model.path", config.model.path)
    algorithm: Mapping[str, Any] = config.algorithm or {}
    frozen = {
        name: read_shape(f"{name}.path", path)
        for name, path in (("teacher", config.teacher.path), ("reward_model", config.reward_model.path))
        if path
    }
    kl = (algorithm.get("kl") or {}).get("coefficient", 0.0)
    if config.reference.path or (kl and not config.model.lora.rank) or config.stage == "prime":
        frozen["reference"] = read_shape("reference.path", config.reference.path or config.model.path)
    critic = None
    if algorithm.get("advantage") in WITH_VALUES:
        critic = read_shape("critic.path", config.critic.path or config.model.path)
    elif config.stage == "prime":
        critic = policy  # the process reward model is trained beside it
    longest = config.data.max_prompt_tokens + config.sampling.max_tokens
    return Workload(
        policy,
        precision=config.model.precision,
        engine_dtype=rollout_dtype(config),
        prompts=config.batch.prompts_per_step,
        samples=config.batch.samples_per_prompt,
        prompt_tokens=prompt_tokens or config.data.max_prompt_tokens,
        response_tokens=response_tokens or config.sampling.max_tokens,
        max_tokens=longest,
        micro_batch_tokens=config.batch.tokens_per_micro_batch,
        updates=config.batch.updates_per_step,
        passes=config.batch.passes_per_step,
        gradient_checkpointing=config.model.gradient_checkpointing,
        lora_rank=config.model.lora.rank,
        merged=config.rollout.lora == "merged",
        critic=critic,
        frozen=frozen,
        max_num_seqs=config.rollout.max_num_seqs,
        prefix_caching=config.rollout.prefix_caching,
        kv_cache_bytes=config.rollout.cpu_kv_cache_gib * GIB,
        bucket_bytes=config.rollout.bucket_mb * 2**20,
    )


def read_shape(option: str, path: str) -> ModelShape:
    """The shape of a model: of its folder, of a file like its config.json, or by a name that the cache knows.

    Raises:
        ConfigError: there is none of these, or the model is not understood.
    """
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            cached = try_to_load_from_cache(path, "config.json")
        except HFValidationError:
            cached = None
        if not isinstance(cached, str):
            raise ConfigError(
                f"{option}={path}: there is no such folder or file, and the cache of the Hugging Face hub does not "
                "have it: name a folder, or save the model's config.json and name that"
            )
        file = Path(cached)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option}={path}: {file} is not JSON ({error})") from None
    return shape_of(content, f"{option}={path}")


def table(candidates: Sequence[Candidate]) -> list[str]:
    """A line for each placement: who, seconds, GiB of the fullest phase, and why not."""
    names = [_named(one) for one in candidates]
    width = max(map(len, names)) + 2
    lines = [f"  {'placement':{width}}{'s/step':>9}{'rollout':>9}{'training':>9}{'weights':>9}  GiB"]
    for name, one in zip(names, candidates, strict=True):
        time = one.time
        seconds = (time.step, time.rollout, time.training, time.update_weights + time.move)
        fullest = {kind: max(phases.items(), key=lambda item: item[1]) for kind, phases in one.memory.items()}
        memory = ", ".join(f"{kind} {size / GIB:.1f} ({phase})" for kind, (phase, size) in fullest.items())
        mark, reason = ("  ", "") if one.fits else ("- ", f": {one.reason}")
        lines.append(f"{mark}{name:{width}}" + "".join(f"{value:9.1f}" for value in seconds) + f"  {memory}{reason}")
    return lines


def _named(candidate: Candidate) -> str:
    place = candidate.place
    who = f"{place.trainers} trainers, {place.engines} engine{'s' if place.engines > 1 else ''}"
    who += f" of {place.tensor_parallel}" if place.tensor_parallel > 1 else ""
    how = "FSDP2" if place.zero_stage == 0 else f"ZeRO-{place.zero_stage}"
    marks = ["" if place.colocated else "split", "ahead" if place.ahead else ""]
    marks += ["optimizer on host" if place.offload == "cpu" else "", "" if place.sleep != "all" else "sleeps wholly"]
    marks += ["recomputing" if candidate.work.gradient_checkpointing else ""]
    marks += ["no sleep" if place.sleep == "none" and place.colocated else ""]
    return ", ".join([who, how, *filter(None, marks)])


def _described(work: Workload, cluster: Cluster) -> str:
    return (
        f"{_count(work.policy.parameters)} parameters, {work.prompts} x {work.samples} samples of "
        f"{work.prompt_tokens:g} + {work.response_tokens:g} tokens, {work.precision}, on {cluster.nodes} x "
        f"{cluster.per_node} {cluster.device.name}"
    )


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e8 else f"{parameters / 1e6:.2f} M"
