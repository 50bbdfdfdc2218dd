"""Addition: a made-up task that a tiny model learns on a CPU. The prompt is `17+25=`, the answer `42`."""

from __future__ import annotations

import random
from argparse import ArgumentParser, Namespace
from itertools import islice
from typing import Any

from rl_plugins.data.prepare.layout import Layout, Rows
from rl_plugins.errors import ConfigError


def addition_rows(*, below: int, num_train: int, num_test: int, seed: int, num_dev: int = 0) -> dict[str, Rows]:
    """Return sums of two numbers below `below` as the splits train, test and, if asked for, dev; no question twice.

    Raises:
        ConfigError: there are not so many different questions.
    """
    if not 2 <= below <= 10**9:
        raise ConfigError(f"below={below}: choose 2 to 10^9.")
    if min(num_train, num_test) < 1:
        raise ConfigError(f"num_train={num_train}, num_test={num_test}: each must be 1 or more.")
    if num_dev < 0:
        raise ConfigError(f"num_dev={num_dev}: must be 0 or more.")
    sizes = {"train": num_train, "test": num_test} | ({"dev": num_dev} if num_dev else {})
    total = sum(sizes.values())
    if total > below * below:
        raise ConfigError(
            f"{total} rows are asked for ({', '.join(f'{n} {split}' for split, n in sizes.items())}), but there are "
            f"only {below * below} questions with below={below}: raise it or ask for fewer rows."
        )
    pairs = iter(random.Random(seed).sample(range(below * below), total))
    return {
        split: [_row(pair // below, pair % below, split, index) for index, pair in enumerate(islice(pairs, size))]
        for split, size in sizes.items()
    }


def preference_rows(rows: Rows, *, seed: int) -> Rows:
    """The same rows as pairs: `chosen` is the sum, `rejected` a number near it, `margin` how far off that is."""
    rng = random.Random(seed)
    pairs = []
    for row in rows:
        total = int(row["reward_model"]["ground_truth"])
        wrong = rng.choice([number for step in (1, 2, 10) for number in (total - step, total + step) if number >= 0])
        pairs.append({**row, "chosen": str(total), "rejected": str(wrong), "margin": float(abs(wrong - total))})
    return pairs


def _row(left: int, right: int, split: str, index: int) -> dict[str, Any]:
    return {
        "data_source": "addition",
        "prompt": [{"role": "user", "content": f"{left}+{right}="}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(left + right)},
        "extra_info": {"split": split, "index": index},
    }


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--below", type=int, default=100, help="summands are below this (default: %(default)s)")
    parser.add_argument("--num-train", type=int, default=4096, help="rows to train on (default: %(default)s)")
    parser.add_argument("--num-test", type=int, default=256, help="held-out rows (default: %(default)s)")
    parser.add_argument("--num-dev", type=int, default=0, help="rows held out beside them, to choose settings by")
    parser.add_argument("--pairs", action="store_true", help="write each split as pairs of responses, too")
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice (default: %(default)s)")


def _build(options: Namespace) -> dict[str, Rows]:
    splits = addition_rows(
        below=options.below,
        num_train=options.num_train,
        num_test=options.num_test,
        num_dev=options.num_dev,
        seed=options.seed,
    )
    if options.pairs:
        splits |= {f"{split}_pairs": preference_rows(rows, seed=options.seed) for split, rows in splits.items()}
    return splits


LAYOUT = Layout("made-up sums for a tiny model; needs no raw data", _arguments, _build)
