"""Scale of the loss: the sequence of torch's GradScaler, DeepSpeed's scale, and stages on a single device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from torch import nn

from rl_plugins.callbacks.checkpoint import PolicyCheckpoint
from rl_plugins.callbacks.divergence_guard import DivergenceGuard
from rl_plugins.config.models import LoraConfig
from rl_plugins.config.run import Bounds
from rl_plugins.errors import ConfigError, TrainingDiverged
from rl_plugins.models.tiny import build_model, save_tiny_policy
from rl_plugins.stages.optimizer import MicroBatchLoss
from rl_plugins.stages.sft import SFT
from rl_plugins.strategies.fsdp import FSDPStrategy
from rl_plugins.strategies.loss_scale import (
    GOOD_STEPS,
    EngineScale,
    LossScale,
)
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.strategies.zero import ZeroStrategy
from rl_plugins.tests.quiet_trainer import precision_flags
from rl_plugins.tests.stages import canned, canned_labels, canned_preferences

OVERFLOW, GOOD = float("inf"), 1.0


def scales_of_torch(norms: Iterable[float], first: float) -> list[float]:
    """Return the scale of `torch.amp.GradScaler` after each step, with gradients of the given norms."""
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=first)
    scales = []
    for norm in norms:
        scaler.scale(torch.zeros(1))
        weight.grad = torch.tensor([norm])
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def test_update_gives_the_scales_of_torch() -> None:
    script = [GOOD, OVERFLOW, float("nan"), *[GOOD] * (GOOD_STEPS - 1), OVERFLOW, *[GOOD] * (2 * GOOD_STEPS + 3)]
    scale = LossScale()
    assert asdict(scale) == {"value": torch.amp.GradScaler("cpu").get_scale(), "good_steps": 0, "skipped": 0}
    ours, taken = [], []
    for norm in script:
        taken.append(scale.update(norm))
        ours.append(scale.value)
    assert ours == scales_of_torch(script, 2.0**16)
    assert taken == [norm == GOOD for norm in script]
    assert scale == LossScale(2.0**15, 3, skipped=3)


def test_state_of_a_scale_continues_in_a_count_of_good_steps() -> None:
    scale = LossScale(good_steps=GOOD_STEPS - 2)
    restored = LossScale(**asdict(scale))
    assert [restored.update(GOOD), restored.value, restored.update(GOOD), restored.value] == [
        True, 2.0**16, True, 2.0**17,
    ]  # fmt: skip


def test_scale_does_not_fall_below_1_and_norms_of_steps_at_1_are_known() -> None:
    scale = LossScale(4.0)
    known = [(scale.value, scale.known_norm(OVERFLOW), scale.update(OVERFLOW)) for _ in range(4)]
    assert known == [(4.0, None, False), (2.0, None, False), (1.0, OVERFLOW, False), (1.0, OVERFLOW, False)]
    assert scale.known_norm(GOOD) == GOOD and scale.update(GOOD)


def test_scaled_loss_of_float16_is_finite_and_gradients_are_divided_exactly() -> None:
    scale, weight = LossScale(), nn.Parameter(torch.tensor(1e-7))
    assert scale.scaled(torch.tensor(8.0, dtype=torch.float16)) == 8 * 2.0**16
    scale.scaled(weight * 3).backward()
    gradient = weight.grad
    assert gradient == 3 * 2.0**16
    scale.unscale([gradient])
    assert gradient == 3


class Optimizer:
    """The parts of an optimizer of DeepSpeed that change the scale, in the order of DeepSpeed."""

    def __init__(self, scale: float, min_scale: float | None) -> None:
        self.loss_scale, self.divided_by = scale, 0.0
        self.loss_scaler = SimpleNamespace(raise_error_at_min_scale=True)
        if min_scale is not None:
            self.loss_scaler.min_scale = min_scale

    def _update_scale(self, has_overflow: bool) -> None:
        self.loss_scale *= 0.5 if has_overflow else 2.0

    def step(self, norm: float) -> None:
        self._update_scale(norm == OVERFLOW)
        self.divided_by = self.loss_scale


def engine(
    *, float16: bool, norm: float | None = OVERFLOW, scale: float = 2.0**5, min_scale: float | None = 1.0
) -> Any:
    """Return an object with the attributes of an engine of DeepSpeed."""
    return SimpleNamespace(
        fp16_enabled=lambda: float16,
        get_global_grad_norm=lambda: norm,
        optimizer=Optimizer(scale, min_scale),
        skipped_steps=7,
    )


def test_scale_of_an_engine_is_the_scale_of_deepspeed() -> None:
    assert EngineScale(engine(float16=False)).scale is None
    assert EngineScale(engine(float16=True)).scale == LossScale(2.0**5, skipped=7)


@pytest.mark.parametrize(
    ("options", "norm", "expected"),
    [
        ({"scale": 2.0**5}, OVERFLOW, None),
        # The next step has the scale 1.
        ({"scale": 2.0}, OVERFLOW, None),
        ({"scale": 1.0}, OVERFLOW, OVERFLOW),
        ({"scale": 64.0, "min_scale": 64.0}, OVERFLOW, OVERFLOW),
        # A scale that does not change.
        ({"scale": 64.0, "min_scale": None}, OVERFLOW, OVERFLOW),
        ({"scale": 2.0**5}, GOOD, GOOD),
        ({"scale": 2.0**5}, None, None),
        ({"float16": False}, OVERFLOW, OVERFLOW),
    ],
)
def test_norm_of_an_engine_is_unknown_after_an_overflow_of_float16(
    options: dict[str, Any], norm: float | None, expected: float | None
) -> None:
    scale = EngineScale(engine(norm=norm, **{"float16": True, **options}))
    with scale.step():
        pass
    assert scale.norm == expected


def test_scale_of_an_engine_changes_after_the_gradients_are_divided_by_the_scale() -> None:
    for float16, overflow in ((True, False), (True, True), (False, False)):
        one = engine(float16=float16)
        with EngineScale(one).step():
            one.optimizer.step(OVERFLOW if overflow else GOOD)
        assert one.optimizer.loss_scale == 2.0**5 * (0.5 if overflow else 2)
        assert one.optimizer.divided_by == (2.0**5 if float16 else 2.0**6)


def test_scale_of_an_engine_stays_without_a_step() -> None:
    one = engine(float16=True)
    with pytest.raises(ZeroDivisionError), EngineScale(one).step():
        one.optimizer.step(GOOD)
        raise ZeroDivisionError
    assert one.optimizer.loss_scale == 2.0**5
    with EngineScale(one).step():
        pass
    assert one.optimizer.loss_scale == 2.0**5
    one.optimizer._update_scale(False)
    assert one.optimizer.loss_scale == 2.0**6


def test_smallest_scale_is_allowed_for_engines_of_float16_alone() -> None:
    for float16 in (True, False):
        one = engine(float16=float16)
        EngineScale(one)
        assert one.optimizer.loss_scaler.raise_error_at_min_scale is not float16


def test_zero_strategy_gives_deepspeed_the_steps_of_the_scale() -> None:
    strategy = ZeroStrategy(stage=2)
    strategy.precision_plugin = DeepSpeedPrecision("16-mixed")
    strategy._init_config_if_needed()
    assert isinstance(strategy.config, dict)
    expected = {"enabled": True, "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": GOOD_STEPS}
    assert strategy.config["fp16"].items() >= {**expected, "hysteresis": 1, "min_loss_scale": 1}.items()


# Stages on a single device ----------------------------------------------------------------------------------------

ROWS = {"prompt_ids": [[5, 6, 7], [8, 9]], "response_ids": [[20, 21], [22, 23, 24]]}


class SaveAfter(Callback):
    """Saves a checkpoint after a step of the stage."""

    def __init__(self, step: int, file: Path) -> None:
        self._step, self._file = step, file

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *arguments: Any) -> None:
        if pl_module.step == self._step:
            trainer.save_checkpoint(self._file)


class Overflowing(SFT):
    """A stage whose gradients overflow in some steps, at any scale."""

    overflows_in: tuple[int, ...] = ()

    def optimize(self, losses: Iterable[MicroBatchLoss], name: str | None = None) -> None:
        factor = 1e38 if self.step in self.overflows_in else 1.0
        super().optimize(((loss * factor * factor, last) for loss, last in losses), name)


def fit(stage: Any, batches: list[Any], **options: Any) -> tuple[Any, dict[str, float]]:
    """Train a stage in float16; return its policy's strategy and the metrics of the last step."""
    strategy = SingleDeviceRolloutStrategy(rollout=canned.CannedRollout())
    start = options.pop("ckpt_path", None)
    flags = {"accelerator": "cpu", **precision_flags("16-mixed"), **options}
    trainer = canned.quiet_trainer(strategy, **flags)
    trainer.fit(stage, canned.loader(batches), ckpt_path=start, weights_only=True)
    return strategy, {name: float(value) for name, value in trainer.callback_metrics.items()}


