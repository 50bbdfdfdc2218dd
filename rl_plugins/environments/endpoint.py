"""HTTP endpoint of the policy for agents, with a secret key per trajectory: calls (`CALLS`), and `/v1/models`.

A server thread receives the calls, and the thread that owns the conversations takes and answers them. The server knows
keys and bodies alone: other modules read calls and write answers.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rl_plugins.errors import ConfigError

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

CALLS = ("/v1/chat/completions", "/v1/responses")
"""Addresses of calls of the policy."""
_ENDED_KEYS = 100_000
"""Number of ended trajectories whose keys are still known."""
_MOST_BYTES = 16 * 2**20
"""Largest body of a call. A context of a million tokens has some 5 MiB."""
_CLOSE_S = 10.0
"""Longest wait for the end of the server, in seconds."""


@dataclass(frozen=True)
class HttpAnswer:
    """Answer of HTTP.

    Attributes:
        status: status of HTTP.
        media_type: type of the body.
        body: the body.
    """

    status: int
    media_type: str
    body: bytes


@dataclass(eq=False)
class Received:
    """A call that waits for its answer.

    Attributes:
        trajectory: number of the trajectory.
        path: address of the call, in `CALLS`.
        body: body of the call.
        retries: number of earlier attempts of the client, which has not got the answer.
        at: time of arrival, of `time.monotonic`.
        parts: beginnings of the answer, and at last the answer or its rest, put in the loop of the server.
    """

    trajectory: int
    path: str
    body: bytes
    retries: int
    at: float = field(default_factory=time.monotonic)
    parts: asyncio.Queue[bytes | HttpAnswer] = field(default_factory=asyncio.Queue)

    def earlier(self, calls: Iterable[Received]) -> Received | None:
        """Return the earlier call of a repetition, or None for a new call.

        Of equal calls, this is the call with the fewest repetitions: each client repeats its own call.
        """
        equal = [call for call in calls if self.retries and call.body == self.body]
        return min(equal, key=lambda call: call.retries, default=None)


class Endpoint:
    """Server of the calls of agents.

    Args:
        host: address of this machine on which the server listens, such as 127.0.0.1.
        models: body of `/v1/models`.
        error_body: function from a status, a reason and the type of an error to the body of the error.

    Attributes:
        base_url: address for clients of OpenAI.

    Raises:
        ConfigError: the server cannot listen on the address.
    """

    def __init__(self, host: str, models: bytes, error_body: Callable[[int, str, str], bytes]) -> None:
        self._models, self._error_body = models, error_body
        self._socket = listening_on(host)
        shown = f"[{host}]" if ":" in host else host
        self.base_url = f"http://{shown}:{self._socket.getsockname()[1]}/v1"
        self._lock = threading.Lock()
        self._trajectories: dict[str, int] = {}
        self._keys: dict[int, str] = {}
        # Trajectories by key, the oldest first.
        self._ended: dict[str, int] = {}
        self._waiting: dict[int, list[Received]] = {}
        self._inbox: deque[Received] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._server = self._make_server()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closing = False
        self._thread = threading.Thread(target=self._serve, name="endpoint", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Return a file descriptor that is readable if a call has arrived."""
        return self._wake

    def open(self, trajectory: int) -> str:
        """Return the secret key of a new trajectory.

        Args:
            trajectory: number of the trajectory, unique among the trajectories in progress.
        """
        key = f"trajectory-{secrets.token_urlsafe(24)}"
        with self._lock:
            self._trajectories[key], self._keys[trajectory], self._waiting[trajectory] = trajectory, key, []
        return key

    def take(self) -> list[Received]:
        """Return the calls that have arrived, without waiting.

        Raises:
            RuntimeError: the server has ended by itself.
        """
        if not self._thread.is_alive() and not self._is_closing:
            raise RuntimeError("the HTTP server of the agents' endpoint has ended: see its error in the log")
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return []
        with self._lock:
            calls, open_calls = list(self._inbox), self._waiting
            self._inbox.clear()
            return [call for call in calls if call in open_calls.get(call.trajectory, ())]

    def send(self, call: Received, events: bytes) -> None:
        """Send server-sent events as the next part of the answer to a call."""
        with self._lock:
            if call not in self._waiting.get(call.trajectory, []):
                return
        self._put(call, events)

    def answer(self, call: Received, answer: HttpAnswer) -> None:
        """Send the answer to a call, or its rest after parts of the answer."""
        with self._lock:
            waiting = self._waiting.get(call.trajectory, [])
            if call not in waiting:
                return
            waiting.remove(call)
        self._put(call, answer)

    def refuse(self, call: Received, reason: str, kind: str, status: int = 400) -> None:
        """Send an error in answer to a call.

        Args:
            call: the call.
            reason: reason for the client.
            kind: type of the error in OpenAI's protocol.
            status: status of HTTP.
        """
        self.answer(call, self._error(status, reason, kind))

    def end(self, trajectory: int) -> None:
        """End a trajectory: calls that wait, and further calls with its key, get an error."""
        with self._lock:
            key = self._keys.pop(trajectory, None)
            waiting = self._waiting.pop(trajectory, [])
            if key is not None:
                del self._trajectories[key]
                self._ended[key] = trajectory
                if len(self._ended) > _ENDED_KEYS:
                    del self._ended[next(iter(self._ended))]
        for call in waiting:
            self._put(call, self._has_ended(trajectory))

    def close(self) -> None:
        """End all trajectories and the server."""
        for trajectory in list(self._keys):
            self.end(trajectory)
        self._is_closing = self._server.should_exit = True
        self._thread.join(_CLOSE_S)
        self._socket.close()
        os.close(self._wake)

    # Server -----------------------------------------------------------------------------------------------------

    def _make_server(self) -> Any:
        import uvicorn
        from starlette.applications import Starlette
        from starlette.routing import Route

        application = Starlette(
            routes=[
                *(Route(path, self._complete, methods=["POST"]) for path in CALLS),
                Route("/v1/models", self._list_models, methods=["GET"]),
            ]
        )
        return uvicorn.Server(
            uvicorn.Config(
                application, log_config=None, log_level="warning", access_log=False, lifespan="off",
                timeout_graceful_shutdown=1,
            )
        )  # fmt: skip

    def _serve(self) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            await self._server.serve(sockets=[self._socket])

        try:
            asyncio.run(serve())
        finally:
            # Whoever waits for a call notices the end.
            if not self._is_closing:
                os.eventfd_write(self._wake, 1)

    async def _list_models(self, request: Request) -> Response:
        trajectory = self._trajectory_of(request)
        return _response(
            trajectory if isinstance(trajectory, HttpAnswer) else HttpAnswer(200, "application/json", self._models)
        )

    async def _complete(self, request: Request) -> Response:
        trajectory = self._trajectory_of(request)
        if isinstance(trajectory, HttpAnswer):
            return _response(trajectory)
        body = await _body_of(request)
        if body is None:
            return _response(self._error(413, f"the call has more than {_MOST_BYTES} bytes: send a shorter history"))
        # The clients of OpenAI number their repetitions.
        retries = request.headers.get("x-stainless-retry-count", "")
        call = Received(trajectory, request.url.path, body, int(retries[:9]) if retries.isdecimal() else 0)
        with self._lock:
            if trajectory not in self._waiting:
                return _response(self._has_ended(trajectory))
            self._waiting[trajectory].append(call)
            self._inbox.append(call)
        os.eventfd_write(self._wake, 1)
        # Without a deadline: the end of the trajectory, which has one, is also the end of the wait.
        first = await call.parts.get()
        return _response(first) if isinstance(first, HttpAnswer) else _stream(first, call)

    def _trajectory_of(self, request: Request) -> int | HttpAnswer:
        """Return the number of the trajectory whose key a request has, or an error."""
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        with self._lock:
            trajectory = self._trajectories.get(key) if scheme.lower() == "bearer" else None
            ended = self._ended.get(key)
        if trajectory is not None:
            return trajectory
        if ended is not None:
            return self._has_ended(ended)
        reason = "no trajectory has this key: send the api_key that the agent got"
        return self._error(401, reason, "authentication_error")

    def _put(self, call: Received, part: bytes | HttpAnswer) -> None:
        assert self._loop is not None, "a call came through the loop"
        self._loop.call_soon_threadsafe(call.parts.put_nowait, part)

    def _has_ended(self, trajectory: int) -> HttpAnswer:
        return self._error(
            410, f"trajectory {trajectory} has ended: an agent makes no call after the return of its reward"
        )

    def _error(self, status: int, reason: str, kind: str = "invalid_request_error") -> HttpAnswer:
        return HttpAnswer(status, "application/json", self._error_body(status, reason, kind))


