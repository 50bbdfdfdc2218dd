"""Check of a model's folder: config.json, weights and tokenizer, before a model is loaded.

Of the weights, only the headers are read, so the check takes as long for a large model as for a small one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_plugins.errors import ConfigError
from rl_plugins.hub.files import check_hub_weights, model_folder
from rl_plugins.hub.names import model_name
from rl_plugins.model_json import AGAIN, read_model_config
from rl_plugins.text_file import read_json_object, read_text

_WEIGHTS = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
)  # fmt: skip
"""Files of weights, in the order in which transformers looks for them."""
_WITH_STATE = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding", "recurrent"})
"""Kinds of layers with a state that runs from token to token, by their names in transformers."""
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|wte|word_embeddings|embed_in)\.weight$")
_LAYER = re.compile(r"(?P<blocks>(?:^|.*\.)(?:layers|h|blocks))\.(?P<number>\d+)\.")


def check_model_folder(
    option: str, path: str, *, weights: bool = True, trust_remote_code: bool = False
) -> dict[str, Any]:
    """Check the files of a model's folder against each other; return the content of its config.json.

    Of a model of the hub, the files of configuration and tokenizer are downloaded and checked first.

    Args:
        option: option or argument with the path, for messages.
        path: folder, or name on the hub.
        weights: check the weights, too. Missing weights of a model of the hub are downloaded.
        trust_remote_code: see `LoadingOptions`.

    Raises:
        ConfigError: a file is missing, damaged, or does not fit config.json; the model needs code of its folder, and
            the code is not trusted; or the hub does not give the model.
    """
    on_hub = model_name(path) is not None
    if not on_hub and not Path(path).is_dir():
        is_path = path.startswith((".", "/", "~")) or path.count("/") > 1
        hint = "" if is_path else ", and this is no name of the hub (OWNER/NAME or OWNER/NAME@REVISION)"
        raise ConfigError(f"{option}={path}: no such folder{hint}")
    folder = Path(model_folder(path, option=option, weights=False, trust_remote_code=trust_remote_code))
    if on_hub:
        check_hub_weights(path, option=option, trust_remote_code=trust_remote_code)
    if not (folder / "config.json").is_file():
        if on_hub:
            raise ConfigError(f"{option}={path}: the repository has no config.json: name a model of transformers")
        raise ConfigError(
            f"{option}={path}: the folder has no config.json, so it is not a Hugging Face model{_like_a_name(folder)}"
        )
    config = read_model_config(folder / "config.json")
    check_remote_code(f"{option}={path}", config, trust_remote_code=trust_remote_code)
    if weights:
        model_folder(path, option=option, trust_remote_code=trust_remote_code)
        _check_weights(folder, config)
    vocabulary = (config.get("text_config") or config).get("vocab_size")
    if (folder / "tokenizer.json").is_file():
        last = _last_token(folder / "tokenizer.json")
        if vocabulary is not None and last >= vocabulary:
            raise ConfigError(
                f"{option}={path}: the tokenizer has ids up to {last}, but the model has only {vocabulary} embeddings: "
                "save the tokenizer of this model in the folder"
            )
    for name in ("tokenizer_config.json", "generation_config.json"):
        if (folder / name).is_file():
            read_json_object(folder / name, AGAIN)
    return config


def _like_a_name(folder: Path) -> str:
    """Return a hint if the folder's path in the working directory is a name on the hub, too."""
    try:
        parts = folder.absolute().relative_to(Path.cwd()).parts
    except ValueError:
        return ""
    name = "/".join(parts)
    return f"; a folder comes before a name of the hub: rename the folder to use {name}" if len(parts) == 2 else ""


def check_remote_code(model: str, config: Mapping[str, Any], *, trust_remote_code: bool) -> None:
    """Check that a model needs no Python code of its own, or that the code is trusted.

    transformers has code for many models that also bring code. Without trust, the code of transformers runs.

    Args:
        model: name of the model for the message.
        config: content of the model's config.json.
        trust_remote_code: see `LoadingOptions`.

    Raises:
        ConfigError: config.json names code (`auto_map`) of a model that transformers lacks, without trust.
    """
    if "auto_map" in config and not trust_remote_code and not _is_in_transformers(config):
        raise ConfigError(
            f"{model}: config.json names Python code of the model (auto_map), which would run with all your rights: "
            "read the code, then trust it with model.trust_remote_code=true (commands: --trust-remote-code, Python: "
            "trust_remote_code=True), or use a model of transformers"
        )


