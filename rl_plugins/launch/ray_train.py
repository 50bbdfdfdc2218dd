"""Launcher `ray`: Ray Train runs the training workers, and Ray actors run the rollout engines.

Ray Train restarts a failed worker group from the last checkpoint. The run uses the cluster of RAY_ADDRESS, or starts
Ray on this machine.
"""

from __future__ import annotations

import math
import os
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from rl_plugins.config.checks import check_device
from rl_plugins.config.judge import ENGINE_KEY
from rl_plugins.config.placement import CRITIC_POOLS
from rl_plugins.config.recipe import RecipeConfig, write_config
from rl_plugins.errors import DeadlineExceeded
from rl_plugins.garbage_collection import garbage_collector_off
from rl_plugins.launch.cluster import JOB_FOLDERS, join_cluster, variables_of_job
from rl_plugins.launch.fetch import fetch_on_machines
from rl_plugins.launch.gpu_checks import check_nodes
from rl_plugins.launch.gpus import local_gpus
from rl_plugins.launch.own_ray import LEAST_BYTES, object_store_bytes, set_own_ray_up, start_own_ray
from rl_plugins.launch.placement import (
    ENGINES,
    JUDGES,
    REWARD_WORKERS,
    WORKERS,
    PlacedPool,
    Reservation,
    Role,
    alive_nodes,
    check_fit,
    placed_pools,
    reserved,
    roles_of,
    table,
)
from rl_plugins.launch.rollout_engines import transformers_rollout, vllm_rollout
from rl_plugins.launch.terminal import redraw_interval_s
from rl_plugins.models.pool_actor import PoolConfig, start_pool
from rl_plugins.rewards.judge_engine import JudgeEngineConfig, addresses_of, start_judge_engines
from rl_plugins.run_folder import RunFolder
from rl_plugins.signals import handlers_kept, stop_on_signals

if TYPE_CHECKING:
    from ray.train.torch import TorchTrainer

    from rl_plugins.launch.training import TrainingRun
    from rl_plugins.rollout.engine import RolloutEngine
    from rl_plugins.rollout.vllm.client import VLLMRollout
    from rl_plugins.strategies.ray import RayFSDPStrategy, RayZeroStrategy

_KEY_BYTES = 16
_UNPACK_TIMEOUT_S = 60.0
_NO_SERVER = "http://127.0.0.1:9"
"""Address where nothing listens: port 9 belongs to a protocol without use."""
# Ray Train counts a failure when the workers have no resources for this time.
_ATTEMPT_S = 60


def train_on_ray(config: RecipeConfig, folder: RunFolder) -> None:
    """Train with the launcher `ray`.

    Raises:
        ConfigError: the cluster has fewer CPUs or GPUs than the placement needs, has GPUs that the run cannot use, or a
            worker raised a `ConfigError`.
        RuntimeError: training failed more often than `placement.max_restarts` allows.
    """
    if not os.environ.get("RAY_ADDRESS"):
        set_own_ray_up()
    import ray

    started_in = Path.cwd()
    device = resolve_device(config)
    check_device(config, device)
    config.set_device(device)
    # Again, with the device in place of `auto`.
    write_config(config, folder.config)
    environment = worker_environment(config.placement.device)
    os.environ.update(environment)
    # Ray would draw the finished progress bar again around every later line.
    os.environ.setdefault("RAY_TQDM_PATCH_PRINT", "0")
    if not sys.stdout.isatty():
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    if not ray.is_initialized():
        start_ray(environment, object_store_bytes(config))
    placement, roles, nodes = config.placement, roles_of(config), [node["Resources"] for node in alive_nodes()]
    for line in table(roles, nodes):
        print(f"{config.run.name}: {line}", flush=True)
    if not placement.wait_for_nodes_s:
        check_fit(roles, nodes, "the cluster")
    with reserved(roles, config.run.name, placement.wait_for_nodes_s) as places:
        wait_until_project_is_unpacked(started_in, [node for node in ray.nodes() if node["Alive"]])
        if config.on_gpus:
            check_nodes(config, alive_nodes())
        if os.environ.get("RAY_ADDRESS"):
            fetch_on_machines(config, alive_nodes())
        with _mlflow_run_ended(config, folder):
            _start_roles_and_fit(config, folder, roles, places)


