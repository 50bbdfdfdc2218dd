"""Check of trained weights before they are saved: no NaN and no infinity."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from rl_plugins.errors import TrainingDiverged
from rl_plugins.models.finite import not_finite
from rl_plugins.models.remote import RemoteLearner
from rl_plugins.run_folder import RunFolder
from rl_plugins.strategies.contract import Strategy


def check_finite_weights(strategy: Strategy, models: Mapping[str, nn.Module], step: int, target: Path) -> None:
    """Refuse to save weights that are not finite. Collective, with one small all-reduce.

    The metrics of a step come from the weights before its update, so they do not show that the update was bad.

    Args:
        strategy: strategy with the models.
        models: models of the stage to check, by name.
        step: number of the last step.
        target: folder to write, named in the error. The error also names the newest checkpoint beside this folder.

    Raises:
        TrainingDiverged: a weight of a model is NaN or infinite, on any rank.
    """
    flags = torch.tensor([_is_bad(strategy, name, model) for name, model in models.items()])
    bad = [name for name, flag in zip(models, strategy.ranks.max(flags).tolist(), strict=True) if flag]
    if not bad:
        return
    newest = RunFolder(target.parent).latest_checkpoint()
    good = f"the last good checkpoint is {newest}" if newest else "there is no good checkpoint yet"
    raise TrainingDiverged(
        f"training has diverged by step {step}: {' and '.join(bad)} has weights that are NaN or infinite, so "
        f"{target.name} is not written; {good}. Lower the learning rate (optimizer.lr), or bound the gradient more "
        "(optimizer.gradient_clip)"
    )


def _is_bad(strategy: Strategy, name: str, model: nn.Module) -> float:
    """Return 1 if this rank's shards of a model have a number that is not finite, else 0. Rank 0 asks learners."""
    if isinstance(model, RemoteLearner):
        return float(strategy.ranks.rank == 0 and not model.has_finite_weights())
    return float(bool(not_finite(strategy.shards(name))))
