"""Inside the process of the tools: load the tools, run all calls at once, and answer each call as soon as it ends.

The process reads a `ToolTask` as a pickle, answers with the schemas or an error, and then reads calls in JSON until the
end of the connection. A call of a coroutine function runs in the event loop, and any other call in a thread. The parent
process holds back calls without a place.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from rl_plugins.environments.mcp_tools import ServerLost, ToolError, connect
from rl_plugins.environments.outbox import Outbox
from rl_plugins.environments.tool_functions import Threads, Tool, ToolResult, shortened, text_of, tool_of
from rl_plugins.errors import ConfigError
from rl_plugins.rewards.limits import WorkerLimits
from rl_plugins.rewards.loading import load_callable
from rl_plugins.rewards.records import Score, read_score

_NO_REWARD = Score(0.0)
_CLOSE_S = 10.0
"""Seconds for the end of the programs of MCP servers."""


@dataclass(frozen=True)
class ToolTask:
    """Tools and limits of the process. The record travels to the process.

    Attributes:
        tools: functions, dotted names, or mappings: `_target_`, or `path` and `name`, or `mcp`.
        limits: environment and memory of the process.
        deadline_s: seconds for one call.
        max_characters: largest number of characters of a result.
        load_timeout_s: seconds for the start of an MCP server.
        left_out: part left out of a longer result: `beginning`, `middle` or `end`.
    """

    tools: Sequence[Any]
    limits: WorkerLimits
    deadline_s: float
    max_characters: int
    load_timeout_s: float
    left_out: str = "middle"


def serve(connection: Connection) -> None:
    """Serve the parent process until the end of the connection.

    Args:
        connection: connection to the parent process.
    """
    asyncio.run(_Server(connection).serve())


class _Server:
    def __init__(self, connection: Connection) -> None:
        self._connection, self._outbox, self._threads = connection, Outbox(connection), Threads()
        self._tools: dict[str, Tool] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()

    async def serve(self) -> None:
        try:
            await self._load_all()
            self._answer(tools=[(tool.schema, tool.places, tool.is_closed) for tool in self._tools.values()])
        except ConfigError as error:
            self._answer(error=str(error))
        except (AttributeError, ImportError, pickle.UnpicklingError) as error:
            self._answer(error=f"a tool cannot be read in its process ({error}): name the tool by `_target_`")
        asyncio.get_running_loop().add_reader(self._connection.fileno(), self._read)
        await self._ended.wait()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            # After a second cancellation, the client of a program never ends.
            if not task.cancelling():
                task.cancel()
        if others:
            await asyncio.wait(others, timeout=_CLOSE_S)
        # Threads of late calls would keep the process alive.
        os._exit(0)

    async def _load_all(self) -> None:
        self._task: ToolTask = pickle.loads(self._connection.recv_bytes())
        self._task.limits.clean(os.environ)
        for item in self._task.tools:
            for tool in await self._load(item):
                if tool.name in self._tools:
                    raise ConfigError(f"there are two tools of the name {tool.name!r}: rename one, or leave it out")
                self._tools[tool.name] = tool
        self._task.limits.limit_memory(self._threads.stack_bytes)

    async def _load(self, item: Any) -> list[Tool]:
        if isinstance(item, Mapping) and "mcp" in item:
            return await connect(item, self._task.limits.values, self._task.load_timeout_s)
        config = item if isinstance(item, Mapping) else {"_target_": item}
        name, function, fixed = load_callable(config, "tool")
        return [tool_of(name, function, fixed, self._threads)]

    def _read(self) -> None:
        try:
            while self._connection.poll():
                call = json.loads(self._connection.recv_bytes())
                running = asyncio.ensure_future(self._call(**call))
                self._running.add(running)
                running.add_done_callback(self._running.discard)
        except (EOFError, OSError):
            self._ended.set()

    async def _call(self, number: int, name: str, arguments: Mapping[str, Any]) -> None:
        start = time.monotonic()
        if (tool := self._tools.get(name)) is None:
            # An MCP server of a new process may have fewer tools.
            kind, text, reward = "died", f"{name}: the MCP server no longer has this tool", _NO_REWARD
        else:
            kind, text, reward = await self._outcome(tool, arguments)
        text = shortened(text, self._task.max_characters, self._task.left_out)
        times = {"start": start, "seconds": time.monotonic() - start}
        self._answer(number=number, kind=kind, text=text, reward=vars(reward), stuck=self._threads.stuck, **times)

    async def _outcome(self, tool: Tool, arguments: Mapping[str, Any]) -> tuple[str, str, Score]:
        """Return the kind of the failure, or an empty text; the text for the policy; and the reward of the turn."""
        try:
            if fault := tool.fault(arguments):
                return "malformed", f"{tool.name}: {fault}", _NO_REWARD
            async with asyncio.timeout(self._task.deadline_s) as deadline:
                result = await tool.call(arguments)
            if isinstance(result, ToolResult):
                reward = read_score({"score": result.reward}, f"{tool.name}: reward")
                return "", text_of(result.content), reward
            if isinstance(result, tuple) and len(result) == 3 and isinstance(result[2], Mapping):
                raise TypeError("a tool for verl returns (response, reward, metrics): return rl.ToolResult here")
            return "", text_of(result), _NO_REWARD
        except TimeoutError as error:
            if deadline.expired():
                return "late", f"{tool.name}: no result within {self._task.deadline_s:g} s", _NO_REWARD
            return "raised", _described(error), _NO_REWARD
        except ServerLost as error:
            return "died", f"{tool.name}: the MCP server has ended ({error})", _NO_REWARD
        # Code of the user may raise any exception, also a cancellation of its own; the policy reads the error.
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and self._ended.is_set():
                raise
            return "raised", _described(error), _NO_REWARD

    def _answer(self, **message: Any) -> None:
        self._outbox.put(json.dumps(message).encode())


def _described(error: BaseException) -> str:
    """Return an error for the policy, without places in files."""
    if isinstance(error, ToolError):
        return str(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
