"""A Ray cluster of several machines, all on this machine."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import pytest
from ray.cluster_utils import Cluster
from ray.util.state import list_actors

from integration_tests.ray_workers import descendants
from integration_tests.worker_start.sitecustomize import VARIABLE
from rl_plugins.addresses import free_port
from rl_plugins.tests.patience import patient

_OBJECT_STORE_BYTES = 10**8


class Machines:
    """A head node without CPUs, and nodes added and removed by the test."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._nodes: dict[str, Any] = {}
        self._leaving: set[str] = set()

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    @property
    def dashboard(self) -> str:
        return f"http://{self._cluster.webui_url}"

    def resize(self, *cpus: int) -> None:
        """Add and remove nodes until the cluster has exactly one node for each given number of CPUs."""
        missing = Counter(cpus)
        for node_id, node in list(self._nodes.items()):
            count = int(node._ray_params.num_cpus)
            if missing[count] and node_id not in self._leaving:
                missing[count] -= 1
            else:
                self._cluster.remove_node(self._nodes.pop(node_id))
        for count in missing.elements():
            self.add(count)
        self._cluster.wait_for_nodes(patient(60))

    def add(self, cpus: int, gpus: int = 0) -> None:
        """Add a node. The GPUs of the node need not exist."""
        with pytest.MonkeyPatch.context() as patch:
            if gpus:
                # Ray refuses more GPUs than the variable shows.
                patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
            node = self._cluster.add_node(num_cpus=cpus, num_gpus=gpus, object_store_memory=_OBJECT_STORE_BYTES)
        self._nodes[node.node_id] = node

    def actors(self, wanted: Callable[[Any], bool]) -> list[Any]:
        """Return the living actors from Ray's state."""
        listed = list_actors(self.dashboard, filters=[("state", "=", "ALIVE")], limit=1000, detail=True)
        return [actor for actor in listed if wanted(actor)]

    def places_of(self, class_name: str) -> list[str]:
        """Return the ids of the nodes with actors of a class, one id for each actor."""
        return sorted(actor.node_id for actor in self.actors(lambda actor: class_name in actor.class_name))

    def announce_loss(self, node_id: str, in_s: int) -> None:
        """Announce the end of a node, as clouds do with cheap machines. The node still runs afterwards."""
        self._leaving.add(node_id)
        subprocess.run(
            [
                sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", self.address,
                "--node-id", node_id, "--reason", "DRAIN_NODE_REASON_PREEMPTION",
                "--reason-message", "wanted elsewhere", "--deadline-remaining-seconds", str(in_s),
            ],
            check=True, timeout=patient(120),
        )  # fmt: skip

    def kill(self, node_id: str) -> None:
        """Kill all processes of a node with SIGKILL."""
        node = self._nodes.pop(node_id)
        (raylet,) = node.all_processes["raylet"]
        for process in (*descendants(raylet.process.pid), psutil.Process(raylet.process.pid)):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._cluster.remove_node(node, allow_graceful=False)


@contextmanager
def machines(new_interpreters: bool = False) -> Iterator[Machines]:
    """Start a cluster with a head node alone.

    Args:
        new_interpreters: start a new interpreter for each worker, and not a fork with imported libraries.
    """
    with pytest.MonkeyPatch.context() as patch:
        if new_interpreters:
            patch.setenv(VARIABLE, "")
        with _cluster() as running:
            yield running


@contextmanager
def _cluster() -> Iterator[Machines]:
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 0,
            "include_dashboard": True,
            # Without ports, Ray would take 8265 and 52365, which another Ray of this machine may have.
            "dashboard_port": free_port("127.0.0.1"),
            "dashboard_agent_listen_port": free_port("127.0.0.1"),
            "object_store_memory": _OBJECT_STORE_BYTES,
        },
    )
    try:
        yield Machines(cluster)
    finally:
        cluster.shutdown()
