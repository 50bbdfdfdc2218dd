"""GRPO in one file: the whole algorithm, on a task small enough for a CPU (`python docs/references/grpo.py`).

A step samples a group of responses to each prompt, scores the responses, compares every score with the scores of its
group, and takes a few optimizer steps on a clipped loss. GRPO has no critic: the group is the baseline.

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
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import Module
from torch.optim import AdamW, Optimizer
from transformers import Qwen2Config, Qwen2ForCausalLM


@dataclass(frozen=True)
class Settings:
    """Options of the algorithm and of the task.

    Attributes:
        prompts_per_step: number of prompts in one step.
        samples_per_prompt: number of responses to each prompt, the size of a group.
        max_tokens: length of the longest response, in tokens.
        temperature: temperature of sampling and of every log-prob.
        passes_per_step: number of passes over the samples of a step.
        updates_per_step: number of optimizer steps in a pass; each takes an equal share of the prompts.
        micro_batch_size: number of samples in one forward and backward pass; no result depends on this size.
        clip_low: width of the clip range of the ratio below 1.
        clip_high: width of the clip range above 1 (DAPO: larger than `clip_low`).
        dual_clip: bound on the loss of tokens with negative advantage, in units of the advantage.
        kl_coefficient: weight of the KL to the reference.
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
        tokens_BS: token ids of prompts and responses.
        attention_mask_BS: 1 on real tokens.
        response_mask_BT: 1 on the response tokens to learn from; 0 on padding and on responses without a score.
        scores_B: score of each response; NaN for a response that could not be scored.
    """

    tokens_BS: Tensor
    attention_mask_BS: Tensor
    response_mask_BT: Tensor
    scores_B: Tensor

    def __getitem__(self, rows: Tensor) -> Self:
        """Return the samples at these rows."""
        return type(self)(**{name: tensor[rows] for name, tensor in vars(self).items()})


@dataclass(frozen=True)
class Experience(Samples):
    """Samples with the inputs of the update.

    Attributes:
        advantages_B: advantage of each sample, the same for all of its tokens.
        old_log_probs_BT: log-prob of each token under the policy before the update.
        ref_log_probs_BT: log-prob of each token under the reference.
    """

    advantages_B: Tensor
    old_log_probs_BT: Tensor
    ref_log_probs_BT: Tensor


# The algorithm -------------------------------------------------------------------------------------------------------


def inputs(tokens_BS: Tensor, attention_mask_BS: Tensor) -> dict[str, Tensor]:
    """Build the arguments of a forward pass. Prompts are padded on the left, so positions count real tokens."""
    position_ids_BS = (attention_mask_BS.cumsum(dim=-1) - 1).clamp(min=0)
    return {"input_ids": tokens_BS, "attention_mask": attention_mask_BS, "position_ids": position_ids_BS}


def response_log_probs(model: Module, samples: Samples, temperature: float) -> Tensor:
    """Compute the log-probs of the response tokens, in nats, [B, T]."""
    width = samples.response_mask_BT.shape[1]
    logits_BSV = model(**inputs(samples.tokens_BS, samples.attention_mask_BS)).logits
    # The logits at a position predict the next token.
    log_probs_BTV = (logits_BSV[:, -width - 1 : -1] / temperature).log_softmax(dim=-1)
    return log_probs_BTV.gather(-1, samples.tokens_BS[:, -width:, None]).squeeze(-1)


def group_advantages(scores_B: Tensor, samples_per_prompt: int) -> Tensor:
    """Compute the advantage of each sample over its group, [B]: (score - mean) / standard deviation.

    Samples without a score are left out and get 0. The only scored sample of a group keeps its score.
    """
    scores_GN = scores_B.view(-1, samples_per_prompt)
    count_G1 = (~scores_GN.isnan()).sum(dim=1, keepdim=True)
    mean_G1 = scores_GN.nanmean(dim=1, keepdim=True)
    variance_G1 = (scores_GN - mean_G1).square().nansum(dim=1, keepdim=True) / (count_G1 - 1).clamp(min=1)
    mean_G1 = torch.where(count_G1 > 1, mean_G1, 0)
    std_G1 = torch.where(count_G1 > 1, variance_G1.sqrt(), 1)
    return ((scores_GN - mean_G1) / (std_G1 + 1e-6)).nan_to_num(0).flatten()


def clipped_loss(ratio_BT: Tensor, advantages_BT: Tensor, settings: Settings) -> Tensor:
    """Compute the loss of each token, [B, T]; no gradient if the ratio has moved far enough to reduce the loss."""
    clipped_ratio_BT = ratio_BT.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    loss_BT = torch.maximum(-advantages_BT * ratio_BT, -advantages_BT * clipped_ratio_BT)
    # With a negative advantage the loss grows with the ratio without limit, so it gets an upper bound.
    bound_BT = -settings.dual_clip * advantages_BT
    return torch.where(advantages_BT < 0, torch.minimum(loss_BT, bound_BT), loss_BT)


def kl_to_reference(log_probs_BT: Tensor, ref_log_probs_BT: Tensor) -> Tensor:
    """Estimate each token's KL divergence to the reference, [B, T]: at least 0, and 0 for equal log-probs ("k3")."""
    log_ratio_BT = ref_log_probs_BT - log_probs_BT
    # A token that is 2,000 times likelier under the reference may be noise: no gradient beyond.
    return (log_ratio_BT.exp() - log_ratio_BT - 1).clamp(max=10)


