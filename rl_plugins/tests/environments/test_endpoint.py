"""Endpoint: the bound on a call, its address, and connections without delay."""

from __future__ import annotations

import socket
from contextlib import closing
from urllib.parse import urlsplit

import pytest

pytest.importorskip("vllm")

import openai

from rl_plugins.environments.endpoint import Endpoint, listening_on
from rl_plugins.rollout.vllm.chat_protocol import error_body, models

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
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", address.port or 0))


def test_connections_of_the_endpoint_send_without_delay() -> None:
    with listening_on("127.0.0.1") as server, socket.create_connection(server.getsockname()), server.accept()[0] as end:
        assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
