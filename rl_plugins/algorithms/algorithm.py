"""An algorithm: which advantage, which policy loss, what KL and which aggregation, as one small object.

The training loop calls two methods and never asks for the algorithm's name. A new algorithm is another configuration
of `Algorithm`, or a subclass that overrides one of the two.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from rl_plugins.algorithms.advantages import ADVANTAGES, one_rank
from rl_plugins.algorithms.aggregation import AGGREGATIONS, GlobalCounts, aggregate
from rl_plugins.algorithms.kl import KL_ESTIMATORS, AdaptiveKL, FixedKL, KLController, kl_in_reward
from rl_plugins.algorithms.policy_losses import POLICY_LOSSES
from rl_plugins.errors import ConfigError


@dataclass(frozen=True)
class KLConfig:
    """How far the policy may drift from the reference.

    Attributes:
        coefficient: weight of the KL term; 0 needs no reference model.
        placement: `loss` (added to the policy loss) or `reward` (subtracted from each token's reward).
        estimator: a name in `KL_ESTIMATORS`.
        target: adapt the coefficient towards this KL; None keeps it fixed.
        horizon: how slowly it adapts, in sequences.
    """

    coefficient: float = 0.0
    placement: Literal["loss", "reward"] = "loss"
    estimator: str = "k3"
    target: float | None = None
    horizon: float = 10_000.0

    def controller(self) -> KLController:
        """The controller that these settings describe."""
        if self.target is None:
            return FixedKL(self.coefficient)
        return AdaptiveKL(self.coefficient, self.target, self.horizon)


_GIVEN_TO_ADVANTAGES = ("token_level_rewards_BT", "response_mask_BT", "groups_B", "valid_B", "sum_over_ranks")
_GIVEN_TO_LOSSES = ("log_probs_BT", "old_log_probs_BT", "advantages_BT", "response_mask_BT")


def _check_inputs(option: str, name: str, function: Callable[..., Any], given: Set[str]) -> None:
    """Raise a ConfigError if the function needs what neither the stage nor the options give it."""
    parameters = inspect.signature(function).parameters.values()
    missing = [p.name for p in parameters if p.default is p.empty and p.kind is p.KEYWORD_ONLY and p.name not in given]
    if not missing:
        return
    # The names of tensors end in their axes.
    if re.search(r"_[A-Z]+$", missing[0]):
        way_out = ", which this stage does not compute: call the function from a stage of your own, or choose another"
    else:
        way_out = f": set algorithm.{option}_options.{missing[0]}"
    raise ConfigError(f"algorithm.{option}={name!r} needs {missing[0]}{way_out}")


@dataclass(frozen=True)
class Algorithm:
    """GRPO by default (https://arxiv.org/abs/2402.03300).

    Attributes:
        advantage: name in `ADVANTAGES`.
        advantage_options: its keyword arguments.
        policy_loss: name in `POLICY_LOSSES`.
        policy_loss_options: its keyword arguments.
        aggregation: one of `AGGREGATIONS`.
        scale_factor: the constant of `seq-mean-token-sum-norm`.
        kl: distance to the reference.
    """

    advantage: str = "grpo"
    advantage_options: Mapping[str, Any] = field(default_factory=dict)
    policy_loss: str = "ppo_clip"
    policy_loss_options: Mapping[str, Any] = field(default_factory=dict)
    aggregation: str = "token-mean"
    scale_factor: float | None = None
    kl: KLConfig = field(default_factory=KLConfig)

    def __post_init__(self) -> None:
        """Check every name.

        Raises:
            ConfigError: an unknown name, or a constant that is missing.
        """
        for option, value, known in (
            ("advantage", self.advantage, tuple(ADVANTAGES)),
            ("policy_loss", self.policy_loss, tuple(POLICY_LOSSES)),
            ("aggregation", self.aggregation, AGGREGATIONS),
            ("kl.estimator", self.kl.estimator, tuple(KL_ESTIMATORS)),
            ("kl.placement", self.kl.placement, ("loss", "reward")),
        ):
            if value not in known:
                raise ConfigError(f"algorithm.{option}={value!r} is unknown: use one of {', '.join(known)}")
        if self.aggregation == "seq-mean-token-sum-norm" and self.scale_factor is None:
            raise ConfigError("algorithm.aggregation=seq-mean-token-sum-norm needs algorithm.scale_factor")
        for option, function, given in (
            ("advantage", ADVANTAGES[self.advantage], {*_GIVEN_TO_ADVANTAGES, *self.advantage_options}),
            ("policy_loss", POLICY_LOSSES[self.policy_loss], {*_GIVEN_TO_LOSSES, *self.policy_loss_options}),
        ):
            _check_inputs(option, getattr(self, option), function, given)

    @property
    def needs_reference(self) -> bool:
        """Whether a reference model is run."""
        return self.kl.coefficient != 0

    def advantages(
        self,
        *,
        scores_B: Tensor,
        response_mask_BT: Tensor,
        response_lengths_B: Tensor,
        groups_B: Tensor,
        valid_B: Tensor,
        old_log_probs_BT: Tensor | None,
        ref_log_probs_BT: Tensor | None,
        kl_coefficient: float,
        sum_over_ranks: Callable[[Tensor], Tensor] = one_rank,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Token-level rewards, advantages and returns, each [B, T]. Collective.

        The score of a sample is the reward of its last token; of an empty response, of the first position.
        """
        last_B = (response_lengths_B - 1).clamp(min=0)
        is_last_BT = torch.arange(response_mask_BT.shape[1], device=last_B.device) == last_B[:, None]
        rewards_BT = torch.where(is_last_BT & valid_B[:, None], scores_B[:, None], 0)
        if self.kl.placement == "reward" and self.needs_reference:
            assert old_log_probs_BT is not None and ref_log_probs_BT is not None
            rewards_BT = kl_in_reward(
                rewards_BT,
                old_log_probs_BT,
                ref_log_probs_BT,
                response_mask_BT,
                coefficient=kl_coefficient,
                estimator=self.kl.estimator,
            )
        advantages_BT, returns_BT = ADVANTAGES[self.advantage](
            token_level_rewards_BT=rewards_BT,
            response_mask_BT=response_mask_BT,
            groups_B=groups_B,
            valid_B=valid_B,
            sum_over_ranks=sum_over_ranks,
            **self.advantage_options,
        )
        return rewards_BT, advantages_BT, returns_BT

    def loss(
        self,
        *,
        log_probs_BT: Tensor,
        old_log_probs_BT: Tensor,
        advantages_BT: Tensor,
        response_mask_BT: Tensor,
        ref_log_probs_BT: Tensor | None,
        kl_coefficient: float,
        counts: GlobalCounts,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """This micro-batch's part of the loss, and per-token metrics [B, T]."""
        loss_BT, metrics = POLICY_LOSSES[self.policy_loss](
            log_probs_BT=log_probs_BT,
            old_log_probs_BT=old_log_probs_BT,
            advantages_BT=advantages_BT,
            response_mask_BT=response_mask_BT,
            **self.policy_loss_options,
        )
        if ref_log_probs_BT is not None:
            # Masked before, not after: the derivative of what is masked away would be 0 * NaN.
            valid_BT = response_mask_BT.bool()
            kl_BT = KL_ESTIMATORS[self.kl.estimator](
                torch.where(valid_BT, log_probs_BT, 0), torch.where(valid_BT, ref_log_probs_BT, 0)
            )
            metrics["kl"] = kl_BT.detach()
            if self.kl.placement == "loss":
                loss_BT = loss_BT + kl_coefficient * kl_BT
        loss = aggregate(loss_BT, response_mask_BT, self.aggregation, counts, scale_factor=self.scale_factor)
        return loss, metrics
