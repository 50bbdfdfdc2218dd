"""Addresses, free ports and network interfaces of this machine.

Ranks on GPUs communicate over NCCL and over gloo. By itself, gloo takes the address of the host name, which many
machines give themselves as a loopback address, so the ranks of other machines would not connect. Therefore the
interface of gloo follows `NCCL_SOCKET_IFNAME`, or the address of the machine in the Ray cluster.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence

from rl_plugins.errors import ConfigError

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"


def free_port(host: str = "") -> int:
    """Return a port without a listening process. Another process may take the port before the caller does.

    Args:
        host: address of this machine; empty: all its addresses.
    """
    with socket.socket() as listener:
        listener.bind((host, 0))
        port: int = listener.getsockname()[1]
        return port


def own_address() -> str:
    """Return the address of this machine in the Ray cluster."""
    import ray

    return str(ray.util.get_node_ip_address())


def choose_gloo_interface() -> None:
    """Set `GLOO_SOCKET_IFNAME`, if the variable is not set and this machine is in a Ray cluster or restricts NCCL.

    The interface is the first one that `NCCL_SOCKET_IFNAME` allows; without this variable, the interface with the
    address of the machine in the Ray cluster.

    Raises:
        ConfigError: this machine has no interface that `NCCL_SOCKET_IFNAME` allows.
    """
    if os.environ.get(GLOO_INTERFACE):
        return
    if allowed := os.environ.get(NCCL_INTERFACE, ""):
        os.environ[GLOO_INTERFACE] = first_interface(allowed, _addresses())
    # Without an earlier import, this process is in no cluster.
    elif "ray" in sys.modules and sys.modules["ray"].is_initialized():
        address = own_address()
        for interface, own in _addresses().items():
            if address in own and not _is_loopback(own):
                os.environ[GLOO_INTERFACE] = interface


def first_interface(allowed: str, addresses: Mapping[str, Sequence[str]]) -> str:
    """Return the first interface that a value of `NCCL_SOCKET_IFNAME` allows.

    The value is a list of prefixes, such as `eth,ib`. `=` before the list stands for whole names, and `^` for all
    interfaces but the listed ones. NCCL ignores a port after a name.

    Args:
        allowed: value of `NCCL_SOCKET_IFNAME`.
        addresses: IP addresses of this machine by interface.

    Raises:
        ConfigError: no interface is allowed.
    """
    excludes = allowed.startswith("^")
    listed = allowed.removeprefix("^")
    names = [name.partition(":")[0] for name in listed.removeprefix("=").split(",") if name]
    for interface, own in addresses.items():
        is_listed = interface in names if listed.startswith("=") else interface.startswith(tuple(names))
        if is_listed != excludes and not (excludes and _is_loopback(own)):
            return interface
    raise ConfigError(
        f"{NCCL_INTERFACE}={allowed} allows none of the network interfaces of {socket.gethostname()} with an address "
        f"({', '.join(addresses)}): name one of these, or unset the variable"
    )


def _is_loopback(addresses: Sequence[str]) -> bool:
    return all(address.startswith("127.") or address == "::1" for address in addresses)


def _addresses() -> dict[str, list[str]]:
    import psutil

    states = psutil.net_if_stats()
    found = {
        interface: [one.address for one in addresses if one.family in (socket.AF_INET, socket.AF_INET6)]
        for interface, addresses in psutil.net_if_addrs().items()
        if interface in states and states[interface].isup
    }
    return {interface: addresses for interface, addresses in found.items() if addresses}
