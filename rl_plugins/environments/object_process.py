"""Inside the processes of a stateful environment: one process loads the class, and forks a copy for each object.

The loading process reads an `ObjectTask` as a pickle, and then orders in JSON: start an object, or kill an object. The
process runs no code of the user after loading, has no threads, and reports the end of each copy. A copy has one object,
a connection of its own to the training process, a keeper, and a limit of memory. A copy that dies, hangs or takes too
much memory therefore takes no other object along. Agents (`agent_process.py`) run in the same way.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import pickle
import random
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import send_handle
from typing import Any, ClassVar, NoReturn

from rl_plugins.environments.step_result import Answer, failure_of, read_final, read_start, read_step
from rl_plugins.errors import ConfigError
from rl_plugins.rewards.child_process import described
from rl_plugins.rewards.keeper import go_on_under_keeper
from rl_plugins.rewards.limits import WorkerLimits
from rl_plugins.rewards.loading import check_constructor, find_callable
from rl_plugins.user_code import describe

METHODS = {"reset": "row", "step": "message", "close": ""}
"""Methods of an environment, and the argument of each."""


@dataclass(frozen=True)
class ObjectTask:
    """Class and limits of the objects. The record travels to the process.

    Attributes:
        environment: `_target_`, or `path` and `name`, and the arguments of the constructor.
        limits: environment of the process, and memory of an object.
        deadline_s: seconds for one call of a method.
        kind: name of the user's code for messages.
        unit: name of one started object for messages.
        first: method of the first call.
        closes: True if an object that is left gets a call of `close`; if False, its process is killed.
    """

    environment: Mapping[str, Any]
    limits: WorkerLimits
    deadline_s: float
    kind: ClassVar[str] = "environment"
    unit: ClassVar[str] = "object"
    first: ClassVar[str] = "reset"
    closes: ClassVar[bool] = True

    @property
    def blocked(self) -> str:
        """Fault of an object that is killed after its deadline."""
        return f"an object blocked its process for more than {self.deadline_s:g} s"

    def load(self) -> tuple[str, Any]:
        """Load the code of the user, in the loading process; return its name and the loaded code for `serve`."""
        return load_class(self.environment)

    def serve(self, connection: Connection, name: str, loaded: Any) -> None:
        """Serve one object, in a fork of the loading process."""
        asyncio.run(_Copy(connection, self, name, loaded).serve())


def serve(connection: Connection) -> None:
    """Serve the training process until the end of the connection.

    Args:
        connection: connection to the training process.
    """
    try:
        task: ObjectTask = pickle.loads(connection.recv_bytes())
        task.limits.clean(os.environ)
        name, loaded = task.load()
    except ConfigError as error:
        connection.send_bytes(json.dumps({"error": str(error)}).encode())
        return
    except (AttributeError, ImportError, pickle.UnpicklingError) as error:
        reason = f"the user's code cannot be read in its process ({error}): name the function or class by `_target_`"
        connection.send_bytes(json.dumps({"error": reason}).encode())
        return
    _Loader(connection, task, name, loaded).serve()


def load_class(config: Mapping[str, Any]) -> tuple[str, Callable[[], Any]]:
    """Load the class of an environment; return its name, and a function that makes an object.

    Raises:
        ConfigError: the class cannot be loaded or has no method `reset`, `step` or `close`; a method, also `score`, is
            not async, or takes other arguments; or the constructor does not take the options.
    """
    name, found, options = find_callable(config, "environment")
    if not inspect.isclass(found):
        raise ConfigError(f"environment {name!r} is no class: name a class with async reset, step and close")
    for method, argument in METHODS.items():
        function = getattr(found, method, None)
        written = f"`async def {method}({', '.join(filter(None, ('self', argument)))})`"
        if function is None:
            raise ConfigError(f"environment {name!r} has no method {method}: write {written}")
        if not inspect.iscoroutinefunction(function):
            raise ConfigError(f"environment {name!r}: its {method} is not async: write {written}")
        try:
            inspect.signature(function).bind(*filter(None, ("self", argument)))
        except TypeError as error:
            raise ConfigError(
                f"environment {name!r}: its {method} takes other arguments ({error}): write {written}"
            ) from None
    if inspect.isfunction(score := getattr(found, "score", None)) and not inspect.iscoroutinefunction(score):
        raise ConfigError(f"environment {name!r}: its score is not async: write `async def score(self)`")
    check_constructor(name, found, options, "environment")
    return name, lambda: found(**options)


class _Loader:
    """The process with the loaded class: starts and ends copies.

    Args:
        connection: connection to the training process.
        task: class and limits.
        name: name of the loaded code for messages.
        loaded: loaded code.
    """

    def __init__(self, connection: Connection, task: ObjectTask, name: str, loaded: Any) -> None:
        self._connection, self._task, self._name, self._loaded = connection, task, name, loaded
        # Number of the object, and number of its keeper, by the keeper's file descriptor.
        self._copies: dict[int, tuple[int, int]] = {}

    def serve(self) -> None:
        self._report(ready=True)
        while True:
            for ready in wait([self._connection, *self._copies]):
                if isinstance(ready, int):
                    self._reap(ready)
                    continue
                try:
                    order = json.loads(self._connection.recv_bytes())
                except (EOFError, OSError):
                    for descriptor in list(self._copies):
                        self._kill(self._copies[descriptor][1])
                    return
                if "start" in order:
                    self._start(order["start"])
                for number, pid in list(self._copies.values()):
                    if number == order.get("kill"):
                        self._kill(pid)

    def _start(self, number: int) -> None:
        host_connection, copy_connection = Pipe()
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            self._report(ended=number, reason=f"could not be started: {error}")
            return
        if not pid:
            _run_copy(
                parent, copy_connection, self._task, self._name, self._loaded, close=[self._connection, host_connection]
            )
        self._copies[os.pidfd_open(pid)] = (number, pid)
        self._report(started=number)
        send_handle(self._connection, host_connection.fileno(), os.getppid())
        host_connection.close()
        copy_connection.close()

    def _reap(self, descriptor: int) -> None:
        number, pid = self._copies.pop(descriptor)
        _, status = os.waitpid(pid, 0)
        os.close(descriptor)
        self._report(ended=number, reason=described(os.waitstatus_to_exitcode(status)))

    @staticmethod
    def _kill(pid: int) -> None:
        # The keeper ends the copy and all its processes. An ended keeper is a zombie until `_reap`.
        os.kill(pid, signal.SIGTERM)

    def _report(self, **message: Any) -> None:
        self._connection.send_bytes(json.dumps(message).encode())


def _run_copy(
    parent: int,
    connection: Connection,
    task: ObjectTask,
    name: str,
    loaded: Any,
    *,
    close: list[Connection],
) -> NoReturn:
    """Serve one object in a fork of the loading process, and end the fork."""
    status = 1
    try:
        for other in close:
            other.close()
        if go_on_under_keeper(parent):
            task.limits.limit_memory()
            task.serve(connection, name, loaded)
        status = 0
    except (EOFError, OSError):
        # The training process has gone.
        status = 0
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        # The fork must not go on in the loop of the loading process. Threads of the user end, too.
        os._exit(status)


class _Copy:
    """Process of one object.

    Args:
        connection: connection to the training process.
        task: class and limits.
        name: name of the class for messages.
        make: function that makes the object.
    """

    def __init__(self, connection: Connection, task: ObjectTask, name: str, make: Callable[[], Any]) -> None:
        self._connection, self._deadline_s, self._name, self._make = connection, task.deadline_s, name, make
        self._object: Any = None

    async def serve(self) -> None:
        """Answer calls one after the other, until the call of `close`."""
        while True:
            method, argument = await self._next_call()
            answer = await self._answer(method, argument)
            self._connection.send_bytes(answer.to_json())
            if method == "close":
                return

    async def _next_call(self) -> tuple[str, Any]:
        # Tasks of the object go on while nobody calls.
        loop, readable = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._connection.fileno(), readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(self._connection.fileno())
        call: tuple[str, Any] = pickle.loads(self._connection.recv_bytes())
        return call

    async def _answer(self, method: str, argument: Any) -> Answer:
        methods: Mapping[str, Callable[[Any], Awaitable[Answer]]] = {
            "reset": self._reset,
            "step": self._step,
            "score": self._score,
            "close": self._close,
        }
        try:
            async with asyncio.timeout(self._deadline_s) as deadline:
                return await methods[method](argument)
        except TimeoutError as error:
            if deadline.expired():
                return failure_of("timeout", f"{self._name}: {method} gave no result within {self._deadline_s:g} s")
            return failure_of("raised", f"{self._name}: {describe(error)}")
        except MemoryError:
            return failure_of("memory", f"{self._name}: {method}: an object may take no more memory: raise memory_mb")
        # Code of the user may raise any exception, also a cancellation of its own; the failure is counted.
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            return failure_of("raised", f"{self._name}: {method}: {describe(error)}")

    async def _reset(self, row: Mapping[str, Any]) -> Answer:
        set_seeds(row["seed"])
        self._object = self._make()
        return read_start(await self._object.reset(row), self._name)

    async def _step(self, message: Mapping[str, Any]) -> Answer:
        return read_step(await self._object.step(message), self._name)

    async def _score(self, _: None) -> Answer:
        # An object may keep its points in an attribute of this name, and hide the method of its class.
        own = getattr(self._object, "score", None)
        function = own if inspect.iscoroutinefunction(own) else self._method_of_class("score")
        return Answer() if function is None else read_final(await function(), self._name)

    def _method_of_class(self, name: str) -> Callable[[], Awaitable[object]] | None:
        function = getattr(type(self._object), name, None)
        return partial(function, self._object) if inspect.iscoroutinefunction(function) else None

    async def _close(self, _: None) -> Answer:
        if self._object is not None:
            await self._object.close()
        return Answer()


def set_seeds(seed: int) -> None:
    """Set the seeds of common random generators, which are equal in all forks of a process."""
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)
