"""Three steps of GRPO in one process, in which the strategy proves its memory phases, updates, checkpoints and exports.

`TransformersRollout` samples from a copy of the policy. Each update is compared with the policy, tensor by tensor and
by log-probs. After the second step the weights are lost, and come back from a checkpoint. The third step trains on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor
from typing_extensions import override

from integration_tests.gpu.without_vllm.cases import Place, Skipped, need
from integration_tests.rewards import shortness
from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.algorithms.regularization import KLConfig
from rl_plugins.config.models import LoraConfig, OptimizerConfig
from rl_plugins.config.precision import dtype_of_passes
from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.data.datamodule import PromptDataModule
from rl_plugins.data.prepare.tasks import addition_rows
from rl_plugins.models.tiny import build_tokenizer, save_tiny_policy
from rl_plugins.rollout.transformers_engine import TransformersRollout
from rl_plugins.stages.policy_optimization import PolicyOptimization
from rl_plugins.strategies.contract import POLICY
from rl_plugins.strategies.optimizers import optimizer_states
from rl_plugins.tests.quiet_trainer import precision_flags, quiet_trainer

STEPS, SAVED = 3, 2
_PROMPTS = 8
# The policy of a GPU has 94 M parameters.
_SIZES: dict[str, dict[str, Any]] = {
    "cuda": {"hidden_size": 1024, "num_layers": 8, "num_heads": 16, "num_kv_heads": 8, "intermediate_size": 2816},
    "cpu": {"hidden_size": 32, "intermediate_size": 48},
}
# Another order of sums changes the sign of the smallest gradients, and AdamW's first step has the size of the rate.
_LARGEST_DIFFERENCE = {torch.float32: 0.05, torch.float16: 0.3, torch.bfloat16: 0.3}
_LARGEST_GAP = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.3}
_LARGEST_GAP_OF_FLOAT8 = 1.0
# In float16: small enough for the gradients. At the scale of a run, overflows may leave out all three steps.
SCALE_POWER = 8


@dataclass(frozen=True)
class Variant:
    """Options of a training.

    Attributes:
        precision: precision of the trainer.
        place: place of the optimizer states and the policy; with `while_sampling`, the place while the rollout engine
            samples.
        gradient_checkpointing: recompute activations.
        lora_rank: rank of the adapter; 0 trains the model itself.
        quantization: quantization of the weights under the adapter.
        float8: scales of 8-bit products.
        packing: run samples as one row without padding.
    """

    precision: Literal["32-true", "bf16-mixed", "16-mixed", "bf16-true"] = "bf16-mixed"
    place: Literal["while_sampling", "stay", "cpu"] = "while_sampling"
    gradient_checkpointing: bool = False
    lora_rank: int = 0
    quantization: str | None = None
    float8: str | None = None
    packing: bool = True

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the rollout engine."""
        dtype: torch.dtype = getattr(torch, dtype_of_passes(self.precision))
        return dtype

    @property
    def largest_gap(self) -> float:
        """Largest difference between the log-probs of policy and rollout engine."""
        return _LARGEST_GAP_OF_FLOAT8 if self.float8 else _LARGEST_GAP[self.dtype]


class _Interrupted(PolicyOptimization):
    """Keeps the metrics of each step, and loses the weights after step `SAVED`.

    Attributes:
        rows: metrics of each step.
        first_step: change of each weight by the first step.
        places_of_states: types of the devices of the optimizer's states after the first step.
        final: weights after the last step.
    """

    policy: Any
    saved: Path

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.rows: list[dict[str, float]] = []
        self.first_step: dict[str, Tensor] = {}
        self.places_of_states: set[str] = set()
        self.final: dict[str, Tensor] = {}

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        scale = self.strategy.scale_of_loss(POLICY)
        if scale is not None:
            # DeepSpeed has begun with this scale.
            scale.value = 2.0**SCALE_POWER
        self.first_step = self._weights()

    @override
    def track(self, metrics: Mapping[str, float]) -> None:
        self.rows.append(dict(metrics))

    @override
    def end_step(self, metrics: Mapping[str, float]) -> None:
        super().end_step(metrics)
        if self.step == 1:
            self._keep_first_step()
        if self.step == SAVED:
            self._lose_and_restore()

    def _keep_first_step(self) -> None:
        before = self.first_step
        self.first_step = {name: tensor - before[name] for name, tensor in self._weights().items()}
        for optimizer in self.trainer.optimizers:
            # DeepSpeed's optimizer has the optimizer of the stage inside.
            states = optimizer_states(getattr(optimizer, "optimizer", optimizer))
            self.places_of_states |= {tensor.device.type for tensor in states if tensor.dim()}

    def _lose_and_restore(self) -> None:
        before = self._weights()
        self.trainer.save_checkpoint(self.saved)
        trained = {name for name, parameter in self.policy.named_parameters() if parameter.requires_grad}
        for name, shard in self.strategy.shards(POLICY):
            if name in trained:
                shard.zero_()
        assert _different(before, self._weights()), "zeros in the shards of the policy do not change its weights"
        self.restore(self.saved)
        assert not (lost := _different(before, self._weights())), f"a checkpoint does not bring back {lost[:3]}"

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self.final = self._weights()

    def _weights(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.strategy.weight_source()}


def train(
    place: Place, strategy_of: Callable[[TransformersRollout, Variant], Any], variant: Variant
) -> Mapping[str, Any]:
    """Train, and check the results.

    Args:
        place: place of the section.
        strategy_of: function that makes the strategy.
        variant: options of the training.

    Returns:
        Seconds of phases, GiB of memory, and the largest gap between the log-probs of policy and rollout engine.

    Raises:
        AssertionError: a checkpoint, an export or a gap is wrong, or an optimizer step was left out. The strategy has
            errors of its own.
    """
    return _checked(_fit(place, strategy_of, variant), variant, place.folder)


