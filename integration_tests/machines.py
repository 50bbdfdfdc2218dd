"""A Ray cluster of several machines, all of them on this one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
from ray.cluster_utils import Cluster
from ray.util.state import list_actors

from integration_tests.conftest import free_port


@dataclass
class Machines:
    """The nodes of a cluster: a head that runs nothing, and those with CPUs."""

    cluster: Cluster
    dashboard: str
    nodes: list[Any]

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def actors(self, wanted: Callable[[Any], bool]) -> list[Any]:
        """Those that live, by the state that Ray keeps of them."""
        listed = list_actors(self.dashboard, filters=[("state", "=", "ALIVE")], limit=1000, detail=True)
        return [actor for actor in listed if wanted(actor)]

    def places_of(self, class_name: str) -> list[str]:
        """Ids of the nodes where actors of a class are, one for each."""
        return sorted(actor.node_id for actor in self.actors(lambda actor: class_name in actor.class_name))

    def announce_loss(self, node_id: str, in_s: int) -> None:
        """Say that a node will be taken away, as clouds do of those that they lend cheaply; nothing else happens."""
        subprocess.run(
            [
                sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", self.address,
                "--node-id", node_id, "--reason", "DRAIN_NODE_REASON_PREEMPTION",
                "--reason-message", "wanted elsewhere", "--deadline-remaining-seconds", str(in_s),
            ],
            check=True, timeout=60,
        )  # fmt: skip

    def kill(self, node_id: str) -> None:
        """kill -9 a node with everything on it."""
        (node,) = [node for node in self.nodes if node.node_id == node_id]
        (raylet,) = node.all_processes["raylet"]
        for process in (
            *psutil.Process(raylet.process.pid).children(recursive=True),
            psutil.Process(raylet.process.pid),
        ):
            if process.is_running():
                process.kill()


@contextmanager
def machines(*cpus: int) -> Iterator[Machines]:
    """A cluster with a machine of so many CPUs each."""
    port = free_port()
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "include_dashboard": True, "dashboard_port": port, "object_store_memory": 10**8},
    )
    nodes = [cluster.add_node(num_cpus=count, object_store_memory=10**8) for count in cpus]
    cluster.wait_for_nodes()
    try:
        yield Machines(cluster, f"http://127.0.0.1:{port}", nodes)
    finally:
        cluster.shutdown()
