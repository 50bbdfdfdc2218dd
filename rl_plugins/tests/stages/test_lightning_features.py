"""Callbacks, profilers, flags and loggers of a Lightning trainer work with a stage."""

from __future__ import annotations

import csv
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import AdvancedProfiler, SimpleProfiler
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.warnings import PossibleUserWarning
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from typing_extensions import override

from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.callbacks.checkpoint import PolicyCheckpoint
from rl_plugins.config.models import CriticConfig, OptimizerConfig
from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.data.datamodule import PromptDataModule
from rl_plugins.data.preferences import PreferenceDataModule
from rl_plugins.data.prepare.tasks import addition_rows, preference_rows
from rl_plugins.data.sft import SFTDataModule
from rl_plugins.errors import ConfigError
from rl_plugins.models.tiny import build_model, save_tiny_policy
from rl_plugins.rollout.transformers_engine import TransformersRollout
from rl_plugins.stages.policy_optimization import PolicyOptimization
from rl_plugins.stages.preference_optimization import OnlinePreferenceOptimization, PreferenceOptimization
from rl_plugins.stages.reward_modeling import RewardModeling
from rl_plugins.stages.sft import SFT
from rl_plugins.stages.trainer_flags import silence_warnings
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.tests.loops import for_each
from rl_plugins.tests.stages import canned

BATCH = canned.prompt_batch(canned.PROMPTS)


def stage(policy: Any = None, **options: Any) -> PolicyOptimization:
    arguments = {
        "tokenizer": canned.tokenizer,
        "scorer": canned.CannedScorer(),
        "sampling": SamplingConfig(max_tokens=8, num_samples=3),
        "optimizer": OptimizerConfig(lr=0.01),
    }
    model = build_model(hidden_size=32, intermediate_size=48, seed=5) if policy is None else policy
    return PolicyOptimization(model, **(arguments | options))


def make_trainer(folder: Path, **options: Any) -> Trainer:
    """A trainer with the defaults of Lightning, except for progress bar and summary."""
    defaults: dict[str, Any] = {
        "max_epochs": 2,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
    }
    defaults["strategy"] = SingleDeviceRolloutStrategy(rollout=canned.CannedRollout())
    return Trainer(default_root_dir=folder, **(defaults | options))


def fit(trainer: Trainer, module: PolicyOptimization, steps: int = 3, **options: Any) -> Any:
    """Epochs of `steps` steps, and a batch of validation."""
    trainer.fit(module, canned.loader([BATCH] * steps), canned.loader([BATCH]), **options)
    return trainer


def weights(module: PolicyOptimization) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in module.policy.parameters()]


def logged(folder: Path) -> list[dict[str, str]]:
    (file,) = folder.glob("logs/version_0/metrics.csv")
    return list(csv.DictReader(file.read_text().splitlines()))


def test_model_checkpoint_keeps_the_best_and_fit_resumes_from_a_checkpoint(tmp_path: Path) -> None:
    saved = ModelCheckpoint(tmp_path, "{step}", monitor="train/reward", mode="max", save_top_k=2, every_n_train_steps=1)
    whole = stage()
    fit(make_trainer(tmp_path, callbacks=[saved], logger=False), whole)
    # Every step has the same reward, so the first two stay.
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["step=1.ckpt", "step=2.ckpt"]
    resumed = stage(build_model(hidden_size=32, intermediate_size=48, seed=9))
    trainer = make_trainer(tmp_path, logger=False, enable_checkpointing=False)
    fit(trainer, resumed, ckpt_path=tmp_path / "step=2.ckpt", weights_only=True)
    assert resumed.step == whole.step == 6
    for one, other in zip(weights(resumed), weights(whole), strict=True):
        assert torch.equal(one, other)


def test_model_checkpoint_counts_optimizer_steps(tmp_path: Path) -> None:
    saved = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=4)
    fit(make_trainer(tmp_path, callbacks=[saved], logger=False), stage(updates_per_step=2))
    # Six steps of two updates.
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["step=12.ckpt", "step=4.ckpt", "step=8.ckpt"]


