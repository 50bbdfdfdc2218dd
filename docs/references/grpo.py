"""GRPO in one file: the whole algorithm at once, on a task small enough for a CPU (`python docs/references/grpo.py`).

A step samples a group of responses to each prompt, scores them, compares every score with those of its group, and
takes a few optimizer steps on a clipped loss. There is no critic: the group is the baseline.

Axes: `G` groups (prompts), `N` samples of a group, `B` = G N samples, `S` prompt (padded on the left) and response (on
the right), `T` response tokens, `V` vocabulary.

Source: DeepSeekMath https://arxiv.org/abs/2402.03300 section 4.1; clip-higher and the mean over all tokens DAPO
https://arxiv.org/abs/2503.14476 eq. 10 and 12; dual clip https://arxiv.org/abs/1912.09729 eq. 5.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer
from transformers import Qwen2Config, Qwen2ForCausalLM


@dataclass(frozen=True)
class Settings:
    """Everything that can be turned.

    Attributes:
        prompts_per_step: prompts that are sampled from in one step.
        samples_per_prompt: size of a group.
        max_tokens: longest response.
        temperature: of sampling, and of every log-prob.
        passes_per_step: passes over the samples of a step.
        updates_per_step: optimizer steps per pass; the prompts are dealt over them.
        micro_batch_size: samples of one forward and backward pass; no result depends on it.
        clip_low: how far the ratio may fall below 1.
        clip_high: how far it may rise above 1 (DAPO takes more here than below).
        dual_clip: bound on the loss of bad tokens, in units of their advantage.
        kl_coefficient: weight of the distance to the reference.
        lr: learning rate of AdamW.
        gradient_clip: bound on the norm of the gradient.
    """

    prompts_per_step: int = 32
    samples_per_prompt: int = 8
    max_tokens: int = 3
    temperature: float = 1.0
    passes_per_step: int = 1
    updates_per_step: int = 2
    micro_batch_size: int = 128
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 3.0
    kl_coefficient: float = 0.001
    lr: float = 2e-3
    gradient_clip: float = 1.0


@dataclass(frozen=True)
class Samples:
    """Prompts with their responses; the samples of a prompt follow each other.

    Attributes:
        tokens_BS: prompts and responses.
        attention_mask_BS: 1 on real tokens.
        response_mask_BT: 1 on the response tokens to learn from; 0 on padding and where there is no score.
        scores_B: NaN where the response could not be scored.
    """

    tokens_BS: Tensor
    attention_mask_BS: Tensor
    response_mask_BT: Tensor
    scores_B: Tensor

    def __getitem__(self, rows: Tensor) -> Self:
        """Some of the samples."""
        return type(self)(**{name: tensor[rows] for name, tensor in vars(self).items()})


@dataclass(frozen=True)
class Experience(Samples):
    """Samples with what the update needs.

    Attributes:
        advantages_B: one for all tokens of a sample.
        old_log_probs_BT: under the policy before the update.
        ref_log_probs_BT: under the reference.
    """

    advantages_B: Tensor
    old_log_probs_BT: Tensor
    ref_log_probs_BT: Tensor


# The algorithm -------------------------------------------------------------------------------------------------------


def inputs(tokens_BS: Tensor, attention_mask_BS: Tensor) -> dict[str, Tensor]:
    """The arguments of a forward pass. Prompts are padded on the left, so positions count real tokens."""
    position_ids_BS = (attention_mask_BS.cumsum(dim=-1) - 1).clamp(min=0)
    return {"input_ids": tokens_BS, "attention_mask": attention_mask_BS, "position_ids": position_ids_BS}


def response_log_probs(model: Any, samples: Samples, temperature: float) -> Tensor:
    """Log-probs in nats of the response tokens, [B, T]."""
    width = samples.response_mask_BT.shape[1]
    logits_BSV = model(**inputs(samples.tokens_BS, samples.attention_mask_BS)).logits
    # What stands at a position predicts the next token.
    log_probs_BTV = (logits_BSV[:, -width - 1 : -1] / temperature).log_softmax(dim=-1)
    return log_probs_BTV.gather(-1, samples.tokens_BS[:, -width:, None]).squeeze(-1)


def group_advantages(scores_B: Tensor, samples_per_prompt: int) -> Tensor:
    """How much better than its group each sample is, [B]: (score - mean) / standard deviation.

    Samples without a score are left out and get 0. One that is alone in its group has nothing to be compared with and
    keeps its score.
    """
    scores_GN = scores_B.view(-1, samples_per_prompt)
    count_G1 = (~scores_GN.isnan()).sum(dim=1, keepdim=True)
    mean_G1 = scores_GN.nanmean(dim=1, keepdim=True)
    variance_G1 = (scores_GN - mean_G1).square().nansum(dim=1, keepdim=True) / (count_G1 - 1).clamp(min=1)
    mean_G1 = torch.where(count_G1 > 1, mean_G1, 0)
    std_G1 = torch.where(count_G1 > 1, variance_G1.sqrt(), 1)
    return ((scores_GN - mean_G1) / (std_G1 + 1e-6)).nan_to_num(0).flatten()


def clipped_loss(ratio_BT: Tensor, advantages_BT: Tensor, settings: Settings) -> Tensor:
    """Loss of each token, [B, T]; no gradient once the ratio has gone far enough in the direction that pays."""
    clipped_ratio_BT = ratio_BT.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    loss_BT = torch.maximum(-advantages_BT * ratio_BT, -advantages_BT * clipped_ratio_BT)
    # Where the advantage is negative, the loss grows with the ratio without end: hence a bound from above.
    bound_BT = -settings.dual_clip * advantages_BT
    return torch.where(advantages_BT < 0, torch.minimum(loss_BT, bound_BT), loss_BT)


def kl_to_reference(log_probs_BT: Tensor, ref_log_probs_BT: Tensor) -> Tensor:
    """Estimate of each token's KL divergence to the reference, [B, T]: at least 0, and 0 where both agree ("k3")."""
    drift_BT = ref_log_probs_BT - log_probs_BT
    # One token that the reference finds 2,000 times likelier may be noise: beyond that it pulls no more.
    return (drift_BT.exp() - drift_BT - 1).clamp(max=10)


