"""Example with two prompts and two responses each: from rewards to the gradient of the log-probs."""

import torch

from rl_plugins.algorithms.advantages import ADVANTAGES
from rl_plugins.algorithms.aggregation import GlobalCounts, aggregate
from rl_plugins.algorithms.policy_losses import POLICY_LOSSES

response_mask_BT = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 0, 0]])
rewards_BT = torch.tensor([[0.0, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0]])  # the score, on the last token
advantages_BT, returns_BT = ADVANTAGES["grpo"](
    token_level_rewards_BT=rewards_BT,
    response_mask_BT=response_mask_BT,
    groups_B=torch.tensor([0, 0, 1, 1]),
    valid_B=torch.ones(4, dtype=torch.bool),
)

log_probs_BT = torch.full((4, 3), -1.0, requires_grad=True)  # of the sampled tokens under the policy
loss_BT, metrics = POLICY_LOSSES["ppo_clip"](
    log_probs_BT=log_probs_BT,
    old_log_probs_BT=log_probs_BT.detach(),
    advantages_BT=advantages_BT,
    response_mask_BT=response_mask_BT,
    clip_high=0.28,
)
loss = aggregate(loss_BT, response_mask_BT, "token-mean", GlobalCounts(tokens=9, sequences=4))
loss.backward()
print(log_probs_BT.grad)  # below 0 on the tokens of right responses, which become more likely
