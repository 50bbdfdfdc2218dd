"""Write data/train.parquet and data/test.parquet with sums. Put rows of your own in their place."""

from itertools import product
from pathlib import Path

from rl_plugins.data.prepare.files import write_splits


def row(first: int, second: int) -> dict[str, object]:
    """Return a row: the prompt as chat messages, the name of the task, and the ground truth for the reward."""
    return {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": f"{first}+{second}="}],
        "ability": "math",
        "reward_model": {"ground_truth": str(first + second)},
        "extra_info": {"first": first, "second": second},
    }


def write_data(folder: Path) -> None:
    """Write the rows of training and validation."""
    sums = list(product(range(10), repeat=2))
    train = [row(*numbers) for numbers in sums if sum(numbers) % 5]
    write_splits({"train": train, "test": [row(*numbers) for numbers in sums if sum(numbers) % 5 == 0]}, folder)


if __name__ == "__main__":
    write_data(Path(__file__).parent / "data")
