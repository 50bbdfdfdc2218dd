"""The simulator against runs computed by hand."""

from __future__ import annotations

import random
from itertools import cycle

import pytest

from benchmarks.simulator import (
    PhaseTimes,
    StepSamples,
    Workers,
    log_normal,
    measured,
    simulate,
)
from rl_plugins.config.sampling import Schedule
from rl_plugins.tests.loops import for_each

SLOW = PhaseTimes(1.0, 0.0, 0.0, 0.0, train_fixed_s=10.0)
APART = Workers(1, 1, colocated=False)


def in_turn(*lengths):
    forever = cycle(lengths)
    return lambda rng: next(forever)


def test_simulate_a_synchronous_step_is_the_sum_of_the_phases():
    times = PhaseTimes(0.02, 2e-4, 1e-5, 1e-4, train_fixed_s=1.0, update_weights_s=0.5)
    out = simulate(times, Workers(2, 2), Schedule(), StepSamples(8, 4, 10, in_turn(100)), steps=3)
    # Four groups of each engine: 16 responses of 100 tokens; a trainer has half of the tokens.
    rollout = 4 * 10 * 1e-5 + 100 * (0.02 + 16 * 2e-4)
    training = 1.0 + 8 * 4 * 110 / 2 * 1e-4
    assert out.step_s == pytest.approx(rollout + training + 0.5)
    assert out.trainer_idle == pytest.approx(rollout / out.step_s)
    assert out.engine_idle == pytest.approx(1 - rollout / out.step_s)
    assert (out.staleness, out.staleness_max, out.dropped) == (0.0, 0, 0.0)
    assert out.samples_per_s == pytest.approx(32 / out.step_s)


def test_simulate_decodes_faster_after_shorter_responses_have_ended():
    times = PhaseTimes(0.0, 1.0, 0.0, 0.0)
    out = simulate(times, Workers(1, 1), Schedule(), StepSamples(2, 1, 0, in_turn(10, 20)), steps=2)
    assert out.step_s == pytest.approx(10 * 2 + 10 * 1)


def test_simulate_responses_wait_for_a_slot():
    out = simulate(
        PhaseTimes(1.0, 0.0, 0.0, 0.0),
        Workers(1, 1, slots=2),
        Schedule(),
        StepSamples(3, 1, 0, in_turn(10)),
        steps=2,
    )
    assert out.step_s == pytest.approx(20)


@pytest.mark.parametrize("staleness", [1, 2])
def test_simulate_overlap_of_equal_sampling_and_training_halves_the_step(staleness):
    out = simulate(SLOW, APART, Schedule(staleness), StepSamples(4, 1, 0, in_turn(10)), steps=6)
    assert simulate(SLOW, APART, Schedule(), StepSamples(4, 1, 0, in_turn(10)), steps=6).step_s == pytest.approx(20)
    assert out.step_s == pytest.approx(10)
    assert out.staleness_max == staleness
    assert out.trainer_idle == pytest.approx(0, abs=1e-9)


def test_simulate_staleness_counts_the_version_that_sampled_each_token():
    # Twenty tokens while two steps train: half of them are sampled by the version after their first one.
    times = PhaseTimes(1.0, 0.0, 0.0, 0.0, train_fixed_s=10.0)
    out = simulate(times, APART, Schedule(2), StepSamples(4, 1, 0, in_turn(20)), steps=6)
    assert out.step_s == pytest.approx(10)
    assert out.staleness == pytest.approx(1.5)


def test_simulate_drops_surplus_groups_and_stragglers():
    waiting = simulate(SLOW, APART, Schedule(), StepSamples(4, 1, 0, in_turn(10, 10, 10, 100)), steps=4)
    dropping = simulate(SLOW, APART, Schedule(0, 0.25), StepSamples(4, 1, 0, in_turn(10, 10, 10, 10, 100)), steps=4)
    assert waiting.step_s == pytest.approx(110)
    assert dropping.step_s == pytest.approx(20) and dropping.dropped == pytest.approx(0.2)


@for_each(
    ("lengths", "step_s"),
    [
        # Each trainer needs four of its five groups.
        ([10, 10, 10, 10, 100, 10, 10, 10, 10, 100], 20),
        ([10, 10, 10, 100, 100, 10, 10, 10, 10, 10], 110),
    ],
)
def test_simulate_a_step_waits_for_the_trainer_with_too_many_stragglers(lengths, step_s):
    workers, batch = Workers(2, 2, colocated=False), StepSamples(8, 1, 0, in_turn(*lengths))
    assert simulate(SLOW, workers, Schedule(0, 0.25), batch, steps=4).step_s == pytest.approx(step_s)


def test_simulate_a_trainer_drops_a_surplus_while_another_trainer_waits():
    # After 10 tokens of four responses, the first trainer has its group. Two responses are left.
    times, batch = PhaseTimes(0.0, 1.0, 0.0, 0.0), StepSamples(2, 1, 0, in_turn(10, 100, 20, 100))
    assert simulate(times, Workers(2, 1), Schedule(0, 1), batch, steps=3).step_s == pytest.approx(10 * 4 + 10 * 2)


def test_simulate_carries_stragglers_over_up_to_max_staleness():
    lengths = in_turn(*[10] * 7, 35)
    in_order = simulate(SLOW, APART, Schedule(4, 4), StepSamples(4, 1, 0, lengths), steps=16)
    carried = simulate(SLOW, APART, Schedule(4, 1), StepSamples(4, 1, 0, in_turn(*[10] * 7, 35)), steps=16)
    assert in_order.staleness_max == 4 and carried.staleness_max <= 4
    assert carried.staleness < in_order.staleness
    bounded = simulate(SLOW, APART, Schedule(1, 0.5), StepSamples(4, 1, 0, in_turn(*[10] * 7, 35)), steps=16)
    assert bounded.staleness_max == 1 and bounded.step_s > carried.step_s


def test_simulate_colocated_engines_wait_while_trainers_train():
    # The engine's time is proportional to its responses: two batches at once gain nothing.
    times = PhaseTimes(0.0, 0.25, 0.0, 0.0, train_fixed_s=10.0)
    out = simulate(times, Workers(1, 1), Schedule(1), StepSamples(4, 1, 0, in_turn(10)), steps=4)
    assert out.step_s == pytest.approx(20)
    assert simulate(times, APART, Schedule(1), StepSamples(4, 1, 0, in_turn(10)), steps=4).step_s == pytest.approx(10)


def test_simulate_with_the_same_seed_gives_the_same_result():
    def outcome(seed):
        batch = StepSamples(8, 4, 10, log_normal(100, 1.0, 1000))
        return simulate(PhaseTimes(0.01, 1e-3, 0, 0, 1.0), Workers(2, 4, False), Schedule(2, 1), batch, seed=seed)

    assert outcome(0) == outcome(0) != outcome(1)


def test_log_normal_and_measured_draw_lengths_of_the_given_distribution():
    rng = random.Random(0)
    drawn = [log_normal(1000, 0.5, 10**6)(rng) for _ in range(20_000)]
    assert sum(drawn) / len(drawn) == pytest.approx(1000, rel=0.02)
    assert max(log_normal(1000, 2.0, 1500)(rng) for _ in range(100)) == 1500
    assert {measured([3, 5])(rng) for _ in range(50)} == {3, 5}
