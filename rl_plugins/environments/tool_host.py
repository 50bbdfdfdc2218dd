"""The process of the tools, seen from the training process: calls go in, and results come out as they finish.

The process ends calls at their deadline by itself. Otherwise the process is killed after a grace period, and a new
process takes its place. All calls of a lost process run again. The suspects, which may have caused the loss, run one at
a time without other calls, and the next loss shows the culprit. A call may therefore run more than once. Calls of a
lost MCP server are suspects, too.

A tool may have places, which are its largest number of running calls. Further calls wait in the training process: they
can be forgotten, and are no suspects.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any, Literal

from rl_plugins.environments.task_process import GRACE_S, start_with_task
from rl_plugins.environments.tool_functions import ToolSchema, shortened
from rl_plugins.environments.tool_process import ToolTask
from rl_plugins.errors import ConfigError, DeadlineExceeded, RewardError
from rl_plugins.rewards.child_process import START_S
from rl_plugins.rewards.records import Score
from rl_plugins.rewards.turn_times import Work, unix_time

logger = logging.getLogger(__name__)

Outcome = Literal["", "malformed", "unknown", "late", "raised", "died"]
_STUCK = 16
"""Threads of late calls after which a new process takes over."""
_PLACE_S = 600.0
"""Seconds for the wait of a call for a place."""


@dataclass(frozen=True)
class Result:
    """Result of a call.

    Attributes:
        kind: kind of the failure; empty for a success.
        text: result, or description of the failure.
        reward: reward of the turn, or the failure of the reward.
        work: times of the call; None for a call without an end.
    """

    kind: Outcome
    text: str
    reward: Score = field(default_factory=lambda: Score(0.0))
    work: Work | None = field(default=None, compare=False)


@dataclass
class _Call:
    """Call without a result so far.

    Attributes:
        number: number of the call.
        name: name of the tool.
        arguments: arguments by name.
        since: start of the wait for a place.
        due: deadline of a running call.
        is_suspect: True if the call may have caused the loss of a process.
    """

    number: int
    name: str
    arguments: Mapping[str, Any]
    since: float
    due: float = 0.0
    is_suspect: bool = False


class ToolHost:
    """Process with the tools, and the calls in flight.

    Args:
        task: tools and limits.
        grace_s: seconds between the deadline of a call and the end of its process.
        place_s: seconds for the wait of a call for a place.

    Attributes:
        starts: number of processes so far.

    Raises:
        ConfigError: a tool cannot be loaded, two tools have one name, or an MCP server does not start.
    """

    def __init__(self, task: ToolTask, *, grace_s: float = GRACE_S, place_s: float = _PLACE_S) -> None:
        self._task, self._grace_s, self._place_s = task, grace_s, place_s
        self._tools: dict[str, ToolSchema] = {}
        # Calls of the present process by number, waiting calls by tool, and calls to run one at a time.
        self._running: dict[int, _Call] = {}
        self._waiting: defaultdict[str, deque[_Call]] = defaultdict(deque)
        self._suspects: deque[_Call] = deque()
        self._results: dict[int, Result] = {}
        self._numbers, self.starts = 0, 0
        self._start()
        while not self._ready:
            self._listen(1.0)

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        """JSON schema of each tool."""
        return [tool.schema for tool in self._tools.values()]

    @property
    def pid(self) -> int:
        """Number of the keeper of the process."""
        return self._process.pid

    def call(self, name: str, arguments: Mapping[str, Any]) -> int:
        """Start a call, without waiting; return its number."""
        self._numbers += 1
        tool = self._tools[name]
        # A malformed call needs no place. Schemas of MCP servers, which may be slow, stay in the other process.
        if tool.places is not None and (fault := tool.fault(arguments)):
            text = shortened(f"{name}: {fault}", self._task.max_characters, self._task.left_out)
            self._results[self._numbers] = Result("malformed", text)
        else:
            self._waiting[name].append(_Call(self._numbers, name, arguments, time.monotonic()))
            self._send()
        return self._numbers

    def results(self, wait_s: float) -> dict[int, Result]:
        """Return the finished calls by number; wait at most `wait_s` seconds for the first.

        Raises:
            RewardError: a new process cannot load the tools.
        """
        now = time.monotonic()
        if now - self._listened > 1.0:
            # Answers may have waited in the connection while nobody listened, and no call got a place.
            self._listening_since = now
            for call in self._held():
                call.since += now - max(self._listened, call.since)
        self._listen(0.0 if self._results else wait_s)
        self._send()
        self._end_waits()
        results, self._results = self._results, {}
        return results

    def forget(self, numbers: Sequence[int]) -> None:
        """Drop the results of calls. A running call goes on."""
        gone = set(numbers)
        for name, queue in self._waiting.items():
            self._waiting[name] = deque(call for call in queue if call.number not in gone)
        self._suspects = deque(call for call in self._suspects if call.number not in gone)
        for number in gone:
            self._results.pop(number, None)

    def close(self) -> None:
        """End the process and all its processes."""
        self._process.kill()
        self._outbox.close()

    def _start(self) -> None:
        self._process, self._outbox = start_with_task(
            "rl_plugins.environments.tool_process", self._task, self._task.limits, "tool"
        )
        self.starts += 1
        self._ready = False
        self._listened = self._listening_since = self._started = time.monotonic()

    def _send(self) -> None:
        """Run waiting calls with a place; after the loss of a process, suspects run first, each without other calls."""
        if self._ready and not self._running and self._process.has_ended():
            # It ended between two steps, and no call is to blame.
            self._replace(set(), "died", f"the process {self._process.describe_end()}")
        if not self._ready or any(call.is_suspect for call in self._running.values()):
            return
        if self._suspects:
            if not self._running:
                self._run(self._suspects.popleft())
            return
        running = Counter(call.name for call in self._running.values())
        for name, queue in self._waiting.items():
            places = self._tools[name].places
            free = len(queue) if places is None else places - running[name]
            for _ in range(min(free, len(queue))):
                self._run(queue.popleft())

    def _run(self, call: _Call) -> None:
        call.due = time.monotonic() + self._task.deadline_s
        self._running[call.number] = call
        message = {"number": call.number, "name": call.name, "arguments": dict(call.arguments)}
        self._outbox.put(json.dumps(message).encode())

    def _held(self) -> list[_Call]:
        """Return the waiting calls of tools with places."""
        return [call for name, queue in self._waiting.items() if self._tools[name].places is not None for call in queue]

    def _end_waits(self) -> None:
        """End calls which waited too long for a place."""
        now = time.monotonic()
        late = [call for call in self._held() if now - call.since > self._place_s]
        for call in late:
            self._waiting[call.name].remove(call)
            reason = f"the call did not start within {self._place_s:g} s: other calls ran all the time"
            self._results[call.number] = Result("late", f"{call.name}: {reason}")

    def _listen(self, wait_s: float) -> None:
        """Read messages, and replace a process after its end or after a missed deadline."""
        wait([self._process.connection, self._process.ended], min(wait_s, 1.0))
        # A process may have answered before its end.
        has_ended = self._process.has_ended()
        stuck = 0
        try:
            while self._process.connection.poll():
                stuck = self._read(json.loads(self._process.connection.recv_bytes()))
        except (EOFError, OSError):
            has_ended = True
        self._listened = now = time.monotonic()
        if has_ended:
            self._replace(set(self._running), "died", f"the process {self._process.describe_end()}")
        elif not self._ready:
            if now - self._started > START_S + self._task.load_timeout_s * len(self._task.tools):
                self.close()
                raise DeadlineExceeded(
                    f"the process of the tools did not start within {now - self._started:.0f} s: load less at the "
                    "start of a tool"
                )
        elif overdue := {number for number, call in self._running.items() if self._is_overdue(call, now)}:
            self._replace(overdue, "late", f"no result within {self._task.deadline_s:g} s")
        elif stuck >= _STUCK:
            self._replace(set(), "late", f"{stuck} calls hang")

    def _read(self, message: Mapping[str, Any]) -> int:
        """Take a message; return the number of threads of late calls."""
        if "tools" in message:
            self._ready = True
            # Waiting calls may name a tool which a new MCP server no longer has.
            self._tools |= {tool.name: tool for tool in (ToolSchema(*tool) for tool in message["tools"])}
            return 0
        if "error" in message:
            self.close()
            if self.starts == 1:
                raise ConfigError(message["error"])
            raise RewardError(
                f"the process of the tools was replaced, and the new process cannot load the tools: {message['error']}"
            )
        call = self._running.pop(message["number"], None)
        if call is not None and message["kind"] == "died" and not call.is_suspect:
            self._suspect(call)
        elif call is not None:
            # All processes of a machine have the same monotonic clock.
            work = Work(call.name, unix_time(message["start"]), message["seconds"])
            reward = Score(**message["reward"])
            self._results[message["number"]] = Result(message["kind"], message["text"], reward, work)
        return int(message["stuck"])

    def _is_overdue(self, call: _Call, now: float) -> bool:
        # The process has answered late calls before, if it lives.
        return now > max(call.due, self._listening_since) + self._grace_s

    def _replace(self, suspects: set[int], kind: Outcome, reason: str) -> None:
        """Start a new process.

        Args:
            suspects: numbers of running calls under suspicion.
            kind: kind of failure of the culprit, if there is only one suspect.
            reason: description of the loss.
        """
        if not self._ready:
            self.close()
            raise (ConfigError if self.starts == 1 else RewardError)(
                f"{reason} while the tools were loaded: a tool must not end its process"
            )
        logger.warning("Process of the tools with %d calls replaced: %s", len(self._running), reason)
        self.close()
        calls, self._running = self._running, {}
        if len(calls) == 1 and suspects:
            (number,) = calls
            self._results[number] = Result(kind, f"{calls[number].name}: {reason}")
        else:
            for number, call in reversed(calls.items()):
                if number not in suspects:
                    call.since = time.monotonic()
                    self._waiting[call.name].appendleft(call)
            for number in sorted(suspects):
                self._suspect(calls[number])
        self._start()

    def _suspect(self, call: _Call) -> None:
        call.is_suspect = True
        self._suspects.append(call)
