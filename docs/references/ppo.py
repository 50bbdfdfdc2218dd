"""PPO in one file: the whole algorithm at once, on a task small enough for a CPU (`python docs/references/ppo.py`).

A step samples responses, scores them, asks a critic what it expected before each token, and takes a few optimizer steps
of both: the policy towards what went better than expected, the critic towards what came.

Axes: `B` samples, `S` prompt (padded on the left) and response (on the right), `T` response tokens, `V` vocabulary.

Source: PPO https://arxiv.org/abs/1707.06347 eq. 7; GAE https://arxiv.org/abs/1506.02438 eq. 16; clipped value loss
https://arxiv.org/abs/2005.12729 section 3; dual clip https://arxiv.org/abs/1912.09729 eq. 5.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from transformers import Qwen2Config, Qwen2ForCausalLM


@dataclass(frozen=True)
class Settings:
    """Everything that can be turned.

    Attributes:
        prompts_per_step: as many samples are drawn in one step.
        max_tokens: longest response.
        temperature: of sampling, and of every log-prob.
        passes_per_step: passes over the samples of a step.
        updates_per_step: optimizer steps of each model per pass; the samples are dealt over them.
        micro_batch_size: samples of one forward and backward pass; no result depends on it.
        gamma: discount per token.
        lam: 1 trusts the rewards only, 0 the critic only.
        clip_low: how far the ratio may fall below 1.
        clip_high: how far it may rise above 1.
        dual_clip: bound on the loss of bad tokens, in units of their advantage.
        value_clip: how far a value may move in one step before its loss ignores it.
        kl_coefficient: weight, in the reward, of the distance to the reference.
        lr: learning rate of AdamW, for both.
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
        advantages_BT: of each token.
        returns_BT: what the values should be.
        old_log_probs_BT: under the policy before the update.
        old_values_BT: the critic's before the update.
    """

    advantages_BT: Tensor
    returns_BT: Tensor
    old_log_probs_BT: Tensor
    old_values_BT: Tensor


# The algorithm -------------------------------------------------------------------------------------------------------


def inputs(tokens_BS: Tensor, attention_mask_BS: Tensor) -> dict[str, Tensor]:
    """The arguments of a forward pass. Prompts are padded on the left, so positions count real tokens."""
    position_ids_BS = (attention_mask_BS.cumsum(dim=-1) - 1).clamp(min=0)
    return {"input_ids": tokens_BS, "attention_mask": attention_mask_BS, "position_ids": position_ids_BS}


class Critic(nn.Module):
    """What a model with a linear head on its last hidden states expects of the rest of a response; 0 at first."""

    def __init__(self, body: nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, samples: Samples) -> Tensor:
        """Values before each response token, [B, T]."""
        hidden_states = self.body(**inputs(samples.tokens_BS, samples.attention_mask_BS)).last_hidden_state
        return self.head(hidden_states).squeeze(-1)[:, -samples.response_mask_BT.shape[1] - 1 : -1]


def response_log_probs(model: Any, samples: Samples, temperature: float) -> Tensor:
    """Log-probs in nats of the response tokens, [B, T]."""
    width = samples.response_mask_BT.shape[1]
    logits_BSV = model(**inputs(samples.tokens_BS, samples.attention_mask_BS)).logits
    # What stands at a position predicts the next token.
    log_probs_BTV = (logits_BSV[:, -width - 1 : -1] / temperature).log_softmax(dim=-1)
    return log_probs_BTV.gather(-1, samples.tokens_BS[:, -width:, None]).squeeze(-1)


def token_rewards(samples: Samples, log_ratio_to_reference_BT: Tensor, kl_coefficient: float) -> Tensor:
    """The reward of each token, [B, T]: the score at the last one, less what the distance to the reference costs."""
    mask_BT = samples.response_mask_BT
    is_last_BT = (mask_BT == 1) & (mask_BT.cumsum(dim=-1) == mask_BT.sum(dim=-1, keepdim=True))
    scores_BT = torch.where(is_last_BT, samples.scores_B[:, None], 0)
    return scores_BT - kl_coefficient * log_ratio_to_reference_BT * mask_BT


def gae(rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation: advantages, whitened over all tokens, and the critic's targets, [B, T]."""
    rewards_BT, values_BT = rewards_BT * mask_BT, values_BT * mask_BT
    gains_BT = torch.zeros_like(values_BT)
    gain_B = next_value_B = torch.zeros_like(values_BT[:, 0])
    # Padding is on the right and holds 0: nothing has been gained when the last token comes.
    for t in reversed(range(values_BT.shape[1])):
        surprise_B = rewards_BT[:, t] + settings.gamma * next_value_B - values_BT[:, t]
        gain_B = surprise_B + settings.gamma * settings.lam * gain_B
        gains_BT[:, t], next_value_B = gain_B, values_BT[:, t]
    of_tokens = gains_BT[mask_BT == 1]
    advantages_BT = (gains_BT - of_tokens.mean()) / (of_tokens.var() + 1e-8).sqrt() * mask_BT
    return advantages_BT, gains_BT + values_BT


