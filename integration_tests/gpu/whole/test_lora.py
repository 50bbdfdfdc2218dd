"""Adapters on GPUs: updates of the adapter alone and merged updates, and the export after training."""

from __future__ import annotations

from collections.abc import Callable
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
    recipe, _ = train(
        start_recipe, f"lora-{strategy}-{sent}", "placement.num_workers=1", "model.lora.rank=4", f"rollout.lora={sent}",
        *STRATEGIES[strategy],
    )  # fmt: skip
    before, after = (load_file(folder / "model.safetensors") for folder in (workplace / "tiny", recipe.run / "policy"))
    assert before.keys() == after.keys()
    changed = {name for name, weight in after.items() if not torch.equal(weight, before[name].to(weight.dtype))}
    adapted = {name for name in after if name.endswith("_proj.weight")}
    assert changed and changed <= adapted
    assert all(weight.isfinite().all() for weight in after.values())
