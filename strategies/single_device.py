"""One device and plain PyTorch with the same contract, to debug a stage in one process without Ray or DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from rl_plugins.config.precision import MIXED
from rl_plugins.errors import CheckpointError, ConfigError
from rl_plugins.intact_checkpoint import check_state
from rl_plugins.models.lora import plain_weights
from rl_plugins.models.remote import learners_of
from rl_plugins.plain_file import load_plain
from rl_plugins.ranks import Ranks
from rl_plugins.rollout.engine import RolloutEngine
from rl_plugins.rollout.transformers_engine import TransformersRollout
from rl_plugins.strategies.autograd_steps import AutogradSteps
from rl_plugins.strategies.blending import BlendedModels
from rl_plugins.strategies.checkpoint_folder import (
    check_failures,
    check_is_whole,
    check_saved_four_bits,
    note_four_bits,
    restored_states,
    save_learner,
    writer_of,
)
from rl_plugins.strategies.contract import POLICY, HasNamedModels
from rl_plugins.strategies.memory import TrainingMemory
from rl_plugins.strategies.optimizers import optimizers_of
from rl_plugins.strategies.phase_log import PhaseLog
from rl_plugins.strategies.precision import ParameterPrecision
from rl_plugins.strategies.rollout_phases import RolloutPhases
from rl_plugins.weights.source import ModuleWeightSource, WeightSource


class SingleDeviceRolloutStrategy(AutogradSteps, SingleDeviceStrategy):
    """Lightning's single-device strategy with named models and a rollout engine.

    Args:
        device: device to train on; `cuda` is the first visible GPU.
        rollout: rollout engine; by default, a stage that samples gets a `TransformersRollout` with a copy of the
            policy.
        **kwargs: further arguments of Lightning's `SingleDeviceStrategy`.
    """

    restored: Mapping[str, str] = MappingProxyType({})
    known_intact: Path | None = None

    def __init__(
        self, device: str | torch.device = "cpu", *, rollout: RolloutEngine | None = None, **kwargs: Any
    ) -> None:
        if not isinstance(device, str | torch.device):
            raise ConfigError(
                f"device={repr(device)[:80]} is no device: give the rollout engine by name, with rollout=..."
            )
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            # `torch.cuda.set_device`, which Lightning calls, refuses a device without an index.
            device = torch.device("cuda", 0)
        super().__init__(device=device, **kwargs)
        # Lightning fills in the values of the trainer.
        self.parallel_devices: list[torch.device] | None = None
        self.num_nodes = 1
        self.ranks = Ranks()
        self.phase_log = PhaseLog(device=device)
        self.rollout_phases = RolloutPhases(rollout, self, TrainingMemory(), self._copy_of_policy)
        self.blended = BlendedModels(self.shards)
        self._connected_to: LightningModule | None = None

    @override
    def setup_environment(self) -> None:
        asked = len(self.parallel_devices or ()) * self.num_nodes
        if asked > 1:
            raise ConfigError(
                f"the trainer has {asked} devices (devices='auto' takes all GPUs), and SingleDeviceRolloutStrategy "
                "uses one: set Trainer(devices=1, num_nodes=1), or pass strategy=ZeroStrategy(...) or FSDPStrategy(...)"
            )
        if self.root_device.type == "cuda" and not torch.cuda.device_count():
            raise ConfigError(
                f"SingleDeviceRolloutStrategy(device={str(self.root_device)!r}): torch finds no GPU on this machine: "
                "use device='cpu'"
            )
        assert self.accelerator is not None
        if self.accelerator.name() != self.root_device.type:
            raise ConfigError(
                f"SingleDeviceRolloutStrategy(device={str(self.root_device)!r}), and the trainer computes on "
                f"{self.accelerator.name()}: set Trainer(accelerator={self.root_device.type!r}), or pass "
                f"device={self.accelerator.name()!r} to the strategy"
            )
        super().setup_environment()
        if isinstance(self.lightning_module, HasNamedModels) and self.precision_plugin.precision == "bf16-true":
            # Lightning's plugin would make new tensors bfloat16, too, such as the scores.
            self.precision_plugin = ParameterPrecision("bf16-true")
        self.rollout_phases.prepare()

    @override
    def setup(self, trainer: Trainer) -> None:
        if isinstance(self.precision_plugin, MixedPrecision):
            # `AutogradSteps` has a scale for each model.
            self.precision_plugin.scaler = None
        if self.precision_plugin.precision == "16-true":
            raise ConfigError("precision=16-true: float16 needs a scaled loss; use 16-mixed or bf16-true")
        super().setup(trainer)
        self._optimizers_of = optimizers_of(self._models(), self.optimizers)
        if trainer.state.fn == TrainerFn.FITTING:
            for name, model in self._models().items():
                if name not in self._optimizers_of:
                    model.eval().requires_grad_(False)
                elif self.precision_plugin.precision in MIXED:
                    # In 16 bits, rounding would remove small steps.
                    model.float()
        if self._connected_to is not trainer.lightning_module:
            # The rollout engine would get the weights of the stage before.
            self.rollout_phases.end_connection()
            self._connected_to = trainer.lightning_module
        self.rollout_phases.connect()

    @contextmanager
    def sharded_init(self, frozen: str | None = None) -> Iterator[None]:
        """Shard nothing."""
        yield

    def model_engine(self, name: str) -> nn.Module:
        """Return the model itself."""
        return self._models()[name]

    def _copy_of_policy(self) -> RolloutEngine:
        rank_zero_info(
            "the policy samples by a copy of itself in this process (TransformersRollout), which suits small models: "
            "pass rollout=VLLMRollout(...) to the strategy for other models"
        )
        return TransformersRollout(self.model_engine(POLICY), device=str(self.root_device))

    def _models(self) -> dict[str, nn.Module]:
        module = self.lightning_module
        return module.named_models() if isinstance(module, HasNamedModels) else {}

    def announce_backward(self, name: str, *, last: bool) -> None:
        """Do nothing: autograd accumulates gradients by itself."""

    def shards(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter whole."""
        for key, parameter in self.model_engine(name).named_parameters():
            yield key, parameter.data

    def weight_source(self, name: str = POLICY) -> WeightSource:
        """Return the weights of a model."""
        return plain_weights(ModuleWeightSource(self.model_engine(name)), self.model_engine(name))

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: object = None) -> None:
        path = Path(filepath)
        writer = writer_of(storage_options, path.parent)
        note_four_bits(checkpoint, self._models())
        self.add_loss_scales(checkpoint)
        writer.save(checkpoint, path)
        # Lightning's checkpoint file does not hold learners.
        for name, learner in learners_of(self._models()).items():
            save_learner(writer, learner, _learner_folder(filepath, name))
        check_failures([writer.failure], writer, storage_options, path)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        check_is_whole(Path(checkpoint_path))
        check_state(Path(checkpoint_path), self.known_intact)
        self.known_intact = None
        checkpoint: dict[str, Any] = load_plain(Path(checkpoint_path))
        check_saved_four_bits(Path(checkpoint_path), checkpoint, self._models())
        self.restore_loss_scales(checkpoint)
        self.rollout_phases.weights_changed()
        for name, learner in learners_of(self._models()).items():
            learner.load(_learner_folder(checkpoint_path, name))
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module = self.lightning_module
        if strict and isinstance(module, HasNamedModels):
            assert isinstance(module, LightningModule)
            own, saved = _shapes(module.state_dict()), _shapes(checkpoint["state_dict"])
            if odd := sorted(name for name in own.keys() | saved.keys() if own.get(name) != saved.get(name)):
                raise CheckpointError(
                    f"the checkpoint belongs to another model: {odd[0]} is in one of the two, or has two shapes: "
                    "resume with the models and the algorithm of the checkpoint"
                )
            if self.precision_plugin.precision in MIXED and module.trainer.state.fn == TrainerFn.FITTING:
                # The checkpoint has trained weights in 32 bits, and `setup`, which converts the models, comes later.
                weights: Mapping[str, Tensor] = checkpoint["state_dict"]
                for name, parameter in module.named_parameters():
                    # The checkpoint has no 4-bit weights.
                    if name in weights:
                        parameter.data = parameter.data.to(weights[name].dtype)
        super().load_model_state_dict(checkpoint, strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        self.restored = {
            name: restored_states(model, self._optimizers_of.get(name), self.lr_scheduler_configs)
            for name, model in self._models().items()
        }


def _learner_folder(file: str | Path, name: str) -> Path:
    return Path(f"{file}.{name}")


def _shapes(weights: Mapping[str, Any]) -> dict[str, torch.Size | None]:
    return {name: getattr(weight, "shape", None) for name, weight in weights.items()}
