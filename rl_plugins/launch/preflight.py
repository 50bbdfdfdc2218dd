"""Check a configuration before anything heavy starts. Each failure is one message.

The checks of this module compare options with each other, with this machine, and with files, models and servers.
Rewards, prompt lengths and the algorithm cannot be checked by reading options: the modules `dry_run` and
`algorithm_check` try them on samples.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rl_plugins.config.checks import check_device
from rl_plugins.config.models import LANGUAGE_MODEL, SCHEDULES, LoraConfig, OptimizerConfig
from rl_plugins.config.precision import dtype_of_passes
from rl_plugins.config.recipe import RecipeConfig
from rl_plugins.config.rollout import check_cpu_head_size
from rl_plugins.errors import ConfigError, config_errors
from rl_plugins.hub.names import model_name
from rl_plugins.launch.argument_errors import RUN_OPTIONS, errors_with_options
from rl_plugins.launch.cluster import JOB_FOLDERS, check_cluster
from rl_plugins.launch.gpu_checks import check_engine_weights, check_gpus
from rl_plugins.launch.gpus import hidden_gpus, local_gpus, read_machine
from rl_plugins.launch.instantiation import instantiate_as, instantiate_nodes
from rl_plugins.launch.own_ray import path_of_sessions
from rl_plugins.launch.placement import check_fit, roles_of
from rl_plugins.launch.resume import check_resume
from rl_plugins.model_json import context_window, expert_count, reads_images
from rl_plugins.run_folder import RunFolder
from rl_plugins.storage import is_address
from rl_plugins.tracking.registry import is_in_mlflow
from rl_plugins.tracking.store import ARTIFACTS, STORE_FILE, check_store, store_beside


def preflight(config: RecipeConfig) -> None:
    """Run the checks after `check_all_options`: of this machine, files, models, servers and rows.

    Raises:
        ConfigError: an option, a file or a row is wrong. The message names the fault and the way to correct it.
    """
    check_this_machine(config)
    models = check_models(config)
    _check_output(config)
    # The store of a pipeline answered when the parent run was created, and a run survives an outage.
    if config.tracking.enabled and config.tracking.parent_run is None:
        check_store(config.store_uri)
    from rl_plugins.launch.dry_run import check_data

    with errors_with_options(RUN_OPTIONS):
        check_data(config, models)
    _check_packing(config, models)
    if config.model.router_losses.active or config.model.router_replay:
        # The import loads torch, which takes seconds.
        from rl_plugins.launch.algorithm_check import check_router_options

        check_router_options(config, models[config.model.path])
    _check_parts(config)


def _check_parts(config: RecipeConfig) -> None:
    """Check the optimizers, the algorithm or the loss, and parts of the user, which need no model and no data."""
    _check_optimizers(config)
    if config.callbacks or config.tracking.loggers or config.debug.profiler:
        from lightning.pytorch import Callback
        from lightning.pytorch.loggers import Logger
        from lightning.pytorch.profilers import Profiler

        instantiate_nodes("callbacks", config.callbacks, Callback)
        instantiate_nodes("tracking.loggers", config.tracking.loggers, Logger)
        if config.debug.profiler:
            instantiate_as("debug.profiler", config.debug.profiler, Profiler)
    if config.model.attention is not None:
        _check_attention(config.model.attention, on_cpu=_surely_on_cpu(config))
    if config.stage != "sft":
        # The import loads torch, which takes seconds.
        from rl_plugins.launch.algorithm_check import check_method

        check_method(config)


def _check_packing(config: RecipeConfig, models: dict[str, Any]) -> None:
    # Loads torch. The judge's engine packs nothing. An error names the first option of a path.
    from rl_plugins.models.folder import check_packing

    for path, option in {path: option for option, path in reversed(config.model_paths.items())}.items():
        if config.batch.packing and path in models and option != "reward.judge.model":
            check_packing(option, path, trust_remote_code=config.model.trust_remote_code)


def _check_optimizers(config: RecipeConfig) -> None:
    groups = {
        "optimizer": config.optimizer,
        "critic.optimizer": config.critic.optimizer,
        "cost_critic.optimizer": config.cost_critic.optimizer,
    }
    for group, options in groups.items():
        if options.name != "AdamW" or options.options or options.schedule not in SCHEDULES:
            # The import loads torch, which takes seconds.
            from rl_plugins.stages.optimizer import try_optimizer

            with config_errors(f"{group}."):
                try_optimizer(options)


def _check_attention(name: str, *, on_cpu: bool) -> None:
    """Compare `model.attention` with the implementations of transformers."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.utils import import_utils

    known = ["eager", *(known for known in ALL_ATTENTION_FUNCTIONS.valid_keys() if "|" not in known)]
    if name not in known:
        raise ConfigError(f"model.attention={name}: transformers has no such attention: use one of {', '.join(known)}")
    if "flash_attention" not in name:
        return
    if on_cpu:
        raise ConfigError(f"model.attention={name} runs on GPUs, and the run is on CPU: leave it out")
    installed = getattr(import_utils, f"is_flash_attn_{name[-1]}_available", lambda: True)
    if not installed():
        raise ConfigError(
            f"model.attention={name}: its package is not installed: pip install flash-attn, or leave the option out"
        )


