"""Reward workers as actors of Ray. They reserve no CPU, and import no heavy library beside Ray."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rl_plugins.errors import user_errors_of_tasks
from rl_plugins.rewards.records import Score, ScoringRequest
from rl_plugins.rewards.worker import LoadedRewards, RewardWorker, WorkerLost

_FETCH_S = 60.0
_MACHINE_LOST = "its node has died"
"""Words in the error of an actor whose machine ended, and is known to have ended."""


class RayWorker(RewardWorker):
    """Actor on the machine of this process."""

    def launch(self) -> None:
        """Start an actor, which then loads the rewards."""
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        actor_class: Any = ray.remote(LoadedRewards)
        # Without a GPU of its own, a worker would see the GPUs of this process or of the machine.
        no_gpus = {} if self.task.gpus else {"CUDA_VISIBLE_DEVICES": ""}
        self._actor = actor_class.options(
            num_cpus=0,
            num_gpus=self.task.gpus,
            max_restarts=0,
            scheduling_strategy=here,
            runtime_env={"env_vars": no_gpus},
        ).remote()
        self._result = self._actor.load.remote(self.task)

    def submit(self, requests: Sequence[ScoringRequest], deadline_s: float) -> None:
        """Send requests to the actor."""
        self._result = self._actor.score.remote(list(requests), deadline_s)

    @staticmethod
    def wait(workers: Sequence[RayWorker], timeout_s: float) -> list[RayWorker]:
        """Return a worker with a result, or nothing."""
        by_result = {worker._result: worker for worker in workers}
        done, _ = ray.wait(list(by_result), num_returns=1, timeout=timeout_s)
        return [by_result[result] for result in done]

    def take(self) -> list[Score | None]:
        """Return the result of the actor."""
        try:
            with user_errors_of_tasks():
                return ray.get(self._result, timeout=_FETCH_S) or []
        except ray.exceptions.GetTimeoutError:
            raise WorkerLost(f"the scores did not arrive within {_FETCH_S:g} s") from None
        except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError) as error:
            reason = " ".join(str(error).split())
            unreachable = isinstance(error, ray.exceptions.ActorUnavailableError)
            raise WorkerLost(reason, machine_lost=unreachable or _MACHINE_LOST in reason) from None

    def kill(self) -> None:
        """End the actor."""
        ray.kill(self._actor, no_restart=True)
