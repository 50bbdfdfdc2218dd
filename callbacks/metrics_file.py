"""Metrics of a run as lines of JSON in its folder: always there, whatever becomes of the tracking server."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only
from typing_extensions import override


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
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "time": round(time.time(), 3), **metrics}) + "\n")

    @override
    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """The resolved configuration is a file beside this one."""