def train_on_host(
    place: Place, strategy_of: Callable[[TransformersRollout, Variant], Any], variant: Variant
) -> Mapping[str, Any]:
    """Train with states on the host at all times, and compare the first step with states on the device.

    Args:
        place: place of the section.
        strategy_of: function that makes the strategy.
        variant: options of the training, with the place `cpu`.

    Returns:
        The figures of `train`, and the relative difference of the first steps.

    Raises:
        AssertionError: the steps differ, optimizer states are in the wrong place, or `train` would raise the error.
    """
    plain_folder = place.folder / "plain"
    plain_folder.mkdir()
    plain = _fit(replace(place, folder=plain_folder), strategy_of, replace(variant, place="stay"))
    stage = _fit(place, strategy_of, variant)
    difference = _relative_difference(stage.first_step, plain.first_step)
    assert difference < _LARGEST_DIFFERENCE[variant.dtype], f"the first steps differ by {difference:.2g} of their norm"
    assert stage.places_of_states == {"cpu"}, f"optimizer states are on {sorted(stage.places_of_states)}"
    assert plain.places_of_states == {place.device}, f"optimizer states are on {sorted(plain.places_of_states)}"
    return {"difference": difference, **_checked(stage, variant, place.folder)}


def save_policy(place: Place, folder: Path) -> None:
    """Save the policy of a place in a folder."""
    save_tiny_policy(folder, initializer_range=0.03 if place.on_gpu else 0.2, **_SIZES[place.device])


def _fit(place: Place, strategy_of: Callable[[TransformersRollout, Variant], Any], variant: Variant) -> _Interrupted:
    """Train, and return the stage."""
    if variant.quantization:
        need("bitsandbytes", "model.lora.quantization")
    if variant.float8:
        need("torchao", "model.float8")
        if not place.on_gpu:
            raise Skipped("8-bit products need a GPU")
    torch.manual_seed(0)
    folder, model = place.folder, place.folder / "model"
    if not model.is_dir():
        save_policy(place, model)
    engine = TransformersRollout(str(model), dtype=variant.dtype, device=place.device, check_updates=1)
    stage = _Interrupted(
        str(model),
        tokenizer=build_tokenizer(),
        scorer=shortness,
        sampling=SamplingConfig(max_tokens=20, num_samples=4),
        algorithm=Algorithm(kl=KLConfig(0.1)),
        optimizer=OptimizerConfig(lr=1e-4),
        gradient_checkpointing=variant.gradient_checkpointing,
        float8=variant.float8,
        lora=LoraConfig(rank=variant.lora_rank, quantization=variant.quantization),
        packing=variant.packing,
        # Several micro-batches.
        tokens_per_micro_batch=300,
        max_steps=STEPS,
    )
    stage.saved = folder / "state"
    rows = addition_rows(below=50, num_train=STEPS * _PROMPTS, num_test=1, seed=0)["train"]
    trainer = quiet_trainer(
        strategy_of(engine, variant),
        accelerator=place.device,
        devices=1,
        **precision_flags(variant.precision, place.device),
    )
    data = PromptDataModule(rows, tokenizer=stage.tokenizer, prompts_per_step=_PROMPTS, max_prompt_tokens=26)
    trainer.fit(stage, datamodule=data)
    assert len(stage.rows) == STEPS
    return stage


def _checked(stage: _Interrupted, variant: Variant, folder: Path) -> Mapping[str, Any]:
    """Check steps, gaps and exports, and return the figures of `train`."""
    if variant.dtype == torch.float16:
        assert not (left_out := stage.rows[-1]["train/skipped_updates"]), f"{left_out:g} optimizer steps were left out"
    assert any(change.any() for change in stage.first_step.values()), "the first step changed no weight"
    gap = max(row["train/rollout_gap_max"] for row in stage.rows)
    assert gap < variant.largest_gap, f"the log-probs of policy and rollout engine differ by {gap:.2g}"
    _check_exports(stage, variant, folder)
    return {"gap": gap, **_costs(stage.rows[-1])}


def _check_exports(stage: _Interrupted, variant: Variant, folder: Path) -> None:
    """Export after the fit, and compare the files with the last weights."""
    stage.export(folder / "merged")
    merged = load_file(folder / "merged" / "model.safetensors")
    assert merged and not _different(merged, {name: tensor.cpu() for name, tensor in stage.final.items()})
    if variant.lora_rank:
        stage.export(folder / "adapter", adapter=True)
        adapter = load_file(folder / "adapter" / "adapter_model.safetensors")
        changes = [factor for name, factor in adapter.items() if "lora_B" in name]
        assert changes and all(factor.any() for factor in changes), "the exported adapter has untrained factors"


def _relative_difference(changes: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the norm of the difference of all tensors, as a part of the norm of the expected tensors."""
    squares = torch.zeros(2, dtype=torch.float64)
    for name, tensor in expected.items():
        for place, values in enumerate((changes[name] - tensor, tensor)):
            squares[place] += float(values.double().square().sum())
    return float((squares[0] / squares[1]).sqrt())


def _different(weights: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors that differ."""
    return [name for name, tensor in weights.items() if not torch.equal(tensor, others[name])]


def _costs(metrics: Mapping[str, float]) -> dict[str, float]:
    phases = ("offload", "update_weights", "rollout", "reload", "update_policy")
    seconds = {f"{phase}_s": metrics[f"time/{phase}"] for phase in phases}
    return {**seconds, **{f"{phase}_gib": metrics[f"memory/{phase}"] for phase in ("rollout", "update_policy")}}
