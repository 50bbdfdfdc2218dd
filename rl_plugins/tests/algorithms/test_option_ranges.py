"""Records of algorithm options follow the rule of numbers in recipes, also if a program makes the records."""

from __future__ import annotations

import math
from typing import Any

import pytest
from omegaconf import OmegaConf

from rl_plugins.algorithms.algorithm import Algorithm, LossModifiers
from rl_plugins.algorithms.constraint import CostConstraint
from rl_plugins.algorithms.filtering import GroupFilter, Resampling
from rl_plugins.algorithms.regularization import EntropyConfig, KLConfig
from rl_plugins.algorithms.reward_shaping import OverlongPenalty, RewardShaping
from rl_plugins.algorithms.rollout_correction import Rejection, RolloutCorrection
from rl_plugins.errors import ConfigError
from rl_plugins.tests.loops import for_each

NUMBERS: dict[type, list[str]] = {
    KLConfig: ["coefficient", "target", "horizon"],
    EntropyConfig: ["coefficient", "target", "rate", "minimum", "maximum"],
    LossModifiers: ["off_policy_mask", "top_entropy", "positive_nll", "positive_above"],
    GroupFilter: ["low", "high", "max_batches", "oversampling"],
    Resampling: ["power"],
    CostConstraint: ["threshold", "lambda_init", "lambda_lr", "lambda_max", "window"],
    RewardShaping: ["length_factor", "correct_above"],
    RolloutCorrection: ["cap"],
    Algorithm: ["scale_factor", "teacher_top_k", "value_clip"],
}


@for_each("wrong", [math.nan, math.inf, -math.inf, True, "1", [1]])
def test_numbers_of_algorithm_options_must_be_finite_numbers(wrong: object) -> None:
    for record, names in NUMBERS.items():
        for name in names:
            with pytest.raises(ConfigError, match=f"^{name}=.*must be"):
                record(**{name: wrong})
    for name in ("max_tokens", "buffer_tokens", "factor"):
        with pytest.raises(ConfigError, match=f"^{name}=.*must be"):
            OverlongPenalty(**{"max_tokens": 8, name: wrong})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^clip=.*two finite numbers"):
        RewardShaping(clip=(0, wrong))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="band="):
        RolloutCorrection("token", band=(0.5, wrong))  # type: ignore[arg-type]
    for mode in ("seq_mean_k1", "seq_mean_k3"):
        with pytest.raises(ValueError, match="threshold="):
            Rejection(mode, wrong)  # type: ignore[arg-type]


def test_reward_components_are_a_list_of_names_also_from_hydra() -> None:
    for names in (["format"], ("format",), OmegaConf.create(["format"])):
        assert list(Algorithm(reward_components=names).reward_components) == ["format"]
    wrong: Any
    for wrong in ("format", ["format", 1], 3, None, {"format": 1}):
        with pytest.raises(ConfigError, match=r"^reward_components=.*: must be a list of names"):
            Algorithm(reward_components=wrong)


@for_each(
    ("record", "options"),
    [
        (KLConfig, {"coefficient": -0.1}),
        (KLConfig, {"target": 0.0}),
        (KLConfig, {"horizon": 0.0}),
        (EntropyConfig, {"rate": -0.1}),
        (EntropyConfig, {"coefficient": 2.0, "target": 0.5}),
        (LossModifiers, {"off_policy_mask": -0.1}),
        (LossModifiers, {"top_entropy": 0.0}),
        (LossModifiers, {"top_entropy": 1.1}),
        (LossModifiers, {"positive_nll": -1.0}),
        (GroupFilter, {"max_batches": 1.5}),
        (Resampling, {"kind": "worst"}),
        (Resampling, {"power": -1.0}),
        (OverlongPenalty, {"max_tokens": 0}),
        (OverlongPenalty, {"buffer_tokens": 9, "max_tokens": 8}),
        (OverlongPenalty, {"factor": -1.0, "max_tokens": 8}),
        (RewardShaping, {"clip": (1.0, 0.0)}),
        (RewardShaping, {"clip": 1.0}),
        (RewardShaping, {"length_factor": -0.5}),
        (RolloutCorrection, {"cap": 0.0, "level": "token"}),
        (Algorithm, {"scale_factor": 0.0}),
        (Algorithm, {"teacher_top_k": 0}),
        (Algorithm, {"value_clip": 0.0}),
    ],
)
def test_algorithm_options_outside_of_their_range_are_refused(record: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^{next(iter(options))}="):
        record(**options)
