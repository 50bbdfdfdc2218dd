"""Endpoint: limit of a call, address, connections without delay, and calls after the end of a trajectory."""

from __future__ import annotations

import socket
import threading
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest

pytest.importorskip("vllm")

import httpx
import openai

from rl_plugins.environments.endpoint import Endpoint, Received, listening_on
from rl_plugins.rollout.vllm.chat_protocol import error_body, models
from rl_plugins.tests.listeners import listening_hosts
from rl_plugins.tests.patience import patient, wait_until

pytestmark = pytest.mark.unit


def test_call_with_a_huge_body_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_plugins.environments.endpoint._MOST_BYTES", 1000)
    with closing(Endpoint("127.0.0.1", models(), error_body)) as endpoint:
        client = openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.open(3), max_retries=0)
        with pytest.raises(openai.APIStatusError, match="the call has more than 1000 bytes") as refused:
            client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "x" * 1000}])
        client.close()
        assert refused.value.status_code == 413 and endpoint.take() == []


def test_endpoint_serves_on_one_address_alone() -> None:
    with closing(Endpoint("127.0.0.2", models(), error_body)) as endpoint:
        address = urlsplit(endpoint.base_url)
        assert address.hostname == "127.0.0.2"
        with openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.open(3), max_retries=0) as client:
            assert [model.id for model in client.models.list()] == ["policy"]
        assert listening_hosts(address.port or 0) == ["127.0.0.2"]


def test_connections_of_the_endpoint_send_without_delay() -> None:
    with listening_on("127.0.0.1") as server, socket.create_connection(server.getsockname()), server.accept()[0] as end:
        assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_stream_of_a_trajectory_that_ends_ends_with_an_error(tmp_path: Path) -> None:
    with closing(Endpoint("127.0.0.1", models(), error_body)) as endpoint:
        key, heard = endpoint.open(3), list[str]()

        def listen() -> None:
            with httpx.stream(
                "POST", f"{endpoint.base_url}/chat/completions", headers={"authorization": f"Bearer {key}"}, timeout=60
            ) as answer:
                for line in filter(None, answer.iter_lines()):
                    heard.append(line)
                    (tmp_path / "heard").touch()

        listener = threading.Thread(target=listen)
        listener.start()
        calls: list[Received] = []

        def has_call() -> bool:
            calls.extend(endpoint.take())
            return bool(calls)

        wait_until(has_call, "the call")
        endpoint.send(calls[0], b"data: 1\n\n")
        wait_until((tmp_path / "heard").exists, "the first event")
        endpoint.end(3)
        listener.join(patient(60))
        endpoint.send(calls[0], b"data: 2\n\n")
    assert heard[0] == "data: 1" and len(heard) == 2 and "trajectory 3 has ended" in heard[1]


def test_call_after_the_end_of_a_trajectory_gets_a_clear_error() -> None:
    with closing(Endpoint("127.0.0.1", models(), error_body)) as endpoint:
        client = openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.open(3), max_retries=0)
        assert [model.id for model in client.models.list()] == ["policy"]
        endpoint.end(3)
        with pytest.raises(openai.APIStatusError, match="trajectory 3 has ended: an agent makes no call") as ended:
            client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "x"}])
        client.close()
    assert ended.value.status_code == 410
