"""Addresses on which this process listens: a connection would also meet a server of another test on the same port."""

from __future__ import annotations

import psutil


def listening_hosts(port: int) -> list[str]:
    """Return the addresses on which this process listens at `port`."""
    connections = psutil.Process().net_connections("tcp")
    return [one.laddr.ip for one in connections if one.status == psutil.CONN_LISTEN and one.laddr.port == port]
