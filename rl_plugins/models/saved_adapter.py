"""A saved LoRA adapter in the format of peft, as the start of a trained adapter.

The folder has the settings in adapter_config.json, and the weights in adapter_model.safetensors. The adapter must be
the adapter that the options describe: the options, and not the files, are in the configuration of a run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl_plugins.config.models import LoraConfig
from rl_plugins.errors import ConfigError
from rl_plugins.hub.files import ADAPTER_FILES, adapter_folder
from rl_plugins.model_json import AGAIN
from rl_plugins.models.finite import not_finite
from rl_plugins.text_file import read_json_object
from rl_plugins.vision_language import is_vision_language, vision_tower

if TYPE_CHECKING:
    from peft import PeftModel

_FREE = frozenset({
    "auto_mapping", "base_model_name_or_path", "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode",
    "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout", "megatron_core",
    "peft_type", "peft_version", "qalora_group_size", "r", "revision", "runtime_config", "target_modules",
    "target_parameters", "task_type",
})  # fmt: skip
"""Settings of peft that do not change the sum `scaling * B A`, or that are compared with the options."""
_PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` under which the base weights stay as they are."""
_MERGE = "merge the adapter into its model (merge_and_unload of peft), and name the merged model"


def load_adapter(model: PeftModel, config: LoraConfig) -> None:
    """Give the adapter of a model the weights at `config.path`.

    Tensors on the device `meta` stay without weights. A new scalar head keeps its weights. Layers of a vision tower may
    be missing in the saved adapter, and change nothing then.

    Args:
        model: model with the adapter of the settings.
        config: settings of the adapter, with a path.

    Raises:
        ConfigError: there is no such adapter, or its files are damaged; or the adapter has another rank, scale or other
            layers than the settings, is an adapter of another model, or is not a plain LoRA adapter.
    """
    saved = read_settings(config)
    weights = _read_weights(config)
    adapter = model.active_adapter
    own = {
        re.sub(rf"\.(lora_[AB])\.{adapter}\.", r".\1.", name): parameter
        for name, parameter in model.named_parameters()
        if ".lora_A." in name or ".lora_B." in name
    }
    if is_vision_language(model):
        # A run with a frozen vision tower exports its adapter without the tower.
        of_tower = {id(parameter) for parameter in vision_tower(model).parameters()}
        own = {name: parameter for name, parameter in own.items() if name in weights or id(parameter) not in of_tower}
    _compare(model, config, saved, {name: getattr(p, "ds_shape", p.shape) for name, p in own.items()}, weights)
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(weights[name])


def read_settings(config: LoraConfig) -> dict[str, Any]:
    """Return adapter_config.json of a saved adapter after a check of the kind, the rank and the scale of the adapter.

    Args:
        config: settings of the adapter, with a path.

    Raises:
        ConfigError: see `load_adapter`.
    """
    import peft

    folder = Path(adapter_folder(str(config.path)))
    for name in ADAPTER_FILES:
        if not (folder / name).is_file():
            where = "no such folder" if not folder.is_dir() else f"the folder has no {name}"
            raise _refusal(config, f"{where}: name a folder with {' and '.join(ADAPTER_FILES)}, as peft saves them")
    saved = read_json_object(folder / ADAPTER_FILES[0], AGAIN)
    if saved.get("peft_type") != "LORA":
        raise _refusal(config, f"the adapter is of the kind {_brief(saved.get('peft_type'))}, not LORA: {_MERGE}")
    plain = peft.LoraConfig().to_dict()
    changed = [key for key, value in saved.items() if key not in _FREE and (value or None) != (plain.get(key) or None)]
    if saved.get("init_lora_weights") not in _PLAIN_STARTS:
        changed.append("init_lora_weights")
    if changed:
        key = min(changed)
        has = f"the adapter has {_brief(key)}={_brief(saved[key])}"
        raise _refusal(config, f"{has}, and only plain LoRA adapters are trained here: {_MERGE}")
    options = {"rank": (config.rank, saved.get("r")), "alpha": (config.alpha, saved.get("lora_alpha"))}
    if differing := {name: value for name, (option, value) in options.items() if option != value}:
        now = ", ".join(f"{name}={options[name][0]:g}" for name in differing)
        fitting = ", ".join(f"{name}={_brief(value)}" for name, value in differing.items())
        raise _refusal(config, f"the adapter has {fitting}, and the options {now}: use {fitting}")
    return saved


def _read_weights(config: LoraConfig) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = Path(adapter_folder(str(config.path))) / ADAPTER_FILES[1]
    try:
        weights = load_file(file)
    except (SafetensorError, OSError) as error:
        raise _refusal(config, f"{file.name} is not a whole safetensors file ({error}): {AGAIN}") from None
    if bad := not_finite(weights.items()):
        raise _refusal(config, f"{bad[0]} has weights that are NaN or infinite: name another adapter")
    return weights


def _compare(
    model: PeftModel,
    config: LoraConfig,
    saved: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    weights: Mapping[str, Tensor],
) -> None:
    """Compare the layers and the shapes of the saved adapter with the adapter of the model."""
    kind = type(model.get_base_model()).__name__
    modules = {name for name, _ in model.named_modules()}
    for name in sorted(weights.keys() - shapes.keys()):
        layer = _layer(name)
        if ".lora_" not in name:
            raise _refusal(config, f"the adapter has whole weights of {_shown(layer)}: {_MERGE}")
        if layer not in modules:
            raise _refusal(config, f"the adapter changes {_shown(layer)}, which {kind} does not have: {_OTHER}")
        raise _refusal(config, f"the adapter changes {_shown(layer)}, and the options leave it out: {_use(saved)}")
    for name in sorted(shapes.keys() - weights.keys()):
        layer = _layer(name)
        raise _refusal(config, f"the options name {_shown(layer)}, which the adapter does not change: {_use(saved)}")
    for name, shape in shapes.items():
        if weights[name].shape != shape:
            raise _refusal(
                config,
                f"{_shown(name)} has the shape {list(weights[name].shape)}, and {kind} needs {list(shape)}: {_OTHER}",
            )


_OTHER = "the adapter is of another model: name the model of its adapter_config.json (base_model_name_or_path)"


def _use(saved: Mapping[str, Any]) -> str:
    """Return the way out for an adapter of other layers."""
    targets, excluded = saved.get("target_modules"), saved.get("exclude_modules")
    used = [f"target_modules={_text(targets)}"] if targets else []
    used += [f"exclude_modules={_text(excluded)}"] if excluded else []
    used += ["experts=true"] if saved.get("target_parameters") else []
    return f"use {' '.join(used)}, as in its adapter_config.json"


def _text(modules: object) -> str:
    """Return modules as an option. peft saves the whole name of each layer, and the last part names all alike."""
    if not isinstance(modules, list):
        return _brief(modules)
    ends = {str(name).rpartition(".")[2] for name in modules}
    return _brief(f"[{','.join(sorted(ends))}]", 300)


def _brief(value: object, length: int = 60) -> str:
    return " ".join(str(value).split())[:length]


def _layer(name: str) -> str:
    """Return the name of the layer of a saved weight."""
    return re.sub(r"(?:\.base_layer)*\.lora_.*$", "", name)


def _shown(name: str) -> str:
    return _brief(name.removeprefix("base_model.model."), 200)


def _refusal(config: LoraConfig, fault: str) -> ConfigError:
    return ConfigError(f"LoraConfig: path={config.path}: {fault}")