def update(policy: Any, optimizer: Optimizer, experience: Experience, settings: Settings) -> list[float]:
    """The optimizer steps on the samples of one RL step, in their order; returns the loss of each."""
    losses = []
    everything = torch.arange(len(experience.advantages_B))
    for mini_batch in everything.chunk(settings.updates_per_step) * settings.passes_per_step:
        # All tokens of the mini-batch weigh the same, in whichever micro-batch and response they stand.
        num_tokens = experience.response_mask_BT[mini_batch].sum().clamp(min=1)
        losses.append(0.0)
        for rows in mini_batch.split(settings.micro_batch_size):
            micro = experience[rows]
            log_probs_BT = response_log_probs(policy, micro, settings.temperature)
            ratio_BT = ((log_probs_BT - micro.old_log_probs_BT) * micro.response_mask_BT).exp()
            loss_BT = clipped_loss(ratio_BT, micro.advantages_B[:, None], settings)
            loss_BT = loss_BT + settings.kl_coefficient * kl_to_reference(log_probs_BT, micro.ref_log_probs_BT)
            loss = (loss_BT * micro.response_mask_BT).sum() / num_tokens
            loss.backward()
            losses[-1] += loss.item()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), settings.gradient_clip)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@torch.no_grad()
def sample(policy: Any, prompts: Sequence[Sequence[int]], settings: Settings) -> tuple[Tensor, Tensor]:
    """Draw responses, a token at a time, until END or `max_tokens`; returns `tokens_BS` and `attention_mask_BS`."""
    width = max(len(prompt) for prompt in prompts)
    rows = [prompt for prompt in prompts for _ in range(settings.samples_per_prompt)]
    tokens_BS = torch.tensor([[PAD] * (width - len(row)) + list(row) for row in rows])
    attention_mask_BS = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    goes_on_B = torch.ones(len(rows), dtype=torch.bool)
    for _ in range(settings.max_tokens):
        logits_BSV = policy(**inputs(tokens_BS, attention_mask_BS)).logits
        probabilities_BV = (logits_BSV[:, -1] / settings.temperature).softmax(dim=-1)
        drawn_B = torch.multinomial(probabilities_BV, 1).squeeze(1)
        tokens_BS = torch.cat([tokens_BS, torch.where(goes_on_B, drawn_B, PAD)[:, None]], dim=1)
        attention_mask_BS = torch.cat([attention_mask_BS, goes_on_B[:, None].long()], dim=1)
        goes_on_B = goes_on_B & (drawn_B != END)
    return tokens_BS, attention_mask_BS