@contextmanager
def _mlflow_run_ended(config: RecipeConfig, folder: RunFolder) -> Iterator[None]:
    """End the MLflow run after an error in the block: workers that Ray kills leave the run RUNNING."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if config.tracking.enabled:
            from rl_plugins.tracking.sender import end_left_run

            status = "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED"
            end_left_run(config.store_uri, config.tracking.experiment, folder, status)
        raise


@dataclass(frozen=True)
class _StartedRoles:
    """Roles of a run beside the training workers. Ray ends an actor when its last handle is gone.

    Attributes:
        rollout: rollout engines; None if the run has none on vLLM.
        judges: actors of the engines of a judge.
        judge_key: key for requests to the judge.
        pools: actors of each pool of a frozen model.
        critics: placed pools of critics, not started.
    """

    rollout: VLLMRollout | None
    judges: list[Any]
    judge_key: str
    pools: Mapping[PoolConfig, list[Any]]
    critics: list[PlacedPool]

    def stop(self) -> None:
        """End all roles: another run may follow in this process, and needs the resources."""
        import ray

        if self.rollout is not None:
            self.rollout.stop()
        for actor in (*self.judges, *(actor for actors in self.pools.values() for actor in actors)):
            ray.kill(actor)


def _start_roles_and_fit(config: RecipeConfig, folder: RunFolder, roles: list[Role], places: Reservation) -> None:
    """Start all roles on the reserved resources and train."""
    from ray.train.v2._internal.constants import CHECKPOINT_MANAGER_SNAPSHOT_FILENAME

    from rl_plugins.launch.worker_errors import user_errors_unwrapped

    started = _start_roles(config, roles, places)
    try:
        # A judge that does not start ends the run before the workers load models.
        addresses_of(started.judges, config.placement.judge.start_timeout_s)
        ray_trainer = _ray_trainer(config, folder, started)
        # Ray Train would require the checkpoints of its snapshot. The run's folder has the present checkpoints.
        (folder.path / CHECKPOINT_MANAGER_SNAPSHOT_FILENAME).unlink(missing_ok=True)
        # Ray Train makes its own placement group of the same size, and each worker starts its reward workers.
        for role in roles:
            if role.name in (WORKERS, REWARD_WORKERS):
                places.release(role.name)
        with stop_on_signals(folder), user_errors_unwrapped():
            ray_trainer.fit()
    except SystemExit:
        # After Ctrl-C, Ray Train ends the workers, and raises SystemExit without a message.
        raise KeyboardInterrupt from None
    finally:
        started.stop()


def _start_roles(config: RecipeConfig, roles: list[Role], places: Reservation) -> _StartedRoles:
    """Start the roles on the reserved resources, without waiting until they are ready."""
    rollout, judges, judge_key = None, [], secrets.token_hex(_KEY_BYTES)
    for role in roles:
        if role.name == JUDGES:
            judges = start_judge_engines(JudgeEngineConfig.of(config, judge_key), places.options(role))
        if role.name == ENGINES:
            rollout = vllm_rollout(config)
            # The training workers start the engines on their GPUs, before they use the GPUs.
            if not rollout.config.shares_gpus:
                rollout.start(places.options(role) if role.strategy else ())
    pools: Mapping[PoolConfig, list[Any]] = {}
    critics: list[PlacedPool] = []
    if config.placement.pools:
        placed = placed_pools(config, roles, places)
        # The first training worker starts the pools of critics: after a restart of the workers, these pools must start
        # again from the checkpoint, too.
        critics = [placed.pop(role) for role in CRITIC_POOLS if role in placed]
        pools = {pool: start_pool(pool, options) for pool, options in placed.values()}
    return _StartedRoles(rollout, judges, judge_key, pools, critics)


def _ray_trainer(config: RecipeConfig, folder: RunFolder, started: _StartedRoles) -> TorchTrainer:
    """Return Ray's trainer of the run, whose workers call `train_worker`."""
    import ray.train
    from ray.train import FailureConfig, LoggingConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from rl_plugins.launch.worker_errors import WorkerFailures, without_traceback
    from rl_plugins.process_group import PrivateTorchConfig

    placement = config.placement
    resources = {"CPU": placement.cpus_per_worker}
    if config.on_gpus:
        resources["GPU"] = 1.0
    return TorchTrainer(
        without_traceback(train_worker),
        train_loop_config=_worker_arguments(config, started),
        torch_config=PrivateTorchConfig(
            backend="nccl" if config.on_gpus else "gloo",
            timeout_s=int(config.strategy.collective_timeout_s),
        ),
        scaling_config=ScalingConfig(
            num_workers=placement.num_workers,
            use_gpu=config.on_gpus,
            resources_per_worker=resources,
            placement_strategy=placement.strategy,
        ),
        # The types are those of Ray Train V1, which has other options than V2.
        run_config=ray.train.RunConfig(  # type: ignore[call-arg]
            name=folder.path.name,
            storage_path=str(folder.path.parent),
            failure_config=FailureConfig(  # type: ignore[call-arg]
                max_failures=placement.max_restarts,
                # By default Ray Train would wait silently and forever for resources after a machine is lost.
                controller_failure_limit=(placement.max_restarts + 1)
                * max(1, math.ceil(placement.wait_for_nodes_s / _ATTEMPT_S)),
            ),
            logging_config=LoggingConfig(log_level="ERROR"),
            callbacks=[WorkerFailures(folder, placement.max_restarts)],  # type: ignore[list-item]
        ),
    )


