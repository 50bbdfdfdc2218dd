"""Network interface of gloo, from the forms of `NCCL_SOCKET_IFNAME`."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest

from rl_plugins import addresses
from rl_plugins.addresses import GLOO_INTERFACE, NCCL_INTERFACE, choose_gloo_interface, first_interface
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


def test_choose_gloo_interface_keeps_the_interface_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_addresses", lambda: ADDRESSES)
    seen = []
    for nccl, gloo in (("", ""), ("eth1", ""), ("eth1", "eth0"), ("", "eth0")):
        monkeypatch.setenv(NCCL_INTERFACE, nccl)
        monkeypatch.setenv(GLOO_INTERFACE, gloo)
        choose_gloo_interface()
        seen.append(os.environ[GLOO_INTERFACE])
    assert seen == ["", "eth1", "eth0", "eth0"]


def test_choose_gloo_interface_takes_the_address_in_the_ray_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_addresses", lambda: ADDRESSES)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))
    monkeypatch.delenv(NCCL_INTERFACE, raising=False)
    for address, expected in {"10.1.0.4": "eth1", "127.0.0.1": "", "10.9.9.9": ""}.items():
        monkeypatch.setattr(addresses, "own_address", lambda address=address: address)
        monkeypatch.setenv(GLOO_INTERFACE, "")
        choose_gloo_interface()
        assert os.environ[GLOO_INTERFACE] == expected


def test_choose_gloo_interface_finds_the_interfaces_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NCCL_INTERFACE, "=lo")
    monkeypatch.setenv(GLOO_INTERFACE, "")
    choose_gloo_interface()
    assert os.environ[GLOO_INTERFACE] == "lo"
