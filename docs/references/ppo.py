"""PPO in one file: the whole algorithm, on a task small enough for a CPU (`python docs/references/ppo.py`).

A step samples and scores responses, estimates the value before each token with a critic, and takes a few optimizer
steps of both models: the policy towards tokens better than expected, the critic towards the returns.

Axes: `B` samples, `S` prompt (padded on the left) and response (on the right), `T` response tokens, `V` vocabulary.

Source: PPO https://arxiv.org/abs/1707.06347 eq. 7; GAE https://arxiv.org/abs/1506.02438 eq. 16; clipped value loss
https://arxiv.org/abs/2005.12729 section 3; dual clip https://arxiv.org/abs/1912.09729 eq. 5.
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
        prompts_per_step: number of prompts in one step, with one sample each.
        max_tokens: length of the longest response, in tokens.
        temperature: temperature of sampling and of every log-prob.
        passes_per_step: number of passes over the samples of a step.
        updates_per_step: number of optimizer steps of each model in a pass; each takes an equal share of the samples.
        micro_batch_size: number of samples in one forward and backward pass; no result depends on this size.
        gamma: discount per token.
        lam: 1 uses the rewards only, 0 the critic only.
        clip_low: width of the clip range of the ratio below 1.
        clip_high: width of the clip range above 1.
        dual_clip: bound on the loss of tokens with negative advantage, in units of the advantage.
        value_clip: largest change of a value in one step; the loss ignores a value that changed more.
        kl_coefficient: weight of the KL to the reference, in the reward.
        lr: learning rate of AdamW, for both models.
        gradient_clip: bound on the norm of the gradient of each model.
    """

    prompts_per_step: int = 256
    max_tokens: int = 3
    temperature: float = 1.0
    passes_per_step: int = 1
    updates_per_step: int = 2
    micro_batch_size: int = 128
    gamma: float = 1.0
    lam: float = 0.95
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 3.0
    value_clip: float = 0.5
    kl_coefficient: float = 0.001
    lr: float = 2e-3
    gradient_clip: float = 1.0


@dataclass(frozen=True)
class Samples:
    """Prompts with their responses.

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
        advantages_BT: advantage of each token.
        returns_BT: targets of the values.
        old_log_probs_BT: log-prob of each token under the policy before the update.
        old_values_BT: values of the critic before the update.
    """

    advantages_BT: Tensor
    returns_BT: Tensor
    old_log_probs_BT: Tensor
    old_values_BT: Tensor


# The algorithm -------------------------------------------------------------------------------------------------------


def inputs(tokens_BS: Tensor, attention_mask_BS: Tensor) -> dict[str, Tensor]:
    """Build the arguments of a forward pass. Prompts are padded on the left, so positions count real tokens."""
    position_ids_BS = (attention_mask_BS.cumsum(dim=-1) - 1).clamp(min=0)
    return {"input_ids": tokens_BS, "attention_mask": attention_mask_BS, "position_ids": position_ids_BS}


class Critic(nn.Module):
    """A model with a linear head on its last hidden states, which estimates the return; the estimate is 0 at first."""

    def __init__(self, body: nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, samples: Samples) -> Tensor:
        """Compute the values before each response token, [B, T]."""
        hidden_states = self.body(**inputs(samples.tokens_BS, samples.attention_mask_BS)).last_hidden_state
        return self.head(hidden_states).squeeze(-1)[:, -samples.response_mask_BT.shape[1] - 1 : -1]


def response_log_probs(model: Module, samples: Samples, temperature: float) -> Tensor:
    """Compute the log-probs of the response tokens, in nats, [B, T]."""
    width = samples.response_mask_BT.shape[1]
    logits_BSV = model(**inputs(samples.tokens_BS, samples.attention_mask_BS)).logits
    # The logits at a position predict the next token.
    log_probs_BTV = (logits_BSV[:, -width - 1 : -1] / temperature).log_softmax(dim=-1)
    return log_probs_BTV.gather(-1, samples.tokens_BS[:, -width:, None]).squeeze(-1)


def token_rewards(samples: Samples, log_ratio_to_reference_BT: Tensor, kl_coefficient: float) -> Tensor:
    """Compute the reward of each token, [B, T]: the score at the last token, minus the KL penalty."""
    mask_BT = samples.response_mask_BT
    is_last_BT = (mask_BT == 1) & (mask_BT.cumsum(dim=-1) == mask_BT.sum(dim=-1, keepdim=True))
    scores_BT = torch.where(is_last_BT, samples.scores_B[:, None], 0)
    return scores_BT - kl_coefficient * log_ratio_to_reference_BT * mask_BT


