"""Stages: optimizer, clock, precision, reference, checkpoints, and refused options."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers.logger import DummyLogger
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.algorithms.regularization import KLConfig
from rl_plugins.config.models import CriticConfig, OptimizerConfig
from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.errors import ConfigError, DataError
from rl_plugins.models.packed_attention import PACKED_SDPA
from rl_plugins.models.tiny import build_model, save_tiny_policy
from rl_plugins.stages.forward_passes import ForwardPasses
from rl_plugins.stages.policy_optimization import PolicyOptimization
from rl_plugins.stages.sampling import greedy
from rl_plugins.stages.sft import SFT
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.tests.stages import canned

SAMPLING = SamplingConfig(max_tokens=8, num_samples=3)


class Log(DummyLogger):
    """A logger that records the metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: Any, step: int | None = None, **kwargs: Any) -> None:
        self.rows.append((step, dict(metrics)))


def policy_optimization(policy: Any, **options: Any) -> PolicyOptimization:
    arguments = {"tokenizer": canned.tokenizer, "scorer": canned.CannedScorer(), "sampling": SAMPLING, **options}
    return PolicyOptimization(policy, **arguments)


def fit(stage: Any, steps: int = 2, batch: Any = None, **options: Any) -> Any:
    trainer = canned.quiet_trainer(SingleDeviceRolloutStrategy(rollout=canned.CannedRollout()), **options)
    batches = [batch or canned.prompt_batch(canned.PROMPTS)] * steps
    trainer.fit(stage, canned.loader(batches))
    return trainer


def test_plain_module_is_trained_by_the_optimizer_of_the_stage() -> None:
    model = build_model()
    before = model.model.norm.weight.clone()
    config = OptimizerConfig(lr=0.5, betas=(0.7, 0.8), weight_decay=0.25, warmup_steps=3, gradient_clip=0.5)
    log = Log()
    stage = policy_optimization(model, optimizer=config)
    strategy = SingleDeviceRolloutStrategy(rollout=canned.CannedRollout())
    trainer = canned.quiet_trainer(strategy, log_every_n_steps=1)
    trainer._loggers = [log]
    trainer.fit(stage, canned.loader([canned.prompt_batch(canned.PROMPTS)] * 3))
    (optimizer,) = trainer.optimizers
    assert isinstance(optimizer, torch.optim.AdamW)
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {id(p) for p in model.parameters()}
    assert optimizer.defaults["betas"] == (0.7, 0.8) and optimizer.defaults["weight_decay"] == 0.25
    assert not torch.equal(model.model.norm.weight, before)
    # The logged rate of a step is the rate of its update, by the stage's clock.
    assert [step for step, _ in log.rows] == [1, 2, 3]
    assert [row["train/lr"] for _, row in log.rows] == pytest.approx([0.125, 0.25, 0.375])
    assert all(row["train/gradient_norm"] > 0 and row["time/update_policy"] > 0 for _, row in log.rows)


def test_gradient_clip_of_the_stage_bounds_the_gradient() -> None:
    norms = {}
    for bound in (0.0, 1e-3):
        own = canned.OwnPolicy()
        stage = policy_optimization(own, optimizer=OptimizerConfig(gradient_clip=bound))
        trainer = fit(stage, steps=1, precision="64-true")
        (gradient,) = own.recorder.gradients
        norms[bound] = float(torch.cat([g.flatten() for g in gradient]).norm())
        # The logged norm is the norm before clipping.
        assert float(trainer.callback_metrics["train/gradient_norm"]) == pytest.approx(norms[0.0], rel=1e-6)
    assert norms[0.0] > 1e-2
    assert norms[1e-3] == pytest.approx(1e-3, rel=1e-4)


