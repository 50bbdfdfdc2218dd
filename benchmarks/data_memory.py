"""Memory and time of a large prompt file: rows and token ids on disk, compared with the whole table in memory.

`python -m benchmarks.data_memory [--megabytes 300]` writes a parquet file of this size with one row group. A row has a
prompt of 100 characters and 4 KB of other data. Each way runs in a separate process. The benchmark prints the peak of
anonymous memory without the memory of imports (the kernel can always reclaim the pages of files), the seconds until the
first row is ready, and the time for a prompt in the order of training.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROW_BYTES = 4096
SERVED = 4096
TIMEOUT_S = 1800


def write_file(path: Path, megabytes: int) -> int:
    """Write a parquet file of about this size, and return the number of rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng, rows = random.Random(0), megabytes * 2**20 // ROW_BYTES

    def row(number: int) -> dict[str, Any]:
        return {
            "prompt": [{"role": "user", "content": rng.randbytes(50).hex()}],
            "data_source": "random",
            "ability": "none",
            "reward_model": {"style": "rule", "ground_truth": str(number)},
            # Compression halves this text: two characters encode one random byte.
            "extra_info": {"index": number, "text": rng.randbytes(ROW_BYTES).hex()},
        }

    tables = [pa.Table.from_pylist([row(n) for n in range(i, min(i + 1000, rows))]) for i in range(0, rows, 1000)]
    pq.write_table(pa.concat_tables(tables), path, compression="zstd", row_group_size=rows)
    return rows


def anonymous_bytes() -> int:
    """Return the bytes of memory of this process without pages of files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon")


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """Yield a list. At the end the only number in the list is the peak of `anonymous_bytes`."""
    peak, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            peak[0] = max(peak[0], anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        done.set()
        watcher.join()


def on_disk(path: Path) -> Any:
    """Return the path: the data module reads rows from the file."""
    return path


def in_memory(path: Path) -> Any:
    """Load the whole table into memory."""
    import pyarrow.parquet as pq

    return pq.ParquetFile(path).read().to_pylist()


def measure(way: str, path: Path) -> dict[str, float]:
    """Measure one way in this process."""
    from rl_plugins.data.datamodule import PromptDataModule
    from rl_plugins.models.tiny import build_tokenizer

    tokenizer = build_tokenizer()
    before, start = anonymous_bytes(), time.perf_counter()
    with peak_memory() as peak:
        data = PromptDataModule(WAYS[way](path), tokenizer=tokenizer, prompts_per_step=64)
        data.setup("fit")
        loader = data.train_dataloader()
        loader.state_dict()
        ready = time.perf_counter()
        for _ in range(SERVED // 64):
            loader.draw()
        served = time.perf_counter()
    return {
        "peak_mb": (peak[0] - before) / 2**20,
        "ready_s": ready - start,
        "serve_us": (served - ready) / SERVED * 1e6,
    }


WAYS = {"on disk": on_disk, "in memory": in_memory}


def main() -> None:
    """Measure both ways, or one in this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=300)
    parser.add_argument("--way", choices=list(WAYS), help=argparse.SUPPRESS)
    parser.add_argument("--path", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(measure(options.way, options.path)))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.parquet"
        rows = write_file(path, options.megabytes)
        print(f"{rows} rows, {path.stat().st_size / 2**20:.0f} MB")
        print("| way | peak memory, MB | until rows can be served, s | to serve a prompt, us |\n|---|---|---|---|")
        for way in WAYS:
            command = [sys.executable, "-m", "benchmarks.data_memory", "--way", way, "--path", str(path)]
            result = subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S)
            numbers = json.loads(result.stdout.splitlines()[-1])
            print(f"| {way} | {numbers['peak_mb']:.0f} | {numbers['ready_s']:.1f} | {numbers['serve_us']:.0f} |")


if __name__ == "__main__":
    main()
