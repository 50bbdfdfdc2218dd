"""An MCP server for tests: `python mcp_server.py [SOCKET]`, over stdin and stdout, or over a listening socket."""

from __future__ import annotations

import os
import socket
import sys

import uvicorn
from mcp.server.mcpserver import MCPServer

server = MCPServer("tests")


@server.tool()
def multiply(a: int, b: int) -> int:
    """Multiply numbers."""
    if a > 1000:
        raise ValueError("too large")
    return a * b


@server.tool()
def variable(name: str) -> str:
    """Return a variable of the environment."""
    return os.environ.get(name, "nothing")


@server.tool()
def leave() -> str:
    """End the server."""
    os._exit(3)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        listening = socket.socket(fileno=int(sys.argv[1]))
        uvicorn.Server(uvicorn.Config(server.streamable_http_app())).run([listening])
    else:
        server.run("stdio")
