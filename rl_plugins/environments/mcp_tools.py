"""Tools of MCP servers (Model Context Protocol): programs with a pipe, or HTTP addresses.

{mcp: [python, server.py], env: {KEY: ...}}             a program
{mcp: "http://localhost:8000/mcp", headers: {...}}      a running server
"""

from __future__ import annotations

import asyncio
import math
import shlex
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from rl_plugins.environments.tool_functions import Tool
from rl_plugins.errors import ConfigError

if TYPE_CHECKING:
    from mcp import Client
    from mcp_types import ContentBlock

KEYS = {"mcp", "env", "headers", "cwd"}


class ToolError(Exception):
    """Error from the server of a tool, for the policy."""


class ServerLost(Exception):
    """The server of a tool has ended, or does not start."""


async def connect(item: Mapping[str, Any], passed: Mapping[str, str], wait_s: float) -> list[Tool]:
    """Connect with a server, and return its tools.

    Args:
        item: description of the server.
        passed: variables of the environment for a program, beside PATH, HOME and a few others.
        wait_s: seconds for the start of the server.

    Raises:
        ConfigError: the `mcp` package is missing, the description is wrong, or the server does not answer in time.
    """
    if unknown := sorted(item.keys() - KEYS):
        known = ", ".join(sorted(KEYS))
        raise ConfigError(f"the MCP server {item['mcp']!r} takes no option {unknown[0]!r}: use {known}")
    server = ToolServer(_client_maker(item, passed), wait_s)
    try:
        async with asyncio.timeout(wait_s):
            return await server.tools()
    except TimeoutError:
        reason = f"it did not answer within {wait_s:g} s"
    # A server may send any error in place of its tools.
    except Exception as error:
        reason = _first(error)
    raise ConfigError(
        f"the MCP server {item['mcp']!r} did not start ({reason}): run its command, or open its address, by hand, and "
        "correct it, or raise load_timeout_s"
    )


class ToolServer:
    """Server of tools, with a connection. After the loss of the connection, the next call opens a new one.

    A program starts again with the new connection. A task opens and closes each client, because a client is
    closed by the task of its opening alone.

    Args:
        make_client: function that returns a new client, which opens as a context manager.
        wait_s: seconds for the start of the server.
    """

    def __init__(self, make_client: Callable[[], AbstractAsyncContextManager[Client]], wait_s: float) -> None:
        self._make_client, self._wait_s = make_client, wait_s
        self._opened: asyncio.Future[Client] | None = None
        self._tasks: dict[asyncio.Future[Client], asyncio.Task[None]] = {}

    async def tools(self) -> list[Tool]:
        """Return the tools of the server.

        Raises:
            ServerLost: the server does not start.
        """
        client = await asyncio.shield(self._open())
        described, cursor = [], None
        while True:
            page = await client.list_tools(cursor=cursor)
            described += page.tools
            cursor = page.next_cursor
            if not cursor:
                break
        return [
            Tool(
                {
                    "type": "function",
                    "function": {
                        "name": tool.name,
                        "description": tool.description or "",
                        "parameters": tool.input_schema,
                    },
                },
                None,
                False,
                partial(self.call, tool.name),
            )
            for tool in described
        ]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> object:
        """Return the result of a tool.

        Raises:
            ServerLost: the server has ended, or does not start.
            ToolError: the tool has failed.
        """
        from mcp import MCPError

        opened = self._open()
        # The deadline of one call does not end the start of the server for other calls.
        client = await asyncio.shield(opened)
        try:
            result = await client.call_tool(name, dict(arguments))
        except MCPError as error:
            if opened is self._opened and await _answers(client):
                raise
            # Another call may have left the connection before.
            if opened is self._opened:
                self._opened = None
                self._tasks[opened].cancel()
            raise ServerLost(error.message) from error
        texts = [_text_of(block) for block in result.content]
        if result.is_error:
            raise ToolError("\n".join(texts))
        return "\n".join(texts) if texts or result.structured_content is None else result.structured_content

    def _open(self) -> asyncio.Future[Client]:
        """Return the client of the connection, which may not be open yet."""
        if self._opened is None:
            connection, self._opened = self._make_client(), asyncio.get_running_loop().create_future()
            self._tasks[self._opened] = asyncio.ensure_future(self._hold(connection, self._opened))
        return self._opened

    async def _hold(self, connection: AbstractAsyncContextManager[Client], opened: asyncio.Future[Client]) -> None:
        """Open a client, and keep the client open until the loss of the connection."""
        import anyio

        reason = ""
        try:
            # The deadline of asyncio could interrupt the end of a program a second time, and the end would hang.
            with anyio.fail_after(self._wait_s) as start:
                async with connection as client:
                    start.deadline = math.inf
                    opened.set_result(client)
                    await anyio.sleep_forever()
        except TimeoutError:
            reason = f"it did not answer within {self._wait_s:g} s"
        # Clients wrap errors of programs and connections into groups, each transport into others.
        except Exception as error:
            reason = _first(error)
        finally:
            del self._tasks[opened]
        if opened is self._opened:
            self._opened = None
        if not opened.done():
            opened.set_exception(ServerLost(reason))


def _client_maker(
    item: Mapping[str, Any], passed: Mapping[str, str]
) -> Callable[[], AbstractAsyncContextManager[Client]]:
    """Return a function that makes a client of a server."""
    try:
        from mcp import Client, StdioServerParameters
        from mcp.client.streamable_http import streamable_http_client
    except ImportError:
        raise ConfigError(f"the tool {item['mcp']!r} needs the package mcp: pip install 'rl-plugins[mcp]'") from None
    place = item["mcp"]
    if isinstance(place, str) and place.startswith(("http://", "https://")):
        import httpx2

        # A call has the deadline of its tool. By default, a client ends a call whose server is silent for 300 s, and
        # loses all calls if a call waits for one of 100 connections.
        timeout, limits = httpx2.Timeout(30.0, read=None, pool=None), httpx2.Limits(max_connections=None)
        headers = dict(item.get("headers") or {})

        @asynccontextmanager
        async def over_http() -> AsyncIterator[Client]:
            http = httpx2.AsyncClient(headers=headers, timeout=timeout, limits=limits)
            async with http, Client(streamable_http_client(place, http_client=http)) as client:
                yield client

        return over_http
    command = shlex.split(place) if isinstance(place, str) else [str(part) for part in place or ()]
    if not command:
        raise ConfigError(f"mcp={place!r}: give the command of an MCP server as a list, or its address")
    environment = {**passed, **{name: str(value) for name, value in (item.get("env") or {}).items()}}
    program = StdioServerParameters(command=command[0], args=command[1:], env=environment, cwd=item.get("cwd"))
    return partial(Client, program)


def _text_of(block: ContentBlock) -> str:
    """Return the text of a block, the address of a link, or else the kind of the block."""
    if block.type == "text":
        return block.text
    if block.type == "resource_link":
        return block.uri
    if block.type == "resource" and (text := getattr(block.resource, "text", None)) is not None:
        return str(text)
    return f"[{block.type}]"


async def _answers(client: Client) -> bool:
    """Return False if the server has ended, or over HTTP has started again without the session of the client."""
    from mcp import MCPError

    try:
        await client.list_tools(cache_mode="bypass")
    except MCPError:
        return False
    return True


def _first(error: BaseException) -> str:
    """Return the first error of a group in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return " ".join(str(error).split())[:200] or type(error).__name__
