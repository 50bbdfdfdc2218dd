"""Data modules: this rank's loaders over tokenised rows, with a train position every checkpoint restores.

Lightning keeps the train loader's state in its fit loop, but ignores this state if the checkpoint was taken at the very
end of an epoch. The data module's own state is always restored, before the loaders exist, so the data module restores
the position itself.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Required, TypedDict, TypeVar, Unpack

import numpy as np
from lightning.pytorch import LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from rl_plugins.config.data import CurriculumConfig
from rl_plugins.config.settings import AT_LEAST_1, NOT_NEGATIVE, check_ranges, or_null
from rl_plugins.data.chat_template import check_chat_template, check_template_options
from rl_plugins.data.curriculum import Curriculum
from rl_plugins.data.image_prompts import (
    ImagePromptEncoder,
    Processor,
    has_image_processor,
    load_tokenizer_or_processor,
    tokenizer_of,
)
from rl_plugins.data.loaders import BatchSource, EvalLoader, StepLoader
from rl_plugins.data.on_disk import MappedLists
from rl_plugins.data.orders import InOrder, Mixture, Order, Source, build_mixture, load_parts
from rl_plugins.data.parquet import COLUMNS, Paths, PromptRows, RowForm, RowSource
from rl_plugins.data.prompts import PromptBatch, TokenizedPrompts, build_prompts
from rl_plugins.data.reasoning import without_second_think
from rl_plugins.data.tokenization import (
    FilterOrError,
    TokenizerRefusal,
    check_end_of_sequence,
    check_round_trip,
    tokenize_responses,
    tokenizer_threads,
    within_limit,
)
from rl_plugins.errors import ConfigError, RowError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

Batch = TypeVar("Batch")


class StepOptions(TypedDict, total=False):
    """Options of every data module; `StepDataModule` describes them."""

    tokenizer: str | Processor | None
    prompts_per_step: Required[int]
    max_train_rows: int | None
    max_val_rows: int | None
    max_prompt_tokens: int
    eval_batch_size: int
    overlong_prompts: FilterOrError
    bad_images: FilterOrError
    seed: int
    shuffle: bool
    chat_template_kwargs: Mapping[str, Any] | None


class StepDataModule(LightningDataModule, Generic[Batch]):
    """Rows from parquet files or a data set, tokenised once and served step by step.

    Args:
        train: path of a parquet file, several paths, a mapping of names to `MixturePart`s, or a data set: any sequence
            of mappings with the same columns. None if there is no training.
        validation: path of a parquet file, several paths, or a data set; None for no validation.
        tokenizer: a tokenizer with a chat template, or the processor of a vision-language model, which rows with images
            need; or the folder or hub name to load the tokenizer or the processor from. By default, the tokenizer of
            the stage that the trainer runs.
        prompts_per_step: prompts of one training step, over all ranks. The rows of an epoch's incomplete last step are
            dropped.
        max_train_rows: largest number of rows for training, before rows are dropped: from all stretches of the data,
            and of a mixture by the weights of its parts; the same rows in every run. None for all rows.
        max_val_rows: largest number of rows for validation.
        max_prompt_tokens: longest prompt, in tokens, chat template included.
        eval_batch_size: largest number of prompts in a validation batch of one rank.
        overlong_prompts: "filter" drops long rows and counts the dropped rows in `dropped_prompts`; "error" raises a
            ConfigError.
        bad_images: "filter" drops rows with an image that cannot be read, "error" raises a RowError.
        seed: seed of the training order.
        shuffle: True for a random order in each epoch; False for the order of the data, such as from easy to hard.
        chat_template_kwargs: further variables for the chat template, such as `enable_thinking`.

    Attributes:
        images: maker of the inputs of images, since `setup`; None without a processor.
        dropped_prompts: number of rows left out as too long, by "train" and "validation".
        dropped_images: number of rows left out for bad images, by "train" and "validation".
        sources: tokenised rows, by "train" and "validation".
    """

    def __init__(
        self,
        train: Source | None,
        validation: Paths | RowSource | None = None,
        *,
        tokenizer: str | Processor | None = None,
        prompts_per_step: int,
        max_train_rows: int | None = None,
        max_val_rows: int | None = None,
        max_prompt_tokens: int = 1024,
        eval_batch_size: int = 64,
        overlong_prompts: FilterOrError = "filter",
        bad_images: FilterOrError = "error",
        seed: int = 0,
        shuffle: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if not shuffle and isinstance(train, Mapping):
            raise ConfigError("shuffle=False: a mixture has an order of its own: name files or a data set")
        for name, choice in {"overlong_prompts": overlong_prompts, "bad_images": bad_images}.items():
            if choice not in ("filter", "error"):
                raise ConfigError(f"{name}={choice!r}: choose 'filter' or 'error'")
        check_ranges(
            int,
            AT_LEAST_1,
            prompts_per_step=prompts_per_step,
            max_prompt_tokens=max_prompt_tokens,
            eval_batch_size=eval_batch_size,
        )
        check_ranges(int | None, or_null(AT_LEAST_1), max_train_rows=max_train_rows, max_val_rows=max_val_rows)
        check_ranges(int, NOT_NEGATIVE, seed=seed)
        self.files: dict[str, Source | None] = {"train": train, "validation": validation}
        self.tokenizer = tokenizer
        self.images: ImagePromptEncoder | None = None
        self.prompts_per_step = prompts_per_step
        self.max_rows = {"train": max_train_rows, "validation": max_val_rows}
        self.max_prompt_tokens = max_prompt_tokens
        self.eval_batch_size = eval_batch_size
        self.overlong_prompts: FilterOrError = overlong_prompts
        self.bad_images: FilterOrError = bad_images
        self.seed, self.shuffle = seed, shuffle
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        self.dropped_prompts: dict[str, int] = {}
        self.dropped_images: dict[str, int] = {}
        self.sources: dict[str, BatchSource[Any]] = {}
        self._part_starts: list[int] = []
        self._train_loader: StepLoader[Batch] | None = None
        self._state_to_load: Mapping[str, Any] | None = None

    def columns(self, split: str) -> Sequence[str]:
        """Return the columns every row of `train` or `validation` must have."""
        return COLUMNS

    def row_form(self, split: str) -> RowForm | None:
        """Return the form of the rows of `train` or `validation`, if they are no rows with prompts."""
        return None

    @abstractmethod
    def build(self, rows: PromptRows, tokenizer: PreTrainedTokenizerBase, split: str) -> BatchSource[Any]:
        """Tokenise the rows of `train` or `validation` and apply the limits.

        Raises:
            ConfigError: a row is malformed, or every row is too long.
        """

    def setup(self, stage: str | None = None) -> None:
        """Read, check and tokenise the data of the stage.

        Raises:
            ConfigError: a file is missing, a row is malformed, or every row is too long.
        """
        for split in ("train", "validation") if stage in (None, "fit") else ("validation",):
            source = self.files[split]
            if source is None or split in self.sources:
                continue
            rows, part_starts = load_parts(
                source, self.columns(split), self.row_form(split), limit=self.max_rows[split]
            )
            if split == "train":
                self._part_starts = part_starts
            if self.tokenizer is None:
                self.tokenizer = self._processor_of_stage()
            if isinstance(self.tokenizer, str):
                self.tokenizer = load_tokenizer_or_processor(self.tokenizer)
            if self.images is None and has_image_processor(self.tokenizer):
                self.images = ImagePromptEncoder(self.tokenizer, self.bad_images)
            tokenizer: PreTrainedTokenizerBase = tokenizer_of(self.tokenizer)
            check_end_of_sequence(tokenizer)
            check_chat_template(tokenizer)
            check_template_options(tokenizer, self.chat_template_kwargs)
            check_round_trip(tokenizer, (row["prompt"] for row in rows))
            bad_images = [] if self.images is None else self.images.dropped
            bad_images.clear()
            with tokenizer_threads():
                self.sources[split] = self.build(rows, tokenizer, split)
            kept = len(self.sources[split])
            self.dropped_images[split] = len(bad_images)
            too_long = self.dropped_prompts[split] = len(rows) - kept - len(bad_images)
            rank_zero_info(f"{split}: {kept} prompts, {too_long} dropped as too long")
            if bad_images:
                rank_zero_info(f"{split}: {len(bad_images)} dropped for bad images, such as {bad_images[0]}")

    def build_prompts(self, rows: PromptRows, tokenizer: PreTrainedTokenizerBase) -> TokenizedPrompts:
        """Tokenise the prompts and apply `max_prompt_tokens`.

        Raises:
            ConfigError: see `rl_plugins.data.prompts.build_prompts`.
        """
        return build_prompts(
            rows,
            tokenizer,
            template_options=self.chat_template_kwargs,
            max_prompt_tokens=self.max_prompt_tokens,
            overlong=self.overlong_prompts,
            images=self.images,
        )

    def tokenize_responses(
        self, rows: PromptRows, texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, prompts: TokenizedPrompts
    ) -> MappedLists:
        """Tokenise one response of each row, with the end of sequence.

        A response has no `<think>` at its beginning if the chat template writes `<think>` at the end of the prompt.

        Raises:
            RowError: the tokenizer refuses a response; or a response has the token of an image, which a model would
                replace by an image.
        """
        responses = (
            without_second_think(text, tokenizer, prompt_ids)
            for text, prompt_ids in zip(texts, prompts.prompt_ids, strict=True)
        )
        try:
            response_ids = tokenize_responses(responses, tokenizer)
        except TokenizerRefusal as refusal:
            raise RowError(rows.location(refusal.number), "response", str(refusal)) from None
        if self.images is not None:
            self.images.check_responses(rows, response_ids)
        return response_ids

    def within_limits(
        self, rows: PromptRows, kept: np.ndarray, response_lengths: np.ndarray, max_response_tokens: int
    ) -> np.ndarray:
        """Return the numbers of the rows with a prompt and responses within the limits, int64 [M].

        Args:
            rows: all rows.
            kept: numbers of the rows with a prompt within its limit.
            response_lengths: int64 [N], tokens of each row's longest response.
            max_response_tokens: longest response, in tokens.

        Raises:
            ConfigError: a response is longer and `overlong_prompts` is "error", or no row is left.
        """
        short = within_limit(
            rows,
            response_lengths,
            option="max_response_tokens",
            limit=max_response_tokens,
            overlong=self.overlong_prompts,
        )
        kept = np.intersect1d(kept, short, assume_unique=True)
        if not len(kept):
            raise ConfigError(
                f"every row is longer than max_prompt_tokens={self.max_prompt_tokens} or "
                f"max_response_tokens={max_response_tokens}: raise them"
            )
        return kept

    def train_dataloader(self) -> StepLoader[Batch]:
        """Return the loader of this rank's share of every step, at the position of a restored checkpoint."""
        if "train" not in self.sources:
            raise ConfigError("there is nothing to train on: set `train` to a parquet file or a data set")
        self._train_loader = StepLoader(
            self.sources["train"],
            prompts_per_step=self.prompts_per_step,
            seed=self.seed,
            order=self.order(self.sources["train"]),
            first_epoch=self._epochs_done(),
            in_flight=self._batches_in_flight,
            **self._rank_and_world_size(),
        )
        if self._state_to_load is not None:
            self._train_loader.load_state_dict(self._state_to_load)
            self._state_to_load = None
        return self._train_loader

    def order(self, source: BatchSource[Any]) -> Order | None:
        """Return the order of the training rows; None for every row once in an epoch, in a random order."""
        if isinstance(self.files["train"], Mapping):
            return self.mixture(source)
        return None if self.shuffle else InOrder(len(source), prompts_per_step=self.prompts_per_step)

    def mixture(self, source: BatchSource[Any]) -> Mixture:
        """Return the parts of the training data in their shares; data without parts is a single part."""
        train = self.files["train"]
        assert train is not None
        # Long rows are not served, so a part may have fewer rows than its files.
        firsts = np.searchsorted(source.kept, self._part_starts).tolist()
        return build_mixture(train, firsts, len(source), prompts_per_step=self.prompts_per_step, seed=self.seed)

    def val_dataloader(self) -> EvalLoader[Any] | list[Any]:
        """Return the loader of this rank's validation rows; an empty list means no validation to Lightning."""
        if "validation" not in self.sources:
            # Lightning's warning speaks of a list, and not of validation.
            warnings.filterwarnings("ignore", message="Total length of `list` across ranks is zero")
            return []
        return EvalLoader(self.sources["validation"], batch_size=self.eval_batch_size, **self._rank_and_world_size())

    def test_dataloader(self) -> EvalLoader[Any]:
        """Return the loader of this rank's validation rows: another data module has other rows for a test.

        Raises:
            ConfigError: the data module has no validation rows.
        """
        loader = self.val_dataloader()
        if isinstance(loader, list):
            raise ConfigError("trainer.test and trainer.predict read the validation rows: set `validation` to the rows")
        return loader

    def predict_dataloader(self) -> EvalLoader[Any]:
        """Return the loader of `test_dataloader`."""
        return self.test_dataloader()

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        """Return the batch unchanged: it holds Python lists, and micro-batches go to the device one at a time."""
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the training data."""
        return {} if self._train_loader is None else {"train_loader": self._train_loader.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the position of the train loader, or keep it for a loader to come. Only `Trainer.fit` continues training.

        ZeRO and FSDP2 restore late: `trainer.estimated_stepping_batches` may have made the loader.
        """
        if self.trainer is None or self.trainer.state.fn == TrainerFn.FITTING:
            self._state_to_load = state_dict["train_loader"]
            if self.trainer is not None and self.trainer.train_dataloader is self._train_loader is not None:
                self._train_loader.load_state_dict(self._state_to_load)
                self._state_to_load = None

    def _processor_of_stage(self) -> Processor:
        processor: Processor | None = getattr(self.trainer and self.trainer.lightning_module, "processor", None)
        if processor is None:
            raise ConfigError(
                f"{type(self).__name__} has no tokenizer, and no stage has a tokenizer for the rows: pass tokenizer=..."
            )
        return processor

    def _rank_and_world_size(self) -> dict[str, int]:
        if self.trainer is None:
            return {"rank": 0, "world_size": 1}
        return {"rank": self.trainer.global_rank, "world_size": self.trainer.world_size}

    def _epochs_done(self) -> int:
        progress: Any = self.trainer and self.trainer.fit_loop.epoch_progress.current
        return progress.processed if progress else 0

    def _batches_in_flight(self) -> int:
        progress: Any = self.trainer and self.trainer.fit_loop.epoch_loop.batch_progress.current
        return progress.ready - progress.processed if progress else 0


