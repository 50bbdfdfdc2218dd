"""Corrects for the gap between the policy that sampled (rollout) and the policy that is trained.

The rollout engine computes other log-probs than the trainer for the same weights, and may hold older weights. With
`d = log p_training - log p_rollout` of each sampled token, two remedies, alone or together: importance weights `e^d`
that multiply the policy loss, and rejection, which takes tokens or whole sequences out of the response mask.
Where log p_training is that of the old policy (computed once per batch), the correction is decoupled from the policy
loss; with `bypass` the rollout's log-probs stand in for the old ones and d is taken with the current policy.

Statistics are computed in float64, and nothing here has a gradient.

Source: decoupled objective https://arxiv.org/abs/2110.00641; truncated weights
https://doi.org/10.1198/106186008X320456; weights zeroed outside a band (IcePop) https://arxiv.org/abs/2510.18855.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from rl_plugins.algorithms.advantages import one_rank
from rl_plugins.algorithms.policy_losses import MAX_LOG_RATIO

Level = Literal["token", "sequence"]

RejectionMode = Literal[
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
]

MIN_MEAN_WEIGHT = 1e-8
"""Weights are divided by their mean only where it is above this: if all were zeroed, they stay 0."""


@dataclass(frozen=True)
class Rejection:
    """A statistic of d, and the range in which a token or sequence is kept.

    Attributes:
        mode: `token_*` judges each token; `seq_sum_*`, `seq_mean_*` and `seq_max_*` judge a sequence by the sum, the
            mean or the maximum over its valid tokens. `*_k1` is -d, `*_k2` is d^2 / 2, `*_k3` is e^d - 1 - d, with d
            of each token bounded to [-20, 20].
        threshold: for k2 and k3 the largest statistic that is kept, at least 0. For k1 a pair (low, high) that
            bounds e^statistic, which is the ratio p_rollout / p_training (not its inverse: that matters to bounds
            that are not each other's inverse); one number h, at least 1, means (1 / h, h).
    """

    mode: RejectionMode
    threshold: float | tuple[float, float]

    def __post_init__(self) -> None:
        """Check the mode and its threshold.

        Raises:
            ValueError: an unknown mode, or a threshold that does not suit it.
        """
        if self.mode not in get_args(RejectionMode):
            raise ValueError(f"mode={self.mode!r} is unknown: use one of {', '.join(get_args(RejectionMode))}")
        if self.estimator == "k1":
            low, high = self._ratios()
            if not 0 < low <= high:
                raise ValueError(
                    f"threshold={self.threshold!r} of {self.mode}: use (low, high) with 0 < low <= high, "
                    "or one number of at least 1"
                )
        elif not isinstance(self.threshold, int | float) or not self.threshold >= 0:
            raise ValueError(f"threshold={self.threshold!r} of {self.mode}: use one number of at least 0")

    @property
    def reach(self) -> str:
        """What is judged: `token`, `seq_sum`, `seq_mean` or `seq_max`."""
        return self.mode.rpartition("_")[0]

    @property
    def estimator(self) -> str:
        """The statistic of a token: `k1`, `k2` or `k3`."""
        return self.mode.rpartition("_")[2]

    def bounds(self) -> tuple[float, float]:
        """Smallest and largest statistic that is kept."""
        if self.estimator == "k1":
            low, high = self._ratios()
            return math.log(low), math.log(high)
        assert isinstance(self.threshold, int | float)
        return -math.inf, self.threshold

    def _ratios(self) -> tuple[float, float]:
        if isinstance(self.threshold, int | float):
            return (1 / self.threshold if self.threshold else 0.0), self.threshold
        low, high = self.threshold
        return low, high


@torch.no_grad()
def importance_weights(
    *,
    log_probs_BT: Tensor,
    rollout_log_probs_BT: Tensor,
    response_mask_BT: Tensor,
    level: Level = "token",
    cap: float | None = None,
    band: tuple[float, float] | None = None,
    normalize: bool = False,
    sum_over_ranks: Callable[[Tensor], Tensor] = one_rank,
) -> Tensor:
    """Importance weights of the sampled tokens, to be multiplied with their policy loss.

    `w = e^d` of each token, or `w = e^(sum of d)` of the sequence on each of its valid tokens, with the exponent
    bounded to [-20, 20]; then `min(w, cap)`, or 0 where w is outside `band`; then divided by their mean.

    Args:
        log_probs_BT: of the policy that is trained; no gradient flows into the weights.
        rollout_log_probs_BT: of the policy that sampled.
        response_mask_BT: 1 on sampled tokens, before any rejection; others may hold anything.
        level: a weight per `token` or per `sequence`.
        cap: largest weight (truncated importance sampling); None for no cap.
        band: smallest and largest weight that is kept, others become 0 (IcePop); None for no band.
        normalize: divide by the mean weight of the batch of all ranks, over tokens or over sequences that have any.
            This, and only this, is collective.
        sum_over_ranks: element-wise sum of a tensor over ranks.

    Returns:
        Weights, 0 where masked, [B, T].

    Raises:
        ValueError: an option out of its range, both `cap` and `band`, or log-probs of valid tokens that are NaN or
            infinite.
    """
    _check_weight_options(level, cap, band)
    valid_BT = response_mask_BT.bool()
    log_ratio_BT = _log_ratio(log_probs_BT, rollout_log_probs_BT, valid_BT)
    if level == "sequence":
        log_ratio_BT = log_ratio_BT.sum(dim=-1, keepdim=True).expand_as(log_ratio_BT)
    weights_BT = torch.where(valid_BT, log_ratio_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), 0)
    if cap is not None:
        weights_BT = weights_BT.clamp(max=cap)
    if band is not None:
        weights_BT = torch.where((weights_BT >= band[0]) & (weights_BT <= band[1]), weights_BT, 0)
    if normalize:
        # The share of a token in the mean: whole, or such that a sequence counts once, however long it is.
        share_BT = valid_BT.double()
        if level == "sequence":
            share_BT = share_BT / valid_BT.sum(dim=-1, keepdim=True).clamp(min=1)
        total, count = sum_over_ranks(torch.stack([(share_BT * weights_BT).sum(), share_BT.sum()]))
        mean = total / count.clamp(min=1)
        weights_BT = weights_BT / torch.where(mean > MIN_MEAN_WEIGHT, mean, 1)
    return weights_BT.to(torch.promote_types(log_probs_BT.dtype, torch.float32))


@torch.no_grad()
def rejection_mask(
    *,
    log_probs_BT: Tensor,
    rollout_log_probs_BT: Tensor,
    response_mask_BT: Tensor,
    rules: Sequence[Rejection],
) -> Tensor:
    """The response mask without the tokens that a rule rejects.

    Every rule sees the whole response mask, so their order does not matter; a token stays if all of them keep it.
    A rule looks at the token's own row only.

    Args:
        log_probs_BT: of the policy that is trained.
        rollout_log_probs_BT: of the policy that sampled.
        response_mask_BT: 1 on sampled tokens; others may hold anything.
        rules: what to reject; none of them keeps everything.

    Returns:
        The mask of the kept tokens, in the type of `response_mask_BT`, [B, T].

    Raises:
        ValueError: log-probs of valid tokens are NaN or infinite.
    """
    valid_BT = response_mask_BT.bool()
    log_ratio_BT = _log_ratio(log_probs_BT, rollout_log_probs_BT, valid_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    lengths_B1 = valid_BT.sum(dim=-1, keepdim=True).clamp(min=1)
    kept_BT = valid_BT
    for rule in rules:
        kept_BT = kept_BT & _kept_by(rule, log_ratio_BT, lengths_B1)
    return torch.where(kept_BT, response_mask_BT, 0)


@torch.no_grad()
def diagnostics(
    *,
    log_probs_BT: Tensor,
    rollout_log_probs_BT: Tensor,
    response_mask_BT: Tensor,
    weights_BT: Tensor | None = None,
    sum_over_ranks: Callable[[Tensor], Tensor] = one_rank,
    max_over_ranks: Callable[[Tensor], Tensor] = one_rank,
) -> dict[str, float]:
    """How far the two policies are apart, over the batch of all ranks. Collective.

    With <x> the mean over valid tokens, [x] the mean over sequences that have any, and D the mean of -d over the
    valid tokens of a sequence (its log-perplexity under the training policy less that under the rollout policy):

    | name | value |
    |---|---|
    | training_ppl, rollout_ppl | [e^(-mean of the log-probs)] |
    | kl | <-d>, an estimate of KL(rollout, training) |
    | k3 | <e^d - 1 - d>, the same, never negative |
    | log_ppl_difference | [D] |
    | log_ppl_abs_difference | [abs D] |
    | log_ppl_difference_max, log_ppl_difference_min | extremes of D |
    | ppl_ratio | [e^D] |
    | chi2_token | <e^(2 d)> - 1 |
    | chi2_sequence | [e^(2 sum of d)] - 1 |
    | ess | 1 / <(w / <w>)^2>, effective share of the samples under the weights; only with `weights_BT` |

    Where d is an exponent, it (or its sum) is bounded to [-20, 20]. Without a valid token every value is 0.

    Args:
        log_probs_BT: of the policy that is trained.
        rollout_log_probs_BT: of the policy that sampled.
        response_mask_BT: 1 on sampled tokens, before any rejection; others may hold anything.
        weights_BT: importance weights.
        sum_over_ranks: element-wise sum of a tensor over ranks.
        max_over_ranks: element-wise maximum of a tensor over ranks.

    Raises:
        ValueError: log-probs of valid tokens are NaN or infinite.
    """
    valid_BT = response_mask_BT.bool()
    lengths_B = valid_BT.sum(dim=-1)
    filled_B = lengths_B > 0
    log_ratio_BT = _log_ratio(log_probs_BT, rollout_log_probs_BT, valid_BT)
    bounded_BT = log_ratio_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def mean_B(values_BT: Tensor) -> Tensor:
        return torch.where(valid_BT, values_BT, 0).double().sum(dim=-1) / lengths_B.clamp(min=1)

    difference_B = -mean_B(log_ratio_BT)
    of_tokens = {
        "kl": -log_ratio_BT,
        "k3": torch.expm1(bounded_BT) - bounded_BT,
        "chi2_token": torch.expm1(2 * bounded_BT),
    }
    of_sequences = {
        "training_ppl": torch.exp(-mean_B(log_probs_BT)),
        "rollout_ppl": torch.exp(-mean_B(rollout_log_probs_BT)),
        "log_ppl_difference": difference_B,
        "log_ppl_abs_difference": difference_B.abs(),
        "ppl_ratio": difference_B.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(),
        "chi2_sequence": torch.expm1(2 * log_ratio_BT.sum(dim=-1).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)),
    }
    weights_N = weights_BT[valid_BT].double() if weights_BT is not None else log_ratio_BT.new_zeros(0)
    sums = [valid_BT.sum().double(), filled_B.sum().double(), weights_N.sum(), weights_N.square().sum()]
    sums += [values_BT[valid_BT].sum() for values_BT in of_tokens.values()]
    sums += [values_B[filled_B].sum() for values_B in of_sequences.values()]
    tokens, sequences, weight, squares, *totals = sum_over_ranks(torch.stack(sums)).tolist()
    nothing = difference_B.new_full((1,), -math.inf)
    extremes = [torch.cat([values_B[filled_B], nothing]).max() for values_B in (difference_B, -difference_B)]
    largest, smallest_negated = max_over_ranks(torch.stack(extremes)).tolist()

    counts = [tokens] * len(of_tokens) + [sequences] * len(of_sequences)
    values = {
        name: total / max(count, 1)
        for name, total, count in zip([*of_tokens, *of_sequences], totals, counts, strict=True)
    }
    values["log_ppl_difference_max"] = largest if sequences else 0.0
    values["log_ppl_difference_min"] = -smallest_negated if sequences else 0.0
    if weights_BT is not None:
        values["ess"] = weight**2 / (tokens * squares) if squares else 0.0
    return values


def _check_weight_options(level: str, cap: float | None, band: tuple[float, float] | None) -> None:
    if level not in get_args(Level):
        raise ValueError(f"level={level!r}: use 'token' or 'sequence'")
    if cap is not None and band is not None:
        raise ValueError(f"cap={cap} and band={band}: a weight is either truncated or zeroed, use one of them")
    if cap is not None and not cap > 0:
        raise ValueError(f"cap={cap}: must be above 0, or None for no cap")
    if band is not None and not 0 <= band[0] <= band[1]:
        raise ValueError(f"band={band}: use (low, high) with 0 <= low <= high, or None for no band")


def _log_ratio(log_probs_BT: Tensor, rollout_log_probs_BT: Tensor, valid_BT: Tensor) -> Tensor:
    """`d` in float64, 0 where masked; refuses what is not finite."""
    training_bad = int((valid_BT & ~log_probs_BT.isfinite()).sum())
    rollout_bad = int((valid_BT & ~rollout_log_probs_BT.isfinite()).sum())
    if training_bad or rollout_bad:
        raise ValueError(
            f"log-probs of sampled tokens are NaN or infinite: {training_bad} of the training policy and "
            f"{rollout_bad} of the rollout policy, of {int(valid_BT.sum())} tokens. A policy cannot have sampled a "
            "token of probability 0: compute both over the same vocabulary, temperature and top-k / top-p, or take "
            "these tokens out of the response mask"
        )
    return torch.where(valid_BT, log_probs_BT.double() - rollout_log_probs_BT.double(), 0)


def _kept_by(rule: Rejection, log_ratio_BT: Tensor, lengths_B1: Tensor) -> Tensor:
    """True where the rule keeps the token, [B, T] or [B, 1]; masked positions have d = 0."""
    if rule.estimator == "k1":
        statistic = -log_ratio_BT
    elif rule.estimator == "k2":
        statistic = log_ratio_BT.square() / 2
    else:
        statistic = torch.expm1(log_ratio_BT) - log_ratio_BT
    if rule.reach in ("seq_sum", "seq_mean"):
        statistic = statistic.sum(dim=-1, keepdim=True)
    if rule.reach == "seq_mean":
        statistic = statistic / lengths_B1
    low, high = rule.bounds()
    kept = (statistic >= low) & (statistic <= high)
    # The maximum is in range if every token is: k2 and k3 have no lower bound, and are 0 where masked.
    return kept.all(dim=-1, keepdim=True) if rule.reach == "seq_max" else kept


@dataclass(frozen=True)
class RolloutCorrection:
    """Which weights and which rejection; nothing by default.

    Attributes:
        level: importance weights per `token` or per `sequence`; None for no weights.
        cap: largest weight; None for no cap.
        band: smallest and largest weight that is kept, others become 0; None for no band.
        normalize: divide the weights by their mean over the batch of all ranks.
        rules: what to reject.
        bypass: take the rollout's log-probs as the old ones and correct against the current policy in every
            micro-batch. A policy loss with a ratio then holds the importance weight already, and needs rejection at
            most, so that weights are refused there; they are for one without, such as REINFORCE's.
    """

    level: Level | None = None
    cap: float | None = None
    band: tuple[float, float] | None = None
    normalize: bool = False
    rules: tuple[Rejection, ...] = ()
    bypass: bool = False

    def __post_init__(self) -> None:
        """Check the options and that they go together.

        Raises:
            ValueError: an option out of its range, or one that has nothing to act on.
        """
        if self.level is not None:
            _check_weight_options(self.level, self.cap, self.band)
        elif self.cap is not None or self.band is not None or self.normalize:
            raise ValueError("cap, band and normalize act on weights: set level to 'token' or 'sequence' as well")
        if self.normalize and self.bypass:
            raise ValueError(
                "normalize=True with bypass=True would divide by the mean of a micro-batch, and the gradient would "
                "depend on how a batch is split: switch one of them off"
            )

    @property
    def decoupled(self) -> bool:
        """Whether weights or rejection are computed once per batch, from the old log-probs."""
        return not self.bypass and (self.level is not None or bool(self.rules))

    def correct(
        self,
        *,
        log_probs_BT: Tensor,
        rollout_log_probs_BT: Tensor,
        response_mask_BT: Tensor,
        sum_over_ranks: Callable[[Tensor], Tensor] = one_rank,
    ) -> tuple[Tensor, Tensor | None]:
        """The mask of the kept tokens and the importance weights (None without a level), each [B, T].

        The mean that `normalize` divides by is taken before rejection. Collective if `normalize` is set.
        """
        policies = {"log_probs_BT": log_probs_BT, "rollout_log_probs_BT": rollout_log_probs_BT}
        mask_BT = rejection_mask(**policies, response_mask_BT=response_mask_BT, rules=self.rules)
        if self.level is None:
            return mask_BT, None
        weights_BT = importance_weights(
            **policies,
            response_mask_BT=response_mask_BT,
            level=self.level,
            cap=self.cap,
            band=self.band,
            normalize=self.normalize,
            sum_over_ranks=sum_over_ranks,
        )
        return mask_BT, torch.where(mask_BT.bool(), weights_BT, 0)


def _presets() -> dict[str, RolloutCorrection]:
    token_tis = RolloutCorrection(level="token", cap=2.0)
    sequence_tis = RolloutCorrection(level="sequence", cap=2.0)
    presets = {
        "token_tis": token_tis,
        "sequence_tis": sequence_tis,
        "icepop": RolloutCorrection(level="token", band=(0.5, 5.0)),
        "mis": replace(sequence_tis, rules=(Rejection("seq_sum_k1", (0.5, 2.0)),)),
    }
    for name, rule in {
        "geo_rs": Rejection("seq_mean_k1", (0.999, 1.001)),
        "k3_rs": Rejection("seq_mean_k3", 0.01),
    }.items():
        presets[name] = RolloutCorrection(rules=(rule,))
        presets[f"{name}_token_tis"] = replace(token_tis, rules=(rule,))
        presets[f"{name}_sequence_tis"] = replace(sequence_tis, rules=(rule,))
    bypassing = {f"bypass_{name}": replace(preset, bypass=True) for name, preset in presets.items()}
    return {"none": RolloutCorrection(), **presets, "bypass": RolloutCorrection(bypass=True), **bypassing}


ROLLOUT_CORRECTIONS: dict[str, RolloutCorrection] = _presets()
"""`none`; truncated weights; IcePop; rejection of sequences by the product (`mis`) or the geometric mean (`geo_rs`) of
their ratios or by their mean k3 (`k3_rs`), with and without truncated weights; and the bypass form of each."""
