"""VLLMRollout.prepare on pretended GPUs: each engine sees the GPUs of its ranks, also after a loss.

Ray counts GPUs that do not exist. Ranks and engines are real actors of Ray, but no actor computes: an engine reports
the GPUs that Ray shows. This module imports no heavy library, because every actor imports the module.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import ray

from rl_plugins.errors import EngineLost
from rl_plugins.rollout.vllm.gpu_binding import RankGPU, engine_places
from rl_plugins.tests.patience import patient
from rl_plugins.tests.time_limits import slowdown

if TYPE_CHECKING:
    from integration_tests.resident import RunningRay

RANKS, SIZE = 4, 2
NODES, GPUS = 8, 8
IN_RAY_S, PLACED_S, STARTED_S = patient(120), patient(5), patient(180)


class StandInEngine:
    """An actor in place of `VLLMActor`."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.in_session = False

    async def begin_session(self) -> None:
        assert not self.in_session, "a session drops the work of an engine that was not lost"
        self.in_session = True

    async def ready(self) -> str:
        return "stand-in"

    async def progress(self) -> int:
        return 0

    async def prompt_log_probs(self, prompt: list[int]) -> list[float]:
        """Reports the visible GPUs in place of log-probs."""
        if not self.in_session:
            raise EngineLost("the engine has no session")
        return [float(gpu) for gpu in os.environ["CUDA_VISIBLE_DEVICES"].split(",")]

    async def end(self) -> None:
        os._exit(1)


class Rank:
    """A training rank with a whole GPU."""

    def __init__(self, rank: int, meeting: str) -> None:
        import torch

        from rl_plugins.ranks import Ranks
        from rl_plugins.rollout.vllm import actor
        from rl_plugins.rollout.vllm.client import VLLMRollout
        from rl_plugins.rollout.vllm.config import VLLMConfig

        actor.VLLMActor = StandInEngine  # type: ignore[assignment, misc]
        torch.cuda.current_device = lambda: 0
        torch.cuda.mem_get_info = lambda device=None: (80, 80)
        torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
        self.ranks = Ranks(rank, RANKS, torch.device("cpu"))
        config = VLLMConfig("model", device="cuda", tensor_parallel_size=SIZE, generate_timeout_s=IN_RAY_S)
        self.rollout = VLLMRollout(config, name="engines")

    def prepare(self) -> tuple[str, list[float]]:
        """The GPU of this rank and the GPUs of its engine, after the start."""
        self.rollout.prepare(self.ranks)
        return os.environ["CUDA_VISIBLE_DEVICES"], self.rollout.prompt_log_probs([1, 2])

    def lose_engine(self, engine: int) -> tuple[int, int]:
        """The number of lost and of living engines, after the end of an engine's process."""
        fleet = self.rollout._fleet
        if self.ranks.rank == 0:
            fleet.actors[engine].end.remote()
        self.ranks.wait()
        if engine in fleet.engines_of_rank:
            with pytest.raises(EngineLost):
                while True:
                    self.rollout.prompt_log_probs([1, 2])
        return self.rollout.drop_lost_engines(), self.rollout.num_living

    def close(self) -> None:
        """End the use of the engines, as a strategy does at the end of `Trainer.fit` and `Trainer.validate`."""
        self.rollout.close()


@pytest.mark.integration
def test_prepare_starts_engines_on_the_gpus_of_ranks_and_again_after_a_loss_and_after_close(
    running_ray: RunningRay, tmp_path: Path
) -> None:
    ranks: list[Any] = [
        ray.remote(Rank).options(num_cpus=0, num_gpus=1).remote(rank, str(tmp_path / "meeting"))
        for rank in range(RANKS)
    ]

    def gpus() -> list[tuple[str, list[float]]]:
        found: list[tuple[str, list[float]]] = ray.get([rank.prepare.remote() for rank in ranks], timeout=IN_RAY_S)
        return found

    try:
        first = gpus()
        assert sorted(gpu for gpu, _ in first) == ["0", "1", "2", "3"]
        for rank, (_, of_engine) in enumerate(first):
            pair = first[rank - rank % SIZE : rank - rank % SIZE + SIZE]
            assert of_engine == [float(gpu) for gpu, _ in pair]
        assert ray.get([rank.lose_engine.remote(1) for rank in ranks], timeout=IN_RAY_S) == [(1, 1)] * RANKS
        assert gpus() == first
        ray.get([rank.close.remote() for rank in ranks], timeout=IN_RAY_S)
        assert gpus() == first
    finally:
        for actor in ranks:
            ray.kill(actor)


