"""PRIME: beside the policy, a process reward model learns from the outcomes of its samples and rewards every token.

The model is a causal language model. Its reward of a token is how much more likely it finds it than its frozen
reference, the model that it started from, does: see `rl_plugins.algorithms.implicit_process_reward`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from typing_extensions import override

from rl_plugins.algorithms.aggregation import aggregate
from rl_plugins.algorithms.algorithm import Algorithm
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
from rl_plugins.data.experience import Experience
from rl_plugins.data.tokenization import check_same_tokens
from rl_plugins.errors import ConfigError
from rl_plugins.models.log_probs import response_log_probs
from rl_plugins.stages.fields import filled
from rl_plugins.stages.metrics import mean_over_ranks
from rl_plugins.stages.optimizer import OptimizerConfig
from rl_plugins.stages.policy_optimization import PolicyOptimization

PROCESS_REWARD_MODEL = "process_reward_model"
PROCESS_REFERENCE = "process_reference"
_TOLD_APART = 1e-4
"""Larger returns predict success. Those of a model that is still its reference are rounding errors and predict none."""


@dataclass(frozen=True)
class ProcessRewardConfig:
    """A process reward model, trained beside the policy.

    Attributes:
        path: what it and its frozen reference start from; it has the policy's tokens. None is the policy's own path.
        optimizer: its own.
        beta: reward of one nat.
        lam: share of the rewards of later tokens that a token gets, too.
        granularity: `token`, or `whole`: the last token gets the sum.
        ends_in_outcome: the reward of the last token makes the sum of all the outcome, before `lam` spreads it.
        normalize: divide the rewards of a step by the largest reward to go.
        loss: `cross_entropy` of the outcomes, or `preference` over samples of the group with the other outcome.
        best_of_n: weigh the preferences by how often a sample is the best of its group, as its `outcome` or its
            `return` says; None weighs them alike.
        update: `before` the rewards of a step are computed, or `after`.
        success_above: the outcome is 1 if the score is above this, and 0 if not; None takes the score, before shaping
            and penalties, for the outcome.

    Source: PRIME, https://arxiv.org/abs/2502.01456; defaults from its code, https://github.com/volcengine/verl,
    `recipe/prime`.
    """

    path: str | None = None
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(gradient_clip=10.0))
    beta: float = 0.05
    lam: float = 0.0
    granularity: Granularity = "token"
    ends_in_outcome: bool = False
    normalize: bool = True
    loss: Literal["cross_entropy", "preference"] = "cross_entropy"
    best_of_n: Literal["outcome", "return"] | None = None
    update: Literal["before", "after"] = "before"
    success_above: float | None = None

    def __post_init__(self) -> None:
        """Check names and ranges.

        Raises:
            ConfigError: an unknown name, a value outside its range, or an option that would change nothing.
        """
        for option, value, known in (
            ("granularity", self.granularity, GRANULARITIES),
            ("loss", self.loss, ("cross_entropy", "preference")),
            ("best_of_n", self.best_of_n, (None, "outcome", "return")),
            ("update", self.update, ("before", "after")),
        ):
            if value not in known:
                raise ConfigError(f"process_reward_model.{option}={value!r}: use one of {', '.join(map(str, known))}")
        if not self.beta > 0:
            raise ConfigError(f"process_reward_model.beta={self.beta}: must be above 0")
        if not 0 <= self.lam <= 1:
            raise ConfigError(f"process_reward_model.lam={self.lam}: use a number from 0 to 1")
        if self.best_of_n and self.loss != "preference":
            raise ConfigError(
                "process_reward_model.best_of_n weighs preferences: set process_reward_model.loss=preference"
            )


class PRIME(PolicyOptimization):
    """Policy optimization with process rewards.

    Args:
        policy: see `Stage`.
        algorithm: one whose advantage asks for `process_rewards_BT`; `prime` by default.
        process_reward_model: the model that gives them.
        **policy_optimization: arguments of `PolicyOptimization`.
    """

    gives_process_rewards = True

    def __init__(
        self,
        policy: str | nn.Module,
        *,
        algorithm: Algorithm | None = None,
        process_reward_model: ProcessRewardConfig | None = None,
        **policy_optimization: Any,
    ) -> None:
        super().__init__(policy, algorithm=algorithm or Algorithm(advantage="prime"), **policy_optimization)
        self.process_reward_config = process_reward_model or ProcessRewardConfig()
        self.process_reward_model: Any = None
        self.process_reference: Any = None
        self._process_path = self.process_reward_config.path or (policy if isinstance(policy, str) else None)
        if "process_rewards_BT" not in self.algorithm.needs:
            raise ConfigError(
                f"algorithm.advantage={self.algorithm.advantage!r} has no use for process rewards: choose "
                "algorithm=prime, or an advantage that takes process_rewards_BT"
            )
        if self._process_path is None:
            raise ConfigError(
                "the process reward model needs a model to start from: name it with "
                "process_reward_model=ProcessRewardConfig(path=...)"
            )

    # Models -----------------------------------------------------------------------------------------------------

    @override
    def configure_model(self) -> None:
        super().configure_model()
        if self.process_reward_model is None:
            path = str(self._process_path)
            check_same_tokens(self.tokenizer, path, "process reward model")
            self.process_reward_model = self.load_model(path)
            self.process_reference = self.load_model(path, PROCESS_REFERENCE)

    @override
    def engine_modules(self) -> dict[str, nn.Module]:
        models = {PROCESS_REWARD_MODEL: self.process_reward_model, PROCESS_REFERENCE: self.process_reference}
        return {**super().engine_modules(), **models}

    @override
    def optimizer_configs(self) -> dict[str, OptimizerConfig]:
        return {**super().optimizer_configs(), PROCESS_REWARD_MODEL: self.process_reward_config.optimizer}

    # Experience -------------------------------------------------------------------------------------------------

    @override
    def shape_rewards(self, experience: Experience) -> None:
        # A response that is right stays right, however long it is.
        experience.set_column("outcome", self._outcomes(filled(experience.scores)).tolist())
        super().shape_rewards(experience)

    def _outcomes(self, scores_B: Tensor) -> Tensor:
        above = self.process_reward_config.success_above
        if above is not None:
            return (scores_B > above).to(scores_B)
        if ((scores_B < 0) | (scores_B > 1)).any():
            raise ConfigError(
                f"step {self.step}: the process reward model learns from outcomes from 0 to 1, and the scores range "
                f"from {scores_B.min():g} to {scores_B.max():g}: say with process_reward_model.success_above which "
                "score is a success"
            )
        return scores_B

    @override
    def compute_values(self, experience: Experience) -> None:
        """What single tokens are worth: the critic's values, where there is a critic, and process rewards."""
        super().compute_values(experience)
        self.compute_process_rewards(experience)

    def compute_process_rewards(self, experience: Experience) -> None:
        """Fill `process_rewards`, and train the model that gives them on the outcomes."""
        config, mask_BT = self.process_reward_config, experience.response_mask
        outcomes_B = torch.tensor(list(experience.columns["outcome"]))
        with self._phase("process_rewards"):
            reference_BT = self._judge(PROCESS_REFERENCE, experience)
            if config.update == "after" or config.loss == "preference":
                log_probs_BT = self._judge(PROCESS_REWARD_MODEL, experience)
        targets = TensorDict({"reference": reference_BT, "outcomes": outcomes_B}, batch_size=experience.batch_size)
        if config.loss == "preference":
            self._set_opponents(targets, log_probs_BT, experience)
        self._train_process_reward_model(experience, targets)
        with self._phase("process_rewards"):
            if config.update == "before":
                log_probs_BT = self._judge(PROCESS_REWARD_MODEL, experience)
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
                    max_over_ranks=self._strategy.max_over_ranks,
                )
        experience.process_rewards = rewards_BT

    def _judge(self, engine: str, experience: Experience) -> Tensor:
        return self._per_token(experience, lambda micro: {"log_probs": self._judgement(engine, micro)})["log_probs"]

    def _judgement(self, engine: str, batch: Experience) -> Tensor:
        # At temperature 1: how the policy samples is nothing to a model that judges.
        return response_log_probs(self._strategy.engine(engine), **self.forward_inputs(batch)).log_probs_BT

    # The process reward model learns ----------------------------------------------------------------------------

    def _set_opponents(self, targets: TensorDict, log_probs_BT: Tensor, experience: Experience) -> None:
        """What the preference of each sample is taken over, by the model before the update."""
        config = self.process_reward_config
        groups: dict[str, Tensor] = {"groups_B": experience.groups, "valid_B": experience.valid}
        returns_B = process_returns(
            log_probs_BT=log_probs_BT,
            reference_log_probs_BT=targets["reference"],
            response_mask_BT=experience.response_mask,
            beta=config.beta,
        )
        targets["opponents"] = opponents(returns_B=returns_B, outcomes_B=targets["outcomes"], **groups)
        if config.best_of_n is not None:
            values_B = targets["outcomes"] if config.best_of_n == "outcome" else returns_B
            targets["weights"] = best_of_n_weights(values_B=values_B, **groups)

    def _train_process_reward_model(self, experience: Experience, targets: TensorDict) -> None:
        """One pass over the samples of the step, with as many optimizer steps as a pass of the policy has."""
        seen: list[tuple[Tensor, ...]] = []
        for rows in torch.arange(len(experience)).chunk(self.updates_per_step):
            with self._phase("update_process_reward_model"):
                self.optimize(self._process_losses(experience[rows], targets[rows], seen), PROCESS_REWARD_MODEL)
        losses_B, returns_B, outcomes_B, there_B = (torch.cat(parts) for parts in zip(*seen, strict=True))
        columns = {
            "loss": losses_B,
            "return": returns_B,
            "accuracy": ((returns_B > _TOLD_APART) == (outcomes_B > 0.5)).double(),
        }
        self._sampled.numbers |= mean_over_ranks(
            {f"{PROCESS_REWARD_MODEL}/{name}": (values_B, there_B) for name, values_B in columns.items()},
            self._strategy.sum_over_ranks,
        )

    def _process_losses(
        self, mini_batch: Experience, targets: TensorDict, seen: list[tuple[Tensor, ...]]
    ) -> Iterator[tuple[Tensor, bool]]:
        counts = self._counts(mini_batch.response_mask)
        micro_batches = self._micro_batches(mini_batch)
        for position, indices in enumerate(micro_batches):
            micro, target = mini_batch[indices].trimmed().to(self.device), targets[indices].to(self.device)
            mask_BT = micro.response_mask
            returns_B = process_returns(
                log_probs_BT=self._judgement(PROCESS_REWARD_MODEL, micro),
                reference_log_probs_BT=target["reference"][:, : mask_BT.shape[1]],
                response_mask_BT=mask_BT,
                beta=self.process_reward_config.beta,
            )
            losses_B = self._losses(returns_B, target)
            there_B = mask_BT.bool().any(dim=-1)
            seen.append(tuple(x.detach().cpu() for x in (losses_B, returns_B, target["outcomes"], there_B)))
            # The mean over samples: each is a sequence of one loss.
            loss = aggregate(losses_B[:, None], there_B[:, None].float(), "seq-mean-token-sum", counts)
            yield loss, position == len(micro_batches) - 1

    def _losses(self, returns_B: Tensor, target: TensorDict) -> Tensor:
        if self.process_reward_config.loss == "cross_entropy":
            return outcome_cross_entropy(returns_B=returns_B, outcomes_B=target["outcomes"])
        return outcome_preference(
            returns_B=returns_B,
            outcomes_B=target["outcomes"],
            opponents_B=target["opponents"],
            weights_B=target.get("weights"),
        )