@pytest.mark.parametrize("monitor", ["train/reward", "val/reward"])
def test_early_stopping_follows_the_metrics_of_the_stage(tmp_path: Path, monitor: str) -> None:
    stopping = EarlyStopping(monitor, mode="max", patience=1)
    module = stage()
    fit(make_trainer(tmp_path, callbacks=[stopping], max_epochs=9, logger=False, enable_checkpointing=False), module)
    # The canned reward never improves: the second epoch is the last.
    assert module.step == 6


def test_learning_rate_monitor_and_csv_logger_write_the_steps_of_the_stage(tmp_path: Path) -> None:
    options = {"logger": CSVLogger(tmp_path, "logs"), "callbacks": [LearningRateMonitor("step")]}
    module = stage(optimizer=OptimizerConfig(lr=0.5, warmup_steps=3))
    fit(make_trainer(tmp_path, enable_checkpointing=False, max_epochs=1, **options), module)
    rows = logged(tmp_path)
    rates = [float(row["lr-AdamW"]) for row in rows if row.get("lr-AdamW")]
    assert rates == pytest.approx([0.125, 0.25, 0.375])
    assert [int(row["step"]) for row in rows if row["train/reward"]] == [1, 2, 3]


@pytest.mark.parametrize("callback", [lambda: StochasticWeightAveraging(0.1), EMAWeightAveraging], ids=["SWA", "EMA"])
def test_weight_averaging_callbacks_of_lightning_are_refused(tmp_path: Path, callback: Any) -> None:
    averaging = callback()
    trainer = make_trainer(tmp_path, callbacks=[averaging], logger=False)
    with pytest.raises(ConfigError, match=f"{type(averaging).__name__} copies the whole module"):
        fit(trainer, stage())


@pytest.mark.parametrize("profiler", [SimpleProfiler, AdvancedProfiler])
def test_profiler_reports_training_batches_and_optimizer_steps(tmp_path: Path, profiler: Any) -> None:
    options = {"profiler": profiler(tmp_path, "profile"), "logger": False, "enable_checkpointing": False}
    fit(make_trainer(tmp_path, max_epochs=1, **options), stage())
    report = (tmp_path / "fit-profile.txt").read_text()
    assert "run_training_batch" in report and "optimizer_step" in report


def test_validate_before_and_after_fit_logs_on_the_clock_of_the_stage(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, "logs")
    trainer, module = make_trainer(tmp_path, logger=logger, enable_checkpointing=False, max_epochs=1), stage()
    (before,) = trainer.validate(module, canned.loader([BATCH]), verbose=False)
    fit(trainer, module)
    (after,) = trainer.validate(module, canned.loader([BATCH]), verbose=False)
    assert before["val/reward"] == pytest.approx(after["val/reward"])
    assert len(module.shown_samples.validation) == len(canned.PROMPTS)
    # Before, in the sanity check of Lightning, after the epoch, and after training: once each, by the stage's clock.
    assert [int(row["step"]) for row in logged(tmp_path) if row["val/reward"]] == [0, 0, 3, 3]


def test_log_every_n_steps_thins_the_metrics_of_training_and_keeps_the_last_step(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, "logs")
    module = stage(max_steps=5)
    fit(make_trainer(tmp_path, logger=logger, enable_checkpointing=False, log_every_n_steps=2), module)
    assert [int(row["step"]) for row in logged(tmp_path) if row["train/reward"]] == [2, 4, 5]
    assert [int(row["step"]) for row in logged(tmp_path) if row["val/reward"]] == [0, 3, 5]


def test_test_and_predict_of_the_trainer_answer_the_validation_prompts(tmp_path: Path) -> None:
    rows = addition_rows(below=10, num_train=1, num_test=3, seed=0)["test"]
    data = PromptDataModule(None, rows, tokenizer=canned.tokenizer, prompts_per_step=1, eval_batch_size=2)
    path = str(save_tiny_policy(tmp_path / "policy"))
    strategy = SingleDeviceRolloutStrategy(rollout=TransformersRollout(path))
    trainer = make_trainer(tmp_path, strategy=strategy, logger=CSVLogger(tmp_path, "logs"), enable_checkpointing=False)
    module = stage(path, scorer=lambda solution_str: 0.25, sampling=SamplingConfig(max_tokens=3))
    (tested,) = trainer.test(module, data, verbose=False)
    assert tested["test/reward"] == 0.25 and not [name for name in tested if name.startswith("val/")]
    batches = trainer.predict(module, data)
    assert batches is not None
    answers = [row for batch in batches for row in batch]
    assert [len(batch) for batch in batches] == [2, 1]
    assert [row["prompt"] for row in answers] == [row["prompt"][0]["content"] for row in rows]
    assert all(row["score"] == 0.25 and isinstance(row["response"], str) for row in answers)


