"""Correction for the gap between the policy that sampled (rollout) and the policy that is trained.

The rollout engine computes different log-probabilities than the trainer for the same weights, and may hold older
weights. With `d = log p_training - log p_rollout` of each sampled token, two remedies can be used alone or together:
importance weights `e^d`, which multiply the policy loss, and rejection, which removes tokens or whole sequences from
the response mask. If log p_training is computed once per batch with the old policy, the correction is decoupled from
the policy loss. With `bypass` the rollout's log-probabilities replace the old ones, and d is computed with the current
policy.

Statistics are computed in float64 and have no gradient.

Source: decoupled objective https://arxiv.org/abs/2110.00641; truncated weights
https://doi.org/10.1198/106186008X320456; weights zeroed outside a band (IcePop) https://arxiv.org/abs/2510.18855.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, get_args

import torch
from torch import Tensor

from rl_plugins.algorithms.inputs import Collective, one_rank
from rl_plugins.algorithms.policy_losses import MAX_LOG_RATIO
from rl_plugins.config.settings import ABOVE_0_OR_NULL, Range, Settings, fits

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
"""Smallest mean by which weights are divided: if a band sets all weights to 0, the weights stay 0."""


_THRESHOLD = Range(
    "must be a finite number, or two finite numbers",
    lambda value: (
        fits(value, float)
        or (isinstance(value, list | tuple) and len(value) == 2 and all(fits(bound, float) for bound in value))
    ),
)


@dataclass(frozen=True)
class Rejection(Settings):
    """A statistic of d, and the range in which a token or sequence is kept.

    Attributes:
        mode: statistic. `token_*` judges each token; `seq_sum_*`, `seq_mean_*` and `seq_max_*` judge a sequence by the
            sum, the mean or the maximum over its valid tokens. `*_k1` is -d, `*_k2` is d^2 / 2, `*_k3` is e^d - 1 - d,
            with d of each token bounded to [-20, 20].
        threshold: for k2 and k3 the largest statistic that is kept, at least 0. For k1 a pair (low, high) that bounds
            e^statistic, the ratio p_rollout / p_training (not its inverse: the difference matters for bounds that are
            not inverses of each other); a single number h, at least 1, means (1 / h, h).
    """

    mode: RejectionMode
    threshold: Annotated[float | tuple[float, float], _THRESHOLD]

    def __post_init__(self) -> None:
        """Check the mode and its threshold.

        Raises:
            ValueError: the mode is unknown, or the threshold does not suit the mode.
        """
        super().__post_init__()
        if self.mode not in get_args(RejectionMode):
            raise ValueError(f"mode={self.mode!r} is unknown: use one of {', '.join(get_args(RejectionMode))}")
        if self.estimator == "k1":
            low, high = self._ratios()
            if not 0 < low <= high:
                raise ValueError(
                    f"threshold={self.threshold!r} of {self.mode}: use (low, high) with 0 < low <= high, "
                    "or one number of at least 1"
                )
        elif not isinstance(self.threshold, int | float) or self.threshold < 0:
            raise ValueError(f"threshold={self.threshold!r} of {self.mode}: use one number of at least 0")

    @property
    def reach(self) -> str:
        """Level of the statistic: `token`, `seq_sum`, `seq_mean` or `seq_max`."""
        return self.mode.rpartition("_")[0]

    @property
    def estimator(self) -> str:
        """Statistic of a token: `k1`, `k2` or `k3`."""
        return self.mode.rpartition("_")[2]

    def bounds(self) -> tuple[float, float]:
        """Return the smallest and the largest statistic that is kept."""
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
    sum_over_ranks: Collective = one_rank,
) -> Tensor:
    """Compute importance weights of the sampled tokens, to multiply with their policy loss.

    `w = e^d` of each token, or `w = e^(sum of d)` of the sequence on each of its valid tokens, with the exponent
    bounded to [-20, 20]; then `min(w, cap)`, or 0 where w is outside `band`; then divided by the mean weight.

    Args:
        log_probs_BT: log-probability of each token under the policy that is trained; no gradient flows into the
            weights.
        response_mask_BT: 1 on sampled tokens, before any rejection; at 0, other tensors may hold anything.
        level: a weight per `token` or per `sequence`.
        cap: largest weight (truncated importance sampling); None for no cap.
        band: smallest and largest weight that is kept; weights outside become 0 (IcePop). None for no band.
        normalize: divide by the mean weight of the batch of all ranks, over tokens or over non-empty sequences. The
            function is collective only with this option.

    Returns:
        Weights, 0 where masked, [B, T].

    Raises:
        ValueError: an option is out of its range, both `cap` and `band` are given, or log-probabilities of valid tokens
            are NaN or infinite.
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
        # Share of a token in the mean: 1, or 1 / length so that every sequence counts once.
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
    """Remove the tokens that a rule rejects from the response mask.

    Every rule is applied to the whole response mask, so the order of the rules does not matter; a token stays if all
    rules keep it. A rule depends on the token's own row only.

    Args:
        log_probs_BT: log-probability of each token under the policy that is trained.
        rules: rules of rejection; an empty sequence keeps everything.

    Returns:
        Mask of the kept tokens, in the type of `response_mask_BT`, [B, T].

    Raises:
        ValueError: log-probabilities of valid tokens are NaN or infinite.
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
    sum_over_ranks: Collective = one_rank,
    max_over_ranks: Collective = one_rank,
) -> dict[str, float]:
    """Measure the distance between the two policies, over the batch of all ranks. Collective.

    With <x> the mean over valid tokens, [x] the mean over non-empty sequences, and D the mean of -d over the valid
    tokens of a sequence (its log-perplexity under the training policy minus its log-perplexity under the rollout
    policy):

    | name | value |
    |---|---|
    | training_ppl, rollout_ppl | [e^(-mean of the log-probs)] |
    | kl | <-d>, an estimate of KL(rollout, training) |
    | k3 | <e^d - 1 - d>, another estimate, never negative |
    | log_ppl_difference | [D] |
    | log_ppl_abs_difference | [abs D] |
    | log_ppl_difference_max, log_ppl_difference_min | extremes of D |
    | ppl_ratio | [e^D] |
    | chi2_token | <e^(2 d)> - 1 |
    | chi2_sequence | [e^(2 sum of d)] - 1 |
    | ess | 1 / <(w / <w>)^2>, effective share of the samples under the weights; only with `weights_BT` |

    Where d is an exponent, d (or its sum) is bounded to [-20, 20]. Without a valid token every value is 0.

    Args:
        log_probs_BT: log-probability of each token under the policy that is trained.
        response_mask_BT: 1 on sampled tokens, before any rejection; at 0, other tensors may hold anything.
        weights_BT: importance weights of the tokens.

    Raises:
        ValueError: log-probabilities of valid tokens are NaN or infinite.
    """
    valid_BT = response_mask_BT.bool()
    lengths_B = valid_BT.sum(dim=-1)
    filled_B = lengths_B > 0
    log_ratio_BT = _log_ratio(log_probs_BT, rollout_log_probs_BT, valid_BT)
    bounded_BT = log_ratio_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def mean_B(values_BT: Tensor) -> Tensor:
        return torch.where(valid_BT, values_BT, 0).double().sum(dim=-1) / lengths_B.clamp(min=1)

    difference_B = -mean_B(log_ratio_BT)
    token_values = {
        "kl": -log_ratio_BT,
        "k3": torch.expm1(bounded_BT) - bounded_BT,
        "chi2_token": torch.expm1(2 * bounded_BT),
    }
    sequence_values = {
        "training_ppl": torch.exp(-mean_B(log_probs_BT)),
        "rollout_ppl": torch.exp(-mean_B(rollout_log_probs_BT)),
        "log_ppl_difference": difference_B,
        "log_ppl_abs_difference": difference_B.abs(),
        "ppl_ratio": difference_B.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(),
        "chi2_sequence": torch.expm1(2 * log_ratio_BT.sum(dim=-1).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)),
    }
    weights_N = weights_BT[valid_BT].double() if weights_BT is not None else log_ratio_BT.new_zeros(0)
    sums = [valid_BT.sum().double(), filled_B.sum().double(), weights_N.sum(), weights_N.square().sum()]
    sums += [values_BT[valid_BT].sum() for values_BT in token_values.values()]
    sums += [values_B[filled_B].sum() for values_B in sequence_values.values()]
    tokens, sequences, weight, squares, *totals = sum_over_ranks(torch.stack(sums)).tolist()
    nothing = difference_B.new_full((1,), -math.inf)
    extremes = [torch.cat([values_B[filled_B], nothing]).max() for values_B in (difference_B, -difference_B)]
    largest, smallest_negated = max_over_ranks(torch.stack(extremes)).tolist()

    counts = [tokens] * len(token_values) + [sequences] * len(sequence_values)
    values = {
        name: total / max(count, 1)
        for name, total, count in zip([*token_values, *sequence_values], totals, counts, strict=True)
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
        raise ValueError(f"cap={cap} and band={band}: a weight is either truncated or zeroed, use one of the two")
    if cap is not None and not cap > 0:
        raise ValueError(f"cap={cap}: must be above 0, or None for no cap")
    if band is not None and not (all(fits(bound, float) for bound in band) and 0 <= band[0] <= band[1]):
        raise ValueError(f"band={band}: use two finite numbers (low, high) with 0 <= low <= high, or None for no band")


def _log_ratio(log_probs_BT: Tensor, rollout_log_probs_BT: Tensor, valid_BT: Tensor) -> Tensor:
    """Compute `d` in float64, 0 where masked; raise a ValueError if d of a valid token is not finite."""
    training_count = int((valid_BT & ~log_probs_BT.isfinite()).sum())
    rollout_count = int((valid_BT & ~rollout_log_probs_BT.isfinite()).sum())
    if training_count or rollout_count:
        raise ValueError(
            f"log-probs of sampled tokens are NaN or infinite: {training_count} of the training policy and "
            f"{rollout_count} of the rollout policy, of {int(valid_BT.sum())} tokens. A policy cannot have sampled a "
            "token of probability 0: compute both log-probs with the same vocabulary, temperature and top-k / top-p, "
            "or set response_mask_BT to 0 on such tokens"
        )
    return torch.where(valid_BT, log_probs_BT.double() - rollout_log_probs_BT.double(), 0)


def _kept_by(rule: Rejection, log_ratio_BT: Tensor, lengths_B1: Tensor) -> Tensor:
    """Return True where the rule keeps the token, [B, T] or [B, 1]; d must be 0 at masked positions."""
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
    # The maximum is in range if every token is in range: k2 and k3 have no lower bound and are 0 where masked.
    return kept.all(dim=-1, keepdim=True) if rule.reach == "seq_max" else kept


@dataclass(frozen=True)
class RolloutCorrection(Settings):
    """Importance weights and rejection for the gap between rollout and training; none by default.

    Attributes:
        level: importance weights per `token` or per `sequence`; None for no weights.
        cap: largest weight; None for no cap.
        band: smallest and largest weight that is kept; weights outside become 0. None for no band.
        normalize: divide the weights by their mean over the batch of all ranks.
        rules: rules of rejection.
        bypass: use the rollout's log-probabilities as the old ones, and correct against the current policy in every
            micro-batch. The ratio of a policy loss is then the importance weight already, so such a loss accepts
            rejection but no weights; weights are for losses without a ratio, such as REINFORCE.
    """

    level: Level | None = None
    cap: Annotated[float | None, ABOVE_0_OR_NULL] = None
    band: tuple[float, float] | None = None
    normalize: bool = False
    rules: tuple[Rejection, ...] = ()
    bypass: bool = False

    def __post_init__(self) -> None:
        """Check the options and their combination.

        Raises:
            ConfigError: a number is out of its range.
            ValueError: an option has no effect.
        """
        super().__post_init__()
        if self.level is not None:
            _check_weight_options(self.level, self.cap, self.band)
        elif self.cap is not None or self.band is not None or self.normalize:
            raise ValueError("cap, band and normalize act on weights: set level to 'token' or 'sequence' as well")
        if self.normalize and self.bypass:
            raise ValueError(
                "normalize=True with bypass=True would divide by the mean of a micro-batch, and the gradient would "
                "depend on the split of the batch: set one of the two options to False"
            )

    @property
    def decoupled(self) -> bool:
        """True if weights or rejection are computed once per batch, from the old log-probabilities."""
        return not self.bypass and (self.level is not None or bool(self.rules))

    def correct(
        self,
        *,
        log_probs_BT: Tensor,
        rollout_log_probs_BT: Tensor,
        response_mask_BT: Tensor,
        sum_over_ranks: Collective = one_rank,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the mask of the kept tokens and the importance weights (None without a level), each [B, T].

        The mean for `normalize` is computed before rejection. Collective if `normalize` is set.
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
"""Corrections by name: `none`; truncated weights (`tis`); IcePop; rejection of sequences by the product (`mis`) or the
geometric mean (`geo_rs`) of their ratios or by their mean k3 (`k3_rs`), with and without truncated weights; and the
bypass form of each."""