def clipped_loss(ratio_BT: Tensor, advantages_BT: Tensor, settings: Settings) -> Tensor:
    """Loss of each token, [B, T]; no gradient once the ratio has gone far enough in the direction that pays."""
    clipped_ratio_BT = ratio_BT.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    loss_BT = torch.maximum(-advantages_BT * ratio_BT, -advantages_BT * clipped_ratio_BT)
    # Where the advantage is negative, the loss grows with the ratio without end: hence a bound from above.
    bound_BT = -settings.dual_clip * advantages_BT
    return torch.where(advantages_BT < 0, torch.minimum(loss_BT, bound_BT), loss_BT)


def value_loss(values_BT: Tensor, old_values_BT: Tensor, returns_BT: Tensor, clip: float) -> Tensor:
    """Half the squared error, [B, T]; no gradient once a value has moved by `clip` towards its target."""
    near_BT = values_BT.clamp(old_values_BT - clip, old_values_BT + clip)
    return torch.maximum((values_BT - returns_BT).square(), (near_BT - returns_BT).square()) / 2


def update(
    policy: Any, critic: Critic, optimizers: Sequence[Optimizer], experience: Experience, settings: Settings
) -> list[tuple[float, float]]:
    """The optimizer steps on the samples of one RL step, in their order; returns both losses of each."""
    losses = []
    everything = torch.arange(len(experience.advantages_BT))
    for mini_batch in everything.chunk(settings.updates_per_step) * settings.passes_per_step:
        # All tokens of the mini-batch weigh the same, in whichever micro-batch and response they stand.
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
            # The two share no weights: each has its own gradient.
            (policy_loss + critic_loss).backward()
            policy_total, critic_total = policy_total + policy_loss.item(), critic_total + critic_loss.item()
        for model, optimizer in zip((policy, critic), optimizers, strict=True):
            nn.utils.clip_grad_norm_(model.parameters(), settings.gradient_clip)
            optimizer.step()
            optimizer.zero_grad()
        losses.append((policy_total, critic_total))
    return losses


@torch.no_grad()
def sample(policy: Any, prompts: Sequence[Sequence[int]], settings: Settings) -> tuple[Tensor, Tensor]:
    """Draw responses, a token at a time, until END or `max_tokens`; returns `tokens_BS` and `attention_mask_BS`."""
    width = max(len(prompt) for prompt in prompts)
    tokens_BS = torch.tensor([[PAD] * (width - len(row)) + list(row) for row in prompts])
    attention_mask_BS = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts])
    goes_on_B = torch.ones(len(prompts), dtype=torch.bool)
    for _ in range(settings.max_tokens):
        logits_BSV = policy(**inputs(tokens_BS, attention_mask_BS)).logits
        probabilities_BV = (logits_BSV[:, -1] / settings.temperature).softmax(dim=-1)
        drawn_B = torch.multinomial(probabilities_BV, 1).squeeze(1)
        tokens_BS = torch.cat([tokens_BS, torch.where(goes_on_B, drawn_B, PAD)[:, None]], dim=1)
        attention_mask_BS = torch.cat([attention_mask_BS, goes_on_B[:, None].long()], dim=1)
        goes_on_B = goes_on_B & (drawn_B != END)
    return tokens_BS, attention_mask_BS


def collect(policy: Any, critic: Critic, reference: Any, prompts: Sequence[str], settings: Settings) -> Experience:
    """Sample, score, ask the critic: all that the update needs."""
    tokens_BS, attention_mask_BS = sample(policy, [encode(prompt) for prompt in prompts], settings)
    responses_BT = tokens_BS[:, -settings.max_tokens :]
    scores_B = torch.tensor([score(p, r) for p, r in zip(prompts, responses_BT.tolist(), strict=True)])
    response_mask_BT = attention_mask_BS[:, -settings.max_tokens :] * ~scores_B.isnan()[:, None]
    samples = Samples(tokens_BS, attention_mask_BS, response_mask_BT, scores_B)
    with torch.no_grad():
        old_log_probs_BT = response_log_probs(policy, samples, settings.temperature)
        ref_log_probs_BT = response_log_probs(reference, samples, settings.temperature)
        old_values_BT = critic(samples)
    rewards_BT = token_rewards(samples, old_log_probs_BT - ref_log_probs_BT, settings.kl_coefficient)
    advantages_BT, returns_BT = gae(rewards_BT, old_values_BT, response_mask_BT, settings)
    return Experience(
        **vars(samples),
        advantages_BT=advantages_BT,
        returns_BT=returns_BT,
        old_log_probs_BT=old_log_probs_BT,
        old_values_BT=old_values_BT,
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
    critic = Critic(new_policy(seed).model, policy.config.hidden_size)
    optimizers = [AdamW(model.parameters(), lr=settings.lr, weight_decay=0.0) for model in (policy, critic)]
    draw = random.Random(seed)
    scores = []
    for number in range(1, steps + 1):
        prompts = [f"{draw.randrange(10)}+{draw.randrange(10)}=" for _ in range(settings.prompts_per_step)]
        experience = collect(policy, critic, reference, prompts, settings)
        update(policy, critic, optimizers, experience, settings)
        scores.append(experience.scores_B.nanmean().item())
        if number % 10 == 0:
            print(f"step {number:4d}  mean score of the last ten {sum(scores[-10:]) / 10:.3f}")
    return scores


if __name__ == "__main__":
    main()
