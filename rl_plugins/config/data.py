"""Settings of the data: files, mixtures, the curriculum, and the sizes of a step."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from rl_plugins.config.settings import (
    ABOVE_0,
    AT_LEAST_1,
    FROM_0_TO_BELOW_1,
    NODE_OR_FILE_OR_NULL,
    Range,
    Settings,
    one_of,
    or_null,
)
from rl_plugins.errors import ConfigError
from rl_plugins.text_file import read_text

_FILES = Range(
    "must be a parquet file, or a list of one or more",
    lambda value: isinstance(value, str | os.PathLike) or (isinstance(value, Sequence) and len(value) > 0),
)


@dataclass
class MixturePart(Settings):
    """One part of a mixture.

    Attributes:
        files: path of a parquet file, or paths of several.
        weight: weight of the part; its share of the prompts of every step is the weight divided by the sum of all
            weights.
    """

    files: Annotated[Any, _FILES] = ()
    weight: Annotated[float, ABOVE_0] = 1.0

    @property
    def paths(self) -> Sequence[str | os.PathLike[str]]:
        """Paths of the files as a sequence."""
        return [self.files] if isinstance(self.files, str | os.PathLike) else self.files


@dataclass
class CurriculumConfig(Settings):
    """Curriculum: prompts with both good and bad responses come more often (stages with sampling).

    Attributes:
        share: share of a step's prompts drawn by the variance of the rewards seen so far; 0 is off.
        keep: weight of a prompt's earlier groups when a new group of the prompt is observed. With 0 only the last group
            counts; 0.9 averages over about ten groups.
    """

    share: Annotated[float, FROM_0_TO_BELOW_1] = 0.5
    keep: Annotated[float, FROM_0_TO_BELOW_1] = 0.5


@dataclass
class DataConfig(Settings):
    """Prompts of training and validation.

    Attributes:
        train_files: parquet files with the columns prompt, data_source, ability, reward_model, extra_info: paths,
            addresses in storage, or `hf://datasets/OWNER/NAME[@REVISION]/PATH` on the Hugging Face hub.
        mixture: replaces `train_files` by parts in given shares: a mapping of names to `files` and `weight`.
        curriculum: prompts by their difficulty; off by default.
        val_files: parquet files for validation; may be empty.
        max_train_rows: largest number of rows for training, from all stretches of the files, the same rows in every
            run; null for all rows.
        max_val_rows: largest number of rows for validation, such as 200 of a large benchmark; null for all rows.
        max_prompt_tokens: longest prompt, in tokens.
        overlong_prompts: `filter` drops longer prompts and prints their number, `error` refuses the data.
        bad_images: `filter` drops rows with an image that cannot be read and prints their number, `error` refuses the
            data.
        shuffle: train on the rows in a random order in each epoch; `false` keeps the order of the files.
        chat_template: Jinja template of messages in place of the template of the policy's tokenizer: a file that ends
            in `.jinja`, or the text. config.yaml has the text, and an exported policy has the template.
        chat_template_kwargs: further variables of the chat template, such as `enable_thinking`.
        eval_batch_size: prompts of one validation batch on one rank.
        response_key: column of the response in rows for SFT, and in rows of unpaired preferences.
        messages_key: column of a whole conversation, such as `messages`, in rows for SFT, in place of a prompt and a
            response; null if there is none.
        tools_key: column of the JSON schemas of the tools of a conversation; rows may lack the column.
        split_conversations: make a sample of its own of a reply if the chat template writes the reply otherwise once
            messages follow, for example without its reasoning; false refuses such conversations.
        validate_on: validation of SFT and of preferences: `prompts` samples responses to prompts, for rewards;
            `responses` measures `val/loss` on rows like the training rows.
        chosen_key: column of the better response of a pair.
        rejected_key: column of the worse response of a pair.
        margin_key: column of the margin between the two responses of a pair; null if there is none.
        label_key: column with the label (good or bad) of an unpaired preference; null for pairs.
        steps_key: column of the steps of a response, for a process reward model.
        labels_key: column of the labels of the steps, for a process reward model.
        dataset: replaces `train_files` by a custom data set: a node with `_target_`, or `path` and `name`
            of a class or function of a file, with further arguments.
    """

    train_files: list[str] = field(default_factory=list)
    mixture: Any = None
    curriculum: CurriculumConfig = field(default_factory=lambda: CurriculumConfig(share=0.0))
    val_files: list[str] = field(default_factory=list)
    max_train_rows: Annotated[int | None, or_null(AT_LEAST_1)] = None
    max_val_rows: Annotated[int | None, or_null(AT_LEAST_1)] = None
    max_prompt_tokens: Annotated[int, AT_LEAST_1] = 512
    overlong_prompts: Annotated[str, one_of("filter", "error")] = "filter"
    bad_images: Annotated[str, one_of("filter", "error")] = "error"
    shuffle: bool = True
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    eval_batch_size: Annotated[int, AT_LEAST_1] = 256
    response_key: str = "reward_model.ground_truth"
    messages_key: str | None = None
    tools_key: str = "tools"
    split_conversations: bool = False
    validate_on: Annotated[str, one_of("prompts", "responses")] = "prompts"
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    margin_key: str | None = None
    label_key: str | None = None
    steps_key: str = "extra_info.steps"
    labels_key: str = "extra_info.labels"
    dataset: Annotated[Any, NODE_OR_FILE_OR_NULL] = None

    def __post_init__(self) -> None:
        """Check the settings, and read the file of the chat template.

        Raises:
            ConfigError: a setting is out of range, or the chat template is no template or no readable file.
        """
        super().__post_init__()
        if self.chat_template is not None:
            self.chat_template = _template_text(self.chat_template)

    @property
    def training_files(self) -> list[str]:
        """Files with the rows of training: `train_files`, or the files of `mixture`; none with `dataset`."""
        if self.dataset is not None:
            return []
        parts = (self.mixture or {}).values()
        return [os.fspath(path) for part in parts for path in part.paths] or list(self.train_files)

    def replace_files(self, new: Callable[[str, str], Sequence[str]]) -> None:
        """Replace the path of each file. Files of training that `dataset` replaces stay as they are.

        Args:
            new: function of an option and a path; returns the new paths.
        """

        def replaced(option: str, paths: Sequence[str | os.PathLike[str]]) -> list[str]:
            return [path for old in paths for path in new(option, os.fspath(old))]

        self.val_files = replaced("data.val_files", self.val_files)
        if self.dataset is not None:
            return
        self.train_files = replaced("data.train_files", self.train_files)
        for name, part in (self.mixture or {}).items():
            part.files = replaced(f"data.mixture.{name}.files", part.paths)


def _template_text(template: str) -> str:
    """Return the text of a chat template, which is a text, or a file that ends in `.jinja`."""
    if template.endswith(".jinja"):
        option = f"chat_template={template}"
        if not Path(template).is_file():
            raise ConfigError(f"{option}: there is no such file: name a file with a Jinja template")
        template = read_text(Path(template), "name a file with a Jinja template")
    else:
        option = f"chat_template={template[:40]!r}"
    if "{" not in template or "${" in template:
        raise ConfigError(
            f"{option}: a Jinja template writes messages with {{{{ ... }}}}, and has no ${{ here: name a file that "
            "ends in .jinja, or correct the text"
        )
    return template


@dataclass
class BatchConfig(Settings):
    """Sizes of a step, and its number of optimizer steps.

    Attributes:
        prompts_per_step: prompts of one step, over all workers.
        samples_per_prompt: responses to each prompt.
        tokens_per_micro_batch: tokens of one forward and backward pass on one worker, without padding if `packing` is
            true.
        tokens_per_log_prob_batch: tokens of one forward pass without gradient (log-probs, values, scores of models),
            which needs less memory; null is `tokens_per_micro_batch`.
        patches_per_micro_batch: largest number of image patches in one pass of a vision-language model, which limits
            the memory of the vision tower. A prompt with more patches gets passes of its own; null bounds tokens alone.
        packing: send the samples of a micro-batch through the models as one row without padding, with a prompt once for
            all its samples; false for a model whose samples see each other in a row.
        updates_per_step: optimizer steps of one pass over the samples of a step. A step has
            `updates_per_step * passes_per_step` optimizer steps.
        passes_per_step: passes over the samples of a step.
    """

    prompts_per_step: Annotated[int, AT_LEAST_1] = 32
    samples_per_prompt: Annotated[int, AT_LEAST_1] = 8
    tokens_per_micro_batch: Annotated[int, AT_LEAST_1] = 16384
    tokens_per_log_prob_batch: Annotated[int | None, or_null(AT_LEAST_1)] = None
    patches_per_micro_batch: Annotated[int | None, or_null(AT_LEAST_1)] = None
    packing: bool = True
    updates_per_step: Annotated[int, AT_LEAST_1] = 1
    passes_per_step: Annotated[int, AT_LEAST_1] = 1

    def in_words(self, workers: int, *, samples: bool) -> str:
        """Return the sizes of a step in words.

        Args:
            workers: number of training workers.
            samples: True if the stage samples responses to prompts; False if the data has the responses.
        """
        prompts = self.prompts_per_step
        limit = f"in micro-batches of up to {self.tokens_per_micro_batch} tokens"
        if not samples:
            return f"{prompts} examples, {prompts // workers} on each of {workers} workers, {limit}"
        count = prompts * self.samples_per_prompt
        passes = f"{self.passes_per_step} passes of " if self.passes_per_step > 1 else ""
        return (
            f"{prompts} prompts x {self.samples_per_prompt} samples = {count} samples, {count // workers} on each of "
            f"{workers} workers, {passes}{self.updates_per_step} optimizer step(s) of "
            f"{count // self.updates_per_step} samples, {limit}"
        )
