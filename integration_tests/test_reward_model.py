"""A reward model in Ray workers, alone and mixed with a rule."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from rl_plugins.config.models import RewardConfig
from rl_plugins.config.recipe import RecipeConfig
from rl_plugins.errors import ConfigError
from rl_plugins.launch.scorer import scorer_of
from rl_plugins.models.scalar_head import load_scalar_head
from rl_plugins.models.tiny import build_tokenizer, save_tiny_policy
from rl_plugins.rewards.model import ModelReward
from rl_plugins.rewards.pool import RewardPool
from rl_plugins.rewards.records import ScoringRequest
from rl_plugins.tests.patience import patient, wait_until

pytestmark = pytest.mark.usefixtures("running_ray")
HERE = "rl_plugins.tests.rewards.sample_rewards"
DEADLINE_S = patient(60)


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


@pytest.fixture(scope="module")
def pool(path: str) -> Iterator[RewardPool]:
    """Two workers with the reward model and rules. The rule `obeyed` does the act named by a response."""
    config = {
        "_target_": "rl_plugins.rewards.mixing.WeightedSum",
        "rewards": {
            "exact": {"_target_": "rl_plugins.rewards.scorers.exact_match"},
            "model": {"_target_": "rl_plugins.rewards.model.ModelReward", "path": path, "batch_size": 4},
            "obeyed": {"_target_": f"{HERE}.obey"},
        },
        "weights": {"exact": 1.0, "model": 0.5, "obeyed": 0.01},
    }
    with RewardPool(config, num_workers=2, deadline_s=DEADLINE_S, chunk_size=8, max_failure_rate=1.0) as workers:
        yield workers


def test_workers_score_as_the_model_in_this_process_and_add_rules(pool: RewardPool, path: str) -> None:
    solutions = ["42", "4", "", "it is 42", *(str(number) for number in range(30))]
    expected = ModelReward(path)(solutions, [request.prompt for request in requests(*solutions)])
    scores = pool.score(requests(*solutions))
    for solution, score, wanted in zip(solutions, scores, expected, strict=True):
        rules = {"exact": float(solution == "42"), "obeyed": float(len(solution))}
        assert score.failure is None, score
        assert score.details == pytest.approx({**rules, "model": wanted}, rel=1e-4, abs=1e-5)
        assert score.value == pytest.approx(rules["exact"] + 0.5 * wanted + 0.01 * rules["obeyed"], rel=1e-4, abs=1e-5)


@pytest.mark.extended
def test_rule_that_kills_a_worker_fails_the_sample_alone(pool: RewardPool) -> None:
    scores = pool.score(requests("a", "die", "bb", "raise"))
    assert [score.failure for score in scores] == [None, "died", None, "raised"]
    assert [score.details.get("obeyed") for score in scores] == [1.0, None, 2.0, None]


@pytest.mark.extended
def test_pool_raises_the_config_error_of_a_folder_without_a_reward_model(tmp_path: Path) -> None:
    policy = str(save_tiny_policy(tmp_path))
    config = {"_target_": "rl_plugins.rewards.model.ModelReward", "path": policy}
    with (
        RewardPool(config, num_workers=1, deadline_s=DEADLINE_S) as workers,
        pytest.raises(ConfigError, match="has no scalar head"),
    ):
        workers.score(requests("42"))


@pytest.mark.parametrize("share", [0.5, 0.0])
def test_reward_workers_see_a_shared_gpu_or_none(share: float) -> None:
    def free() -> float:
        return float(ray.available_resources().get("GPU", 0))

    # The GPUs are GPUs in name. The resources of an ended worker return some time after the end.
    gpus = ray.cluster_resources()["GPU"]
    wait_until(lambda: free() == gpus, "the GPUs to be free", state=lambda: f"free: {free()}")
    config = {"_target_": "integration_tests.rewards.visible_gpus"}
    reward = RewardConfig({"default": config}, num_workers=2, gpus=share, deadline_s=DEADLINE_S)
    workers = scorer_of(RecipeConfig(stage="policy_optimization", reward=reward))
    assert isinstance(workers, RewardPool)
    with workers:
        first, second = (score.value for score in workers.score(requests("a", "b")))
        assert first is not None and first == second and (first >= 0) == (share > 0)
        wait_until(lambda: free() == gpus - 2 * share, "the workers' GPU to be taken", state=lambda: f"free: {free()}")
