"""Any checkpoint of a run as a Hugging Face folder (`rl-plugins export`).

Of most runs that is the policy, of one that trains a reward model the reward model.

It needs neither a cluster nor as many processes as trained: the shards of FSDP2 or of any ZeRO stage, and of any world
size, are put together in this process. Of a run with a moving average (`average.keep`) it is the average, which was
validated. A run writes its last policy by itself (`policy/`); this is for the checkpoints before it.
"""

from __future__ import annotations

import os
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rl_plugins.errors import ConfigError
from rl_plugins.run_folder import RunFolder

if TYPE_CHECKING:
    import torch
    from peft import PeftModel
    from torch import Tensor
    from torch.nn import Parameter
    from transformers import PreTrainedModel

    from rl_plugins.models.lora import LoraConfig, MergedWeightSource


def export_checkpoint(
    checkpoint: Path, out: Path, model: str | None = None, *, lora: Literal["merged", "adapter"] | None = None
) -> None:
    """Write the trained model of a checkpoint as a Hugging Face folder, in the dtype that the run itself exports.

    Args:
        checkpoint: `checkpoint_00000050` of a run.
        out: the folder to write; must not exist.
        model: Hugging Face name or folder of the architecture and the tokenizer; the run's `model.path` by default.
        lora: of a run with an adapter, write the merged model or the adapter alone; by default as `run.export_lora` of
            the run says.

    Raises:
        ConfigError: not a checkpoint, no model to go with it, weights of another model, an adapter is asked for where
            there is none, an average in parts that are not put together here, or `out` exists.
    """
    if out.exists():
        raise ConfigError(f"{out} exists: give another folder, or remove it")
    state = checkpoint / "state"
    if not state.exists():
        raise ConfigError(f"{checkpoint} is not a checkpoint of a run: it has no {state.name}")
    path, precision, trained = _model_of(checkpoint, model)

    # DeepSpeed, which transformers imports too, would look for a device and say so.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from rl_plugins.callbacks.averages import read_average
    from rl_plugins.data.tokenization import load_tokenizer
    from rl_plugins.launch.quiet import quiet_libraries
    from rl_plugins.models.export import save_adapter, save_policy, write_policy

    quiet_libraries()
    adapter, as_adapter = _lora_of(checkpoint)
    if lora is not None:
        as_adapter = lora == "adapter"
    if lora == "adapter" and adapter is None:
        raise ConfigError(f"{checkpoint} is of a run without an adapter (model.lora.rank=0): leave --lora out")
    weights = _sharded(state, trained) if state.is_dir() else _single(state, trained)
    weights |= read_average(checkpoint, {name: tensor.shape for name, tensor in weights.items()})
    what, tokenizer = f"{path} ({state})", load_tokenizer(path)
    if adapter is None:
        policy = _architecture(path, precision, trained)
        write_policy(policy, _fit(weights, dict(policy.named_parameters()), what), tokenizer, out)
        return
    adapted, source = _adapted(path, precision, trained, adapter, weights, what)
    if as_adapter:
        save_adapter(adapted, source.adapter(), tokenizer, out, is_writer=True)
    else:
        save_policy(adapted, source, tokenizer, out, is_writer=True)


def _lora_of(checkpoint: Path) -> tuple[LoraConfig | None, bool]:
    """The adapter of the run, and whether it is exported alone."""
    from omegaconf import OmegaConf

    from rl_plugins.models.lora import LoraConfig

    file = RunFolder(checkpoint.absolute().parent).config
    config: Any = OmegaConf.to_container(OmegaConf.load(file)) if file.is_file() else {}
    options = config.get("model", {}).get("lora", {})
    as_adapter = config.get("run", {}).get("export_lora") == "adapter"
    return (LoraConfig(**options) if options.get("rank") else None), as_adapter


