"""Offload of each model's states to the host or to files, by DeepSpeed or FSDP2.

A trained model offloads optimizer states and master weights, and the optimizer step runs on the host. A frozen model
offloads parameters. (FSDP2 always offloads both: its parameters are the master weights.)
"""

from __future__ import annotations

import os
import shutil
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
    """Place of each model's states.

    Attributes:
        places: model name to `stay`, `cpu`, `nvme` or `while_sampling`. With `while_sampling`, the states are on the
            host while the rollout engine samples, if the engine has no room beside the states. The default is
            `while_sampling` for trained models and `stay` for frozen models.
        folder: parent folder of the `nvme` files; each model has a subfolder.
    """

    places: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None

    def check(self, zero_stage: int) -> None:
        """Check the places.

        Raises:
            ConfigError: a place is unknown; or `nvme` is set without a folder, with a ZeRO stage other than 3, or on a
                machine that cannot build DeepSpeed's op, see `check_file_op`.
        """
        for name, place in self.places.items():
            if place not in (STAY, WHILE_SAMPLING, HOST, FILES):
                raise ConfigError(f"offload={{{name!r}: {place!r}}}: use stay, while_sampling, cpu or nvme")
        if FILES not in self.places.values():
            return
        if zero_stage != 3:
            raise ConfigError(f"offload to nvme needs stage=3, not stage={zero_stage}: set stage=3, or offload to cpu")
        if self.folder is None:
            raise ConfigError(
                "offload to nvme needs a folder: name a folder on the drive with offload_folder=, or offload to cpu"
            )
        check_file_op()

    def moves(self, name: str, *, trained: bool) -> bool:
        """Return True if the states of a model leave a crowded device while the rollout engine samples."""
        return self.places.get(name, WHILE_SAMPLING if trained else STAY) == WHILE_SAMPLING

    def on_host(self, name: str) -> bool:
        """Return True if the states of a model are always on the host."""
        return self.places.get(name) == HOST

    def of_trained(self, name: str) -> dict[str, Any]:
        """Return the `zero_optimization` options of DeepSpeed for a trained model."""
        return self._section("offload_optimizer", name)

    def of_frozen(self, name: str) -> dict[str, Any]:
        """Return the `zero_optimization` options of DeepSpeed for a frozen model."""
        return self._section("offload_param", name)

    def _section(self, option: str, name: str) -> dict[str, Any]:
        place = self.places.get(name)
        if place not in (HOST, FILES):
            return {}
        section: dict[str, Any] = {"device": place}
        if place == HOST:
            # Copies from and to pinned memory are faster, and run beside the passes.
            section["pin_memory"] = True
        else:
            assert self.folder is not None
            section["nvme_path"] = str(self.folder / name)
        return {option: section}


def check_file_op() -> None:
    """Check for the parts with which DeepSpeed builds its op for `nvme` files.

    Raises:
        ConfigError: a compiler, libaio, or on a machine with GPUs the CUDA toolkit is missing.
    """
    import torch
    from torch.utils import cpp_extension

    # Without this variable, the import of DeepSpeed searches for a device.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.ops.op_builder import AsyncIOBuilder

    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise ConfigError(
            f"offload to nvme builds a library, and there is no C++ compiler {compiler}: install g++, name a compiler "
            "in CXX, or offload to cpu"
        )
    if torch.cuda.is_available() and cpp_extension.CUDA_HOME is None:
        # DeepSpeed includes headers of CUDA whenever torch sees a GPU.
        raise ConfigError(
            "offload to nvme needs the headers of the CUDA toolkit on a machine with GPUs, and CUDA_HOME is not set: "
            "install the toolkit and name its folder in CUDA_HOME, or offload to cpu"
        )
    if not AsyncIOBuilder().is_compatible():
        raise ConfigError(
            "offload to nvme needs libaio, and the header or the library is missing: install libaio-dev, name the "
            "folders of libaio in CFLAGS and LDFLAGS, or offload to cpu"
        )