def check_stage_ahead(config: RecipeConfig, folder: Path) -> None:
    """Check a stage of a pipeline before the earlier stages have run. No row is read, and no reward is called.

    Args:
        config: configuration of the stage.
        folder: folder of the pipeline. Files and models in it need not exist yet, because earlier stages make them.

    Raises:
        ConfigError: an option or a file is wrong. The message names the fault and the way to correct it.
    """

    def is_made_later(path: str) -> bool:
        return Path(path).absolute().is_relative_to(folder) and not Path(path).exists()

    check_this_machine(config)
    check_models(config, lambda path: is_in_mlflow(path) or is_address(path) or is_made_later(path))
    _check_data_files(config, is_made_later)
    _check_reward_files(config)
    _check_parts(config)


def check_this_machine(config: RecipeConfig) -> None:
    """Compare the placement with this machine. With `RAY_ADDRESS` the run is elsewhere: the cluster must answer.

    Raises:
        ConfigError: an option for GPUs on CPU, `placement.device=cuda` without a GPU, GPUs that a run cannot use, too
            few devices, too little memory for the KV caches, a path too long for Ray's sockets, or no cluster.
    """
    if _surely_on_cpu(config):
        check_device(config, "cpu")
    if address := os.environ.get("RAY_ADDRESS"):
        if config.launcher == "ray":
            check_cluster(address)
        return
    if "nvme" in config.strategy.offload.places.values():
        from rl_plugins.strategies.offload import check_file_op

        check_file_op()
    gpus, hidden = local_gpus(), hidden_gpus()
    if config.placement.device == "cuda" and not gpus:
        if hidden:
            raise ConfigError(
                f"placement.device=cuda, but {hidden} hides all GPUs of this machine: unset the variable, or use "
                "placement.device=cpu"
            )
        raise ConfigError("placement.device=cuda, but this machine has no NVIDIA GPU: use placement.device=cpu or auto")
    if config.on_gpus or (config.launcher == "ray" and not _on_cpu(config)):
        check_gpus(config, {"this machine": read_machine()})
    if config.launcher == "ray":
        config = deepcopy(config)
        config.placement.device = "cpu" if _on_cpu(config) else "cuda"
        available = {"CPU": float(os.cpu_count() or 1), "GPU": float(gpus)}
        check_fit(roles_of(config), [available], f"this machine with {hidden}" if hidden else "this machine")
        path_of_sessions()
        if config.needs_vllm and not config.on_gpus:
            _check_memory(config)


def slow_here(config: RecipeConfig) -> str | None:
    """Return a warning if the run computes in 16 bits on a CPU without instructions for such numbers, else None.

    With `RAY_ADDRESS` the processors of the run are unknown here, and the function returns None.
    """
    from rl_plugins.cpu_instructions import multiplies_bfloat16, multiplies_float16

    if os.environ.get("RAY_ADDRESS") or not _on_cpu(config):
        return None
    used = {"model.precision=32-true": dtype_of_passes(config.precision), "rollout.dtype=float32": config.rollout.dtype}
    is_slow = {"bfloat16": not multiplies_bfloat16(), "float16": not multiplies_float16()}
    slow = {option: str(dtype) for option, dtype in used.items() if is_slow.get(str(dtype))}
    if not slow:
        return None
    dtypes, faster = " and ".join(sorted({*slow.values()})), " ".join(slow)
    return f"this processor has no instructions for {dtypes}, which may take many times as long: {faster} is faster"


def _on_cpu(config: RecipeConfig) -> bool:
    device = config.placement.device
    # The launcher `local` takes a GPU with `cuda` only.
    return device == "cpu" or (device == "auto" and (config.launcher == "local" or not local_gpus()))


