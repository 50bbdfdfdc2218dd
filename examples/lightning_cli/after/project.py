"""Model and data of the project: answers to questions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer


class ChatModel(LightningModule):
    """Chat model with a loss on the answers. The trained model is a folder of Hugging Face.

    Args:
        path: name or folder of the model at first.
        output: folder for the trained model.
        lr: learning rate.
    """

    def __init__(self, path: str, output: str, lr: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train()
        self.tokenizer = AutoTokenizer.from_pretrained(path)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=self.hparams["lr"])

    def on_fit_end(self) -> None:
        self.model.save_pretrained(self.hparams["output"])
        self.tokenizer.save_pretrained(self.hparams["output"])


class ChatData(LightningDataModule):
    """Questions with answers, as chats.

    Args:
        train: file of JSON lines with `question` and `answer`.
        validation: the same, for validation.
        tokenizer: name or folder of the tokenizer.
        batch_size: number of chats in a step.
    """

    def __init__(self, train: str, validation: str, tokenizer: str, batch_size: int) -> None:
        super().__init__()
        self.train, self.validation, self.batch_size = train, validation, batch_size
        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer)

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.train, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.validation, shuffle=False)

    def _loader(self, file: str, shuffle: bool) -> DataLoader[Any]:
        rows: Any = [json.loads(line) for line in Path(file).read_text().splitlines()]
        return DataLoader(rows, self.batch_size, shuffle=shuffle, collate_fn=self._collate)

    def _collate(self, rows: list[dict[str, str]]) -> dict[str, Tensor]:
        roles = {"question": "user", "answer": "assistant"}
        chats = [[{"role": role, "content": row[name]} for name, role in roles.items()] for row in rows]
        batch: Any = self.tokenizer.apply_chat_template(
            chats, return_dict=True, return_tensors="pt", padding=True, return_assistant_tokens_mask=True
        )
        of_answer = batch.pop("assistant_masks")
        return {**batch, "labels": batch["input_ids"].masked_fill(of_answer == 0, -100)}


def right_answer(solution_str: str, ground_truth: str) -> float:
    return float(solution_str == ground_truth)
