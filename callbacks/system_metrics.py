"""Load of the machines during training: MLflow's system metrics of every node, in one run, on the stage's clock.

The monitors are MLflow's. MLflow's `SystemMetricsMonitor` is not used: its thread on every node would open the store
with another client, and would count samples in place of steps. Here rank 0 logs, through the loggers of the trainer.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from rl_plugins.stages.clock import clock
from rl_plugins.strategies.contract import strategy_of
from rl_plugins.tracking.store import import_mlflow

if TYPE_CHECKING:
    from mlflow.system_metrics.metrics.base_metrics_monitor import BaseMetricsMonitor


class SystemMetrics(Callback):
    """Log metrics such as `system/node_0/cpu_utilization_percentage` with each step: the means since the last step.

    One rank of each node samples the node's metrics; rank 0 logs the metrics of all nodes.

    Args:
        every_s: seconds between two samples.
    """

    def __init__(self, *, every_s: float = 5.0) -> None:
        self._every_s = every_s
        self._sampler: Sampler | None = None
        self._several_nodes = False

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        rank, hosts = trainer.global_rank, strategy_of(trainer).ranks.gather(socket.gethostname())
        nodes = list(dict.fromkeys(hosts))
        self._several_nodes = len(nodes) > 1
        if hosts.index(hosts[rank]) == rank:
            self._sampler = Sampler(f"system/node_{nodes.index(hosts[rank])}/", self._every_s)
            self._sampler.start()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        means = {} if self._sampler is None else self._sampler.take()
        if self._several_nodes:
            means_of_ranks = strategy_of(trainer).ranks.gather(means)
            means = {name: mean for rank_means in means_of_ranks for name, mean in rank_means.items()}
        if means and trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics(means, clock(pl_module))

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._sampler is not None:
            self._sampler.ended.set()
            self._sampler = None


class Sampler(threading.Thread):
    """Thread for reading MLflow's monitors at intervals. The thread also imports MLflow, so training does not wait.

    Args:
        prefix: prefix of the metrics' names.
        every_s: seconds between two samples.

    Attributes:
        ended: event for ending the thread.
    """

    def __init__(self, prefix: str, every_s: float) -> None:
        super().__init__(name="system metrics", daemon=True)
        self.prefix, self._every_s = prefix, every_s
        self._lock = threading.Lock()
        self._sampled_monitors: list[BaseMetricsMonitor] = []
        self.ended = threading.Event()

    @override
    def run(self) -> None:
        import_mlflow()
        monitors = _create_monitors()
        while not self.ended.wait(self._every_s):
            with self._lock:
                self._sampled_monitors = monitors
                for monitor in monitors:
                    monitor.collect_metrics()

    def take(self) -> dict[str, float]:
        """Return the mean of each metric since the last call; empty without a new sample."""
        means: dict[str, Any] = {}
        with self._lock:
            for monitor in self._sampled_monitors:
                means |= monitor.aggregate_metrics()
                monitor.clear_metrics()
            self._sampled_monitors = []
        return {self.prefix + name: float(mean) for name, mean in means.items()}


def _create_monitors() -> list[BaseMetricsMonitor]:
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
    from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
    from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
    from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

    monitors: list[BaseMetricsMonitor] = [CPUMonitor(), DiskMonitor(), NetworkMonitor()]
    # Without a GPU or without nvidia-ml-py, the constructor raises an error.
    with suppress(ImportError, RuntimeError):
        monitors.append(GPUMonitor())
    return monitors
