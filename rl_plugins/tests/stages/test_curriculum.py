"""The stage gives the scores of prompts to the curriculum, the same on any number of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.algorithms.filtering import GroupFilter
from rl_plugins.config.data import CurriculumConfig
from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.data.curriculum import Curriculum
from rl_plugins.data.loaders import StepLoader
from rl_plugins.data.orders import Mixture, RowRange
from rl_plugins.stages.policy_optimization import PolicyOptimization
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.tests.ranks import run_ranks
from rl_plugins.tests.stages import canned

ROWS, PER_STEP, STEPS = 24, 4, 6


class CannedSource:
    """Row i is the prompt i mod 4: the samples of prompt 2 score alike, and a sample of prompt 1 fails."""

    fingerprint = "canned"
    kept = np.arange(ROWS)

    def __len__(self) -> int:
        return ROWS

    def batch(self, indices: Any, epoch: int) -> Any:
        batch = canned.prompt_batch([canned.PROMPTS[index % 4] for index in indices])
        batch.rows = list(indices)
        return batch


class Keeping(PolicyOptimization):
    """A stage that records the rows of each step, and the metrics."""

    def __init__(self, **options: Any) -> None:
        super().__init__(canned.OwnPolicy(), **options)
        self.served: list[list[int]] = []
        self.metrics: list[dict[str, float]] = []

    def training_step(self, prompts: Any, batch_idx: int) -> None:
        self.served.append(prompts.rows)
        super().training_step(prompts, batch_idx)

    def track(self, metrics: Any) -> None:
        self.metrics.append({name: value for name, value in metrics.items() if name.startswith("curriculum")})


def train(rank: int, world_size: int, algorithm: Algorithm | None = None, share: float = 0.5) -> tuple[Any, Any, Any]:
    """Rows served and metrics of each step, and the state of the loader."""
    order = None
    if share:
        mixture = Mixture([RowRange("all", 0, ROWS, 1.0)], prompts_per_step=PER_STEP, seed=0)
        config = CurriculumConfig(share=share)
        order = Curriculum(mixture, config, kept=CannedSource.kept, prompts_per_step=PER_STEP, seed=0)
    loader: Any = StepLoader(CannedSource(), prompts_per_step=PER_STEP, order=order, rank=rank, world_size=world_size)
    stage = Keeping(
        tokenizer=canned.tokenizer,
        scorer=canned.CannedScorer(),
        sampling=SamplingConfig(max_tokens=20, num_samples=3),
        algorithm=algorithm,
        reference=canned.other_model(),
        max_steps=STEPS,
    )
    rollout: Any = canned.CannedRollout()
    alone = world_size == 1
    strategy = (
        SingleDeviceRolloutStrategy(rollout=rollout)
        if alone
        else canned.AllReduceStrategy(rank, world_size, rollout=rollout)
    )
    canned.quiet_trainer(strategy, precision="64-true").fit(stage, loader)
    return stage.served, stage.metrics, loader.state_dict()


def test_curriculum_gets_mean_and_variance_of_the_valid_scores_of_each_prompt() -> None:
    served, metrics, state = train(0, 1)
    seen = sorted({row for rows in served for row in rows})
    known = state["curriculum"]
    # All prompts have two valid samples or more.
    assert known["indices"].tolist() == seen
    assert metrics[-1]["curriculum/seen"] == len(seen) / ROWS
    for row, mean, variance in zip(*(known[name].tolist() for name in ("indices", "mean", "variance")), strict=True):
        scores = [canned.score(response) for response in canned.RESPONSES[canned.PROMPTS[row % 4]]]
        valid = [score for score in scores if score is not None]
        assert mean == pytest.approx(np.mean(valid), abs=1e-6)
        assert variance == pytest.approx(np.var(valid), abs=1e-6)


def test_stage_without_a_curriculum_logs_no_curriculum_metrics() -> None:
    served, metrics, state = train(0, 1, share=0.0)
    assert metrics == [{}] * STEPS
    assert "curriculum" not in state
    assert sorted(row for rows in served for row in rows) == list(range(ROWS))


def test_curriculum_gets_the_scores_of_filtered_groups() -> None:
    _, metrics, state = train(0, 1, Algorithm(group_filter=GroupFilter()))
    assert any(index % 4 == 2 for index in state["curriculum"]["indices"].tolist())
    assert metrics[-1]["curriculum/seen"] > 0.5


def test_curriculum_on_two_ranks_equals_the_curriculum_on_one_rank() -> None:
    served, metrics, state = train(0, 1)
    ranks = [result for result, _ in run_ranks(train, 2)]
    for rank, (rank_served, rank_metrics, rank_state) in enumerate(ranks):
        assert rank_served == [rows[rank::2] for rows in served]
        assert rank_metrics == metrics
        for name, values in state["curriculum"].items():
            assert torch.equal(rank_state["curriculum"][name], values), name
