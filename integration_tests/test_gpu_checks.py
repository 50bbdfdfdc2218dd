"""check_nodes on a machine of Ray with pretended GPUs: a task reads the facts on the machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rl_plugins.config.recipe import RecipeConfig
from rl_plugins.errors import ConfigError
from rl_plugins.launch import gpu_checks
from rl_plugins.launch.gpu_checks import check_nodes
from rl_plugins.launch.gpus import GpuMachine, read_machine
from rl_plugins.launch.placement import alive_nodes

pytestmark = pytest.mark.usefixtures("running_ray")


def lasting_facts(machine: GpuMachine) -> GpuMachine:
    """Return the facts without the free memory of the GPUs, which changes with other processes."""
    return replace(machine, gpus=tuple(replace(gpu, free_mib=0) for gpu in machine.gpus))


def test_check_nodes_reads_the_facts_of_a_node_in_a_task_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    # Ray has started without the variable, and `make` hides the GPUs of this machine from this process.
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (node,) = alive_nodes()
    where = f"machine {node['NodeManagerAddress']}"
    assert lasting_facts(gpu_checks._read_node(node["NodeID"], where)) == lasting_facts(read_machine())
    # No machine has so many GPUs, and a machine without GPUs has other faults.
    with pytest.raises(ConfigError, match=rf"^{where}: "):
        check_nodes(RecipeConfig(stage="policy_optimization"), [{**node, "Resources": {"GPU": 1000.0}}])
