"""The schema of a recipe: small typed groups, one per part of the system; it refuses unknown keys and wrong types."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl_plugins.callbacks.guard_bounds import Bounds
from rl_plugins.errors import ConfigError
from rl_plugins.launch.hydra_errors import explain, keys_of


@dataclass
class LoraOptions:
    """A low-rank adapter that is trained in place of the model.

    Attributes:
        rank: of the change of each layer; 0 trains the model itself.
        alpha: the change is multiplied by `alpha / rank`.
        dropout: of the adapter's inputs, while training.
        target_modules: `all-linear`, a list of layers' names, or a regular expression for their full names.
    """

    rank: int = 0
    alpha: float = 32.0
    dropout: float = 0.0
    target_modules: Any = "all-linear"


@dataclass
class ModelConfig:
    """The policy.

    Attributes:
        path: Hugging Face name or folder.
        precision: Lightning's precision flag: `32-true`, `bf16-true` or `bf16-mixed`.
        gradient_checkpointing: recompute activations in the backward pass.
        lora: its adapter; off by default.
    """

    path: str = MISSING
    precision: str = "32-true"
    gradient_checkpointing: bool = False
    lora: LoraOptions = field(default_factory=LoraOptions)


@dataclass
class ReferenceOptions:
    """The reference model of a KL term or of a preference loss.

    Attributes:
        path: Hugging Face name or folder; null is the policy's own start.
        update_every: steps after which it is moved towards the policy; 0 leaves it as it is.
        keep: share of its weights that a move keeps: 0 copies the policy, 0.99 is a moving average.
    """

    path: str | None = None
    update_every: int = 0
    keep: float = 0.0


@dataclass
class TeacherOptions:
    """The teacher of a distillation.

    Attributes:
        path: Hugging Face name or folder, with the policy's tokens.
    """

    path: str | None = None


@dataclass
class MixtureOptions:
    """A part of the training data.

    Attributes:
        files: its parquet files.
        weight: its share of the prompts of every step, as a number that is compared with the other parts'.
    """

    files: list[str] = field(default_factory=list)
    weight: float = 1.0


@dataclass
class CurriculumOptions:
    """Prompts that the policy sometimes solves come more often (stages that sample).

    Attributes:
        share: of a step's prompts that is drawn by the variance of the rewards seen so far; 0 is off.
        keep: of what is known of a prompt when its next group comes; 0 believes the last group alone.
    """

    share: float = 0.0
    keep: float = 0.5


@dataclass
class DataConfig:
    """The prompts.

    Attributes:
        train_files: parquet files with the columns prompt, data_source, ability, reward_model, extra_info.
        mixture: in place of `train_files`, parts in given shares: a mapping of names to `files` and `weight`.
        curriculum: prompts by their difficulty; off by default.
        val_files: parquet files for validation; may be empty.
        max_prompt_tokens: longest prompt.
        overlong_prompts: `filter` drops longer ones and says how many, `error` refuses them.
        eval_batch_size: prompts of one validation batch on one rank.
        response_key: where SFT finds the response of a row, and unpaired preferences theirs.
        chosen_key: where a pair has its better response.
        rejected_key: where it has the worse one.
        margin_key: where it has by how much the better one is better; null if it does not say.
        label_key: of unpaired preferences, where a row says whether its response is good; null for pairs.
        steps_key: where a process reward model finds the steps of a response.
        labels_key: where it finds their labels.
        dataset: a custom data set instead of `train_files`: a node with `_target_`.
    """

    train_files: list[str] = field(default_factory=list)
    mixture: Any = None
    curriculum: CurriculumOptions = field(default_factory=CurriculumOptions)
    val_files: list[str] = field(default_factory=list)
    max_prompt_tokens: int = 512
    overlong_prompts: str = "filter"
    eval_batch_size: int = 256
    response_key: str = "reward_model.ground_truth"
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    margin_key: str | None = None
    label_key: str | None = None
    steps_key: str = "extra_info.steps"
    labels_key: str = "extra_info.labels"
    dataset: Any = None


@dataclass
class BatchConfig:
    """Three numbers, and how often the optimizer steps.

    Attributes:
        prompts_per_step: prompts of one step, over all workers.
        samples_per_prompt: responses to each prompt.
        tokens_per_micro_batch: tokens of one forward and backward pass on one worker: real ones with `packing`, padded
            ones without.
        packing: the samples of a micro-batch go through the models as one row without padding; false for a model that
            lets samples in a row see each other.
        updates_per_step: optimizer steps of one pass over the samples of a step.
        passes_per_step: passes over the samples of a step.
    """

    prompts_per_step: int = 32
    samples_per_prompt: int = 8
    tokens_per_micro_batch: int = 16384
    packing: bool = True
    updates_per_step: int = 1
    passes_per_step: int = 1


@dataclass
class SamplingOptions:
    """How responses are drawn.

    Attributes:
        max_tokens: longest response.
        temperature: of training samples; see `validation` for the others.
        top_p: nucleus.
        top_k: most likely tokens kept; -1 keeps all.
        stop: strings that end a response, besides the tokenizer's end-of-sequence token.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: list[str] = field(default_factory=list)


