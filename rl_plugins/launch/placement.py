"""Who runs where: what each role asks of Ray, whether there is so much, and the placement groups that hold it.

Ray would wait for ever, and without a word, for what never comes. So what is needed is compared with what is there, and
all of it is reserved before anything starts, within a deadline.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rl_plugins.config.recipe import RecipeConfig
from rl_plugins.errors import ConfigError

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

WORKERS = "training workers"
ENGINES = "rollout engines"
Resources = Mapping[str, float]
_KINDS = ("CPU", "GPU")
# To which Ray counts.
_DECIMALS = 4
# Others may be about to give back what they use, such as an earlier run in this process.
_BUSY_S = 60.0
_SAY_EVERY_S = 10.0


@dataclass(frozen=True)
class Role:
    """Processes that are alike.

    Attributes:
        name: of the role.
        count: how many there are.
        cpus: Ray CPUs of each.
        gpus: Ray GPUs of each.
        strategy: how Ray lays their bundles over machines; None for processes that share the training workers' place.
        options: that say how much it is.
    """

    name: str
    count: int
    cpus: float
    gpus: float
    strategy: str | None
    options: str

    @property
    def bundle(self) -> dict[str, float]:
        """What one of them takes."""
        amounts = {"CPU": self.cpus, "GPU": self.gpus}
        return {kind: amount for kind, amount in amounts.items() if amount}


def roles_of(config: RecipeConfig, device: str) -> list[Role]:
    """Every role of a run on Ray.

    Args:
        config: the run's.
        device: `cpu` or `cuda`.

    Raises:
        ConfigError: engines that the placement cannot have.
    """
    placement, on_gpus = config.placement, device == "cuda"
    options = f"placement.num_workers={placement.num_workers}, placement.cpus_per_worker"
    options += ", placement.gpus_per_worker" if on_gpus else ""
    gpus = placement.gpus_per_worker if on_gpus else 0.0
    roles = [Role(WORKERS, placement.num_workers, placement.cpus_per_worker, gpus, placement.strategy, options)]
    if config.rollout.engine == "vllm" and config.needs_engine:
        roles.append(_engines(config, on_gpus))
    for name, pool in config.placement.pools.items():
        options = f"placement.{name}.actors={pool.actors}, placement.{name}.cpus"
        options += f", placement.{name}.gpus" if on_gpus else ""
        if name == "critic" and on_gpus and pool.actors > 1 and 0 < pool.gpus < 1:
            raise ConfigError(
                f"placement.critic.actors={pool.actors}, placement.critic.gpus={pool.gpus:g}: processes that learn "
                "together need a GPU each (NCCL): use placement.critic.gpus=1, or placement.critic.actors=1"
            )
        roles.append(Role(name, pool.actors, pool.cpus, pool.gpus if on_gpus else 0.0, "PACK", options))
    return roles


def _engines(config: RecipeConfig, on_gpus: bool) -> Role:
    engines, size = config.num_engines, config.rollout.tensor_parallel_size
    options = f"rollout.engines={config.rollout.engines}, rollout.tensor_parallel_size={size}"
    if config.placement.rollout == "split":
        cpus = config.placement.engine_cpus * (1 if on_gpus else size)
        return Role(ENGINES, engines, cpus, size if on_gpus else 0, "PACK", f"{options}, placement.engine_cpus")
    if on_gpus and (engines > 1 or size > 1):
        raise ConfigError(
            f"{options}: an engine that shares the training workers' GPUs is one on one GPU: add "
            "placement.rollout=split for engines with GPUs of their own"
        )
    gpus = config.placement.engine_gpus if on_gpus else 0.0
    return Role(ENGINES, engines, 0.0, gpus, None, f"{options}, placement.engine_gpus")


def table(roles: Sequence[Role], nodes: Sequence[Resources]) -> list[str]:
    """What is needed against what is there, for people."""
    rows: list[tuple[str, ...]] = [("placement", "count", "CPUs", "GPUs", "machines")]
    for role in roles:
        where = role.strategy or f"with the {WORKERS}"
        rows.append((role.name, str(role.count), f"{role.cpus:g}", f"{role.gpus:g}", where))
    for name, amounts in (("needed", needed(roles)), ("there is", summed(nodes))):
        machines = f"{len(nodes)} in all" if name == "there is" else ""
        rows.append((name, "", *(f"{amounts[kind]:g}" for kind in _KINDS), machines))
    width = max(len(row[0]) for row in rows)
    return [f"{row[0]:<{width}} {row[1]:>5} {row[2]:>5} {row[3]:>5}  {row[4]}".rstrip() for row in rows]


def needed(roles: Iterable[Role]) -> dict[str, float]:
    """CPUs and GPUs of all roles, at least: shares of a GPU lie on one, and two of more than a half on two."""
    listed = list(roles)
    whole = sum(role.count * role.gpus for role in listed if role.gpus >= 1)
    shares = [role for role in listed if 0 < role.gpus < 1]
    together = math.ceil(round(sum(role.count * role.gpus for role in shares), _DECIMALS))
    alone = sum(role.count for role in shares if role.gpus > 0.5)
    return {"CPU": sum(role.count * role.cpus for role in listed), "GPU": whole + max(together, alone)}


def summed(nodes: Iterable[Resources]) -> dict[str, float]:
    """CPUs and GPUs of all machines."""
    listed = list(nodes)
    return {kind: sum(node.get(kind, 0.0) for node in listed) for kind in _KINDS}


def check_fit(roles: Sequence[Role], nodes: Sequence[Resources], where: str) -> None:
    """Refuse what cannot be placed on these machines, however it is laid out.

    Args:
        roles: what is needed.
        nodes: what each machine has, whoever uses it now.
        where: the machines, in words.

    Raises:
        ConfigError: says required and available, and which options to lower.
    """
    required, available = needed(roles), summed(nodes)
    for kind in _KINDS:
        if required[kind] > available[kind]:
            asking = [role for role in roles if role.bundle.get(kind)]
            parts = ", ".join(_part(role, kind) for role in asking)
            raise ConfigError(
                f"the placement needs {required[kind]:g} {kind}s ({parts}), {where} has {available[kind]:g}: "
                f"lower {'; '.join(role.options for role in asking)}; or use a larger cluster (RAY_ADDRESS), or one "
                "that grows (placement.wait_for_nodes_s)"
            )
    for role in roles:
        whole = {kind: amount for kind, amount in needed([role]).items() if amount}
        alone = whole if role.strategy == "STRICT_PACK" else role.bundle
        if alone and not any(all(node.get(kind, 0.0) >= amount for kind, amount in alone.items()) for node in nodes):
            raise ConfigError(
                f"{role.name}: {_words(alone)} must be on one machine, and no machine of {where} has so much: "
                f"lower {role.options}"
            )
        if role.strategy == "STRICT_SPREAD" and role.count > len(nodes):
            raise ConfigError(
                f"{role.name}: {role.count} of them must be on machines of their own, and {where} has {len(nodes)}: "
                "lower placement.num_workers, or use placement.strategy=SPREAD"
            )


def _part(role: Role, kind: str) -> str:
    apart = f" on {role.count} GPUs" if kind == "GPU" and role.count > 1 and 0.5 < role.gpus < 1 else ""
    return f"{role.name} {role.count} x {role.bundle[kind]:g}{apart}"


def _words(bundle: Resources) -> str:
    return " and ".join(f"{amount:g} {kind}s" for kind, amount in bundle.items())


class Reservation:
    """The placement groups of a run, one for each role that has a place of its own.

    Args:
        groups: role to its group.
    """

    def __init__(self, groups: dict[str, PlacementGroup]) -> None:
        self._groups = groups

    def wait(self, role: Role, run: str, start: float, deadline_s: float) -> None:
        """Wait for the place of a role, and say so while it lasts.

        Args:
            role: which.
            run: name of the run.
            start: since when, by `time.monotonic`.
            deadline_s: how long.

        Raises:
            ConfigError: it did not come in time.
        """
        import ray

        group = self._groups.get(role.name)
        while group is not None:
            left = deadline_s - (time.monotonic() - start)
            if group.wait(min(_SAY_EVERY_S, max(left, 0.1))):
                return
            free = ray.available_resources()
            there = ", ".join(f"{free.get(kind, 0.0):g} {kind}s" for kind in role.bundle)
            waited, what = time.monotonic() - start, f"{role.count} x {_words(role.bundle)} for the {role.name}"
            if waited >= deadline_s:
                raise ConfigError(
                    f"waited {waited:.0f} s for {what}: free in the cluster is {there}: lower {role.options}, wait "
                    "until others have ended, or longer for new machines (placement.wait_for_nodes_s)"
                )
            print(f"{run}: waiting for {what}, {waited:.0f} of {deadline_s:.0f} s; free now: {there}", flush=True)

    def options(self, role: Role) -> list[dict[str, Any]]:
        """Ray's options for each actor of a role: its bundle, and all that is in it."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        own = {"num_cpus": role.cpus, "num_gpus": role.gpus}
        group = self._groups.get(role.name)
        if group is None:
            return [own] * role.count
        return [
            {**own, "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)}
            for number in range(role.count)
        ]

    def release(self, role: str) -> None:
        """Give back what is held for a role."""
        from ray.util import remove_placement_group

        remove_placement_group(self._groups.pop(role))

    def release_all(self) -> None:
        """Give all back; what runs there ends."""
        for role in list(self._groups):
            self.release(role)


@contextmanager
def reserved(roles: Sequence[Role], run: str, wait_for_nodes_s: float = 0.0) -> Iterator[Reservation]:
    """Hold a placement group for every role with a place of its own; the training workers' until Ray Train makes it.

    Args:
        roles: of the run.
        run: its name, for messages.
        wait_for_nodes_s: how long a cluster that grows may take.

    Raises:
        ConfigError: the resources did not come in time.
    """
    from ray.util import placement_group

    reservation = Reservation(
        {
            role.name: placement_group([role.bundle] * role.count, role.strategy, name=f"{run}: {role.name}")
            for role in roles
            if role.strategy is not None and role.bundle
        }
    )
    deadline_s, start = max(wait_for_nodes_s, _BUSY_S), time.monotonic()
    try:
        for role in roles:
            reservation.wait(role, run, start, deadline_s)
        yield reservation
    finally:
        reservation.release_all()


def alive_nodes() -> list[dict[str, Any]]:
    """Ray's description of each machine of the cluster that can run something."""
    import ray

    return [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]


def weight_transport(transport: str, device: str, *, split: bool, hosts: int) -> str:
    """The transport of weights that `rollout.transport` means on these machines.

    Args:
        transport: the option.
        device: `cpu` or `cuda`.
        split: engines have devices of their own.
        hosts: how many machines the cluster has.

    Raises:
        ConfigError: shared memory between machines.
    """
    if transport == "shared_memory" and hosts > 1:
        raise ConfigError(
            f"rollout.transport=shared_memory: engines and training workers must be on one machine, and the cluster "
            f"has {hosts}: use rollout.transport=gloo, or auto"
        )
    if transport != "auto":
        return transport
    if device == "cuda":
        return "nccl" if split else "ipc"
    return "shared_memory" if hosts == 1 else "gloo"


def engine_threads(config: RecipeConfig, machines: int) -> int:
    """Return the threads of each process of an engine on CPU.

    An engine with its own cores uses these cores, and a colocated engine the cores of the workers, which wait while the
    engine samples.

    Args:
        config: Configuration of the run.
        machines: Largest number of machines of the workers and the engines.
    """
    placement = config.placement
    if placement.rollout == "split":
        return max(1, int(placement.engine_cpus))
    if config.schedule.max_staleness:
        # The workers train meanwhile.
        return 1
    cores = math.ceil(placement.num_workers / machines) * placement.cpus_per_worker
    processes = math.ceil(config.num_engines / machines) * config.rollout.tensor_parallel_size
    return max(1, int(cores / processes))
