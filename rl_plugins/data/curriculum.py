"""A curriculum by the difficulty seen so far: prompts that the policy sometimes solves come more often.

A part of every step's prompts is drawn with a probability proportional to their learnability: the variance of the
rewards within their groups, which for rewards of 0 and 1 is p (1 - p) with p the share of right answers. The others
come in the usual order, so that every prompt is seen again and again, also those that were too hard or too easy.

Source: Foster et al., Learning to Reason at the Frontier of Learnability, arXiv:2502.12272. There, prompts are judged
with samples of their own; here with those that the policy is trained on, which cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from rl_plugins.data.orders import Mixture
from rl_plugins.errors import ConfigError

_FLOOR = 0.01
# The last number of the seed, other than those of `orders`.
_DRAW = 3


@dataclass(frozen=True)
class CurriculumConfig:
    """How prompts are drawn by their difficulty.

    Attributes:
        share: of a step's prompts that is drawn by learnability; the rest comes in the usual order.
        keep: of what is known of a prompt when its next group comes: 0 believes the last group, 0.9 an average over
            about ten.
    """

    share: float = 0.5
    keep: float = 0.5

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not 0 < self.share < 1:
            raise ConfigError(f"curriculum share={self.share}: must be above 0 and below 1")
        if not 0 <= self.keep < 1:
            raise ConfigError(f"curriculum keep={self.keep}: must be from 0 to below 1")


class GroupResult(NamedTuple):
    """How the samples of a prompt were rewarded.

    Attributes:
        draw: of prompts within the step, from 0.
        row: of the prompt in the data set.
        mean: of the rewards.
        variance: of the rewards, around their mean.
    """

    draw: int
    row: int
    mean: float
    variance: float


class Curriculum:
    """Draws a part of every step's prompts by what the groups so far have shown; it is the same on every rank."""

    def __init__(
        self, mixture: Mixture, config: CurriculumConfig, *, kept: np.ndarray, prompts_per_step: int, seed: int
    ) -> None:
        """Set the options.

        Args:
            mixture: the usual order.
            config: how to draw.
            kept: int64 [N], number in the data set of each row that can be drawn, ascending.
            prompts_per_step: rows in the global batch of one step.
            seed: seed of the draws.

        Raises:
            ConfigError: the share leaves a step without prompts of either kind.
        """
        self.identity = {"mixture": mixture.identity, "share": config.share, "keep": config.keep}
        self._mixture, self._keep, self._kept, self._seed = mixture, config.keep, kept, seed
        self._drawn = round(config.share * prompts_per_step)
        self._usual = prompts_per_step - self._drawn
        if not self._drawn or not self._usual:
            raise ConfigError(
                f"curriculum share={config.share} of {prompts_per_step} prompts per step is {self._drawn} of them: "
                "choose a share that leaves some of either kind"
            )
        self._rates = np.concatenate([np.full(part.rows, part.share / part.rows) for part in mixture.parts])
        self._seen = np.zeros(len(kept), dtype=np.bool_)
        self._mean, self._variance = np.zeros(len(kept)), np.zeros(len(kept))

    def batch(self, step: int) -> np.ndarray:
        """Return the rows of the global batch of a step, given what is known now, int64 [G]."""
        usual = self._mixture.take(step * self._usual, self._usual)
        numbers = np.random.PCG64([self._seed, step, 0, _DRAW]).random_raw(len(self._kept) + self._usual + self._drawn)
        uniform = (numbers[: len(self._kept)] >> np.uint64(11)) * 2.0**-53
        # The largest of log(u) / weight are a sample without replacement (Efraimidis and Spirakis).
        with np.errstate(divide="ignore"):
            keys = np.log(uniform) / self._weights()
        keys[usual] = -np.inf
        drawn = np.sort(np.argpartition(-keys, self._drawn - 1)[: self._drawn])
        # Mini-batches and ranks get prompts of both kinds.
        return np.concatenate([usual, drawn])[np.argsort(numbers[len(self._kept) :], kind="stable")]

    def _weights(self) -> np.ndarray:
        """Rate in the usual order times learnability; a prompt that was never seen counts as the average of those."""
        average = self._variance[self._seen].mean() if self._seen.any() else 0.0
        if average == 0:
            return self._rates
        learnability = np.where(self._seen, self._variance, average)
        return self._rates * np.maximum(learnability, _FLOOR * average)

    def observe(self, results: Iterable[GroupResult]) -> None:
        """Take in the groups of a finished step, those of all ranks, on every rank."""
        for result in sorted(results):
            index = int(np.searchsorted(self._kept, result.row))
            keep = self._keep if self._seen[index] else 0.0
            self._seen[index] = True
            self._mean[index] = keep * self._mean[index] + (1 - keep) * result.mean
            self._variance[index] = keep * self._variance[index] + (1 - keep) * result.variance

    def metrics(self) -> dict[str, float]:
        """Share of the prompts seen so far, and their mean reward and learnability as last known."""
        if not self._seen.any():
            return {"curriculum/seen": 0.0}
        return {
            "curriculum/seen": float(self._seen.mean()),
            "curriculum/reward": float(self._mean[self._seen].mean()),
            "curriculum/learnability": float(self._variance[self._seen].mean()),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return what is known of the prompts that were seen."""
        import torch

        indices = np.flatnonzero(self._seen)
        columns = {"indices": indices, "mean": self._mean[indices], "variance": self._variance[indices]}
        return {name: torch.from_numpy(values) for name, values in columns.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what was known."""
        indices = state["indices"].numpy()
        for column, values in ((self._seen, True), (self._mean, state["mean"]), (self._variance, state["variance"])):
            column[:] = 0
            column[indices] = values
