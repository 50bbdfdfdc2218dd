"""The objects of a stateful environment, seen from the training process: calls go in, and answers come out.

Each object has a process of its own, a fork of a process that has loaded the class. The process of an object ends
calls at their deadline by itself. Otherwise the process is killed after a grace period. The failure of an object is the
answer to its call, and no other object notices the failure.
"""

from __future__ import annotations

import json
import logging
import pickle
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle
from typing import Any

from rl_plugins.environments.object_process import ObjectTask
from rl_plugins.environments.outbox import Outbox
from rl_plugins.environments.step_result import Answer, failure_of
from rl_plugins.environments.task_process import GRACE_S, start_with_task
from rl_plugins.errors import ConfigError, DeadlineExceeded, RewardError
from rl_plugins.rewards.child_process import START_S

logger = logging.getLogger(__name__)

_CLOSE_S = 5.0
"""Longest wait for the objects at the end of a run, in seconds."""


@dataclass
class _Object:
    """A started object.

    Attributes:
        key: key of the object for the caller; None if the caller has left the object.
        unsent: calls that wait for the connection to the object's process.
        connection: connection to the process; None before its start, and after the end of the connection.
        outbox: sender of calls.
        called: time of the last call.
        num_calls: number of calls in progress.
        paused: time since which the deadline of the call does not run; None while the deadline runs.
        is_killed: True after the order to kill the process.
    """

    key: int | None
    unsent: list[bytes] = field(default_factory=list)
    connection: Connection | None = None
    outbox: Outbox | None = None
    called: float = 0.0
    num_calls: int = 0
    paused: float | None = None
    is_killed: bool = False


