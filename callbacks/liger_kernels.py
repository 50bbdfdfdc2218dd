"""Kernels of the library Liger in the models of a stage."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from rl_plugins.models.liger import use_liger
from rl_plugins.models.remote import local_models
from rl_plugins.strategies.contract import HasNamedModels


class LigerKernels(Callback):
    """Replaces norms, rotary positions, MLPs and output heads of all models of a stage at the start of training.

    The output head is Liger's fused linear cross-entropy wherever a stage needs log-probs alone at temperature 1: in
    supervised fine-tuning, preference losses and process rewards, and for reference and teacher. The policy of policy
    optimization keeps the head of this package, which computes the entropy, too.
    """

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, HasNamedModels)
        for name, model in local_models(pl_module.named_models()).items():
            use_liger(model, name)
