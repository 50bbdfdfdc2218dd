"""Runs of PPO under ZeRO by one worker and by two. Some runs resume from a checkpoint of another run.

A run has a name in `RUNS`. Its folder is `FOLDER/<name>`, and the file `FOLDER/<name>.pt` contains the metrics and
weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.algorithms.regularization import KLConfig
from rl_plugins.callbacks.checkpoint import PolicyCheckpoint
from rl_plugins.config.models import CriticConfig, LoraConfig, OptimizerConfig, no_adapter
from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.data.loaders import StepLoader
from rl_plugins.run_folder import RunFolder
from rl_plugins.stages.clock import step_metrics
from rl_plugins.stages.policy_optimization import PolicyOptimization
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.strategies.zero import ZeroStrategy
from rl_plugins.tests.quiet_trainer import precision_flags
from rl_plugins.tests.stages import canned
from rl_plugins.tests.strategies.file_op import any_file_op
from rl_plugins.tests.strategies.moving import WatchingRollout, moving

STEPS, SAVED = 2, 1
STAGES = (1, 2, 3)
METRICS = ("loss", "gradient_norm", "critic/loss", "critic/gradient_norm", "kl", "reward", "lr")
# After an overflow, a step has no norm.
METRICS_OF_FLOAT16 = ("loss_scale", "skipped_updates", "critic/loss_scale", "critic/skipped_updates")


@dataclass(frozen=True)
class Run:
    """A run.

    Args:
        strategy: function that makes the strategy, given the folder of all runs.
        world_size: number of workers.
        resume: name of the run with the checkpoint to start from.
        steps: last step.
        lr: learning rate of the policy.
        policy: folder of the first model of the run.
        precision: precision of the trainer.
        optimizer: optimizer of policy and critic.
        lora: adapter of policy and critic.
        clip: bounds on the gradient norms of policy and critic.
        reload: destroy the trained models before step `SAVED + 1`, and load the checkpoint in the same process.
    """

    strategy: Callable[[Path], Any]
    world_size: int = 1
    resume: str | None = None
    steps: int = STEPS
    lr: float = 0.01
    policy: str = "policy"
    precision: Any = "32-true"
    optimizer: str | dict[str, str] = "AdamW"
    lora: LoraConfig = field(default_factory=no_adapter)
    clip: tuple[float, float] = 0.5, 0.3
    reload: bool = False


class Record(Callback):
    """Metrics after each step, and at the end the whole weights of all engines."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, float]] = {}
        self.weights: dict[str, dict[str, Tensor]] = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *arguments: Any) -> None:
        found = step_metrics(trainer, pl_module)
        names = [name for name in (*METRICS, *METRICS_OF_FLOAT16) if f"train/{name}" in found]
        self.steps[pl_module.step] = {name: found[f"train/{name}"] for name in names}

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        source: Any = trainer.strategy
        is_float16 = trainer.precision == "16-mixed"
        if isinstance(source, ZeroStrategy):
            assert isinstance(source.config, dict)
            sums_in_float32 = is_float16 or source.config["zero_optimization"]["stage"] > 1
            for name in pl_module.optimizer_configs():
                optimizer: Any = source.model_engine(name).optimizer
                assert not sums_in_float32 or optimizer.gradient_accumulation_dtype == torch.float32
        for name, model in pl_module.named_models().items():
            buffers = {key: buffer.dtype for key, buffer in model.named_buffers() if buffer.is_floating_point()}
            assert set(buffers.values()) == {torch.float32}, (name, buffers)
            for rotary in (one for one in model.modules() if hasattr(one, "compute_default_rope_parameters")):
                assert torch.equal(rotary.inv_freq, rotary.compute_default_rope_parameters(rotary.config)[0])
        for engine in pl_module.named_models():
            self.weights[engine] = {name: tensor.clone() for name, tensor in source.weight_source(engine)}


class ReloadRecord(Record):
    """Destroys the trained models with optimizer states in files once, and loads the checkpoint."""

    def __init__(self, run: Path) -> None:
        super().__init__()
        self._run = run

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, *arguments: Any) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, ZeroStrategy)
        if pl_module.step != SAVED:
            return
        for name in pl_module.optimizer_configs():
            engine: Any = strategy.model_engine(name)
            engine.optimizer.param_groups[0]["lr"] = 1e9
            states = [value for state in engine.optimizer.state.values() for value in state.values()]
            weights = [parameter.ds_tensor for parameter in engine.module.parameters()]
            for tensor in [*engine.optimizer.fp32_partitioned_groups_flat, *states, *weights]:
                tensor.data.zero_()
            for file in Path(engine.optimizer.optimizer_swapper.swap_folder).iterdir():
                file.write_bytes(bytes(file.stat().st_size))
        strategy.load_checkpoint(RunFolder(self._run).checkpoint(SAVED) / "state")


