"""A pool of actors with a frozen model returns the numbers of a model in this process, also after an actor's death."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import psutil
import pytest
import ray
import torch
from hydra.utils import instantiate

from rl_plugins.config.models import RewardModelConfig
from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.data.experience import Experience
from rl_plugins.errors import DeadlineExceeded
from rl_plugins.launch.compose import compose_config
from rl_plugins.models.loading import load_causal_lm
from rl_plugins.models.log_probs import response_log_probs
from rl_plugins.models.pool import ModelPool
from rl_plugins.models.pool_actor import PoolConfig, start_pool
from rl_plugins.models.scalar_head import load_scalar_head, response_scores
from rl_plugins.models.tiny import build_tokenizer, save_tiny_policy
from rl_plugins.stages.policy_optimization import PolicyOptimization
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.tests.patience import patient
from rl_plugins.tests.stages import canned

ACTORS = 2


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_policy(tmp_path_factory.mktemp("teacher"), initializer_range=0.2, seed=3))


@pytest.fixture(scope="module")
def reward_model(teacher: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("reward_model")
    model: Any = load_scalar_head(teacher, dtype=torch.float32)
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(2))
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def pools(running_ray: Any, teacher: str, reward_model: str) -> Iterator[dict[str, PoolConfig]]:
    """Running pools, by the role of the model; all processes start at the same time."""
    configs = [
        PoolConfig("teacher", teacher, "causal_lm", dtype="float64", actors=ACTORS),
        PoolConfig("reward_model", reward_model, "scalar", dtype="float64", actors=ACTORS),
    ]
    actors = [actor for config in configs for actor in start_pool(config, [{"num_cpus": 0}] * ACTORS)]
    yield {config.role: config for config in configs}
    for actor in actors:
        ray.kill(actor)


@pytest.fixture
def teachers(pools: dict[str, PoolConfig]) -> ModelPool:
    return ModelPool(pools["teacher"])


@pytest.fixture
def reward_models(pools: dict[str, PoolConfig]) -> ModelPool:
    return ModelPool(pools["reward_model"], rank=1)


def micro_batch(*lengths: tuple[int, int]) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    tokens = [[torch.randint(250, (n,), generator=generator).tolist() for n in pair] for pair in lengths]
    batch = Experience.from_samples(
        [prompt for prompt, _ in tokens],
        [response for _, response in tokens],
        [[0.0] * len(response) for _, response in tokens],
        list(range(len(tokens))),
        0,
    )
    return {
        "input_ids_BS": batch.input_ids,
        "attention_mask_BS": batch.attention_mask,
        "position_ids_BS": batch.position_ids,
        "response_width": batch.responses.shape[1],
    }


# Rows of very different lengths, an empty row, and fewer rows than actors.
BATCHES = [micro_batch((5, 9), (3, 1), (7, 0), (2, 12), (9, 4)), micro_batch((4, 6))]


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("batch", BATCHES, ids=["uneven rows", "fewer rows than actors"])
def test_response_log_probs_of_a_pool_equal_the_models_own(
    teachers: ModelPool, teacher: str, batch: dict[str, Any], packed: bool
):
    model = load_causal_lm(teacher, dtype=torch.float64).eval()
    asked = {**batch, "packed": packed, "temperature": 0.7, "sum_pi_squared": True, "top_k": 3}
    with torch.no_grad():
        expected, found = response_log_probs(model, **asked), response_log_probs(teachers, **asked)
    response = batch["attention_mask_BS"][:, -batch["response_width"] :].bool()
    for one in fields(expected):
        wanted, got = getattr(expected, one.name), getattr(found, one.name)
        assert (wanted is None) == (got is None), one.name
        if wanted is not None:
            torch.testing.assert_close(got[response], wanted[response], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("batch", BATCHES, ids=["uneven rows", "fewer rows than actors"])
def test_response_scores_of_a_pool_equal_the_models_own(
    reward_models: ModelPool, reward_model: str, batch: dict[str, Any]
):
    model = load_scalar_head(reward_model, dtype=torch.float64).eval()
    with torch.no_grad():
        expected, found = (response_scores(one, **batch, packed=True) for one in (model, reward_models))
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def process_of(pool: ModelPool, actor: int) -> psutil.Process:
    process: Any = ray.get(ray.get_actor(pool.config.label(actor)).ready.remote(), timeout=patient(120))
    return psutil.Process(int(process.split("@")[0]))


@pytest.mark.extended
def test_response_log_probs_are_repeated_and_counted_when_an_actor_dies(teachers: ModelPool):
    before = response_log_probs(teachers, **BATCHES[0], packed=True).log_probs_BT
    already = teachers.metrics()["pool/teacher_restarts"]
    process_of(teachers, 1).kill()
    after = response_log_probs(teachers, **BATCHES[0], packed=True).log_probs_BT
    torch.testing.assert_close(after, before, rtol=0, atol=1e-12)
    assert teachers.metrics() == {"pool/teacher_restarts": already + 1}


def test_deadline_exceeded_names_the_rank_and_the_actor_that_hangs(teachers: ModelPool):
    # The process is stopped before the call: the other actor, too, may take longer than the deadline.
    pool = ModelPool(replace(teachers.config, call_timeout_s=1.0), rank=3)
    pool._connect()
    stopped = process_of(pool, 0)
    stopped.suspend()
    late = re.escape(repr(pool.config.label(0)))
    try:
        with pytest.raises(DeadlineExceeded, match=rf"rank 3 waited 1 s for {late}.* of the pool teacher"):
            response_log_probs(pool, **BATCHES[0], packed=True)
    finally:
        stopped.resume()


def gradients(teacher: str, reward_model: str, *pools: ModelPool) -> tuple[list[torch.Tensor], dict[str, float]]:
    """Return gradients and metrics of a step with a teacher's tokens and a reward model's scores."""
    own = canned.OwnPolicy()
    stage = PolicyOptimization(
        own,
        tokenizer=canned.tokenizer,
        scorer=canned.CannedScorer(),
        sampling=SamplingConfig(max_tokens=20, num_samples=3),
        algorithm=instantiate(compose_config("grpo", ["algorithm=forward_kl_distillation"]).algorithm),
        teacher=teacher,
        reward_model=RewardModelConfig(reward_model),
        tokens_per_micro_batch=40,
        max_steps=1,
    )
    for pool in pools:
        setattr(stage, pool.config.role, pool)
    strategy = SingleDeviceRolloutStrategy(rollout=canned.CannedRollout())
    trainer = canned.quiet_trainer(strategy, precision="64-true")
    trainer.fit(stage, canned.loader([canned.prompt_batch(canned.PROMPTS)]))
    (step,) = own.recorder.gradients
    return step, {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_policy_optimization_learns_the_same_from_pools(
    teachers: ModelPool, reward_models: ModelPool, teacher: str, reward_model: str
):
    expected, metrics = gradients(teacher, reward_model)
    found, of_pools = gradients(teacher, reward_model, teachers, reward_models)
    assert sum(float(gradient.abs().sum()) for gradient in expected) > 0.1
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)
    assert of_pools["train/reward"] == pytest.approx(metrics["train/reward"])
    assert {"time/teacher_log_probs", "time/reward_model"} <= of_pools.keys()
