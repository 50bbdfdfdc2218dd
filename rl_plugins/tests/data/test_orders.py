from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_plugins.config.data import CurriculumConfig, MixturePart
from rl_plugins.data.datamodule import PromptDataModule
from rl_plugins.data.loaders import StepLoader
from rl_plugins.data.orders import Mixture, RowRange, load_parts
from rl_plugins.data.parquet import COLUMNS, load_rows
from rl_plugins.errors import CheckpointError, ConfigError
from rl_plugins.tests.data.test_loaders import Numbers
from rl_plugins.tests.loops import for_each


def mixture(rows=(60, 200, 90), shares=(0.5, 0.25, 0.25), per_step=8, seed=3):
    firsts = np.cumsum([0, *rows[:-1]]).tolist()
    parts = [RowRange(str(i), *part) for i, part in enumerate(zip(firsts, rows, shares, strict=True))]
    return Mixture(parts, prompts_per_step=per_step, seed=seed)


def part_of(row, rows=(60, 200, 90)):
    return int(np.searchsorted(np.cumsum(rows), row, side="right"))


def test_mixture_batches_have_the_shares_of_the_parts():
    order = mixture()
    total: Counter[int] = Counter()
    for step in range(400):
        of_step = Counter(part_of(row) for row in order.batch(step))
        assert abs(of_step[0] - 4) <= 1 and abs(of_step[1] - 2) <= 1 and abs(of_step[2] - 2) <= 1
        total += of_step
    assert abs(total[0] - 1600) <= 5 and abs(total[1] - 800) <= 5


def test_mixture_batches_have_the_shares_of_many_small_parts():
    weights, rows = [100, *[1] * 50], [3000, *[60] * 50]
    order = mixture(rows, [weight / sum(weights) for weight in weights], 60, 0)
    for step in range(100):
        of_step = Counter(part_of(row, rows) for row in order.batch(step))
        assert abs(of_step[0] - 40) <= 2 and max(of_step[part] for part in range(1, 51)) <= 2


@settings(max_examples=40)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(2, 12), st.integers(0, 5), st.data())
def test_mixture_batches_hold_no_row_twice_and_passes_are_whole(weights, per_step, seed, data):
    rows = [data.draw(st.integers(3 * per_step, 5 * per_step)) for _ in weights]
    order = mixture(rows, [weight / sum(weights) for weight in weights], per_step, seed)
    served = []
    for step in range(60):
        batch = order.batch(step).tolist()
        assert len(set(batch)) == len(batch) == per_step
        served += batch
    for part in order.parts:
        own = [row for row in served if part.first <= row < part.first + part.rows]
        # After a few passes, every row has come as often as any other, with a difference of at most one.
        counts = Counter(own)
        assert max(counts.values()) - min(counts[row] for row in range(part.first, part.first + part.rows)) <= 2


def test_mixture_take_returns_the_same_rows_from_any_start():
    order = mixture()
    whole = order.take(0, 2000)
    for start in (0, 7, 335, 343, 344, 345, 1001):
        assert order.take(start, 8).tolist() == whole[start : start + 8].tolist()
        assert len(set(whole[start : start + 8])) == 8
    assert mixture(seed=4).take(0, 50).tolist() != whole[:50].tolist()


