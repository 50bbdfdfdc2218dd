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


def ask_no_proxy_for_this_machine(environment: MutableMapping[str, str]) -> None:
    """Add this machine to the hosts without a proxy: servers of tests listen here.

    Most libraries read the variable with small letters first.
    """
    for name in ("NO_PROXY", "no_proxy"):
        environment[name] = ",".join(filter(None, (environment.get(name), "127.0.0.1,127.0.0.2,localhost")))
