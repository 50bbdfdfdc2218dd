"""Program: a server of the package openenv with a game. Two sessions at once; prints the port. Ends with its input."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    """A guess."""

    message: str


class Seen(Observation):
    """Observation of a text."""

    text: str


class Guessing(Environment):
    """Guess the seed. Each wrong guess costs a tenth."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, low: int = 0, **options: Any) -> Seen:
        self.number = seed or 0
        return Seen(text=f"guess from {low}")

    def step(self, action: Guess, timeout_s: float | None = None, **options: Any) -> Seen:
        guess = int(action.message)
        if guess == self.number:
            return Seen(text="right", reward=1.0, done=True, metadata={"guesses": 1})
        return Seen(text="higher" if guess < self.number else "lower", reward=-0.1)

    @property
    def state(self) -> State:
        return State()


async def main() -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    app = create_fastapi_app(Guessing, Guess, Seen, max_concurrent_envs=2)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    print(listening.getsockname()[1], flush=True)

    def end_with_input() -> None:
        """Stop the server at the end of the input, which ends with the test."""
        sys.stdin.read()
        server.should_exit = True

    threading.Thread(target=end_with_input, daemon=True).start()
    await server.serve(sockets=[listening])


if __name__ == "__main__":
    asyncio.run(main())
