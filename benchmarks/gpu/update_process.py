"""Process of a strategy: `update_process FOLDER` does the task in the folder. The program `update` starts the process.

The stage is the stage of the GRPO recipe, on one rank. As with an engine that takes turns with training on a GPU, the
trainer's free memory goes back to the GPU before each update. Nothing moves to the host.
"""

from __future__ import annotations

import cProfile
import gc
import json
import math
import pstats
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.autograd import DeviceType, set_multithreading_enabled
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoTokenizer
from typing_extensions import override

from benchmarks.gpu.update import ERROR, PROGRESS, RESULT, TASK, Measured, Task
from benchmarks.policies import PROMPT_TOKENS
from integration_tests.gpu.without_vllm.kernel import use_kernel_of_this_torch
from rl_plugins.callbacks.throughput import Throughput
from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.data.experience import Experience
from rl_plugins.data.prompts import PromptBatch
from rl_plugins.memory import MemoryChange
from rl_plugins.rewards.records import Score, ScoringRequest
from rl_plugins.rollout.engine import Generations
from rl_plugins.rollout.transformers_engine import SynchronousGroups
from rl_plugins.stages.policy_optimization import PolicyOptimization
from rl_plugins.strategies.contract import POLICY
from rl_plugins.strategies.offload import STAY
from rl_plugins.tests.quiet_trainer import quiet_trainer
from rl_plugins.weights.source import WeightSource

_OPERATORS, _FUNCTIONS = 40, 60
"""Rows of a table of operators, and of a table of functions."""
_PROMPTS_OF_TABLES = 4
"""Largest number of prompts of an update with tables: torch takes a while to sort the events of its profiler."""


class RandomRollout(SynchronousGroups):
    """Rollout engine that returns random tokens with random log-probs at once.

    Args:
        vocab_size: number of different tokens.
    """

    keeps_weights = True
    check_updates = 0
    log_prob_tolerance = 0.0

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self._vocab_size, self._random = vocab_size, np.random.default_rng(0)

    def connect(self, rank: int, world_size: int) -> None:
        """Do nothing: the engine has no model."""

    @override
    def generate(self, prompts: list[list[int]], sampling: SamplingConfig, seeds: list[int] | None) -> Generations:
        """Return responses of `max_tokens` tokens each."""
        responses = len(prompts) * sampling.num_samples
        tokens = responses * sampling.max_tokens
        return Generations(
            self._random.integers(self._vocab_size, size=tokens),
            -self._random.exponential(size=tokens).astype(np.float32),
            np.zeros(tokens, dtype=np.int64),
            np.full(responses, sampling.max_tokens, dtype=np.int64),
            ["length"] * responses,
        )

    def update_weights(self, source: WeightSource, version: int) -> None:
        """Do nothing: the engine has no model."""

    def check_weights(self, source: WeightSource) -> None:
        """Do nothing: the engine has no model."""

    def prompt_log_probs(self, prompt: list[int]) -> list[float]:
        """Raise an error: the engine has no model."""
        raise NotImplementedError

    def sleep(self) -> MemoryChange | None:
        """Do nothing: the engine takes no memory."""
        return None

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Do nothing: the engine takes no memory."""

    def close(self) -> None:
        """Do nothing: the engine holds nothing."""


class RandomScores:
    """Scorer with random scores."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)

    def score(self, requests: Sequence[ScoringRequest]) -> list[Score]:
        """Return a score from 0 to 1 for each request."""
        return [Score(score) for score in self._random.random(len(requests)).tolist()]


Watch = Callable[[], AbstractContextManager[None]]


class WatchedOptimization(PolicyOptimization):
    """Stage that keeps the metrics of each step, and runs updates inside contexts.

    Attributes:
        watches: function for each step that returns the context of the update.
        tell: function that gets words about the present work.
        rows: metrics of each step.
        micro_batches: number of micro-batches of each update.
    """

    watches: Sequence[Watch] = ()
    tell: Callable[[str], object] = print

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.rows: list[dict[str, float]] = []
        self.micro_batches: list[int] = []

    @override
    def update(self, batch: Experience) -> dict[str, float]:
        self.tell(f"the update of step {self.step + 1} of {len(self.watches)}")
        self.micro_batches.append(len(self.passes.micro_batches(batch)))
        with self.watches[self.step]():
            return super().update(batch)

    @override
    def track(self, metrics: Mapping[str, float]) -> None:
        self.rows.append(dict(metrics))


