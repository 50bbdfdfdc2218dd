"""What the machines do while they train: MLflow's system metrics of every node, in one run, on the stage's clock."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from rl_plugins.callbacks.mlflow_import import import_mlflow
from rl_plugins.stages.stage import clock


class SystemMetrics(Callback):
    """Logs `system/node_0/cpu_utilization_percentage` and its like with each step: the means since the last one.

    One rank of each node samples its node; rank 0 logs for all.

    Args:
        every_s: seconds between two samples.
    """

    def __init__(self, *, every_s: float = 5.0) -> None:
        self._every_s = every_s
        self._sampler: Sampler | None = None
        self._several_nodes = False

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        rank, hosts = trainer.global_rank, _gather(trainer, socket.gethostname())
        nodes = list(dict.fromkeys(hosts))
        self._several_nodes = len(nodes) > 1
        if hosts.index(hosts[rank]) == rank:
            self._sampler = Sampler(f"system/node_{nodes.index(hosts[rank])}/", self._every_s)
            self._sampler.start()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        values = {} if self._sampler is None else self._sampler.take()
        if self._several_nodes:
            values = {name: value for node in _gather(trainer, values) for name, value in node.items()}
        if values and trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics(values, clock(pl_module))

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._sampler is not None:
            self._sampler.ended.set()
            self._sampler = None


def _gather(trainer: Trainer, value: Any) -> list[Any]:
    # Of our strategies' contract, which Lightning's type does not know.
    everyone: list[Any] = trainer.strategy.gather(value)  # type: ignore[attr-defined]
    return everyone


class Sampler(threading.Thread):
    """Asks MLflow's monitors now and then, in a thread of its own, which also imports them.

    Args:
        prefix: of the metrics' names.
        every_s: seconds between two samples.
    """

    def __init__(self, prefix: str, every_s: float) -> None:
        super().__init__(name="system metrics", daemon=True)
        self.prefix, self._every_s = prefix, every_s
        self._lock = threading.Lock()
        self._monitors: list[Any] = []
        self.ended = threading.Event()

    @override
    def run(self) -> None:
        import_mlflow()
        monitors = _monitors()
        while not self.ended.wait(self._every_s):
            with self._lock:
                self._monitors = monitors
                for monitor in monitors:
                    monitor.collect_metrics()

    def take(self) -> dict[str, float]:
        """The mean of each metric since the last call; empty if there was no sample."""
        means: dict[str, float] = {}
        with self._lock:
            for monitor in self._monitors:
                means |= monitor.aggregate_metrics()
                monitor.clear_metrics()
            self._monitors = []
        return {self.prefix + name: float(value) for name, value in means.items()}


def _monitors() -> list[Any]:
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
    from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
    from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
    from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

    monitors: list[Any] = [CPUMonitor(), DiskMonitor(), NetworkMonitor()]
    # There is no GPU, or nvidia-ml-py is not installed.
    with suppress(ImportError, RuntimeError):
        monitors.append(GPUMonitor())
    return monitors