def _surely_on_cpu(config: RecipeConfig) -> bool:
    """Return True if the run is on CPU. With `RAY_ADDRESS`, the devices of `auto` are unknown here."""
    is_remote = config.launcher == "ray" and bool(os.environ.get("RAY_ADDRESS"))
    return _on_cpu(config) and (config.placement.device == "cpu" or not is_remote)


def _check_memory(config: RecipeConfig) -> None:
    # Each process of an engine on CPU writes its whole KV cache once, at the start.
    engines, size, gib = config.num_engines, config.rollout.tensor_parallel_size, config.rollout.cpu_kv_cache_gib
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    if engines * size * gib > total:
        raise ConfigError(
            f"the rollout engines need {engines * size * gib} GiB for their KV caches (rollout.engines={engines} x "
            f"rollout.tensor_parallel_size={size} x rollout.cpu_kv_cache_gib={gib}), this machine has {total:.0f} GiB "
            "of memory: lower one of the three"
        )


def check_models(
    config: RecipeConfig, is_left_out: Callable[[str], bool] = lambda path: False
) -> dict[str, dict[str, Any]]:
    """Check that all models exist, that processes can share heads and experts, and the context window of each model.

    Only headers and files of configuration and tokenizer are read, and each config.json once.

    Args:
        config: configuration of the run.
        is_left_out: function of the path of a model or an adapter. It returns True if the path cannot be checked yet.

    Returns:
        Path or name of each checked model, and the content of its config.json.

    Raises:
        ConfigError: a folder holds no model or quantized weights, the hub does not have a name, a model needs code of
            its own without `model.trust_remote_code`, a tensor-parallel size does not divide the heads, vLLM on CPU has
            no kernel for the heads, an engine would rotate positions differently, the weights do not fit into an
            engine's share of a GPU, or prompt and response do not fit into a context window.
    """
    from rl_plugins.models.folder import check_model_folder, check_whole_weights

    models: dict[str, dict[str, Any]] = {}
    prompt, response = config.data.max_prompt_tokens, config.sampling.max_tokens
    for option, path in config.model_paths.items():
        if is_left_out(path):
            continue
        # Weights of the hub come after all checks, because their download takes time.
        found = models[path] = check_model_folder(
            option, path, weights=model_name(path) is None, trust_remote_code=config.model.trust_remote_code
        )
        if option != "reward.judge.model":
            check_whole_weights(f"{option}={path}", found)
    _check_trained_parts(config, models, is_left_out)
    for option, path in config.model_paths.items():
        if (model := models.get(path)) is None:
            continue
        if option == "model.path":
            _check_heads(config, model)
            if (patches := config.batch.patches_per_micro_batch) and not reads_images(model):
                raise ConfigError(
                    f"batch.patches_per_micro_batch={patches}: {path} has no vision tower: leave the option out"
                )
            if config.needs_engine:
                lora, tokens, is_on_cpu = config.model.lora, prompt + response, _surely_on_cpu(config)
                config.rollout.check_policy(f"{option}={path}", model, lora=lora, tokens=tokens, is_on_cpu=is_on_cpu)
            if config.launcher == "ray" and not _on_cpu(config) and not os.environ.get("RAY_ADDRESS"):
                on_gpus = deepcopy(config)
                on_gpus.placement.device = "cuda"
                check_engine_weights(on_gpus, model, read_machine())
        if option == "reward.judge.model" and _on_cpu(config):
            check_cpu_head_size(f"{option}={path}", model)
        if (limit := context_window(model)) is not None and prompt + response > limit:
            raise ConfigError(
                f"data.max_prompt_tokens={prompt} and sampling.max_tokens={response} make {prompt + response} tokens, "
                f"and {option}={path} takes {limit}: lower one of the two"
            )
    if config.strategy.expert_parallel > 1:
        # The import loads torch, which takes seconds.
        from rl_plugins.launch.algorithm_check import check_expert_parallel

        check_expert_parallel(config, models)
    return models


class _Trained(NamedTuple):
    """Start of a trained model, and the options of its adapter and optimizer with their names."""

    path: str
    lora_option: str
    lora: LoraConfig
    optimizer_option: str
    optimizer: OptimizerConfig


