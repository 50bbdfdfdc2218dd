from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_plugins.data.loaders import EvalLoader, StepLoader
from rl_plugins.data.orders import epoch_order
from rl_plugins.errors import CheckpointError, ConfigError
from rl_plugins.tests.loops import for_each


class Numbers:
    def __init__(self, count, fingerprint="f"):
        self.count, self.fingerprint, self.kept = count, fingerprint, np.arange(count)

    def __len__(self):
        return self.count

    def batch(self, indices, epoch):
        return epoch, list(indices)


def test_epoch_order_depends_on_seed_and_epoch_alone():
    assert epoch_order(0, 0, 8).tolist() == [3, 2, 1, 6, 0, 7, 4, 5]
    assert epoch_order(0, 1, 8).tolist() != epoch_order(0, 0, 8).tolist()
    assert epoch_order(1, 0, 8).tolist() != epoch_order(0, 0, 8).tolist()


@settings(max_examples=40)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 40), st.integers(0, 9))
def test_step_loader_splits_global_batches_over_ranks(world_size, share, rows, seed):
    per_step = world_size * share
    if rows < per_step:
        return
    options = {"prompts_per_step": per_step, "seed": seed}
    whole = list(StepLoader(Numbers(rows), **options))
    ranks = [list(StepLoader(Numbers(rows), rank=r, world_size=world_size, **options)) for r in range(world_size)]
    assert len(whole) == rows // per_step
    for (_, global_batch), *parts in zip(whole, *ranks, strict=True):
        assert [indices for _, indices in parts] == [global_batch[r::world_size] for r in range(world_size)]
    served = [index for _, indices in whole for index in indices]
    assert len(set(served)) == len(served) == len(whole) * per_step


@settings(max_examples=40)
@given(st.integers(0, 12), st.integers(1, 2))
def test_step_loader_continues_after_a_restore(done, world_size):
    make = lambda size: StepLoader(Numbers(11), prompts_per_step=4, seed=5, world_size=size)  # noqa: E731
    first, reference = make(1), make(world_size)
    steps = [batch for _ in range(8) for batch in reference]
    for _ in range(done):
        next(iter(first))
    second = make(world_size)
    second.load_state_dict(first.state_dict())
    assert list(second) == steps[done : done + 2]


def test_step_loader_serves_batches_in_flight_again():
    flying = 0
    loader = StepLoader(Numbers(8), prompts_per_step=2, in_flight=lambda: flying)
    batches = iter(loader)
    next(batches)
    flying = 1
    assert loader.state_dict()["step"] == 0
    loader.load_state_dict(loader.state_dict())
    assert loader.state_dict()["step"] == 0, "a batch that this loader did not serve cannot be in flight"


@for_each(
    ("other", "message"),
    [
        (StepLoader(Numbers(9), prompts_per_step=4), "rows was 9 and is now 8"),
        (StepLoader(Numbers(8), prompts_per_step=2), "prompts_per_step was 2 and is now 4"),
        (StepLoader(Numbers(8), prompts_per_step=4, seed=1), "seed was 1 and is now 0"),
        (StepLoader(Numbers(8, "g"), prompts_per_step=4), "fingerprint was g and is now f"),
    ],
)
def test_step_loader_refuses_a_state_of_other_data(other, message):
    with pytest.raises(CheckpointError, match=message):
        StepLoader(Numbers(8), prompts_per_step=4).load_state_dict(other.state_dict())


def test_loaders_refuse_bad_sizes_and_name_the_number_to_change():
    with pytest.raises(ConfigError, match="set prompts_per_step to a multiple of 4, such as 8"):
        StepLoader(Numbers(20), prompts_per_step=6, world_size=4)
    with pytest.raises(ConfigError, match="such as 2"):
        StepLoader(Numbers(20), prompts_per_step=0, world_size=2)
    with pytest.raises(ConfigError, match="the data has 3 rows, fewer than prompts_per_step=4"):
        StepLoader(Numbers(3), prompts_per_step=4)
    with pytest.raises(ConfigError, match="eval_batch_size=0"):
        EvalLoader(Numbers(3), batch_size=0)


@settings(max_examples=60)
@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 7))
def test_eval_loader_serves_each_row_once_in_order(rows, world_size, batch_size):
    loaders = [
        EvalLoader(Numbers(rows), batch_size=batch_size, rank=rank, world_size=world_size) for rank in range(world_size)
    ]
    batches = [[indices for _, indices in loader] for loader in loaders]
    assert [index for rank in batches for indices in rank for index in indices] == list(range(rows))
    assert {len(rank) for rank in batches} == {len(loaders[0])}
    assert max(len(indices) for rank in batches for indices in rank) <= batch_size