def train(_: int, folder: Path, name: str) -> None:
    """One rank of the run `name`."""
    from deepspeed.accelerator import get_accelerator

    # DeepSpeed's engine of float16 runs on every CPU, but DeepSpeed refuses CPUs without instructions for float16.
    with mock.patch.object(type(get_accelerator()), "is_fp16_supported", lambda self: True), any_file_op():
        _train(folder, name, RUNS[name])


def _train(folder: Path, name: str, run: Run) -> None:
    own = folder / name
    record = ReloadRecord(own) if run.reload else Record()
    own.mkdir(exist_ok=True)
    model = str(folder / run.policy)
    stage = PolicyOptimization(
        model,
        tokenizer=canned.tokenizer,
        scorer=canned.CannedScorer(),
        sampling=SamplingConfig(max_tokens=20, num_samples=3, temperature=canned.TEMPERATURE),
        algorithm=Algorithm(advantage="gae", kl=KLConfig(0.1)),
        critic=CriticConfig(
            model, OptimizerConfig(2 * run.lr, run.optimizer, gradient_clip=run.clip[1]), lora=run.lora
        ),
        optimizer=OptimizerConfig(run.lr, run.optimizer, gradient_clip=run.clip[0], warmup_steps=1),
        lora=run.lora,
        tokens_per_micro_batch=50,
        updates_per_step=2,
        max_steps=run.steps,
    )
    trainer = canned.quiet_trainer(
        run.strategy(folder),
        max_epochs=-1,
        accelerator="cpu",
        devices=1,
        num_nodes=run.world_size,
        **precision_flags(run.precision),
        callbacks=[record, PolicyCheckpoint(own, every=SAVED, keep_last=9)],
    )
    loader = StepLoader(
        canned.Prompts(), prompts_per_step=4, seed=3, rank=trainer.global_rank, world_size=trainer.world_size
    )
    start = None if run.resume is None else RunFolder(folder / run.resume).checkpoint(SAVED) / "state"
    trainer.fit(stage, loader, ckpt_path=start, weights_only=True)
    if trainer.is_global_zero:
        torch.save({"steps": record.steps, "weights": record.weights}, folder / f"{name}.pt")


def single(_: Path) -> SingleDeviceRolloutStrategy:
    return SingleDeviceRolloutStrategy(rollout=canned.CannedRollout())


def zero(stage: int, **options: Any) -> Callable[[Path], ZeroStrategy]:
    return lambda _: ZeroStrategy(stage=stage, timeout_s=100, rollout=canned.CannedRollout(), **options)


def on_host(stage: int, **options: Any) -> Callable[[Path], ZeroStrategy]:
    """Optimizer states are offloaded to the host, and under stage 3 the weights of the reference."""
    reference = {"reference": "cpu"} if stage == 3 else {}
    return zero(stage, offload={"policy": "cpu", "critic": "stay", **reference}, **options)


def moved(stage: int) -> Callable[[Path], Any]:
    """Trained engines move to the host while the rollout engine samples."""
    return lambda _: moving(ZeroStrategy(stage=stage, timeout_s=100, rollout=WatchingRollout()))


def in_files(name: str, **options: Any) -> Callable[[Path], ZeroStrategy]:
    places = dict.fromkeys(("policy", "critic", "reference"), "nvme")
    return lambda folder: zero(3, offload=places, offload_folder=folder / name, **options)(folder)


# Steps too small for bfloat16 weights.
SMALL: dict[str, Any] = {"world_size": 2, "lr": 1e-5, "precision": "bf16-true"}

FLOAT16: dict[str, Any] = {"world_size": 2, "precision": "16-mixed"}

# The step has the size of the gradient.
SGD: dict[str, Any] = {"optimizer": {"_target_": "torch.optim.SGD"}, "clip": (0.0, 0.0)}

TORCHAO = {"_target_": "torchao.optim.AdamW8bit"}
BITSANDBYTES = {"_target_": "bitsandbytes.optim.AdamW8bit"}
NF4 = LoraConfig(rank=4, alpha=8.0, quantization="nf4")
# Matrices large enough for 8-bit states.
EIGHT_BIT: dict[str, Any] = {"policy": "large"}

# DeepSpeed does not move groups of less than 1 MB: of the wide policy, some groups are in files.
SOME_IN_FILES: dict[str, Any] = {"sub_group_size": 200_000}