def _worker_arguments(config: RecipeConfig, started: _StartedRoles) -> dict[str, Any]:
    """Return the argument of `train_worker`."""
    return {
        "config": asdict(config),
        "from_environment": config.from_environment,
        "rollout": started.rollout,
        "pools": list(started.pools),
        "critics": started.critics,
        "judges": started.judges,
        "judge_key": started.judge_key,
        # The driver draws the progress bar.
        "redraw_s": redraw_interval_s(),
        "started": psutil.Process().create_time(),
    }


def train_worker(arguments: dict[str, Any]) -> None:
    """Train in one Ray Train worker.

    Args:
        arguments: result of `_worker_arguments` in the driver.
    """
    _training_run(arguments).call_recipe()


@garbage_collector_off()
def _training_run(arguments: dict[str, Any]) -> TrainingRun:
    # DeepSpeed reads the variable at its import. The value of the driver's process may be wrong for a worker.
    os.environ["DS_ACCELERATOR"] = arguments["config"]["placement"]["device"]
    import ray.train
    import torch
    from ray.train.lightning import RayLightningEnvironment

    from rl_plugins.config.recipe import parse_config
    from rl_plugins.intact_checkpoint import newest_intact
    from rl_plugins.launch.scorer import scorer_of
    from rl_plugins.launch.training import TrainingRun
    from rl_plugins.models.pool import ModelPool
    from rl_plugins.stages.critic_pool import CriticPool

    config = parse_config(arguments["config"])
    # The arguments have the values: with the expressions, no value comes into the records of the run.
    config.from_environment = arguments["from_environment"]
    device = config.placement.device
    # With GPUs, optimizer steps of `strategy.offload.policy=cpu` use the threads.
    torch.set_num_threads(max(1, int(config.placement.cpus_per_worker)))
    # An engine that Ray started again on another machine has another address.
    judge_urls = addresses_of(arguments["judges"], config.placement.judge.start_timeout_s)
    if judge_urls:
        # Reward workers get the variable from this process.
        os.environ[ENGINE_KEY] = arguments["judge_key"]
    scorer = scorer_of(config, judge_urls)
    rollout: RolloutEngine | None = arguments["rollout"]
    if rollout is None:
        rollout = transformers_rollout(config, device)
    rank = ray.train.get_context().get_world_rank()
    pools = [ModelPool(pool, rank) for pool in arguments["pools"]]
    pools += [CriticPool(pool, options, rank) for pool, options in arguments["critics"]]
    strategy = ray_strategy(config, rollout)
    folder = RunFolder(Path(config.run.output_dir) / config.run.name)
    # A restarted worker group, too, continues from the newest checkpoint in the folder. Ray Train hears of a checkpoint
    # some seconds late.
    checkpoint = newest_intact(folder)
    return TrainingRun(
        config=config,
        folder=folder,
        strategy=strategy,
        scorer=scorer,
        checkpoint=checkpoint,
        in_ray=True,
        redraw_s=arguments["redraw_s"],
        started=arguments["started"],
        pools=pools,
        trainer_options={"accelerator": device, "devices": "auto", "plugins": [RayLightningEnvironment()]},
    )


def ray_strategy(config: RecipeConfig, rollout: RolloutEngine | None) -> RayZeroStrategy | RayFSDPStrategy:
    """Return the configured strategy. Call it in a training worker."""
    from rl_plugins.strategies.ray import RayFSDPStrategy, RayZeroStrategy

    options = config.strategy
    common: dict[str, Any] = {
        "rollout": rollout,
        "offload": options.offload.places | dict.fromkeys(config.teacher.models.values(), options.offload.teacher),
        "timeout_s": options.collective_timeout_s,
        "sequence_parallel": options.sequence_parallel,
    }
    if options.name == "fsdp":
        return RayFSDPStrategy(
            accumulate_shards=options.accumulate_shards,
            workers_per_copy=options.workers_per_copy,
            tensor_parallel=options.tensor_parallel,
            expert_parallel=options.expert_parallel,
            **common,
        )
    return RayZeroStrategy(stage=options.zero_stage, offload_folder=options.offload.folder, **common)