def update(policy: Module, optimizer: Optimizer, experience: Experience, settings: Settings) -> list[float]:
    """Take the optimizer steps on the samples of one RL step, in their order; return the loss of each step."""
    losses = []
    all_rows = torch.arange(len(experience.advantages_B))
    for mini_batch in all_rows.chunk(settings.updates_per_step) * settings.passes_per_step:
        # All tokens of the mini-batch have the same weight, whatever their micro-batch and response.
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
        nn.utils.clip_grad_norm_(policy.parameters(), settings.gradient_clip)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@torch.no_grad()
def sample(policy: Module, prompts: Sequence[Sequence[int]], settings: Settings) -> tuple[Tensor, Tensor]:
    """Sample responses, one token at a time, until END or `max_tokens`; return `tokens_BS` and `attention_mask_BS`."""
    width = max(len(prompt) for prompt in prompts)
    rows = [prompt for prompt in prompts for _ in range(settings.samples_per_prompt)]
    tokens_BS = torch.tensor([[PAD] * (width - len(row)) + list(row) for row in rows])
    attention_mask_BS = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    unfinished_B = torch.ones(len(rows), dtype=torch.bool)
    for _ in range(settings.max_tokens):
        logits_BSV = policy(**inputs(tokens_BS, attention_mask_BS)).logits
        probabilities_BV = (logits_BSV[:, -1] / settings.temperature).softmax(dim=-1)
        drawn_B = torch.multinomial(probabilities_BV, 1).squeeze(1)
        tokens_BS = torch.cat([tokens_BS, torch.where(unfinished_B, drawn_B, PAD)[:, None]], dim=1)
        attention_mask_BS = torch.cat([attention_mask_BS, unfinished_B[:, None].long()], dim=1)
        unfinished_B = unfinished_B & (drawn_B != END)
    return tokens_BS, attention_mask_BS


def collect(policy: Module, prompts: list[str], settings: Settings) -> Samples:
    """Sample and score responses."""
    tokens_BS, attention_mask_BS = sample(policy, [encode(prompt) for prompt in prompts], settings)
    responses_BT = tokens_BS[:, -settings.max_tokens :]
    questions = [prompt for prompt in prompts for _ in range(settings.samples_per_prompt)]
    scores_B = torch.tensor([score(q, r) for q, r in zip(questions, responses_BT.tolist(), strict=True)])
    response_mask_BT = attention_mask_BS[:, -settings.max_tokens :] * ~scores_B.isnan()[:, None]
    return Samples(tokens_BS, attention_mask_BS, response_mask_BT, scores_B)


def make_experience(policy: Module, reference: Module, samples: Samples, settings: Settings) -> Experience:
    """Compute the advantages and log-probs for the update."""
    with torch.no_grad():
        return Experience(
            **vars(samples),
            advantages_B=group_advantages(samples.scores_B, settings.samples_per_prompt),
            old_log_probs_BT=response_log_probs(policy, samples, settings.temperature),
            ref_log_probs_BT=response_log_probs(reference, samples, settings.temperature),
        )


# The task: sums of two digits, learned by a model with random weights ------------------------------------------------

CHARACTERS = "0123456789+="
END, PAD = len(CHARACTERS), len(CHARACTERS) + 1


def encode(text: str) -> list[int]:
    """Return the token ids of a text: one for each character."""
    return [CHARACTERS.index(character) for character in text]


def score(prompt: str, response: Sequence[int]) -> float:
    """Score a response: half the share of right digits, for an early signal, plus 1/2 for exactly the right sum."""
    left, right = prompt.rstrip("=").split("+")
    answer = encode(str(int(left) + int(right)))
    answered = list(response[: response.index(END)]) if END in response else list(response)
    right_digits = sum(a == b for a, b in zip(answer, answered, strict=False)) / len(answer)
    return (right_digits + (answered == answer)) / 2


def new_policy(seed: int) -> Qwen2ForCausalLM:
    """Build a causal language model with 75,000 random weights."""
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
    """Train, print the mean score every ten steps, and return the mean score of every step."""
    settings = settings or Settings()
    policy = new_policy(seed)
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = AdamW(policy.parameters(), lr=settings.lr, betas=(0.9, 0.999), weight_decay=0.0)
    generator = random.Random(seed)
    scores = []
    for number in range(1, steps + 1):
        prompts = [f"{generator.randrange(10)}+{generator.randrange(10)}=" for _ in range(settings.prompts_per_step)]
        samples = collect(policy, prompts, settings)
        experience = make_experience(policy, reference, samples, settings)
        update(policy, optimizer, experience, settings)
        scores.append(experience.scores_B.nanmean().item())
        if number % 10 == 0:
            print(f"step {number:4d}  mean score of the last ten {sum(scores[-10:]) / 10:.3f}")
    return scores


if __name__ == "__main__":
    main()
