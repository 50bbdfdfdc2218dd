"""Options of the data: files, mixtures, and what is taken of them for a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class MixtureOptions:
    """A part of the training data.

    Attributes:
        files: its parquet files.
        weight: its share of the prompts of every step, as a number that is compared with the other parts'.
    """

    files: list[str] = field(default_factory=list)
    weight: float = 1.0


@dataclass
class CurriculumOptions:
    """Prompts that the policy sometimes solves come more often (stages that sample).

    Attributes:
        share: of a step's prompts that is drawn by the variance of the rewards seen so far; 0 is off.
        keep: of what is known of a prompt when its next group comes; 0 believes the last group alone.
    """

    share: float = 0.0
    keep: float = 0.5


@dataclass
class DataConfig:
    """The prompts.

    Attributes:
        train_files: parquet files with the columns prompt, data_source, ability, reward_model, extra_info.
        mixture: in place of `train_files`, parts in given shares: a mapping of names to `files` and `weight`.
        curriculum: prompts by their difficulty; off by default.
        val_files: parquet files for validation; may be empty.
        max_prompt_tokens: longest prompt.
        overlong_prompts: `filter` drops longer ones and says how many, `error` refuses them.
        eval_batch_size: prompts of one validation batch on one rank.
        response_key: where SFT finds the response of a row, and unpaired preferences theirs.
        chosen_key: where a pair has its better response.
        rejected_key: where it has the worse one.
        margin_key: where it has by how much the better one is better; null if it does not say.
        label_key: of unpaired preferences, where a row says whether its response is good; null for pairs.
        steps_key: where a process reward model finds the steps of a response.
        labels_key: where it finds their labels.
        dataset: a custom data set instead of `train_files`: a node with `_target_`.
    """

    train_files: list[str] = field(default_factory=list)
    mixture: Any = None
    curriculum: CurriculumOptions = field(default_factory=CurriculumOptions)
    val_files: list[str] = field(default_factory=list)
    max_prompt_tokens: int = 512
    overlong_prompts: str = "filter"
    eval_batch_size: int = 256
    response_key: str = "reward_model.ground_truth"
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    margin_key: str | None = None
    label_key: str | None = None
    steps_key: str = "extra_info.steps"
    labels_key: str = "extra_info.labels"
    dataset: Any = None


@dataclass
class BatchConfig:
    """Three numbers, and how often the optimizer steps.

    Attributes:
        prompts_per_step: prompts of one step, over all workers.
        samples_per_prompt: responses to each prompt.
        tokens_per_micro_batch: tokens of one forward and backward pass on one worker: real ones with `packing`, padded
            ones without.
        packing: the samples of a micro-batch go through the models as one row without padding, a prompt only once for
            all its samples; false for a model that lets samples in a row see each other.
        updates_per_step: optimizer steps of one pass over the samples of a step.
        passes_per_step: passes over the samples of a step.
    """

    prompts_per_step: int = 32
    samples_per_prompt: int = 8
    tokens_per_micro_batch: int = 16384
    packing: bool = True
    updates_per_step: int = 1
    passes_per_step: int = 1
