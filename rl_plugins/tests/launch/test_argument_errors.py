"""Errors name the options of a recipe in place of Python arguments."""

from __future__ import annotations

import pytest

from rl_plugins.errors import ConfigError, DataError, RowError, UserError
from rl_plugins.launch.argument_errors import STAGE_OPTIONS, errors_with_options, options_in


def shown(error: UserError) -> UserError:
    """Return the error that a user of a recipe gets for an error of a stage."""
    with pytest.raises(UserError) as raised, errors_with_options(STAGE_OPTIONS):
        raise error
    return raised.value


def test_errors_with_options_names_options_at_the_beginning_and_in_the_way_out() -> None:
    few = shown(ConfigError("num_samples=1: a pair needs at least two responses to a prompt: raise num_samples"))
    assert str(few) == (
        "batch.samples_per_prompt=1: a pair needs at least two responses to a prompt: raise batch.samples_per_prompt"
    )
    kernels = shown(ConfigError("LigerKernels: no kernels for the policy: leave LigerKernels out"))
    assert str(kernels) == "model.liger: no kernels for the policy: leave model.liger out"
    options = options_in("environment", ["max_turns", "deadline_s"])
    message = r"^environment\.max_turns=0 is too small, or raise environment\.deadline_s$"
    with pytest.raises(ConfigError, match=message), errors_with_options(options):
        raise ConfigError("max_turns=0 is too small, or raise deadline_s")


def test_errors_with_options_keeps_the_class_of_an_error() -> None:
    assert type(shown(DataError("step 3: too easy: change the data, or raise num_samples"))) is DataError
    row = RowError("a.parquet, row 3", "prompt", "is empty")
    assert shown(row) is row