class PromptDataModule(StepDataModule[PromptBatch]):
    """Data module of prompts: a `PromptBatch` for every step and for validation.

    Args:
        train: rows for training.
        validation: rows for validation.
        curriculum: options of a curriculum, which draws prompts by the rewards of their samples so far. None for no
            curriculum. Needs a stage that samples.
        options: further options of `StepDataModule`.
    """

    def __init__(
        self,
        train: Source | None,
        validation: Paths | RowSource | None = None,
        *,
        curriculum: CurriculumConfig | None = None,
        **options: Unpack[StepOptions],
    ) -> None:
        super().__init__(train, validation, **options)
        self.curriculum = curriculum if curriculum is not None and curriculum.share else None
        if self.curriculum is not None and not self.shuffle:
            raise ConfigError("shuffle=False: a curriculum chooses the prompts: leave one of the two out")

    @override
    def order(self, source: BatchSource[Any]) -> Order | None:
        if self.curriculum is None:
            return super().order(source)
        return Curriculum(
            self.mixture(source),
            self.curriculum,
            kept=source.kept,
            prompts_per_step=self.prompts_per_step,
            seed=self.seed,
        )

    def build(self, rows: PromptRows, tokenizer: PreTrainedTokenizerBase, split: str) -> TokenizedPrompts:
        """Tokenise the prompts and apply `max_prompt_tokens`."""
        return self.build_prompts(rows, tokenizer)
