"""Metrics of a run as lines of JSON in its folder: always there, whatever becomes of the tracking server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only
from typing_extensions import override

from rl_plugins.run_folder import append_metrics


class JsonLinesLogger(Logger):
    """Appends `{"step": n, "time": seconds since 1970, "train/reward": ...}` for every call of `log_metrics`.

    After a resume a step may stand there twice; `run_folder.read_metrics` takes the later one.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    @property
    @override
    def name(self) -> str:
        return "metrics"

    @property
    @override
    def version(self) -> str:
        return ""

    @override
    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        append_metrics(self._path, metrics, step)

    @override
    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """The resolved configuration is a file beside this one."""
