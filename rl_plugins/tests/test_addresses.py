"""Network interface of gloo, from the forms of `NCCL_SOCKET_IFNAME`."""

from __future__ import annotations

import os

import pytest

from rl_plugins import addresses
from rl_plugins.addresses import GLOO_INTERFACE, NCCL_INTERFACE, first_interface, follow_nccl
from rl_plugins.errors import ConfigError

pytestmark = pytest.mark.unit

ADDRESSES = {
    "lo": ["127.0.0.1", "::1"],
    "docker0": ["172.17.0.1"],
    "eth0": ["10.0.0.4"],
    "eth1": ["10.1.0.4"],
    "ib0": ["fe80::1"],
}


def test_first_interface_reads_prefixes_whole_names_and_exclusions() -> None:
    expected = {
        "eth0": "eth0",
        "eth": "eth0",
        "ib,eth1": "eth1",
        "=eth1": "eth1",
        "=ib0,lo": "lo",
        "=eth1:4791": "eth1",
        "^docker": "eth0",
        "^docker,eth,lo": "ib0",
        "^=docker0,eth0": "eth1",
    }
    assert {allowed: first_interface(allowed, ADDRESSES) for allowed in expected} == expected


def test_first_interface_names_the_interfaces_of_the_machine() -> None:
    for allowed in ("ens", "=eth", "^docker,eth,ib"):
        with pytest.raises(ConfigError) as raised:
            first_interface(allowed, ADDRESSES)
        assert f"{NCCL_INTERFACE}={allowed} allows none of" in str(raised.value)
        assert "(lo, docker0, eth0, eth1, ib0): name one of these" in str(raised.value)


def test_follow_nccl_keeps_the_interface_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_addresses", lambda: ADDRESSES)
    seen = []
    for nccl, gloo in (("", ""), ("eth1", ""), ("eth1", "eth0"), ("", "eth0")):
        monkeypatch.setenv(NCCL_INTERFACE, nccl)
        monkeypatch.setenv(GLOO_INTERFACE, gloo)
        follow_nccl()
        seen.append(os.environ[GLOO_INTERFACE])
    assert seen == ["", "eth1", "eth0", "eth0"]


def test_follow_nccl_finds_the_interfaces_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NCCL_INTERFACE, "=lo")
    monkeypatch.setenv(GLOO_INTERFACE, "")
    follow_nccl()
    assert os.environ[GLOO_INTERFACE] == "lo"