def sft(overflows_in: tuple[int, ...] = (), **options: Any) -> Overflowing:
    stage = Overflowing(build_model(hidden_size=32), tokenizer=canned.tokenizer, **options)
    stage.overflows_in = overflows_in
    return stage


def test_overflow_leaves_out_a_step_and_does_not_trip_the_divergence_guard() -> None:
    stage = sft(overflows_in=(1,))
    strategy, metrics = fit(stage, [ROWS] * 2, callbacks=[DivergenceGuard(Bounds())])
    assert strategy.scale_of_loss("policy") == LossScale(2.0**15, 0, 1)
    assert metrics["train/skipped_updates"] == 1 and metrics["train/loss_scale"] == 2.0**15
    assert "train/gradient_norm" in metrics, "the norm of the step before stays in Lightning's metrics"
    assert stage.stale_metrics == {"train/gradient_norm"} and strategy.gradient_norm("policy") is None
    assert all(bool(parameter.isfinite().all()) for parameter in stage.policy.parameters())
    assert {parameter.dtype for parameter in stage.policy.parameters()} == {torch.float32}


def test_overflow_in_all_steps_trips_the_divergence_guard_at_the_smallest_scale() -> None:
    stage = sft(overflows_in=tuple(range(30)))
    with pytest.raises(TrainingDiverged, match=r"step 17: train/gradient_norm is (inf|nan) \(finite=True\)"):
        fit(stage, [ROWS] * 30, callbacks=[DivergenceGuard(Bounds())])
    assert stage.step == 17 and all(bool(parameter.isfinite().all()) for parameter in stage.policy.parameters())


