"""A thread for sending a run to MLflow: callers never wait for the store, and an outage never stops training.

Calls go into a queue, and the thread makes one call after another. Metrics are read from the run's metrics file, which
outlives the process: after an outage or a restart, the thread sends every missing point. Other calls stay in the
queue during an outage, traces and tables up to a bound; `finish` logs the number of unsent calls. If the store refuses
the run (its experiment is deleted, or its id is unknown), the thread waits until the store accepts the run.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

from rl_plugins.errors import CheckpointError, ConfigError, StorageError, UserError
from rl_plugins.redaction import redacted, without_password
from rl_plugins.run_folder import RunFolder
from rl_plugins.tracking.run import RunDescription, TrackedRun, is_running, open_run, record_files
from rl_plugins.tracking.store import import_mlflow
from rl_plugins.tracking.unsent_metrics import UnsentMetrics

logger = logging.getLogger(__name__)

FINISH_TIMEOUT_S = 60.0
_RETRY_S = 5.0
_MOST_TRIES = 3
"""Number of tries in a row before a failed call goes behind the other calls."""
_METRICS_INTERVAL_S = 5.0
_LEFT_RUN_S = 10.0
_NOT_ALLOWED = (401, 403)
_LONGEST_QUEUE = 10_000
"""Number of calls that wait at most. Calls hold texts and tables in memory."""

Call = Callable[[TrackedRun], None]


class RunSender:
    """Sender of one run, with a thread of its own.

    A process opens a store only through its sender: if two threads create one SQLite store at the same time, they
    damage the store.

    Args:
        uri: address of the MLflow store.
        experiment: name of the experiment.
        folder: folder of the run; its name is the name of the MLflow run.
        description: description to record when the run starts.

    Attributes:
        failures: number of failed tries.

    Example:
        The thread starts with the first call::

            sender = RunSender("sqlite:///mlflow.db", "grpo", folder, RunDescription())
            sender.send_metrics()
            sender.submit(lambda run: run.client.set_tag(run.run_id, "team", "math"))
            sender.finish("FINISHED", deadline_s=60)
    """

    def __init__(self, uri: str, experiment: str, folder: RunFolder, description: RunDescription) -> None:
        self._uri, self._experiment, self._folder, self._description = uri, experiment, folder, description
        self._unsent_metrics = UnsentMetrics(folder.metrics)
        self._queue: queue.Queue[Call | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._finishing = threading.Event()
        self._metrics_queued, self._metrics_sent_at = False, -_METRICS_INTERVAL_S
        self._num_unsent_calls = self._num_dropped = 0
        self._logged_reasons: set[str] = set()
        self.failures = 0

    def send_metrics(self) -> None:
        """Queue a call for the new points of the metrics file."""
        if not self._metrics_queued:
            self._metrics_queued = True
            self.submit(self._send_metrics)

    def offer(self, call: Call) -> None:
        """Queue a call with a trace or a table. A full queue drops the call."""
        if self._queue.qsize() < _LONGEST_QUEUE:
            self.submit(call)
            return
        if not self._num_dropped:
            logger.error(
                "%d calls wait for MLflow at %s: further traces and tables are left out until MLflow takes calls",
                _LONGEST_QUEUE, without_password(self._uri),
            )  # fmt: skip
        self._num_dropped += 1

    def submit(self, call: Call) -> None:
        """Queue a call, behind all earlier calls. A failed call is made again."""
        if self._thread is None:
            self._finishing.clear()
            self._thread = threading.Thread(target=self._make_calls, name="mlflow", daemon=True)
            self._thread.start()
            # A store of artifacts may refuse files, and the metrics go on.
            self._queue.put(lambda run: record_files(run, self._description))
        self._queue.put(call)

    def finish(self, status: str, deadline_s: float) -> None:
        """Send the queued calls and end the MLflow run. Do nothing if no call was ever queued.

        Args:
            status: MLflow's name of the status, such as `FINISHED`.
            deadline_s: seconds to wait for the thread.
        """
        if self._thread is None:
            return
        # Points that a roll-back has repeated count as unsent until they are sent once more.
        self.send_metrics()
        self.submit(lambda run: run.client.set_terminated(run.run_id, status))
        self._queue.put(None)
        self._finishing.set()
        self._thread.join(deadline_s)
        # The last entry of the queue is the end mark.
        self._num_unsent_calls, self._num_dropped = self._num_dropped + max(0, self._queue.qsize() - 1), 0
        if self._thread.is_alive() or not self.all_sent():
            logger.error(
                "MLflow at %s did not take the last %d calls; all metrics are in %s: rl-plugins sync %s sends what is "
                "missing",
                without_password(self._uri),
                self._num_unsent_calls,
                self._folder.metrics,
                self._folder.path,
            )
            self._queue, self._metrics_queued = queue.Queue(), False
        self._thread = None

    def all_sent(self) -> bool:
        """Return True if the store has everything, after `finish`."""
        return not self._num_unsent_calls and not self._unsent_metrics.has_points()

    def _send_metrics(self, run: TrackedRun) -> None:
        # One request with the points of several steps costs little more than a request with the points of one step.
        self._finishing.wait(max(0.0, self._metrics_sent_at + _METRICS_INTERVAL_S - time.monotonic()))
        self._metrics_queued, self._metrics_sent_at = False, time.monotonic()
        for points in self._unsent_metrics.batches():
            run.log_points(points)

    def _make_calls(self) -> None:
        import_mlflow()
        calls, left = self._queue, list[Call]()
        run: TrackedRun | None = None
        while (call := calls.get()) is not None:
            tries = 0
            while True:
                done, run = self._try(call, run)
                if done:
                    break
                takes_run = run is not None
                # The store may have recorded a part of the call. `open_run` reads the state of the store again.
                run = None
                # The store takes the run, and perhaps other calls: a server may have no store of artifacts.
                tries += takes_run
                if self._finishing.is_set():
                    left.append(call)
                    if takes_run:
                        break
                    _put_all(calls, left)
                    return
                if tries == _MOST_TRIES:
                    calls.put(call)
                    break
                self._finishing.wait(_RETRY_S)
        if left:
            _put_all(calls, [*left, None])

    def _try(self, call: Call, run: TrackedRun | None) -> tuple[bool, TrackedRun | None]:
        """Make a call once.

        Args:
            call: call to make.
            run: open run, or None to open the run first.

        Returns:
            False if the call must be made again, and the run; None if the store does not take the run.
        """
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        outages = (MlflowException, SQLAlchemyError, OSError, NotImplementedError, UserError)
        try:
            if run is None:
                opened = open_run(self._uri, self._experiment, self._folder, self._description)
                self._unsent_metrics.reset(opened.last_steps())
                run = opened
            call(run)
            return True, run
        except Exception as error:
            # Flavours of MLflow run code of other libraries on the policy.
            is_foreign = not isinstance(error, outages)
            if run is not None and (is_foreign or _is_refused(error)):
                self._num_dropped += is_foreign
                self._log("MLflow at %s: something could not be recorded: %s", error)
                return True, run
            self.failures += 1
            self._log_reason(error)
            return False, run

    def _log_reason(self, error: Exception) -> None:
        """Log why the sender waits, once for each reason."""
        refused = "does not take the run, metrics wait until it does"
        reason = refused if _is_refused(error) else "is away, metrics wait for it"
        if _status_of(error) in _NOT_ALLOWED:
            reason = (
                "refuses this user, metrics wait (set MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD)"
            )
        if isinstance(error, StorageError):
            reason = "gets metrics when the run's folder can be written"
        if reason not in self._logged_reasons:
            self._logged_reasons.add(reason)
            self._log(f"MLflow at %s {reason}: %s", error)

    def _log(self, line: str, error: Exception) -> None:
        """Log an error without secrets. MLflow's errors have the whole address."""
        logger.error(line, without_password(self._uri), redacted(str(error)))


