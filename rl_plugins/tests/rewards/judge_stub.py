"""Server with OpenAI's protocol on this machine: answers as a test says, and keeps all requests."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rl_plugins.config.judge import JudgeConfig
from rl_plugins.rewards.records import ScoringRequest

KEY = "sk-very-secret"


@dataclass(frozen=True)
class Said:
    """One answer of the server.

    Attributes:
        content: text of the message.
        status: status of HTTP.
        headers: further headers.
        body: whole body in place of a message.
        hangs: True if the server keeps the connection and says nothing.
        reason: end of the answer: `stop` or `length`.
    """

    content: str | None = '{"reason": "good", "score": 8}'
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: str | None = None
    hangs: bool = False
    reason: str = "stop"

    def text(self) -> str:
        """Return the body of the answer."""
        message = {"role": "assistant", "content": self.content}
        return self.body or json.dumps({
            "choices": [{"message": message, "finish_reason": self.reason}],
            "usage": {"prompt_tokens": 100, "completion_tokens": 10},
        })  # fmt: skip


OVERLOADED = Said(status=503, body="busy")


class Handler(BaseHTTPRequestHandler):
    """Answers of the stub."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        server: Any = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.requests.append({"path": self.path, "key": self.headers.get("Authorization"), **body})
            said: Said = server.answer(len(server.requests), body)
            server.open += 1
            server.most_open = max(server.most_open, server.open)
        if said.hangs:
            server.over.wait()
        if server.together:
            server.together.wait()
        with server.lock:
            server.open -= 1
        content = said.text().encode()
        self.send_response(said.status)
        for name, value in {"Content-Length": str(len(content)), **said.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: Any) -> None:
        pass


class JudgeStub(ThreadingHTTPServer):
    """The server.

    Attributes:
        answer: function of the number of a request, from 1 on, and its body; returns the answer.
        requests: path, key and body of each request.
        most_open: largest number of requests at a time.
        together: barrier for requests that must be open at the same time.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler, bind_and_activate=False)
        self.server_bind()
        self.lock, self.over = threading.Lock(), threading.Event()
        self.requests: list[dict[str, Any]] = []
        self.open = self.most_open = 0
        self.together: threading.Barrier | None = None
        self.answer: Callable[[int, Mapping[str, Any]], Said] = lambda number, body: Said()

    @property
    def url(self) -> str:
        """Address up to /v1."""
        return f"http://127.0.0.1:{self.server_port}/v1"

    def say(self, *answers: Said) -> None:
        """Answer with these, one after the other, and then always with the last."""
        self.answer = lambda number, body: answers[min(number, len(answers)) - 1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # The client gave up.


@contextmanager
def judge_stub(server: JudgeStub | None = None) -> Iterator[JudgeStub]:
    """Run the server, by default a new one. Until then, clients of a server are refused."""
    server = server or JudgeStub()
    server.server_activate()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.over.set()
        server.shutdown()
        thread.join()
        server.server_close()


def settings(url: str, **options: Any) -> JudgeConfig:
    """Return the settings of a judge at an address."""
    return JudgeConfig(url=url, model="judge", **options)


def request(solution: str = "4", **values: Any) -> ScoringRequest:
    """Return a response to a question."""
    given = {"prompt": [{"role": "user", "content": "2 + 2?"}], "extra_info": {"hint": "even"}, **values}
    return ScoringRequest("sums", solution, "four", **given)
