"""Language model of the project."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup


class LanguageModel(LightningModule):
    """Causal language model with next-token loss, AdamW and a cosine schedule."""

    def __init__(self, path: str, lr: float = 1e-4, weight_decay: float = 0.01, warmup_steps: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        # No weight decay for norms and biases.
        matrices = [p for p in self.model.parameters() if p.ndim >= 2]
        vectors = [p for p in self.model.parameters() if p.ndim < 2]
        groups = [
            {"params": matrices, "name": "matrices", "weight_decay": self.hparams["weight_decay"]},
            {"params": vectors, "name": "vectors", "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams["lr"])
        total_steps = int(self.trainer.estimated_stepping_batches)
        scheduler = get_cosine_schedule_with_warmup(optimizer, self.hparams["warmup_steps"], total_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
