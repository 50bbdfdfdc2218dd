"""Errors of Python arguments, as errors of a recipe's options."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from rl_plugins.errors import ConfigError, DataError

STAGE_OPTIONS = {
    "num_samples": "batch.samples_per_prompt",
    "updates_per_step": "batch.updates_per_step",
    "router_replay": "model.router_replay",
    "CompiledBlocks": "model.compile",
    "LigerKernels": "model.liger",
}
"""Options for arguments of stages, and for callbacks, with other names."""


def options_in(group: str, arguments: Iterable[str]) -> dict[str, str]:
    """Return the options for arguments that have the names of options of a group."""
    return {argument: f"{group}.{argument}" for argument in arguments}


@contextmanager
def errors_with_options(options: Mapping[str, str]) -> Iterator[None]:
    """Name options in place of arguments in an error: at its beginning, and in the way out.

    Ways out are `raise ARGUMENT` at the end, and `leave ARGUMENT out`.

    Args:
        options: option for each argument.

    Raises:
        ConfigError: the context raised one.
        DataError: the context raised one.
    """
    named = re.compile(rf"(?P<before>^|raise |leave )(?P<name>{'|'.join(options)})(?=[=:]|$| out)")
    try:
        yield
    except (ConfigError, DataError) as error:
        message = named.sub(lambda found: found["before"] + options[found["name"]], str(error))
        if message == str(error):
            raise
        raise (DataError if isinstance(error, DataError) else ConfigError)(message) from None
