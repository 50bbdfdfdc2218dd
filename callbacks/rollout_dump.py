"""Dump of sampled rollouts into files, and replay: training on a dump without sampling.

A file holds one rank's samples of one batch, as sampling and rewards return the samples: tensors, texts, policy
versions and scores. A replay computes the rest again (log-probs, values, advantages, the update), so a debugger can
watch the computation, or another algorithm can use the same samples.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from rl_plugins.data.experience import Experience
from rl_plugins.errors import ConfigError, DataError
from rl_plugins.rewards.records import Score
from rl_plugins.rewards.trajectory import RECORDS
from rl_plugins.stages.policy_optimization import PolicyOptimization

_SCORES = "scored"
_STEP = re.compile(r"step_(\d{8})$")


class RolloutDump(Callback):
    """Write the samples of each step, to files such as `step_00000007/draw_0_rank_1_of_2.pt`.

    A step with a group filter can draw several batches.

    Args:
        folder: parent folder of the folders of the steps.
        keep_last: number of newest steps to keep.
    """

    def __init__(self, folder: str | Path, *, keep_last: int) -> None:
        self._folder, self._keep_last = Path(folder), keep_last

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        stage = _policy_optimization(pl_module)

        def write(experience: Experience, scores: list[Score], draw: int) -> None:
            kept = experience.compact()
            kept.set_column(_SCORES, scores)
            name = f"draw_{draw}_rank_{trainer.global_rank}_of_{trainer.world_size}.pt"
            kept.save(_step_folder(self._folder, stage.step + 1) / name, RECORDS)

        stage.rollouts.on_collected = write

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        stage = _policy_optimization(pl_module)
        if trainer.is_global_zero:
            this, steps = _step_folder(self._folder, stage.step + 1), _steps(self._folder)
            # An interrupted run, or a roll-back, leaves this step and later steps, which are repeated.
            earlier = [step for step in steps if step.name < this.name]
            for old in {*steps} - {*earlier[max(0, len(earlier) + 1 - self._keep_last) :]}:
                shutil.rmtree(old, ignore_errors=True)
        trainer.strategy.barrier("rollout dump")

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        _policy_optimization(pl_module).rollouts.on_collected = None


class RolloutReplay(Callback):
    """Train on the samples of a `RolloutDump`. The stage does not sample, and needs no rollout engine.

    Step 7 takes the samples of step 7. To repeat the update of step 7, start from the checkpoint of step 6. The number
    of ranks can differ from the number of the dump: the prompts are distributed again.

    Args:
        folder: folder of the dump.

    Raises:
        ConfigError: the stage collects no experience.
        DataError: the dump does not hold the samples of a step.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        stage = _policy_optimization(pl_module)

        def read(draw: int) -> tuple[Experience, list[Score]]:
            whole = self._read(stage.step + 1, draw, stage.sampling.num_samples)
            rows = torch.arange(len(whole)).view(-1, stage.sampling.num_samples)
            samples = whole.reorder(rows[trainer.global_rank :: trainer.world_size].flatten())
            return samples, list(samples.columns[_SCORES])

        stage.rollouts.replay = read

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        _policy_optimization(pl_module).rollouts.replay = None

    def _read(self, step: int, draw: int, num_samples: int) -> Experience:
        """Return the samples of all ranks, in the order of the prompts in the global batch."""
        folder = _step_folder(self._folder, step)
        files = sorted(folder.glob(f"draw_{draw}_rank_*"), key=_rank_of)
        if not files or len(files) != _ranks_of(files[0]):
            steps = ", ".join(str(int(path.name[-8:])) for path in _steps(self._folder)) or "none"
            raise DataError(
                f"{folder} does not hold the samples of all ranks (draw {draw}): {self._folder} has the steps {steps}. "
                "Start from the checkpoint of the step before, and set the stage's max_steps (in a recipe: run.steps) "
                "to the last of these steps"
            )
        parts = [Experience.load(file, RECORDS) for file in files]
        if len(parts[0]) % num_samples:
            raise DataError(
                f"{files[0]} holds {len(parts[0])} samples, and sampling.num_samples={num_samples}: set the number of "
                "samples per prompt (in a recipe: batch.samples_per_prompt) to the number of the dumped run"
            )
        # Rank r has the prompts r, r + ranks, r + 2 ranks, ...
        rows = torch.arange(sum(map(len, parts))).view(len(parts), -1, num_samples).transpose(0, 1)
        return Experience.concat(parts).reorder(rows.flatten())


def _policy_optimization(module: LightningModule) -> PolicyOptimization:
    if not isinstance(module, PolicyOptimization):
        raise ConfigError(
            f"{type(module).__name__} collects no experience, so RolloutDump and RolloutReplay cannot be used with it"
        )
    return module


def _step_folder(folder: Path, step: int) -> Path:
    return folder / f"step_{step:08d}"


def _steps(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if _STEP.match(path.name)) if folder.is_dir() else []


def _rank_of(file: Path) -> int:
    return int(file.stem.split("_")[3])


def _ranks_of(file: Path) -> int:
    return int(file.stem.split("_")[5])