def collect(policy: Any, reference: Any, prompts: Sequence[str], settings: Settings) -> Experience:
    """Sample, score, compare: all that the update needs."""
    tokens_BS, attention_mask_BS = sample(policy, [encode(prompt) for prompt in prompts], settings)
    responses_BT = tokens_BS[:, -settings.max_tokens :]
    questions = [prompt for prompt in prompts for _ in range(settings.samples_per_prompt)]
    scores_B = torch.tensor([score(q, r) for q, r in zip(questions, responses_BT.tolist(), strict=True)])
    response_mask_BT = attention_mask_BS[:, -settings.max_tokens :] * ~scores_B.isnan()[:, None]
    samples = Samples(tokens_BS, attention_mask_BS, response_mask_BT, scores_B)
    with torch.no_grad():
        return Experience(
            **vars(samples),
            advantages_B=group_advantages(scores_B, settings.samples_per_prompt),
            old_log_probs_BT=response_log_probs(policy, samples, settings.temperature),
            ref_log_probs_BT=response_log_probs(reference, samples, settings.temperature),
        )


# The task: sums of two digits, by a model that knows nothing at first ------------------------------------------------

CHARACTERS = "0123456789+="
END, PAD = len(CHARACTERS), len(CHARACTERS) + 1


def encode(text: str) -> list[int]:
    """Token ids of a text: one for each character."""
    return [CHARACTERS.index(character) for character in text]


def score(prompt: str, response: Sequence[int]) -> float:
    """1 for the right sum and nothing after it; half of that for each thing apart, so that there is a way there."""
    left, right = prompt.rstrip("=").split("+")
    answer = encode(str(int(left) + int(right)))
    said = list(response[: response.index(END)]) if END in response else list(response)
    right_digits = sum(a == b for a, b in zip(answer, said, strict=False)) / len(answer)
    return (right_digits + (said == answer)) / 2


def new_policy(seed: int) -> Qwen2ForCausalLM:
    """A causal language model with random weights (75,000 of them)."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(CHARACTERS) + 2,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config)


def main(steps: int = 300, seed: int = 0, settings: Settings | None = None) -> list[float]:
    """Train, print the mean score now and then, and return that of every step."""
    settings = settings or Settings()
    policy = new_policy(seed)
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = AdamW(policy.parameters(), lr=settings.lr, betas=(0.9, 0.999), weight_decay=0.0)
    draw = random.Random(seed)
    scores = []
    for number in range(1, steps + 1):
        prompts = [f"{draw.randrange(10)}+{draw.randrange(10)}=" for _ in range(settings.prompts_per_step)]
        experience = collect(policy, reference, prompts, settings)
        update(policy, optimizer, experience, settings)
        scores.append(experience.scores_B.nanmean().item())
        if number % 10 == 0:
            print(f"step {number:4d}  mean score of the last ten {sum(scores[-10:]) / 10:.3f}")
    return scores


if __name__ == "__main__":
    main()
