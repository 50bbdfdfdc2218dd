"""Errors of Python arguments, as errors of a recipe's options."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rl_plugins.errors import ConfigError


@contextmanager
def errors_with_options(arguments: Sequence[str], *, group: str) -> Iterator[None]:
    """Name options in place of arguments in a ConfigError: at its beginning, and in the way out.

    Ways out are `or raise ARGUMENT` at the end, and `leave ARGUMENT out`.

    Args:
        arguments: names of the arguments, which are also names of the options.
        group: group of the options.

    Raises:
        ConfigError: the context raised one.
    """
    named = re.compile(rf"(?P<before>^|or raise |leave )(?P<name>{'|'.join(arguments)})(?=[=:]|$| out)")
    try:
        yield
    except ConfigError as error:
        raise ConfigError(named.sub(rf"\g<before>{group}.\g<name>", str(error))) from None