@dataclass
class EnvironmentOptions:
    """Conversations with a reward that answers before it gives a score.

    Attributes:
        max_turns: how often the policy speaks, at most; `sampling.max_tokens` is for the whole conversation. 1 is a
            response without a conversation.
        max_observation_tokens: of one answer; what is longer is cut behind them.
    """

    max_turns: int = 1
    max_observation_tokens: int = 256


@dataclass
class ValidationOptions:
    """How validation samples; by default one most likely response per prompt.

    Attributes:
        samples_per_prompt: responses to each prompt; of several, mean@k, best@k and maj@k are logged by data source.
        temperature: 0 is greedy.
        top_p: nucleus.
    """

    samples_per_prompt: int = 1
    temperature: float = 0.0
    top_p: float = 1.0


@dataclass
class RolloutConfig:
    """The rollout engine.

    Attributes:
        engine: `vllm` or `transformers`.
        engines: how many vLLM engines, or `per_worker`. Each samples for its share of the prompts, with one thread on
            CPU; more than one run on CPU only.
        dtype: of the engine's weights; null follows `model.precision`.
        max_num_seqs: responses sampled at once.
        prefix_caching: share the KV cache of common prefixes.
        gpu_memory_utilization: share of a GPU's memory for the engine.
        cpu_kv_cache_gib: KV cache on CPU.
        tensor_parallel_size: GPUs of the engine, or on CPU its processes.
        sleep: what vLLM engines give back while the workers train: `kv_cache`; `all`, the weights too, which are then
            sent anew for every rollout; `none`, which saves the time of taking the KV cache back. Null is `kv_cache`,
            or `none` where `schedule.max_staleness` has them work at the same time.
        lora: what vLLM is sent of a policy with an adapter: `adapter`, which the engine adds to the weights of
            `model.path` with every token, or `merged`, all weights with the adapter in them.
        check_updates: every how many weight updates the engine's weights are compared with the policy's, tensor by
            tensor and by the log-probs of a short prompt; 0 for never.
        transport: of weights: `auto`; `shared_memory` (CPU, one machine) or `gloo` (CPU, several); `ipc` (CUDA,
            colocated) or `nccl` (CUDA, split).
        bucket_mb: memory for weights in flight, but in shared memory, where there are none.
        ready_timeout_s: deadline for the engine's start.
        generate_timeout_s: deadline for sampling one step.
        stall_timeout_s: an engine that does not answer for so long is lost: it is started again, and its prompts go to
            the others.
        update_timeout_s: deadline for each call of a weight update.
    """

    engine: str = "vllm"
    engines: int | str = 1
    dtype: str | None = None
    max_num_seqs: int = 256
    prefix_caching: bool = True
    gpu_memory_utilization: float = 0.4
    cpu_kv_cache_gib: int = 1
    tensor_parallel_size: int = 1
    sleep: str | None = None
    lora: str = "adapter"
    check_updates: int = 0
    transport: str = "auto"
    bucket_mb: int = 64
    ready_timeout_s: float = 300.0
    generate_timeout_s: float = 1800.0
    stall_timeout_s: float = 120.0
    update_timeout_s: float = 300.0


