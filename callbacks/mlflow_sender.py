"""What sends a run to MLflow from behind: it never makes anyone wait, and no outage makes it stop.

Calls go to a queue, which one thread works off. Metrics are read from the run's metrics file, so they outlive this
process: whatever the store lacks, after an outage or a restart, is sent when it answers again. Other calls wait in the
queue; what could not be sent when the run ends is counted and said. A store that does not take the run at all, because
its experiment is deleted or its id unknown, is waited for in the same way, until somebody mends that.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from rl_plugins.callbacks.metrics_tail import MetricsTail
from rl_plugins.callbacks.mlflow_import import import_mlflow
from rl_plugins.callbacks.mlflow_run import Facts, TrackedRun, open_run
from rl_plugins.errors import ConfigError
from rl_plugins.run_folder import RunFolder

logger = logging.getLogger(__name__)

FINISH_TIMEOUT_S = 60.0
_RETRY_S = 5.0
_METRICS_EVERY_S = 5.0

Call = Callable[[TrackedRun], None]


class RunSender:
    """The only one in its process that opens the store: two that create one SQLite store at once would break it.

    Args:
        uri: of the tracking store.
        experiment: name of the experiment.
        folder: of the run, whose name is that of the MLflow run.
        facts: what is said of the run when it begins.

    Attributes:
        failures: how many calls the store has failed so far.
    """

    def __init__(self, uri: str, experiment: str, folder: RunFolder, facts: Facts) -> None:
        self._uri, self._experiment, self._folder, self._facts = uri, experiment, folder, facts
        self._tail = MetricsTail(folder.metrics)
        self._queue: queue.Queue[Call | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()
        self._metrics_due, self._metrics_sent = False, -_METRICS_EVERY_S
        self._unsent = 0
        self._said: set[str] = set()
        self.failures = 0

    def send_metrics(self) -> None:
        """Have it look for new points in the metrics file."""
        if not self._metrics_due:
            self._metrics_due = True
            self.submit(self._send_metrics)

    def submit(self, call: Call) -> None:
        """Have it make a call, after all earlier ones; it may be made again after a failure."""
        if self._thread is None:
            self._ending.clear()
            self._thread = threading.Thread(target=self._send, name="mlflow", daemon=True)
            self._thread.start()
        self._queue.put(call)

    def finish(self, status: str, deadline_s: float) -> None:
        """Send what is queued, within a deadline, and end the MLflow run with this status; no call was no run."""
        if self._thread is None:
            return
        # Of steps that a roll-back has repeated, it is not known what the store has until they are sent.
        self.send_metrics()
        self.submit(lambda run: run.client.set_terminated(run.run_id, status))
        self._queue.put(None)
        self._ending.set()
        self._thread.join(deadline_s)
        # The mark of the end is no call.
        self._unsent = max(0, self._queue.qsize() - 1)
        if self._thread.is_alive() or self._unsent or self._tail.unsent():
            logger.error(
                "MLflow at %s did not take the last %d calls; all metrics are in %s: rl-plugins sync %s sends what is "
                "missing",
                self._uri,
                self._unsent,
                self._folder.metrics,
                self._folder.path,
            )
            self._queue, self._metrics_due = queue.Queue(), False
        self._thread = None

    def all_sent(self) -> bool:
        """Whether the store has everything, after `finish`."""
        return not self._unsent and not self._tail.unsent()

    def _send_metrics(self, run: TrackedRun) -> None:
        # The points of several steps cost the store, and this machine, little more than those of one.
        self._ending.wait(max(0.0, self._metrics_sent + _METRICS_EVERY_S - time.monotonic()))
        self._metrics_due, self._metrics_sent = False, time.monotonic()
        for points in self._tail.batches():
            run.log_points(points)

    def _send(self) -> None:
        import_mlflow()
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        run: TrackedRun | None = None
        calls = self._queue
        while (call := calls.get()) is not None:
            while True:
                try:
                    if run is None:
                        run = open_run(self._uri, self._experiment, self._folder, self._facts)
                        self._tail.start_over(run.last_steps())
                    call(run)
                    break
                except (MlflowException, SQLAlchemyError, OSError, NotImplementedError, ConfigError) as error:
                    if run is not None and _is_refused(error):
                        logger.error("MLflow at %s: something could not be recorded: %s", self._uri, error)
                        break
                    # What it has taken of the call is asked when it is back.
                    run = None
                    self.failures += 1
                    self._say_why_it_waits(error)
                    if self._ending.is_set():
                        calls.put(call)
                        return
                    self._ending.wait(_RETRY_S)

    def _say_why_it_waits(self, error: Exception) -> None:
        """Once for each reason."""
        refused = "does not take the run, metrics wait until it does"
        reason = refused if _is_refused(error) else "is away, metrics wait for it"
        if reason not in self._said:
            self._said.add(reason)
            logger.error("MLflow at %s %s: %s", self._uri, reason, error)


def _is_refused(error: Exception) -> bool:
    """Whether a call would fail again: the store has understood it and says no, or a file is gone."""
    from mlflow.exceptions import MlflowException
    from requests import HTTPError

    if isinstance(error, FileNotFoundError | NotImplementedError | ConfigError):
        return True
    status = 500
    if isinstance(error, MlflowException):
        status = error.get_http_status_code()
    elif isinstance(error, HTTPError) and error.response is not None:
        # What stores of artifacts answer.
        status = error.response.status_code
    return 400 <= status < 500 and status not in (401, 403, 408, 429)
