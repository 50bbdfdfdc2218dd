"""Checkpoints on the stage's clock: complete or not there, everything a run needs to go on exactly, the last K kept.

A checkpoint is written by all ranks under a temporary name and renamed when all have finished; under Ray Train it is
then reported. What is in the folder is what there is: restarted workers and resumed runs look there. A run that goes on
from one says in a line what it was given back.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from rl_plugins.data.sampler import StepLoader
from rl_plugins.errors import ConfigError
from rl_plugins.run_folder import RunFolder
from rl_plugins.stages.stage import clock


@runtime_checkable
class HasRankShares(Protocol):
    """A module of whose state every rank holds a share, which another number of ranks can take over."""

    def rank_share(self) -> Any:
        """What `torch.save` can write; None on every rank if there is nothing."""

    def load_rank_shares(self, shares: list[Any], *, own: bool) -> str:
        """Go on from the shares of all ranks, or from this rank's own one if there were as many; says what goes on."""


@runtime_checkable
class HasRankState(Protocol):
    """A callback with a state of its own on every rank, which checkpoints hold."""

    def rank_state(self) -> dict[str, Any]:
        """What `torch.save` can write."""

    def load_rank_state(self, state: dict[str, Any]) -> str:
        """Go on from it; says in words what goes on."""


class PolicyCheckpoint(Callback):
    """Saves every `every` steps and after the last one.

    Args:
        folder: of the run.
        every: steps between checkpoints.
        keep_last: newest checkpoints that are kept.
        report_to_ray: the workers run under Ray Train.
        keep_engines: engine to the number of newest checkpoints that hold it, for engines that are kept for fewer
            checkpoints than the rest (a sharded critic takes as much room as the policy). A run can continue from a
            checkpoint only if it holds every engine.

    Attributes:
        saved_step: the newest step that has a checkpoint; what the run started from, and -1 before that.
    """

    def __init__(
        self,
        folder: Path,
        *,
        every: int,
        keep_last: int = 2,
        report_to_ray: bool = False,
        keep_engines: Mapping[str, int] | None = None,
    ) -> None:
        self._folder, self._every, self._keep_last = RunFolder(folder), every, keep_last
        self._report_to_ray = report_to_ray
        self._keep_engines = dict(keep_engines or {})
        self.saved_step = -1

    @classmethod
    def of(cls, trainer: Trainer) -> PolicyCheckpoint:
        """The one among a trainer's callbacks.

        Raises:
            ConfigError: there is none.
        """
        for callback in callbacks_of(trainer):
            if isinstance(callback, cls):
                return callback
        raise ConfigError("a callback saves by PolicyCheckpoint, and the trainer has none: add it to its callbacks")

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            # Of a process that was killed while it wrote or removed them.
            for unfinished in self._folder.unfinished():
                shutil.rmtree(unfinished)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.saved_step = clock(pl_module)
        if trainer.ckpt_path:
            checkpoint = Path(trainer.ckpt_path).parent
            words = [self._load_random_state(trainer, checkpoint, self.saved_step)]
            words += self._load_rank_states(trainer, checkpoint)
            words += _load_rank_shares(trainer, checkpoint)
            if trainer.is_global_zero:
                self._report_resume(trainer, checkpoint, words)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if clock(pl_module) % self._every == 0:
            self.save_once(trainer, pl_module)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.save_once(trainer, pl_module)

    def save_once(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write a checkpoint unless this step has one. Every rank must call it."""
        if clock(pl_module) != self.saved_step:
            self.save(trainer, pl_module)

    def save(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write a checkpoint now. Every rank must call it."""
        step = clock(pl_module)
        final = self._folder.checkpoint(step)
        write_checkpoint(trainer, final)
        if trainer.is_global_zero:
            for engine, kept in self._keep_engines.items():
                for old in self._folder.checkpoints()[:-kept]:
                    remove(old / "state" / engine)
            for old in self._folder.checkpoints()[: -self._keep_last]:
                remove(old)
        self.saved_step = step
        if self._report_to_ray:
            self._report(trainer, step, final)

    def _report(self, trainer: Trainer, step: int, final: Path) -> None:
        import ray.train
        from ray.train import Checkpoint, CheckpointUploadMode

        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        ray.train.report(
            {**metrics, "step": step},
            checkpoint=Checkpoint.from_directory(str(final)) if trainer.is_global_zero else None,
            checkpoint_dir_name=final.name,
            # It is already where Ray would copy it.
            checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
        )

    def _load_random_state(self, trainer: Trainer, checkpoint: Path, step: int) -> str:
        """Each rank's own state; among another number of ranks, states of their own. Returns which it was."""
        files = list(checkpoint.glob("random_state_*.pt"))
        if len(files) != trainer.world_size:
            _seed_anew(step, trainer.global_rank)
            return f"random states begin anew (saved by {len(files)} workers, now {trainer.world_size})"
        state = torch.load(checkpoint / f"random_state_{trainer.global_rank}.pt", weights_only=False)
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        if torch.cuda.is_available():
            torch.cuda.set_rng_state_all(state["cuda"])
        return "random states"

    def _load_rank_states(self, trainer: Trainer, checkpoint: Path) -> list[str]:
        files = list(checkpoint.glob("callbacks_*.pt"))
        if not files:
            return []
        if len(files) != trainer.world_size:
            return [f"averages begin anew (saved by {len(files)} workers, now {trainer.world_size})"]
        states = torch.load(checkpoint / f"callbacks_{trainer.global_rank}.pt", map_location="cpu", weights_only=True)
        stateful = _with_rank_state(trainer)
        return [stateful[name].load_rank_state(state) for name, state in states.items() if name in stateful]

    def _report_resume(self, trainer: Trainer, checkpoint: Path, words: list[str]) -> None:
        """Say what goes on and what does not, and keep the line in the run's folder."""
        restored: Mapping[str, str] = getattr(trainer.strategy, "restored", {})
        parts = [f"{engine} ({what})" for engine, what in restored.items()] + words
        loader = trainer.train_dataloader
        if isinstance(loader, StepLoader):
            parts.append(f"data from batch {loader.step}")
        elif not hasattr(loader, "load_state_dict"):
            parts.append("data from the beginning (its loader keeps no state)")
        line = f"{self._folder.path.name}: resumed from {checkpoint.name}: {', '.join(parts)}"
        print(line, flush=True)
        self._folder.path.mkdir(parents=True, exist_ok=True)
        with self._folder.resumes.open("a") as log:
            log.write(line + "\n")


def write_checkpoint(trainer: Trainer, final: Path) -> None:
    """Write a folder with all that a run needs to go on; it has its name only when it is complete. Collective."""
    partial = final.with_name(f".{final.name}.partial")
    if trainer.is_global_zero:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    trainer.strategy.barrier("checkpoint folder")
    trainer.save_checkpoint(partial / "state", weights_only=False)
    torch.save(_random_state(), partial / f"random_state_{trainer.global_rank}.pt")
    states = {name: callback.rank_state() for name, callback in _with_rank_state(trainer).items()}
    if states:
        torch.save(states, partial / f"callbacks_{trainer.global_rank}.pt")
    module: Any = trainer.lightning_module
    share = module.rank_share() if isinstance(module, HasRankShares) else None
    if share is not None:
        torch.save(share, partial / f"share_{trainer.global_rank}.pt")
    trainer.strategy.barrier("checkpoint written")
    if trainer.is_global_zero:
        if final.exists():
            remove(final)
        os.replace(partial, final)
    trainer.strategy.barrier("checkpoint in place")


def _load_rank_shares(trainer: Trainer, checkpoint: Path) -> list[str]:
    files = sorted(checkpoint.glob("share_*.pt"), key=lambda file: int(file.stem.removeprefix("share_")))
    module: Any = trainer.lightning_module
    if not files or not isinstance(module, HasRankShares):
        return []
    own = len(files) == trainer.world_size
    if own:
        files = [files[trainer.global_rank]]
    shares = [torch.load(file, map_location="cpu", weights_only=False) for file in files]
    return [module.load_rank_shares(shares, own=own)]


def _with_rank_state(trainer: Trainer) -> dict[str, HasRankState]:
    return {type(one).__name__: one for one in callbacks_of(trainer) if isinstance(one, HasRankState)}


def callbacks_of(trainer: Any) -> list[Any]:
    """The callbacks of a trainer, which has them as an attribute that its types do not know."""
    callbacks: list[Any] = trainer.callbacks
    return callbacks


def remove(folder: Path) -> None:
    """Remove a folder of a checkpoint, or one inside it, if it is there; what is half removed has no name any more."""
    if folder.exists():
        leaving = folder.with_name(f".{folder.name}.removed")
        shutil.rmtree(leaving, ignore_errors=True)
        os.replace(folder, leaving)
        shutil.rmtree(leaving)


def _seed_anew(step: int, rank: int) -> None:
    """Seed every generator from the run's seed, the step and the rank."""
    seeds = np.random.SeedSequence([torch.initial_seed(), step, rank]).generate_state(3).tolist()
    random.seed(seeds[0])
    np.random.seed(seeds[1])
    torch.manual_seed(seeds[2])


def _random_state() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }
