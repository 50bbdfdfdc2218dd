"""Router and check_routes: `data_source` selects the reward, and a source without a reward is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from rl_plugins.errors import ConfigError
from rl_plugins.rewards import calling
from rl_plugins.rewards.calling import Router, check_routes, normalize_routes
from rl_plugins.rewards.records import ScoringRequest
from rl_plugins.tests.patience import patient

HERE = "rl_plugins.tests.rewards.sample_rewards"
ROUTES = {"default": {"_target_": f"{HERE}.length"}, "openai/gsm8k": {"_target_": f"{HERE}.is_right"}}


def request(source: str, solution: str) -> ScoringRequest:
    return ScoringRequest(data_source=source, solution_str=solution, ground_truth="yes", extra_info={})


def route(config: Any, *samples: tuple[str, str], budget_s: float = float("inf")) -> list[float | None]:
    scores = Router(config).score([request(*sample) for sample in samples], patient(60), budget_s)
    return [score.value if score else None for score in scores]


def test_router_keeps_the_order_of_the_requests() -> None:
    samples = [("other", "abc"), ("openai/gsm8k", "yes"), ("other", "ab"), ("openai/gsm8k", "no")]
    assert route(ROUTES, *samples) == [3.0, 1.0, 2.0, 0.0]


def test_router_scores_every_source_with_a_single_reward() -> None:
    assert route({"_target_": f"{HERE}.length"}, ("a", "x"), ("b", "xy")) == [1.0, 2.0]


def test_router_batches_each_data_source_separately() -> None:
    config = {"a": {"_target_": f"{HERE}.batch_size"}, "b": {"_target_": f"{HERE}.batch_size"}}
    assert route(config, ("a", "x"), ("b", "x"), ("a", "x")) == [2.0, 1.0, 2.0]


def test_router_accepts_routes_of_omegaconf() -> None:
    assert route(OmegaConf.create(ROUTES), ("openai/gsm8k", "yes")) == [1.0]


def test_router_starts_no_call_after_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(calling, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def slow(solution_str: str) -> float:
        clock[0] += 0.3
        return 1.0

    assert route({"_target_": slow}, *[("s", "x")] * 5, budget_s=0.4) == [1.0, 1.0, None, None, None]


def test_check_routes_names_the_known_sources() -> None:
    routes = {"openai/gsm8k": ROUTES["openai/gsm8k"], "math": ROUTES["default"]}
    with pytest.raises(ConfigError, match=r"data_source 'gsm8k': .*for 'math', 'openai/gsm8k'"):
        check_routes(routes, {"gsm8k", "math"})
    check_routes(routes, {"math"})
    check_routes(ROUTES, {"anything"})


@pytest.mark.parametrize(("config", "message"), [({}, "no reward"), ({"math": None}, "'math' is None")])
def test_normalize_routes_refuses_a_malformed_configuration(config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        normalize_routes(config)


def test_check_routes_loads_no_reward() -> None:
    check_routes({"a": {"_target_": "no.such.module"}}, {"a"})
