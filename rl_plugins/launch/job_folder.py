"""The folder into which Ray unpacks the project that was sent with a job.

Each of Ray's nodes unpacks it when the job begins, and before that removes what lies there. Nodes that share a host
share the folder, too: one that is later takes it away from under the processes of the others, which are left in a
folder that is no more.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_plugins.errors import DeadlineExceeded

JOB_FOLDERS = "working_dir_files"
"""Name of the folder above it."""
_UNPACK_S = 60.0


def settle(folder: Path, nodes: Sequence[Mapping[str, Any]]) -> None:
    """Wait until all nodes that share hosts have unpacked the job's project, before anything else runs on them.

    Args:
        folder: in which this process was before the job began.
        nodes: Ray's description of each.

    Raises:
        DeadlineExceeded: one could not start a process.
    """
    hosts = [node["NodeManagerHostname"] for node in nodes]
    sharing = [node for node, host in zip(nodes, hosts, strict=True) if hosts.count(host) > 1]
    if not sharing or JOB_FOLDERS not in folder.parts:
        return
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    for node in sharing:
        here = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        # An environment of its own: nothing else must get a process that stands in the folder of before.
        alone = {"env_vars": {"RL_PLUGINS_UNPACK": node["NodeID"]}}
        task = ray.remote(_nothing).options(num_cpus=0, scheduling_strategy=here, runtime_env=alone)
        try:
            ray.get(task.remote(), timeout=_UNPACK_S)
        except ray.exceptions.GetTimeoutError:
            raise DeadlineExceeded(
                f"the run waited {_UNPACK_S:.0f} s for Ray to unpack the project on the node {node['NodeID']} of "
                f"{node['NodeManagerHostname']}"
            ) from None
    # This process, too, stands in the folder of before.
    os.chdir(folder)


def _nothing() -> None:
    pass
