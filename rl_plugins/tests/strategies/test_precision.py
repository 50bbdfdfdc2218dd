"""Precision plugins: parameters are converted, and rotary frequencies keep their values."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.plugins.precision import DeepSpeedPrecision, MixedPrecision
from torch import nn

from rl_plugins.errors import ConfigError
from rl_plugins.models.tiny import build_model
from rl_plugins.strategies.precision import ParameterPrecision, precision_of_deepspeed
from rl_plugins.tests.loops import for_each


@for_each(
    "plugin",
    [ParameterPrecision("bf16-true"), precision_of_deepspeed(DeepSpeedPrecision("bf16-true"), keeps_buffers=True)],
)
def test_convert_module_converts_parameters_and_keeps_rotary_frequencies(plugin: ParameterPrecision) -> None:
    model, before = build_model(), dict(build_model().named_buffers())
    assert any("inv_freq" in name for name in before)
    plugin.convert_module(model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    for name, buffer in model.named_buffers():
        assert buffer.dtype == before[name].dtype and torch.equal(buffer, before[name])


def test_precision_of_deepspeed_keeps_the_precision_of_another_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    assert precision_of_deepspeed(DeepSpeedPrecision("bf16-mixed"), keeps_buffers=True).precision == "bf16-mixed"
    from deepspeed.accelerator import get_accelerator

    for is_supported in (True, False):
        monkeypatch.setattr(type(get_accelerator()), "is_fp16_supported", lambda self, known=is_supported: known)
        if is_supported:
            assert precision_of_deepspeed(MixedPrecision("16-mixed", "cpu"), keeps_buffers=True).precision == "16-mixed"
            continue
        with pytest.raises(
            ConfigError, match=r"precision=16-mixed: DeepSpeed has no float16 .*: use FSDPStrategy \(in"
        ):
            precision_of_deepspeed(MixedPrecision("16-mixed", "cpu"), keeps_buffers=True)


def test_convert_module_converts_buffers_of_a_users_own_module() -> None:
    """A module of a user may add a buffer to the activations."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.language_model, self.linear = build_model(), nn.Linear(2, 2)
            self.register_buffer("positions", torch.zeros(2))

    own = Own()
    ParameterPrecision("bf16-true").convert_module(own)
    assert own.positions.dtype == own.linear.weight.dtype == torch.bfloat16
    assert own.language_model.model.rotary_emb.inv_freq.dtype == torch.float32
    whole = precision_of_deepspeed(DeepSpeedPrecision("bf16-true"), keeps_buffers=False).convert_module(build_model())
    assert {buffer.dtype for buffer in whole.buffers()} == {torch.bfloat16}