def test_start_of_training_shows_the_default_rate_of_a_bare_model(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        fit(policy_optimization(build_model()), steps=1)
    assert caplog.text.count("policy: AdamW, lr=1e-06 (change the rate with optimizer=OptimizerConfig(lr=...)") == 1


def test_optimizer_and_scheduler_of_a_lightning_module_are_used(caplog: pytest.LogCaptureFixture) -> None:
    class Own(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = build_model()

        def configure_optimizers(self) -> Any:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            self.scheduler = LambdaLR(self.optimizer, lambda step: 0.5**step)
            return {"optimizer": self.optimizer, "lr_scheduler": {"scheduler": self.scheduler, "interval": "step"}}

    own = Own()
    stage = policy_optimization(own)
    with caplog.at_level("INFO"):
        trainer = fit(stage, steps=3)
    assert "policy: SGD, lr=0.1 (from Own.configure_optimizers)" in caplog.text
    assert trainer.optimizers == [own.optimizer]
    assert [config.scheduler for config in trainer.lr_scheduler_configs] == [own.scheduler]
    assert own.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**3)
    assert stage.policy is own.model and stage.step == 3


@pytest.mark.parametrize("form", ["a pair of lists", "a dict"])
def test_schedule_that_needs_a_metric_is_refused(form: str) -> None:
    class Own(canned.OwnPolicy):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            schedule = ReduceLROnPlateau(optimizer)
            if form == "a dict":
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "train/reward"}}
            return [optimizer], [schedule]

    with pytest.raises(ConfigError, match=r"Own.configure_optimizers returns a ReduceLROnPlateau: .*LambdaLR"):
        fit(policy_optimization(Own()), precision="64-true")


def test_export_before_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"PolicyOptimization.export: .*call trainer.fit\(stage, ...\) first"):
        policy_optimization(build_model()).export(tmp_path / "out")


def test_max_steps_ends_training_by_the_clock_of_the_stage() -> None:
    stage = policy_optimization(build_model(), max_steps=2, updates_per_step=2)
    trainer = fit(stage, steps=9)
    assert (stage.step, trainer.global_step) == (2, 4)


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("32-true", torch.float32), ("64-true", torch.float64), ("bf16-true", torch.bfloat16)],
)
def test_policy_loaded_from_a_folder_has_the_precision_of_the_trainer(
    tmp_path: Path, precision: str, dtype: torch.dtype
) -> None:
    stage = policy_optimization(str(save_tiny_policy(tmp_path)))
    fit(stage, steps=1, precision=precision)
    assert {parameter.dtype for parameter in stage.policy.parameters()} == {dtype}


def test_validate_before_fit_does_not_freeze_the_policy() -> None:
    stage = policy_optimization(build_model(), optimizer=OptimizerConfig(lr=0.1))
    trainer = canned.quiet_trainer(SingleDeviceRolloutStrategy(rollout=canned.CannedRollout()))
    loader = canned.loader([canned.prompt_batch(canned.PROMPTS)])
    trainer.validate(stage, loader, verbose=False)
    before = stage.policy.model.norm.weight.clone()
    trainer.fit(stage, loader)
    assert not torch.equal(stage.policy.model.norm.weight, before)