def test_overflow_of_a_forward_pass_ends_training_by_the_guard_or_the_check_of_packing() -> None:
    model: Any = build_model(hidden_size=32)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(1e9)
    for packing, error, message in (
        (False, TrainingDiverged, r"step 1: train/loss is nan \(finite=True\)\."),
        (True, ConfigError, r"Qwen2ForCausalLM computes outputs that are not finite: .* use bf16-mixed"),
    ):
        stage = SFT(model, tokenizer=canned.tokenizer, packing=packing)
        with pytest.raises(error, match=message):
            fit(stage, [ROWS], callbacks=[DivergenceGuard(Bounds())])


class Enlarged(SFT):
    """A stage with a factor of the loss in each update, and a small scale.

    Attributes:
        factors: factors of the next updates.
    """

    factors: list[float]

    def on_train_start(self) -> None:
        super().on_train_start()
        strategy: Any = self.trainer.strategy
        strategy._loss_scales = {"policy": LossScale(2.0**4)}

    def optimize(self, losses: Iterable[MicroBatchLoss], name: str | None = None) -> None:
        factor = self.factors.pop(0)
        super().optimize(((loss * factor, last) for loss, last in losses), name)


def test_overflow_after_a_roll_back_keeps_the_step_and_has_no_norm_in_reports_to_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: list[dict[str, float]] = []
    monkeypatch.setattr(PolicyCheckpoint, "_report", lambda self, trainer, metrics, final: reports.append(metrics))
    stage = Enlarged(build_model(hidden_size=32), tokenizer=canned.tokenizer)
    stage.factors = [1.0, 100.0, 1e30, 1.0]
    guard = DivergenceGuard(Bounds(gradient_norm=100.0), action="roll_back", folder=tmp_path)
    strategy, _ = fit(
        stage, [ROWS] * 4, callbacks=[guard, PolicyCheckpoint(tmp_path, every=1, keep_last=9, report_to_ray=True)]
    )
    assert (guard.rollbacks, stage.step, stage.factors) == (1, 3, [])
    assert strategy.scale_of_loss("policy") == LossScale(2.0**3, 1, 1)
    # Step 2 is the step that the overflow left out.
    assert ["train/gradient_norm" in report for report in reports] == [True, False, True]
    assert all("train/loss" in report and report["step"] == step for step, report in enumerate(reports, 1))


