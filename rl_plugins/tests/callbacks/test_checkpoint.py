"""Checkpoints: the random state of the worker's device, and old checkpoints."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_plugins.callbacks.checkpoint import PolicyCheckpoint
from rl_plugins.errors import ConfigError
from rl_plugins.run_folder import RunFolder
from rl_plugins.stages.stage import Stage
from rl_plugins.tests.callbacks.training import build_policy, build_stage, train
from rl_plugins.tests.stages import canned


def trainer_on(device: torch.device, checkpoint: Path) -> Any:
    """Attributes of a trainer for a checkpoint. The trainer's worker has a device."""
    strategy = SimpleNamespace(
        root_device=device,
        barrier=lambda name: None,
        broadcast=lambda value: value,
        model_engine=None,
        restored={},
    )
    stage = Stage(build_policy(), tokenizer=canned.tokenizer)
    stage.step = 1
    return SimpleNamespace(
        strategy=strategy,
        save_checkpoint=lambda folder, **options: None,
        ckpt_path=checkpoint / "state",
        lightning_module=stage,
        train_dataloader=None,
        callbacks=[],
        is_global_zero=True,
        global_rank=0,
        world_size=1,
    )


def test_checkpoint_refuses_a_folder_at_an_address() -> None:
    with pytest.raises(ConfigError, match="folder=s3://bucket/run: an address cannot be used here: give a local path"):
        PolicyCheckpoint(Path("s3://bucket/run"), every=1)


def test_checkpoint_has_the_random_state_of_the_workers_own_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker saw four devices, and sees two after the resume."""
    saved, restored = torch.arange(4), {}

    def set_state(state: Tensor, device: torch.device) -> None:
        restored[device] = state

    monkeypatch.setattr("rl_plugins.callbacks.checkpoint.check_finite_weights", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: saved[device.index])
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: list(saved))
    monkeypatch.setattr(torch.cuda, "set_rng_state", set_state)
    checkpoint = tmp_path / "checkpoint_00000001"
    PolicyCheckpoint(tmp_path, every=1).write(trainer_on(torch.device("cuda", 3), checkpoint), checkpoint)
    trainer = trainer_on(torch.device("cuda", 1), checkpoint)
    PolicyCheckpoint(tmp_path, every=1).on_train_start(trainer, trainer.lightning_module)
    assert restored == {torch.device("cuda", 1): torch.tensor(3)}


def test_checkpoint_continues_if_an_old_checkpoint_cannot_be_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path / "run")
    for step in (2, 3):
        folder.checkpoint(step).mkdir(parents=True)
    # The content of a link is not removed.
    (tmp_path / "elsewhere").mkdir()
    folder.checkpoint(1).symlink_to(tmp_path / "elsewhere")
    PolicyCheckpoint(folder.path, every=1, keep_last=1)._remove_old()
    assert folder.checkpoints() == [folder.checkpoint(3)] and (tmp_path / "elsewhere").is_dir()
    assert f"{folder.checkpoint(1)} cannot be removed" in capsys.readouterr().out


def test_checkpoint_refuses_a_folder_with_later_checkpoints(tmp_path: Path) -> None:
    """The checkpoints of another training would be the newest ones, and the new ones would be removed."""
    train(build_stage(3), [PolicyCheckpoint(tmp_path, every=1)])
    with pytest.raises(ConfigError, match=r"has checkpoint_00000003, and this training starts at step 0: give"):
        train(build_stage(2), [PolicyCheckpoint(tmp_path, every=1)])
