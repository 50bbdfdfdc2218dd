"""Saves and ends a run when its machine is about to be taken away, so that no finished step is lost.

The file `stop` in the run's folder asks for it. SIGTERM (Slurm, Kubernetes, `ray job stop`) makes that file, and anyone
else may; a time limit is known from the start. All ranks end after the same step.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from rl_plugins.callbacks.checkpoint import PolicyCheckpoint
from rl_plugins.run_folder import RunFolder
from rl_plugins.stages.stage import clock


class GracefulStop(Callback):
    """Has the trainer's `PolicyCheckpoint` save the step at which training ends.

    Args:
        folder: of the run.
        time_limit_s: seconds after `started` from which on the step that runs is the last; None for no limit.
        started: when the run began, as `time.time()` tells it; by default when this process did.
        ray_notices: the workers run under Ray Train, which is asked after every step whether a node is to be taken
            away. Then a checkpoint is made at once and training goes on: Ray Train starts anew from it elsewhere.

    Attributes:
        stopped: training has ended early.
    """

    def __init__(
        self,
        folder: Path,
        *,
        time_limit_s: float | None = None,
        started: float | None = None,
        ray_notices: bool = False,
    ) -> None:
        self._folder, self._ray_notices = RunFolder(folder), ray_notices
        self._limit_s, self._started = time_limit_s, started or psutil.Process().create_time()
        self._noticed = False
        self._handler = ExitStack()
        self.stopped = False

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        PolicyCheckpoint.of(trainer)
        self.stopped = False
        self._limit_val_batches = trainer.limit_val_batches

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # By now Lightning has set its own handler, which ends the run without saving.
        # Ray's workers train in another thread; there the driver hears the signal.
        if threading.current_thread() is threading.main_thread():
            self._handler.enter_context(stop_on_sigterm(self._folder))

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._ray_notices:
            self._heed_notice(trainer, pl_module)
        reason = self._reason() if trainer.is_global_zero else None
        strategy: Any = trainer.strategy
        asked = bool(strategy.max_over_ranks(torch.tensor([float(reason is not None)])))
        if not asked or trainer.should_stop:
            return
        PolicyCheckpoint.of(trainer).save_once(trainer, pl_module)
        if reason is not None:
            self._folder.stopped.write_text(f"after step {clock(pl_module)}: {reason}", encoding="utf-8")
        self.stopped = trainer.should_stop = True
        # Lightning would validate once more, which takes time that nobody may have.
        trainer.limit_val_batches = 0

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._handler.close()
        trainer.limit_val_batches = self._limit_val_batches
        # Not earlier: were the workers to die in between, the next ones would go on to the last step.
        if trainer.is_global_zero:
            self._folder.stop.unlink(missing_ok=True)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._handler.close()

    def _reason(self) -> str | None:
        if self._folder.stop.exists():
            return self._folder.stop.read_text(encoding="utf-8").strip() or f"asked by {self._folder.stop}"
        if self._limit_s is not None and time.time() - self._started >= self._limit_s:
            return f"the time limit of {self._limit_s:.0f} s"
        return None

    def _heed_notice(self, trainer: Trainer, pl_module: LightningModule) -> None:
        import ray.train

        # The same answer on every rank.
        notice = ray.train.get_preemption_info()
        if notice is not None and not self._noticed:
            if trainer.is_global_zero:
                nodes = ", ".join(notice.preempted_node_ids)
                print(f"{self._folder.path.name}: Ray is about to lose {nodes}: saving", flush=True)
            PolicyCheckpoint.of(trainer).save_once(trainer, pl_module)
        self._noticed = notice is not None


@contextmanager
def stop_on_sigterm(folder: RunFolder) -> Iterator[None]:
    """The first SIGTERM asks the run to stop; after that the signal means what it meant before. In the main thread."""
    before = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL
    folder.path.mkdir(parents=True, exist_ok=True)

    def ask(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, before)
        folder.stop.write_text("SIGTERM", encoding="utf-8")
        # A print may be under way where the signal came.
        os.write(2, f"{folder.path.name}: SIGTERM: ending after this step\n".encode())

    signal.signal(signal.SIGTERM, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
