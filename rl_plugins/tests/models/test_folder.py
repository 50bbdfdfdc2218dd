"""check_model_folder: each damaged or unfitting file of a model's folder is named, and whole folders are accepted."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save, save_file

from rl_plugins.errors import ConfigError
from rl_plugins.model_json import read_model_config
from rl_plugins.models.folder import check_folder, check_model_folder, check_model_type, check_packing
from rl_plugins.tests.files import flip_byte
from rl_plugins.tests.loops import for_each

CONFIG = {"model_type": "qwen2", "vocab_size": 8, "hidden_size": 4, "num_hidden_layers": 2, "num_attention_heads": 2}


def save_weights(file: Path, rows: int = 8, layers: int = 2) -> None:
    weights = {f"model.layers.{layer}.mlp.up_proj.weight": np.ones((6, 4), np.float32) for layer in range(layers)}
    save_file({"model.embed_tokens.weight": np.ones((rows, 4), np.float16), **weights}, file)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 7}}, "added_tokens": []}))
    save_weights(path / "model.safetensors")
    return path


def split(folder: Path) -> None:
    """Divide the weights into two files with an index."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    shards = {"a.safetensors": names[:1], "b.safetensors": names[1:]}
    for file, members in shards.items():
        save_file({name: weights[name] for name in members}, folder / file)
    weight_map = {name: file for file, members in shards.items() for name in members}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def break_shard(folder: Path, content: bytes | None) -> None:
    """Divide the weights, and replace the content of the second file; None removes the file."""
    split(folder)
    if content is None:
        (folder / "b.safetensors").unlink()
    else:
        (folder / "b.safetensors").write_bytes(content)


def break_index(folder: Path) -> None:
    split(folder)
    (folder / "model.safetensors.index.json").write_text("{}")


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_check_model_folder_accepts_whole_folders(folder: Path) -> None:
    check_model_folder("model.path", str(folder))
    # Blocks beyond num_hidden_layers, and a smaller stack of an encoder.
    weights = load_file(folder / "model.safetensors")
    extra = {f"model.layers.2.{name}": np.ones(2, np.float32) for name in ("norm.weight", "head.weight")}
    save_file({**weights, **extra, "visual.blocks.0.norm.weight": np.ones(2)}, folder / "model.safetensors")
    check_model_folder("model.path", str(folder))
    split(folder)
    check_model_folder("model.path", str(folder))
    change(folder / "config.json", text_config={**CONFIG}, vocab_size=None, rope_scaling=None)
    check_model_folder("model.path", str(folder))


def test_check_model_folder_accepts_a_special_token_without_an_embedding(folder: Path) -> None:
    """As in text models of Gemma 3, whose tokenizer has the token of an image."""
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    last = len(content["model"]["vocab"]) + 100
    content["added_tokens"].append({"id": last, "content": "<image>", "special": True})
    file.write_text(json.dumps(content))
    check_model_folder("model.path", str(folder))
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps({"pad_token": "<image>"}))
    with pytest.raises(ConfigError, match=f"the tokenizer has ids up to {last}, but the model has only"):
        check_model_folder("model.path", str(folder))
    settings.unlink()
    content["added_tokens"][-1]["special"] = False
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=f"the tokenizer has ids up to {last}, but the model has only"):
        check_model_folder("model.path", str(folder))


def test_check_model_folder_names_a_folder_with_the_name_of_a_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen" / "Qwen3-0.6B").mkdir(parents=True)
    hint = "a folder comes before a name of the hub: rename the folder to use Qwen/Qwen3-0.6B"
    for path in ("Qwen/Qwen3-0.6B", str(tmp_path / "Qwen" / "Qwen3-0.6B")):
        with pytest.raises(ConfigError, match=re.escape(hint)):
            check_model_folder("model.path", path)