def train(task: Task, tell: Callable[[str], object]) -> Measured:
    """Train, and return the figures.

    Args:
        task: the task.
        tell: function that gets words about the present work.
    """
    tell("the start of the training")
    on_gpu, busy = task.device == "cuda", [math.nan]
    plan: list[tuple[int, Watch]] = [(task.prompts, nullcontext)] * task.steps
    if on_gpu:
        plan.append((task.prompts, partial(busy_share, busy)))
    if task.tables:
        few = min(task.prompts, _PROMPTS_OF_TABLES)
        plan += [(few, partial(_operators, task.tables, on_gpu=on_gpu)), (few, partial(_functions, task.tables))]
    vocab_size = AutoConfig.from_pretrained(task.policy).vocab_size
    stage = WatchedOptimization(
        task.policy,
        tokenizer=AutoTokenizer.from_pretrained(task.policy),
        scorer=RandomScores(),
        sampling=SamplingConfig(max_tokens=task.new_tokens, num_samples=task.samples),
        tokens_per_micro_batch=task.micro_batch,
    )
    stage.tell, stage.watches = tell, [watch for _, watch in plan]
    trainer = quiet_trainer(
        _strategy(task, RandomRollout(vocab_size)),
        accelerator=task.device,
        devices=1,
        precision="bf16-mixed",
        callbacks=[Throughput()],
    )
    prompts = [_prompts(count, vocab_size, step) for step, (count, _) in enumerate(plan)]
    trainer.fit(stage, DataLoader(prompts, batch_size=None))  # type: ignore[arg-type]
    tell("the end of the process")
    rows = stage.rows[1 : task.steps] or stage.rows[:1]
    tokens = rows[-1]["throughput/trained_tokens_per_s"] * rows[-1]["time/step"]
    seconds = median(row["time/update_policy"] for row in rows)
    return Measured(
        seconds,
        stage.micro_batches[0],
        tokens / seconds,
        median(row.get("throughput/mfu", math.nan) for row in rows),
        max(row["memory/update_policy"] for row in rows),
        busy[0],
    )


def _strategy(task: Task, engine: RandomRollout) -> Any:
    places = {POLICY: STAY}
    if task.strategy == "single_device":
        from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy

        return SingleDeviceRolloutStrategy(task.device, rollout=engine)
    if task.strategy == "fsdp":
        from rl_plugins.strategies.fsdp import FSDPStrategy

        return FSDPStrategy(rollout=engine, offload=places)
    from rl_plugins.strategies.zero import ZeroStrategy

    return ZeroStrategy(stage=int(task.strategy.removeprefix("zero")), rollout=engine, offload=places)


def _prompts(count: int, vocab_size: int, step: int) -> PromptBatch:
    """Return the random prompts of a step."""
    ids = np.random.default_rng(step).integers(vocab_size, size=(count, PROMPT_TOKENS)).tolist()
    columns: dict[str, list[Any]] = {
        "prompt": [[{"role": "user", "content": "random"}]] * count,
        "data_source": ["random"] * count,
        "reward_model": [{}] * count,
        "extra_info": [{}] * count,
    }
    return PromptBatch(ids, list(range(count)), columns, 0)


@contextmanager
def busy_share(share: list[float]) -> Iterator[None]:
    """Set `share[0]` to the share of the time in which the GPU ran a kernel, a copy or a fill."""
    # Without the activities of the CPU, which would slow the CPU down.
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        start = time.perf_counter()
        yield
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    # Annotations of users span the gaps between kernels.
    events = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    spans = [(e.time_range.start, e.time_range.end) for e in events if not e.is_user_annotation]
    if spans:
        share[0] = covered(spans) / 1e6 / seconds


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Return the length of the union of spans, each with its start and its end."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


@contextmanager
def _operators(name: str, *, on_gpu: bool) -> Iterator[None]:
    """Write the operators with the most time of their own on the CPU, and on the GPU."""
    devices = {"cpu": ProfilerActivity.CPU, **({"cuda": ProfilerActivity.CUDA} if on_gpu else {})}
    with profile(activities=list(devices.values())) as profiler:
        yield
    averages = profiler.key_averages()
    for device in devices:
        table = averages.table(sort_by=f"self_{device}_time_total", row_limit=_OPERATORS, max_name_column_width=90)
        Path(f"{name}_{device}_time.txt").write_text(table)


@contextmanager
def _functions(name: str) -> Iterator[None]:
    """Write the Python functions with the most time of their own, and with the most time in all."""
    profiler = cProfile.Profile()
    # The profiler sees one thread alone, and on a GPU the hooks of a backward pass run in another thread.
    with set_multithreading_enabled(False), profiler:
        yield
    with Path(f"{name}_functions.txt").open("w") as file:
        stats = pstats.Stats(profiler, stream=file)
        for order in ("tottime", "cumulative"):
            stats.sort_stats(order).print_stats(_FUNCTIONS)


def main() -> None:
    """Do the task of the folder, and write the figures or the error."""
    folder = Path(sys.argv[1])
    task = Task(**json.loads((folder / TASK).read_text()))
    use_kernel_of_this_torch()
    # As in a training worker with the default options.
    gc.freeze()
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high" if task.device == "cuda" else "highest")
    try:
        measured = train(task, (folder / PROGRESS).write_text)
    except BaseException as error:
        (folder / ERROR).write_text(traceback.format_exception_only(error)[-1].strip().splitlines()[-1])
        raise
    (folder / RESULT).write_text(json.dumps(asdict(measured)))


if __name__ == "__main__":
    main()
