"""`data_source` chooses the scorer; a source without one is found before the run."""

from __future__ import annotations

import time
from typing import Any

import pytest
from omegaconf import OmegaConf

from rl_plugins.errors import ConfigError
from rl_plugins.rewards.records import ScoringRequest
from rl_plugins.rewards.routing import Router, check_routes, normalize_routes

HERE = "rl_plugins.tests.rewards.sample_rewards"
ROUTES = {"default": {"_target_": f"{HERE}.length"}, "openai/gsm8k": {"_target_": f"{HERE}.is_right"}}


def request(source: str, solution: str) -> ScoringRequest:
    return ScoringRequest(data_source=source, solution_str=solution, ground_truth="yes", extra_info={})


def route(config: Any, *samples: tuple[str, str], budget_s: float = 60.0) -> list[float | None]:
    scores = Router(config).score([request(*sample) for sample in samples], 5.0, budget_s)
    return [score.value if score else None for score in scores]


def test_routes_keep_the_order_of_the_requests() -> None:
    samples = [("other", "abc"), ("openai/gsm8k", "yes"), ("other", "ab"), ("openai/gsm8k", "no")]
    assert route(ROUTES, *samples) == [3.0, 1.0, 2.0, 0.0]


def test_one_reward_serves_everything() -> None:
    assert route({"_target_": f"{HERE}.length"}, ("a", "x"), ("b", "xy")) == [1.0, 2.0]


def test_a_batch_holds_one_data_source_only() -> None:
    config = {"a": {"_target_": f"{HERE}.batch_size"}, "b": {"_target_": f"{HERE}.batch_size"}}
    assert route(config, ("a", "x"), ("b", "x"), ("a", "x")) == [2.0, 1.0, 2.0]


def test_omegaconf_routes() -> None:
    assert route(OmegaConf.create(ROUTES), ("openai/gsm8k", "yes")) == [1.0]


def test_no_call_starts_after_the_budget() -> None:
    config = {"_target_": f"{HERE}.obey"}
    started = time.monotonic()
    assert route(config, *[("s", "slow")] * 5, budget_s=0.4) == [1.0, 1.0, None, None, None]
    assert time.monotonic() - started < 1.5


def test_an_unknown_source_names_the_known_ones() -> None:
    routes = {"openai/gsm8k": ROUTES["openai/gsm8k"], "math": ROUTES["default"]}
    with pytest.raises(ConfigError, match=r"data_source 'gsm8k': .*for 'math', 'openai/gsm8k'"):
        check_routes(routes, {"gsm8k", "math"})
    check_routes(routes, {"math"})
    check_routes(ROUTES, {"anything"})


@pytest.mark.parametrize(("config", "message"), [({}, "no reward"), ({"math": None}, "'math' is None")])
def test_a_malformed_configuration(config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        normalize_routes(config)


def test_checking_routes_loads_nothing() -> None:
    check_routes({"a": {"_target_": "no.such.module"}}, {"a"})