DAMAGES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "config of another type": (
        lambda path: (path / "config.json").write_text("[1]"),
        ["config.json: not a JSON object, but of type list", "again"],
    ),
    "config of bytes": (lambda path: (path / "config.json").write_bytes(b"{\xff}"), ["config.json: not valid JSON"]),
    "deep config": (lambda path: (path / "config.json").write_text("[" * 10**5), ["config.json: not valid JSON"]),
    "size of text": (lambda path: change(path / "config.json", vocab_size="8"), ["vocab_size is '8', not a whole"]),
    "size of true": (lambda path: change(path / "config.json", hidden_size=True), ["hidden_size is 'True', not a"]),
    "text_config of text": (lambda path: change(path / "config.json", text_config="a"), ["text_config is 'a', not a"]),
    "no weights": (
        lambda path: (path / "model.safetensors").unlink(),
        ["the folder has no weights (model.safetensors or model.safetensors.index.json or pytorch_model.bin"],
    ),
    "empty weights": (
        lambda path: (path / "model.safetensors").write_bytes(b""),
        ["model.safetensors: not a whole safetensors file", "again"],
    ),
    "torn weights": (
        lambda path: (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:-1]),
        ["model.safetensors: not a whole safetensors file"],
    ),
    "flipped header": (
        lambda path: flip_byte(path / "model.safetensors", 12),
        ["model.safetensors: not a whole safetensors file"],
    ),
    "other vocabulary": (
        lambda path: save_weights(path / "model.safetensors", rows=9),
        ["model.embed_tokens.weight has 9 rows, and config.json has vocab_size=8"],
    ),
    "too few layers": (
        lambda path: save_weights(path / "model.safetensors", layers=1),
        ["model.layers.1 is missing, and config.json has num_hidden_layers=2"],
    ),
    "missing shard": (
        lambda path: break_shard(path, None),
        ["b.safetensors is missing, and model.safetensors.index.json names it"],
    ),
    "torn shard": (
        lambda path: break_shard(path, b"{}"),
        ["b.safetensors: not a whole safetensors file"],
    ),
    "tensor in no shard": (
        lambda path: break_shard(path, save({"x": np.ones(1)})),
        ["b.safetensors: the tensor model.layers.0.mlp.up_proj.weight", "is missing"],
    ),
    "index without a map": (
        break_index,
        ["model.safetensors.index.json: weight_map must give the file of each tensor"],
    ),
    "more tokens than rows": (
        lambda path: (path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 8}}}'),
        ["the tokenizer has ids up to 8, but the model has only 8 embeddings"],
    ),
    "tokenizer without a model": (
        lambda path: (path / "tokenizer.json").write_text('{"model": 3}'),
        ["tokenizer.json: not a tokenizer"],
    ),
    "vocabulary of a number": (
        lambda path: (path / "tokenizer.json").write_text('{"model": {"vocab": 0.5}}'),
        ["tokenizer.json: not a tokenizer"],
    ),
    "token without id": (
        lambda path: (path / "tokenizer.json").write_text('{"model": {}, "added_tokens": [{}]}'),
        ["tokenizer.json: a token has no whole number as its id"],
    ),
    "torn tokenizer settings": (
        lambda path: (path / "tokenizer_config.json").write_text('{"eos'),
        ["tokenizer_config.json: not valid JSON"],
    ),
    "torn generation settings": (
        lambda path: (path / "generation_config.json").write_text('{"eos'),
        ["generation_config.json: not valid JSON", "again"],
    ),
    "generation settings of a list": (
        lambda path: (path / "generation_config.json").write_text("[1]"),
        ["generation_config.json: not a JSON object, but of type list"],
    ),
    "generation settings of bytes": (
        lambda path: (path / "generation_config.json").write_bytes(b"{\xff}"),
        ["generation_config.json: not valid JSON"],
    ),
}


@for_each("damage", DAMAGES)
def test_check_model_folder_names_the_file_and_the_fault(folder: Path, damage: str) -> None:
    damaged = folder.with_name(damage)
    shutil.copytree(folder, damaged)
    harm, expected = DAMAGES[damage]
    harm(damaged)
    with pytest.raises(ConfigError) as raised:
        check_model_folder("model.path", str(damaged))
    assert "\n" not in str(raised.value) and str(damaged) in str(raised.value)
    assert [words for words in expected if words not in str(raised.value)] == []


def test_check_model_type_names_a_model_that_transformers_lacks(folder: Path) -> None:
    check_model_type(str(folder), read_model_config(folder / "config.json"))
    for model_type in ("qwen99", None, ["qwen2"]):
        change(folder / "config.json", model_type=model_type)
        with pytest.raises(ConfigError, match=f"config.json: model_type is {re.escape(repr(model_type))}, and transf"):
            check_model_type(str(folder), read_model_config(folder / "config.json"))


@for_each(
    ("config", "kind"),
    [
        # Without `layer_types`, as in the files of Qwen3-Next.
        ({"model_type": "qwen3_next", "full_attention_interval": 4}, "linear_attention"),
        ({"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text"}}, "linear_attention"),
        ({"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"], "num_hidden_layers": 2}, "linear"),
        ({"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}, "conv"),
        ({"model_type": "falcon_h1"}, "hybrid"),
        ({"model_type": "recurrent_gemma"}, "recurrent"),
    ],
)
def test_check_packing_refuses_layers_with_a_state(config: dict[str, Any], kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=rf"model.path=.*: layers of the kind {kind}.* set batch\.packing=false"):
        check_packing("model.path", str(tmp_path))


def test_check_packing_accepts_attention_and_models_that_only_a_run_can_judge(tmp_path: Path) -> None:
    for config, trusted in (
        ({"model_type": "qwen3"}, False),
        ({"model_type": "gemma2"}, False),
        ({"model_type": "qwen2_5_vl"}, False),
        # The small models of Granite 4 have the sizes of a state, and no layer with a state.
        ({"model_type": "granitemoehybrid", "layer_types": ["attention"] * 2, "num_hidden_layers": 2}, False),
        ({"model_type": "own", "auto_map": {"AutoModelForCausalLM": "own.Model"}}, True),
        ({"model_type": "qwen3_next", "auto_map": {"AutoModelForCausalLM": "own.Model"}}, True),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        check_packing("model.path", str(tmp_path), trust_remote_code=trusted)


def test_check_packing_names_the_fault_that_transformers_finds(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "rms_norm_eps": "small"}))
    with pytest.raises(ConfigError, match=r"model\.path=.*: transformers refuses config\.json \(.*rms_norm_eps"):
        check_packing("model.path", str(tmp_path))


@for_each("where", [{}, {"text_config": {}}])
def test_check_folder_refuses_quantized_weights(folder: Path, where: dict[str, Any]) -> None:
    quantized = {"quantization_config": {"quant_method": "fp8"}}
    change(folder / "config.json", **({"text_config": quantized} if where else quantized))
    with pytest.raises(ConfigError, match=r"the weights are quantized \(fp8\): name a model with weights in bfloat16"):
        check_folder(str(folder), trust_remote_code=False)
    # A rollout engine reads such weights.
    check_model_folder("policy", str(folder))
