"""Coefficients with a fixed value or with a measure to follow, and their states in checkpoints."""

from __future__ import annotations

import pytest

from rl_plugins.algorithms.regularization import Coefficient, EntropyConfig, KLConfig
from rl_plugins.errors import ConfigError
from rl_plugins.tests.algorithms.reference import basics as reference
from rl_plugins.tests.loops import for_each


@for_each("measured", [0.0, 0.05, 0.09, 0.1, 0.11, 0.5, -1.0])
def test_adaptive_kl_coefficient_agrees_with_the_formula(measured: float) -> None:
    controller = Coefficient(KLConfig(0.2, target=0.1, horizon=100.0))
    expected = 0.2
    for sequences in (10, 64):
        controller.update(measured, sequences)
        expected = reference.adaptive_kl(expected, measured, 0.1, 100.0, sequences)
        assert controller.coefficient == pytest.approx(expected, rel=1e-12)


def test_adaptive_kl_refuses_a_step_that_could_make_the_coefficient_negative() -> None:
    controller = Coefficient(KLConfig(0.2, target=0.1, horizon=10.0))
    controller.update(0.0, 49)
    assert 0 < controller.coefficient < 0.2
    with pytest.raises(ConfigError, match=r"horizon=10: one step of 50 sequences .* set horizon above 10"):
        controller.update(0.0, 50)


def test_adaptive_kl_restores_and_fixed_coefficient_keeps_the_value() -> None:
    adaptive = Coefficient(KLConfig(0.2, target=0.1))
    adaptive.update(1.0, 500)
    resumed = Coefficient(KLConfig(0.2, target=0.1))
    resumed.load_state_dict(adaptive.state_dict())
    assert resumed.coefficient == adaptive.coefficient != 0.2
    fixed = Coefficient(KLConfig(0.5))
    fixed.update(1.0, 500)
    for state in (Coefficient(KLConfig(0.1)).state_dict(), adaptive.state_dict()):
        fixed.load_state_dict(state)
        assert fixed.coefficient == 0.5


def test_adaptive_coefficients_begin_as_configured_after_a_checkpoint_with_fixed_coefficients() -> None:
    fixed = Coefficient(KLConfig(0.0)).state_dict()
    kl, entropy = Coefficient(KLConfig(0.2, target=0.1)), Coefficient(EntropyConfig(0.1, target=0.5))
    kl.load_state_dict(fixed)
    entropy.load_state_dict(fixed)
    assert (kl.coefficient, entropy.coefficient) == (0.2, 0.1)


def test_kl_config_refuses_a_target_without_a_coefficient_to_adapt() -> None:
    with pytest.raises(ConfigError, match=r"target=0\.05 multiplies the coefficient, and coefficient=0 stays 0: set"):
        KLConfig(target=0.05)


def test_adaptive_entropy_steps_towards_the_target() -> None:
    config = EntropyConfig(0.1, target=0.5, rate=0.04, minimum=0.03, maximum=0.15)
    controller = Coefficient(config)
    measured = [0.4, 0.1, 0.5, 0.6, 9.0, 0.7, 0.8]
    expected = [0.14, 0.15, 0.15, 0.11, 0.07, 0.03, 0.03]
    for entropy, coefficient in zip(measured, expected, strict=True):
        controller.update(entropy, 1)
        assert controller.coefficient == pytest.approx(coefficient)


def test_adaptive_entropy_restores_and_fixed_coefficient_keeps_the_value() -> None:
    adaptive = Coefficient(EntropyConfig(0.1, target=0.5))
    adaptive.update(0.2, 1)
    resumed = Coefficient(EntropyConfig(0.1, target=0.5))
    resumed.load_state_dict(adaptive.state_dict())
    assert resumed.coefficient == adaptive.coefficient != 0.1
    narrower = Coefficient(EntropyConfig(0.1, target=0.5, maximum=0.101))
    narrower.load_state_dict(adaptive.state_dict())
    assert narrower.coefficient == 0.101
    fixed = Coefficient(EntropyConfig(0.5))
    fixed.update(0.0, 1)
    for state in (Coefficient(EntropyConfig(0.1)).state_dict(), adaptive.state_dict()):
        fixed.load_state_dict(state)
        assert fixed.coefficient == 0.5


@for_each(
    ("options", "message"),
    [
        ({"rate": -0.1}, "rate=-0.1: must be 0 or more"),
        ({"minimum": 0.2}, "coefficient=0.1: must be from minimum=0.2"),
        ({"maximum": 0.05}, "coefficient=0.1: must be from minimum=0.0 to maximum=0.05"),
    ],
)
def test_entropy_config_refuses_bad_options(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EntropyConfig(0.1, target=0.5, **options)
