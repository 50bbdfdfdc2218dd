"""Tools of real MCP servers over stdin and stdout, and over HTTP."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import httpx2
import pytest
import uvicorn
from mcp import Client
from mcp.client import streamable_http
from mcp.server.mcpserver import MCPServer
from mcp_types import BlobResourceContents, EmbeddedResource, ResourceLink, TextContent, TextResourceContents

from rl_plugins.environments import mcp_tools
from rl_plugins.environments.mcp_tools import ServerLost, ToolServer
from rl_plugins.environments.task_process import start_with_task
from rl_plugins.environments.tool_host import Result, ToolHost
from rl_plugins.environments.tool_process import ToolTask
from rl_plugins.errors import ConfigError
from rl_plugins.rewards.limits import WorkerLimits
from rl_plugins.tests.environments.mcp_server import multiply
from rl_plugins.tests.environments.test_tool_host import has_ended, results_of
from rl_plugins.tests.loops import for_each
from rl_plugins.tests.patience import kept_by, patient, wait_until

SERVER = str(Path(__file__).with_name("mcp_server.py"))


def task_of(item: dict[str, Any], load_timeout_s: float = 30.0) -> ToolTask:
    return ToolTask([item], WorkerLimits.of((), None), patient(60), 100, load_timeout_s)


def host_of(item: dict[str, Any], load_timeout_s: float = patient(30)) -> ToolHost:
    return ToolHost(task_of(item, load_timeout_s))


@pytest.fixture
def address() -> Iterator[str]:
    """Address of a server over HTTP."""
    # The socket listens from here on, so no other process can take the port, and a client waits for the server.
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port, number = listening.getsockname()[1], listening.fileno()
        command = [sys.executable, SERVER, str(number)]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, pass_fds=[number])
    yield f"http://127.0.0.1:{port}/mcp"
    process.kill()
    process.wait()


def test_program_of_mcp_runs_calls_and_ends_with_the_host() -> None:
    host = host_of({"mcp": [sys.executable, SERVER], "env": {"PLACE": "here"}})
    programs = kept_by(host.pid).children()
    multiplied, refused, found = results_of(
        host,
        ("multiply", {"a": 6, "b": 7}),
        ("multiply", {"a": 2000, "b": 1}),
        ("variable", {"name": "PLACE"}),
    )
    assert multiplied == Result("", "42") and found == Result("", "here")
    assert refused.kind == "raised" and "Error executing tool multiply" in refused.text
    host.close()
    (program,) = programs
    wait_until(lambda: has_ended(program), "the program of MCP has ended")


def test_server_over_http_runs_calls(address: str) -> None:
    with closing(host_of({"mcp": address, "headers": {"Authorization": "Bearer key"}})) as host:
        assert results_of(host, ("multiply", {"a": 6, "b": 7})) == [Result("", "42")]


@pytest.mark.extended
def test_program_of_mcp_that_ends_is_started_again_and_only_the_culprit_fails() -> None:
    with closing(host_of({"mcp": [sys.executable, SERVER]})) as host:
        culprit, multiplied = results_of(host, ("leave", {}), ("multiply", {"a": 6, "b": 7}))
        assert culprit == Result("died", "leave: the MCP server has ended (Connection closed)")
        assert multiplied == Result("", "42")
        # The process of the tools lives on.
        assert host.starts == 1


@asynccontextmanager
async def served_over(listening: socket.socket, *functions: Callable[..., Any]) -> AsyncIterator[None]:
    """Serve functions in this process, and forget all sessions and connections at the end."""
    tools = MCPServer("tests")
    for function in functions:
        tools.tool()(function)
    server = uvicorn.Server(uvicorn.Config(tools.streamable_http_app(), log_config=None))
    running = asyncio.ensure_future(server.serve([listening.dup()]))
    yield
    server.should_exit = server.force_exit = True
    await running


def test_call_over_http_reaches_a_server_that_has_started_again() -> None:
    async def call_two_servers() -> None:
        listening = socket.create_server(("127.0.0.1", 0))
        # A client of older servers has a session.
        address = f"http://127.0.0.1:{listening.getsockname()[1]}/mcp"
        server = ToolServer(lambda: Client(address, mode="legacy"), patient(60))
        with listening:
            async with served_over(listening, multiply):
                assert await server.call("multiply", {"a": 6, "b": 7}) == "42"
            async with served_over(listening, multiply):
                with pytest.raises(ServerLost, match="Session not found"):
                    await server.call("multiply", {"a": 6, "b": 7})
                assert await server.call("multiply", {"a": 2, "b": 3}) == "6"
        for _ in range(2):
            with pytest.raises(ServerLost):
                await server.call("multiply", {"a": 1, "b": 1})

    asyncio.run(call_two_servers())


@for_each("headers", [{}, {"headers": {"Authorization": "Bearer key"}}])
def test_call_over_http_waits_for_the_deadline_of_the_tool(
    monkeypatch: pytest.MonkeyPatch, headers: dict[str, Any]
) -> None:
    clients: list[httpx2.AsyncClient] = []

    def connect(_: str, http_client: httpx2.AsyncClient) -> Any:
        clients.append(http_client)
        raise ConnectionError

    async def open_client() -> None:
        async with mcp_tools._client_maker({"mcp": "http://localhost/mcp", **headers}, {})():
            pass

    monkeypatch.setattr(streamable_http, "streamable_http_client", connect)
    with pytest.raises(ConnectionError):
        asyncio.run(open_client())
    (client,) = clients
    assert client.timeout.read is client.timeout.pool is None and client.is_closed


def test_calls_over_http_have_a_connection_each() -> None:
    async def call_together() -> None:
        barrier = asyncio.Barrier(101)

        async def meet() -> str:
            await barrier.wait()
            return "met"

        with socket.create_server(("127.0.0.1", 0), backlog=128) as listening:
            address = f"http://127.0.0.1:{listening.getsockname()[1]}/mcp"
            server = ToolServer(mcp_tools._client_maker({"mcp": address}, {}), patient(60))
            async with served_over(listening, meet), asyncio.timeout(patient(60)):
                assert await asyncio.gather(*(server.call("meet", {}) for _ in range(101))) == ["met"] * 101

    asyncio.run(call_together())


def test_result_has_texts_of_resources_and_addresses_of_links() -> None:
    def read() -> list[Any]:
        text = TextResourceContents(uri="file:///a", text="content")
        blob = BlobResourceContents(uri="file:///b", blob="AAAA")
        resources = [EmbeddedResource(resource=text), EmbeddedResource(resource=blob)]
        return [TextContent(text="hello"), *resources, ResourceLink(name="c", uri="file:///c")]

    async def call() -> object:
        tools = MCPServer("tests")
        tools.tool()(read)
        return await ToolServer(lambda: Client(tools), patient(60)).call("read", {})

    assert asyncio.run(call()) == "hello\ncontent\n[resource]\nfile:///c"


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["no-such-program"], "No such file or directory"),
        ([sys.executable, "-c", "pass"], "onnection closed"),
        ([sys.executable, "-c", "import time; time.sleep(1e6)"], "it did not answer within"),
        ([], "give the command of an MCP server as a list"),
    ],
)
def test_server_that_does_not_start_is_refused_in_one_line(command: list[str], reason: str) -> None:
    with pytest.raises(ConfigError) as refused:
        host_of({"mcp": command}, load_timeout_s=0.5 if "time.sleep" in " ".join(command) else patient(60))
    assert reason in str(refused.value) and "\n" not in str(refused.value)


def test_process_of_tools_ends_with_the_parent_while_a_late_server_is_closed() -> None:
    task = task_of({"mcp": [sys.executable, "-c", "import time; time.sleep(1e6)"]}, load_timeout_s=0.5)
    process, outbox = start_with_task("rl_plugins.environments.tool_process", task, task.limits, "tool")
    assert process.connection.poll(patient(60)) and b"it did not answer within" in process.connection.recv_bytes()
    (program,) = kept_by(process.pid).children()
    process.connection.close()
    wait_until(process.has_ended, "the process has ended")
    outbox.close()
    wait_until(lambda: has_ended(program), "the program of MCP has ended")
