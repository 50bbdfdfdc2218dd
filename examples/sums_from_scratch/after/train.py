"""Train a small Llama from scratch on sums such as 12+7=19. See README.md."""

from __future__ import annotations

import random
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import rl_plugins as rl

Sum = tuple[str, str]
"""Question and answer, such as 12+7= and 19."""
OPTIONS: dict[str, Any] = {"accelerator": "cpu", "enable_checkpointing": False, "log_every_n_steps": 1}


def character_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each character."""
    characters = Tokenizer(models.WordLevel({token: i for i, token in enumerate(["<end>", *"0123456789+="])}))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=characters, eos_token="<end>", pad_token="<end>")


class Llama(LightningModule):
    """Small Llama with next-token loss."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, lr: float) -> None:
        super().__init__()
        self.lr = lr
        sizes: Any = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=16, initializer_range=0.1, **sizes)
        self.model = LlamaForCausalLM(config)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=self.lr)


class Sums(LightningDataModule):
    """Texts of sums for training, and other sums for validation."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        sums: Any = [(f"{a}+{b}=", str(a + b)) for a in range(10) for b in range(10)]
        random.Random(0).shuffle(sums)
        self.train, self.val = sums[:80], sums[80:]

    def train_dataloader(self) -> DataLoader[Sum]:
        return DataLoader(self.train, batch_size=40, shuffle=True, collate_fn=self.collate)

    def val_dataloader(self) -> DataLoader[Sum]:
        return DataLoader(self.val, batch_size=40, collate_fn=self.collate)

    def collate(self, sums: list[Sum]) -> dict[str, Tensor]:
        texts = [question + answer + self.tokenizer.eos_token for question, answer in sums]
        batch = self.tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False)
        return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def right_answer(solution_str: str, ground_truth: str) -> float:
    return float(solution_str == ground_truth)


def main() -> None:
    seed_everything(0)
    tokenizer = character_tokenizer()
    llama, sums = Llama(tokenizer, lr=3e-3), Sums(tokenizer)
    trainer = Trainer(max_epochs=8, logger=CSVLogger("logs", "sft"), **OPTIONS)
    trainer.fit(llama, datamodule=sums)
    llama.lr = 1e-3
    plain, sampling = rl.with_plain_template(tokenizer), rl.SamplingConfig(max_tokens=4, num_samples=8)
    policy = rl.PolicyOptimization(llama, tokenizer=plain, scorer=right_answer, sampling=sampling)
    rows = [[rl.prompt_row(*question_and_answer) for question_and_answer in part] for part in (sums.train, sums.val)]
    prompts = rl.PromptDataModule(*rows, prompts_per_step=40)
    strategy = rl.SingleDeviceRolloutStrategy()
    trainer = Trainer(max_epochs=30, strategy=strategy, logger=CSVLogger("logs", "rl"), **OPTIONS)
    trainer.fit(policy, datamodule=prompts)
    policy.export("model")


if __name__ == "__main__":
    main()