def end_left_run(uri: str, experiment: str, folder: RunFolder, status: str) -> None:
    """Send the last metrics of killed workers, and end their MLflow run, which would stay RUNNING.

    Do nothing if the run has ended, or if the store does not answer.

    Args:
        uri: address of the MLflow store.
        experiment: name of the experiment.
        folder: folder of the run.
        status: MLflow's name of the status, such as `KILLED`.
    """
    if folder.tracking_run.is_file() and is_running(uri, folder):
        sender = RunSender(uri, experiment, folder, RunDescription())
        sender.send_metrics()
        sender.finish(status, _LEFT_RUN_S)


def _put_all(calls: queue.Queue[Call | None], entries: Sequence[Call | None]) -> None:
    for entry in entries:
        calls.put(entry)


def _is_refused(error: Exception) -> bool:
    """Return True if a second try would fail as well: the store refuses the call, or a local file is bad or missing."""
    if isinstance(error, FileNotFoundError | PermissionError | NotImplementedError | ConfigError | CheckpointError):
        return True
    # The rights of a user may change during a run.
    return 400 <= _status_of(error) < 500 and _status_of(error) not in (*_NOT_ALLOWED, 408, 429)


def _status_of(error: Exception) -> int:
    """Return the HTTP status of an error; 500 for an error of another kind."""
    from mlflow.exceptions import MlflowException
    from requests import HTTPError

    if isinstance(error, MlflowException):
        return int(error.get_http_status_code())
    # Artifact stores raise errors of requests.
    if isinstance(error, HTTPError) and error.response is not None:
        return error.response.status_code
    return 500
