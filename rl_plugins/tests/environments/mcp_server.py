"""An MCP server for tests: `python mcp_server.py [PORT]`, over stdin and stdout, or over HTTP."""

from __future__ import annotations

import os
import sys

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


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