@dataclass
class ScheduleOptions:
    """How far sampling runs ahead of training.

    Attributes:
        max_staleness: how many steps may lie between the policy with which the sampling of a group began and the one
            that is trained on it. 0 is synchronous: each step samples, then trains. From 1 on, engines sample for the
            steps to come while the workers train, and weights change in flight; ratios are then to the policies that
            sampled, unless `algorithm.correction` is another remedy.
        ahead: how many steps' worth of groups are in flight beyond those of a step; null is `max_staleness`. With less,
            such as 0.25, stragglers are left for a later step; with `max_staleness=0` they are dropped.
        max_token_age: how many steps old the policy may be that sampled a token that is trained on; older tokens of a
            response are masked. Null masks none.
    """

    max_staleness: int = 0
    ahead: float | None = None
    max_token_age: int | None = None


@dataclass
class OptimizerOptions:
    """AdamW.

    Attributes:
        lr: learning rate.
        betas: decay of the moments.
        weight_decay: decoupled weight decay.
        warmup_steps: steps of linear warm-up.
        decay_steps: steps of linear decay after it; 0 keeps the rate.
        lr_end: share of `lr` at the end of the decay.
        gradient_clip: bound on the global gradient norm; 0 for none.
    """

    lr: float = 1e-6
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    weight_decay: float = 0.0
    warmup_steps: int = 0
    decay_steps: int = 0
    lr_end: float = 0.0
    gradient_clip: float = 1.0


@dataclass
class CriticOptions:
    """The critic of algorithms that need values.

    Attributes:
        path: what it starts from, a policy or a reward model; null is `model.path`.
        optimizer: its own.
        warmup_steps: steps in which it is trained alone.
        keep_checkpoints: newest checkpoints that hold it; null keeps it as long as the policy's.
        lora: its adapter; off by default.
    """

    path: str | None = None
    optimizer: OptimizerOptions = field(default_factory=lambda: OptimizerOptions(lr=1e-5))
    warmup_steps: int = 0
    keep_checkpoints: int | None = None
    lora: LoraOptions = field(default_factory=LoraOptions)


@dataclass
class RewardModelOptions:
    """A trained reward model beside the policy, scoring its tokens; its score is added to that of `reward`.

    Attributes:
        path: its folder or name; null is none. It must have the policy's tokens.
        weight: of its score.
        rule_weight: of the score of `reward`; 0 leaves that to validation.
    """

    path: str | None = None
    weight: float = 1.0
    rule_weight: float = 1.0


@dataclass
class LossOptions:
    """The loss of stages that learn from preferences or labels.

    Attributes:
        name: in `PREFERENCE_LOSSES` or `REWARD_MODEL_LOSSES`; null is the stage's default.
        options: its keyword arguments.
    """

    name: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class RewardOptions:
    """The scorers.

    Attributes:
        functions: one reward (`_target_`, or `path` and `name`), or a mapping from data_source to rewards.
        num_workers: reward processes of each training worker.
        deadline_s: seconds for one call of a reward.
        max_failure_rate: share of failed samples that stops the run.
    """

    functions: dict[str, Any] = field(default_factory=dict)
    num_workers: int = 1
    deadline_s: float = 30.0
    max_failure_rate: float = 0.1


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


@dataclass
class GuardOptions(Bounds):
    """Signs that training diverges, looked for after every step; null for no bound.

    Attributes:
        action: `warn`; `stop`, with an error; or `roll_back` to the newest checkpoint, past the data of bad steps.
        max_rollbacks: after so many, `roll_back` is `stop`.
    """

    action: str = "stop"
    max_rollbacks: int = 3


