"""Muon for the matrices of hidden layers, with AdamW for all other parameters.

Sources: Muon, https://kellerjordan.github.io/posts/muon/; the learning rate shared with AdamW (`match_rms_adamw`), Muon
is Scalable for LLM Training, section 2.2, https://arxiv.org/abs/2502.16982.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from typing_extensions import override

from rl_plugins.models.sharded_muon import ShardedMuon


class MuonAndAdamW(Optimizer):
    """Takes steps of Muon on the matrices of a model's hidden layers, and steps of AdamW on the other parameters.

    The other parameters are embeddings, output heads, biases, weights of norms, and the experts of a mixture, which are
    stacks of matrices. Parameters are whole or DTensors: ZeRO, which cuts all parameters into flat pieces, cannot shard
    this optimizer.

    Args:
        model: model to train, whose parameters with `requires_grad` are trained.
        lr: learning rate of both.
        betas: decay rates of AdamW.
        weight_decay: weight decay of both.
        eps: number added to the denominator of AdamW.
        momentum: momentum of Muon.
        nesterov: use Nesterov's momentum in Muon.
        ns_steps: Newton-Schulz steps of Muon.
        adjust_lr_fn: scale of Muon's rate. `match_rms_adamw` makes changes as large as those of AdamW, so both have one
            rate; `original` is Keller Jordan's, for larger rates.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        eps: float = 1e-8,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str = "match_rms_adamw",
    ) -> None:
        matrices, others = split_parameters(model)
        shared: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
        self._rules: list[Optimizer] = []
        if matrices:
            rates = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
            self._rules.append(ShardedMuon(matrices, **shared | rates))
        if others:
            self._rules.append(AdamW(others, **shared, betas=betas, eps=eps, fused=True))
        super().__init__([group for rule in self._rules for group in rule.param_groups], shared)

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with torch.enable_grad():
            # Lightning computes gradients in the closure, if a stage has not.
            loss = None if closure is None else closure()
        for rule, group in zip(self._rules, self.param_groups, strict=True):
            # Loading a checkpoint replaces groups and state.
            rule.param_groups, rule.state = [group], self.state
            rule.step()
        return loss


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the trained matrices of the hidden layers, and the other trained parameters."""
    heads = {id(parameter) for module in _ends(model) for parameter in module.parameters()}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    is_matrix = [parameter.ndim == 2 and id(parameter) not in heads for parameter in trained]
    matrices = [parameter for parameter, chosen in zip(trained, is_matrix, strict=True) if chosen]
    return matrices, [parameter for parameter, chosen in zip(trained, is_matrix, strict=True) if not chosen]


def _ends(model: nn.Module) -> list[nn.Module]:
    """Return embeddings, the output head, and scalar heads."""
    head: nn.Module | None = getattr(model, "get_output_embeddings", lambda: None)()
    ends: list[nn.Module] = [
        module
        for module in model.modules()
        if isinstance(module, nn.Embedding) or (isinstance(module, nn.Linear) and module.out_features == 1)
    ]
    return ends if head is None else [*ends, head]
