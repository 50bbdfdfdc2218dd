"""Curriculum by the difficulty seen so far: prompts the policy solves only sometimes come more often.

A share of every step's prompts is drawn with a probability proportional to the prompt's learnability: the variance of
the rewards within its group. For rewards of 0 and 1 this is p (1 - p), where p is the share of right answers. The other
prompts come in the usual order, so every prompt is seen again and again, even if it was too hard or too easy.

Source: Foster et al., Learning to Reason at the Frontier of Learnability, arXiv:2502.12272. The paper judges prompts by
extra samples; this module uses the samples of training, which cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from rl_plugins.config.data import CurriculumConfig
from rl_plugins.data.orders import Mixture
from rl_plugins.errors import ConfigError

_FLOOR = 0.01
# Last number of the seed: its purpose. `orders` uses other numbers.
_DRAW = 3


class GroupResult(NamedTuple):
    """Rewards of the samples of one prompt.

    Attributes:
        draw: number of the prompts' draw within the step, from 0.
        row: number of the prompt's row in the data set.
        mean: mean reward.
        variance: variance of the rewards.
    """

    draw: int
    row: int
    mean: float
    variance: float


class Curriculum:
    """Order with a share of every step's prompts drawn by learnability; the order is the same on every rank.

    Args:
        mixture: the usual order.
        config: the options.
        kept: int64 [N], numbers in the data set of the rows to draw from, ascending.
        prompts_per_step: rows in the global batch of one step.
        seed: seed of the draws.

    Raises:
        ConfigError: the share leaves a step without prompts of either kind.
    """

    def __init__(
        self, mixture: Mixture, config: CurriculumConfig, *, kept: np.ndarray, prompts_per_step: int, seed: int
    ) -> None:
        self.identity = {"mixture": mixture.identity, "share": config.share, "keep": config.keep}
        self._mixture, self._keep, self._kept, self._seed = mixture, config.keep, kept, seed
        self._num_drawn = round(config.share * prompts_per_step)
        self._num_usual = prompts_per_step - self._num_drawn
        if not self._num_drawn or not self._num_usual:
            raise ConfigError(
                f"curriculum share={config.share} of {prompts_per_step} prompts per step is {self._num_drawn} prompts: "
                "choose a share that leaves at least one drawn prompt and one prompt in the usual order"
            )
        self._rates = np.concatenate([np.full(part.rows, part.share / part.rows) for part in mixture.parts])
        self._seen = np.zeros(len(kept), dtype=np.bool_)
        self._mean, self._variance = np.zeros(len(kept)), np.zeros(len(kept))

    def batch(self, step: int) -> np.ndarray:
        """Return the rows of the global batch of a step, int64 [G], given all groups observed so far."""
        num_rows = len(self._kept)
        usual = self._mixture.take(step * self._num_usual, self._num_usual)
        generator = np.random.PCG64([self._seed, step, 0, _DRAW])
        numbers = generator.random_raw(num_rows + self._num_usual + self._num_drawn)
        uniform = (numbers[:num_rows] >> np.uint64(11)) * 2.0**-53
        # The rows with the largest log(u) / weight are a sample without replacement (Efraimidis and Spirakis).
        with np.errstate(divide="ignore"):
            keys = np.log(uniform) / self._weights()
        keys[usual] = -np.inf
        drawn = np.sort(np.argpartition(-keys, self._num_drawn - 1)[: self._num_drawn])
        # Mini-batches and ranks get prompts of both kinds.
        return np.concatenate([usual, drawn])[np.argsort(numbers[num_rows:], kind="stable")]

    def _weights(self) -> np.ndarray:
        """Return rate in the usual order times learnability; an unseen prompt has the average of the seen prompts."""
        average = self._variance[self._seen].mean() if self._seen.any() else 0.0
        if average == 0:
            return self._rates
        learnability = np.where(self._seen, self._variance, average)
        return self._rates * np.maximum(learnability, _FLOOR * average)

    def observe(self, results: Iterable[GroupResult]) -> None:
        """Record the groups of a finished step. Every rank must be given the groups of all ranks."""
        for result in sorted(results):
            index = int(np.searchsorted(self._kept, result.row))
            keep = self._keep if self._seen[index] else 0.0
            self._seen[index] = True
            self._mean[index] = keep * self._mean[index] + (1 - keep) * result.mean
            self._variance[index] = keep * self._variance[index] + (1 - keep) * result.variance

    def metrics(self) -> dict[str, float]:
        """Return the share of prompts seen so far, their mean reward and their mean learnability."""
        if not self._seen.any():
            return {"curriculum/seen": 0.0}
        return {
            "curriculum/seen": float(self._seen.mean()),
            "curriculum/reward": float(self._mean[self._seen].mean()),
            "curriculum/learnability": float(self._variance[self._seen].mean()),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the indices, means and variances of the seen prompts."""
        import torch

        indices = np.flatnonzero(self._seen)
        columns = {"indices": indices, "mean": self._mean[indices], "variance": self._variance[indices]}
        return {name: torch.from_numpy(values) for name, values in columns.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the seen prompts."""
        indices = state["indices"].numpy()
        for column, values in ((self._seen, True), (self._mean, state["mean"]), (self._variance, state["variance"])):
            column[:] = 0
            column[indices] = values
