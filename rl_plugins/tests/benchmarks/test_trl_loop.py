"""The options of TRL's trainer in a comparison, without TRL."""

from __future__ import annotations

import argparse
import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest


def keywords_of_trl(monkeypatch: pytest.MonkeyPatch, **options: bool) -> dict[str, Any]:
    """The keyword arguments of TRL's configuration."""
    monkeypatch.setitem(sys.modules, "trl", SimpleNamespace(GRPOConfig=dict, GRPOTrainer=object))
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(Dataset=object))
    loop = importlib.import_module("benchmarks.trl_loop")
    # The module must not outlive its stubs.
    del sys.modules[loop.__name__]
    given = {"prompts": 16, "samples": 4, "max_tokens": 8, "micro_batch": 8, "steps": 3, "bf16": False, "vllm": False}
    return dict(loop.grpo_config(argparse.Namespace(**given | options), "folder"))


def test_grpo_config_of_trl_has_no_work_beyond_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    given = keywords_of_trl(monkeypatch, vllm=True, bf16=True)
    assert given["gradient_checkpointing"] is False and given["vllm_importance_sampling_correction"] is False
    assert given["use_vllm"] is True and given["bf16"] is True
    # Two processes with 8 samples in a pass.
    assert given["gradient_accumulation_steps"] == 4
    assert not any("vllm" in name for name in keywords_of_trl(monkeypatch))
