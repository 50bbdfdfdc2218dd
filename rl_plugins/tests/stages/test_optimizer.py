from __future__ import annotations

import pytest
import torch

from rl_plugins.config.models import OptimizerConfig


def test_optimizer_config_factor_is_constant_by_default() -> None:
    assert [OptimizerConfig().factor(step) for step in (0, 1, 10**6)] == [1.0, 1.0, 1.0]


def test_optimizer_config_factor_rises_evenly_in_warmup_and_is_never_0() -> None:
    config = OptimizerConfig(warmup_steps=4)
    assert [config.factor(step) for step in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


def test_optimizer_config_factor_decays_after_warmup_to_lr_end() -> None:
    config = OptimizerConfig(warmup_steps=2, decay_steps=4, lr_end=0.2)
    expected = [1 / 3, 2 / 3, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2]
    assert [config.factor(step) for step in range(9)] == pytest.approx(expected)
    rates = [OptimizerConfig(decay_steps=3).factor(step) for step in range(5)]
    assert rates == pytest.approx([1.0, 2 / 3, 1 / 3, 0.0, 0.0])


def test_optimizer_config_makes_a_fused_adamw() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = OptimizerConfig(lr=0.1).adamw([parameter])["optimizer"]
    assert isinstance(optimizer, torch.optim.AdamW) and optimizer.defaults["fused"] is True
