"""Tools of MCP servers (Model Context Protocol): programs with a pipe, or HTTP addresses.

{mcp: [python, server.py], env: {KEY: ...}}             a program
{mcp: "http://localhost:8000/mcp", headers: {...}}      a running server
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from rl_plugins.environments.tool_functions import Tool
from rl_plugins.errors import ConfigError

if TYPE_CHECKING:
    from mcp import Client

KEYS = {"mcp", "env", "headers", "cwd"}


class ToolError(Exception):
    """Error from the server of a tool, for the policy."""


async def connect(
    item: Mapping[str, Any], passed: Mapping[str, str], stack: AsyncExitStack, wait_s: float
) -> list[Tool]:
    """Connect with a server, and return its tools.

    Args:
        item: description of the server.
        passed: variables of the environment for a program, beside PATH, HOME and a few others.
        stack: closes the connection.
        wait_s: seconds for the start of the server.

    Raises:
        ConfigError: the `mcp` package is missing, the description is wrong, or the server does not answer in time.
    """
    if unknown := sorted(item.keys() - KEYS):
        known = ", ".join(sorted(KEYS))
        raise ConfigError(f"the MCP server {item['mcp']!r} takes no option {unknown[0]!r}: use {known}")
    client = _client(item, passed)
    try:
        async with asyncio.timeout(wait_s):
            await stack.enter_async_context(client)
            return await _tools(client)
    except TimeoutError:
        reason = f"it did not answer within {wait_s:g} s"
    # Clients wrap errors of programs and connections into groups, each transport into others.
    except Exception as error:
        reason = _first(error)
    raise ConfigError(
        f"the MCP server {item['mcp']!r} did not start ({reason}): run its command, or open its address, by hand, and "
        "correct it, or raise load_timeout_s"
    )


def _client(item: Mapping[str, Any], passed: Mapping[str, str]) -> Client:
    try:
        from mcp import Client, StdioServerParameters
        from mcp.client.streamable_http import streamable_http_client
    except ImportError:
        raise ConfigError(f"the tool {item['mcp']!r} needs the package mcp: pip install 'rl-plugins[mcp]'") from None
    place = item["mcp"]
    if isinstance(place, str) and place.startswith(("http://", "https://")):
        import httpx2

        # A call has the deadline of its tool. By default, a client ends a call whose server is silent for 300 s.
        timeout = httpx2.Timeout(30.0, read=None)
        client = httpx2.AsyncClient(headers=dict(item.get("headers") or {}), timeout=timeout)
        return Client(streamable_http_client(place, http_client=client))
    command = shlex.split(place) if isinstance(place, str) else [str(part) for part in place or ()]
    if not command:
        raise ConfigError(f"mcp={place!r}: give the command of an MCP server as a list, or its address")
    environment = {**passed, **{name: str(value) for name, value in (item.get("env") or {}).items()}}
    return Client(
        StdioServerParameters(command=command[0], args=list(command[1:]), env=environment, cwd=item.get("cwd"))
    )


async def _tools(client: Client) -> list[Tool]:
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
            partial(_call, client, tool.name),
        )
        for tool in described
    ]


async def _call(client: Client, name: str, arguments: Mapping[str, Any]) -> object:
    result = await client.call_tool(name, dict(arguments))
    texts = [block.text if block.type == "text" else f"[{block.type}]" for block in result.content]
    if result.is_error:
        raise ToolError("\n".join(texts))
    return "\n".join(texts) if texts or result.structured_content is None else result.structured_content


def _first(error: BaseException) -> str:
    """Return the first error of a group in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return " ".join(str(error).split())[:200] or type(error).__name__
