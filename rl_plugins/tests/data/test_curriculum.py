from __future__ import annotations

import io
from collections import Counter

import numpy as np
import pytest
import torch

from rl_plugins.config.data import CurriculumConfig
from rl_plugins.data.curriculum import Curriculum, GroupResult
from rl_plugins.data.loaders import StepLoader
from rl_plugins.data.orders import Mixture, RowRange
from rl_plugins.errors import CheckpointError, ConfigError
from rl_plugins.tests.data.test_loaders import Numbers
from rl_plugins.tests.loops import for_each

ROWS, PER_STEP = 120, 8


def curriculum(share=0.5, keep=0.5, parts=((0, ROWS, 1.0),), kept=None, seed=5):
    mixture = Mixture([RowRange(f"{part}", *part) for part in parts], prompts_per_step=PER_STEP, seed=seed)
    kept = np.arange(ROWS) if kept is None else kept
    return Curriculum(mixture, CurriculumConfig(share, keep), kept=kept, prompts_per_step=PER_STEP, seed=seed)


def results_of(rows):
    """Rows below 40 are always solved, from 80 never, the others sometimes."""
    return [GroupResult(0, row, p, p * (1 - p)) for row in rows for p in [(1.0, 0.5, 0.0)[row // 40]]]


def train(order, steps):
    loader = StepLoader(Numbers(ROWS), prompts_per_step=PER_STEP, seed=5, order=order)
    batches = []
    for _ in range(steps):
        batches.append(loader.draw()[1])
        order.observe(results_of(batches[-1]))
    return batches


def test_curriculum_serves_sometimes_solved_prompts_more_often():
    order = curriculum()
    batches = train(order, 150)
    assert all(len(set(batch)) == PER_STEP for batch in batches)
    middle = sum(40 <= row < 80 for batch in batches[50:] for row in batch) / (100 * PER_STEP)
    # A third of the usual half, and nearly all of the drawn half.
    assert 0.6 < middle < 0.7
    # The other part still serves every prompt.
    counts = Counter(row for batch in batches for row in batch)
    assert len(counts) == ROWS and min(counts.values()) >= 4


def test_curriculum_without_results_draws_all_prompts_evenly():
    order = curriculum()
    counts = Counter(row for step in range(600) for row in order.batch(step).tolist())
    assert min(counts.values()) > 20 and max(counts.values()) < 65


def test_curriculum_draws_unseen_prompts_like_the_average():
    order = curriculum()
    order.observe(results_of([50, 100]))
    drawn = Counter(row for step in range(3000) for row in order.batch(step).tolist())
    unseen = np.mean([count for row, count in drawn.items() if row not in (50, 100)])
    assert drawn[50] > 1.3 * unseen
    assert drawn[100] < 0.7 * unseen


def test_curriculum_keeps_the_weights_of_a_mixture():
    order = curriculum(parts=((0, 60, 0.25), (60, 60, 0.75)))
    rows = [row for step in range(300) for row in order.batch(step).tolist()]
    assert 0.7 < np.mean([row >= 60 for row in rows]) < 0.8


def test_curriculum_observe_does_not_depend_on_the_order_of_results():
    first, second = curriculum(), curriculum()
    results = [GroupResult(draw, row, 0.1 * row, 0.01 * row) for draw in range(2) for row in (3, 7, 11)]
    results.append(GroupResult(2, 7, 0.5, 0.25))
    first.observe(results)
    second.observe(reversed(results))
    for step in range(20):
        assert first.batch(step).tolist() == second.batch(step).tolist()
    assert first.metrics() == second.metrics()


def test_curriculum_results_decay_by_keep():
    order = curriculum(keep=0.75)
    order.observe([GroupResult(0, 3, 1.0, 0.0)])
    order.observe([GroupResult(0, 3, 0.0, 0.2)])
    assert order.metrics() == pytest.approx(
        {"curriculum/seen": 1 / ROWS, "curriculum/reward": 0.75, "curriculum/learnability": 0.05}
    )
    assert curriculum().metrics() == {"curriculum/seen": 0.0}


def test_curriculum_finds_rows_by_number_in_the_data_set():
    kept = np.arange(ROWS) * 3
    order = curriculum(kept=kept)
    order.observe([GroupResult(0, 30, 0.5, 0.25)])
    assert order.state_dict()["indices"].tolist() == [10]


@for_each("done", [0, 1, 37])
def test_step_loader_with_a_curriculum_continues_exactly_after_a_restore(done):
    whole = train(curriculum(), 60)
    order = curriculum()
    loader = StepLoader(Numbers(ROWS), prompts_per_step=PER_STEP, seed=5, order=order)
    for batch in whole[:done]:
        assert loader.draw()[1] == batch
        order.observe(results_of(batch))
    file = io.BytesIO()
    torch.save(loader.state_dict(), file)
    file.seek(0)
    restored = StepLoader(Numbers(ROWS), prompts_per_step=PER_STEP, seed=5, order=curriculum())
    restored.load_state_dict(torch.load(file, weights_only=True))
    assert restored.curriculum is not None
    for batch in whole[done:]:
        assert restored.draw()[1] == batch
        restored.curriculum.observe(results_of(batch))


def test_step_loader_with_a_curriculum_serves_a_failed_step_again():
    flying = 0
    order = curriculum()
    loader = StepLoader(Numbers(ROWS), prompts_per_step=PER_STEP, seed=5, order=order, in_flight=lambda: flying)
    order.observe(results_of(loader.draw()[1]))
    lost = loader.draw()[1]
    flying = 1
    state = loader.state_dict()
    again = StepLoader(Numbers(ROWS), prompts_per_step=PER_STEP, seed=5, order=curriculum())
    again.load_state_dict(state)
    assert again.draw()[1] == lost


def test_step_loader_refuses_a_state_of_another_curriculum():
    state = StepLoader(Numbers(ROWS), prompts_per_step=PER_STEP, order=curriculum()).state_dict()
    for other in (curriculum(share=0.25), curriculum(keep=0), None):
        with pytest.raises(CheckpointError, match="order was"):
            StepLoader(Numbers(ROWS), prompts_per_step=PER_STEP, order=other).load_state_dict(state)
    plain = StepLoader(Numbers(ROWS), prompts_per_step=PER_STEP).state_dict()
    with pytest.raises(CheckpointError, match="order was None and is now"):
        StepLoader(Numbers(ROWS), prompts_per_step=PER_STEP, order=curriculum()).load_state_dict(plain)


@for_each(
    ("options", "message"),
    [
        ({"share": 1.0}, "share=1.0: must be from 0 to below 1"),
        ({"keep": 1.0}, "keep=1.0: must be from 0"),
        ({"share": 0.01}, "share=0.01 of 8 prompts per step is 0 prompts"),
        ({"parts": ((0, 20, 1.0),)}, r"20 rows are too few .*it takes 24"),
    ],
)
def test_curriculum_refuses_bad_settings(options, message):
    with pytest.raises(ConfigError, match=message):
        curriculum(**options)
