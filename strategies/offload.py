"""Where an engine keeps what its passes do not need: on its device, on the host, or in files.

Of a trained engine that is the optimizer's states and the master weights, which are then updated on the host; of a
frozen one its parameters. Host and files are DeepSpeed's own offload, engine by engine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_plugins.errors import ConfigError

STAY = "stay"
WHILE_SAMPLING = "while_sampling"
HOST = "cpu"
FILES = "nvme"


@dataclass(frozen=True)
class Offload:
    """The place of each engine.

    Attributes:
        places: engine to `stay`, `cpu`, `nvme` or, for a trained one, `while_sampling`: on the host while the rollout
            engine works. Engines that are not named are `while_sampling` if they are trained, and stay otherwise.
        folder: for the files of `nvme`; each engine has a folder of its own in it.
    """

    places: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None

    def check(self, zero_stage: int) -> None:
        """Refuse what cannot run.

        Raises:
            ConfigError: `nvme` without a folder, under another stage than 3, or where DeepSpeed cannot build its op.
        """
        for engine, place in self.places.items():
            if place not in (STAY, WHILE_SAMPLING, HOST, FILES):
                raise ConfigError(f"offload of {engine}: {place!r} is none of stay, while_sampling, cpu and nvme")
        if FILES not in self.places.values():
            return
        if zero_stage != 3:
            raise ConfigError("offload to nvme needs ZeRO stage 3: use it, or offload to cpu")
        if self.folder is None:
            raise ConfigError("offload to nvme needs a folder on the drive: name one, or offload to cpu")
        check_file_op()

    def moves(self, engine: str) -> bool:
        """Whether a trained engine gives its states to the host while the rollout engine works."""
        return self.places.get(engine, WHILE_SAMPLING) == WHILE_SAMPLING

    def of_trained(self, engine: str) -> dict[str, Any]:
        """What DeepSpeed's `zero_optimization` needs for a trained engine."""
        return self._section("offload_optimizer", engine)

    def of_frozen(self, engine: str) -> dict[str, Any]:
        """What it needs for a frozen one."""
        return self._section("offload_param", engine)

    def _section(self, name: str, engine: str) -> dict[str, Any]:
        place = self.places.get(engine)
        if place not in (HOST, FILES):
            return {}
        section: dict[str, Any] = {"device": place}
        if place == FILES:
            assert self.folder is not None
            section["nvme_path"] = str(self.folder / engine)
        return {name: section}


def check_file_op() -> None:
    """Ask DeepSpeed whether it can build the op that reads and writes its files.

    Raises:
        ConfigError: libaio is missing.
    """
    # Imports DeepSpeed, which would look for a device.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible():
        raise ConfigError(
            "offload to nvme needs libaio, and its header or library is not there: install it (libaio-dev), name its "
            "folders in CFLAGS and LDFLAGS, or offload to cpu"
        )
