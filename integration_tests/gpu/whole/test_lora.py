"""Adapters on GPUs: updates of the adapter alone, merged updates, weights of four bits, and the exports."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from integration_tests.conftest import Recipe
from integration_tests.gpu.whole import NEEDS_CUDA, train

pytestmark = NEEDS_CUDA

STRATEGIES = {"zero3": [], "zero1": ["strategy.zero_stage=1"], "fsdp": ["strategy.name=fsdp"]}


@pytest.mark.parametrize("sent", ["adapter", "merged"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_trained_adapter_is_exported_in_the_weights(
    start_recipe: Callable[..., Recipe], workplace: Path, strategy: str, sent: str
) -> None:
    options = (f"rollout.lora={sent}", *STRATEGIES[strategy])
    train_and_compare(start_recipe, workplace, f"lora-{strategy}-{sent}", *options)


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes, and it is not installed")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_adapter_of_four_bit_weights_is_exported_in_the_weights(
    start_recipe: Callable[..., Recipe], workplace: Path, strategy: str
) -> None:
    options = ("model.lora.quantization=nf4", "rollout.lora=merged", *STRATEGIES[strategy])
    train_and_compare(start_recipe, workplace, f"qlora-{strategy}", *options)


def train_and_compare(start_recipe: Callable[..., Recipe], workplace: Path, name: str, *options: str) -> None:
    """Train an adapter, and check that the exported model differs in the weights with an adapter alone."""
    recipe, _ = train(start_recipe, name, "placement.num_workers=1", "model.lora.rank=4", *options)
    before, after = (load_file(folder / "model.safetensors") for folder in (workplace / "tiny", recipe.run / "policy"))
    assert before.keys() == after.keys()
    changed = {name for name, weight in after.items() if not torch.equal(weight, before[name].to(weight.dtype))}
    adapted = {name for name in after if name.endswith("_proj.weight")}
    assert changed and changed <= adapted
    assert all(weight.isfinite().all() for weight in after.values())
