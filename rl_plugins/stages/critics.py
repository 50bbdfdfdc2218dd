"""Critics of policy optimization: a critic of the rewards, and a critic of the costs if the mean cost is bounded.

Both critics are the same part with another name. A critic is a model of the stage, in the training workers, or a
`CriticPool`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from rl_plugins.config.models import CriticConfig
from rl_plugins.data.experience import Experience, computed
from rl_plugins.stages.critic_pool import CriticPool
from rl_plugins.stages.critic_training import FIELDS, ValueObjective, explained_variance
from rl_plugins.stages.forward_passes import ForwardPasses
from rl_plugins.stages.metrics import TokenMetrics
from rl_plugins.stages.optimizer import Optimize


class Critic:
    """Estimates the returns of samples, and learns from the returns.

    Args:
        name: name of the model, a name in `FIELDS`.
        config: settings of the critic.
        objective: loss of the critic.
        passes: forward passes of the models.
        optimize: takes an optimizer step of a model; `Stage.optimize`.
        model: returns the model, or the `CriticPool`.
    """

    def __init__(
        self,
        name: str,
        config: CriticConfig,
        objective: ValueObjective,
        passes: ForwardPasses,
        optimize: Optimize,
        model: Callable[[], Any],
    ) -> None:
        self.name, self._config, self._objective = name, config, objective
        self._passes, self._optimize, self._model = passes, optimize, model
        self._strategy = passes.strategy
        self._values, self._returns = FIELDS[name]

    def warms_up(self, step: int) -> bool:
        """Return True if the policy waits for this critic in a step."""
        return step < self._config.warmup_steps

    def add_values(self, samples: Experience) -> None:
        """Fill the values of the critic. Collective."""
        values = partial(self._passes.values, self.name)
        with self._strategy.phase_log.measure(self._values):
            columns = self._passes.per_token(samples, lambda micro: {"values": values(micro)})
        setattr(samples, self._values, columns["values"])

    def update(self, mini_batch: Experience, metrics: TokenMetrics, *, last: bool) -> None:
        """Take an optimizer step, or let the pool take the step. Collective.

        Args:
            mini_batch: samples with the values and the returns of this critic.
            metrics: collector to which the metrics of the loss are added.
            last: True for the last mini-batch of a step.
        """
        with self._strategy.phase_log.measure(f"update_{self.name}"):
            model, counts = self._model(), self._passes.counts(mini_batch.response_mask)
            if isinstance(model, CriticPool):
                model.learn(mini_batch, counts, last=last)
                return
            losses = self._objective.losses(
                mini_batch,
                self._passes.micro_batches(mini_batch),
                partial(self._passes.values, self.name),
                counts,
                metrics,
                self._passes.device,
            )
            self._optimize(losses, self.name)

    def wait_for_updates(self) -> dict[str, float]:
        """Wait for the updates of a pool, which learns while the policy learns; return the pool's metrics."""
        model = self._model()
        if not isinstance(model, CriticPool):
            return {}
        with self._strategy.phase_log.measure(f"update_{self.name}"):
            return model.wait_for_updates()

    def metrics(self, batch: Experience) -> dict[str, float]:
        """Return the explained variance of the returns of a step. Collective."""
        values_BT, returns_BT = (computed(getattr(batch, field)) for field in (self._values, self._returns))
        explained = explained_variance(values_BT, returns_BT, batch.response_mask, self._strategy.ranks.sum)
        return {f"train/{self.name}/explained_variance": explained}