def check_whole_weights(model: str, config: Mapping[str, Any]) -> None:
    """Check that the weights of a model are not quantized: a training worker would read the codes as weights.

    Args:
        model: name of the model for the message.
        config: content of the model's config.json.

    Raises:
        ConfigError: config.json has a `quantization_config`.
    """
    quantization = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
        raise ConfigError(
            f"{model}: the weights are quantized ({method or 'quantization_config in config.json'}): name a model with "
            "weights in bfloat16 or float32; model.lora.quantization=nf4 quantizes the frozen weights under an adapter"
        )


def check_folder(path: str, *, trust_remote_code: bool) -> None:
    """Do `check_remote_code` and `check_whole_weights` for a local folder with a config.json."""
    file = Path(path) / "config.json"
    if file.is_file():
        config = read_model_config(file)
        check_remote_code(path, config, trust_remote_code=trust_remote_code)
        check_whole_weights(path, config)


def check_model_type(path: str, config: Mapping[str, Any]) -> None:
    """Check that transformers has the model of a config.json. The check loads transformers without torch.

    Args:
        path: folder or name of the model, for messages.
        config: content of config.json.

    Raises:
        ConfigError: the `model_type` of config.json is unknown, and the model has no code of its own.
    """
    if "auto_map" not in config and not _is_in_transformers(config):
        raise ConfigError(
            f"{path}/config.json: model_type is {config.get('model_type')!r}, and transformers has no such model: use "
            "a model of transformers, or a newer version of transformers"
        )


def check_packing(option: str, path: str, *, trust_remote_code: bool = False) -> None:
    """Check that no state of a model runs from sample to sample of a packed row. The check loads torch.

    Models that mix packed samples in another way are refused at their first packed row.

    Args:
        option: option or argument with the path, for messages.
        path: folder, or name on the hub.
        trust_remote_code: see `LoadingOptions`. Layers of trusted code are not known.

    Raises:
        ConfigError: a layer of the model has a state, or transformers refuses config.json.
    """
    folder = model_folder(path, option=option, weights=False, trust_remote_code=trust_remote_code)
    config = read_model_config(Path(folder) / "config.json")
    if not _is_in_transformers(config) or ("auto_map" in config and trust_remote_code):
        return
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        text: Any = AutoConfig.from_pretrained(folder).get_text_config()
    except (
        StrictDataclassError,
        ArithmeticError,
        AttributeError,
        LookupError,
        OSError,
        TypeError,
        ValueError,
    ) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{option}={path}: transformers refuses config.json ({reason}): {AGAIN}") from None
    layers = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ()
    if with_state := sorted(_WITH_STATE & set(layers)):
        raise ConfigError(
            f"{option}={path}: layers of the kind {with_state[0]} carry a state from sample to sample of a packed row: "
            "set batch.packing=false"
        )


def _is_in_transformers(config: Mapping[str, Any]) -> bool:
    from transformers.models.auto.auto_mappings import CONFIG_MAPPING_NAMES

    name = config.get("model_type")
    return isinstance(name, str) and name in CONFIG_MAPPING_NAMES


# Weights ----------------------------------------------------------------------------------------------------------


def _check_weights(folder: Path, config: Mapping[str, Any]) -> None:
    """Check that the weights are there and whole, and that embedding and layers have the sizes of config.json."""
    names = [str(config["transformers_weights"])] if config.get("transformers_weights") else _WEIGHTS
    file = next((folder / name for name in names if (folder / name).is_file()), None)
    if file is None:
        raise ConfigError(f"{folder}: the folder has no weights ({' or '.join(names)}): {AGAIN}")
    shards = _shards(file) if file.suffix == ".json" else {file: []}
    shapes: dict[str, Sequence[int]] = {}
    for shard, tensors in shards.items():
        if shard.suffix == ".safetensors":
            held = _read_shapes(shard)
            if lost := sorted(set(tensors) - held.keys()):
                raise ConfigError(f"{shard}: the tensor {lost[0]}, which {file.name} names, is missing: {AGAIN}")
            shapes |= held
    _check_shapes(file, shapes, config.get("text_config") or config)