RUNS: dict[str, Run] = {
    "single": Run(single),
    **{f"one-{stage}": Run(zero(stage), steps=SAVED) for stage in STAGES},
    **{f"two-{stage}": Run(zero(stage), world_size=2) for stage in STAGES},
    **{f"sequence-{stage}": Run(zero(stage, sequence_parallel=2), world_size=2) for stage in STAGES},
    **{f"one-{stage}-two-{stage}": Run(zero(stage), world_size=2, resume=f"one-{stage}") for stage in STAGES},
    # Another number of workers and another stage at once.
    **{f"two-{stage}-one-{stage % 3 + 1}": Run(zero(stage % 3 + 1), resume=f"two-{stage}") for stage in STAGES},
    "single-faster": Run(single, resume="single", lr=0.05),
    **{f"one-{stage}-faster": Run(zero(stage), resume=f"one-{stage}", lr=0.05) for stage in STAGES},
    **{f"host-{stage}": Run(on_host(stage)) for stage in STAGES},
    **{f"moved-{stage}": Run(moved(stage)) for stage in STAGES},
    # Optimizer steps in several groups of parameters, as by default for a large model.
    "groups-3": Run(zero(3, sub_group_size=2000), world_size=2),
    "groups-3-one-3": Run(zero(3, sub_group_size=3000), resume="groups-3"),
    "bf16-2": Run(zero(2), **SMALL),
    "bf16-2-3": Run(zero(3), resume="bf16-2", **SMALL),
    **{f"float16-{stage}": Run(zero(stage, initial_scale_power=8), **FLOAT16) for stage in STAGES},
    **{f"float16-{stage}-resumed": Run(zero(stage), resume=f"float16-{stage}", **FLOAT16) for stage in STAGES},
    **{f"float16-host-{stage}": Run(on_host(stage, initial_scale_power=8), **FLOAT16) for stage in STAGES},
    "float16-3-one-2": Run(zero(2), resume="float16-3", precision="16-mixed"),
    **{f"overflow-{stage}": Run(zero(stage, initial_scale_power=40), **FLOAT16) for stage in STAGES},
    "sgd-single": Run(single, **SGD),
    # The scale is doubled in each step but the first.
    **{
        f"doubled-{stage}": Run(zero(stage, initial_scale_power=8, loss_scale_window=1), precision="16-mixed", **SGD)
        for stage in STAGES
    },
    "bf16-2-float16": Run(zero(2), resume="bf16-2", **FLOAT16),
    "two-3-float16": Run(zero(3), resume="two-3", **FLOAT16),
    "float16-2-bf16": Run(zero(2), resume="float16-2", **SMALL),
    "files-3": Run(in_files("files")),
    "files-3-resumed": Run(in_files("resumed_files"), resume="files-3"),
    "wide-single": Run(single, policy="wide"),
    "wide-3": Run(in_files("wide_files", **SOME_IN_FILES), policy="wide"),
    "wide-3-resumed": Run(in_files("resumed_wide_files", **SOME_IN_FILES), policy="wide", resume="wide-3"),
    "wide-3-reloaded": Run(in_files("reloaded_files", **SOME_IN_FILES), policy="wide", reload=True),
    "wide-3-one-1": Run(zero(1), policy="wide", resume="wide-3"),
    **{
        f"{name}-single{end}": Run(single, optimizer=optimizer, resume=resume, **EIGHT_BIT)
        for name, optimizer in (("torchao", TORCHAO), ("bitsandbytes", BITSANDBYTES))
        for end, resume in (("", None), ("-resumed", f"{name}-single"))
    },
    "bitsandbytes-3": Run(zero(3), world_size=2, optimizer=BITSANDBYTES, **EIGHT_BIT),
    "bitsandbytes-3-resumed": Run(zero(3), world_size=2, optimizer=BITSANDBYTES, resume="bitsandbytes-3", **EIGHT_BIT),
    "bitsandbytes-3-one": Run(zero(3), optimizer=BITSANDBYTES, resume="bitsandbytes-3", **EIGHT_BIT),
    "bitsandbytes-1": Run(on_host(1), world_size=2, optimizer=BITSANDBYTES, **EIGHT_BIT),
    "bitsandbytes-1-resumed": Run(moved(1), world_size=2, optimizer=BITSANDBYTES, resume="bitsandbytes-1", **EIGHT_BIT),
    "nf4-single": Run(single, lora=NF4),
    "nf4-single-resumed": Run(single, lora=NF4, resume="nf4-single"),
    "nf4-2": Run(zero(2), world_size=2, lora=NF4),
    "nf4-2-resumed": Run(moved(1), world_size=2, lora=NF4, resume="nf4-2"),
    "nf4-3": Run(zero(3), world_size=2, lora=NF4),
    "nf4-3-resumed": Run(moved(3), world_size=2, lora=NF4, resume="nf4-3"),
    "nf4-3-one-1": Run(zero(1), lora=NF4, resume="nf4-3"),
}