class ObjectHost:
    """Processes with the objects of a stateful environment, and the calls in progress.

    Args:
        task: class and limits.
        max_objects: largest number of objects at once. Further objects wait until others have closed.
        load_timeout_s: seconds for loading the class.
        grace_s: seconds between the deadline of a call and the end of its process.

    Attributes:
        most: largest number of objects at once so far.
        starts: number of loading processes so far.

    Raises:
        ConfigError: the class cannot be loaded, or is no stateful environment.
    """

    def __init__(
        self, task: ObjectTask, max_objects: int, load_timeout_s: float = 30.0, *, grace_s: float = GRACE_S
    ) -> None:
        self._task, self._max_objects, self._grace_s = task, max_objects, grace_s
        self._load_timeout_s = load_timeout_s
        # Objects by a number that no other object ever gets, and the numbers by key.
        self._objects: dict[int, _Object] = {}
        self._numbers: dict[int, int] = {}
        # Key and row of each object that waits for a place.
        self._waiting: deque[tuple[int, Mapping[str, Any]]] = deque()
        self._answers: dict[int, Answer] = {}
        self._count = self.starts = self.most = 0
        self._start_process()
        while not self._ready:
            self._listen(1.0)

    @property
    def pid(self) -> int:
        """Number of the keeper of the process that has loaded the class."""
        return self._process.pid

    def open(self, key: int, row: Mapping[str, Any]) -> None:
        """Start an object and its first call (`reset`), without waiting.

        Args:
            key: key of the object, unique among the objects in use.
            row: row of the data, with `seed`; argument of the first call.
        """
        if self._ready and not self._objects and self._process.has_ended():
            # It ended between two steps, and no object is to blame.
            self._replace_process()
        self._waiting.append((key, row))
        self._start_waiting()

    def call(self, key: int, method: str, argument: object = None) -> None:
        """Start a call of an object, without waiting: `step` with a message, or `score`."""
        if key in self._numbers:
            self._call(self._objects[self._numbers[key]], method, argument)
        else:
            self._answers[key] = failure_of("died", "the process of the object ended between two calls")

    def pause(self, key: int, since: float) -> None:
        """Stop the deadline of a call in progress, from a time of `time.monotonic` until `go_on`."""
        if key in self._numbers:
            self._objects[self._numbers[key]].paused = since

    def go_on(self, key: int) -> None:
        """Let the deadline of a paused call run again."""
        if key in self._numbers and (one := self._objects[self._numbers[key]]).paused is not None:
            one.called += time.monotonic() - one.paused
            one.paused = None

    def answers(self, wait_s: float, wake: Sequence[int] = ()) -> dict[int, Answer]:
        """Return the answers to finished calls by key; wait at most `wait_s` seconds for the first.

        Args:
            wait_s: longest wait.
            wake: file descriptors that end the wait when they are readable.

        Raises:
            RewardError: the class cannot be loaded again after the end of its process.
        """
        now = time.monotonic()
        if now - self._listened > 1.0:
            # Answers may have waited in the connections while nobody listened.
            self._listening_since = now
        self._listen(0.0 if self._answers else wait_s, wake)
        answers, self._answers = self._answers, {}
        return answers

    def leave(self, keys: Sequence[int]) -> None:
        """Drop the answers of objects, and close the objects, without waiting."""
        gone = set(keys)
        self._waiting = deque(entry for entry in self._waiting if entry[0] not in gone)
        for key in gone:
            self._answers.pop(key, None)
            if (number := self._numbers.pop(key, None)) is not None:
                one = self._objects[number]
                one.key = None
                if self._task.closes:
                    self._call(one, "close")
                else:
                    one.is_killed = True
                    self._order(kill=number)

    def close(self) -> None:
        """Close all objects, and end all processes."""
        self.leave([*self._numbers, *(key for key, _ in self._waiting)])
        end = time.monotonic() + min(self._task.deadline_s, _CLOSE_S)
        while self._objects and self._ready and time.monotonic() < end:
            self._listen(0.1)
        self._end_process()

    # Processes --------------------------------------------------------------------------------------------------

    def _start_process(self) -> None:
        self._process, self._outbox = start_with_task(
            "rl_plugins.environments.object_process", self._task, self._task.limits, self._task.kind
        )
        self.starts += 1
        self._ready = False
        self._listened = self._listening_since = self._started = time.monotonic()

    def _end_process(self) -> None:
        self._process.kill()
        self._outbox.close()
        for one in self._objects.values():
            _disconnect(one)
        self._objects.clear()
        self._numbers.clear()

    def _start_waiting(self) -> None:
        while self._ready and self._waiting and len(self._objects) < self._max_objects:
            key, row = self._waiting.popleft()
            self._count += 1
            one = self._objects[self._count] = _Object(key)
            self._numbers[key] = self._count
            self.most = max(self.most, len(self._objects))
            self._order(start=self._count)
            self._call(one, self._task.first, dict(row))

    def _call(self, one: _Object, method: str, argument: object = None) -> None:
        one.called = time.monotonic()
        one.num_calls += 1
        content = pickle.dumps((method, argument))
        if one.outbox is None:
            one.unsent.append(content)
        else:
            one.outbox.put(content)

    def _order(self, **message: Any) -> None:
        self._outbox.put(json.dumps(message).encode())

    # Messages ---------------------------------------------------------------------------------------------------

    def _listen(self, wait_s: float, wake: Sequence[int] = ()) -> None:
        """Read messages, and end objects after a missed deadline."""
        connections = {one.connection: one for one in self._objects.values() if one.connection is not None}
        ready = wait([self._process.connection, self._process.ended, *connections, *wake], min(wait_s, 1.0))
        has_ended = self._process.has_ended()
        for connection, one in connections.items():
            if connection in ready:
                self._read_answers(one)
        try:
            while self._process.connection.poll():
                self._read_report(json.loads(self._process.connection.recv_bytes()))
        except (EOFError, OSError):
            has_ended = True
        self._listened = now = time.monotonic()
        if has_ended:
            self._replace_process()
        elif self._ready:
            for number, one in self._objects.items():
                if not one.is_killed and self._is_overdue(one, now):
                    self._kill(number, one)
            self._start_waiting()
        elif now - self._started > START_S + self._load_timeout_s:
            self._end_process()
            raise DeadlineExceeded(
                f"the {self._task.kind} was not loaded within {now - self._started:.0f} s: load less in its module"
            )

    def _read_answers(self, one: _Object) -> None:
        assert one.connection is not None
        try:
            while one.connection.poll():
                self._take(one, Answer.from_json(one.connection.recv_bytes()))
        except (EOFError, OSError):
            # The loading process reports the end with its reason.
            _disconnect(one)

    def _take(self, one: _Object, answer: Answer) -> None:
        one.num_calls -= 1
        if one.key is not None:
            self._answers[one.key] = _with_seconds(answer, one)
        elif answer.failure is not None and not one.num_calls:
            logger.warning("An environment was not closed: %s", answer.fault)

    def _read_report(self, report: Mapping[str, Any]) -> None:
        if "error" in report:
            self._end_process()
            raise (ConfigError if self.starts == 1 else RewardError)(report["error"])
        if "ready" in report:
            self._ready = True
        elif "started" in report:
            one = self._objects[report["started"]]
            one.connection = Connection(recv_handle(self._process.connection))
            one.outbox = Outbox(one.connection)
            for content in one.unsent:
                one.outbox.put(content)
            one.unsent.clear()
        else:
            self._lose(self._objects.pop(report["ended"]), f"the process of the {self._task.unit} {report['reason']}")

    def _lose(self, one: _Object, reason: str) -> None:
        """Answer for an object whose process has ended."""
        if one.connection is not None:
            # The process may have answered before its end.
            self._read_answers(one)
        _disconnect(one)
        if one.key is not None:
            del self._numbers[one.key]
            if one.num_calls:
                self._answers[one.key] = _with_seconds(failure_of("died", reason), one)

    def _is_overdue(self, one: _Object, now: float) -> bool:
        # The process has answered late calls before, if it lives.
        due = max(one.called + one.num_calls * self._task.deadline_s, self._listening_since)
        return one.num_calls > 0 and one.paused is None and now > due + self._grace_s

    def _kill(self, number: int, one: _Object) -> None:
        one.is_killed = True
        self._order(kill=number)
        fault = self._task.blocked
        if one.key is None:
            logger.warning("An environment was not closed: %s", fault)
        else:
            del self._numbers[one.key]
            self._answers[one.key] = _with_seconds(failure_of("timeout", fault), one)
            one.key = None

    def _replace_process(self) -> None:
        reason = f"the process of the {self._task.kind} {self._process.describe_end()}"
        if not self._ready:
            self._end_process()
            raise (ConfigError if self.starts == 1 else RewardError)(
                f"{reason} while the {self._task.kind} was loaded: its module must not end its process"
            )
        logger.warning(
            "Process of the %s with %d %ss replaced: %s",
            self._task.kind,
            len(self._objects),
            self._task.unit,
            reason,
        )
        for one in self._objects.values():
            self._lose(one, reason)
        self._end_process()
        self._start_process()


def _with_seconds(answer: Answer, one: _Object) -> Answer:
    """Return an answer with the time of its call, also if nobody has read the answer for a while."""
    ended = time.monotonic() if answer.ended is None else answer.ended
    return replace(answer, seconds=max(0.0, (ended if one.paused is None else one.paused) - one.called))


def _disconnect(one: _Object) -> None:
    """Close the connection to a process that has ended."""
    if one.outbox is not None and one.connection is not None:
        one.outbox.close()
        one.connection.close()
    one.connection = one.outbox = None
