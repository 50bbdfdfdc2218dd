"""A run that is stopped anywhere and resumed sees exactly the rows that an uninterrupted run sees."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer

from rl_plugins.data.curriculum import CurriculumConfig, GroupResult
from rl_plugins.data.prompts import PromptBatch, PromptDataModule
from rl_plugins.data.sampler import StepLoader
from rl_plugins.errors import ConfigError

ROWS, PER_STEP, EPOCHS = 13, 4, 4
STEPS = ROWS // PER_STEP


class Stopped(RuntimeError):
    pass


class Recorder(pl.LightningModule):
    def __init__(self, fail_at: int | None = None):
        super().__init__()
        self.automatic_optimization = False
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[tuple[int, ...]] = []
        self.epochs: list[int] = []
        self.validated: list[int] = []
        self.fail_at = fail_at

    def training_step(self, batch, batch_idx):
        assert isinstance(batch, PromptBatch)
        if len(self.seen) == self.fail_at:
            raise Stopped
        self.seen.append(tuple(batch.rows))
        self.epochs.append(batch.epoch)
        optimizer = self.optimizers()
        assert isinstance(optimizer, LightningOptimizer)
        self.manual_backward(self.weight**2)
        optimizer.step()

    def validation_step(self, batch, batch_idx):
        self.validated += batch.rows

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Rewarded(Recorder):
    """Tells the curriculum that odd prompts are sometimes solved, and even ones never."""

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        results = [GroupResult(0, row, row % 2 / 2, row % 2 / 4) for row in batch.rows]
        loader = self.trainer.train_dataloader
        assert isinstance(loader, StepLoader) and loader.curriculum is not None
        loader.curriculum.observe(results)


class SaveAt(pl.Callback):
    """Save after `step` batches, in the given hook, and stop there."""

    def __init__(self, hook: str, step: int, path):
        self.step, self.path, self.hook = step, path, hook

    def maybe_save(self, trainer, module, hook):
        if hook == self.hook and len(module.seen) == self.step and not self.path.exists():
            trainer.save_checkpoint(self.path)
            raise Stopped

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.maybe_save(trainer, module, "batch")

    def on_train_epoch_end(self, trainer, module):
        self.maybe_save(trainer, module, "epoch")

    def on_validation_end(self, trainer, module):
        self.maybe_save(trainer, module, "validation")

    def on_exception(self, trainer, module, exception):
        if self.hook == "exception":
            trainer.save_checkpoint(self.path)


def fit(tmp_path, data, module, *callbacks, ckpt_path=None, **options):
    limits = {"max_epochs": EPOCHS} | options
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=tmp_path,
        callbacks=list(callbacks),
        **limits,
    )
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path, weights_only=True if ckpt_path else None)
    return module


@pytest.fixture
def data(row, tokenizer):
    def make(validation=False, **changes):
        options = {"prompts_per_step": PER_STEP, "seed": 3, "eval_batch_size": 2} | changes
        rows = [row(number) for number in range(ROWS)]
        return PromptDataModule(rows, rows[:5] if validation else None, tokenizer=tokenizer, **options)

    return make


def interrupt_and_resume(tmp_path, data, hook, step, module=Recorder, **options):
    path = tmp_path / "stopped.ckpt"
    fail_at = step if hook == "exception" else None
    with pytest.raises(Stopped):
        fit(tmp_path, data(), module(fail_at), SaveAt(hook, step, path), **options)
    return fit(tmp_path, data(), module(), ckpt_path=path, **options)


EPOCH_LIMIT = {"max_epochs": EPOCHS}
STEP_LIMIT = {"max_epochs": -1, "max_steps": EPOCHS * STEPS}
BATCH_ENDS = [("batch", step) for step in range(1, 8)]
FAILURES = [("exception", step) for step in range(1, 7)]
EPOCH_ENDS = [("epoch", STEPS), ("epoch", 2 * STEPS)]
VALIDATIONS = [("validation", STEPS), ("validation", 2 * STEPS)]


def check_resume(tmp_path, make_data, hook, step, module=Recorder, **options):
    whole = fit(tmp_path, make_data(), module(), **options)
    resumed = interrupt_and_resume(tmp_path, make_data, hook, step, module, **options)
    assert resumed.seen == whole.seen[step:]
    assert resumed.epochs == whole.epochs[step:]
    return whole


@pytest.mark.parametrize("limit", [EPOCH_LIMIT, STEP_LIMIT], ids=["max_epochs", "max_steps"])
@pytest.mark.parametrize(("hook", "step"), BATCH_ENDS + FAILURES + EPOCH_ENDS)
def test_resume_continues_with_the_next_batch(tmp_path, data, limit, hook, step):
    whole = check_resume(tmp_path, data, hook, step, **limit)
    assert whole.epochs == [epoch for epoch in range(EPOCHS) for _ in range(STEPS)]


@pytest.mark.parametrize("limit", [EPOCH_LIMIT, STEP_LIMIT], ids=["max_epochs", "max_steps"])
@pytest.mark.parametrize(("hook", "step"), BATCH_ENDS + EPOCH_ENDS + VALIDATIONS)
def test_resume_with_validation(tmp_path, data, limit, hook, step):
    check_resume(tmp_path, lambda: data(validation=True), hook, step, **limit)


@pytest.mark.parametrize("step", [2, 5])
def test_resume_from_a_validation_inside_an_epoch(tmp_path, data, step):
    check_resume(tmp_path, lambda: data(validation=True), "validation", step, val_check_interval=2)


@pytest.mark.parametrize(("hook", "step"), [("batch", 1), ("batch", 3), ("epoch", 2), ("epoch", 4)])
def test_resume_with_shortened_epochs(tmp_path, data, hook, step):
    whole = check_resume(tmp_path, data, hook, step, limit_train_batches=2)
    assert len(whole.seen) == 2 * EPOCHS
    assert len({row for rows in whole.seen[:STEPS] for row in rows}) == STEPS * PER_STEP


@pytest.mark.parametrize(("hook", "step"), [("batch", 1), ("batch", 5), ("exception", 4), *EPOCH_ENDS])
def test_resume_with_a_curriculum(tmp_path, data, hook, step):
    whole = check_resume(tmp_path, lambda: data(curriculum=CurriculumConfig()), hook, step, Rewarded)
    assert all(len(set(rows)) == PER_STEP for rows in whole.seen)


def test_epochs_differ_and_each_row_is_served_once_per_epoch(tmp_path, data):
    seen = fit(tmp_path, data(), Recorder()).seen
    epochs = [sum(seen[start : start + STEPS], ()) for start in range(0, len(seen), STEPS)]
    assert all(len(set(epoch)) == STEPS * PER_STEP for epoch in epochs)
    assert len(set(epochs)) == EPOCHS


def test_reloading_the_loader_every_epoch_changes_nothing(tmp_path, data):
    whole = fit(tmp_path, data(), Recorder())
    assert fit(tmp_path, data(), Recorder(), reload_dataloaders_every_n_epochs=1).seen == whole.seen


def test_validation_sees_every_row_once(tmp_path, data):
    module = fit(tmp_path, data(validation=True), Recorder(), max_epochs=1)
    assert module.validated == [0, 1, 2, 3, 4]


def test_resume_with_other_data_is_refused(tmp_path, data):
    path = tmp_path / "stopped.ckpt"
    with pytest.raises(Stopped):
        fit(tmp_path, data(), Recorder(), SaveAt("batch", 2, path))
    with pytest.raises(ConfigError, match="seed was 3 and is now 4"):
        fit(tmp_path, data(seed=4), Recorder(), ckpt_path=path)


def test_batches_pass_through_a_precision_that_converts_inputs(tmp_path, data):
    assert fit(tmp_path, data(), Recorder(), precision="64-true").seen == fit(tmp_path, data(), Recorder()).seen
