"""Flags, objects and waits of ranks on GPUs: over a group of the hosts, not in kernels of NCCL."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import distributed
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh

from rl_plugins import ranks
from rl_plugins.addresses import GLOO_INTERFACE, NCCL_INTERFACE
from rl_plugins.tests.patience import patient
from rl_plugins.tests.ranks import run_ranks

TIMEOUT = timedelta(seconds=patient(60))


def deadlines_of_a_mesh(_: int) -> list[timedelta]:
    """Return the deadline of a group of gloo in a mesh, and of groups of NCCL."""
    with ExitStack() as stack:
        for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
            stack.enter_context(patch.object(distributed_c10d, name, timedelta(hours=1)))
        ranks.set_default_deadline(None)
        assert distributed_c10d.default_pg_timeout == timedelta(hours=1)
        ranks.set_default_deadline(TIMEOUT)
        group: Any = init_device_mesh("cpu", (1, 2), mesh_dim_names=("copies", "shards")).get_group("copies")
        of_gloo = group._get_backend(torch.device("cpu")).options._timeout
        return [of_gloo, distributed_c10d._get_default_timeout(distributed.Backend("nccl"))]


def test_groups_of_a_mesh_have_the_deadline_of_the_strategy() -> None:
    assert [found for found, _ in run_ranks(deadlines_of_a_mesh, world_size=2)] == [[TIMEOUT, TIMEOUT]] * 2


def communicate(rank: int, backend: str) -> tuple[list[Any], list[bool], int]:
    """Results of all calls, True for each collective over the default group, and the number of new groups.

    A device that does not exist stands for a GPU, so a collective cannot take a tensor of the rank.
    """
    over_default: list[bool] = []
    made: list[Any] = []

    def noting(collective: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, group: Any = None, **options: Any) -> Any:
            over_default.append(group is None)
            return collective(*arguments, group=group, **options)

        return run

    def new_group(**options: Any) -> Any:
        made.append(options)
        return group_of(**options)

    group_of = distributed.new_group
    with ExitStack() as stack:
        for name in ("all_reduce", "all_gather_object", "broadcast_object_list", "barrier"):
            stack.enter_context(patch.object(distributed, name, noting(getattr(distributed, name))))
        stack.enter_context(patch.object(distributed, "new_group", new_group))
        stack.enter_context(patch.object(distributed, "get_backend", lambda group=None: backend))
        stack.enter_context(patch.object(ranks, "_hosts", None))
        stack.enter_context(patch.dict(os.environ, {NCCL_INTERFACE: "=lo", GLOO_INTERFACE: ""}))
        device = torch.device("cpu" if backend == "gloo" else "cuda")
        for _ in range(2):
            own = ranks.connected_ranks(rank, 2, device, TIMEOUT)
        assert all(options == {"backend": "gloo", "timeout": TIMEOUT} for options in made)
        results = [own.any(rank == 1), own.any(False), own.gather(rank), ranks.gather(rank), ranks.broadcast(rank)]
        own.wait()
        ranks.barrier()
        # The group of the hosts has the interface of NCCL.
        assert os.environ[GLOO_INTERFACE] == ("lo" if made else "")
        return results, over_default, len(made)


@pytest.mark.parametrize(("backend", "new_groups"), [("nccl", 1), ("gloo", 0)])
def test_ranks_on_gpus_communicate_flags_and_objects_between_the_hosts(backend: str, new_groups: int) -> None:
    for (results, over_default, made), _ in run_ranks(communicate, backend):
        assert results == [True, False, [0, 1], [0, 1], 0]
        assert over_default == [new_groups == 0] * 7 and made == new_groups