def test_resume_on_a_single_device_continues_with_the_same_bits_and_the_same_scale(tmp_path: Path) -> None:
    whole, resumed, file = sft((0,)), sft((0,)), tmp_path / "state.ckpt"
    strategy, _ = fit(whole, [ROWS] * 3, callbacks=[SaveAfter(2, file)])
    resumed_strategy, metrics = fit(resumed, [ROWS] * 3, ckpt_path=file)
    assert resumed.step == 3 and metrics["train/skipped_updates"] == 1
    assert resumed_strategy.scale_of_loss("policy") == strategy.scale_of_loss("policy") == LossScale(2.0**15, 2, 1)
    torch.testing.assert_close(resumed.policy.state_dict(), whole.policy.state_dict(), rtol=0, atol=0)


def test_checkpoint_of_another_precision_has_no_scale_and_gets_none(tmp_path: Path) -> None:
    float16, float32 = tmp_path / "float16.ckpt", tmp_path / "float32.ckpt"
    fit(sft(), [ROWS] * 2, callbacks=[SaveAfter(1, float16)])
    trainer = canned.quiet_trainer(SingleDeviceRolloutStrategy(), accelerator="cpu", callbacks=[SaveAfter(2, float32)])
    trainer.fit(sft(), canned.loader([ROWS] * 3), ckpt_path=float16, weights_only=True)
    assert "loss_scales" in torch.load(float16) and "loss_scales" not in torch.load(float32)
    assert not any("scale" in name or "skipped" in name for name in trainer.callback_metrics)
    strategy, _ = fit(sft(), [ROWS] * 3, ckpt_path=float32)
    assert strategy.scale_of_loss("policy") == LossScale(good_steps=1)


def preferences(folder: Path) -> tuple[Any, Any]:
    return canned_preferences.stage_of(str(save_tiny_policy(folder))), canned_preferences.batch_of(True, [0, 1])


def rewards(folder: Path) -> tuple[Any, Any]:
    case = next(iter(canned_labels.CASES))
    return canned_labels.stage_of(str(save_tiny_policy(folder)), case), canned_labels.batch_of(case)


def adapter(folder: Path) -> tuple[Any, Any]:
    policy = str(save_tiny_policy(folder))
    return SFT(policy, tokenizer=canned.tokenizer, lora=LoraConfig(rank=2), gradient_checkpointing=True), ROWS


@pytest.mark.parametrize("make", [preferences, rewards, adapter])
def test_stages_train_in_float16(tmp_path: Path, make: Any) -> None:
    stage, batch = make(tmp_path / "policy")
    strategy, metrics = fit(stage, [batch] * 2)
    model = getattr(stage, stage.trained)
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    scale = strategy.scale_of_loss(stage.trained)
    assert scale.good_steps + scale.skipped == 2 and metrics["train/skipped_updates"] == scale.skipped


def test_module_without_a_stage_is_refused_in_float16() -> None:
    class Plain(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def training_step(self, batch: object) -> Any:
            return self.weight.sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([self.weight], lr=0.1)

    with pytest.raises(ConfigError, match="precision=16-mixed: only stages scale their losses: use bf16-mixed"):
        fit(Plain(), [ROWS])


def test_backward_pass_of_a_stage_in_float16_needs_the_name_of_the_model() -> None:
    class Own(SFT):
        def optimize(self, losses: Iterable[MicroBatchLoss], name: str | None = None) -> None:
            for loss, _ in losses:
                self.manual_backward(loss)

    with pytest.raises(
        ConfigError, match=r"precision=16-mixed: pass model_name=\.\.\. to manual_backward, which names"
    ):
        fit(Own(build_model(hidden_size=32), tokenizer=canned.tokenizer), [ROWS])


def test_fsdp_strategy_knows_the_plugin_of_float16() -> None:
    trainer = canned.quiet_trainer(FSDPStrategy(), accelerator="cpu", **precision_flags("16-mixed"))
    assert trainer.precision == "16-mixed"
