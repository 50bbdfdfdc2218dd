"""Every policy loss with every aggregation and rollout correction: splitting a batch does not change its gradient.

The gradient with respect to the log-probs of a mini-batch is the same in 1, 2 and 4 micro-batches, on 1 and 2 ranks,
and with more or less padding of any content, though each part is computed without the other parts. The gradient of a
model is the same with its samples in one row and in a padded batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_plugins.algorithms.aggregation import AGGREGATIONS, GlobalCounts
from rl_plugins.algorithms.algorithm import Algorithm, LossModifiers
from rl_plugins.algorithms.inputs import required_inputs
from rl_plugins.algorithms.policy_losses import POLICY_LOSSES, WITH_RATIO
from rl_plugins.algorithms.policy_losses.modifiers import top_entropy_mask
from rl_plugins.algorithms.regularization import EntropyConfig, KLConfig
from rl_plugins.algorithms.rollout_correction import ROLLOUT_CORRECTIONS, RolloutCorrection
from rl_plugins.data.experience import Experience
from rl_plugins.models.log_probs import ResponseLogProbs, response_log_probs
from rl_plugins.models.packed_attention import use_packed_attention
from rl_plugins.tests.models.samples import batch_of, forward_arguments, random_samples, tiny

LENGTHS = [6, 3, 0, 5, 1, 6, 4, 2]
SAMPLES, TOKENS = len(LENGTHS), max(LENGTHS)
# Losses that are functions of the log-probs of sampled tokens.
LOSSES = [name for name, function in POLICY_LOSSES.items() if "top_log_probs_BTK" not in required_inputs(function, {})]
LOSS_OPTIONS: dict[str, dict[str, Any]] = {"dro": {"beta": 0.3}, "clip_cov": {"clip_low": 0.2}}
# Shares large enough to choose some of so few tokens.
SELECTION_OPTIONS = {"clip_cov": {"share": 0.2, "low": 0.0, "high": 5.0}, "kl_cov": {"share": 0.2}}
OWN_COLUMNS = ("log_probs_BT", "old_log_probs_BT", "rollout_log_probs_BT", "ref_log_probs_BT", "advantages_BT",
               "response_mask_BT", "entropy_BT", "rollout_weights_BT", "loss_mask_BT", "selected_BT")  # fmt: skip


def mini_batch(seed: int = 0) -> dict[str, Tensor]:
    """Samples of different lengths, one empty, with observations in the middle."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(SAMPLES, TOKENS, generator=generator, dtype=torch.float64)

    mask_BT = (torch.arange(TOKENS) < torch.tensor(LENGTHS)[:, None]).double()
    mask_BT[0, 2] = mask_BT[5, 1:3] = 0
    old_BT = -normal(1.0).abs() - 0.1
    # Half of the samples pass even the narrowest rejection.
    near_B1 = torch.tensor([1e-4, 1.0] * (SAMPLES // 2), dtype=torch.float64)[:, None]
    return {
        "log_probs_BT": old_BT + near_B1 * normal(0.3),
        "old_log_probs_BT": old_BT,
        "rollout_log_probs_BT": old_BT + near_B1 * normal(0.3),
        "ref_log_probs_BT": old_BT + normal(0.3),
        "advantages_BT": normal(1.0)[:, :1].expand(SAMPLES, TOKENS).clone(),
        "entropy_BT": normal(1.0).abs(),
        "response_mask_BT": mask_BT,
        "is_positive_B": torch.tensor([True, False, True, False, True, True, False, False]),
    }


def prepared(algorithm: Algorithm, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the batch with the stage's inputs for the whole mini-batch, computed once."""
    correction, batch = algorithm.rollout_correction, dict(batch)
    if correction.bypass:
        batch["old_log_probs_BT"] = batch["rollout_log_probs_BT"]
    elif correction != RolloutCorrection():
        kept_BT, weights_BT = correction.correct(
            log_probs_BT=batch["old_log_probs_BT"],
            rollout_log_probs_BT=batch["rollout_log_probs_BT"],
            response_mask_BT=batch["response_mask_BT"],
        )
        batch["response_mask_BT"] = kept_BT
        if weights_BT is not None:
            batch["rollout_weights_BT"] = weights_BT
    if algorithm.modifiers.top_entropy is not None:
        batch["loss_mask_BT"] = top_entropy_mask(
            entropy_BT=batch["entropy_BT"],
            response_mask_BT=batch["response_mask_BT"],
            share=algorithm.modifiers.top_entropy,
        )
    inputs = {**batch, "log_probs_BT": batch["old_log_probs_BT"], "ids_B": torch.arange(SAMPLES)}
    selected_BT = algorithm.select(
        inputs, seed=1, sum_over_ranks=lambda values: values, gather_over_ranks=lambda values: values
    )
    return batch if selected_BT is None else {**batch, "selected_BT": selected_BT}


def gradient(algorithm: Algorithm, batch: dict[str, Tensor], ranks: Sequence[Sequence[Tensor]], padding: int) -> Tensor:
    """d loss / d log-probs, [B, T], from the micro-batches (indices of samples) of each rank."""
    counts, positive = (
        GlobalCounts(float(mask_BT.sum()), float(mask_BT.any(dim=-1).sum()), len(ranks))
        for mask_BT in (
            batch["response_mask_BT"],
            batch["response_mask_BT"] * batch["is_positive_B"][:, None],
        )
    )
    total_BT = torch.zeros(SAMPLES, TOKENS, dtype=torch.float64)
    for micro_batches in ranks:
        for indices in micro_batches:
            micro = {name: value[indices] for name, value in batch.items()}
            for name in OWN_COLUMNS & micro.keys():
                filler = 0 if name == "response_mask_BT" else torch.nan if micro[name].is_floating_point() else 1
                extra = torch.full((len(indices), padding), filler, dtype=micro[name].dtype)
                micro[name] = torch.cat([micro[name], extra], dim=1)
            for name in ("rollout_weights_BT", "loss_mask_BT"):
                if name in micro:
                    # The stage sets padding of the two tensors to 0.
                    micro[name] = micro[name].nan_to_num()
            leaf_BT = micro["log_probs_BT"].detach().requires_grad_()
            loss, _ = algorithm.loss(
                algorithm.corrected({**micro, "log_probs_BT": leaf_BT}),
                kl_coefficient=0.1,
                entropy_coefficient=0.01,
                counts=counts,
                positive_counts=positive,
            )
            (grad_BT,) = torch.autograd.grad(loss, leaf_BT)
            assert (grad_BT[:, TOKENS:] == 0).all()
            # Engines average the gradients of ranks.
            total_BT[indices] += grad_BT[:, :TOKENS] / len(ranks)
    return total_BT


def assert_split_does_not_matter(algorithm: Algorithm) -> None:
    batch = prepared(algorithm, mini_batch())
    everything = torch.arange(SAMPLES)
    whole = gradient(algorithm, batch, [[everything]], padding=0)
    assert whole.isfinite().all() and whole.abs().max() > 0
    shuffled = everything[torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(3))]
    in_turn = [everything[0::2], everything[1::2]]
    for ranks, padding in (
        ([everything.chunk(2)], 0),
        ([shuffled.chunk(4)], 3),
        ([[part] for part in in_turn], 1),
        ([in_turn[0].chunk(1), in_turn[1].chunk(4)], 2),
    ):
        torch.testing.assert_close(gradient(algorithm, batch, ranks, padding), whole, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("policy_loss", LOSSES)
def test_policy_losses_do_not_depend_on_the_split_with_any_rollout_correction(
    policy_loss: str, aggregation: str
) -> None:
    for name, correction in ROLLOUT_CORRECTIONS.items():
        # `Algorithm` refuses the combination.
        if correction.bypass and correction.level is not None and POLICY_LOSSES[policy_loss] in WITH_RATIO:
            continue
        assert_split_does_not_matter(algorithm_of(policy_loss, aggregation, correction=name))


@pytest.mark.parametrize("policy_loss", LOSSES)
def test_policy_losses_do_not_depend_on_the_split_with_any_modifier(policy_loss: str) -> None:
    modifiers = LossModifiers(off_policy_mask=0.1, top_entropy=0.5, positive_nll=0.2)
    for options in (
        {"modifiers": modifiers},
        {"entropy": EntropyConfig(0.01)},
        {"kl": KLConfig(0.1, estimator="k2")},
        {"kl": KLConfig(0.1), "modifiers": modifiers, "correction": "bypass"},
    ):
        assert_split_does_not_matter(algorithm_of(policy_loss, "seq-mean-token-mean", **options))


@pytest.mark.parametrize("policy_loss", LOSSES)
def test_policy_losses_have_the_same_model_gradient_packed_and_padded(policy_loss: str) -> None:
    """The comparison covers every path between samples in a model: attention, positions, the output head."""
    algorithm = algorithm_of(policy_loss, "seq-mean-token-mean", entropy=EntropyConfig(0.01))
    padded, packed = (model_gradient(algorithm, packed=packed) for packed in (False, True))
    assert any(gradient.abs().max() > 0 for gradient in padded)
    for one, other in zip(padded, packed, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-11)


def model_gradient(algorithm: Algorithm, *, packed: bool) -> list[Tensor]:
    """Return the gradient of the parameters from two micro-batches, as the stage computes it."""
    model = tiny("Qwen2", num_hidden_layers=1, initializer_range=0.1, attn_implementation="sdpa")
    use_packed_attention(model)
    prompts = [3, 1, 4, 2, 5, 1, 2, 3]
    samples = batch_of(random_samples(*zip(prompts, LENGTHS, strict=True)))

    def forward(experience: Experience) -> ResponseLogProbs:
        return response_log_probs(model, **forward_arguments(experience), entropy_gradient=True, packed=packed)

    batch = mini_batch()
    with torch.no_grad():
        gap_BT = batch["old_log_probs_BT"] - batch["log_probs_BT"]
        batch["old_log_probs_BT"] = forward(samples).log_probs_BT + gap_BT
    batch = prepared(algorithm, batch)
    mask_BT = batch["response_mask_BT"]
    counts = GlobalCounts(float(mask_BT.sum()), float(mask_BT.any(dim=-1).sum()), 1)
    for indices in (torch.tensor([0, 2, 4, 6]), torch.tensor([7, 1, 5, 3])):
        current = forward(samples[indices])
        micro = {name: value[indices] for name, value in batch.items()}
        loss, _ = algorithm.loss(
            {**micro, "log_probs_BT": current.log_probs_BT, "entropy_BT": current.entropy_BT},
            kl_coefficient=0.0,
            entropy_coefficient=0.01,
            counts=counts,
        )
        loss.backward()
    return [parameter.grad for parameter in model.parameters()]


def algorithm_of(policy_loss: str, aggregation: str, **options: Any) -> Algorithm:
    return Algorithm(
        policy_loss=policy_loss,
        policy_loss_options=LOSS_OPTIONS.get(policy_loss, {}),
        selection_options=SELECTION_OPTIONS.get(policy_loss, {}),
        aggregation=aggregation,
        scale_factor=9.0,
        **options,
    )