def _check_trained_parts(
    config: RecipeConfig, models: Mapping[str, dict[str, Any]], is_left_out: Callable[[str], bool]
) -> None:
    """Check the models from a folder for the parts in options: vision tower, experts, and layers with an adapter."""
    trained = [_Trained(config.model.path, "model.lora", config.model.lora, "optimizer", config.optimizer)]
    for name, critic in {"critic": config.critic, "cost_critic": config.cost_critic}.items():
        start = critic.path or config.model.path
        trained.append(_Trained(start, f"{name}.lora", critic.lora, f"{name}.optimizer", critic.optimizer))
    for each in trained:
        path = each.path
        if (model := models.get(path)) is None:
            continue
        if each.lora.rank and each.lora.experts and not expert_count(model):
            raise ConfigError(f"{each.lora_option}.experts=true: {path} has no experts: leave the option out")
        if config.model.float8 and expert_count(model):
            raise ConfigError(
                f"model.float8={config.model.float8} has not been tried with mixtures of experts such as {path}: leave "
                "the option out"
            )
        lora = replace(each.lora, path=None) if is_left_out(each.lora.path or "") else each.lora
        if lora.quantization or lora.path or (lora.rank and lora.exclude_modules):
            # The import loads torch, which takes seconds.
            from rl_plugins.launch.algorithm_check import check_adapter

            check_adapter(each.lora_option, path, lora, trust_remote_code=config.model.trust_remote_code)
        if (lr := each.optimizer.vision_lr) is None:
            continue
        option = f"{each.optimizer_option}.vision_lr={lr:g}"
        if not reads_images(model):
            raise ConfigError(f"{option}: {path} has no vision tower: leave the option out")
        if lr and each.lora.rank and each.lora.target_modules == LANGUAGE_MODEL:
            raise ConfigError(
                f"{option}: the vision tower has no adapter ({each.lora_option}.target_modules=language-model): leave "
                "the option out"
            )


def _check_heads(config: RecipeConfig, model: dict[str, Any]) -> None:
    text = model.get("text_config") or model
    heads = int(text.get("num_attention_heads") or 0)
    key_heads = int(text.get("num_key_value_heads") or heads)
    sizes = {
        "strategy.tensor_parallel": config.strategy.tensor_parallel,
        "strategy.sequence_parallel": config.strategy.sequence_parallel,
    }
    if config.needs_vllm:
        sizes["rollout.tensor_parallel_size"] = config.rollout.tensor_parallel_size

    def is_shared_by(size: int) -> bool:
        return heads % size == 0 and (key_heads % size == 0 or size % key_heads == 0)

    for option, size in sizes.items():
        if heads and not is_shared_by(size):
            fitting = max(smaller for smaller in range(1, size) if is_shared_by(smaller))
            raise ConfigError(
                f"{option}={size}: {size} processes cannot share the heads of model.path={config.model.path} "
                f"(num_attention_heads={heads}, num_key_value_heads={key_heads}): use {fitting}"
            )


def _check_data_files(config: RecipeConfig, is_made_later: Callable[[str], bool]) -> None:
    """Open the data files, which fails for a missing file or a missing column."""
    from rl_plugins.data.formats import FORMATS
    from rl_plugins.data.parquet import ParquetRows
    from rl_plugins.launch.measured_rows import kinds_of

    data = config.data
    for paths, kind in zip((data.training_files, data.val_files), kinds_of(config), strict=True):
        for path in paths:
            if not is_made_later(path):
                ParquetRows(Path(path), FORMATS[kind].columns)


def _check_reward_files(config: RecipeConfig) -> None:
    for source, reward in config.reward.functions.items() if config.scores else ():
        path = reward.get("path") if isinstance(reward, dict) and "_target_" not in reward else None
        if path and not Path(str(path)).is_file():
            raise ConfigError(f"reward.functions.{source}.path={path}: there is no such file")


def _check_output(config: RecipeConfig) -> None:
    output, name = Path(config.run.output_dir), config.run.name
    if JOB_FOLDERS in output.parts:
        raise ConfigError(
            f"run.output_dir={output} is in the folder that Ray made for this job, and is removed with it: give an "
            "absolute path that all machines see"
        )
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output):
            pass
    except OSError as error:
        raise ConfigError(
            f"run.output_dir={output} cannot be written ({error.strerror}): choose another folder"
        ) from None
    if config.store_uri == store_beside(output) and name in (STORE_FILE, ARTIFACTS):
        raise ConfigError(f"run.name={name}: the MLflow store in {output} has this name: choose another name")
    check_resume(config, RunFolder(output / name))
