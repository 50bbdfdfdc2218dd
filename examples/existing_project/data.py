"""Questions and answers from parquet files."""

from __future__ import annotations

from typing import Any

import pyarrow.parquet as pq
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoTokenizer


class QuestionAnswerData(LightningDataModule):
    """Chat-formatted examples with a loss on the answer only. `batch_size` is the batch size of one worker."""

    def __init__(self, train_file: str, val_file: str, tokenizer: str, batch_size: int = 16) -> None:
        super().__init__()
        self.train_file, self.val_file, self.batch_size = train_file, val_file, batch_size
        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer)

    def train_dataloader(self) -> DataLoader:
        return self._loader(self.train_file, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return self._loader(self.val_file, shuffle=False)

    def _loader(self, file: str, shuffle: bool) -> DataLoader:
        rows = pq.read_table(file, columns=["prompt", "reward_model"]).to_pylist()
        return DataLoader(rows, self.batch_size, shuffle=shuffle, collate_fn=self._collate, drop_last=shuffle)

    def _collate(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        chat = self.tokenizer.apply_chat_template
        questions = [chat(r["prompt"], add_generation_prompt=True, return_dict=False) for r in rows]
        answers = [self.tokenizer.encode(r["reward_model"]["ground_truth"] + self.tokenizer.eos_token) for r in rows]
        width = max(len(q) + len(a) for q, a in zip(questions, answers, strict=True))
        input_ids = torch.full((len(rows), width), self.tokenizer.pad_token_id)
        attention_mask = torch.zeros_like(input_ids)
        labels = torch.full_like(input_ids, -100)
        for i, (question, answer) in enumerate(zip(questions, answers, strict=True)):
            length = len(question) + len(answer)
            input_ids[i, :length] = torch.tensor(question + answer)
            attention_mask[i, :length] = 1
            labels[i, len(question) : length] = torch.tensor(answer)
        return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
