"""OpenEnvText: conversations with a server that speaks the protocol of OpenEnv."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from websockets.asyncio.client import connect

from rl_plugins.environments import openenv_text
from rl_plugins.environments.openenv_text import OpenEnvText
from rl_plugins.environments.stateful import StatefulEnvironment
from rl_plugins.environments.step_result import StepResult
from rl_plugins.errors import ConfigError
from rl_plugins.rewards.conversations import Opening
from rl_plugins.rewards.records import ScoringRequest
from rl_plugins.tests.environments.openenv_conversation import ROW, play
from rl_plugins.tests.environments.openenv_server import GuessingServer, guessing_server
from rl_plugins.tests.environments.test_gymnasium_text import Walker
from rl_plugins.tests.environments.test_stateful import SAMPLING, talk_with
from rl_plugins.tests.patience import patient, wait_until


@pytest.fixture
def served() -> Iterator[tuple[str, GuessingServer]]:
    with guessing_server() as found:
        yield found


def test_conversation_has_the_observations_and_rewards_of_the_server(served: tuple[str, GuessingServer]) -> None:
    url, server = served
    config = {"_target_": "rl_plugins.environments.openenv_text.OpenEnvText", "url": url, "reset": ["low"]}
    walker = Walker(["5", "9", "7"])
    with closing(StatefulEnvironment(config, max_turns=8, deadline_s=patient(60))) as environment:
        talk = talk_with(environment, walker)
        about = ScoringRequest("game", "", None, ROW["extra_info"], ROW["prompt"])
        talk.submit([Opening(1, [1], 5, about=about)], SAMPLING)
        (ending,) = talk.collect([1], 0)[1].endings
    assert walker.prompts[0] == "<|user|>Find the number.\n\nguess from 2<|assistant|>"
    assert [message["content"] for message in ending.said if message["role"] == "user"] == ["higher", "lower", "right"]
    # The score of a conversation is the sum of the rewards.
    assert ending.turn_rewards == pytest.approx((-0.1, -0.1, 1.0)) and ending.score.value == pytest.approx(0.8)
    assert server.seen[0] == {"type": "reset", "data": {"seed": 7, "low": 2}}
    wait_until(lambda: server.ended == 1, "the end of the session at the server")


def test_own_functions_make_texts_and_actions(served: tuple[str, GuessingServer]) -> None:
    url, server = served

    def first_number(text: str) -> dict[str, str] | None:
        numbers = [word for word in text.split() if word.isdigit()]
        return {"message": numbers[0]} if numbers else None

    environment = OpenEnvText(
        url, to_text=lambda observation: observation["text"].upper(), to_action=first_number,
        no_action_reward=-1.0, options={"low": 4},
    )  # fmt: skip
    (first,), without, moved = asyncio.run(play(environment, "hm", "I say 8"))
    assert first["content"] == "Find the number.\n\nGUESS FROM 4"
    assert without == StepResult("There is no action in this answer.", reward=-1.0)
    assert moved == StepResult("LOWER", reward=-0.1)
    assert [message["type"] for message in server.seen] == ["reset", "step", "close"]


def test_null_of_a_row_is_no_argument_of_reset(served: tuple[str, GuessingServer]) -> None:
    """Parquet gives all rows the same keys."""
    url, server = served

    async def reset(extra: dict[str, Any] | None) -> None:
        environment = OpenEnvText(url, reset=["low", "high"], options={"low": 4})
        await environment.reset({**ROW, "extra_info": extra})
        await environment.close()

    for extra in ({"seed": None, "low": None, "high": None}, {"seed": 5, "low": 0, "high": None}, None):
        asyncio.run(reset(extra))
    arguments = [message["data"] for message in server.seen if message["type"] == "reset"]
    assert arguments == [{"seed": 3, "low": 4}, {"seed": 5, "low": 0}, {"seed": 3, "low": 4}]


def test_observation_of_several_fields_is_shown_as_json(served: tuple[str, GuessingServer]) -> None:
    environment = OpenEnvText(served[0])
    assert environment._to_text({"text": "one", "metadata": {}, "done": False}) == "one"
    assert environment._to_text({"text": "one", "left": 2}) == '{"text": "one", "left": 2}'


def test_refusals_and_lost_sessions_name_the_server_and_the_reason(served: tuple[str, GuessingServer]) -> None:
    url, _ = served
    refused = r"the server refused step with \{'words': '5'\}: Invalid message \(VALIDATION_ERROR\): .*Field required"
    with pytest.raises(RuntimeError, match=refused):
        asyncio.run(play(OpenEnvText(url, action="words"), "5"))
    with pytest.raises(ConnectionError, match=f"url={url}: the server ended the session in step"):
        asyncio.run(play(OpenEnvText(url), "leave"))


def test_full_server_names_the_reason_before_the_first_message(served: tuple[str, GuessingServer]) -> None:
    url, server = served
    server.is_full = True

    async def reset_late(environment: OpenEnvText) -> None:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(openenv_text, "connect", connect_until_closed)
            await environment.reset(ROW)

    async def connect_until_closed(*arguments: Any, **options: Any) -> Any:
        socket = await connect(*arguments, **options)
        await socket.wait_closed()
        return socket

    with pytest.raises(RuntimeError, match=r"the server refused reset with .*: no room \(CAPACITY_REACHED\)"):
        asyncio.run(reset_late(OpenEnvText(url)))


def test_end_of_a_conversation_waits_for_the_end_of_the_session(served: tuple[str, GuessingServer]) -> None:
    url, server = served
    asyncio.run(play(OpenEnvText(url), "7"))
    assert server.ended == 1


def test_server_of_this_machine_is_reached_without_the_proxy(
    served: tuple[str, GuessingServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    for url in (served[0], served[0].replace("127.0.0.1", "localhost")):
        assert len(asyncio.run(play(OpenEnvText(url), "7"))) == 2


def test_address_without_a_server_is_refused_in_one_line(served: tuple[str, GuessingServer]) -> None:
    with pytest.raises(ConfigError, match="url=localhost:80: give the address of a server, such as http://"):
        OpenEnvText("localhost:80")
    # A port of the machine, on which nothing listens.
    with pytest.raises(ConnectionError, match=r"no server of OpenEnv answers .*: start the server"):
        asyncio.run(play(OpenEnvText("http://127.0.0.1:1")))
