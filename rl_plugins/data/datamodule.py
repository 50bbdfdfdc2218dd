"""What the data modules share: this rank's loaders, and a train position that every checkpoint restores.

Lightning keeps the train loader's state in its fit loop, but ignores it when the checkpoint was taken at the
very end of an epoch. The data module's own state is always restored, and before the loaders are made: it
decides.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info

from rl_plugins.data.mixture import Source, load_parts, mixed
from rl_plugins.data.orders import Mixture, Order
from rl_plugins.data.parquet import COLUMNS, Paths, PromptRows, RowSource
from rl_plugins.data.sampler import BatchSource, EvalLoader, StepLoader
from rl_plugins.data.tokenization import Overlong, check_chat_template, load_tokenizer
from rl_plugins.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

Batch = TypeVar("Batch")


class StepDataModule(LightningDataModule, Generic[Batch]):
    """Rows from parquet files or a data set, tokenised once and served step by step."""

    def __init__(
        self,
        train: Source | None,
        validation: Paths | RowSource | None = None,
        *,
        tokenizer: str | PreTrainedTokenizerBase,
        prompts_per_step: int,
        eval_batch_size: int = 64,
        overlong_prompts: Overlong = "filter",
        seed: int = 0,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Set the options.

        Args:
            train: path of a parquet file, several paths, a mapping of names to `MixturePart`s, or a data set: any
                sequence of mappings with the same columns.
            validation: the same, or None for no validation.
            tokenizer: a tokenizer with a chat template, or the folder or hub name to load it from.
            prompts_per_step: prompts of one training step, over all ranks; the rows of an epoch's incomplete
                last step are dropped.
            eval_batch_size: largest number of prompts in a validation batch of one rank.
            overlong_prompts: "filter" drops the rows that are too long and counts them in `dropped_prompts`;
                "error" refuses them.
            seed: seed of the training order.
            chat_template_kwargs: further variables for the chat template, such as `enable_thinking`.
        """
        super().__init__()
        if overlong_prompts not in ("filter", "error"):
            raise ConfigError(f"overlong_prompts={overlong_prompts!r}: choose 'filter' or 'error'.")
        self.files: dict[str, Source | None] = {"train": train, "validation": validation}
        self.tokenizer = tokenizer
        self.prompts_per_step = prompts_per_step
        self.eval_batch_size = eval_batch_size
        self.overlong_prompts: Overlong = overlong_prompts
        self.seed = seed
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        self.dropped_prompts: dict[str, int] = {}
        self.sources: dict[str, BatchSource[Any]] = {}
        self._firsts: list[int] = []
        self._train_loader: StepLoader[Batch] | None = None
        self._state_to_load: Mapping[str, Any] | None = None

    def columns(self, split: str) -> Sequence[str]:
        """The columns that the rows of `train` or `validation` must have."""
        return COLUMNS

    @abstractmethod
    def build(self, rows: PromptRows, tokenizer: PreTrainedTokenizerBase, split: str) -> BatchSource[Any]:
        """Tokenise the rows of `train` or `validation` and drop those that are too long, as `overlong_prompts` says."""

    def setup(self, stage: str | None = None) -> None:
        """Read, check and tokenise what the stage needs.

        Raises:
            ConfigError: a file or a row is at fault, or every row is too long.
        """
        for split in ("train", "validation") if stage in (None, "fit") else ("validation",):
            source = self.files[split]
            if source is None or split in self.sources:
                continue
            rows, firsts = load_parts(source, self.columns(split))
            if split == "train":
                self._firsts = firsts
            if isinstance(self.tokenizer, str):
                self.tokenizer = load_tokenizer(self.tokenizer)
            check_chat_template(self.tokenizer)
            self.sources[split] = self.build(rows, self.tokenizer, split)
            kept = len(self.sources[split])
            self.dropped_prompts[split] = len(rows) - kept
            rank_zero_info(f"{split}: {kept} prompts, {self.dropped_prompts[split]} dropped as too long")

    def train_dataloader(self) -> StepLoader[Batch]:
        """Return the loader of this rank's share of every step, continuing a restored checkpoint."""
        if "train" not in self.sources:
            raise ConfigError("There is nothing to train on: set `train` to a parquet file or a data set.")
        self._train_loader = StepLoader(
            self.sources["train"],
            prompts_per_step=self.prompts_per_step,
            seed=self.seed,
            order=self.order(self.sources["train"]),
            first_epoch=self._epochs_done(),
            in_flight=self._batches_in_flight,
            **self._place(),
        )
        if self._state_to_load is not None:
            self._train_loader.load_state_dict(self._state_to_load)
            self._state_to_load = None
        return self._train_loader

    def order(self, source: BatchSource[Any]) -> Order | None:
        """Which rows the steps take; None is every row once in an epoch, in a random order."""
        return self.mixture(source) if isinstance(self.files["train"], Mapping) else None

    def mixture(self, source: BatchSource[Any]) -> Mixture:
        """The parts of the training data in their shares; all of it as a single part where none are named."""
        train = self.files["train"]
        assert train is not None
        # Rows that are too long are not served, so a part may have fewer than its files.
        firsts = np.searchsorted(source.kept, self._firsts).tolist()
        return mixed(train, firsts, len(source), prompts_per_step=self.prompts_per_step, seed=self.seed)

    def val_dataloader(self) -> EvalLoader[Any] | list[Any]:
        """Return the loader of this rank's validation rows; an empty list tells Lightning of none."""
        if "validation" not in self.sources:
            return []
        return EvalLoader(self.sources["validation"], batch_size=self.eval_batch_size, **self._place())

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        """Leave it: batches are token ids in Python lists, and micro-batches go to the device one at a time."""
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the training data."""
        return {} if self._train_loader is None else {"train_loader": self._train_loader.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the position for the train loader, which does not exist yet."""
        self._state_to_load = state_dict["train_loader"]

    def _place(self) -> dict[str, int]:
        if self.trainer is None:
            return {"rank": 0, "world_size": 1}
        return {"rank": self.trainer.global_rank, "world_size": self.trainer.world_size}

    def _epochs_done(self) -> int:
        progress: Any = self.trainer and self.trainer.fit_loop.epoch_progress.current
        return progress.processed if progress else 0

    def _batches_in_flight(self) -> int:
        progress: Any = self.trainer and self.trainer.fit_loop.epoch_loop.batch_progress.current
        return progress.ready - progress.processed if progress else 0
