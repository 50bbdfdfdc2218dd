"""A run resumed from any checkpoint gets exactly the rows of an uninterrupted run."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import SingleDeviceStrategy

from rl_plugins.config.data import CurriculumConfig
from rl_plugins.data.curriculum import GroupResult
from rl_plugins.data.datamodule import PromptDataModule
from rl_plugins.data.loaders import StepLoader
from rl_plugins.data.prompts import PromptBatch
from rl_plugins.errors import CheckpointError
from rl_plugins.tests.cases import case
from rl_plugins.tests.quiet_trainer import quiet_trainer

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
    """Report to the curriculum: odd prompts are sometimes solved, even prompts never."""

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        results = [GroupResult(0, row, row % 2 / 2, row % 2 / 4) for row in batch.rows]
        loader = self.trainer.train_dataloader
        assert isinstance(loader, StepLoader) and loader.curriculum is not None
        loader.curriculum.observe(results)


class SaveOnException(pl.Callback):
    """Callback to save a checkpoint when the run fails."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_exception(self, trainer, module, exception):
        trainer.save_checkpoint(self.path)


class SaveAtEachHook(pl.Callback):
    """Callback to save a checkpoint at the end of each batch, epoch and validation."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, hook: str, step: int) -> Path:
        """The checkpoint of a hook after `step` batches."""
        return self.folder / f"{hook}-{step}.ckpt"

    def save(self, trainer, module, hook):
        path = self.path(hook, len(module.seen))
        if not path.exists():
            trainer.save_checkpoint(path)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.save(trainer, module, "batch")

    def on_train_epoch_end(self, trainer, module):
        self.save(trainer, module, "epoch")

    def on_validation_end(self, trainer, module):
        self.save(trainer, module, "validation")


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


LIMITS = {"max_epochs": {"max_epochs": EPOCHS}, "max_steps": {"max_epochs": -1, "max_steps": EPOCHS * STEPS}}
BATCH_ENDS = [("batch", step) for step in range(1, 8)]
EPOCH_ENDS = [("epoch", STEPS), ("epoch", 2 * STEPS)]
VALIDATIONS = [("validation", STEPS), ("validation", 2 * STEPS)]


def check_resume(tmp_path, make_data, checkpoints, module=Recorder, **options):
    """Resume from checkpoints (hook, number of batches) of one run; return the uninterrupted run."""
    saved = SaveAtEachHook(tmp_path)
    whole = fit(tmp_path, make_data(), module(), saved, **options)
    assert whole.seen == fit(tmp_path, make_data(), module(), **options).seen, "saving changes the order"
    for hook, step in checkpoints:
        with case(f"saved at the end of {hook} after {step} batches"):
            resumed = fit(tmp_path, make_data(), module(), ckpt_path=saved.path(hook, step), **options)
            assert resumed.seen == whole.seen[step:]
            assert resumed.epochs == whole.epochs[step:]
    return whole


def check_resume_after_an_exception(tmp_path, make_data, whole, step, module=Recorder, **options):
    """Resume a run after its failure at batch number `step`; `whole` is the uninterrupted run."""
    path = tmp_path / f"exception-{step}.ckpt"
    with pytest.raises(Stopped):
        fit(tmp_path, make_data(), module(fail_at=step), SaveOnException(path), **options)
    resumed = fit(tmp_path, make_data(), module(), ckpt_path=path, **options)
    assert resumed.seen == whole.seen[step:]
    assert resumed.epochs == whole.epochs[step:]


@pytest.mark.parametrize("limit", LIMITS)
def test_resume_from_a_checkpoint_continues_with_the_next_batch(tmp_path, data, limit):
    whole = check_resume(tmp_path, data, BATCH_ENDS + EPOCH_ENDS, **LIMITS[limit])
    assert whole.epochs == [epoch for epoch in range(EPOCHS) for _ in range(STEPS)]


@pytest.mark.parametrize("limit", LIMITS)
def test_resume_after_an_exception_serves_the_failed_batch_again(tmp_path, data, limit):
    whole = fit(tmp_path, data(), Recorder(), **LIMITS[limit])
    for step in range(1, 7):
        with case(f"batch {step} fails"):
            check_resume_after_an_exception(tmp_path, data, whole, step, **LIMITS[limit])


@pytest.mark.parametrize("limit", LIMITS)
def test_resume_with_validation_continues_with_the_next_batch(tmp_path, data, limit):
    check_resume(tmp_path, lambda: data(validation=True), BATCH_ENDS + EPOCH_ENDS + VALIDATIONS, **LIMITS[limit])


def test_resume_from_a_validation_inside_an_epoch_continues_with_the_next_batch(tmp_path, data):
    checkpoints = [("validation", 2), ("validation", 5)]
    check_resume(tmp_path, lambda: data(validation=True), checkpoints, val_check_interval=2)


def test_resume_with_shortened_epochs_continues_with_the_next_batch(tmp_path, data):
    checkpoints = [("batch", 1), ("batch", 3), ("epoch", 2), ("epoch", 4)]
    whole = check_resume(tmp_path, data, checkpoints, limit_train_batches=2)
    assert len(whole.seen) == 2 * EPOCHS
    assert len({row for rows in whole.seen[:STEPS] for row in rows}) == STEPS * PER_STEP


def test_resume_with_a_curriculum_continues_with_the_next_batch(tmp_path, data):
    def make_data():
        return data(curriculum=CurriculumConfig())

    whole = check_resume(tmp_path, make_data, [("batch", 1), ("batch", 5), *EPOCH_ENDS], Rewarded)
    assert all(len(set(rows)) == PER_STEP for rows in whole.seen)
    check_resume_after_an_exception(tmp_path, make_data, whole, 4, Rewarded)


class ReadsSteps(Recorder):
    """A module whose optimizer depends on the number of steps, so Lightning makes the data loader early."""

    def configure_optimizers(self):
        assert self.trainer.estimated_stepping_batches == EPOCHS * STEPS
        return super().configure_optimizers()


class LateRestore(SingleDeviceStrategy):
    """A strategy with the order of ZeRO and FSDP2: checkpoints are restored after the set-up."""

    restore_checkpoint_after_setup = True

    def __init__(self):
        super().__init__("cpu")


def test_resume_after_the_loader_was_made_continues_with_the_next_batch(tmp_path, data):
    def strategy_of_each_run(*arguments, **options):
        return fit(*arguments, **options, strategy=LateRestore())

    saved = SaveAtEachHook(tmp_path)
    whole = strategy_of_each_run(tmp_path, data(), ReadsSteps(), saved)
    for hook, step in (("batch", 1), ("batch", 5), *EPOCH_ENDS):
        with case(f"saved at the end of {hook} after {step} batches"):
            resumed = strategy_of_each_run(tmp_path, data(), ReadsSteps(), ckpt_path=saved.path(hook, step))
            assert resumed.seen == whole.seen[step:]
            assert resumed.epochs == whole.epochs[step:]


def test_each_epoch_serves_each_row_once_in_another_order(tmp_path, data):
    seen = fit(tmp_path, data(), Recorder()).seen
    epochs = [sum(seen[start : start + STEPS], ()) for start in range(0, len(seen), STEPS)]
    assert all(len(set(epoch)) == STEPS * PER_STEP for epoch in epochs)
    assert len(set(epochs)) == EPOCHS


def test_reloading_the_train_dataloader_every_epoch_keeps_the_order(tmp_path, data):
    whole = fit(tmp_path, data(), Recorder())
    assert fit(tmp_path, data(), Recorder(), reload_dataloaders_every_n_epochs=1).seen == whole.seen


def test_validation_serves_every_row_once(tmp_path, data):
    module = fit(tmp_path, data(validation=True), Recorder(), max_epochs=1)
    assert module.validated == [0, 1, 2, 3, 4]


def test_validate_with_a_checkpoint_leaves_a_later_fit_at_the_first_batch(tmp_path, data):
    saved = SaveAtEachHook(tmp_path)
    whole = fit(tmp_path, data(validation=True), Recorder(), saved, max_epochs=2)
    again, module = data(validation=True), Recorder()
    trainer = quiet_trainer("auto", accelerator="cpu", devices=1)
    trainer.validate(module, again, ckpt_path=saved.path("batch", 4), weights_only=True, verbose=False)
    assert fit(tmp_path, again, module, max_epochs=2).seen == whole.seen


def test_resume_with_another_seed_is_refused(tmp_path, data):
    path = tmp_path / "stopped.ckpt"
    with pytest.raises(Stopped):
        fit(tmp_path, data(), Recorder(fail_at=2), SaveOnException(path))
    with pytest.raises(CheckpointError, match="seed was 3 and is now 4"):
        fit(tmp_path, data(seed=4), Recorder(), ckpt_path=path)


def test_batches_are_the_same_under_a_precision_that_converts_inputs(tmp_path, data):
    assert fit(tmp_path, data(), Recorder(), precision="64-true").seen == fit(tmp_path, data(), Recorder()).seen