@pytest.mark.parametrize(("own", "source"), [(SFT, SFTDataModule), (PreferenceOptimization, PreferenceDataModule)])
def test_test_and_predict_of_the_trainer_answer_prompts_in_other_stages(tmp_path: Path, own: Any, source: Any) -> None:
    rows = addition_rows(below=10, num_train=1, num_test=2, seed=0)["test"]
    path = str(save_tiny_policy(tmp_path / "policy"))
    strategy = SingleDeviceRolloutStrategy(rollout=TransformersRollout(path))
    trainer = make_trainer(tmp_path, strategy=strategy, logger=False, enable_checkpointing=False)
    module = own(path, scorer=lambda solution_str: 0.25, eval_sampling=SamplingConfig(max_tokens=3))
    data = source(None, rows, tokenizer=path, prompts_per_step=2)
    (tested,) = trainer.test(module, data, verbose=False)
    assert tested["test/reward"] == 0.25 and not [name for name in tested if name.startswith("val/")]
    batches = trainer.predict(module, data)
    assert batches is not None and [row["score"] for batch in batches for row in batch] == [0.25, 0.25]


@pytest.mark.parametrize("own", [SFT, PreferenceOptimization])
def test_stage_without_a_scorer_refuses_validation_rows(tmp_path: Path, own: Any) -> None:
    rows = addition_rows(below=10, num_train=1, num_test=2, seed=0)["test"]
    path = str(save_tiny_policy(tmp_path / "policy"))
    data = PromptDataModule(None, rows, tokenizer=path, prompts_per_step=2)
    trainer = make_trainer(tmp_path, logger=False, enable_checkpointing=False)
    with pytest.raises(ConfigError, match=rf"{own.__name__} got validation rows: pass scorer=\.\.\. and eval_sampling"):
        trainer.validate(own(path), data, verbose=False)
    with pytest.raises(ConfigError, match=r"give a stage of SFT or preferences a scorer"):
        trainer.predict(own(path), data)
    with pytest.raises(ConfigError, match=r"eval_sampling=None: .* or leave scorer and environment out"):
        own(path, scorer=lambda solution_str: 0.25)
    with pytest.raises(ConfigError, match=r"scorer=None: name a reward function"):
        own(path, eval_sampling=SamplingConfig(max_tokens=3))


def test_test_of_a_reward_model_measures_pairs_and_predict_is_refused(tmp_path: Path) -> None:
    rows = preference_rows(addition_rows(below=10, num_train=1, num_test=3, seed=0)["test"], seed=0)
    path = str(save_tiny_policy(tmp_path / "policy"))
    data = PreferenceDataModule(None, rows, tokenizer=path, prompts_per_step=2, validate_on="responses")
    options = {"strategy": SingleDeviceRolloutStrategy(), "logger": False, "enable_checkpointing": False}
    trainer, module = make_trainer(tmp_path, **options), RewardModeling(path)
    (tested,) = trainer.test(module, data, verbose=False)
    assert "test/accuracy" in tested and not [name for name in tested if name.startswith("val/")]
    with pytest.raises(ConfigError, match=r"RewardModeling generates no responses: use trainer\.validate"):
        trainer.predict(module, data)


def test_test_without_validation_rows_is_refused(tmp_path: Path) -> None:
    data = PromptDataModule(None, tokenizer=canned.tokenizer, prompts_per_step=1)
    for run in (Trainer.test, Trainer.predict):
        with pytest.raises(ConfigError, match="read the validation rows: set `validation`"):
            run(make_trainer(tmp_path, logger=False), stage(), datamodule=data)


