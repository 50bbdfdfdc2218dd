"""Settings of the machines: how models are sharded, and where everything runs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from rl_plugins.config.rollout import check_engine_arguments
from rl_plugins.config.settings import (
    ABOVE_0,
    ABOVE_0_OR_NULL,
    AT_LEAST_1,
    GPUS,
    NOT_NEGATIVE,
    SECONDS,
    SECONDS_OR_0,
    Settings,
    one_of,
    or_null,
)

_PLACE = one_of("while_sampling", "stay", "cpu", "nvme")

CRITIC_POOLS = ("critic", "cost_critic")
FROZEN = ("reward_model", "cost_model", "teacher", "reference")
"""Models that are not trained, except a reward model in its own stage."""
POOLS = (*FROZEN, *CRITIC_POOLS)
"""Models with an optional pool of processes."""
_OF_JUDGE_ENGINES = {
    "model": "reward.judge.model",
    "served_model_name": "reward.judge.model",
    "tensor_parallel_size": "placement.judge.gpus",
    "trust_remote_code": "model.trust_remote_code",
    "distributed_executor_backend": "placement.judge.gpus",
}
"""Arguments of vLLM's engine that the package sets for a judge, with the option for the argument."""


@dataclass
class OffloadConfig(Settings):
    """Place of the optimizer states and master weights of each trained model, and of the parameters of frozen models.

    `stay` is the device, `cpu` the host, `nvme` a file. `while_sampling` is the host during sampling if vLLM's share of
    the GPU (`rollout.gpu_memory_utilization`) is not free beside the states, and the device otherwise; on CPU it is the
    same as `stay`. With `cpu` and `nvme`, optimizer steps run on the host, and every pass
    of a frozen model fetches its parameters; with `strategy.name=fsdp`, also every pass of a trained model. With ZeRO,
    `nvme`, and `cpu` for frozen models, need `strategy.zero_stage=3`. FSDP2 has no `nvme`.

    Attributes:
        policy: `while_sampling`, `stay`, `cpu` or `nvme`.
        critic: `while_sampling`, `stay`, `cpu` or `nvme`.
        cost_critic: `while_sampling`, `stay`, `cpu` or `nvme`.
        process_reward_model: place of PRIME's model: `while_sampling`, `stay`, `cpu` or `nvme`.
        reference: `stay`, `while_sampling`, `cpu` or `nvme`.
        reward_model: `stay`, `while_sampling`, `cpu` or `nvme`.
        cost_model: `stay`, `while_sampling`, `cpu` or `nvme`.
        teacher: `stay`, `while_sampling`, `cpu` or `nvme`.
        folder: folder of the files on the drive.
    """

    policy: Annotated[str, _PLACE] = "while_sampling"
    critic: Annotated[str, _PLACE] = "while_sampling"
    cost_critic: Annotated[str, _PLACE] = "while_sampling"
    process_reward_model: Annotated[str, _PLACE] = "while_sampling"
    reference: Annotated[str, _PLACE] = "stay"
    reward_model: Annotated[str, _PLACE] = "stay"
    cost_model: Annotated[str, _PLACE] = "stay"
    teacher: Annotated[str, _PLACE] = "stay"
    folder: str | None = None

    @property
    def places(self) -> dict[str, str]:
        """Place of each model by the name of the model."""
        return {model: place for model, place in asdict(self).items() if model != "folder"}


@dataclass
class StrategyConfig(Settings):
    """Sharded training.

    Attributes:
        name: `zero` (DeepSpeed) or `fsdp` (PyTorch's FSDP2).
        zero_stage: stage of `zero`: 1, 2 or 3.
        accumulate_shards: with `fsdp`, average gradients in every micro-batch and keep their shards, instead of once in
            an optimizer step: less memory, more traffic.
        workers_per_copy: with `fsdp`, number of neighbouring workers that share one copy of the models in shards, such
            as the workers of a node: parameters are then gathered inside a node, and only gradients are summed over the
            nodes; 0 shares one copy over all workers.
        tensor_parallel: with `fsdp`, number of neighbouring workers that share the blocks of the models; each worker
            still has its own samples.
        sequence_parallel: number of neighbouring workers that share the tokens of a micro-batch, for samples
            too long for one worker; each worker still has its own samples.
        expert_parallel: with `fsdp`, number of neighbouring workers that share the experts of each layer of a mixture;
            tokens travel to the workers of their experts, and each worker still has its own samples.
        offload: places of the models' states.
        collective_timeout_s: deadline of every collective, in seconds. Longer than the deadlines of rollout engines,
            for which a worker may wait while the others wait for the worker.
    """

    name: Annotated[str, one_of("zero", "fsdp")] = "zero"
    zero_stage: Annotated[int, one_of(1, 2, 3)] = 3
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    accumulate_shards: bool = False
    workers_per_copy: Annotated[int, NOT_NEGATIVE] = 0
    tensor_parallel: Annotated[int, AT_LEAST_1] = 1
    sequence_parallel: Annotated[int, AT_LEAST_1] = 1
    expert_parallel: Annotated[int, AT_LEAST_1] = 1
    collective_timeout_s: Annotated[float, SECONDS] = 2400.0