def test_reference_is_frozen_and_keeps_the_weights_of_the_start(tmp_path: Path) -> None:
    stage = policy_optimization(
        str(save_tiny_policy(tmp_path)), algorithm=Algorithm(kl=KLConfig(0.1)), optimizer=OptimizerConfig(lr=0.1)
    )
    fit(stage, steps=2)
    assert not any(parameter.requires_grad for parameter in stage.reference.parameters())
    pairs = zip(stage.reference.parameters(), build_model().parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert not torch.equal(stage.policy.model.norm.weight, stage.reference.model.norm.weight)


def test_on_load_checkpoint_restores_the_step_and_the_kl_coefficient(tmp_path: Path) -> None:
    kl = KLConfig(0.1, target=1e-9, horizon=10.0)
    path = str(save_tiny_policy(tmp_path / "policy"))
    stage = policy_optimization(path, algorithm=Algorithm(kl=kl), optimizer=OptimizerConfig(lr=0.1))
    trainer = fit(stage, steps=2)
    assert stage.kl_controller.coefficient != 0.1
    trainer.save_checkpoint(tmp_path / "state.ckpt")
    resumed = policy_optimization(path, algorithm=Algorithm(kl=kl))
    resumed.on_load_checkpoint(torch.load(tmp_path / "state.ckpt", weights_only=False))
    assert (resumed.step, resumed.kl_controller.coefficient) == (2, stage.kl_controller.coefficient)


def test_sft_minimises_the_mean_negative_log_likelihood_of_all_tokens() -> None:
    texts = [("1+1", "2"), ("12+30", "forty-two"), ("7", "abcd"), ("19+1", "20.")]
    batch = {
        "prompt_ids": [canned.tokenizer.encode(prompt) for prompt, _ in texts],
        "response_ids": [canned.tokenizer.encode(response) for _, response in texts],
    }
    model = canned.OwnPolicy().model
    terms = []
    for prompt, response in zip(batch["prompt_ids"], batch["response_ids"], strict=True):
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        terms.append(nn.functional.cross_entropy(logits, torch.tensor(response), reduction="none"))
    loss = torch.cat(terms).mean()
    expected = torch.autograd.grad(loss, list(model.parameters()))
    for budget in (1, 25, 10**6):
        own = canned.OwnPolicy()
        stage = SFT(
            own,
            tokenizer=canned.tokenizer,
            scorer=canned.CannedScorer(),
            eval_sampling=SAMPLING,
            tokens_per_micro_batch=budget,
            optimizer=OptimizerConfig(gradient_clip=0.0),
        )
        trainer = fit(stage, steps=1, batch=batch, precision="64-true")
        assert float(trainer.callback_metrics["train/loss"]) == pytest.approx(float(loss.detach()), rel=1e-6)
        for actual, wanted in zip(own.recorder.gradients[0], expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=1e-6, atol=1e-9)


def test_attention_of_a_stage_is_the_attention_of_loaded_models() -> None:
    norms = {}
    for attention in (None, "eager"):
        stage = policy_optimization(
            canned.other_model(),
            algorithm=Algorithm(advantage="gae", kl=KLConfig(0.1)),
            critic=CriticConfig(),
            attention=attention,
        )
        norms[attention] = float(fit(stage, steps=1).callback_metrics["train/gradient_norm"])
        used = {model.config._attn_implementation for model in (stage.policy, stage.reference, stage.critic)}
        assert used == {attention or PACKED_SDPA}
    assert norms["eager"] == pytest.approx(norms[None], rel=1e-3)


def test_tokens_per_log_prob_batch_bounds_passes_without_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: dict[bool, list[int]] = {}
    plain = ForwardPasses.log_probs

    def noting(passes: Any, name: str, samples: Any, **options: Any) -> Any:
        rows.setdefault(torch.is_grad_enabled(), []).append(len(samples))
        return plain(passes, name, samples, **options)

    monkeypatch.setattr(ForwardPasses, "log_probs", noting)
    budget: dict[str, Any] = {"tokens_per_micro_batch": 30, "packing": False}
    fit(policy_optimization(build_model(), tokens_per_log_prob_batch=10_000, updates_per_step=2, **budget), steps=1)
    assert len(rows[False]) == 1 and len(rows[True]) > 2
    rows.clear()
    fit(policy_optimization(build_model(), updates_per_step=2, **budget), steps=1)
    assert len(rows[False]) > 2


def test_greedy_keeps_max_tokens_and_stops() -> None:
    sampling = SamplingConfig(9, num_samples=4, temperature=0.7, top_p=0.9, top_k=5, stop_token_ids=(1,), stop=("x",))
    sampling = replace(sampling, min_p=0.1, vllm={"presence_penalty": 1.0})
    assert greedy(sampling) == SamplingConfig(9, temperature=0.0, stop_token_ids=(1,), stop=("x",))


def test_lightning_module_without_a_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"LightningModule\.model is not an nn\.Module"):
        fit(policy_optimization(LightningModule()))


def test_kl_without_a_reference_is_refused() -> None:
    with pytest.raises(ConfigError, match="the algorithm needs ref_log_probs_BT: name the reference model"):
        policy_optimization(build_model(), algorithm=Algorithm(kl=KLConfig(0.1)))


def test_updates_per_step_that_do_not_divide_the_prompts_are_refused() -> None:
    with pytest.raises(DataError, match="updates_per_step=3 does not divide the 4 prompts of a rank"):
        fit(policy_optimization(build_model(), updates_per_step=3))
