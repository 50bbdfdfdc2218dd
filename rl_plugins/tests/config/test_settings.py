"""Ranges of settings: the same rules for records, options of functions and numbers of the command line."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

import numpy as np
import pytest

from rl_plugins.config.models import OptimizerConfig, ReferenceConfig
from rl_plugins.config.recipe import RecipeConfig, parse_config
from rl_plugins.config.run import GuardConfig, RunConfig
from rl_plugins.config.settings import (
    ABOVE_0,
    ABOVE_0_TO_1,
    AT_LEAST_1,
    FROM_0_TO_1,
    NOT_NEGATIVE,
    Settings,
    check_ranges,
    fits,
    one_of,
    or_null,
    shown,
)
from rl_plugins.data.sft import SFTDataModule
from rl_plugins.errors import ConfigError
from rl_plugins.rewards.pool import RewardPool
from rl_plugins.stages.process_rewards import ProcessRewardConfig
from rl_plugins.tests.loops import for_each

NO_NUMBERS: list[Any] = [math.nan, math.inf, -math.inf, True, "1", None, [1], 10**400, 1j]


@dataclass
class Record(Settings):
    count: Annotated[int, AT_LEAST_1] = 1
    share: Annotated[float | None, or_null(NOT_NEGATIVE)] = None
    plain: float = 0.0
    word: Annotated[str, one_of("a", "b")] = "a"


@for_each("value", NO_NUMBERS)
def test_settings_refuse_values_that_are_no_finite_numbers(value: Any) -> None:
    for name in ("count", "share", "plain"):
        if name == "share" and value is None:
            continue
        with pytest.raises(ConfigError, match=f"^{name}=.*: must be a (whole|finite) number"):
            Record(**{name: value})


def test_check_fields_refuses_values_out_of_the_ranges_of_a_record() -> None:
    Record.check_fields(count=3, share=None, word="b")
    for values, message in (
        ({"count": 0}, "count=0: must be at least 1"),
        ({"count": 1, "share": -1}, "share=-1: must be 0 or more, or null"),
        ({"word": "c"}, "word=c: use one of a, b"),
    ):
        with pytest.raises(ConfigError, match=f"^{message}$"):
            Record.check_fields(**values)


def test_settings_take_numbers_of_numpy_and_refuse_fractions_for_whole_numbers() -> None:
    numbers: Any = np.int64(3), np.float32(0.5)
    Record(count=numbers[0], share=numbers[1], plain=3)
    for changes, message in (
        ({"count": 2.5}, "count=2.5: must be a whole number; must be at least 1"),
        ({"count": 2**63}, r"count=2\*\*63 or more: must be a whole number"),
        ({"count": 0}, "count=0: must be at least 1"),
        ({"share": -0.5}, "share=-0.5: must be 0 or more"),
        ({"word": 1}, "word=1: use one of a, b"),
    ):
        with pytest.raises(ConfigError, match=f"^{message}"):
            Record(**changes)


def test_all_numbers_of_a_recipe_refuse_infinity_and_nan() -> None:
    """Every record of a recipe, and the records inside."""
    accepted = []
    records: list[Any] = [RecipeConfig]
    for record in records:
        instance = RecipeConfig(stage="sft") if record is RecipeConfig else record()
        for field in fields(record):
            value = getattr(instance, field.name)
            if isinstance(value, Settings):
                records.append(type(value))
            elif isinstance(value, int | float) and not isinstance(value, bool):
                for wrong in (math.inf, math.nan, True):
                    try:
                        record(**{field.name: wrong})
                    except ConfigError:
                        continue
                    accepted.append(f"{record.__name__}.{field.name}={wrong}")
    assert accepted == [] and len(records) > 20


@for_each(
    ("make", "message"),
    [
        (lambda: OptimizerConfig(lr=math.inf), "lr=inf: must be a finite number; must be 0 or more"),
        (lambda: OptimizerConfig(betas=0.9), "betas=0.9: must be two numbers"),  # type: ignore[arg-type]
        (lambda: OptimizerConfig(betas=(0.9, math.nan)), "betas=.*: must be two numbers"),
        (lambda: ReferenceConfig(keep=math.nan), "keep=nan: must be a finite number"),
        (lambda: GuardConfig(kl=math.inf), "kl=inf: must be a finite number or null; must be above 0, or null"),
        (lambda: RunConfig(time_limit=5), "time_limit=5: write a duration"),  # type: ignore[arg-type]
        (lambda: ProcessRewardConfig(beta=math.inf), "beta=inf: must be a finite number; must be above 0"),
        (lambda: ProcessRewardConfig(lam=2), "lam=2: must be between 0 and 1"),
        (lambda: ProcessRewardConfig(update="never"), "update=never: use one of before, after"),
        (lambda: SFTDataModule(None, tokenizer="x", prompts_per_step=0), "prompts_per_step=0: must be at least 1"),
        (
            lambda: SFTDataModule(None, tokenizer="x", prompts_per_step=1, max_response_tokens=-1),
            "max_response_tokens=-1: must be at least 1",
        ),
        (lambda: RewardPool({}, num_workers=1, deadline_s=math.nan), "deadline_s=nan: must be a finite number"),
        (lambda: RewardPool({}, num_workers=1, deadline_s=1e7), "deadline_s=10000000.0: must be above 0 and at most"),
        (lambda: RewardPool({}, num_workers=5000, deadline_s=1), "num_workers=5000: must be from 0 to 4096"),
        (lambda: RunConfig(seed=2**32), "seed=4294967296: must be from 0 to 4294967295"),
        (
            lambda: RewardPool({}, num_workers=1, deadline_s=1, max_failure_rate=2),
            "max_failure_rate=2: must be",
        ),
    ],
)
def test_classes_of_the_api_name_a_number_out_of_range(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        make()


def test_check_ranges_refuses_numbers_that_are_not_finite_or_out_of_range() -> None:
    for allowed in (NOT_NEGATIVE, ABOVE_0, FROM_0_TO_1):
        check_ranges(float, allowed, value=1)
        for value in (-1, math.inf, math.nan, True, "1"):
            with pytest.raises(ConfigError, match=r"^value=.*: must be"):
                check_ranges(float, allowed, value=value)
    with pytest.raises(ConfigError, match=r"^share=0: must be above 0 and at most 1"):
        check_ranges(float, ABOVE_0_TO_1, share=0)
    with pytest.raises(ConfigError, match=r"^steps=1\.5: must be a whole number"):
        check_ranges(int, AT_LEAST_1, steps=1.5)


def test_fits_tells_true_from_1_and_shown_shortens_a_value() -> None:
    choices: Any = Literal[1, "a"]
    assert fits(1, choices) and fits("a", choices) and not fits(True, choices)
    assert fits([1], list[int]) and fits(None, int | None) and not fits("1", int | None)
    assert shown(-(10**30)) == "-2**99 or more" and shown("x" * 100) == "x" * 80 + "..." and shown(1.5) == "1.5"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"data": {"train_files": [["a"]]}}, r"data\.train_files=\[\['a'\]\]: must be a list, and each"),
        ({"reward": {"pass_env": [{"name": 1}]}}, r"reward\.pass_env=.*: must be a list, and each item a text"),
    ],
)
def test_parse_config_refuses_items_of_lists_that_have_another_type(option: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config({"stage": "sft", "run": {"name": "run"}, "model": {"path": "model"}, **option})