def test_finders_of_the_tuner_are_refused(tmp_path: Path) -> None:
    module = stage()
    module.lr, module.batch_size = 1e-3, 2  # type: ignore[assignment]
    for find, words in (
        (Tuner.lr_find, r"LearningRateFinder \(Tuner.lr_find\).*--multirun optimizer.lr"),
        (Tuner.scale_batch_size, r"BatchSizeFinder \(Tuner.scale_batch_size\).*tokens_per_micro_batch"),
    ):
        tuner = Tuner(make_trainer(tmp_path, logger=False, enable_checkpointing=False))
        with pytest.raises(ConfigError, match=words):
            find(tuner, module, canned.loader([BATCH]))


@for_each("runs", [True, 2])
def test_fast_dev_run_takes_the_given_steps_and_writes_no_file(tmp_path: Path, runs: Any) -> None:
    module = stage()
    callbacks = [
        ModelCheckpoint(tmp_path, every_n_train_steps=1),
        PolicyCheckpoint(tmp_path, every=1),
        TQDMProgressBar(),
    ]
    fit(make_trainer(tmp_path, fast_dev_run=runs, callbacks=callbacks, enable_progress_bar=True), module)
    assert module.step == int(runs)
    assert not list(tmp_path.iterdir())


def test_gradient_clip_val_of_the_trainer_bounds_the_gradient(tmp_path: Path) -> None:
    norms = {}
    for bound in (None, 1e-3):
        own = canned.OwnPolicy()
        trainer = make_trainer(
            tmp_path,
            gradient_clip_val=bound,
            max_steps=1,
            precision="64-true",
            logger=False,
            enable_checkpointing=False,
        )
        fit(trainer, stage(own, optimizer=OptimizerConfig(gradient_clip=0.0)))
        (gradient,) = own.recorder.gradients
        norms[bound] = float(torch.cat([g.flatten() for g in gradient]).norm())
    assert norms[None] > 1e-2
    assert norms[1e-3] == pytest.approx(1e-3, rel=1e-4)


class Batches(LightningDataModule):
    """Data of one step."""

    @override
    def train_dataloader(self) -> Any:
        return canned.loader([BATCH])


