"""Roles of a run, the Ray resources of each role, and the placement groups to reserve the resources.

Ray would wait silently and forever for resources beyond the cluster's. Therefore the needed resources are
compared with the available resources, and are reserved within a deadline before any process starts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rl_plugins.config.placement import CRITIC_POOLS
from rl_plugins.config.precision import dtype_of_passes
from rl_plugins.config.recipe import RecipeConfig
from rl_plugins.config.rollout import default_ready_timeout_s
from rl_plugins.errors import ConfigError
from rl_plugins.models.pool_actor import PoolConfig
from rl_plugins.planning.layout import DECIMALS, ProcessBundle, role_without_place

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

WORKERS = "training workers"
ENGINES = "rollout engines"
JUDGES = "judge engines"
REWARD_WORKERS = "reward workers"
Resources = Mapping[str, float]
PlacedPool = tuple[PoolConfig, list[dict[str, Any]]]
"""Configuration of a pool, and Ray's options for each actor of the pool."""
_KINDS = ("CPU", "GPU")
# An earlier run, for example in this process, may still be releasing its resources.
_BUSY_S = 60.0
_SAY_EVERY_S = 10.0


@dataclass(frozen=True)
class Role:
    """Processes with the same task and the same resources.

    Attributes:
        name: name of the role.
        count: number of processes.
        cpus: Ray CPUs of one process.
        gpus: Ray GPUs of one process.
        strategy: placement strategy of Ray for the bundles; None for processes beside the training workers.
        options: options of the recipe for count and resources, for messages.
        shared_gpus: GPUs of training workers on one machine that each process also uses.
    """

    name: str
    count: int
    cpus: float
    gpus: float
    strategy: str | None
    options: str
    shared_gpus: int = 0

    @property
    def bundle(self) -> dict[str, float]:
        """Resources of one process."""
        amounts = {"CPU": self.cpus, "GPU": self.gpus}
        return {kind: amount for kind, amount in amounts.items() if amount}


def roles_of(config: RecipeConfig) -> list[Role]:
    """Return all roles of a run on Ray.

    Args:
        config: configuration of the run, with the device of the run.

    Raises:
        ConfigError: the GPUs of the placement cannot hold the rollout engines or the critic, or engines of a judge have
            no GPU.
    """
    placement, on_gpus = config.placement, config.on_gpus
    options = f"placement.num_workers={placement.num_workers}, placement.cpus_per_worker"
    gpus = 1.0 if on_gpus else 0.0
    roles = [Role(WORKERS, placement.num_workers, placement.cpus_per_worker, gpus, placement.strategy, options)]
    if config.needs_vllm:
        roles.append(_engines(config))
    for name, pool in config.placement.pools.items():
        options = f"placement.{name}.actors={pool.actors}, placement.{name}.cpus"
        options += f", placement.{name}.gpus" if on_gpus else ""
        if name in CRITIC_POOLS and on_gpus and pool.actors > 1 and 0 < pool.gpus < 1:
            raise ConfigError(
                f"placement.{name}.gpus={pool.gpus:g} cannot be used with placement.{name}.actors={pool.actors}, "
                "because several critic actors communicate with NCCL, and NCCL needs a whole GPU for each actor. "
                f"Set placement.{name}.gpus=1 or placement.{name}.actors=1"
            )
        roles.append(Role(name, pool.actors, pool.cpus, pool.gpus if on_gpus else 0.0, "PACK", options))
    if judge := config.placement.judge.actors:
        place = config.placement.judge
        options = f"placement.judge.actors={judge}, placement.judge.cpus"
        options += ", placement.judge.gpus" if on_gpus else ""
        if on_gpus and not place.gpus:
            raise ConfigError(
                "placement.judge.gpus=0: without a GPU of its own, an engine of the judge would use the GPU of a "
                "training worker. Set placement.judge.gpus=1, or more for a large model"
            )
        roles.append(Role(JUDGES, judge, place.cpus, place.gpus if on_gpus else 0.0, "PACK", options))
    if config.reward.gpus and config.scores:
        # Each training worker starts reward workers near itself.
        count, gpus = placement.num_workers * config.reward.num_workers, config.reward.gpus
        options = f"placement.num_workers={placement.num_workers}, reward.num_workers, reward.gpus"
        roles.append(Role(REWARD_WORKERS, count, 0.0, gpus, None, options))
    return roles


