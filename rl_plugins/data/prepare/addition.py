"""Addition: a made-up task that a tiny model learns on a CPU. The prompt is `17+25=`, the answer `42`."""

from __future__ import annotations

import random
from argparse import ArgumentParser, Namespace
from typing import Any

from rl_plugins.data.prepare.layout import Layout, Rows
from rl_plugins.errors import ConfigError


def addition_rows(*, below: int, num_train: int, num_test: int, seed: int) -> dict[str, Rows]:
    """Return sums of two numbers below `below`, no question twice or in both splits.

    Raises:
        ConfigError: there are not so many different questions.
    """
    if not 2 <= below <= 10**9:
        raise ConfigError(f"below={below}: choose 2 to 10^9.")
    if min(num_train, num_test) < 1:
        raise ConfigError(f"num_train={num_train}, num_test={num_test}: each must be 1 or more.")
    if num_train + num_test > below * below:
        raise ConfigError(
            f"num_train + num_test = {num_train + num_test}, but there are only {below * below} questions with "
            f"below={below}: raise it or ask for fewer rows."
        )
    pairs = random.Random(seed).sample(range(below * below), num_train + num_test)
    splits = {"train": pairs[:num_train], "test": pairs[num_train:]}
    return {
        split: [_row(pair // below, pair % below, split, index) for index, pair in enumerate(chosen)]
        for split, chosen in splits.items()
    }


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
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice (default: %(default)s)")


def _build(options: Namespace) -> dict[str, Rows]:
    return addition_rows(below=options.below, num_train=options.num_train, num_test=options.num_test, seed=options.seed)


LAYOUT = Layout("made-up sums for a tiny model; needs no raw data", _arguments, _build)