@pytest.mark.parametrize(
    ("part", "function"), [(Batches, "setup"), (canned.CannedScorer, "score")], ids=["data", "reward"]
)
def test_gradient_clip_val_of_the_trainer_is_in_force_after_a_failed_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: type, function: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("gone")

    own, data = canned.OwnPolicy(), Batches()
    module = stage(own, optimizer=OptimizerConfig(gradient_clip=0.0))
    flags: dict[str, Any] = {"max_steps": 1, "precision": "64-true", "logger": False, "enable_checkpointing": False}
    trainer = make_trainer(tmp_path, gradient_clip_val=1e-3, **flags)
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="gone"):
        patched.setattr(part, function, fail)
        trainer.fit(module, data)
    trainer.fit(module, data)
    assert trainer.gradient_clip_val == 1e-3
    (gradient,) = own.recorder.gradients
    assert float(torch.cat([g.flatten() for g in gradient]).norm()) == pytest.approx(1e-3, rel=1e-4)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, "clips by norm only"),
        ({"accumulate_grad_batches": 2}, "tokens_per_micro_batch"),
        ({"precision": "16-true"}, "use 16-mixed or bf16-true"),
        ({"callbacks": [EarlyStopping("val/reward")]}, "looks for the smallest reward: set mode='max'"),
        ({"overfit_batches": 1}, r"Trainer\(overfit_batches=1\).*max_train_rows"),
    ],
    ids=["clipping by value", "accumulated batches", "16-true", "smallest reward", "overfit"],
)
def test_trainer_flags_that_a_stage_cannot_follow_are_refused(
    tmp_path: Path, flags: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        fit(make_trainer(tmp_path, logger=False, **flags), stage())


def test_model_checkpoint_that_would_not_save_as_asked_is_refused(tmp_path: Path) -> None:
    gae: dict[str, Any] = {"algorithm": Algorithm(advantage="gae")}
    warm_up = CriticConfig(canned.other_model(), warmup_steps=1)
    for arguments, options, message in (
        ({"train_time_interval": timedelta(minutes=1)}, {}, "saves nothing in manual optimization"),
        (
            {"every_n_train_steps": 1, "monitor": "val/reward", "mode": "max"},
            {},
            "saves before the validation of the same step.*BestCheckpoints",
        ),
        (
            {"every_n_train_steps": 3},
            {"updates_per_step": 2},
            r"a step of this stage takes 2: use a multiple, or rl\.P",
        ),
        (
            {"every_n_train_steps": 3},
            {**gae, "critic": CriticConfig(canned.other_model()), "updates_per_step": 2},
            "a step of this stage takes 4: use a multiple",
        ),
        (
            {"every_n_train_steps": 2},
            {**gae, "critic": warm_up},
            r"may take fewer \(warm-up of a critic.*: use rl\.PolicyCheckpoint",
        ),
    ):
        trainer = make_trainer(tmp_path, logger=False, callbacks=[ModelCheckpoint(tmp_path, **arguments)])
        with pytest.raises(ConfigError, match=message):
            fit(trainer, stage(**options))


def test_callbacks_are_checked_in_a_fit_after_a_validation(tmp_path: Path) -> None:
    callbacks = [EarlyStopping("val/reward")]
    trainer = make_trainer(tmp_path, logger=False, enable_checkpointing=False, callbacks=callbacks)
    module = stage()
    trainer.validate(module, canned.loader([BATCH]), verbose=False)
    with pytest.raises(ConfigError, match="looks for the smallest reward"):
        fit(trainer, module)


def test_save_checkpoint_refuses_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = make_trainer(tmp_path, logger=False, enable_checkpointing=False, max_steps=1)
    fit(trainer, stage())
    with pytest.raises(ConfigError, match=r"folder of the checkpoint=s3://bucket.*cannot be used here"):
        trainer.save_checkpoint("s3://bucket/state.ckpt")
    assert not list(tmp_path.iterdir())


class OwnSchedule(PolicyOptimization):
    """A stage with an optimizer and a schedule of its own."""

    @override
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.policy.parameters(), lr=1.0)
        return [optimizer], [{"scheduler": LambdaLR(optimizer, lambda step: 0.5**step), "interval": "step"}]


def test_subclass_with_an_own_schedule_trains_and_resumes(tmp_path: Path) -> None:
    def one() -> OwnSchedule:
        model = build_model(hidden_size=32, intermediate_size=48, seed=5)
        sampling = SamplingConfig(max_tokens=8, num_samples=3)
        return OwnSchedule(model, tokenizer=canned.tokenizer, scorer=canned.CannedScorer(), sampling=sampling)

    whole = one()
    saved = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=3)
    fit(make_trainer(tmp_path, callbacks=[saved], logger=False), whole)
    assert whole.trainer.optimizers[0].param_groups[0]["lr"] == 0.5**6
    resumed = one()
    trainer = make_trainer(tmp_path, logger=False, enable_checkpointing=False)
    fit(trainer, resumed, ckpt_path=tmp_path / "step=3.ckpt", weights_only=True)
    assert resumed.step == 6
    for given, expected in zip(weights(resumed), weights(whole), strict=True):
        assert torch.equal(given, expected)


def test_csv_logger_has_the_row_of_a_step_at_the_end_of_the_step(tmp_path: Path) -> None:
    class Reader(Callback):
        def __init__(self) -> None:
            self.rows: list[int] = []

        @override
        def on_train_batch_end(self, *_: Any) -> None:
            self.rows.append(len(logged(tmp_path)))

    logger = CSVLogger(tmp_path, "logs")
    fit(make_trainer(tmp_path, logger=logger, callbacks=[reader := Reader()], enable_checkpointing=False), stage())
    # The first row is the validation before training.
    assert reader.rows[:3] == [2, 3, 4]


def test_sanity_check_of_a_part_of_the_rows_is_not_logged(tmp_path: Path) -> None:
    for checked, expected in ((2, [3]), (-1, [0, 3])):
        folder = tmp_path / str(checked)
        options = {"logger": CSVLogger(folder, "logs"), "num_sanity_val_steps": checked, "enable_checkpointing": False}
        trainer = make_trainer(folder, max_epochs=1, **options)
        trainer.fit(stage(), canned.loader([BATCH] * 3), canned.loader([BATCH] * 3))
        assert [int(row["step"]) for row in logged(folder) if row["val/reward"]] == expected