@dataclass
class AverageOptions:
    """A moving average of the trained weights, in float32: validations are its, and so is the exported model.

    Attributes:
        keep: share that a step keeps, such as 0.99; 0 for no average.
    """

    keep: float = 0.0


@dataclass
class DebugOptions:
    """To look at a run closely.

    Attributes:
        dump_rollouts: newest steps whose samples are kept in `rollouts/` of the run's folder; 0 for none.
        replay: such a folder: the run trains on its samples in place of sampling, without a rollout engine; null
            samples.
    """

    dump_rollouts: int = 0
    replay: str | None = None


@dataclass
class RunConfig:
    """The run.

    Attributes:
        name: of the run; its folder is `output_dir/name`.
        output_dir: where runs live.
        steps: steps of training.
        seed: of everything.
        resume: continue the run of this name; false refuses to touch an existing one.
        deterministic: bit-for-bit repeatable arithmetic.
        checkpoint_every: steps between checkpoints; the last step always makes one.
        keep_checkpoints: newest checkpoints that are kept.
        keep_best: best checkpoints that are kept besides, as `best_<step>`.
        best_metric: by which they are the best: one of validation, such as `val/reward`, or of training steps.
        best_mode: `max` or `min`.
        time_limit: from the start of the command, such as `3h50m`: the step that runs then is the last, and is saved;
            null for no limit. SIGTERM and the file `stop` in the run's folder do the same. The command exits with 75.
        eval_every: steps between validations; 0 for none.
        eval_before: validate before the first step.
        target_reward: stop when a validation reaches this reward; null trains all steps.
        export: write a Hugging Face folder at the end.
        export_lora: of a model with an adapter: `merged` writes whole weights, `adapter` the adapter alone.
    """

    name: str = MISSING
    output_dir: str = "outputs"
    steps: int = 100
    seed: int = 0
    resume: bool = False
    deterministic: bool = False
    checkpoint_every: int = 50
    keep_checkpoints: int = 2
    keep_best: int = 0
    best_metric: str = "val/reward"
    best_mode: str = "max"
    time_limit: str | None = None
    eval_every: int = 20
    eval_before: bool = True
    target_reward: float | None = None
    export: bool = True
    export_lora: str = "merged"


@dataclass
class TrackingConfig:
    """MLflow.

    Attributes:
        enabled: record the run in MLflow; `metrics.jsonl` in the run's folder is always written.
        uri: of the tracking store; null is MLFLOW_TRACKING_URI, or an SQLite file in `run.output_dir`.
        experiment: MLflow experiment.
        samples: rows of the table of samples that each validation logs.
        traces: samples of each step that become traces; each takes some 20 ms of a thread of the first worker.
        system_metrics: record how busy the machines are.
        upload_best: how many of the best checkpoints (`run.keep_best`) MLflow has a copy of, as artifacts.
        register_as: name in the model registry under which the exported policy becomes a version; null for none.
        champion_metric: a version that is better in it than the model's `champion`, on the same data, takes the alias.
        parent_run: id of the MLflow run that this one belongs to; null for none.
    """

    enabled: bool = True
    uri: str | None = None
    experiment: str = "rl_plugins"
    samples: int = 32
    traces: int = 0
    system_metrics: bool = True
    upload_best: int = 0
    register_as: str | None = None
    champion_metric: str = "val/reward"
    parent_run: str | None = None