def check_host(host: str) -> None:
    """Raise a ConfigError if a host is no single address of a machine."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise ConfigError(f"endpoint_host={host}: is no address: use 127.0.0.1, or an address of the machine") from None
    if address.is_unspecified:
        raise ConfigError(
            f"endpoint_host={host}: agents need one address to call: use 127.0.0.1, or an address of the machine"
        )


def listening_on(host: str) -> socket.socket:
    """Return a socket that listens on a free port of an address of this machine.

    Raises:
        ConfigError: no socket can listen on the address.
    """
    check_host(host)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, 0), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(
            f"endpoint_host={host}: the endpoint cannot listen there ({error.strerror}): use 127.0.0.1, or an "
            "address of this machine"
        ) from None
    # Connections inherit this option. asyncio sets the option for sockets of another kind only, and without the option
    # the body of an answer waits 40 ms for the client to confirm the headers.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


async def _body_of(request: Request) -> bytes | None:
    """Return the body of a call; None for a body beyond `_MOST_BYTES`, which is not read to its end."""
    parts, size = list[bytes](), 0
    async for part in request.stream():
        size += len(part)
        if size > _MOST_BYTES:
            return None
        parts.append(part)
    return b"".join(parts)


def _response(answer: HttpAnswer) -> Response:
    from starlette.responses import Response

    return Response(answer.body, status_code=answer.status, media_type=answer.media_type)


def _stream(first: bytes, call: Received) -> Response:
    """Return the response of HTTP with all parts of an answer; an error at the end is an event, too."""
    from starlette.responses import StreamingResponse

    async def events() -> AsyncIterator[bytes]:
        part: bytes | HttpAnswer = first
        while not isinstance(part, HttpAnswer):
            yield part
            part = await call.parts.get()
        yield part.body if part.status == 200 else b"data: " + part.body + b"\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")
