from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch import LightningModule

from rl_plugins.callbacks.data_report import DataReport


@pytest.mark.parametrize("is_global_zero", [True, False])
def test_data_report_prints_dropped_prompts_on_rank_0_only(
    is_global_zero: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    data = SimpleNamespace(dropped_prompts={"train": 3, "validation": 0})
    trainer: Any = SimpleNamespace(is_global_zero=is_global_zero, datamodule=data)
    DataReport("run").on_train_start(trainer, LightningModule())
    expected = "run: train: 3 prompts are longer than the limit and left out\n"
    assert capsys.readouterr().out == (expected if is_global_zero else "")


def test_data_report_prints_nothing_without_a_data_module(capsys: pytest.CaptureFixture[str]) -> None:
    trainer: Any = SimpleNamespace(is_global_zero=True, datamodule=None)
    DataReport("run").on_train_start(trainer, LightningModule())
    assert capsys.readouterr().out == ""