@dataclass
class RecipeConfig:
    """A recipe.

    Attributes:
        stage: what is trained and how; the groups it has no use for are ignored.
        launcher: `ray`, or `local` for one process.
        algorithm: of policy optimization: a node with `_target_`.
        process_reward_model: of PRIME: a node with `_target_`, or null for its defaults.
    """

    stage: str = MISSING
    launcher: str = "ray"
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    reference: ReferenceOptions = field(default_factory=ReferenceOptions)
    teacher: TeacherOptions = field(default_factory=TeacherOptions)
    critic: CriticOptions = field(default_factory=CriticOptions)
    reward_model: RewardModelOptions = field(default_factory=RewardModelOptions)
    process_reward_model: Any = None
    loss: LossOptions = field(default_factory=LossOptions)
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    environment: EnvironmentOptions = field(default_factory=EnvironmentOptions)
    validation: ValidationOptions = field(default_factory=ValidationOptions)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    schedule: ScheduleOptions = field(default_factory=ScheduleOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    reward: RewardOptions = field(default_factory=RewardOptions)
    strategy: StrategyOptions = field(default_factory=StrategyOptions)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    average: AverageOptions = field(default_factory=AverageOptions)
    guard: GuardOptions = field(default_factory=GuardOptions)
    debug: DebugOptions = field(default_factory=DebugOptions)
    algorithm: Any = None


def parse_config(values: Any) -> RecipeConfig:
    """Check a mapping against the schema and make it a `RecipeConfig`; data files and folders become absolute.

    Raises:
        ConfigError: a key that does not exist, a value of the wrong type, or one that is missing.
    """
    try:
        # As plain values: Hydra's `+key=value` lets unknown keys into what it composes.
        plain = OmegaConf.to_container(values) if OmegaConf.is_config(values) else values
        config: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(RecipeConfig), plain))
        config.data.mixture = _parse_mixture(config.data.mixture)
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error, lambda: keys_of(OmegaConf.structured(RecipeConfig)))) from None
    # MLflow sets the variable itself for what comes after it in a process, such as another run.
    config.tracking.uri = config.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI") or None
    # Ray's workers have working directories of their own.
    config.run.output_dir = str(Path(config.run.output_dir).absolute())
    config.data.train_files = [str(Path(path).absolute()) for path in config.data.train_files]
    for part in config.data.mixture.values():
        part.files = [str(Path(path).absolute()) for path in part.files]
    config.data.val_files = [str(Path(path).absolute()) for path in config.data.val_files]
    if config.debug.replay:
        config.debug.replay = str(Path(config.debug.replay).absolute())
    if config.strategy.offload.folder:
        config.strategy.offload.folder = str(Path(config.strategy.offload.folder).absolute())
    for reward in config.reward.functions.values():
        if isinstance(reward, dict) and "_target_" not in reward and "path" in reward:
            reward["path"] = str(Path(str(reward["path"])).absolute())
    for group in (config.model, config.reference, config.teacher, config.critic, config.reward_model):
        if group.path and Path(group.path).is_dir():
            group.path = str(Path(group.path).absolute())
    return cast(RecipeConfig, config)


def register_schema() -> None:
    """Make `RecipeConfig` known to Hydra as `recipe_schema`, the first entry of every recipe's defaults."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="recipe_schema", node=RecipeConfig)


def num_engines(config: RecipeConfig) -> int:
    """How many rollout engines there are."""
    engines = config.rollout.engines
    return config.placement.num_workers if engines == "per_worker" else int(engines)


def rollout_sleep(config: RecipeConfig) -> str:
    """What the engines give back while the workers train."""
    return config.rollout.sleep or ("none" if config.schedule.max_staleness else "kv_cache")


def rollout_dtype(config: RecipeConfig) -> str:
    """Name of the dtype of a rollout engine's weights: as configured, or the one that the policy computes in."""
    return config.rollout.dtype or ("float32" if config.model.precision == "32-true" else "bfloat16")


def _parse_mixture(parts: Any) -> dict[str, MixtureOptions]:
    """The parts by their names; the type of the option itself is open, or Hydra would refuse names it does not know."""
    node = OmegaConf.create({"data": {"mixture": DictConfig({}, element_type=MixtureOptions)}})
    merged: Any = OmegaConf.merge(node, {"data": {"mixture": parts or {}}})
    return {str(name): part for name, part in cast(Any, OmegaConf.to_object(merged))["data"]["mixture"].items()}
