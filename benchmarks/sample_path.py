"""Path of samples from the vLLM engine to the training rank: the processes that read or copy a sample.

`python -m benchmarks.sample_path [--tokens 16 512] [--steps 6]` runs GRPO with two workers, one engine and 64 samples
in each step, once for each length of responses. This process is the driver. Twenty times a second the driver measures
its own object references, the received bytes of its TCP sockets, and its shared memory. Each rank writes notes about
received samples. At the end the run waits, and the private memory of all processes is searched for samples.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks import memory_search
from benchmarks.policies import PROMPT_TOKENS, save_policy, save_prompts
from benchmarks.watch_thread import WatchThread
from benchmarks.watched_fleet import NOTES, WatchedFleet, references, returned_by
from rl_plugins.config.recipe import parse_config
from rl_plugins.errors import RunStopped
from rl_plugins.launch.command_line import run_recipe
from rl_plugins.launch.compose import compose_config
from rl_plugins.rollout.vllm import client
from rl_plugins.run_folder import RunFolder, read_metrics

KINDS = {"VLLMActor": "engine", "RayTrainWorker": "workers", "TrainController": "Ray Train's controller"}
REST = "Ray's own and the rest"
_EVERY_S = 0.05
_HOLD_S = 120.0
# Field of struct tcp_info.
_BYTES_RECEIVED = slice(128, 136)


class Driver(WatchThread):
    """Measures this process during a run: object references, received bytes and shared memory."""

    def __init__(self) -> None:
        super().__init__(_EVERY_S)
        self.objects: set[str] = set()
        self.shared_bytes = 0
        self._received: dict[str, int] = {}

    @property
    def received(self) -> int:
        """Received bytes of all TCP sockets so far."""
        return sum(self._received.values())

    def measure(self) -> None:
        """Measure once."""
        import ray

        self._received |= _received_by_socket()
        status = Path("/proc/self/status").read_text().splitlines()
        shared = next(int(line.split()[1]) for line in status if line.startswith("RssShmem"))
        self.shared_bytes = max(self.shared_bytes, 1024 * shared)
        if ray.is_initialized():
            self.objects |= references()


def _received_by_socket() -> dict[str, int]:
    received = {}
    for name in os.listdir("/proc/self/fd"):
        # A socket may be closed meanwhile.
        with suppress(OSError):
            inode = os.readlink(f"/proc/self/fd/{name}")
            if not inode.startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                    info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    received[inode] = int.from_bytes(info[_BYTES_RECEIVED], sys.byteorder)
    return received


def reward(solution_str: str) -> float:
    """Return some number. While a file `hold` exists, the reward waits, and so does the run."""
    hold, deadline = Path(os.environ[NOTES]) / "hold", time.monotonic() + _HOLD_S
    while hold.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return len(solution_str) / 100


def notes_of(folder: Path) -> list[list[dict[str, Any]]]:
    """Return the notes of each rank."""
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in sorted(folder.glob("*.jsonl"))]


def search(stretches: list[list[int]]) -> dict[str, int]:
    """Return, for each kind of process, the largest number of stretches of tokens in one process."""
    me = psutil.Process()
    kinds = {str(me.pid): "driver"}
    for process in me.children(recursive=True):
        with suppress(psutil.Error):
            title = " ".join(process.cmdline())
            kinds[str(process.pid)] = next((name for kind, name in KINDS.items() if kind in title), REST)
    program = [sys.executable, memory_search.__file__, *kinds]
    result = subprocess.run(program, input=json.dumps(stretches), capture_output=True, text=True, check=True)
    found: dict[str, int] = {}
    for pid, count in json.loads(result.stdout).items():
        found[kinds[pid]] = max(found.get(kinds[pid], 0), count)
    return found


class Search(threading.Thread):
    """Thread that holds a run after some steps, searches its processes, and stops the run."""

    def __init__(self, folder: RunFolder, notes: Path, steps: int, driver: Driver) -> None:
        super().__init__(daemon=True)
        self._folder, self._notes, self._steps, self._driver = folder, notes, steps, driver
        self.stretches, self.found = 0, dict[str, int]()
        self.received = self.samples_bytes = 0

    def run(self) -> None:
        """Hold, search and stop the run."""
        try:
            self._search_at_last_step()
        finally:
            # Also after an error, or the run would wait or train for ever.
            (self._folder.path / "stop").touch()
            (self._notes / "hold").unlink(missing_ok=True)

    def _search_at_last_step(self) -> None:
        self._wait_for_step(2)
        received, samples = self._driver.received, self._bytes()
        self._wait_for_step(self._steps)
        self.received, self.samples_bytes = self._driver.received - received, self._bytes() - samples
        (self._notes / "hold").touch()
        # The samples of the next step arrive, and wait for rewards.
        time.sleep(8)
        lots = [[line["stretches"] for line in rank if line.get("stretches")][-2:] for rank in notes_of(self._notes)]
        stretches = [lot[0] for rank in lots for lot in rank]
        self.stretches, self.found = len(stretches), search(stretches)

    def _bytes(self) -> int:
        return sum(line.get("bytes", 0) for rank in notes_of(self._notes) for line in rank)

    def _wait_for_step(self, step: int) -> None:
        while not self._folder.metrics.is_file() or step not in read_metrics(self._folder.metrics).get(
            "train/loss", {}
        ):
            time.sleep(_EVERY_S)


def measure(tokens: int, steps: int) -> None:
    """Run with responses of at most this many tokens, and print."""
    import ray

    with tempfile.TemporaryDirectory() as name:
        folder, notes = Path(name), Path(name) / "notes"
        notes.mkdir()
        os.environ[NOTES] = str(notes)
        # With a small vocabulary a random policy sometimes samples the end token.
        save_policy(folder / "policy", hidden_size=128, num_layers=2, intermediate_size=352, vocab_size=512)
        save_prompts(folder / "data")
        overrides = [
            "run.name=run", f"run.output_dir={folder}/outputs", f"model.path={folder}/policy", "placement.device=cpu",
            f"data.train_files=[{folder}/data/train.parquet]", "run.export=false", "run.checkpoint_every=100000",
            "run.eval_every=0", "tracking.enabled=false", "run.steps=100000", "batch.prompts_per_step=8",
            "batch.samples_per_prompt=8", f"sampling.max_tokens={tokens}", f"data.max_prompt_tokens={PROMPT_TOKENS}",
            "reward.functions.default={_target_: benchmarks.sample_path.reward}", f"reward.deadline_s={2 * _HOLD_S}",
        ]  # fmt: skip
        watcher = Search(RunFolder(folder / "outputs" / "run"), notes, steps, driver := Driver())
        watcher.start()
        with driver, suppress(RunStopped):
            run_recipe(parse_config(compose_config("grpo", overrides)))
        watcher.join()
        if not watcher.found:
            raise RuntimeError("the search of the processes failed: the lines above have the reason")
        show(notes_of(notes), driver, watcher)
        # The processes of the next run need another environment.
        ray.shutdown()


def show(notes: list[list[dict[str, Any]]], driver: Driver, search: Search) -> None:
    """Print the measurements."""
    lots = [line for rank in notes for line in rank if "bytes" in line]
    total, stored = sum(lot["bytes"] for lot in lots), sum(lot["bytes_in_store"] for lot in lots)
    samples = sum(lot["samples"] for lot in lots)
    moved, groups, of_others = (
        sum(line.get(name, 0) for rank in notes for line in rank) for name in ("moved", "groups", "of_others")
    )
    of_engines = {one for lot in lots for one in returned_by(lot["actor"], driver.objects)}
    print(f"\n{samples} samples of {total / samples:.0f} bytes (ids, log-probs, versions), {len(lots)} lots of engines")
    print(f"  read in the object store, where the engine wrote them    {stored / total:6.1%} of the bytes")
    print(f"  in the engine's answer                                   {1 - stored / total:6.1%}")
    print(f"  groups that another rank fetched than had asked for them {of_others / groups:6.1%}")
    print(f"  went on from one rank to another                         {moved / samples:6.1%} of the samples")
    print(f"  objects of engines, a rank refers to, at least           {min(lot['referred'] for lot in lots):6}")
    print(f"  objects of engines, the driver refers to                 {len(of_engines):6} of {len(driver.objects)}")
    print(f"  shared memory that the driver has touched                {driver.shared_bytes / 1e6:6.1f} MB")
    print(f"  received by the driver's sockets, all told               {search.received / 1e3:6.1f} KB")
    print(f"  in the same steps, samples                               {search.samples_bytes / 1e3:6.1f} KB")
    for kind, count in sorted(search.found.items()):
        print(f"  {f'in private memory, {kind}':56} {count:6} of {search.stretches} samples")


def main() -> None:
    """Measure each length."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 512])
    parser.add_argument("--steps", type=int, default=6)
    arguments = parser.parse_args()
    client.Fleet = WatchedFleet  # type: ignore[misc]
    for tokens in arguments.tokens:
        measure(tokens, arguments.steps)


if __name__ == "__main__":
    main()