def _engines(config: RecipeConfig) -> Role:
    workers, engines, size = config.placement.num_workers, config.num_engines, config.rollout.tensor_parallel_size
    options = f"rollout.engines={config.rollout.engines}, rollout.tensor_parallel_size={size}"
    transport = "nccl" if config.placement.rollout == "split" else "ipc"
    if config.on_gpus and config.rollout.transport not in ("auto", transport):
        raise ConfigError(
            f"rollout.transport={config.rollout.transport}: with placement.rollout={config.placement.rollout}, weights "
            f"go from GPU to GPU by {transport}. Leave rollout.transport out, or change placement.rollout"
        )
    if not config.on_gpus and config.rollout.transport in ("ipc", "nccl"):
        raise ConfigError(
            f"rollout.transport={config.rollout.transport}: weights go from GPU to GPU, and the run is on CPU. "
            "Leave rollout.transport out, or set placement.device=cuda"
        )
    if config.placement.rollout == "split":
        cpus = config.placement.engine_cpus * (1 if config.on_gpus else size)
        return Role(ENGINES, engines, cpus, size if config.on_gpus else 0, "PACK", f"{options}, placement.engine_cpus")
    if config.on_gpus and engines * size != workers:
        raise ConfigError(
            f"{options}: with placement.rollout=colocated, every rollout engine shares the GPUs of "
            f"{size} of the {workers} training workers. Set rollout.engines=per_worker with a "
            "rollout.tensor_parallel_size that divides placement.num_workers, or set placement.rollout=split to give "
            "rollout engines their own GPUs"
        )
    return Role(ENGINES, engines, 0.0, 0.0, None, options, size if config.on_gpus else 0)


def table(roles: Sequence[Role], nodes: Sequence[Resources]) -> list[str]:
    """Return the lines of a table of the needed and the available resources."""
    rows: list[tuple[str, ...]] = [("placement", "count", "CPUs", "GPUs", "machines")]
    for role in roles:
        where = role.strategy or f"with the {WORKERS}"
        rows.append((role.name, str(role.count), f"{role.cpus:g}", f"{role.gpus:g}", where))
    for name, amounts in (("needed", needed(roles)), ("available", summed(nodes))):
        machines = f"{len(nodes)} in all" if name == "available" else ""
        rows.append((name, "", *(f"{amounts[kind]:g}" for kind in _KINDS), machines))
    width = max(len(row[0]) for row in rows)
    return [f"{row[0]:<{width}} {row[1]:>5} {row[2]:>5} {row[3]:>5}  {row[4]}".rstrip() for row in rows]


def needed(roles: Iterable[Role]) -> dict[str, float]:
    """Return the number of CPUs and GPUs that all roles need at least.

    A fraction of a GPU is always on one GPU, so a GPU has room for at most k fractions above 1 / (k + 1).
    """
    listed = list(roles)
    whole = sum(role.count * role.gpus for role in listed if role.gpus >= 1)
    shares = [role for role in listed if 0 < role.gpus < 1]
    bounds = [math.ceil(round(sum(role.count * role.gpus for role in shares), DECIMALS))]
    for k in {int(round(1 / role.gpus, DECIMALS)) for role in shares}:
        large = sum(role.count for role in shares if round(role.gpus * (k + 1), DECIMALS) > 1)
        bounds.append(math.ceil(large / k))
    return {"CPU": sum(role.count * role.cpus for role in listed), "GPU": whole + max(bounds)}


def summed(nodes: Iterable[Resources]) -> dict[str, float]:
    """Return the sum of the CPUs and GPUs of all machines."""
    listed = list(nodes)
    return {kind: sum(node.get(kind, 0.0) for node in listed) for kind in _KINDS}


