"""Options of the machines: how models are cut, where everything runs."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class OffloadOptions:
    """Where each engine keeps its optimizer states and master weights, or, if it is frozen, its parameters.

    `stay` is on the device, `cpu` on the host, `nvme` in files (both update on the host; `nvme`, and frozen engines
    off their device, need `strategy.zero_stage=3`). `while_sampling` is on the host while the rollout engine works, and
    on the device otherwise; on CPU it is the same as `stay`.

    Attributes:
        policy: `while_sampling`, `stay`, `cpu` or `nvme`.
        critic: the same.
        process_reward_model: the same, of PRIME.
        reference: `stay`, `cpu` or `nvme`.
        reward_model: the same.
        teacher: the same.
        folder: of the files, on the drive.
    """

    policy: str = "while_sampling"
    critic: str = "while_sampling"
    process_reward_model: str = "while_sampling"
    reference: str = "stay"
    reward_model: str = "stay"
    teacher: str = "stay"
    folder: str | None = None


@dataclass
class StrategyOptions:
    """Sharded training.

    Attributes:
        name: `zero` (DeepSpeed) or `fsdp` (PyTorch's FSDP2).
        zero_stage: of `zero`: 1, 2 or 3.
        accumulate_shards: of `fsdp`: average gradients with every micro-batch and keep shards of them, in place of
            once in an optimizer step: less memory, more traffic.
        tensor_parallel: of `fsdp`: over how many neighbouring workers the blocks of the models are cut; each worker
            goes on having samples of its own.
        sequence_parallel: over how many neighbouring workers the tokens of a micro-batch are cut, for samples that are
            too long for one; each worker goes on having samples of its own.
        offload: where the engines keep their states.
        collective_timeout_s: deadline of every collective.
    """

    name: str = "zero"
    zero_stage: int = 3
    offload: OffloadOptions = field(default_factory=OffloadOptions)
    accumulate_shards: bool = False
    tensor_parallel: int = 1
    sequence_parallel: int = 1
    collective_timeout_s: float = 1800.0


@dataclass
class PoolOptions:
    """Processes of their own for a model beside the policy.

    Attributes:
        actors: how many processes hold the model, each the whole of it; 0 has it in the training workers, in shards.
        cpus: Ray CPUs of each, and on CPU its threads.
        gpus: Ray GPUs of each, where there are any.
        deadline_s: for the numbers of a micro-batch, and for an update of the critic; the waits for other workers and
            for a new process are included.
    """

    actors: int = 0
    cpus: float = 1.0
    gpus: float = 1.0
    deadline_s: float = 600.0


@dataclass
class PlacementConfig:
    """Who runs where.

    Attributes:
        num_workers: training workers.
        device: `cpu`, `cuda`, or `auto`.
        strategy: how Ray lays the training workers over machines: `PACK`, on few; `SPREAD`, on many; `STRICT_PACK`, on
            one; `STRICT_SPREAD`, each on another.
        cpus_per_worker: Ray CPUs of a training worker.
        gpus_per_worker: Ray GPUs of a training worker; a share below 1 leaves room for a colocated engine.
        rollout: where vLLM engines are: `colocated`, on the training workers' devices; `split`, on their own.
        engine_gpus: Ray GPUs of a colocated engine; a split one has `rollout.tensor_parallel_size`.
        engine_cpus: Ray CPUs of a split engine, on CPU of each of its processes.
        reward_model: a pool for the reward model.
        teacher: a pool for the teacher.
        reference: a pool for the reference model.
        critic: a pool for the critic, which learns there, too.
        wait_for_nodes_s: how long a cluster that grows may take until all are placed; 0 refuses what it has not got.
        max_restarts: how often Ray Train restarts the workers from the last checkpoint after a failure.
        peak_tflops: dense peak of a training device in the precision of the run, for the metric `throughput/mfu`; null
            is what is known of the device.
    """

    num_workers: int = 2
    device: str = "auto"
    strategy: str = "PACK"
    cpus_per_worker: float = 1.0
    gpus_per_worker: float = 0.7
    rollout: str = "colocated"
    engine_gpus: float = 0.3
    engine_cpus: float = 1.0
    reward_model: PoolOptions = field(default_factory=PoolOptions)
    teacher: PoolOptions = field(default_factory=PoolOptions)
    reference: PoolOptions = field(default_factory=PoolOptions)
    critic: PoolOptions = field(default_factory=PoolOptions)
    wait_for_nodes_s: float = 0.0
    max_restarts: int = 2
    peak_tflops: float | None = None
