"""Losses of the routers of a mixture of experts, which keep the experts in use and the routers' logits small.

Sources: load balancing, Switch Transformers, equations 4 to 6, https://arxiv.org/abs/2101.03961, over the whole batch
as in https://arxiv.org/abs/2501.11873; z-loss, ST-MoE, equation 5, https://arxiv.org/abs/2202.08906.

Axes: `M` tokens that the routers see; `L` routers; `E` experts of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from typing_extensions import override

from rl_plugins.callbacks.checkpoint import callbacks_of
from rl_plugins.callbacks.compiled_blocks import CompiledBlocks
from rl_plugins.errors import ConfigError
from rl_plugins.router_replay import ExpertRouter, routers_of
from rl_plugins.stages.stage import Stage
from rl_plugins.strategies.rank_groups import refuse_joint_passes
from rl_plugins.vision_language import is_vision_language


class RouterLosses(Callback):
    """Adds losses of the routers to the loss of the trained model, and metrics of the routers to the metrics.

    The balance loss of a layer is `E * sum_i f_i P_i`, with the share `f_i` of the choices of expert `i` and its mean
    probability `P_i` (a softmax over all experts); 1 is an even load. `f_i` and the number of tokens are those of the
    last optimizer step, over all ranks. So the gradients do not depend on micro-batches and ranks, and the losses begin
    with the second optimizer step. The z-loss is the mean of the squared `logsumexp` of the logits.

    Metrics of each step: `train/router_balance`, `train/router_z`, `train/router_load` (largest share of an expert as a
    multiple of an even share) and `train/router_entropy` in nats, each a mean over layers. No token is dropped.

    Args:
        balance: coefficient of the balance loss.
        z: coefficient of the z-loss.

    Raises:
        ConfigError: the trained model has no routers, or reads images; the strategy has tensor or sequence
            parallelism; or the trainer has `CompiledBlocks`.
    """

    def __init__(self, balance: float = 0.0, z: float = 0.0) -> None:
        self.balance, self.z = balance, z
        self._shares_LE: Tensor | None = None
        self._tokens = 0.0
        self._sums: _Sums | None = None
        self._metrics: dict[str, float] = {}
        self._installed = ExitStack()

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, Stage)
        # A run that ended with an error had no teardown.
        self._installed.close()
        self._sums = None
        model = pl_module.named_models()[pl_module.trained]
        refuse_images(is_vision_language(model))
        refuse_joint_passes(model, "router_losses")
        if any(isinstance(callback, CompiledBlocks) for callback in callbacks_of(trainer)):
            raise ConfigError(
                "router_losses: compiled blocks keep the hooks of their first pass, and routers of a later fit have no "
                "losses: leave router_losses or CompiledBlocks out"
            )
        routers = routers_of(model, "router_losses")
        self._stage, self._passes = pl_module, _RouterPasses(model, routers, self._installed)
        pl_module.further_losses.append(self._loss)
        self._installed.callback(pl_module.further_losses.remove, self._loss)
        pl_module.further_metrics.append(self._take_metrics)
        self._installed.callback(pl_module.further_metrics.remove, self._take_metrics)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._installed.close()

    def _loss(self, name: str, *, last: bool) -> Tensor | None:
        """Return the losses of the routers in the last forward pass of the trained model, if there are any."""
        if name != self._stage.trained:
            return None
        sums, ranks = self._passes.take(), self._stage.strategy.ranks
        loss = None
        if self._shares_LE is not None and self._tokens:
            shares_LE = self._shares_LE.to(sums.probabilities_LE)
            balance = shares_LE.shape[1] * (shares_LE * sums.probabilities_LE).sum(dim=-1).mean()
            loss = (self.balance * balance + self.z * sums.z_L.mean()) * ranks.world_size / self._tokens
        self._sums = sums.detached() if self._sums is None else self._sums.plus(sums.detached())
        if last:
            self._end_step(ranks.sum(self._sums.flat()))
        return loss

    def _end_step(self, flat: Tensor) -> None:
        assert self._sums is not None
        sums, self._sums = self._sums.from_flat(flat), None
        self._tokens = float(sums.tokens)
        probabilities_LE, choices_LE = sums.probabilities_LE / self._tokens, sums.choices_LE
        self._shares_LE = choices_LE / choices_LE.sum(dim=-1, keepdim=True)
        experts = self._shares_LE.shape[1]
        measured = {
            "balance": experts * (self._shares_LE * probabilities_LE).sum(dim=-1),
            "load": experts * self._shares_LE.max(dim=-1).values,
            "z": sums.z_L / self._tokens,
            "entropy": sums.entropy_L / self._tokens,
        }
        self._metrics = {f"train/router_{name}": float(values_L.mean()) for name, values_L in measured.items()}

    def _take_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        taken, self._metrics = self._metrics, {}
        return taken

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"shares_LE": self._shares_LE, "tokens": self._tokens}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._shares_LE, self._tokens = state_dict["shares_LE"], state_dict["tokens"]


def refuse_images(reads_images: bool) -> None:
    """Refuse a vision-language model: the tokens of the blank image of a rank without images would count.

    Raises:
        ConfigError: the model reads images.
    """
    if reads_images:
        raise ConfigError(
            "router_losses: losses of the routers of a vision-language model would count blank images: leave "
            "router_losses out"
        )


class _Sums(NamedTuple):
    """Sums over the real tokens of forward passes: probabilities and choices of experts, z-loss, entropy, and 1."""

    probabilities_LE: Tensor
    choices_LE: Tensor
    z_L: Tensor
    entropy_L: Tensor
    tokens: Tensor

    def detached(self) -> _Sums:
        """Return the sums without graph, float64 on the CPU."""
        return _Sums(*(part.detach().double().cpu() for part in self))

    def plus(self, other: _Sums) -> _Sums:
        """Return the sums of both."""
        return _Sums(*(one + another for one, another in zip(self, other, strict=True)))

    def flat(self) -> Tensor:
        """Return all sums in one tensor."""
        return torch.cat([part.flatten() for part in self])

    def from_flat(self, flat: Tensor) -> _Sums:
        """Return the sums of a tensor of `flat`, in the shapes of these sums."""
        parts = flat.split([part.numel() for part in self])
        return _Sums(*(part.view_as(own) for part, own in zip(parts, self, strict=True)))


class _RouterPasses:
    """Collects the sums of the routers in forward passes with gradient.

    The hooks come after the hooks of the model engine, which gather weights again when the gradient of an output of a
    module arrives.
    """

    def __init__(self, model: nn.Module, routers: Mapping[str, ExpertRouter], installed: ExitStack) -> None:
        self._mask_M: Tensor | None = None
        self._of_layer: dict[int, _Sums] = {}
        self._collects = False
        installed.enter_context(model.register_forward_pre_hook(self._begin, with_kwargs=True))
        for layer, router in enumerate(routers.values()):
            installed.enter_context(router.module.register_forward_hook(partial(self._add, layer, router)))

    def take(self) -> _Sums:
        """Return the sums of the last forward pass, once.

        Raises:
            ConfigError: the trained parameters do not change the logits of any router.
        """
        of_layer = [self._of_layer[layer] for layer in sorted(self._of_layer)]
        self._of_layer.clear()
        self._collects = False
        if not of_layer:
            raise ConfigError("router_losses: no router has a gradient: train more layers, or leave router_losses out")
        *of_layers, tokens = zip(*of_layer, strict=True)
        return _Sums._make([*map(torch.stack, of_layers), tokens[0]])

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._of_layer.clear()
        self._collects = True
        # A packed row has no padding and no mask.
        mask = kwargs.get("attention_mask")
        self._mask_M = None if mask is None else mask.flatten()

    def _add(
        self, layer: int, router: ExpertRouter, module: nn.Module, args: tuple[Tensor, ...], output: tuple[Tensor, ...]
    ) -> None:
        logits_ME = output[router.logits].float().flatten(0, -2)
        if not logits_ME.requires_grad:
            return
        mask_M = torch.ones_like(logits_ME[:, 0]) if self._mask_M is None else self._mask_M.to(logits_ME)
        log_probabilities_ME = logits_ME.log_softmax(dim=-1)
        probabilities_ME = log_probabilities_ME.exp() * mask_M[:, None]
        # A router may choose by other scores than its logits, such as with a bias for an even load.
        shape = (len(logits_ME), router.chosen)
        own = (part.flatten(0, -2) for part in output if isinstance(part, Tensor) and part.dtype == torch.int64)
        chosen_MK = next((part_MK for part_MK in own if part_MK.shape == shape), None)
        if chosen_MK is None:
            chosen_MK = logits_ME.detach().topk(router.chosen, dim=-1).indices
        choices_ME = torch.zeros_like(logits_ME).scatter(-1, chosen_MK, 1.0)
        sums = _Sums(
            probabilities_ME.sum(dim=0),
            (choices_ME * mask_M[:, None]).sum(dim=0),
            (logits_ME.logsumexp(dim=-1).square() * mask_M).sum(),
            -(probabilities_ME * log_probabilities_ME).detach().sum(),
            mask_M.sum(),
        )
        # Gradient checkpointing runs the hook again in the backward pass, with the same operations. The sums of this
        # second pass would keep all activations.
        if self._collects:
            self._of_layer[layer] = sums
