"""Coroutine rewards keep a client of a real HTTP server from batch to batch."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rl_plugins import user_code
from rl_plugins.rewards.inline import InlineScorer
from rl_plugins.rewards.pool import RewardPool
from rl_plugins.rewards.records import ScoringRequest
from rl_plugins.tests.patience import patient
from rl_plugins.user_code import run_concurrently, run_in_event_loop

DEADLINE_S = patient(60)

MODULE_CLIENT = """
import httpx

client = httpx.AsyncClient(timeout=60, limits=httpx.Limits(keepalive_expiry=600))

async def judge(solution_str, url):
    answer = await client.post(url, content=solution_str)
    return float(answer.text)
"""
CONSTRUCTOR_CLIENT = """
import aiohttp

class judge:
    def __init__(self, url):
        self.url, self.session = url, aiohttp.ClientSession()

    async def __call__(self, solution_str):
        async with self.session.post(self.url, data=solution_str) as answer:
            return float(await answer.text())
"""
LAZY_CLIENT = """
import aiohttp

session = None

async def judge(solution_str, url):
    global session
    session = session or aiohttp.ClientSession()
    async with session.post(url, data=solution_str) as answer:
        return float(await answer.text())
"""
# Without a library, which a worker would import for longer than the test takes.
KEPT_CONNECTION = """
import asyncio

connection = None

async def judge(solution_str, port):
    global connection
    connection = connection or await asyncio.open_connection("127.0.0.1", port)
    reader, writer = connection
    writer.write(f"POST / HTTP/1.1\\r\\nContent-Length: {len(solution_str)}\\r\\n\\r\\n{solution_str}".encode())
    await reader.readuntil(b"\\r\\n\\r\\n")
    return float(await reader.readexactly(1))
"""


class Judge(BaseHTTPRequestHandler):
    """Answer with the length of the text. A response `bye` also closes the connection without a word."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers["Content-Length"])).decode()
        answer = str(len(text)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)
        server: Any = self.server
        server.connections.add(self.client_address)
        self.close_connection = text == "bye"

    def log_message(self, *arguments: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    """Server that counts connections and tells the end of a connection."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Judge)
        self.connections, self.closed = set[Any](), threading.Event()

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        self.closed.set()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def request(solution: str) -> ScoringRequest:
    return ScoringRequest("s", solution, "", {})


@pytest.mark.parametrize("source", [MODULE_CLIENT, CONSTRUCTOR_CLIENT, LAZY_CLIENT])
def test_inline_scorer_keeps_the_client_of_a_coroutine_reward(source: str, server: Server, tmp_path: Path) -> None:
    (tmp_path / "judges.py").write_text(source)
    url = f"http://127.0.0.1:{server.server_port}"
    scorer = InlineScorer({"path": str(tmp_path / "judges.py"), "name": "judge", "url": url}, deadline_s=DEADLINE_S)
    for _ in range(3):
        assert [score.value for score in scorer.score([request("ab")])] == [2.0]
    assert len(server.connections) == 1
    # The server closes the connection between two batches.
    assert [score.value for score in scorer.score([request("bye")])] == [3.0]
    assert server.closed.wait(DEADLINE_S)
    assert [score.value for score in scorer.score([request("a"), request("abcd")])] == [1.0, 4.0]


def test_worker_of_a_reward_pool_keeps_the_connection_of_a_coroutine_reward(server: Server, tmp_path: Path) -> None:
    (tmp_path / "judges.py").write_text(KEPT_CONNECTION)
    config = {"path": str(tmp_path / "judges.py"), "name": "judge", "port": server.server_port}
    with RewardPool(config, num_workers=1, deadline_s=DEADLINE_S) as pool:
        for text in ("ab", "abcd", "a"):
            assert [score.value for score in pool.score([request(text)])] == [len(text)]
    assert len(server.connections) == 1


def test_run_concurrently_uses_one_event_loop_for_all_batches() -> None:
    async def loop() -> object:
        return asyncio.get_running_loop()

    (first,), (second,) = run_concurrently([loop], DEADLINE_S), run_concurrently([loop], DEADLINE_S)
    assert first is second is run_in_event_loop(loop())


def test_run_concurrently_ends_the_calls_of_an_interrupted_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_code, "REPEAT_S", 0.3)
    ended: list[str] = []

    async def stubborn() -> None:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            await asyncio.sleep(600)

    async def patient_call() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            ended.append("patient")

    async def number() -> float:
        return 1.0

    run_concurrently([stubborn, patient_call], 0.05)
    assert ended == ["patient"]
    assert run_concurrently([number], DEADLINE_S) == [1.0]


def test_run_concurrently_tells_clients_first_of_closed_connections() -> None:
    here, there = socket.socketpair()
    reader, writer = run_in_event_loop(asyncio.open_connection(sock=here))

    async def sees_the_end() -> bool:
        return reader.at_eof()

    assert run_concurrently([sees_the_end], DEADLINE_S) == [False]
    there.close()
    assert run_concurrently([sees_the_end], DEADLINE_S) == [True]
    writer.close()