def _adapted(
    path: str, precision: str, trained: str, lora: LoraConfig, weights: dict[str, Tensor], what: str
) -> tuple[PeftModel, MergedWeightSource]:
    """The model that the run started from, with the adapter of the checkpoint."""
    import torch

    from rl_plugins.models.loading import load_causal_lm
    from rl_plugins.models.lora import MergedWeightSource, add_adapter
    from rl_plugins.models.scalar_head import load_scalar_head
    from rl_plugins.rollout.weights import ModuleWeightSource
    from rl_plugins.strategies.contract import POLICY

    load: Any = load_causal_lm if trained == POLICY else load_scalar_head
    model = add_adapter(load(path, dtype=_dtype(precision)), lora)
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    with torch.no_grad():
        for name, weight in _fit(weights, parameters, what).items():
            parameters[name].copy_(weight)
    return model, MergedWeightSource(ModuleWeightSource(model), model)


def _model_of(checkpoint: Path, model: str | None) -> tuple[str, str, str]:
    """Where the architecture and the tokenizer are, the precision of the run, and the engine that it trained."""
    from omegaconf import OmegaConf

    from rl_plugins.strategies.contract import POLICY, REWARD_MODEL

    file = RunFolder(checkpoint.absolute().parent).config
    config: Any = OmegaConf.load(file) if file.is_file() else OmegaConf.create()
    path = model or OmegaConf.select(config, "model.path")
    if path is None:
        raise ConfigError(f"{file} does not name the model that was trained: name its folder with --model")
    if path.startswith(("/", ".", "~")) and not Path(path).is_dir():
        named = "--model" if model else str(file)
        raise ConfigError(f"{named} names {path}, which is not there: name a folder of the architecture with --model")
    trained = REWARD_MODEL if OmegaConf.select(config, "stage") == "reward_modeling" else POLICY
    return path, OmegaConf.select(config, "model.precision") or "32-true", trained


def _architecture(path: str, precision: str, trained: str) -> PreTrainedModel:
    """The model without its weights, in the dtype of the export."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification, GenerationConfig

    from rl_plugins.models.scalar_head import scalar_head_config
    from rl_plugins.strategies.contract import POLICY

    dtype = _dtype(precision)
    model: PreTrainedModel
    with torch.device("meta"):
        if trained != POLICY:
            return AutoModelForTokenClassification.from_config(scalar_head_config(path), dtype=dtype)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=dtype)
    # A file that a model need not have.
    with suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(path)
    return model


def _dtype(precision: str) -> torch.dtype:
    import torch

    return torch.float32 if precision == "32-true" else torch.bfloat16


def _sharded(state: Path, trained: str) -> dict[str, Tensor]:
    from rl_plugins.strategies.fsdp_checkpoint import is_engine_folder, read_weights

    if is_engine_folder(state / trained):
        return read_weights(state / trained)
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    folder = state / trained
    if not (folder / "latest").is_file():
        raise ConfigError(f"{state} holds no shards of engine {trained!r}")
    # It prints what it finds, shard by shard.
    with redirect_stdout(None), open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
        weights: dict[str, Tensor] = get_fp32_state_dict_from_zero_checkpoint(str(folder))
    return weights


def _single(state: Path, trained: str) -> dict[str, Tensor]:
    import torch

    # Loop and callback states are plain Python objects; the file was written by this program.
    checkpoint = torch.load(state, map_location="cpu", weights_only=False, mmap=True)
    prefix = f"{trained}."
    weights = checkpoint.get("state_dict", {})
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def _fit(weights: dict[str, Tensor], parameters: dict[str, Parameter], what: str) -> dict[str, Tensor]:
    """The weights of some parameters of a model, tied ones once, in their dtypes."""
    wrong = [
        name for name, parameter in parameters.items() if name not in weights or weights[name].shape != parameter.shape
    ]
    if wrong:
        raise ConfigError(
            f"the checkpoint is not of the model {what}: {len(wrong)} of {len(parameters)} parameters are missing or "
            f"have another shape, {wrong[0]} first"
        )
    return {name: weights[name].to(parameter.dtype) for name, parameter in parameters.items()}
