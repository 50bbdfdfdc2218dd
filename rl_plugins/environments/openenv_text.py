"""Environments of OpenEnv servers in words: observations become texts, and responses become actions.

environment=stateful 'environment.stateful={_target_: rl_plugins.environments.openenv_text.OpenEnvText,
    url: "http://127.0.0.1:8000", action: message}'

Protocol: a session over a WebSocket at `/ws`, as in `openenv.core.env_client` of the package openenv.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from rl_plugins.environments.step_result import StepResult
from rl_plugins.environments.text_adapters import first_messages, own_function, seed_of
from rl_plugins.errors import ConfigError
from rl_plugins.rewards.records import Message

try:
    from websockets.asyncio.client import ClientConnection, connect
    from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI
except ImportError:
    raise ConfigError("OpenEnvText needs the package websockets: pip install 'rl-plugins[openenv]'") from None

_CONNECT_S = 10.0
_CLOSE_S = 5.0
"""Longest wait for the end of a session at the server, in seconds."""
_LARGEST_MESSAGE = 64 * 2**20
_NOT_SHOWN = frozenset({"reward", "done", "metadata"})
"""Fields of observations of OpenEnv that are not for the policy."""


class OpenEnvText:
    """Stateful environment on a server of OpenEnv. Each conversation has a session of its own.

    The first message of the policy is the prompt of the row with the first observation. The rewards of the server are
    the rewards of the turns. The deadline of the environment (`environment.deadline_s`) bounds each call.

    Args:
        url: address of the server, such as `http://127.0.0.1:8000`.
        action: field of the server's action that gets the text of a response.
        to_text: function, or its dotted name, from an observation (a mapping) to a text. By default the only text of
            the observation, and else the observation as JSON.
        to_action: function, or its dotted name, from the text of a response to an action (a mapping), or None without
            an action. It replaces `action`.
        no_action: text for the policy after a response without an action. The environment takes no step.
        no_action_reward: reward of a turn without an action.
        reset: keys of the row's `extra_info` that are arguments of the server's `reset`, beside `seed`, which is the
            key `seed` or else the seed of the group.
        options: further arguments of the server's `reset`, equal in all conversations.

    Raises:
        ConfigError: the address is not one of http, https, ws or wss.
    """

    def __init__(
        self,
        url: str,
        *,
        action: str = "message",
        to_text: Callable[[Mapping[str, Any]], str] | str | None = None,
        to_action: Callable[[str], Mapping[str, Any] | None] | str | None = None,
        no_action: str = "There is no action in this answer.",
        no_action_reward: float = 0.0,
        reset: Sequence[str] = (),
        options: Mapping[str, Any] | None = None,
    ) -> None:
        scheme, found, place = url.partition("://")
        schemes = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
        if not found or scheme not in schemes:
            raise ConfigError(f"url={url}: give the address of a server, such as http://127.0.0.1:8000")
        self._url, self._socket_url = url, f"{schemes[scheme]}://{place.rstrip('/')}/ws"
        self._to_text = own_function(to_text) or _only_text
        self._to_action = own_function(to_action) or (lambda text: {action: text})
        self._no_action, self._no_action_reward = no_action, no_action_reward
        self._reset, self._options = tuple(reset), dict(options or {})
        self._socket: ClientConnection | None = None

    async def reset(self, row: Mapping[str, Any]) -> list[Message]:
        """Begin a session; return the prompt with the first observation.

        Raises:
            ConnectionError: there is no server of OpenEnv at the address.
        """
        extra = row["extra_info"] or {}
        arguments = {key: extra[key] for key in self._reset if extra.get(key) is not None}
        try:
            self._socket = await connect(
                self._socket_url,
                open_timeout=_CONNECT_S,
                max_size=_LARGEST_MESSAGE,
                # A proxy of the environment is on the way to other machines only.
                proxy=None if _is_this_machine(self._socket_url) else True,
            )
        except (OSError, InvalidHandshake, InvalidURI) as error:
            raise ConnectionError(
                f"url={self._url}: no server of OpenEnv answers ({error}): start the server"
            ) from None
        found = await self._call("reset", {"seed": seed_of(row), **self._options, **arguments})
        return first_messages(row, self._to_text(found["observation"]))

    async def step(self, message: Message) -> StepResult:
        """Take the action of a response."""
        action = self._to_action(str(message["content"]))
        if action is None:
            return StepResult(self._no_action, reward=self._no_action_reward)
        found = await self._call("step", dict(action))
        text, reward = self._to_text(found["observation"]), float(found.get("reward") or 0.0)
        return StepResult(text, score=reward) if found.get("done") else StepResult(text, reward=reward)

    async def close(self) -> None:
        """End the session, and wait until the server has room for another session."""
        if self._socket is not None:
            with suppress(ConnectionClosed, TimeoutError):
                await self._socket.send(json.dumps({"type": "close"}))
                async with asyncio.timeout(_CLOSE_S):
                    await self._socket.wait_closed()
            await self._socket.close()

    async def _call(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message, and return the data of the answer.

        Raises:
            ConnectionError: the server ended the session.
            RuntimeError: the server answers with an error.
        """
        assert self._socket is not None, "reset comes first"
        # A full server says so and closes, maybe before the first message of the client.
        with suppress(ConnectionClosed):
            await self._socket.send(json.dumps({"type": kind, "data": data}))
        try:
            answer: dict[str, Any] = json.loads(await self._socket.recv())
        except ConnectionClosed as error:
            raise ConnectionError(f"url={self._url}: the server ended the session in {kind} ({error})") from None
        found: dict[str, Any] = answer.get("data", {})
        if answer.get("type") != "observation":
            code, words = found.get("code", "no code"), found.get("message", "no message")
            faults = f": {found['errors']}" if found.get("errors") else ""
            raise RuntimeError(f"url={self._url}: the server refused {kind} with {data}: {words} ({code}){faults}")
        return found


def _is_this_machine(url: str) -> bool:
    """Return True for an address of this machine itself."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _only_text(observation: Mapping[str, Any]) -> str:
    """Return the only text of an observation, or the observation as JSON."""
    shown = {name: value for name, value in observation.items() if name not in _NOT_SHOWN}
    texts = [value for value in shown.values() if isinstance(value, str)]
    return texts[0] if len(shown) == len(texts) == 1 else json.dumps(shown)