def test_fit_without_training_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.fit got a stage and no training data: pass a data module too"):
        make_trainer(tmp_path, logger=False).fit(stage())
    with pytest.raises(ConfigError, match="no training data"):
        make_trainer(tmp_path, logger=False).fit(stage(), val_dataloaders=canned.loader([BATCH]))


@pytest.mark.parametrize(
    ("validation", "flags"), [(None, {}), ("rows", {"limit_val_batches": 0})], ids=["no rows", "flag"]
)
@pytest.mark.parametrize("callback", [EarlyStopping, ModelCheckpoint])
def test_monitor_of_a_metric_of_validation_is_refused_without_validation(
    tmp_path: Path, callback: Any, validation: Any, flags: dict[str, Any]
) -> None:
    trainer = make_trainer(tmp_path, logger=False, callbacks=[callback(monitor="val/reward", mode="max")], **flags)
    data = PromptDataModule("gone", validation, tokenizer=canned.tokenizer, prompts_per_step=2)
    with pytest.raises(ConfigError, match=r"monitor='val/reward'\) waits for a metric of validation, and trainer.fit"):
        trainer.fit(stage(), data)
    with pytest.raises(ConfigError, match="give the data module validation rows"):
        trainer.fit(stage(), canned.loader([BATCH]))


def test_monitor_of_the_module_before_rl_gets_a_warning_at_the_start(tmp_path: Path) -> None:
    """Lightning alone ends training at the first validation, perhaps after hours."""
    callbacks = [EarlyStopping("train/reward", mode="max"), EarlyStopping("val_loss", strict=False)]
    with pytest.warns(UserWarning, match=r"EarlyStopping\(monitor='val_loss'\): a stage logs no such metric") as warned:
        fit(make_trainer(tmp_path, callbacks=callbacks, max_steps=1, logger=False, enable_checkpointing=False), stage())
    assert not [one for one in warned if "monitor='train/reward'" in str(one.message)]


def test_advice_to_average_equal_metrics_and_order_of_steps_are_silent() -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        silence_warnings()
        for name in ("val/reward", "own_metric"):
            advice = f"It is recommended to use `self.log({name!r}, ..., sync_dist=True)` when logging on epoch level"
            warnings.warn(advice, PossibleUserWarning, stacklevel=1)
        # As after an overflow of float16.
        weight = torch.zeros(1, requires_grad=True)
        torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD([weight])).step()
    assert ["own_metric" in str(one.message) for one in shown] == [True]


class OldData(LightningDataModule):
    """The data module of a project before RL."""

    @override
    def train_dataloader(self) -> Any:
        return DataLoader([{"input_ids": torch.tensor([1, 2])}] * 4, batch_size=2)  # type: ignore[arg-type]


@for_each("strategy", ["auto", "ddp"])
def test_strategy_of_lightning_is_refused_before_data_is_read(tmp_path: Path, strategy: Any) -> None:
    class Untouched(OldData):
        @override
        def prepare_data(self) -> None:
            raise AssertionError("the data is read")

    trainer = make_trainer(tmp_path, strategy=strategy, accelerator="cpu", devices=1, logger=False)
    with pytest.raises(ConfigError, match=r"the trainer has Lightning's (SingleDevice|DDP)Strategy .*ZeroStrategy"):
        trainer.fit(stage(), Untouched())


def test_batches_of_another_data_module_are_refused(tmp_path: Path) -> None:
    setup = {"scorer": canned.CannedScorer(), "tokenizer": canned.tokenizer}
    sampling = SamplingConfig(max_tokens=8, num_samples=3)
    for module, needed in (
        (stage(), "PromptDataModule"),
        (SFT(build_model(), eval_sampling=sampling, **setup), "SFTDataModule"),
        (PreferenceOptimization(build_model(), eval_sampling=sampling, loss="orpo", **setup), "PreferenceDataModule"),
        (OnlinePreferenceOptimization(build_model(), sampling=sampling, loss="orpo", **setup), "PromptDataModule"),
    ):
        trainer = make_trainer(tmp_path, logger=False, enable_checkpointing=False)
        with pytest.raises(ConfigError, match=f"batches of this data, each a dict: .*{needed}"):
            trainer.fit(module, OldData())


