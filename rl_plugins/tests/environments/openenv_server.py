"""A server with the protocol of OpenEnv: guess a number, in a session for each WebSocket."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from websockets.asyncio.server import ServerConnection, serve

from rl_plugins.tests.patience import patient


class GuessingServer:
    """Answers sessions, and keeps the messages of all sessions.

    Attributes:
        seen: messages of the clients.
        ended: number of sessions that have ended.
        is_full: True if the server refuses sessions.
    """

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []
        self.ended, self.is_full = 0, False

    async def session(self, socket: ServerConnection) -> None:
        """Answer the messages of a session until its end."""
        if self.is_full:
            found = {"message": "no room", "code": "CAPACITY_REACHED"}
            await socket.send(json.dumps({"type": "error", "data": found}))
            return
        await self.answer(socket)
        # As the package: the session ends at the server before the connection.
        self.ended += 1

    async def answer(self, socket: ServerConnection) -> None:
        """Answer the messages of a session."""
        number = 0
        async for content in socket:
            message = json.loads(content)
            self.seen.append(message)
            if message["type"] == "close":
                return
            data = message["data"]
            if message["type"] == "reset":
                number = data["seed"]
                answer = observed({"text": f"guess from {data.get('low', 0)}"}, None, done=False)
            elif data.keys() != {"message"}:
                errors = [{"loc": ["message"], "msg": "Field required"}]
                found = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": errors}
                answer = {"type": "error", "data": found}
            elif data["message"] == "leave":
                return
            else:
                guess = int(data["message"])
                words = "right" if guess == number else "higher" if guess < number else "lower"
                answer = observed({"text": words}, 1.0 if guess == number else -0.1, done=guess == number)
            await socket.send(json.dumps(answer))


def observed(observation: dict[str, Any], reward: float | None, *, done: bool) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}}


@contextmanager
def guessing_server() -> Iterator[tuple[str, GuessingServer]]:
    """Run a server in a thread; give its address and the server."""
    server, loop, addresses = GuessingServer(), asyncio.new_event_loop(), []
    is_open, is_over = threading.Event(), asyncio.Event()

    async def run() -> None:
        async with serve(server.session, "127.0.0.1", 0) as listening:
            addresses.append(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
            is_open.set()
            await is_over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    try:
        assert is_open.wait(patient(60)), "the server did not open its port"
        yield addresses[0], server
    finally:
        loop.call_soon_threadsafe(is_over.set)
        thread.join(patient(60))
        loop.close()
