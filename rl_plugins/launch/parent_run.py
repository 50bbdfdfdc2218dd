"""The MLflow run of a pipeline, under which those of its stages hang; an outage delays what it is told, and no more.

What there is to say of a pipeline is in its folder: `pipeline.yaml`, and in `metrics.jsonl` the last validation of each
stage that is through.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from rl_plugins.errors import ConfigError, DeadlineExceeded, RunStopped
from rl_plugins.launch.config import RecipeConfig
from rl_plugins.run_folder import RunFolder, append_metrics, read_metrics
from rl_plugins.tracking.run import RunDescription, TrackedRun
from rl_plugins.tracking.sender import FINISH_TIMEOUT_S, RunSender
from rl_plugins.tracking.store import check_store
from rl_plugins.tracking.unsent_metrics import UnsentMetrics

logger = logging.getLogger(__name__)

_OPEN_TIMEOUT_S = 60.0
_SYNC_TIMEOUT_S = 600.0
_SHOWN = ("val/reward", "val/accuracy")


class ParentRun:
    """The run, in a store that need not answer once the run is there.

    Args:
        folder: of the pipeline, whose name is that of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = RunFolder(folder)
        config: Any = OmegaConf.load(self._folder.pipeline)
        self.uri = str(config.tracking_uri)
        self.stages = {str(name): RunFolder(folder / str(name)) for name in config.stages}
        description = RunDescription(files=(self._folder.pipeline,))
        self._sender = RunSender(self.uri, config.experiment, self._folder, description)

    def known_id(self) -> str | None:
        """The id of the run, if it is there."""
        id_file = self._folder.tracking_run
        return id_file.read_text().strip() if id_file.is_file() else None

    def adopt(self, config: RecipeConfig) -> None:
        """Make the run of a stage a child of this one, which is created if it is not there.

        Raises:
            DeadlineExceeded: the store has not created it.
        """
        known, there = self.known_id(), threading.Event()
        self._sender.submit(lambda _: there.set())
        if known is None and not there.wait(_OPEN_TIMEOUT_S):
            raise DeadlineExceeded(
                f"MLflow at {self.uri} did not create the run of the pipeline {self._folder.path} within "
                f"{_OPEN_TIMEOUT_S:g} s"
            )
        config.tracking.parent_run = known or self.known_id()

    def log(self, stage: str) -> None:
        """The last validation of a stage that is through."""
        known, series = read_metrics(self._folder.metrics), read_metrics(self.stages[stage].metrics)
        last = {f"{stage}/{name}": list(series[name].values())[-1] for name in _SHOWN if series.get(name)}
        if not last.keys() <= known.keys():
            append_metrics(self._folder.metrics, last, list(self.stages).index(stage) + 1)
        self._sender.send_metrics()

    def finish(self, status: str, deadline_s: float) -> bool:
        """End the run; returns whether the store has all that there is to say of it."""
        self._sender.finish(status, deadline_s)
        return self._sender.all_sent()

    def sync(self, deadline_s: float) -> bool:
        """Send what is missing of the pipeline and of its stages; returns whether the store has everything."""
        check_store(self.uri)
        self._sender.send_metrics()
        through = [name for name, stage in self.stages.items() if stage.exported() is not None]
        for name in through:
            self.log(name)
        sent = self.finish("FINISHED" if len(through) == len(self.stages) else "KILLED", deadline_s)
        return sent and self.sync_stages(deadline_s)

    def sync_stages(self, deadline_s: float) -> bool:
        """Send what the store lacks of stages, if it was away when their runs ended; whether it has all."""
        # Late: it imports Lightning, which most pipelines need not in this process.
        from mlflow.exceptions import MlflowException

        from rl_plugins.launch.sync import sync

        begun = [stage for stage in self.stages.values() if stage.config.is_file()]
        try:
            return all(sync(stage.path, None, deadline_s) for stage in begun if _lacks_something(self.uri, stage))
        except (MlflowException, ConfigError) as error:
            logger.error("%s: rl-plugins sync %s sends what is missing", error, self._folder.path)
            return False


@contextmanager
def parent_run(folder: Path) -> Iterator[ParentRun]:
    """Around the stages of a pipeline: the run begins with the first that is checked, and ends as they do."""
    parent, status = ParentRun(folder), "FAILED"
    try:
        yield parent
        status = "FINISHED"
    except (RunStopped, KeyboardInterrupt):
        status = "KILLED"
        raise
    finally:
        if parent.finish(status, FINISH_TIMEOUT_S) and status == "FINISHED":
            parent.sync_stages(_SYNC_TIMEOUT_S)


def _lacks_something(uri: str, run: RunFolder) -> bool:
    from mlflow import MlflowClient

    if not run.tracking_run.is_file():
        return True
    client = MlflowClient(uri)
    known, unsent = client.get_run(run.tracking_run.read_text().strip()), UnsentMetrics(run.metrics)
    unsent.reset(TrackedRun(client, known.info.run_id, known.info.experiment_id).last_steps())
    return known.info.status != "FINISHED" or unsent.has_points()
