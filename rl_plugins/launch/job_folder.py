"""The folder into which Ray unpacks the project of a job.

Each Ray node removes the content of the folder and unpacks the project when the job starts on the node. Nodes on one
host share the folder. A node with a later start removes the folder while processes of the other nodes use it,
and their working directory no longer exists.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_plugins.errors import DeadlineExceeded

JOB_FOLDERS = "working_dir_files"
"""Name of the folder that contains the folders of all jobs."""
_UNPACK_TIMEOUT_S = 60.0


def wait_until_project_is_unpacked(folder: Path, nodes: Sequence[Mapping[str, Any]]) -> None:
    """Wait until all nodes that share a host have unpacked the job's project. Call it before other processes start.

    Args:
        folder: Working directory of this process before the job started.
        nodes: Ray's description of each node.

    Raises:
        DeadlineExceeded: A node could not start a process.
    """
    hosts = [node["NodeManagerHostname"] for node in nodes]
    sharing = [node for node, host in zip(nodes, hosts, strict=True) if hosts.count(host) > 1]
    if not sharing or JOB_FOLDERS not in folder.parts:
        return
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    for node in sharing:
        on_node = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        # A separate environment makes Ray start a new process: no later task may get a process whose working
        # directory was removed.
        own_environment = {"env_vars": {"RL_PLUGINS_UNPACK": node["NodeID"]}}
        task = ray.remote(_do_nothing).options(num_cpus=0, scheduling_strategy=on_node, runtime_env=own_environment)
        try:
            ray.get(task.remote(), timeout=_UNPACK_TIMEOUT_S)
        except ray.exceptions.GetTimeoutError:
            raise DeadlineExceeded(
                f"the run waited {_UNPACK_TIMEOUT_S:.0f} s for Ray to unpack the project on the node {node['NodeID']} "
                f"of {node['NodeManagerHostname']}"
            ) from None
    # The working directory of this process was removed, too.
    os.chdir(folder)


def _do_nothing() -> None:
    pass
