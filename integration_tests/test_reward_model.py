"""A reward model in Ray workers of its own, alone and mixed with a rule."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from rl_plugins.errors import ConfigError
from rl_plugins.models.scalar_head import load_scalar_head
from rl_plugins.models.tiny import build_tokenizer, save_tiny_policy
from rl_plugins.rewards import RewardPool, ScoringRequest
from rl_plugins.rewards.model import ModelReward

pytestmark = pytest.mark.integration
HERE = "rl_plugins.tests.rewards.sample_rewards"


@pytest.fixture(scope="module", autouse=True)
def running_ray() -> Iterator[None]:
    # The GPU is one in name: what is tested is that workers reserve their share of it.
    ray.init(num_cpus=2, num_gpus=1, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("reward_model")
    policy = str(save_tiny_policy(folder / "policy", initializer_range=0.2))
    model: Any = load_scalar_head(policy, dtype=torch.float32)
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(2))
    model.save_pretrained(folder / "trained")
    build_tokenizer().save_pretrained(folder / "trained")
    return str(folder / "trained")


def requests(*solutions: str) -> list[ScoringRequest]:
    prompt = [{"role": "user", "content": "17+25"}]
    return [ScoringRequest("s", solution, "42", {"index": 0}, prompt) for solution in solutions]


def test_workers_score_as_one_process_does_and_a_rule_is_added(path: str) -> None:
    model = {"_target_": "rl_plugins.rewards.model.ModelReward", "path": path, "batch_size": 4}
    config = {
        "_target_": "rl_plugins.rewards.mixing.WeightedSum",
        "rewards": {"rule": {"_target_": "rl_plugins.rewards.scorers.exact_match"}, "model": model},
        "weights": {"rule": 1.0, "model": 0.5},
    }
    solutions = ["42", "4", "", "it is 42", *(str(number) for number in range(30))]
    expected = ModelReward(path)(solutions, [request.prompt for request in requests(*solutions)])
    with RewardPool(config, num_workers=2, deadline_s=30.0, chunk_size=8) as workers:
        scores = workers.score(requests(*solutions))
    for solution, score, wanted in zip(solutions, scores, expected, strict=True):
        rule = float(solution == "42")
        assert score.failure is None, score
        assert score.details == pytest.approx({"rule": rule, "model": wanted}, rel=1e-4, abs=1e-5)
        assert score.value == pytest.approx(rule + 0.5 * wanted, rel=1e-4, abs=1e-5)


def test_a_part_that_kills_its_worker_fails_its_sample_alone(path: str) -> None:
    config = {
        "_target_": "rl_plugins.rewards.mixing.WeightedSum",
        "rewards": {
            "model": {"_target_": "rl_plugins.rewards.model.ModelReward", "path": path},
            "rule": {"_target_": f"{HERE}.obey"},
        },
    }
    with RewardPool(config, num_workers=1, deadline_s=10.0, max_failure_rate=1.0) as workers:
        scores = workers.score(requests("a", "die", "bb", "raise"))
    assert [score.failure for score in scores] == [None, "died", None, "raised"]
    assert [score.details.get("rule") for score in scores] == [1.0, None, 2.0, None]


def test_a_folder_that_is_no_reward_models_is_refused_as_it_is(tmp_path: Path) -> None:
    policy = str(save_tiny_policy(tmp_path))
    config = {"_target_": "rl_plugins.rewards.model.ModelReward", "path": policy}
    with (
        RewardPool(config, num_workers=1, deadline_s=5.0) as workers,
        pytest.raises(ConfigError, match="has no scalar head"),
    ):
        workers.score(requests("42"))


def visible_gpus(solution_str: str) -> float:
    """The number of the GPU that this process was given; -1 without one."""
    return float(os.environ.get("CUDA_VISIBLE_DEVICES") or -1)


@pytest.mark.parametrize(("share", "number"), [(0.5, 0.0), (0.0, -1.0)])
def test_workers_reserve_their_share_of_a_gpu(share: float, number: float) -> None:
    config = {"_target_": f"{__name__}.visible_gpus"}
    with RewardPool(config, num_workers=2, deadline_s=5.0, gpus_per_worker=share) as workers:
        assert [score.value for score in workers.score(requests("a", "b"))] == [number] * 2
        assert ray.available_resources().get("GPU", 0) == 1 - 2 * share
