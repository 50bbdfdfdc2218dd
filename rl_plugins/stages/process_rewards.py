"""PRIME: a process reward model learns from the outcomes of the policy's samples, and rewards every token.

The model is a causal language model. The reward of a token is the token's log-probability under the model, less the
log-probability under the frozen reference: see `rl_plugins.algorithms.implicit_process_reward`. The reference is
the model before training.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import torch
from tensordict import TensorDict
from torch import Tensor

from rl_plugins.algorithms.aggregation import aggregate
from rl_plugins.algorithms.implicit_process_reward import (
    GRANULARITIES,
    Granularity,
    best_of_n_weights,
    normalized,
    opponents,
    outcome_cross_entropy,
    outcome_preference,
    process_returns,
    process_rewards,
)
from rl_plugins.config.models import OptimizerConfig
from rl_plugins.config.settings import ABOVE_0, FROM_0_TO_1, Settings, one_of
from rl_plugins.data.experience import Experience, computed
from rl_plugins.device_copies import to_device
from rl_plugins.errors import ConfigError, DataError
from rl_plugins.stages.forward_passes import ForwardPasses
from rl_plugins.stages.metrics import mean_over_ranks
from rl_plugins.stages.optimizer import MicroBatchLoss, Optimize

PROCESS_REWARD_MODEL = "process_reward_model"
PROCESS_REFERENCE = "process_reference"
_MIN_RETURN = 1e-4
"""Larger returns predict success. Smaller returns may be rounding errors of a model that equals its reference."""


@dataclass(frozen=True)
class ProcessRewardConfig(Settings):
    """A process reward model, trained beside the policy.

    Attributes:
        path: folder or Hugging Face name that the model and its frozen reference start from; the policy's own by
            default. It has the policy's tokens.
        optimizer: settings of its optimizer.
        beta: reward of one nat.
        lam: share of the rewards of later tokens that is added to a token's reward.
        granularity: `token`, or `whole`: the last token gets the sum.
        ends_in_outcome: set the reward of the last token so that the sum of all rewards is the outcome, before `lam`
            spreads the rewards.
        normalize: divide the rewards of a step by the largest reward to go.
        loss: `cross_entropy` of the outcomes, or `preference` over samples of the group with another outcome.
        best_of_n: weigh preferences by how often a sample is the best of its group by its `outcome` or by its
            `return`; None weighs all preferences alike.
        update: train the model `before` or `after` the rewards of a step are computed.
        success_above: the outcome is 1 if the score is larger, and 0 if not. With None the outcome is the score before
            shaping and penalties.

    Source: PRIME, https://arxiv.org/abs/2502.01456; defaults from its code, https://github.com/volcengine/verl,
    `recipe/prime`.
    """

    path: str | None = None
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(gradient_clip=10.0))
    beta: Annotated[float, ABOVE_0] = 0.05
    lam: Annotated[float, FROM_0_TO_1] = 0.0
    granularity: Annotated[Granularity, one_of(*GRANULARITIES)] = "token"
    ends_in_outcome: bool = False
    normalize: bool = True
    loss: Annotated[str, one_of("cross_entropy", "preference")] = "cross_entropy"
    best_of_n: Annotated[Literal["outcome", "return"] | None, one_of("outcome", "return", None)] = None
    update: Annotated[str, one_of("before", "after")] = "before"
    success_above: float | None = None

    def __post_init__(self) -> None:
        """Check names and ranges.

        Raises:
            ConfigError: an unknown name, a value outside its range, or an option that would change nothing.
        """
        super().__post_init__()
        if self.best_of_n and self.loss != "preference":
            raise ConfigError(f"best_of_n={self.best_of_n} weighs preferences: choose the loss preference")
        if self.ends_in_outcome and not self.lam and self.granularity == "token":
            raise ConfigError(
                "ends_in_outcome=true: with lam=0 and granularity=token, no token gets the outcome: set lam above 0, "
                "or granularity=whole"
            )


class ProcessRewards:
    """Rewards every token by the process reward model, and trains the model.

    Args:
        config: settings of the model.
        passes: forward passes of the models. The temperature is always 1.
        optimize: takes an optimizer step of a model; `Stage.optimize`.
        updates_per_step: optimizer steps of the process reward model in a step.
    """

    def __init__(
        self, config: ProcessRewardConfig, passes: ForwardPasses, optimize: Optimize, updates_per_step: int
    ) -> None:
        self._config, self._optimize = config, optimize
        self._passes = replace(passes, temperature=1.0, router_replay=None)
        self._updates_per_step = updates_per_step
        self._strategy = passes.strategy

    def add_outcomes(self, samples: Experience, step: int) -> None:
        """Fill the column `outcome` from scores before shaping.

        Raises:
            DataError: scores are outside 0 to 1, and `success_above` is not set.
        """
        samples.set_column("outcome", self._outcomes(computed(samples.scores), step).tolist())

    def _outcomes(self, scores_B: Tensor, step: int) -> Tensor:
        above = self._config.success_above
        if above is not None:
            return (scores_B > above).to(scores_B)
        if ((scores_B < 0) | (scores_B > 1)).any():
            raise DataError(
                f"step {step + 1}: the process reward model learns from outcomes from 0 to 1, and the scores range "
                f"from {scores_B.min():g} to {scores_B.max():g}: say with process_reward_model.success_above which "
                "score is a success"
            )
        return scores_B

    def add(self, samples: Experience) -> dict[str, float]:
        """Fill `process_rewards`, and train the model on the outcomes; return its metrics. Collective."""
        config, mask_BT = self._config, samples.response_mask
        outcomes_B = torch.tensor(list(samples.columns["outcome"]))
        with self._strategy.phase_log.measure("process_rewards"):
            reference_BT = self._per_token_log_probs(PROCESS_REFERENCE, samples)
            if config.update == "after" or config.loss == "preference":
                log_probs_BT = self._per_token_log_probs(PROCESS_REWARD_MODEL, samples)
        targets = TensorDict({"reference": reference_BT, "outcomes": outcomes_B}, batch_size=samples.batch_size)
        if config.loss == "preference":
            self._add_opponents(targets, log_probs_BT, samples)
        metrics = self._train(samples, targets)
        with self._strategy.phase_log.measure("process_rewards"):
            if config.update == "before":
                log_probs_BT = self._per_token_log_probs(PROCESS_REWARD_MODEL, samples)
            rewards_BT = process_rewards(
                log_probs_BT=log_probs_BT,
                reference_log_probs_BT=reference_BT,
                response_mask_BT=mask_BT,
                outcomes_B=outcomes_B if config.ends_in_outcome else None,
                beta=config.beta,
                lam=config.lam,
                granularity=config.granularity,
            )
            if config.normalize:
                rewards_BT = normalized(
                    process_rewards_BT=rewards_BT,
                    response_mask_BT=mask_BT,
                    max_over_ranks=self._strategy.ranks.max,
                )
        samples.process_rewards = rewards_BT
        return metrics

    def _per_token_log_probs(self, name: str, samples: Experience) -> Tensor:
        columns = self._passes.per_token(samples, lambda micro: {"log_probs": self._log_probs(name, micro)})
        return columns["log_probs"]

    def _log_probs(self, name: str, micro: Experience) -> Tensor:
        return self._passes.log_probs(name, micro, entropy=False).log_probs_BT

    def _add_opponents(self, targets: TensorDict, log_probs_BT: Tensor, samples: Experience) -> None:
        """Add the opponents of each sample's preference, by the model before the update."""
        config = self._config
        groups: dict[str, Tensor] = {"groups_B": samples.groups, "valid_B": samples.valid}
        returns_B = process_returns(
            log_probs_BT=log_probs_BT,
            reference_log_probs_BT=targets["reference"],
            response_mask_BT=samples.response_mask,
            beta=config.beta,
        )
        targets["opponents"] = opponents(returns_B=returns_B, outcomes_B=targets["outcomes"], **groups)
        if config.best_of_n is not None:
            values_B = targets["outcomes"] if config.best_of_n == "outcome" else returns_B
            targets["weights"] = best_of_n_weights(values_B=values_B, **groups)

    def _train(self, samples: Experience, targets: TensorDict) -> dict[str, float]:
        """Train on each sample of the step once; return the metrics."""
        seen: list[tuple[Tensor, ...]] = []
        for rows in torch.arange(len(samples)).chunk(self._updates_per_step):
            with self._strategy.phase_log.measure("update_process_reward_model"):
                self._optimize(self._losses(samples[rows], targets[rows], seen), PROCESS_REWARD_MODEL)
        losses_B, returns_B, outcomes_B, counted_B = (torch.cat(parts).cpu() for parts in zip(*seen, strict=True))
        columns = {
            "loss": losses_B,
            "return": returns_B,
            "accuracy": ((returns_B > _MIN_RETURN) == (outcomes_B > 0.5)).double(),
        }
        return mean_over_ranks(
            {f"{PROCESS_REWARD_MODEL}/{name}": (values_B, counted_B) for name, values_B in columns.items()},
            self._strategy.ranks.sum,
        )

    def _losses(
        self, mini_batch: Experience, targets: TensorDict, seen: list[tuple[Tensor, ...]]
    ) -> Iterator[MicroBatchLoss]:
        counts = self._passes.counts(mini_batch.response_mask)
        micro_batches = self._passes.micro_batches(mini_batch)
        device = self._passes.device
        for position, indices in enumerate(micro_batches):
            micro, target = mini_batch[indices].trimmed(), to_device(targets[indices], device)
            mask_BT = to_device(micro.response_mask, device)
            returns_B = process_returns(
                log_probs_BT=self._log_probs(PROCESS_REWARD_MODEL, micro),
                reference_log_probs_BT=target["reference"][:, : mask_BT.shape[1]],
                response_mask_BT=mask_BT,
                beta=self._config.beta,
            )
            losses_B = self._sample_losses(returns_B, target)
            counted_B = mask_BT.bool().any(dim=-1)
            seen.append(tuple(x.detach() for x in (losses_B, returns_B, target["outcomes"], counted_B)))
            # The mean over samples: each sample is a sequence of one loss.
            loss = aggregate(losses_B[:, None], counted_B[:, None].float(), "seq-mean-token-sum", counts)
            yield loss, position == len(micro_batches) - 1

    def _sample_losses(self, returns_B: Tensor, target: TensorDict) -> Tensor:
        if self._config.loss == "cross_entropy":
            return outcome_cross_entropy(returns_B=returns_B, outcomes_B=target["outcomes"])
        return outcome_preference(
            returns_B=returns_B,
            outcomes_B=target["outcomes"],
            opponents_B=target["opponents"],
            weights_B=target.get("weights"),
        )
