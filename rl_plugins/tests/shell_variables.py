"""Variables of the developer's shell with an effect on tests."""

from __future__ import annotations

from collections.abc import MutableMapping

OF_SERVERS = (
    "RAY_ADDRESS",
    "RAY_API_SERVER_ADDRESS",
    "MLFLOW_TRACKING_URI",
    "MLFLOW_REGISTRY_URI",
    "MLFLOW_EXPERIMENT_NAME",
    "MLFLOW_EXPERIMENT_ID",
    "MLFLOW_RUN_ID",
)
"""Variables with a cluster, a store or a run of the developer."""


def forget_servers(environment: MutableMapping[str, str]) -> None:
    """Remove `OF_SERVERS`: tests run on this machine, and write into no store of the developer."""
    for name in OF_SERVERS:
        environment.pop(name, None)
