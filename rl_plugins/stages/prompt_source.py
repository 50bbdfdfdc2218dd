"""The data loader of a stage, as the stage uses it beside Lightning's loop: further prompts, and the curriculum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rl_plugins.data.prompts import PromptBatch
from rl_plugins.data.sampler import StepLoader
from rl_plugins.errors import ConfigError
from rl_plugins.ranks import Ranks
from rl_plugins.stages.metrics import SampleMetrics


@dataclass(frozen=True)
class PromptSource:
    """The data loader of training.

    Attributes:
        loader: returns the trainer's data loader.
        ranks: this rank and the others.
    """

    loader: Callable[[], Any]
    ranks: Ranks

    def draw(self) -> PromptBatch:
        """Return this rank's next batch of prompts.

        Raises:
            ConfigError: the data loader cannot draw.
        """
        loader = self.loader()
        if not hasattr(loader, "draw"):
            raise ConfigError(
                f"dynamic sampling, and sampling ahead, draw further prompts, and {type(loader).__name__} has no "
                "`draw`: use PromptDataModule, or a loader with a method `draw() -> PromptBatch`"
            )
        prompts: PromptBatch = loader.draw()
        return prompts

    def report(self, sampled: SampleMetrics) -> dict[str, float]:
        """Report the rewards of all samples of a step to the curriculum; return its metrics. Collective."""
        loader = self.loader()
        if not isinstance(loader, StepLoader) or loader.curriculum is None:
            return {}
        gathered = self.ranks.gather(sampled.group_results())
        loader.curriculum.observe(result for results in gathered for result in results)
        return loader.curriculum.metrics()