class Seen:
    """An actor in the place of a training worker or of an engine."""

    def gpus(self) -> list[RankGPU]:
        node = ray.get_runtime_context().get_node_id()
        return [RankGPU(node, gpu) for gpu in os.environ["CUDA_VISIBLE_DEVICES"].split(",")]


def in_order_of_ranks(workers: list[RankGPU]) -> list[RankGPU]:
    """Return the workers in the order in which Ray Train gives ranks to workers."""
    from ray.train.v2._internal.execution.worker_group.worker_group import WorkerGroup

    described: list[Any] = [
        SimpleNamespace(metadata=SimpleNamespace(node_id=own.node, accelerator_ids={"GPU": [own.gpu]}), own=own)
        for own in workers
    ]
    ordered: list[Any] = WorkerGroup._sort_workers_by_gpu_id_grouped_by_node(described)
    return [worker.own for worker in ordered]


@pytest.mark.extended
def test_engines_on_8_machines_of_8_gpus_see_the_gpus_that_ray_gives_to_their_ranks() -> None:
    from integration_tests.machines import machines
    from rl_plugins.launch.placement import WORKERS, alive_nodes, check_fit, reserved, roles_of
    from rl_plugins.tests.launch.configurations import configured

    config = configured(
        "grpo", "model.path=none", "placement.device=cuda", f"placement.num_workers={NODES * GPUS}",
        f"rollout.tensor_parallel_size={SIZE}",
    )  # fmt: skip
    roles = roles_of(config)
    workers = next(role for role in roles if role.name == WORKERS)

    def started(places: list[dict[str, Any]]) -> tuple[list[Any], list[list[RankGPU]]]:
        """The actors at the places, and the GPUs of each actor."""
        actors: list[Any] = []
        for place in places:
            variables = {"env_vars": place.pop("environment", {})}
            actors.append(ray.remote(Seen).options(runtime_env=variables, **place).remote())
        return actors, ray.get([actor.gpus.remote() for actor in actors], timeout=STARTED_S)

    def end(actors: list[Any]) -> None:
        for actor in actors:
            ray.kill(actor)

    with machines() as cluster:
        for _ in range(NODES):
            cluster.add(GPUS, GPUS)
        ray.init(cluster.address, log_to_driver=False)
        try:
            start = time.monotonic()
            check_fit(roles, [node["Resources"] for node in alive_nodes()], "the cluster")
            with reserved(roles, "run") as reservation:
                own = reservation.options(workers)
                placed_s = time.monotonic() - start
                training, gpus = started(own)
                ranks = in_order_of_ranks([gpu for (gpu,) in gpus])
                seen = []
                # One machine is enough for engines of one GPU. The workers end before these engines start, because
                # this machine has little memory.
                for size, of_ranks in ((SIZE, ranks), (1, ranks[:GPUS])):
                    engines, shown = started(engine_places(of_ranks, size))
                    seen.append((size, of_ranks, shown))
                    end(engines + training)
                    training = []
        finally:
            ray.shutdown()
    # Nine nodes of Ray share the cores of this machine.
    assert placed_s < PLACED_S * slowdown()
    assert len({rank.node for rank in ranks}) == NODES and len(set(ranks)) == NODES * GPUS
    for size, of_ranks, of_engines in seen:
        assert [len(shown) for shown in of_engines] == [size] * (len(of_ranks) // size)
        assert [gpu for shown in of_engines for gpu in shown] == of_ranks