def gae(rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    """Compute generalized advantages, whitened over all tokens, and the targets of the critic, [B, T]."""
    rewards_BT, values_BT = rewards_BT * mask_BT, values_BT * mask_BT
    gains_BT = torch.zeros_like(values_BT)
    gain_B = next_value_B = torch.zeros_like(values_BT[:, 0])
    # Padding is on the right and holds 0, so the gain after the last token is 0.
    for t in reversed(range(values_BT.shape[1])):
        td_error_B = rewards_BT[:, t] + settings.gamma * next_value_B - values_BT[:, t]
        gain_B = td_error_B + settings.gamma * settings.lam * gain_B
        gains_BT[:, t], next_value_B = gain_B, values_BT[:, t]
    token_gains_N = gains_BT[mask_BT == 1]
    advantages_BT = (gains_BT - token_gains_N.mean()) / (token_gains_N.var() + 1e-8).sqrt() * mask_BT
    return advantages_BT, gains_BT + values_BT


def clipped_loss(ratio_BT: Tensor, advantages_BT: Tensor, settings: Settings) -> Tensor:
    """Compute the loss of each token, [B, T]; no gradient if the ratio has moved far enough to reduce the loss."""
    clipped_ratio_BT = ratio_BT.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    loss_BT = torch.maximum(-advantages_BT * ratio_BT, -advantages_BT * clipped_ratio_BT)
    # With a negative advantage the loss grows with the ratio without limit, so it gets an upper bound.
    bound_BT = -settings.dual_clip * advantages_BT
    return torch.where(advantages_BT < 0, torch.minimum(loss_BT, bound_BT), loss_BT)


def value_loss(values_BT: Tensor, old_values_BT: Tensor, returns_BT: Tensor, clip: float) -> Tensor:
    """Compute half the squared error, [B, T]; no gradient once a value has moved by `clip` towards its target."""
    near_BT = values_BT.clamp(old_values_BT - clip, old_values_BT + clip)
    return torch.maximum((values_BT - returns_BT).square(), (near_BT - returns_BT).square()) / 2


def update(
    policy: Module, critic: Critic, optimizers: Sequence[Optimizer], experience: Experience, settings: Settings
) -> list[tuple[float, float]]:
    """Take the optimizer steps on the samples of one RL step, in their order; return both losses of each step."""
    losses = []
    all_rows = torch.arange(len(experience.advantages_BT))
    for mini_batch in all_rows.chunk(settings.updates_per_step) * settings.passes_per_step:
        # All tokens of the mini-batch have the same weight, whatever their micro-batch and response.
        num_tokens = experience.response_mask_BT[mini_batch].sum().clamp(min=1)
        policy_total = critic_total = 0.0
        for rows in mini_batch.split(settings.micro_batch_size):
            micro = experience[rows]
            log_probs_BT = response_log_probs(policy, micro, settings.temperature)
            ratio_BT = ((log_probs_BT - micro.old_log_probs_BT) * micro.response_mask_BT).exp()
            loss_BT = clipped_loss(ratio_BT, micro.advantages_BT, settings)
            policy_loss = (loss_BT * micro.response_mask_BT).sum() / num_tokens
            loss_BT = value_loss(critic(micro), micro.old_values_BT, micro.returns_BT, settings.value_clip)
            critic_loss = (loss_BT * micro.response_mask_BT).sum() / num_tokens
            # The two models share no weights, so each gets the gradient of its own loss.
            (policy_loss + critic_loss).backward()
            policy_total, critic_total = policy_total + policy_loss.item(), critic_total + critic_loss.item()
        for model, optimizer in zip((policy, critic), optimizers, strict=True):
            nn.utils.clip_grad_norm_(model.parameters(), settings.gradient_clip)
            optimizer.step()
            optimizer.zero_grad()
        losses.append((policy_total, critic_total))
    return losses


@torch.no_grad()
def sample(policy: Module, prompts: Sequence[Sequence[int]], settings: Settings) -> tuple[Tensor, Tensor]:
    """Sample responses, one token at a time, until END or `max_tokens`; return `tokens_BS` and `attention_mask_BS`."""
    width = max(len(prompt) for prompt in prompts)
    tokens_BS = torch.tensor([[PAD] * (width - len(row)) + list(row) for row in prompts])
    attention_mask_BS = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts])
    unfinished_B = torch.ones(len(prompts), dtype=torch.bool)
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
    scores_B = torch.tensor([score(p, r) for p, r in zip(prompts, responses_BT.tolist(), strict=True)])
    response_mask_BT = attention_mask_BS[:, -settings.max_tokens :] * ~scores_B.isnan()[:, None]
    return Samples(tokens_BS, attention_mask_BS, response_mask_BT, scores_B)


def make_experience(
    policy: Module, critic: Critic, reference: Module, samples: Samples, settings: Settings
) -> Experience:
    """Compute the log-probs, values and advantages for the update."""
    with torch.no_grad():
        old_log_probs_BT = response_log_probs(policy, samples, settings.temperature)
        ref_log_probs_BT = response_log_probs(reference, samples, settings.temperature)
        old_values_BT = critic(samples)
    rewards_BT = token_rewards(samples, old_log_probs_BT - ref_log_probs_BT, settings.kl_coefficient)
    advantages_BT, returns_BT = gae(rewards_BT, old_values_BT, samples.response_mask_BT, settings)
    return Experience(
        **vars(samples),
        advantages_BT=advantages_BT,
        returns_BT=returns_BT,
        old_log_probs_BT=old_log_probs_BT,
        old_values_BT=old_values_BT,
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
    critic = Critic(new_policy(seed).model, policy.config.hidden_size)
    optimizers = [AdamW(model.parameters(), lr=settings.lr, weight_decay=0.0) for model in (policy, critic)]
    generator = random.Random(seed)
    scores = []
    for number in range(1, steps + 1):
        prompts = [f"{generator.randrange(10)}+{generator.randrange(10)}=" for _ in range(settings.prompts_per_step)]
        samples = collect(policy, prompts, settings)
        experience = make_experience(policy, critic, reference, samples, settings)
        update(policy, critic, optimizers, experience, settings)
        scores.append(experience.scores_B.nanmean().item())
        if number % 10 == 0:
            print(f"step {number:4d}  mean score of the last ten {sum(scores[-10:]) / 10:.3f}")
    return scores


if __name__ == "__main__":
    main()