@dataclass
class PoolOptions(Settings):
    """Separate processes for a model beside the policy.

    Attributes:
        actors: number of processes, each with the whole model; 0 keeps the model in the training workers, in shards.
        cpus: Ray CPUs of each process; on CPU, also the number of its threads.
        gpus: Ray GPUs of each process, if there are GPUs.
        deadline_s: deadline for the results of a micro-batch, and for an update of the critic, in seconds. It includes
            the waits for other workers and for a new process.
        start_timeout_s: deadline for a process to start and load the model, and to read the critic's state of a
            checkpoint, in seconds; null is 300, or 900 on GPUs.
    """

    actors: Annotated[int, NOT_NEGATIVE] = 0
    cpus: Annotated[float, NOT_NEGATIVE] = 1.0
    gpus: Annotated[float, GPUS] = 1.0
    deadline_s: Annotated[float, SECONDS] = 600.0
    start_timeout_s: Annotated[float | None, or_null(SECONDS)] = None


@dataclass
class JudgeEngineOptions(Settings):
    """Engines of vLLM for the judge of `reward=judge`, in processes of the run.

    Attributes:
        actors: number of engines, each with the model `reward.judge.model`, a folder or a name on the hub; 0 asks the
            server of `reward.judge.url`.
        cpus: Ray CPUs of each engine; on CPU, also the number of its threads.
        gpus: Ray GPUs of each engine, if there are GPUs; several GPUs share the model, and 0 is refused.
        start_timeout_s: deadline for the start of an engine, in seconds.
        vllm: further arguments of vLLM's engine, such as `{max_model_len: 8192}`.
    """

    actors: Annotated[int, NOT_NEGATIVE] = 0
    cpus: Annotated[float, NOT_NEGATIVE] = 1.0
    gpus: Annotated[float, GPUS] = 1.0
    start_timeout_s: Annotated[float, SECONDS] = 600.0
    vllm: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check all settings.

        Raises:
            ConfigError: a setting is out of its range, or `vllm` has an argument that vLLM does not know, or that the
                package sets.
        """
        super().__post_init__()
        check_engine_arguments(self.vllm, _OF_JUDGE_ENGINES)


@dataclass
class PlacementConfig(Settings):
    """Processes of a run, and their machines and devices.

    Attributes:
        num_workers: number of training workers.
        device: `cpu`, `cuda`, or `auto`.
        strategy: how Ray places the training workers: `PACK`, on few machines; `SPREAD`, on many; `STRICT_PACK`, on
            one; `STRICT_SPREAD`, each on another machine.
        cpus_per_worker: Ray CPUs of a training worker, and number of its threads.
        rollout: place of the vLLM engines: `colocated`, on the training workers' devices; `split`, on their own. Each
            worker has a GPU, and a split engine has `rollout.tensor_parallel_size` GPUs.
        engine_cpus: Ray CPUs of a split engine; on CPU, of each of its processes.
        reward_model: pool of the reward model.
        cost_model: pool of the cost model.
        teacher: pool of the teacher.
        reference: pool of the reference model.
        critic: pool of the critic, which is also trained in the pool.
        cost_critic: pool of the critic of the costs, which is also trained in the pool.
        judge: engines of the judge.
        wait_for_nodes_s: seconds until a growing cluster must have room for all processes; 0 refuses a cluster without
            room.
        max_restarts: number of restarts of the workers by Ray Train, from the last checkpoint, after failures. Restarts
            after the loss of a preempted machine do not count, and have no limit.
        peak_tflops: dense peak of a training device in the precision of the run, for the metric `throughput/mfu`; null
            is the known peak of the device.
    """

    num_workers: Annotated[int, AT_LEAST_1] = 2
    device: Annotated[str, one_of("auto", "cpu", "cuda")] = "auto"
    strategy: Annotated[str, one_of("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")] = "PACK"
    cpus_per_worker: Annotated[float, ABOVE_0] = 1.0
    rollout: Annotated[str, one_of("colocated", "split")] = "colocated"
    engine_cpus: Annotated[float, ABOVE_0] = 1.0
    reward_model: PoolOptions = field(default_factory=PoolOptions)
    cost_model: PoolOptions = field(default_factory=PoolOptions)
    teacher: PoolOptions = field(default_factory=PoolOptions)
    reference: PoolOptions = field(default_factory=PoolOptions)
    critic: PoolOptions = field(default_factory=PoolOptions)
    cost_critic: PoolOptions = field(default_factory=PoolOptions)
    judge: JudgeEngineOptions = field(default_factory=JudgeEngineOptions)
    wait_for_nodes_s: Annotated[float, SECONDS_OR_0] = 0.0
    max_restarts: Annotated[int, NOT_NEGATIVE] = 2
    peak_tflops: Annotated[float | None, ABOVE_0_OR_NULL] = None

    @property
    def pools(self) -> dict[str, PoolOptions]:
        """Pools with at least one process, by the role of the model."""
        options: dict[str, PoolOptions] = {role: getattr(self, role) for role in POOLS}
        return {role: pool for role, pool in options.items() if pool.actors}