def resolve_device(config: RecipeConfig) -> str:
    """Return `cpu` or `cuda`. `placement.device=auto` selects CUDA if the cluster has GPUs."""
    if config.placement.device != "auto":
        return config.placement.device
    import ray

    if ray.is_initialized():
        return "cuda" if ray.cluster_resources().get("GPU", 0) else "cpu"
    if os.environ.get("RAY_ADDRESS"):
        start_ray(worker_environment("cuda"))
        return "cuda" if ray.cluster_resources().get("GPU", 0) else "cpu"
    return "cuda" if local_gpus() else "cpu"


def worker_environment(device: str) -> dict[str, str]:
    """Return the environment variables of the training workers."""
    variables = {"TOKENIZERS_PARALLELISM": "false", "RAY_TRAIN_V2_ENABLED": "1"}
    if device == "cpu":
        variables["OMP_NUM_THREADS"] = "1"
    # Users can do nothing about deprecations inside libraries.
    variables["PYTHONWARNINGS"] = "ignore::FutureWarning,ignore::DeprecationWarning"
    # With 1, Ray would hide all GPUs from an actor that reserves none, such as a colocated engine.
    variables["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    # Ray Train would turn each print into a log record, and a redirection of stdout has no effect on log records.
    variables["RAY_TRAIN_ENABLE_PRINT_PATCH"] = "0"
    if extensions := os.environ.get("TORCH_EXTENSIONS_DIR"):
        variables["TORCH_EXTENSIONS_DIR"] = extensions
    return variables


def start_ray(environment: dict[str, str], object_store: int = LEAST_BYTES) -> None:
    """Connect to the cluster of RAY_ADDRESS, which is set in Ray jobs, or start Ray on this machine.

    Args:
        environment: environment variables of all Ray processes. A variable of the Ray job keeps the value of the job. A
            start on this machine adds variables.
        object_store: bytes of the object store of a start on this machine.

    Raises:
        ConfigError: see `join_cluster` and `start_own_ray`.
        RayLost: Ray's processes did not start on this machine.
    """
    import ray

    # Ray refuses a variable that the job has, too.
    environment = {name: value for name, value in environment.items() if name not in variables_of_job()}
    options: dict[str, Any] = {
        "runtime_env": {"env_vars": environment},
        # Warnings of Ray's helper processes do not concern the run.
        "logging_config": ray.LoggingConfig(encoding="TEXT", log_level="ERROR"),
    }
    if os.environ.get("RAY_ADDRESS"):
        with handlers_kept():
            join_cluster(**options)
        return
    # Ray Train asks the state API of a dashboard if its controller is alive, to clean up. A Ray of the run's own ends
    # with the run, so there is no dashboard, which takes ten processes. Without an address, Ray Train may ask another
    # Ray on this machine, which does not know the controller, and then the workers are killed.
    environment["RAY_API_SERVER_ADDRESS"] = _NO_SERVER
    environment["RAY_TRAIN_ENABLE_STATE_ACTOR_RECONCILIATION"] = "0"
    # A local Ray has no nodes that could be preempted, and Ray reports an error for the watcher.
    environment["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "0"
    with handlers_kept():
        start_own_ray(object_store_memory=object_store, **options)


def wait_until_project_is_unpacked(folder: Path, nodes: Sequence[Mapping[str, Any]]) -> None:
    """Wait until all nodes that share a host have unpacked the job's project. Call it before other processes start.

    Each Ray node removes the content of the job's folder and unpacks the project when the job starts on the node. Nodes
    on one host share the folder. A node with a later start removes the folder while processes of the other nodes use
    it, and their working directory no longer exists.

    Args:
        folder: working directory of this process before the job started.
        nodes: Ray's description of each node.

    Raises:
        DeadlineExceeded: a node could not start a process.
    """
    hosts = [node["NodeManagerHostname"] for node in nodes]
    sharing = [node for node, host in zip(nodes, hosts, strict=True) if hosts.count(host) > 1]
    if not sharing or JOB_FOLDERS not in folder.parts:
        return
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    for node in sharing:
        on_node = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        # A separate environment makes Ray start a new process: no later task may get a process whose working
        # directory was removed.
        own_environment = {"env_vars": {"RL_PLUGINS_UNPACK": node["NodeID"]}}
        task = ray.remote(_do_nothing).options(num_cpus=0, scheduling_strategy=on_node, runtime_env=own_environment)
        try:
            ray.get(task.remote(), timeout=_UNPACK_TIMEOUT_S)
        except ray.exceptions.GetTimeoutError:
            raise DeadlineExceeded(
                f"the run waited {_UNPACK_TIMEOUT_S:.0f} s for Ray to unpack the project on the node {node['NodeID']} "
                f"of {node['NodeManagerHostname']}"
            ) from None
    # The working directory of this process was removed, too.
    os.chdir(folder)


def _do_nothing() -> None:
    pass