def _shards(index: Path) -> dict[Path, list[str]]:
    """Return the names of the tensors in each file that an index names."""
    files = read_json_object(index, AGAIN).get("weight_map")
    if not isinstance(files, dict) or not files or not all(isinstance(name, str) for name in files.values()):
        raise ConfigError(f"{index}: weight_map must give the file of each tensor: {AGAIN}")
    shards: dict[Path, list[str]] = {}
    for tensor, name in files.items():
        shards.setdefault(index.parent / name, []).append(tensor)
    if lost := sorted(shard for shard in shards if not shard.is_file()):
        raise ConfigError(f"{lost[0]} is missing, and {index.name} names it: {AGAIN}")
    return shards


def _read_shapes(file: Path) -> dict[str, Sequence[int]]:
    """Return the shape of each tensor, from the header of a safetensors file. The library compares header and size."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as weights:
            return {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file}: not a whole safetensors file ({error}): {AGAIN}") from None


def _check_shapes(file: Path, shapes: Mapping[str, Sequence[int]], text: Mapping[str, Any]) -> None:
    for name, shape in shapes.items():
        rows = text.get("vocab_size")
        if _EMBEDDING.search(name) and len(shape) == 2 and rows is not None and shape[0] != rows:
            raise ConfigError(
                f"{file}: {name} has {shape[0]} rows, and config.json has vocab_size={rows}: use the config.json of "
                "these weights"
            )
    layers = text.get("num_hidden_layers")
    # A model of images and texts has several stacks of blocks, and some models have blocks beyond num_hidden_layers.
    stacks: dict[str, set[int]] = {}
    for found in filter(None, map(_LAYER.match, shapes)):
        stacks.setdefault(found["blocks"], set()).add(int(found["number"]))
    if layers is None or not stacks or any(numbers.issuperset(range(layers)) for numbers in stacks.values()):
        return
    blocks, numbers = max(stacks.items(), key=lambda stack: len(stack[1]))
    lost = next(number for number in range(layers) if number not in numbers)
    raise ConfigError(
        f"{file}: {blocks}.{lost} is missing, and config.json has num_hidden_layers={layers}: use the config.json of "
        f"these weights, or {AGAIN}"
    )


# Tokenizer --------------------------------------------------------------------------------------------------------


def _unused_tokens(tokens: Iterable[str], folder: Path) -> set[str]:
    """Return the special tokens outside the chat template of a tokenizer, without a part in each text."""
    file, template = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    settings = read_json_object(file, AGAIN) if file.is_file() else {}
    named = (settings.get(f"{kind}_token") for kind in ("bos", "eos", "pad", "unk"))
    contents = [one.get("content") if isinstance(one, dict) else one for one in named]
    texts = [str(settings.get("chat_template") or ""), read_text(template, AGAIN) if template.is_file() else ""]
    return {token for token in tokens if token not in contents and not any(token in text for text in texts)}


def _last_token(file: Path) -> int:
    """Return the largest token id of a tokenizer.json, without unused special tokens; -1 if there is none.

    Text models of Gemma 3 have no embedding for the token of an image.
    """
    content = read_json_object(file, AGAIN)
    model, added = content.get("model"), content.get("added_tokens") or []
    vocab = (model.get("vocab") or {}) if isinstance(model, dict) else None
    if not isinstance(vocab, dict | list) or not isinstance(added, list):
        raise ConfigError(f"{file}: not a tokenizer of the library tokenizers: {AGAIN}")
    special = {
        str(token.get("content")): token.get("id")
        for token in added
        if isinstance(token, dict) and token.get("special") is True
    }
    unused = {special[token] for token in _unused_tokens(special, file.parent)}
    ids: list[Any] = [token.get("id") if isinstance(token, dict) else None for token in added]
    ids += list(vocab.values()) if isinstance(vocab, dict) else range(len(vocab))
    if not all(type(number) is int for number in ids):
        raise ConfigError(f"{file}: a token has no whole number as its id: {AGAIN}")
    last: int = max(set(ids) - unused, default=-1)
    return last
