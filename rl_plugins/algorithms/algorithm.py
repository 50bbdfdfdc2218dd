"""Algorithm: the choice of advantage, policy loss, KL term and aggregation, in one small object.

The training loop calls the methods of the object and does not depend on the algorithm's name. A new algorithm is a
configuration of `Algorithm`, with new functions if necessary, or a subclass that overrides a method. The stage computes
the inputs that the signatures of the functions name: see `Algorithm.needs`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import NoneType
from typing import Annotated, Any

import torch
from torch import Tensor

from rl_plugins.algorithms.advantages import ADVANTAGES, WITH_GROUPS, AdvantageEstimator
from rl_plugins.algorithms.advantages.group_relative import gdpo
from rl_plugins.algorithms.advantages.returns import reverse_kl
from rl_plugins.algorithms.aggregation import AGGREGATIONS, GlobalCounts, aggregate
from rl_plugins.algorithms.constraint import CostConstraint
from rl_plugins.algorithms.filtering import GroupFilter, Resampling
from rl_plugins.algorithms.inputs import (
    ALWAYS_GIVEN_TO_ADVANTAGES,
    ALWAYS_GIVEN_TO_LOSSES,
    COMPUTED_FOR_ADVANTAGES,
    COMPUTED_FOR_LOSSES,
    Collective,
    call_with,
    one_rank,
    required_inputs,
)
from rl_plugins.algorithms.masked import rewards_of_tokens, sequence_means
from rl_plugins.algorithms.policy_losses import POLICY_LOSSES, SELECTIONS, WITH_RATIO, PolicyLoss
from rl_plugins.algorithms.policy_losses.distillation import forward_kl_top_k
from rl_plugins.algorithms.policy_losses.modifiers import (
    off_policy_sequence_mask,
    positive_nll,
)
from rl_plugins.algorithms.registry import bound_options, function_of, is_among, plain
from rl_plugins.algorithms.regularization import KL_ESTIMATORS, EntropyConfig, KLConfig, kl_in_reward
from rl_plugins.algorithms.reward_shaping import RewardShaping
from rl_plugins.algorithms.rollout_correction import ROLLOUT_CORRECTIONS, RolloutCorrection
from rl_plugins.config.settings import (
    ABOVE_0_OR_NULL,
    ABOVE_0_TO_1,
    AT_LEAST_1,
    NOT_NEGATIVE,
    Settings,
    fits,
    or_null,
    shown,
)
from rl_plugins.errors import ConfigError


@dataclass(frozen=True)
class LossModifiers(Settings):
    """Modifiers that can be combined with any policy loss.

    Attributes:
        off_policy_mask: largest divergence of a sample with negative advantage, in nats per token; a sample beyond the
            bound is dropped (`off_policy_sequence_mask`). None keeps all.
        top_entropy: share of the tokens that learn, by highest entropy (`top_entropy_mask`); None for all.
        positive_nll: weight of the imitation of samples that succeeded (`positive_nll`).
        positive_above: score, before shaping, above which a sample has succeeded.
    """

    off_policy_mask: Annotated[float | None, or_null(NOT_NEGATIVE)] = None
    top_entropy: Annotated[float | None, or_null(ABOVE_0_TO_1)] = None
    positive_nll: Annotated[float, NOT_NEGATIVE] = 0.0
    positive_above: float = 0.5


@dataclass(frozen=True)
class Algorithm(Settings):
    """Algorithm of policy optimization; GRPO by default (https://arxiv.org/abs/2402.03300).

    Attributes:
        advantage: name in `ADVANTAGES`, dotted path of a function with the same interface, or the function.
        advantage_options: keyword arguments of the advantage function.
        policy_loss: name in `POLICY_LOSSES`, dotted path of a function with the same interface, or the function.
        policy_loss_options: keyword arguments of the policy loss.
        selection_options: keyword arguments of the selection that belongs to the policy loss (`SELECTIONS`).
        aggregation: name in `AGGREGATIONS`.
        scale_factor: constant divisor of `seq-mean-token-sum-norm`.
        kl: KL term to the reference.
        entropy: bonus for entropy.
        modifiers: modifiers of the policy loss.
        correction: correction of the gap between the policy that sampled and the policy that is trained; an object or a
            name in `ROLLOUT_CORRECTIONS`. None is no correction; recipes replace null with `token_tis` if the rollout
            engine quantizes weights or KV cache, `rollout.dtype` differs from the dtype of training, or `model.float8`
            is set.
        shaping: changes to the scores before advantages are computed.
        group_filter: dynamic sampling; None trains on every group.
        constraint: bound on the mean cost of the samples; None for rewards alone.
        resampling: draw the samples to train on by their rewards; None trains on each sample once.
        reward_components: names of the numbers, returned by the reward function beside the score, that make up
            `component_rewards_BK`.
        teacher_top_k: number of the teacher's most likely tokens in `teacher_top_log_probs_BTK`, at least 1.
        value_clip: largest change of a value in one update before the critic's loss ignores the value; None for no
            clipping.
    """

    advantage: str | AdvantageEstimator = "grpo"
    advantage_options: Mapping[str, Any] = field(default_factory=dict)
    policy_loss: str | PolicyLoss = "ppo_clip"
    policy_loss_options: Mapping[str, Any] = field(default_factory=dict)
    selection_options: Mapping[str, Any] = field(default_factory=dict)
    aggregation: str = "token-mean"
    scale_factor: Annotated[float | None, ABOVE_0_OR_NULL] = None
    kl: KLConfig = field(default_factory=KLConfig)
    entropy: EntropyConfig = field(default_factory=EntropyConfig)
    modifiers: LossModifiers = field(default_factory=LossModifiers)
    correction: str | RolloutCorrection | None = None
    shaping: RewardShaping = field(default_factory=RewardShaping)
    group_filter: GroupFilter | None = None
    constraint: CostConstraint | None = None
    resampling: Resampling | None = None
    reward_components: Sequence[str] = ()
    teacher_top_k: Annotated[int, AT_LEAST_1] = 32
    value_clip: Annotated[float | None, ABOVE_0_OR_NULL] = 0.5

    def __post_init__(self) -> None:
        """Check every name, and that the stage can compute the inputs of the functions.

        Raises:
            ConfigError: a name is unknown, a number is out of its range, an input or constant is missing, or two
                options contradict each other.
        """
        super().__post_init__()
        _check_kinds(self)
        for option, value, known in (
            ("aggregation", self.aggregation, AGGREGATIONS),
            ("kl.estimator", self.kl.estimator_name, tuple(KL_ESTIMATORS)),
            ("kl.placement", self.kl.placement, ("loss", "reward")),
            ("correction", self.correction if isinstance(self.correction, str) else "none", tuple(ROLLOUT_CORRECTIONS)),
        ):
            if value not in known:
                raise ConfigError(f"{option}={value!r} is unknown: use one of {', '.join(known)}")
        if self.aggregation == "seq-mean-token-sum-norm" and self.scale_factor is None:
            raise ConfigError("aggregation=seq-mean-token-sum-norm needs scale_factor")
        _check_inputs("advantage", self._advantage_inputs, ALWAYS_GIVEN_TO_ADVANTAGES | COMPUTED_FOR_ADVANTAGES)
        _check_inputs("policy_loss", self._loss_inputs, ALWAYS_GIVEN_TO_LOSSES | COMPUTED_FOR_LOSSES)
        if "component_rewards_BK" in self._advantage_inputs and not self.reward_components:
            raise ConfigError("the advantage needs component_rewards_BK: name the components in reward_components")
        correction = self.rollout_correction
        if correction.bypass and correction.level is not None and is_among(self.policy_loss_function, WITH_RATIO):
            raise ConfigError(
                f"correction={self.correction}: the ratio of policy_loss={self.policy_loss} is taken to the rollout "
                "already, and the weights would multiply the loss by it again: use correction=bypass, rejection alone "
                "(bypass_geo_rs, bypass_k3_rs), or policy_loss=reinforce"
            )
        if self.selection_options:
            _check_selection(self)
        if self.constraint is not None:
            choices = {"group_filter": self.group_filter, "resampling": self.resampling}
            self.constraint.check_fits(self._advantage_inputs, choices)
        if self.resampling is not None:
            _check_resampling(self)
        if not self.reads_scores and (self.shaping != RewardShaping() or self.kl_is_in_reward):
            raise ConfigError(
                "advantage=gdpo compares reward_components alone, and shaping and kl.placement=reward change the "
                "score: use kl.placement=loss, and shape the components in the reward function"
            )
        weight = self._unused_weight
        if weight and self.constraint is not None:
            raise ConfigError(
                f"{weight}=0 leaves rewards and costs out of the loss, so constraint bounds nothing: set {weight} "
                "above 0, or leave constraint out"
            )
        if weight and (self.shaping != RewardShaping() or self.kl_is_in_reward):
            raise ConfigError(
                f"{weight}=0 leaves the reward out of the loss, and shaping and kl.placement=reward change the reward "
                f"alone: use kl.placement=loss, leave shaping out, or set {weight} above 0"
            )

    @cached_property
    def advantage_function(self) -> AdvantageEstimator:
        """Advantage estimator."""
        return function_of("advantage", self.advantage, ADVANTAGES)

    @cached_property
    def policy_loss_function(self) -> PolicyLoss:
        """Policy loss."""
        return function_of("policy_loss", self.policy_loss, POLICY_LOSSES)

    @cached_property
    def rollout_correction(self) -> RolloutCorrection:
        """Correction of the gap between rollout and training."""
        correction = self.correction or "none"
        return ROLLOUT_CORRECTIONS[correction] if isinstance(correction, str) else correction

    @cached_property
    def _advantage_inputs(self) -> list[str]:
        return required_inputs(self.advantage_function, self.advantage_options)

    @cached_property
    def _loss_inputs(self) -> list[str]:
        return required_inputs(self.policy_loss_function, self.policy_loss_options)

    @cached_property
    def needs(self) -> frozenset[str]:
        """Names of the inputs that the stage must compute besides the samples and their scores.

        `old_log_probs_BT` is included only if the algorithm needs it even in a step with a single update.
        """
        needs = {*self._advantage_inputs, *(set(self._loss_inputs) & COMPUTED_FOR_LOSSES)} - ALWAYS_GIVEN_TO_ADVANTAGES
        if self.kl.coefficient != 0:
            needs.add("ref_log_probs_BT")
            if self.kl.placement == "reward":
                needs.add("old_log_probs_BT")
        if self.rollout_correction.decoupled:
            needs.add("old_log_probs_BT")
        if self.modifiers.top_entropy is not None:
            needs.add("entropy_BT")
        if needs & {"entropy_BT", "sum_pi_squared_BT", "selected_BT"}:
            needs.add("old_log_probs_BT")
        if self.constraint is not None:
            needs |= {"costs_B", *({"cost_values_BT"} if "values_BT" in needs else ())}
        return frozenset(needs)

    @property
    def reads_scores(self) -> bool:
        """False if the advantage compares the components of the reward, and not the score."""
        return plain(self.advantage_function) is not gdpo or not self.reward_components

    @property
    def _unused_weight(self) -> str:
        """Name of the option that leaves the reward out of a distillation, or an empty text."""
        of_advantage = bound_options(self.advantage_function, self.advantage_options)
        if plain(self.advantage_function) is reverse_kl and not of_advantage.get("reward_weight"):
            return "advantage_options.reward_weight"
        of_loss = bound_options(self.policy_loss_function, self.policy_loss_options)
        if plain(self.policy_loss_function) is forward_kl_top_k and not of_loss.get("policy_weight"):
            return "policy_loss_options.policy_weight"
        return ""

    @property
    def kl_is_in_reward(self) -> bool:
        """True if the KL penalty is a part of the reward."""
        return self.kl.coefficient != 0 and self.kl.placement == "reward"

    def advantages(
        self, inputs: Mapping[str, Any], *, kl_coefficient: float, sum_over_ranks: Collective = one_rank
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute token-level rewards, advantages and returns, each [B, T]. Collective.

        Args:
            inputs: tensors by name: `scores_B`, `response_mask_BT`, `groups_B`, `valid_B`, `response_lengths_B`, and
                the inputs in `needs`; `token_level_scores_BT` may be left out if no token but the last has a reward.
            kl_coefficient: weight of the KL penalty in the reward.
            sum_over_ranks: element-wise sum of a tensor over ranks.
        """
        mask_BT, dtype = inputs["response_mask_BT"], inputs["scores_B"].dtype
        scores_B = torch.where(inputs["valid_B"], inputs["scores_B"], 0)
        rewards_BT = rewards_of_tokens(scores_B, inputs.get("token_level_scores_BT"), mask_BT, inputs["valid_B"])
        if self.kl_is_in_reward:
            rewards_BT = kl_in_reward(
                rewards_BT,
                inputs["old_log_probs_BT"],
                inputs["ref_log_probs_BT"],
                mask_BT,
                coefficient=kl_coefficient,
            )
        given = {**inputs, "token_level_rewards_BT": rewards_BT, "sum_over_ranks": sum_over_ranks}
        advantages_BT, returns_BT = call_with(self.advantage_function, given, self.advantage_options)
        return rewards_BT.to(dtype), advantages_BT.to(dtype), returns_BT.to(dtype)

    def kl_to_reference(self, log_probs_BT: Tensor, ref_log_probs_BT: Tensor, response_mask_BT: Tensor) -> Tensor:
        """Estimate each token's KL to the reference, [B, T]; 0 where masked."""
        valid_BT = response_mask_BT.bool()
        # Masked before the estimate: the derivative at a masked position would be 0 * NaN otherwise.
        return KL_ESTIMATORS[self.kl.estimator_name](
            torch.where(valid_BT, log_probs_BT, 0), torch.where(valid_BT, ref_log_probs_BT, 0)
        )

    def select(
        self,
        inputs: Mapping[str, Any],
        *,
        seed: int,
        sum_over_ranks: Collective,
        gather_over_ranks: Collective,
    ) -> Tensor | None:
        """Select the tokens for `selected_BT`, bool [B, T]; None if the policy loss needs no selection. Collective.

        Args:
            inputs: tensors by name, with the log-probabilities of the policy before the update as `log_probs_BT`.
            seed: seed of the selection.
            sum_over_ranks: element-wise sum of a tensor over ranks.
            gather_over_ranks: concatenation of the vectors of all ranks.

        Raises:
            ConfigError: the policy loss needs `selected_BT` and has no selection.
        """
        if "selected_BT" not in self.needs:
            return None
        if not isinstance(self.policy_loss, str) or self.policy_loss not in SELECTIONS:
            raise ConfigError(f"policy_loss={self.policy_loss!r} needs selected_BT and has no selection in SELECTIONS")
        given = {**inputs, "seed": seed, "sum_over_ranks": sum_over_ranks, "gather_over_ranks": gather_over_ranks}
        return call_with(SELECTIONS[self.policy_loss], given, self.selection_options)

    def corrected(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Apply a bypass correction to a micro-batch; other inputs are returned unchanged.

        As with a decoupled correction, a rejected token leaves `response_mask_BT`, and so every term of the loss and
        every mean over the tokens of its sequence. `counts` of the global mini-batch still include the token: the
        current policy of later micro-batches is not known yet.

        Args:
            inputs: tensors by name, as for `loss`.

        Returns:
            Inputs of `loss`, with the mask of the kept tokens, and with `rollout_weights_BT` if the correction weighs.

        Example:
            inputs = algorithm.corrected(inputs)
            loss, metrics = algorithm.loss(inputs, kl_coefficient=0.1, counts=counts)
        """
        correction = self.rollout_correction
        if not correction.bypass:
            return inputs
        kept_BT, weights_BT = correction.correct(
            log_probs_BT=inputs["log_probs_BT"].detach(),
            rollout_log_probs_BT=inputs["rollout_log_probs_BT"],
            response_mask_BT=inputs["response_mask_BT"],
        )
        return {**inputs, "response_mask_BT": kept_BT, "rollout_weights_BT": weights_BT}

    def loss(
        self,
        inputs: Mapping[str, Any],
        *,
        kl_coefficient: float,
        counts: GlobalCounts,
        entropy_coefficient: float = 0.0,
        positive_counts: GlobalCounts | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute this micro-batch's part of the loss, and metrics per token [B, T] or per sample [B].

        Args:
            inputs: tensors by name, after `corrected`: `log_probs_BT` (with gradient), `old_log_probs_BT`,
                `rollout_log_probs_BT`, `advantages_BT`, `response_mask_BT`, `entropy_BT`; if in use also
                `ref_log_probs_BT`, `selected_BT`, `rollout_weights_BT` (importance weights), `loss_mask_BT` (0 on
                tokens that do not learn) and `is_positive_B` (True for samples that succeeded).
            kl_coefficient: weight of the KL term.
            counts: sizes of the global mini-batch.
            entropy_coefficient: weight of the entropy bonus.
            positive_counts: sizes of the global mini-batch, over the samples that succeeded.
        """
        mask_BT, log_probs_BT = inputs["response_mask_BT"], inputs["log_probs_BT"]
        loss_BT, metrics = call_with(self.policy_loss_function, inputs, self.policy_loss_options)
        for factor_BT in self._factors(inputs):
            loss_BT = loss_BT * factor_BT
        if inputs.get("ref_log_probs_BT") is not None:
            kl_BT = self.kl_to_reference(log_probs_BT, inputs["ref_log_probs_BT"], mask_BT)
            metrics["kl"] = sequence_means(kl_BT.detach(), mask_BT)
            if self.kl.placement == "loss":
                loss_BT = loss_BT + kl_coefficient * kl_BT
        if self.entropy.active:
            loss_BT = loss_BT - entropy_coefficient * inputs["entropy_BT"]
        loss = aggregate(loss_BT, mask_BT, self.aggregation, counts, scale_factor=self.scale_factor)
        if self.modifiers.positive_nll and positive_counts is not None:
            positive_B = inputs["is_positive_B"]
            nll_BT = positive_nll(log_probs_BT=log_probs_BT, is_positive_B=positive_B, response_mask_BT=mask_BT)
            positive_mask_BT = mask_BT * positive_B[:, None]
            loss = loss + self.modifiers.positive_nll * aggregate(
                nll_BT, positive_mask_BT, "token-mean", positive_counts
            )
        return loss, metrics

    def _factors(self, inputs: Mapping[str, Any]) -> list[Tensor]:
        """Return the factors of each token's loss; the counts of the aggregation do not change with the factors.

        A policy loss with the argument `rollout_weights_BT` weighs the tokens itself, and a policy loss with the
        argument `loss_mask_BT` leaves out the tokens itself.
        """
        mask_BT = inputs["response_mask_BT"]
        own = inspect.signature(self.policy_loss_function).parameters
        names = [name for name in ("rollout_weights_BT", "loss_mask_BT") if name not in own]
        factors = [inputs[name] for name in names if inputs.get(name) is not None]
        if self.modifiers.off_policy_mask is not None:
            kept_B = off_policy_sequence_mask(
                log_probs_BT=inputs["log_probs_BT"],
                old_log_probs_BT=inputs["rollout_log_probs_BT"],
                advantages_BT=inputs["advantages_BT"],
                response_mask_BT=mask_BT,
                threshold=self.modifiers.off_policy_mask,
            )
            factors.append(kept_B[:, None])
        return factors


def _check_kinds(algorithm: Algorithm) -> None:
    """Raise a ConfigError for an option that is neither a record of its class nor another allowed kind of value."""
    kinds: dict[str, tuple[type, ...]] = {
        "advantage_options": (Mapping,),
        "policy_loss_options": (Mapping,),
        "selection_options": (Mapping,),
        "kl": (KLConfig,),
        "entropy": (EntropyConfig,),
        "modifiers": (LossModifiers,),
        "correction": (str, RolloutCorrection, NoneType),
        "shaping": (RewardShaping,),
        "group_filter": (GroupFilter, NoneType),
        "constraint": (CostConstraint, NoneType),
        "resampling": (Resampling, NoneType),
    }
    for option, allowed in kinds.items():
        value = getattr(algorithm, option)
        if not isinstance(value, allowed):
            words = " or ".join("null" if kind is NoneType else kind.__name__ for kind in allowed)
            raise ConfigError(f"{option}={shown(value)}: must be of the kind {words}")
    if not fits(algorithm.reward_components, list[str]):
        raise ConfigError(f"reward_components={shown(algorithm.reward_components)}: must be a list of names")


def _check_resampling(algorithm: Algorithm) -> None:
    """Raise a ConfigError if a part of the algorithm needs whole groups, or each sample once."""
    if algorithm.group_filter is not None:
        raise ConfigError("resampling splits the groups that group_filter keeps: use only one of the two")
    compared = None
    if algorithm.shaping.length_factor:
        compared = "shaping.length_factor"
    elif is_among(algorithm.advantage_function, WITH_GROUPS):
        compared = f"advantage={algorithm.advantage}"
    elif bound_options(algorithm.advantage_function, algorithm.advantage_options).get("reward_weight"):
        compared = "advantage_options.reward_weight"
    if compared is not None:
        raise ConfigError(
            f"resampling splits groups, and {compared} compares the samples of a group: use gae, reinforce_plus_plus "
            "or another advantage without groups, and shaping.length_factor=0"
        )
    if isinstance(algorithm.policy_loss, str) and algorithm.policy_loss in SELECTIONS:
        raise ConfigError(
            f"resampling repeats samples, and policy_loss={algorithm.policy_loss} selects tokens of different samples: "
            "use a policy loss without a selection, such as ppo_clip"
        )


def _check_selection(algorithm: Algorithm) -> None:
    """Raise a ConfigError if the policy loss has no selection, or the selection does not take an option."""
    if not isinstance(algorithm.policy_loss, str) or algorithm.policy_loss not in SELECTIONS:
        raise ConfigError(
            f"selection_options={shown(algorithm.selection_options)}: policy_loss={algorithm.policy_loss} selects no "
            f"tokens: use {' or '.join(SELECTIONS)}, or leave the options out"
        )
    known = [
        name
        for name, parameter in inspect.signature(SELECTIONS[algorithm.policy_loss]).parameters.items()
        if parameter.default is not parameter.empty and parameter.default is not one_rank
    ]
    for name in algorithm.selection_options:
        if name not in known:
            raise ConfigError(f"selection_options.{name} is unknown: the options are {', '.join(known)}")


def _check_inputs(option: str, inputs: list[str], known: frozenset[str]) -> None:
    """Raise a ConfigError if the function needs an input that neither the stage nor an option gives."""
    for name in inputs:
        if name not in known:
            raise ConfigError(
                f"{option} needs {name}: set {option}_options.{name}; the stage itself gives {', '.join(sorted(known))}"
            )
