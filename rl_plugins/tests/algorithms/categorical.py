"""A categorical policy, in which expectations and their gradients are exact."""

from __future__ import annotations

import torch
from torch import Tensor


class CategoricalPolicy:
    """A policy over `tokens` tokens and a reference, both from the seed 0."""

    def __init__(self, tokens: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._logits = torch.randn(tokens, generator=generator, dtype=torch.float64).requires_grad_()
        self.log_probs = self._logits.log_softmax(-1)
        self.ref_log_probs = torch.randn(tokens, generator=generator, dtype=torch.float64).log_softmax(-1)

    def gradient_of_samples(self, values: Tensor) -> Tensor:
        """Return the expected gradient of a loss with these `values` over sampled tokens."""
        return self._gradient((self.log_probs.exp().detach() * values).sum())

    def gradient_of_reverse_kl(self) -> Tensor:
        """Return the gradient of KL(policy || reference)."""
        return self._gradient((self.log_probs.exp() * (self.log_probs - self.ref_log_probs)).sum())

    def _gradient(self, loss: Tensor) -> Tensor:
        return torch.autograd.grad(loss, self._logits, retain_graph=True)[0]
