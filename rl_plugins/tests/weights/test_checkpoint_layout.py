"""CheckpointLayout: tensors of checkpoints as ranges of parameters, against the files of `save_pretrained`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from benchmarks.tiny_families import FAMILIES, save_tiny_family
from rl_plugins.weights.checkpoint_layout import CheckpointLayout
from rl_plugins.weights.source import ModuleWeightSource

FURTHER = {
    "glm4_moe_lite": FAMILIES["deepseek_v3"],
    "lfm2_moe": {
        **FAMILIES["lfm2"], "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96,
        "num_dense_layers": 1,
    },
}  # fmt: skip
"""Families that vLLM on CPU does not sample."""


@pytest.mark.parametrize(
    "family", ["mixtral", "deepseek_v3", "glm4_moe_lite", "lfm2_moe", "granitemoehybrid", "qwen3_moe", "qwen2"]
)
def test_layout_gives_the_names_and_tensors_of_checkpoints(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if family in FURTHER:
        monkeypatch.setitem(FAMILIES, family, FURTHER[family])
    model: Any = save_tiny_family(family, tmp_path)
    source = ModuleWeightSource(model)
    checkpoint = CheckpointLayout.of(str(tmp_path), source.metadata()).apply(source)
    if family in ("qwen3_moe", "qwen2"):
        assert checkpoint is source
        return
    # Buffers are in the files, too.
    files = load_file(tmp_path / "model.safetensors")
    found = dict(checkpoint)
    assert found.keys() == files.keys() - {
        name for name in files if name.endswith(("e_score_correction_bias", "expert_bias"))
    }
    for meta in checkpoint.metadata():
        assert meta.shape == tuple(files[meta.name].shape)
        assert torch.equal(found[meta.name], files[meta.name])
    # The shards of three ranks cover each tensor once.
    whole = {name: torch.full((tensor.numel(),), torch.nan) for name, tensor in found.items()}
    for rank in range(3):
        shards = (
            CheckpointLayout.of(str(tmp_path), source.metadata()).apply(ModuleWeightSource(model, rank, 3)).shards()
        )
        for name, first, part in shards:
            place = whole[name][first : first + len(part)]
            assert place.isnan().all()
            place.copy_(part)
    assert all(torch.equal(whole[name].view(tensor.shape), tensor) for name, tensor in found.items())
    assert AutoModelForCausalLM.from_pretrained(tmp_path).num_parameters() == model.num_parameters()
