"""What a run has sampled, in files; and a run that trains on them again without sampling.

A file is one rank's part of one batch of samples, as they come from rollout and reward: tensors, texts, policy versions
and scores. All that follows (log-probs, values, advantages, the update) is computed anew in a replay, so that it can be
watched, or done by another algorithm.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from rl_plugins.data.experience import Experience
from rl_plugins.errors import ConfigError
from rl_plugins.rewards.records import Score
from rl_plugins.stages.collecting import CollectingStage

_SCORES = "scored"
_STEP = re.compile(r"step_(\d{8})$")


class RolloutDump(Callback):
    """Writes `step_00000007/draw_0_rank_1_of_2.pt` while step 7 samples; a step draws more than once to filter groups.

    Args:
        folder: for the steps' folders.
        keep_last: newest steps that are kept.
    """

    def __init__(self, folder: Path, *, keep_last: int) -> None:
        self._folder, self._keep_last = folder, keep_last

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        stage = _collecting(pl_module)

        def write(experience: Experience, scores: list[Score], draw: int) -> None:
            kept = experience.compact()
            kept.set_column(_SCORES, scores)
            place = f"draw_{draw}_rank_{trainer.global_rank}_of_{trainer.world_size}.pt"
            kept.save(_step_folder(self._folder, stage.step + 1) / place)

        stage.on_rollout = write

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        stage = _collecting(pl_module)
        if trainer.is_global_zero:
            # A step that was begun and not finished may have drawn more often.
            shutil.rmtree(_step_folder(self._folder, stage.step + 1), ignore_errors=True)
            steps = _steps(self._folder)
            for old in steps[: max(0, len(steps) + 1 - self._keep_last)]:
                shutil.rmtree(old)
        trainer.strategy.barrier("rollout dump")

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        _collecting(pl_module).on_rollout = None


class RolloutReplay(Callback):
    """The stage trains on what `RolloutDump` has written, in place of sampling: it needs no rollout engine.

    Step 7 takes the samples of step 7; to see the update that they led to, start from the checkpoint of step 6. The
    number of ranks may be another one: prompts are dealt anew.

    Args:
        folder: that of the dump.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        stage = _collecting(pl_module)

        def read(draw: int) -> tuple[Experience, list[Score]]:
            whole = self._read(stage.step + 1, draw, stage.sampling.num_samples)
            rows = torch.arange(len(whole)).view(-1, stage.sampling.num_samples)
            mine = whole.reorder(rows[trainer.global_rank :: trainer.world_size].flatten())
            return mine, list(mine.columns[_SCORES])

        stage.replayed = read

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        _collecting(pl_module).replayed = None

    def _read(self, step: int, draw: int, num_samples: int) -> Experience:
        """The samples of all ranks, in the order of the prompts of the global batch."""
        folder = _step_folder(self._folder, step)
        files = sorted(folder.glob(f"draw_{draw}_rank_*"), key=_rank_of)
        if not files or len(files) != _ranks_of(files[0]):
            there = ", ".join(str(int(path.name[-8:])) for path in _steps(self._folder)) or "none"
            raise ConfigError(
                f"{folder} does not hold what all ranks drew (draw {draw}): {self._folder} has the steps {there}. "
                "Start from the checkpoint of the step before one of them, and bound run.steps by the last"
            )
        parts = [Experience.load(file) for file in files]
        if len(parts[0]) % num_samples:
            raise ConfigError(
                f"{files[0]} holds {len(parts[0])} samples: set batch.samples_per_prompt as the run had it"
            )
        # Ranks hold prompts in turn.
        rows = torch.arange(sum(map(len, parts))).view(len(parts), -1, num_samples).transpose(0, 1)
        return Experience.concat(parts).reorder(rows.flatten())


def _collecting(module: LightningModule) -> CollectingStage:
    if not isinstance(module, CollectingStage):
        raise ConfigError(f"{type(module).__name__} collects no experience: there is nothing to dump or to replay")
    return module


def _step_folder(folder: Path, step: int) -> Path:
    return folder / f"step_{step:08d}"


def _steps(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if _STEP.match(path.name)) if folder.is_dir() else []


def _rank_of(file: Path) -> int:
    return int(file.stem.split("_")[3])


def _ranks_of(file: Path) -> int:
    return int(file.stem.split("_")[5])
