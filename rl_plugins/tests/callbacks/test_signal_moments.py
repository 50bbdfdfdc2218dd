"""Signals in validation, while a checkpoint is written, and in the export: nothing is half there, nothing is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer

from rl_plugins.callbacks import checkpoint_files
from rl_plugins.callbacks.checkpoint import PolicyCheckpoint
from rl_plugins.callbacks.graceful_stop import GracefulStop
from rl_plugins.manifest import find_damage
from rl_plugins.models.export import write_policy
from rl_plugins.models.tiny import build_model, build_tokenizer
from rl_plugins.run_folder import RunFolder
from rl_plugins.signals import ending_signals, remove_request
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.tests.callbacks.training import AfterStep, build_stage
from rl_plugins.tests.loops import for_each
from rl_plugins.tests.stages import canned

STEPS = 4
Send = Callable[[], None]


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Give the signals the handlers of a terminal. A shell that starts tests in the background ignores some signals."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class AfterError(Callback):
    """Note the handler of Ctrl-C in Lightning's shutdown after an error."""

    handler: Any = None

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        self.handler = signal.getsignal(signal.SIGINT)


class InValidation(Callback):
    """Send a signal at the start of the validation after a step."""

    def __init__(self, step: int, send: Send) -> None:
        self._step, self._send = step, send

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        if pl_module.step == self._step:
            self._send()


def in_checkpoint(step: int, send: Send, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send a signal in the middle of the checkpoint of a step."""
    put = checkpoint_files.put_in_place

    def interrupted(writer: Any, files: Any, final: Path) -> str | None:
        if final == RunFolder(final.parent).checkpoint(step):
            send()
        return put(writer, files, final)

    monkeypatch.setattr(checkpoint_files, "put_in_place", interrupted)


def train(folder: Path, *others: Callback, checkpoint_every: int = 100, last: Sequence[Callback] = ()) -> int:
    """Train with a validation after every second step; return the last step."""
    stage = build_stage(STEPS)
    batch = canned.prompt_batch(canned.PROMPTS)
    trainer = Trainer(
        strategy=SingleDeviceRolloutStrategy(rollout=canned.CannedRollout()), logger=False, max_epochs=-1,
        callbacks=[*others, PolicyCheckpoint(folder, every=checkpoint_every, keep_last=9), GracefulStop(folder), *last],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        val_check_interval=2, check_val_every_n_epoch=None,
    )  # fmt: skip
    trainer.fit(stage, canned.loader([batch] * 9), canned.loader([batch]))
    return stage.step


def sends(number: int) -> Send:
    return lambda: os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_request_in_validation_saves_the_step_and_ends(tmp_path: Path, number: signal.Signals) -> None:
    folder = RunFolder(tmp_path)
    assert train(tmp_path, InValidation(2, sends(number))) == 2
    assert folder.stopped.read_text() == f"after step 2: {number.name}"
    assert folder.checkpoints() == [folder.checkpoint(2)] and find_damage(folder.checkpoint(2)) is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_request_while_a_checkpoint_is_written_ends_after_this_step(
    tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path)
    in_checkpoint(1, sends(number), monkeypatch)
    assert train(tmp_path, checkpoint_every=1) == 1
    assert folder.stopped.read_text() == f"after step 1: {number.name}"
    assert folder.checkpoints() == [folder.checkpoint(1)] and find_damage(folder.checkpoint(1)) is None


@pytest.mark.parametrize("moment", ["step", "validation", "checkpoint"])
def test_ctrl_c_keeps_earlier_checkpoints_and_a_second_ctrl_c_still_ends_the_process(
    tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, send = RunFolder(tmp_path), sends(signal.SIGINT)
    others: list[Callback] = []
    after = AfterError()
    if moment == "step":
        others = [AfterStep([2], lambda *_: send())]
    elif moment == "validation":
        others = [InValidation(2, send)]
    else:
        in_checkpoint(2, send, monkeypatch)
    with ending_signals() as signals:
        # Lightning turns Ctrl-C into SystemExit.
        with pytest.raises(SystemExit) as ended:
            train(tmp_path, *others, checkpoint_every=1, last=[after])
        assert after.handler == signals.end
    assert isinstance(ended.value.__context__, KeyboardInterrupt) and signals.status == 130
    newest = folder.latest_checkpoint()
    assert newest == folder.checkpoint(2 if moment == "validation" else 1) and find_damage(newest) is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signal_in_the_export_leaves_the_earlier_export(
    tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer, folder = build_model(), build_tokenizer(), tmp_path / "policy"
    write_policy(model, dict(model.state_dict()), tokenizer, folder)
    before = (folder / "model.safetensors").read_bytes()
    monkeypatch.setattr(type(tokenizer), "save_pretrained", lambda *_: os.kill(os.getpid(), number))
    weights = {name: weight + 1 for name, weight in model.state_dict().items()}
    with ending_signals() as signals, pytest.raises(KeyboardInterrupt):
        write_policy(model, weights, tokenizer, folder)
    assert signals.status == 128 + number
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]
    assert (folder / "model.safetensors").read_bytes() == before


def test_signal_inside_exec_ends_the_process_with_the_status_of_the_signal(tmp_path: Path) -> None:
    """Python ends a process with SIGINT if a `KeyboardInterrupt` has left `exec`."""
    program = """
import os, signal, sys
from rl_plugins.signals import ending_signals

with ending_signals() as signals:
    try:
        exec("os.kill(os.getpid(), signal.SIGTERM)")
    except KeyboardInterrupt:
        sys.exit(signals.status)
"""
    (tmp_path / "interrupted.py").write_text(program)
    ended = subprocess.run([sys.executable, "-m", "interrupted"], cwd=tmp_path, check=False, timeout=300)
    assert ended.returncode == 128 + signal.SIGTERM


@for_each("make", [Path.touch, Path.mkdir])
def test_remove_request_keeps_a_request_since_the_start(tmp_path: Path, make: Callable[[Path], None]) -> None:
    stop = tmp_path / "stop"
    remove_request(stop, before=0.0)
    make(stop)
    remove_request(stop, before=stop.stat().st_mtime)
    assert stop.exists()
    remove_request(stop, before=stop.stat().st_mtime + 1)
    assert not stop.exists()
