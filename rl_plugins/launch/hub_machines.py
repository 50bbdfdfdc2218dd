"""Models of the Hugging Face hub on the machines of a Ray cluster: one download on each, before any role starts.

A machine that joins later downloads when its first process needs the model.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rl_plugins.config.recipe import RecipeConfig
from rl_plugins.errors import ConfigError, DeadlineExceeded
from rl_plugins.hub import model_folder, model_name

_SAY_EVERY_S = 10.0
# A download that stands still ends long before: this deadline is for a machine that does not answer.
_DEADLINE_S = 6 * 3600.0


def fetch_on_machines(config: RecipeConfig, nodes: Sequence[Mapping[str, Any]]) -> None:
    """Download the models of the hub on each machine that runs processes with models. Ray must be initialized.

    Args:
        config: options of the run; the models have commits.
        nodes: Ray's description of each living machine.

    Raises:
        ConfigError: the hub does not give a file to a machine.
        DeadlineExceeded: a machine did not answer, or its download stands still.
    """
    names = sorted({path for path in config.model_paths.values() if model_name(path) is not None})
    kind = "GPU" if config.on_gpus else "CPU"
    places = {node["NodeID"]: node["NodeManagerAddress"] for node in nodes if node["Resources"].get(kind, 0)}
    if not names or not places:
        return
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    waiting: dict[Any, str] = {}
    for node, address in places.items():
        place = NodeAffinitySchedulingStrategy(node, soft=False)
        fetch: Any = ray.remote(_fetch).options(num_cpus=0, max_retries=0, scheduling_strategy=place)
        waiting[fetch.remote(names, config.model.trust_remote_code)] = address
    begun = time.monotonic()
    while waiting:
        done, _ = ray.wait(list(waiting), timeout=_SAY_EVERY_S)
        for task in done:
            address = waiting.pop(task)
            try:
                ray.get(task, timeout=_SAY_EVERY_S)
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, ConfigError):
                    raise ConfigError(f"machine {address}: {error.cause}") from None
                raise
        waited, machines = time.monotonic() - begun, ", ".join(sorted(waiting.values()))
        if waiting and waited > _DEADLINE_S:
            raise DeadlineExceeded(f"the run waited {waited:.0f} s for {machines} to download {', '.join(names)}")
        if waiting and not done:
            print(f"{config.run.name}: waiting for {', '.join(names)} on {machines}, {waited:.0f} s", flush=True)


def _fetch(names: Sequence[str], trust_remote_code: bool) -> None:
    for name in names:
        model_folder(name, trust_remote_code=trust_remote_code)
