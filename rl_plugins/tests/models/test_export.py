"""save_policy and export_checkpoint: tensors of an exported policy that are no parameters."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import GenerationConfig

from benchmarks.tiny_families import save_tiny_family
from rl_plugins.commands.export import export_checkpoint
from rl_plugins.config.models import LoraConfig
from rl_plugins.errors import ConfigError
from rl_plugins.models.export import add_ends, save_adapter, save_policy
from rl_plugins.models.lora import add_adapter, plain_weights
from rl_plugins.models.tiny import build_model, build_tokenizer
from rl_plugins.tests.files import rewrite_manifest
from rl_plugins.tests.launch.configurations import message_of
from rl_plugins.weights.source import ModuleWeightSource


def test_save_policy_keeps_the_buffers_of_a_router(tmp_path: Path) -> None:
    tokenizer: Any = build_tokenizer()
    for name, rank in (("whole", 0), ("adapted", 2)):
        model: Any = save_tiny_family("glm4_moe", tmp_path / "start")
        model.model.layers[1].mlp.gate.e_score_correction_bias.fill_(0.25)
        before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
        model.save_pretrained(tmp_path / "start")
        policy = add_adapter(model, LoraConfig(rank=rank)) if rank else model
        save_policy(policy, plain_weights(ModuleWeightSource(policy), policy), tokenizer, tmp_path / name, True)
        files, start = (load_file(tmp_path / folder / "model.safetensors") for folder in (name, "start"))
        assert files.keys() == start.keys()
        assert all(torch.equal(files[key], start[key]) for key in start)
        (bias,) = [tensor for key, tensor in files.items() if key.endswith("e_score_correction_bias")]
        assert (bias == 0.25).all() and any(key.endswith("e_score_correction_bias") for key in before)


def test_export_checkpoint_keeps_the_buffers_of_a_router(tmp_path: Path) -> None:
    model: Any = save_tiny_family("glm4_moe", tmp_path / "start")
    model.model.layers[1].mlp.gate.e_score_correction_bias.fill_(0.25)
    checkpoint = tmp_path / "run" / "checkpoint_00000001"
    checkpoint.mkdir(parents=True)
    weights = {f"policy.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save({"state_dict": weights}, checkpoint / "state")
    rewrite_manifest(checkpoint)
    export_checkpoint(checkpoint, tmp_path / "out", str(tmp_path / "start"))
    model.save_pretrained(tmp_path / "trained")
    files, trained = (load_file(tmp_path / folder / "model.safetensors") for folder in ("out", "trained"))
    assert files.keys() == trained.keys()
    assert all(torch.equal(files[key], trained[key]) for key in trained)


def test_config_of_an_export_names_the_dtype_of_the_exported_weights(tmp_path: Path) -> None:
    policy, tokenizer = build_model(), build_tokenizer()
    # FSDP2 exports float32 shards in the dtype of computation.
    exported = ModuleWeightSource(deepcopy(policy).bfloat16())
    save_policy(policy, exported, tokenizer, tmp_path / "policy", True)
    assert json.loads((tmp_path / "policy" / "config.json").read_text())["dtype"] == "bfloat16"
    files = load_file(tmp_path / "policy" / "model.safetensors")
    assert {tensor.dtype for tensor in files.values()} == {torch.bfloat16}


def test_save_policy_keeps_options_of_sampling_that_transformers_refuses(tmp_path: Path) -> None:
    """Published models have options of sampling without `do_sample`."""
    policy, tokenizer = build_model(), build_tokenizer()
    policy.generation_config = GenerationConfig(temperature=0.9, top_p=0.6, eos_token_id=[3, 4])
    save_policy(policy, ModuleWeightSource(policy), tokenizer, tmp_path, True)
    saved = json.loads((tmp_path / "generation_config.json").read_text())
    assert (saved["temperature"], saved["top_p"], saved["eos_token_id"]) == (0.9, 0.6, [3, 4])
    assert policy.generation_config.temperature == 0.9 and (tmp_path / "model.safetensors").is_file()


def test_save_policy_takes_a_folder_as_text(tmp_path: Path) -> None:
    policy, tokenizer = build_model(), build_tokenizer()
    save_policy(policy, ModuleWeightSource(policy), tokenizer, str(tmp_path / "policy"), True)
    assert (tmp_path / "policy" / "config.json").is_file()


def test_save_policy_refuses_a_folder_of_a_second_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, tokenizer, folder = build_model(), build_tokenizer(), tmp_path / "policy"
    # A killed export leaves such files.
    left = tmp_path / ".policy.partial" / "new" / "left.txt"
    left.parent.mkdir(parents=True)
    left.touch()
    refused: list[str] = []

    def save() -> None:
        save_policy(policy, ModuleWeightSource(policy), tokenizer, folder, True)

    def save_twice(*arguments: Any, **options: Any) -> None:
        monkeypatch.undo()
        refused.append(message_of(save))
        policy.save_pretrained(*arguments, **options)

    monkeypatch.setattr(policy, "save_pretrained", save_twice)
    save()
    assert refused == [f"{folder}: another process is writing this folder: wait for it, or give another folder"]
    assert (folder / "model.safetensors").is_file() and not (folder / left.name).exists()
    save()
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]


def test_export_to_an_address_is_refused_on_every_rank() -> None:
    model: Any = torch.nn.Linear(1, 1)
    tokenizer, folder = build_tokenizer(), Path("s3://bucket/policy")
    for is_writer in (True, False):
        with pytest.raises(ConfigError, match="folder=s3://bucket/policy: an address cannot be used here"):
            save_policy(model, ModuleWeightSource(model), tokenizer, folder, is_writer)
        with pytest.raises(ConfigError, match="folder=s3://bucket/policy: an address cannot be used here"):
            save_adapter(model, {}, tokenizer, folder, is_writer)


def test_add_ends_names_further_ends_of_responses() -> None:
    model = build_model()
    own = model.generation_config.eos_token_id
    add_ends(model, [own])
    assert model.generation_config.eos_token_id == own
    add_ends(model, [7, own])
    assert model.generation_config.eos_token_id == [own, 7]
