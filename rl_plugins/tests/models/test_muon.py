"""Muon for matrices of hidden layers: the division of parameters, the steps of both rules, and checkpoints."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.tiny_families import save_tiny_family
from rl_plugins.config.models import LoraConfig, OptimizerConfig
from rl_plugins.errors import ConfigError
from rl_plugins.models.loading import load_causal_lm
from rl_plugins.models.lora import with_adapter
from rl_plugins.models.muon import MuonAndAdamW, ShardedMuon, split_parameters
from rl_plugins.models.scalar_head import load_scalar_head
from rl_plugins.models.tiny import build_model
from rl_plugins.stages.optimizer import build_optimizer

SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "initializer_range": 0.2}


def names_of(model: nn.Module) -> tuple[set[str], set[str]]:
    """Return the names of the parameters of Muon, and of AdamW."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    matrices, others = split_parameters(model)
    return {names[id(parameter)] for parameter in matrices}, {names[id(parameter)] for parameter in others}


def test_split_parameters_keeps_embeddings_heads_norms_and_biases_for_adamw() -> None:
    model = build_model(**SIZES)
    matrices, others = names_of(model)
    assert matrices == {name for name, _ in model.named_parameters() if name.endswith("_proj.weight")}
    # The output head is the embedding.
    assert {"model.embed_tokens.weight", "model.norm.weight", "model.layers.0.self_attn.q_proj.bias"} <= others


def test_split_parameters_keeps_scalar_heads_and_experts_for_adamw(tmp_path: Path) -> None:
    save_tiny_family("qwen3_moe", tmp_path)
    matrices, others = names_of(load_causal_lm(str(tmp_path), dtype=torch.float32))
    assert "model.layers.0.mlp.gate.weight" in matrices
    assert {"model.layers.0.mlp.experts.gate_up_proj", "lm_head.weight"} <= others
    critic: Any = load_scalar_head(str(tmp_path), dtype=torch.float32, new_head=True)
    assert "score.weight" in names_of(critic)[1]


def test_split_parameters_takes_the_matrices_of_an_adapter() -> None:
    model = with_adapter(build_model(**SIZES), LoraConfig(rank=2))
    matrices, others = names_of(model)
    assert matrices and all("lora_" in name for name in matrices) and not others


def gradients(model: nn.Module) -> None:
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_muon_and_adamw_take_the_steps_of_both_optimizers() -> None:
    settings: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
    model, other = build_model(**SIZES), build_model(**SIZES)
    config = OptimizerConfig(name="Muon", betas=(0.8, 0.9), options={"momentum": 0.9}, **settings)
    optimizer = build_optimizer(config, model)["optimizer"]
    assert isinstance(optimizer, MuonAndAdamW)
    matrices, others = split_parameters(other)
    muon = torch.optim.Muon(matrices, momentum=0.9, adjust_lr_fn="match_rms_adamw", **settings)
    adamw = torch.optim.AdamW(others, betas=(0.8, 0.9), fused=True, **settings)
    for _ in range(3):
        for trained in (model, other):
            gradients(trained)
        for rule in (optimizer, muon, adamw):
            rule.step()
    assert all(torch.equal(one, another) for one, another in zip(weights(model), weights(other), strict=True))


def test_muon_and_adamw_go_on_from_a_state_dict() -> None:
    model = build_model(**SIZES)
    optimizer = MuonAndAdamW(model, lr=0.01)
    gradients(model)
    optimizer.step()
    resumed = build_model(**SIZES)
    resumed.load_state_dict(model.state_dict())
    again = MuonAndAdamW(resumed, lr=0.5)
    again.load_state_dict(deepcopy(optimizer.state_dict()))
    for trained, rule in ((model, optimizer), (resumed, again)):
        gradients(trained)
        rule.step()
    assert all(torch.equal(one, another) for one, another in zip(weights(model), weights(resumed), strict=True))


def test_muon_in_bfloat16_without_nesterov_keeps_the_momentum() -> None:
    matrix = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    matrix.grad = torch.ones_like(matrix)
    optimizer = ShardedMuon([matrix], momentum=0.5, nesterov=False)
    optimizer.step()
    assert (optimizer.state[matrix]["momentum_buffer"] == 0.5).all()


def test_muon_refuses_unknown_options() -> None:
    config = OptimizerConfig(name="Muon", options={"adjust_lr": "original"})
    with pytest.raises(ConfigError, match=r"options\.adjust_lr: MuonAndAdamW has no such argument: did you mean"):
        build_optimizer(config, build_model(**SIZES))
