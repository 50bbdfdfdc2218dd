"""Sections `single_device`, `zero1`, `zero2`, `zero3` and `fsdp`: the training of `training.py` in variants."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from integration_tests.gpu.without_vllm.cases import Case, Place, Skipped, need
from integration_tests.gpu.without_vllm.kernel import use_kernel_of_this_torch
from integration_tests.gpu.without_vllm.training import SCALE_POWER, Variant, train, train_on_host
from rl_plugins.rollout.transformers_engine import TransformersRollout
from rl_plugins.strategies.offload import HOST

VARIANTS = {
    "32-true": Variant("32-true"),
    "bf16-mixed": Variant(),
    "16-mixed": Variant("16-mixed"),
    "bf16-true": Variant("bf16-true"),
    "stay": Variant(place="stay"),
    "gradient checkpointing": Variant(gradient_checkpointing=True),
    "lora 32-true": Variant("32-true", lora_rank=4),
    "lora bf16-mixed": Variant(lora_rank=4),
    "lora 16-mixed": Variant("16-mixed", lora_rank=4),
    "qlora 32-true": Variant("32-true", lora_rank=4, quantization="nf4"),
    "qlora bf16-mixed": Variant(lora_rank=4, quantization="nf4"),
    "float8 tensorwise": Variant(float8="tensorwise", gradient_checkpointing=True),
    "float8 rowwise": Variant(float8="rowwise"),
    "padded": Variant(packing=False),
}
ON_HOST = {"offload cpu 32-true": Variant("32-true", place="cpu"), "offload cpu bf16-mixed": Variant(place="cpu")}
"""Variants of ZeRO 3 and FSDP2 without optimizer states on the device."""
_TIMEOUT_S = 60.0

MakeStrategy = Callable[[TransformersRollout, Variant], Any]


def single_device(place: Place) -> Iterable[Case]:
    """Return the cases of one device without sharding. Nothing moves to the host."""
    from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy

    def make(engine: TransformersRollout, variant: Variant) -> SingleDeviceRolloutStrategy:
        return SingleDeviceRolloutStrategy(place.device, rollout=engine)

    names = ("32-true", "bf16-mixed", "16-mixed", "lora bf16-mixed", "qlora bf16-mixed", "float8 tensorwise")
    return _cases(place, make, {name: VARIANTS[name] for name in names})


def zero1(place: Place) -> Iterable[Case]:
    """Return the cases of ZeRO 1."""
    return _zero(place, 1)


def zero2(place: Place) -> Iterable[Case]:
    """Return the cases of ZeRO 2."""
    return _zero(place, 2)


def zero3(place: Place) -> Iterable[Case]:
    """Return the cases of ZeRO 3."""
    return _zero(place, 3)


def _zero(place: Place, stage: int) -> Iterable[Case]:
    def make(engine: TransformersRollout, variant: Variant) -> Any:
        need("deepspeed", "ZeRO")
        if variant.dtype == torch.float16 and not place.on_gpu:
            raise Skipped("DeepSpeed trains in float16 on GPUs")
        from rl_plugins.strategies.zero import ZeroStrategy

        return ZeroStrategy(
            stage=stage,
            rollout=engine,
            offload={"policy": variant.place},
            timeout_s=_TIMEOUT_S,
            initial_scale_power=SCALE_POWER,
        )

    return _cases(place, make, {**VARIANTS, **(ON_HOST if stage == 3 else {})})


def fsdp(place: Place) -> Iterable[Case]:
    """Return the cases of FSDP2."""

    def make(engine: TransformersRollout, variant: Variant) -> Any:
        from rl_plugins.strategies.fsdp import FSDPStrategy

        return FSDPStrategy(rollout=engine, offload={"policy": variant.place}, timeout_s=_TIMEOUT_S)

    return _cases(place, make, {**VARIANTS, **ON_HOST})


def _cases(place: Place, make: MakeStrategy, variants: Mapping[str, Variant]) -> Iterable[Case]:
    _be_only_rank()
    use_kernel_of_this_torch()
    for name, variant in variants.items():
        folder = place.folder / name.replace(" ", "-")
        folder.mkdir()
        run = train_on_host if variant.place == HOST else train
        yield Case(name, partial(run, replace(place, folder=folder), make, variant))


def _be_only_rank() -> None:
    """Set the variables of a process group of one rank."""
    # With port 0, the store of the group takes a port without a listener.
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0",
             "NODE_RANK": "0"}  # fmt: skip
    for name, value in group.items():
        os.environ.setdefault(name, value)