def test_validation_batches_of_another_data_module_are_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, logger=False, enable_checkpointing=False)
    with pytest.raises(ConfigError, match=r"each a dict: .*PromptDataModule"):
        trainer.validate(stage(), OldData().train_dataloader(), verbose=False)


def test_compiled_model_is_refused(tmp_path: Path) -> None:
    late = canned.OwnPolicy()
    late.configure_model = lambda: setattr(late, "model", torch.compile(build_model()))  # type: ignore[method-assign]
    own: Any = canned.OwnPolicy()
    own.model = torch.compile(own.model)
    for build in (
        lambda: stage(torch.compile(build_model())),
        lambda: stage(own),
        lambda: fit(make_trainer(tmp_path, logger=False), stage(late)),
    ):
        with pytest.raises(ConfigError, match=r"torch.compile.*CompiledBlocks\(\)"):
            build()


def test_compiled_stage_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the stage is the result of torch.compile.*CompiledBlocks\(\)"):
        fit(make_trainer(tmp_path, logger=False), torch.compile(stage()))  # type: ignore[arg-type]


def test_more_devices_than_the_strategy_uses_are_refused(tmp_path: Path) -> None:
    for flags in ({"devices": 2}, {"devices": 1, "num_nodes": 2}):
        trainer = make_trainer(tmp_path, accelerator="cpu", logger=False, **flags)
        with pytest.raises(ConfigError, match=r"has 2 devices .*Trainer\(devices=1, num_nodes=1\).*ZeroStrategy"):
            fit(trainer, stage())


def test_devices_auto_on_a_machine_with_gpus_needs_a_strategy_for_all_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for gpus, message in (
        (8, r"has 8 devices \(devices='auto' takes all GPUs\).*Trainer\(devices=1, num_nodes=1\).*ZeroStrategy"),
        (1, r"device='cpu'\), and the trainer computes on cuda: .*accelerator='cpu'\), or pass device='cuda'"),
    ):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        trainer = make_trainer(tmp_path, accelerator="auto", devices="auto", logger=False)
        assert isinstance(trainer.accelerator, CUDAAccelerator)
        with pytest.raises(ConfigError, match=message):
            fit(trainer, stage())


def test_single_device_strategy_refuses_a_gpu_that_torch_does_not_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    strategy = SingleDeviceRolloutStrategy("cuda", rollout=canned.CannedRollout())
    trainer = make_trainer(tmp_path, strategy=strategy, accelerator="cpu", logger=False)
    with pytest.raises(ConfigError, match=r"device='cuda:0'.*finds no GPU.*device='cpu'"):
        fit(trainer, stage())


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed", "64-true"])
def test_precision_flag_sets_the_dtype_of_the_policy(tmp_path: Path, precision: str) -> None:
    module = stage(str(save_tiny_policy(tmp_path / "policy")))
    frequencies = dict(build_model().named_buffers())["model.rotary_emb.inv_freq"]
    trainer = make_trainer(tmp_path, precision=precision, max_steps=2, logger=False, enable_checkpointing=False)
    fit(trainer, module)
    assert torch.equal(module.policy.model.rotary_emb.inv_freq.float(), frequencies)
    held = {"32-true": torch.float32, "bf16-mixed": torch.float32, "64-true": torch.float64}
    assert {parameter.dtype for parameter in module.policy.parameters()} == {held.get(precision, torch.bfloat16)}
    assert float(trainer.callback_metrics["train/gradient_norm"]) > 0


def test_scores_are_not_rounded_in_bf16_true(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, precision="bf16-true", max_steps=1, logger=False, enable_checkpointing=False)
    fit(trainer, stage(scorer=lambda solution_str: 0.7))
    # 0.7 is 0.6992 in bfloat16.
    assert float(trainer.callback_metrics["train/reward"]) == pytest.approx(0.7, rel=1e-6)
