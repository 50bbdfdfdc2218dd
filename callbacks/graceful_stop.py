"""Saves and ends a run before its machine is taken away, so no finished step is lost.

The file `stop` in the run's folder requests the end. SIGTERM (Slurm, Kubernetes, `ray job stop`) and SIGHUP (a closed
terminal) create this file, and a user can create the file too. A time limit ends the run without the file. All ranks
end after the same step.
"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from rl_plugins.callbacks.checkpoint import PolicyCheckpoint
from rl_plugins.run_folder import RunFolder
from rl_plugins.signals import remove_request, stop_on_signals
from rl_plugins.stages.clock import clock, validates_in_training
from rl_plugins.strategies.contract import strategy_of
from rl_plugins.whole_file import write_whole_text


class GracefulStop(Callback):
    """End training after the running step on request, and save that step with the trainer's `PolicyCheckpoint`.

    Args:
        folder: folder of the run.
        time_limit_s: seconds from `started`; the step running at this time is the last one. None for no limit.
        started: start of the run in seconds since 1970; the start of this process by default.
        ray_notices: True if the workers run under Ray Train. After every step the callback then checks for a notice
            that Ray is about to lose a node. It saves at once, and training continues: Ray Train later starts the
            workers again, on other nodes, from the checkpoint.

    Attributes:
        stopped: True if training has ended early.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        time_limit_s: float | None = None,
        started: float | None = None,
        ray_notices: bool = False,
    ) -> None:
        self._folder, self._ray_notices = RunFolder(folder), ray_notices
        self._limit_s, self._started = time_limit_s, started or psutil.Process().create_time()
        self._noticed = False
        self._handler = ExitStack()
        self._limit_val_batches: float | int | None = None
        self.stopped = False

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        PolicyCheckpoint.of(trainer)
        self.stopped = False
        self._limit_val_batches = trainer.limit_val_batches

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Lightning has set its own handler before this hook; that handler ends the run without a checkpoint.
        # Ray's workers train outside the main thread. There the driver process handles the signal.
        if threading.current_thread() is threading.main_thread():
            self._handler.enter_context(stop_on_signals(self._folder))
        # After a request during the start, the run ends before its first step. A time limit leaves one step.
        self._stop_on_request(trainer, pl_module, timed=False)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        if self._ray_notices:
            self._save_on_notice(trainer, pl_module)
        self._stop_on_request(trainer, pl_module)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if validates_in_training(trainer):
            self._stop_on_request(trainer, pl_module)

    def _stop_on_request(self, trainer: Trainer, pl_module: LightningModule, *, timed: bool = True) -> None:
        reason = self._reason(timed) if trainer.is_global_zero else None
        requested = strategy_of(trainer).ranks.any(reason is not None)
        if not requested or trainer.should_stop:
            return
        PolicyCheckpoint.of(trainer).save_once(trainer, pl_module)
        if reason is not None:
            step = clock(pl_module)
            place = f"after step {step}" if step else "before the first step"
            write_whole_text(self._folder.stopped, f"{place}: {reason}")
        self.stopped = trainer.should_stop = True
        # Lightning would validate once more, and there can be no time left.
        trainer.limit_val_batches = 0

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restore(trainer)
        # If the file were removed earlier and the workers then died, new workers would not see the request.
        if trainer.is_global_zero:
            remove_request(self._folder.stop)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._restore(trainer)

    def _restore(self, trainer: Trainer) -> None:
        self._handler.close()
        # An exception can come before the start of the fit.
        if self._limit_val_batches is not None:
            trainer.limit_val_batches, self._limit_val_batches = self._limit_val_batches, None

    def _reason(self, timed: bool) -> str | None:
        if self._folder.stop.exists():
            # The file of another user may be unreadable, and its existence is enough.
            with suppress(OSError):
                if reason := self._folder.stop.read_text(encoding="utf-8", errors="replace").strip():
                    return reason
            return f"asked by {self._folder.stop}"
        if timed and self._limit_s is not None and time.time() - self._started >= self._limit_s:
            return f"the time limit of {self._limit_s:.0f} s"
        return None

    def _save_on_notice(self, trainer: Trainer, pl_module: LightningModule) -> None:
        import ray.train

        # Ray returns the same notice on every rank.
        notice = ray.train.get_preemption_info()
        if notice is not None and not self._noticed:
            if trainer.is_global_zero:
                nodes = ", ".join(notice.preempted_node_ids)
                print(f"{self._folder.path.name}: Ray is about to lose {nodes}: saving", flush=True)
            PolicyCheckpoint.of(trainer).save_once(trainer, pl_module)
        self._noticed = notice is not None
