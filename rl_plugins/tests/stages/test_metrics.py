"""Metrics over micro-batches and ranks equal the metrics of all valid tokens at once."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import Tensor

from rl_plugins.evaluation.measures import summarize
from rl_plugins.rewards.records import Score
from rl_plugins.stages.metrics import (
    LearningSignal,
    TokenMetrics,
    interval_metrics,
    mean_details,
    mean_over_ranks,
    sum_details,
)


def one_rank(values: Tensor) -> Tensor:
    return values


def test_token_metrics_average_over_micro_batches_and_ranks() -> None:
    generator = torch.Generator().manual_seed(0)
    values, mask = torch.randn(8, 5, generator=generator) - 3, torch.rand(8, 5, generator=generator) < 0.5
    mask[6] = False
    ranks = [TokenMetrics(), TokenMetrics()]
    for rows in ([0, 1, 2], [3], [4, 5], [6], [7]):
        garbage = values[rows].masked_fill(~mask[rows], torch.nan)
        rank = ranks[rows[0] > 3]
        rank.add({"gap": garbage}, mask[rows].float(), maximum=True)
        rank.add({"plain": 2 * garbage}, mask[rows].float())
        rank.add({"gap": torch.zeros(1, 0)}, torch.zeros(1, 0), maximum=True)
        rank.add_sum("loss", torch.tensor(0.5))
    collected: list[list[Tensor]] = [[], []]

    def record(kind: int, values: Tensor) -> Tensor:
        collected[kind].append(values)
        return values

    for rank in ranks:
        rank.averages(lambda v: record(0, v), lambda v: record(1, v))
    sums, maxima = torch.stack(collected[0]).sum(0), torch.stack(collected[1]).amax(0)
    for rank in ranks:
        metrics = rank.averages(lambda _: sums, lambda _: maxima)
        assert metrics == {
            "train/gap": pytest.approx(float(values[mask].double().mean()), rel=1e-6),
            "train/gap_max": pytest.approx(float(values[mask].max())),
            "train/plain": pytest.approx(2 * float(values[mask].double().mean()), rel=1e-6),
            "train/loss": 2.5,
        }
    together = TokenMetrics()
    for rank in ranks:
        together.take_in(rank)
    assert together.averages(one_rank, one_rank) == pytest.approx(metrics)


def test_token_metrics_leave_out_a_mean_without_a_value() -> None:
    collected = TokenMetrics()
    collected.add({"entropy": torch.ones(2, 3)}, torch.zeros(2, 3), maximum=True)
    collected.add_sum("loss", torch.tensor(0.0))
    assert collected.averages(one_rank, one_rank) == {"train/loss": 0.0}


def test_token_metrics_without_values_have_no_averages() -> None:
    assert TokenMetrics().averages(one_rank, one_rank) == {}


def test_mean_details_averages_each_detail_over_the_scores_that_have_the_detail() -> None:
    first = sum_details([Score(1.0, {"right": 1.0, "tidy?": 0.0}), Score(0.0, {"right": 0.0})])
    first = sum_details([Score(None, failure="raised"), Score(1.0, {"right": 1.0})], first)
    # The other rank has met another reward.
    second = sum_details([Score(1.0, {"words": 4.0, "tidy?": 0.5})])
    assert mean_details([first, second, {}]) == {"rewards/right": 2 / 3, "rewards/tidy_": 0.25, "rewards/words": 4.0}


def test_token_metrics_keep_no_autograd_graph() -> None:
    metrics = TokenMetrics()
    metrics.add({"gap": torch.ones(1, 2, requires_grad=True) * 2}, torch.ones(1, 2), maximum=True)
    assert not any(tensor.requires_grad for tensor in (*metrics._sums.values(), *metrics._maxima.values()))


def test_mean_over_ranks_averages_only_counted_samples() -> None:
    columns = {
        "reward": (torch.tensor([1.0, torch.nan, 4.0]), torch.tensor([True, False, True])),
        "length": (torch.tensor([2, 3, 4]), torch.tensor([True, True, True])),
        "empty": (torch.tensor([7.0]), torch.tensor([False])),
    }
    assert mean_over_ranks(columns, one_rank) == pytest.approx(
        {"reward": 2.5, "length": 3.0, "empty": math.nan}, nan_ok=True
    )
    # Another rank with the reward 10 once: the mean of all samples, not of the ranks' means.
    other = torch.tensor([10.0, 1.0, 0.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    metrics = mean_over_ranks(columns, lambda own: own + other)
    assert metrics["reward"] == 5.0
    assert metrics["length"] == 2.5


def test_interval_metrics_have_names_that_mlflow_accepts() -> None:
    from mlflow.utils.validation import _validate_metric_name

    metrics = interval_metrics(summarize(["openai/gsm8k", "sums (small)@v1"], [{"mean@1": 1.0}, {"best@8": 0.5}]))
    assert set(metrics) == {
        *(f"openai/gsm8k/mean_at_1{end}" for end in ("", "_low", "_high")),
        *(f"sums _small__v1/best_at_8{end}" for end in ("", "_low", "_high")),
    }
    for name in metrics:
        _validate_metric_name(name)


def test_learning_signal_warns_once_after_five_steps_of_equal_scores() -> None:
    signal, equal = LearningSignal(), {"train/uniform_groups": 1.0, "train/reward": 0.0}
    with pytest.warns(UserWarning, match=r"not changed in 5 steps: .*same score \(train/reward=0\)") as warned:
        for _ in range(9):
            signal.check(0.0, equal)
    assert len(warned) == 1


@pytest.mark.parametrize(("norm", "uniform"), [(0.1, 1.0), (None, 1.0), (0.0, 0.9)])
def test_learning_signal_is_silent_after_a_step_that_may_teach(norm: float | None, uniform: float) -> None:
    signal, equal = LearningSignal(), {"train/uniform_groups": 1.0, "train/reward": 0.0}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        signal.check(norm, equal | {"train/uniform_groups": uniform})
        for _ in range(9):
            signal.check(0.0, equal)
