"""Errors of Python arguments, as errors of a recipe's options.

The library names the arguments of its classes, because a user of Python reads its errors. A user of a recipe sets
options, so a run replaces the names. Messages that name both, such as `max_steps (in a recipe: run.steps)`, stay.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from rl_plugins.errors import ConfigError, DataError, RowError


def options_in(group: str, arguments: Iterable[str]) -> dict[str, str]:
    """Return the options for arguments that have the names of options of a group."""
    return {argument: f"{group}.{argument}" for argument in arguments}


_BATCH = (
    "packing", "passes_per_step", "patches_per_micro_batch", "prompts_per_step", "tokens_per_log_prob_batch",
    "tokens_per_micro_batch", "updates_per_step",
)  # fmt: skip
_DATA = (
    "bad_images", "chat_template_kwargs", "chosen_key", "curriculum", "eval_batch_size", "label_key", "labels_key",
    "margin_key", "max_prompt_tokens", "max_train_rows", "max_val_rows", "messages_key", "overlong_prompts",
    "rejected_key", "response_key", "split_conversations", "steps_key", "tools_key",
)  # fmt: skip
_MODEL = (
    "attention",
    "float8",
    "gradient_checkpointing",
    "lora",
    "router_losses",
    "router_replay",
    "trust_remote_code",
)
_MODELS = ("cost_critic", "cost_model", "critic", "process_reward_model", "reference", "reward_model", "teacher")
_STRATEGY = ("accumulate_shards", "expert_parallel", "sequence_parallel", "tensor_parallel", "workers_per_copy")

RUN_OPTIONS = {
    **options_in("batch", _BATCH),
    **options_in("data", _DATA),
    **options_in("model", _MODEL),
    **{argument: f"{argument}.path" for argument in _MODELS},
    **options_in("strategy", _STRATEGY),
    "constraint.cost": "algorithm.constraint.cost",
    "lora.dropout": "model.lora.dropout",
    "loss": "loss.name",
    "loss_options": "loss.options",
    "max_response_tokens": "sampling.max_tokens",
    "max_steps": "run.steps",
    "num_samples": "batch.samples_per_prompt",
    "sampling.num_samples": "batch.samples_per_prompt",
    "offload": "strategy.offload",
    "offload_folder": "strategy.offload.folder",
    "scorer": "reward",
    "seed": "run.seed",
    "shuffle": "data.shuffle",
    "timeout_s": "strategy.collective_timeout_s",
    "train": "data.train_files",
    "validation": "data.val_files",
    "CompiledBlocks": "model.compile",
    "LigerKernels": "model.liger",
    "RouterLosses": "model.router_losses",
}
"""Options of a run for the arguments of stages, data modules and strategies, and for callbacks."""


@contextmanager
def errors_with_options(options: Mapping[str, str]) -> Iterator[None]:
    """Name options in place of arguments in an error.

    Args:
        options: option for each argument.

    Raises:
        ConfigError: the context raised one.
        DataError: the context raised one.
    """
    try:
        yield
    # A row is data of the user, which may contain any name.
    except RowError:
        raise
    except (ConfigError, DataError) as error:
        message = with_options(str(error), options)
        if message == str(error):
            raise
        raise (DataError if isinstance(error, DataError) else ConfigError)(message) from None


def with_options(message: str, options: Mapping[str, str]) -> str:
    """Return a message with options in place of arguments.

    A name such as `num_samples` is an argument everywhere. A name such as `packing`, which is also a word, is an
    argument in `packing=...`, in `leave packing out`, in backticks, and before a colon at the beginning.

    Args:
        message: message of the library.
        options: option for each argument.
    """
    if "in a recipe" in message or "Python: " in message:
        return message
    words = _any_of(name for name in options if name.isalpha() and name.islower())
    names = _any_of(name for name in options if not (name.isalpha() and name.islower()))
    argument = re.compile(
        # Dotted names, paths and quoted data are no arguments.
        rf"(?<![\w./'])(?:(?P<name>{names})(?!\.?\w|')|(?P<word>{words})(?==))(?P<record>=\w+\(path=\.\.\.\))?"
        rf"|^(?P<first>{words})(?=: )|(?<=leave )(?P<left>{words})(?= out)|(?<=`)(?P<quoted>{words})(?=`)"
    )

    def option(found: re.Match[str]) -> str:
        (name,) = filter(None, (found[group] for group in ("name", "word", "first", "left", "quoted")))
        return options[name] + ("=..." if found["record"] else "")

    return argument.sub(option, message)


def _any_of(names: Iterable[str]) -> str:
    return "|".join(sorted(map(re.escape, names), key=len, reverse=True)) or "(?!)"
