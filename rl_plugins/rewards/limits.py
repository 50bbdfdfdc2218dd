"""Environment and memory of a process with rewards or tools.

Rewards may run code written by the policy. A worker therefore gets no variable of the environment with a secret, unless
`pass_env` names the variable, and may take a limited amount of memory. Neither is a sandbox: the worker runs as the
same user, with the user's files and network.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rl_plugins.errors import ConfigError
from rl_plugins.redaction import is_secret, without_password

# Names beside the names of `is_secret`. TOKENIZERS_PARALLELISM holds no token.
_FURTHER_NAME = re.compile(r"token(?!iz)|^AWS_|^SSH_AUTH_SOCK$", re.IGNORECASE)
_MIB = 2**20
_CGROUP = Path("/sys/fs/cgroup")


def withheld_names(environment: Mapping[str, str], pass_env: Sequence[str]) -> list[str]:
    """Return the names of variables with secrets, judged by their names, or by an address with a secret.

    Args:
        environment: variables by name.
        pass_env: names of further variables for rewards.
    """
    return [
        name
        for name, value in environment.items()
        if name not in pass_env and (is_secret(name) or _FURTHER_NAME.search(name) or without_password(value) != value)
    ]


@dataclass(frozen=True)
class WorkerLimits:
    """Limits of a reward worker. The record travels to the worker.

    Attributes:
        pass_env: names of variables with secrets for the worker.
        values: values of these variables in the process of the pool.
        memory_mb: memory of the worker beyond a worker without rewards, in MiB. None is half of the free memory at
            the worker's start.
        option: name of the option or argument with `pass_env`, for messages.
        keys: names of variables with the keys of judges, which a worker gets if they exist.
    """

    pass_env: Sequence[str] = ()
    values: Mapping[str, str] = field(default_factory=dict, repr=False)
    memory_mb: int | None = None
    option: str = "reward.pass_env"
    keys: Sequence[str] = ()

    @classmethod
    def of(
        cls,
        pass_env: Sequence[str],
        memory_mb: int | None,
        option: str = "reward.pass_env",
        keys: Sequence[str] = (),
    ) -> WorkerLimits:
        """Return the limits with the values in the environment of this process."""
        values = {name: os.environ[name] for name in (*pass_env, *keys) if name in os.environ}
        return cls(tuple(pass_env), values, memory_mb, option, tuple(keys))

    @property
    def passed(self) -> list[str]:
        """Names of all variables with secrets for the worker."""
        return [*self.pass_env, *self.keys]

    def clean(self, environment: MutableMapping[str, str]) -> None:
        """Remove secrets from an environment, and add the passed variables.

        Raises:
            ConfigError: a passed variable exists nowhere.
        """
        for name in withheld_names(environment, self.passed):
            del environment[name]
        environment.update(self.values)
        missing = [name for name in self.pass_env if name not in environment]
        if missing:
            in_python = "" if self.option == "pass_env" else " (in Python: pass_env)"
            raise ConfigError(
                f"{self.option}=[{', '.join(self.pass_env)}]{in_python}: the environment has no "
                f"{', '.join(missing)}: set the variable before the start, or leave it out"
            )

    def limit_memory(self, later_bytes: int = 0) -> None:
        """Limit the memory of this process from now on. A larger allocation fails with a MemoryError.

        Args:
            later_bytes: bytes by which the process may raise its limit later, for memory of its own.
        """
        mib = self.memory_mb if self.memory_mb is not None else _free_bytes() // (2 * _MIB)
        limit, (_, most) = _private_bytes() + mib * _MIB, resource.getrlimit(resource.RLIMIT_DATA)
        # Only root may raise a hard limit, such as one of `ulimit -d`.
        limits = (at_most(limit, most), at_most(limit + later_bytes, most))
        resource.setrlimit(resource.RLIMIT_DATA, limits)


def at_most(limit: int, most: int) -> int:
    """Return a limit in bytes, or the hard limit `most` if the hard limit is lower."""
    return min(limit, 2**63 - 1 if most == resource.RLIM_INFINITY else most)


def _private_bytes() -> int:
    """Return the private writable memory of this process, counted by the kernel for RLIMIT_DATA."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == "VmData":
            return int(value.split()[0]) * 1024
    return 0


def _free_bytes() -> int:
    """Return the free memory of this machine, or of this container if the container has less."""
    import psutil

    free = int(psutil.virtual_memory().available)
    limit, used = _CGROUP / "memory.max", _CGROUP / "memory.current"
    if limit.is_file() and used.is_file() and (text := limit.read_text(encoding="ascii").strip()).isdigit():
        # The kernel frees pages of files when a process needs memory.
        in_use = int(used.read_text(encoding="ascii")) - _bytes_of_inactive_files()
        free = min(free, max(0, int(text) - in_use))
    return free


def _bytes_of_inactive_files() -> int:
    statistics = _CGROUP / "memory.stat"
    lines = statistics.read_text(encoding="ascii").splitlines() if statistics.is_file() else []
    return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
