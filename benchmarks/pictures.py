"""A vision-language model learns the color of a square in a picture, and nothing from pictures of other rows.

`python -m benchmarks.pictures [--only llava gemma3 idefics3] [--folder FOLDER]` makes 32x32 pictures and, for each
family, a tiny model with random weights. SFT on pictures in a wrong order teaches the four answers. GRPO with the right
pictures then teaches the colors, and GRPO with pictures in a wrong order must not. The table has the accuracy on
held-out pictures. vLLM samples for Idefics 3, in two workers under Ray.
"""

from __future__ import annotations

import argparse
import io
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from benchmarks.tiny_vision import SIZE, save_tiny_vision
from rl_plugins.config.recipe import parse_config
from rl_plugins.launch.command_line import run_recipe
from rl_plugins.launch.compose import compose_config
from rl_plugins.run_folder import read_metrics

COLORS = {"r": (220, 30, 30), "g": (30, 200, 30), "b": (30, 30, 220), "y": (220, 220, 30)}
TRAIN, TEST = 512, 128
IN_ONE_PROCESS = ("launcher=local", "rollout.engine=transformers", "reward.num_workers=0")
FAMILIES = {"llava": IN_ONE_PROCESS, "gemma3": IN_ONE_PROCESS, "idefics3": ("placement.device=cpu",)}
"""Options of the runs of each family."""


def write_pictures(file: Path, count: int, seed: int, *, right: bool = True) -> None:
    """Write rows with a picture each.

    Args:
        file: parquet file to write.
        count: number of rows.
        seed: seed of the pictures.
        right: False gives each row the picture of another row.
    """
    generator = np.random.default_rng(seed)
    answers = generator.choice(list(COLORS), count).tolist()
    pictures = [_picture(generator, COLORS[answer]) for answer in answers]
    if not right:
        generator.shuffle(pictures)
    rows = [
        {
            "prompt": [{"role": "user", "content": "<image>color?"}],
            "images": [{"bytes": picture, "path": None}],
            "data_source": "pictures",
            "ability": "sight",
            "reward_model": {"ground_truth": answer},
            "extra_info": {"split": file.stem},
        }
        for answer, picture in zip(answers, pictures, strict=True)
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), file)


def _picture(generator: np.random.Generator, color: tuple[int, int, int]) -> bytes:
    pixels = generator.integers(0, 60, (SIZE, SIZE, 3), dtype=np.uint8)
    left, top = generator.integers(0, SIZE // 2, 2)
    width = generator.integers(SIZE // 4, SIZE // 2)
    pixels[top : top + width, left : left + width] = color
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def train(recipe: str, name: str, folder: Path, model: Path, rows: str, *overrides: str) -> tuple[float, float]:
    """Run a recipe in this process; return the accuracy on held-out pictures before and after."""
    options = [
        f"run.name={name}", f"run.output_dir={folder}", f"model.path={model}",
        f"data.train_files=[{folder / rows}.parquet]", f"data.val_files=[{folder / 'test'}.parquet]",
        "reward=exact_match", "data.max_prompt_tokens=40", "sampling.max_tokens=2", "run.eval_before=true",
        "run.checkpoint_every=1000", "tracking.enabled=false", *overrides,
    ]  # fmt: skip
    run_recipe(parse_config(compose_config(recipe, options)))
    accuracy = list(read_metrics(folder / name / "metrics.jsonl")["val/reward"].values())
    return accuracy[0], accuracy[-1]


def learn(family: str, folder: Path) -> dict[str, tuple[float, float, float]]:
    """Return the accuracy before and after GRPO, and its seconds, with right pictures and in a wrong order."""
    for name, count, seed, right in (("right", TRAIN, 0, True), ("wrong", TRAIN, 0, False), ("test", TEST, 1, True)):
        write_pictures(folder / f"{name}.parquet", count, seed, right=right)
    save_tiny_vision(family, folder / "model")
    sft = (*FAMILIES[family], "run.steps=30", "batch.prompts_per_step=64", "optimizer.lr=3e-3")
    train("sft", "sft", folder, folder / "model", "wrong", *sft)
    found: dict[str, Any] = {}
    for rows in ("right", "wrong"):
        start = time.perf_counter()
        accuracy = train(
            "grpo", f"grpo_{rows}", folder, folder / "sft" / "policy", rows, "run.steps=120", "optimizer.lr=5e-4",
            "batch.prompts_per_step=32", "batch.samples_per_prompt=8", "batch.updates_per_step=2",
            "run.eval_every=20", "run.target_reward=0.95",
            *FAMILIES[family],
            # Without the bonus, the policy may stop to sample one of the answers.
            "algorithm.entropy.coefficient=0.03",
            # The attention of Gemma 3 has a mask as large as the square of a row.
            "batch.tokens_per_micro_batch=2048",
        )  # fmt: skip
        found[rows] = (*accuracy, time.perf_counter() - start)
    return found


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--folder", type=Path, help="keep the runs here")
    arguments = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).absolute()
        found = {family: learn(family, folder / family) for family in arguments.only}
    print("| family | pictures | accuracy before | after | seconds of GRPO |\n|---|---|---|---|---|")
    for family, runs in found.items():
        for rows, (before, after, seconds) in runs.items():
            order = "right" if rows == "right" else "in a wrong order"
            print(f"| `{family}` | {order} | {before:.2f} | {after:.2f} | {seconds:.0f} |")


if __name__ == "__main__":
    main()
