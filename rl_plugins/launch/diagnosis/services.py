"""What runs elsewhere: a Ray cluster and an MLflow store, if one is named."""

from __future__ import annotations

import os
import socket

from rl_plugins.errors import ConfigError
from rl_plugins.launch.diagnosis.finding import Finding
from rl_plugins.tracking.store import check_store

_CONNECT_TIMEOUT_S = 3.0


def services(tracking_uri: str | None) -> list[Finding]:
    """Everything that is looked at here.

    Args:
        tracking_uri: of MLflow; None is a file beside the runs.
    """
    return [_ray(os.environ.get("RAY_ADDRESS")), _mlflow(tracking_uri)]


def _ray(address: str | None) -> Finding:
    if not address or address in ("auto", "local"):
        return Finding("Ray", "good", "RAY_ADDRESS names no cluster: every run starts its own on this machine")
    host, _, port = address.rpartition("//")[2].partition(":")
    try:
        socket.create_connection((host, int(port or 6379)), timeout=_CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        cure = "start it (ray start --head), correct RAY_ADDRESS, or unset it to run on this machine"
        return Finding("Ray", "broken", f"RAY_ADDRESS={address}: nobody answers there ({error})", cure)
    return Finding("Ray", "good", f"RAY_ADDRESS={address} answers")


def _mlflow(uri: str | None) -> Finding:
    if uri is None:
        return Finding("MLflow", "good", "no store is named: runs write an SQLite file in run.output_dir")
    try:
        check_store(uri)
    except ConfigError as error:
        said, _, cure = str(error).partition("): ")
        return Finding("MLflow", "broken", f"{said})", cure)
    return Finding("MLflow", "good", f"{uri} answers")
