"""Ray cluster that a run joins, at the address in `RAY_ADDRESS`.

Ray waits half a minute for a cluster that does not answer, and then raises an error of several lines.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from typing import Any

from rl_plugins.errors import ConfigError

JOB_FOLDERS = "working_dir_files"
"""Name of the folder into which Ray unpacks the projects of all jobs."""
_CONNECT_TIMEOUT_S = 3.0
_SHOWN = 200
"""Characters of Ray's reason in an error."""
TOKEN = (
    "put the token into ~/.ray/auth_token, where it is on the head's machine, or into RAY_AUTH_TOKEN, and set "
    "RAY_AUTH_MODE=token"
)
"""Way out for a process without the token of a cluster."""
_WAY_OUT = "start the cluster (ray start --head), correct the variable, or unset the variable to run on this machine"


def check_cluster(address: str) -> None:
    """Check that a process listens at the address of a cluster. The check takes a few seconds at most.

    Args:
        address: value of `RAY_ADDRESS`: `HOST:PORT`, or `auto` for a cluster with a node on this machine.

    Raises:
        ConfigError: a run cannot join a cluster by such an address, or nothing listens there.
    """
    named = f"RAY_ADDRESS={address}"
    if address == "local":
        raise ConfigError(
            f"{named} names no cluster: unset the variable, and the run starts a Ray of its own on this machine"
        )
    if "://" in address:
        raise ConfigError(
            f"{named}: a run joins a cluster on one of its machines, by HOST:PORT of the cluster's head: correct the "
            "variable, or send the run to the cluster (rl-plugins submit --address http://HOST:8265)"
        )
    host, _, port = (_cluster_of_this_machine() if address == "auto" else address).rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"{named}: this is no HOST:PORT, such as head:6379: correct the variable, or unset it")
    # The system's resolver takes larger numbers modulo 65536, so another server may answer.
    if int(port) > 65535:
        raise ConfigError(f"{named}: ports end at 65535: correct the variable, or unset it")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    # A host name with an empty or overlong part is a ValueError.
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{named} does not answer ({getattr(error, 'strerror', None) or error}): {_WAY_OUT}"
        ) from None


def join_cluster(**options: Any) -> None:
    """Connect this process to the cluster of `RAY_ADDRESS`.

    Args:
        options: further arguments of `ray.init`.

    Raises:
        ConfigError: see `check_cluster`; or the cluster does not take this process, such as one of another version or
            without the token.
    """
    import ray

    address = os.environ["RAY_ADDRESS"]
    check_cluster(address)
    try:
        ray.init(logging_level=logging.ERROR, **options)
    except ray.exceptions.AuthenticationError:
        raise ConfigError(f"RAY_ADDRESS={address}: the cluster wants its token: {TOKEN}") from None
    except ConnectionError as error:
        reason = " ".join(str(error.__cause__ or error).split())[:_SHOWN]
        raise ConfigError(
            f"RAY_ADDRESS={address}: this process cannot join the cluster ({reason}): {_WAY_OUT}"
        ) from error


def variables_of_job() -> set[str]:
    """Return the names of the user's environment variables for the Ray job of this process."""
    job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}"))
    return set(job.get("runtime_env", {}).get("env_vars", {}))


def _cluster_of_this_machine() -> str:
    """Return the address that Ray takes for `auto`.

    Raises:
        ConfigError: no node of a cluster runs on this machine.
    """
    from ray._private.services import get_ray_address_from_environment

    try:
        return str(get_ray_address_from_environment("auto", None))
    except ConnectionError:
        raise ConfigError(f"RAY_ADDRESS=auto: no Ray runs on this machine: {_WAY_OUT}") from None