@for_each("world_size", [1, 2, 4])
def test_step_loader_of_a_mixture_splits_steps_over_ranks_and_can_be_restored(world_size):
    def loaders():
        return [
            StepLoader(Numbers(350), prompts_per_step=8, order=mixture(), rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]

    steps = [mixture().batch(step).tolist() for step in range(100)]
    first = loaders()
    for step in range(60):
        assert [loader.draw()[1] for loader in first] == [steps[step][rank::world_size] for rank in range(world_size)]
    second = loaders()
    for loader, other in zip(second, first, strict=True):
        loader.load_state_dict(other.state_dict())
    for step in range(60, 100):
        assert [loader.draw()[1] for loader in second] == [steps[step][rank::world_size] for rank in range(world_size)]


def test_mixture_gives_each_rank_prompts_of_every_part():
    order = mixture((100, 100), (0.5, 0.5))
    first_rank = [part_of(row, (100, 100)) for step in range(50) for row in order.batch(step)[::2]]
    assert 60 < sum(first_rank) < 140


def test_mixture_names_a_part_without_enough_rows():
    with pytest.raises(ConfigError, match=r"0: 60 rows are too few for a share of 0.9 .*it takes \d+"):
        mixture(shares=(0.9, 0.05, 0.05), per_step=32)
    with pytest.raises(ConfigError, match=r"0: its weight gives it none of the 344 prompts of an epoch"):
        mixture(shares=(0.0001, 0.5, 0.4999))


def test_step_loader_refuses_a_state_of_another_mixture():
    state = StepLoader(Numbers(350), prompts_per_step=8, order=mixture()).state_dict()
    with pytest.raises(CheckpointError, match=r"order was \{'0': \[60, 0.5\]"):
        StepLoader(Numbers(350), prompts_per_step=8, order=mixture(shares=(0.4, 0.3, 0.3))).load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"order was .* and is now None"):
        StepLoader(Numbers(350), prompts_per_step=8).load_state_dict(state)
    del state["order"]["method"]
    with pytest.raises(CheckpointError, match=r"'2': \[90, 0.25\]\} and is now .*'method': 2"):
        StepLoader(Numbers(350), prompts_per_step=8, order=mixture()).load_state_dict(state)


def test_prompt_data_module_mixes_files_without_long_prompts(row, write_rows, tokenizer):
    long = [{"role": "user", "content": "9" * 50}]
    easy = [write_rows([row(n) for n in range(start, start + 20)], f"{start}.parquet") for start in (0, 20)]
    hard = write_rows([row(100 + n, **({"prompt": long} if n < 30 else {})) for n in range(100)], "hard.parquet")
    parts = {"easy": MixturePart(easy, 1), "hard": MixturePart(hard, 3)}
    data = PromptDataModule(parts, tokenizer=tokenizer, prompts_per_step=8, max_prompt_tokens=20)
    data.setup("fit")
    loader = data.train_dataloader()
    assert len(loader) == 110 // 8
    numbers = [row for _ in range(40) for row in loader.draw().rows]
    assert abs(sum(number < 40 for number in numbers) - 80) <= 2
    assert not any(40 <= number < 70 for number in numbers)
    assert load_rows([*easy, hard]).rows[max(numbers)]["extra_info"]["index"] == 199


@for_each("weight", [0, -1, float("nan"), float("inf")])
def test_mixture_part_refuses_bad_weights(weight):
    with pytest.raises(ConfigError, match="must be above 0"):
        MixturePart("a.parquet", weight)


def test_load_parts_refuses_a_mapping_without_mixture_parts(row):
    with pytest.raises(ConfigError, match=r"'prompt' is a list and no MixturePart: give a list of rows"):
        load_parts(row(0), COLUMNS)


def test_in_order_serves_the_rows_in_the_order_of_the_data(row):
    data = PromptDataModule([row(number) for number in range(7)], prompts_per_step=3, shuffle=False)
    order = data.order(Numbers(7))
    assert order is not None
    assert [order.batch(step).tolist() for step in range(4)] == [[0, 1, 2], [3, 4, 5]] * 2
    loader = StepLoader(Numbers(7), prompts_per_step=3, order=order)
    loader.draw()
    with pytest.raises(CheckpointError, match="shuffle"):
        StepLoader(Numbers(7), prompts_per_step=3).load_state_dict(loader.state_dict())


def test_orders_of_mixtures_and_curricula_refuse_shuffle_false(row, write_rows):
    mixture = {"a": MixturePart(files=[str(write_rows([row(0)]))])}
    with pytest.raises(ConfigError, match="shuffle=False: a mixture has an order of its own"):
        PromptDataModule(mixture, prompts_per_step=1, shuffle=False)
    with pytest.raises(ConfigError, match="shuffle=False: a curriculum chooses the prompts"):
        PromptDataModule([row(0)], prompts_per_step=1, shuffle=False, curriculum=CurriculumConfig(share=0.5))