def check_fit(roles: Sequence[Role], nodes: Sequence[Resources], where: str) -> None:
    """Check if some layout of the roles fits on these machines.

    Args:
        roles: roles of the run.
        nodes: all resources of each machine. Resources in use count as well.
        where: words for the machines, such as "the cluster".

    Raises:
        ConfigError: no layout fits. The message has the required and the available resources and the options to lower.
    """
    required, available = needed(roles), summed(nodes)
    for kind in _KINDS:
        if required[kind] > available[kind]:
            asking = [role for role in roles if role.bundle.get(kind)]
            parts = ", ".join(_part(role, kind) for role in asking)
            raise ConfigError(
                f"the placement needs {required[kind]:g} {kind}s ({parts}), but {where} has {available[kind]:g}. "
                f"Lower {'; '.join(role.options for role in asking)}; or use a larger cluster (RAY_ADDRESS), or wait "
                "for a cluster that grows (placement.wait_for_nodes_s)"
            )
    for role in roles:
        whole = {kind: amount for kind, amount in needed([role]).items() if amount}
        alone = whole if role.strategy == "STRICT_PACK" else role.bundle
        if alone and not any(all(node.get(kind, 0.0) >= amount for kind, amount in alone.items()) for node in nodes):
            raise ConfigError(
                f"{role.name}: {_words(alone)} must be on one machine, but no machine of {where} is large enough. "
                f"Lower {role.options}"
            )
        amounts, options = role.bundle, role.options
        if role.shared_gpus:
            amounts, options = {"GPU": float(role.shared_gpus)}, "rollout.tensor_parallel_size"
        room = sum(_room(node, amounts, role.count) for node in nodes)
        if room < role.count:
            raise ConfigError(
                f"{role.count} {role.name} with {_words(amounts)} of one machine each: the machines of {where} have "
                f"room for {room}. Lower {options}"
            )
        # The head of a cluster may have no CPUs for workers.
        usable = sum(_room(node, role.bundle, 1) for node in nodes)
        if role.strategy == "STRICT_SPREAD" and role.count > usable:
            raise ConfigError(
                f"placement.strategy=STRICT_SPREAD needs a separate machine for each of the {role.count} {role.name}, "
                f"but {where} has {usable} with {_words(role.bundle)}. Lower placement.num_workers, or set "
                "placement.strategy=SPREAD"
            )

    if (crowded := role_without_place(list(_bundles(roles)), nodes)) is not None:
        (role,) = (role for role in roles if role.name == crowded)
        others = [other for other in roles if other.bundle and other != role]
        beside = ", ".join(f"{other.name} {other.count} x {_words(other.bundle)}" for other in others)
        place = f"place for all of them beside {beside}" if others else "place for all of them"
        # An engine over several GPUs keeps workers on one machine, so its size counts as well.
        asking = [role for role in roles if role.bundle or role.shared_gpus > 1]
        raise ConfigError(
            f"{role.name} {role.count} x {_words(role.bundle)}: the machines of {where} have no {place}. Lower "
            f"{'; '.join(role.options for role in asking)}; or use larger machines"
        )


