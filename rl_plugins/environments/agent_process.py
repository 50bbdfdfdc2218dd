"""Inside the process of one agent: the user's function is called once, and its result is the reward of a trajectory.

The process is a fork of a process that has loaded the function (`object_process.py`). The function may be plain or
async. It runs in the main thread, so it may start event loops, threads and programs of its own.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, ClassVar, TypedDict
from urllib.parse import urlsplit

from rl_plugins.environments.object_process import ObjectTask, set_seeds
from rl_plugins.environments.step_result import Answer, failure_of, read_final
from rl_plugins.errors import ConfigError
from rl_plugins.rewards.loading import load_callable
from rl_plugins.user_code import describe

_WRITTEN = "`async def solve(row, base_url, api_key)`"


class AgentArguments(TypedDict):
    """Arguments of an agent.

    Attributes:
        row: row of the data, with `seed`.
        base_url: address of the policy.
        api_key: key of the trajectory.
    """

    row: Mapping[str, Any]
    base_url: str
    api_key: str


@dataclass(frozen=True)
class AgentTask(ObjectTask):
    """Function and limits of agents. The record travels to the process.

    `environment` has further arguments of the function, and `deadline_s` are the seconds of an agent, without the time
    in which the policy answers.
    """

    kind: ClassVar[str] = "agent"
    unit: ClassVar[str] = "agent"
    first: ClassVar[str] = "run"
    closes: ClassVar[bool] = False

    @property
    def blocked(self) -> str:
        """Fault of an agent that is killed after its deadline."""
        return f"the agent gave no reward within {self.deadline_s:g} s of its own time"

    def load(self) -> tuple[str, Any]:
        """Load the function of the agent."""
        return load_agent(self.environment)

    def serve(self, connection: Connection, name: str, loaded: Any) -> None:
        """Run one agent, and send its reward."""
        _, asked = pickle.loads(connection.recv_bytes())
        connection.send_bytes(_run(name, loaded, asked).to_json())


def load_agent(config: Mapping[str, Any]) -> tuple[str, Callable[..., Any]]:
    """Load the function of an agent, or make the object of a class with a method `__call__`.

    Returns:
        The name, and the function with its further arguments. The arguments of a class are those of its constructor.

    Raises:
        ConfigError: the function cannot be loaded, or does not take the arguments.
    """
    name, function, options = load_callable(config, "agent")
    try:
        inspect.signature(function).bind("row", "base_url", "api_key", **options)
    except TypeError as error:
        raise ConfigError(f"agent {name!r} takes other arguments ({error}): write {_WRITTEN}") from None
    return name, lambda row, base_url, api_key: function(row, base_url, api_key, **options)


def _run(name: str, function: Callable[..., Any], asked: AgentArguments) -> Answer:
    """Call the function once; return the reward or the failure."""
    row, base_url, api_key = asked["row"], asked["base_url"], asked["api_key"]
    set_seeds(row["seed"])
    _set_variables(base_url, api_key)
    try:
        value = function(row, base_url, api_key)
        if inspect.isawaitable(value):
            value = asyncio.run(_awaited(value))
    except MemoryError:
        return failure_of("memory", f"{name}: an agent may take no more memory: raise memory_mb")
    # Code of the user may raise any exception, also a cancellation of its own; the failure is counted.
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        return failure_of("raised", f"{name}: {describe(error)}")
    if value is None:
        return failure_of("raised", f"{name}: the agent returned no reward: return a number, or a mapping with 'score'")
    return read_final(value, name)


async def _awaited(value: Awaitable[object]) -> object:
    return await value


def _set_variables(base_url: str, api_key: str) -> None:
    """Set the variables of OpenAI's clients, also for programs of the agent; no proxy is on the way to the endpoint."""
    os.environ |= {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}
    host = str(urlsplit(base_url).hostname)
    for variable in ("NO_PROXY", "no_proxy"):
        os.environ[variable] = ",".join(filter(None, (os.environ.get(variable), host)))
