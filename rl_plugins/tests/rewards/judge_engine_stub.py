"""Child process in the place of vLLM's server: answers that the server is healthy, or ends at its start."""

from __future__ import annotations

import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing.connection import Connection
from typing import Any


class Healthy(BaseHTTPRequestHandler):
    """Answers each GET with 200."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *arguments: Any) -> None:
        pass


def serve(connection: Connection) -> None:
    """Serve until the end of the parent."""
    host, port, arguments = connection.recv()
    if arguments["served_model_name"] == ["broken"]:
        sys.exit(3)
    if arguments["served_model_name"] == ["slow"]:
        connection.poll(None)
    HTTPServer((host, port), Healthy).serve_forever()