def _bundles(roles: Sequence[Role]) -> Iterator[ProcessBundle]:
    """Yield the processes of all roles with resources of their own, each time those of one machine."""
    sharing = max((role.shared_gpus for role in roles), default=0)
    for role in roles:
        together = 1
        if role.strategy == "STRICT_PACK":
            together = role.count
        elif role.name == WORKERS and role.strategy != "STRICT_SPREAD":
            # An engine over several GPUs shares the GPUs of workers on one machine.
            together = sharing or 1
        bundle = ProcessBundle(role.name, role.cpus * together, role.gpus, together, role.strategy == "STRICT_SPREAD")
        yield from [bundle] * (role.count // together if role.bundle else 0)


def _room(node: Resources, amounts: Resources, most: int) -> int:
    """Return the number of processes for which a machine has room, at most `most`. A planned machine has endless CPUs.

    Args:
        node: resources of the machine.
        amounts: resources of one process.
        most: largest result.
    """
    return int(min([most, *(round(node.get(kind, 0.0) / amount, DECIMALS) for kind, amount in amounts.items())]))


def _part(role: Role, kind: str) -> str:
    gpus = needed([role])["GPU"]
    apart = f" on {gpus:g} GPUs" if kind == "GPU" and gpus - role.count * role.gpus >= 1 else ""
    return f"{role.name} {role.count} x {role.bundle[kind]:g}{apart}"


def _words(bundle: Resources) -> str:
    return " and ".join(f"{amount:g} {kind}s" for kind, amount in bundle.items())


class Reservation:
    """Placement groups of a run: one for each role with its own resources.

    Args:
        groups: placement group of each role by the name of the role.
    """

    def __init__(self, groups: dict[str, PlacementGroup]) -> None:
        self._groups = groups

    def wait(self, role: Role, run: str, start: float, deadline_s: float) -> None:
        """Wait until the resources of a role are reserved. Print a line every ten seconds.

        Args:
            role: role to wait for.
            run: name of the run, for messages.
            start: start of the wait by `time.monotonic`.
            deadline_s: longest wait in seconds.

        Raises:
            ConfigError: the resources were not free within the deadline.
        """
        import ray

        group = self._groups.get(role.name)
        while group is not None:
            left = deadline_s - (time.monotonic() - start)
            if group.wait(min(_SAY_EVERY_S, max(left, 0.1))):
                return
            free = ray.available_resources()
            there = ", ".join(f"{free.get(kind, 0.0):g} {kind}s" for kind in role.bundle)
            waited, wanted = time.monotonic() - start, f"{role.count} x {_words(role.bundle)} for the {role.name}"
            if waited >= deadline_s:
                raise ConfigError(
                    f"waited {waited:.0f} s for {wanted}, but the cluster has only {there} free. Lower {role.options}, "
                    "wait until other jobs have ended, or wait longer for new machines (placement.wait_for_nodes_s)"
                )
            print(f"{run}: waiting for {wanted}, {waited:.0f} of {deadline_s:.0f} s; free now: {there}", flush=True)

    def options(self, role: Role) -> list[dict[str, Any]]:
        """Return Ray's options for each actor of a role: the whole bundle of the actor."""
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
        """Release the placement group of a role."""
        from ray.util import remove_placement_group

        remove_placement_group(self._groups.pop(role))

    def release_all(self) -> None:
        """Release all placement groups. Ray ends the processes in the groups."""
        for role in list(self._groups):
            self.release(role)


@contextmanager
def reserved(roles: Sequence[Role], run: str, wait_for_nodes_s: float = 0.0) -> Iterator[Reservation]:
    """Reserve a placement group for every role with its own resources, and release all groups at the end.

    The caller releases the groups of training workers and of reward workers earlier: Ray Train makes its own group, and
    each training worker starts reward workers near itself.

    Args:
        roles: roles of the run.
        run: name of the run, for messages.
        wait_for_nodes_s: longest wait for new machines in seconds.

    Raises:
        ConfigError: the resources were not free within the deadline.
    """
    from ray.util import placement_group

    reservation = Reservation(
        {
            # Processes beside the training workers need room in the cluster, too.
            role.name: placement_group([role.bundle] * role.count, role.strategy or "PACK", name=f"{run}: {role.name}")
            for role in roles
            if role.bundle
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
    """Return Ray's description of each living machine of the cluster with CPUs."""
    import ray

    return [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]


def weight_transport(transport: str, device: str, *, split: bool, hosts: int) -> str:
    """Return the transport of weights for a value of `rollout.transport` on these machines.

    Args:
        transport: value of the option.
        device: `cpu` or `cuda`.
        split: True if rollout engines have their own devices.
        hosts: number of machines of the cluster.

    Raises:
        ConfigError: shared memory is configured for a cluster of several machines.
    """
    if transport == "shared_memory" and hosts > 1:
        raise ConfigError(
            "rollout.transport=shared_memory needs the rollout engines and the training workers on one machine, but "
            f"the cluster has {hosts} machines. Set rollout.transport=gloo or rollout.transport=auto"
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
        config: configuration of the run.
        machines: largest number of machines of the workers and the engines.
    """
    placement = config.placement
    if placement.rollout == "split":
        return max(1, int(placement.engine_cpus))
    if config.schedule.max_staleness and config.rollout_sleep == "none":
        # The workers train meanwhile.
        return 1
    cores = math.ceil(placement.num_workers / machines) * placement.cpus_per_worker
    processes = math.ceil(config.num_engines / machines) * config.rollout.tensor_parallel_size
    return max(1, int(cores / processes))


def placed_pools(config: RecipeConfig, roles: list[Role], places: Reservation) -> dict[str, PlacedPool]:
    """Return each pool by role, with Ray's options for the reserved resources."""
    by_name = {role.name: role for role in roles}
    pools = pool_configs(config, {role.name: bool(role.gpus) for role in roles})
    return {pool.role: (pool, places.options(by_name[pool.role])) for pool in pools}


def pool_configs(config: RecipeConfig, on_gpu: dict[str, bool]) -> list[PoolConfig]:
    """Return the configuration of each pool.

    Args:
        config: configuration of the run.
        on_gpu: for each role, true if the actors of the role have GPUs.
    """
    models = {
        "reward_model": config.reward_model.path,
        "cost_model": config.cost_model.path,
        "teacher": config.teacher.path,
        "reference": config.reference.path or config.model.path,
        **{critic: getattr(config, critic).path or config.model.path for critic in CRITIC_POOLS},
    }
    return [
        PoolConfig(
            role=role,
            model=str(models[role]),
            head="causal_lm" if role in ("teacher", "reference") else "scalar",
            dtype=dtype_of_passes(config.precision),
            attention=config.model.attention,
            trust_remote_code=config.model.trust_remote_code,
            actors=options.actors,
            device="cuda" if on_gpu[role] else "cpu",
            threads=max(1, int(options.cpus)),
            ready_timeout_s=options.start_timeout_s or default_ready_timeout_s(on_gpus=on_gpu[role]),
            call_timeout_s=options.deadline_s,
        )
        for role, options in config.placement.pools.items()
    ]
