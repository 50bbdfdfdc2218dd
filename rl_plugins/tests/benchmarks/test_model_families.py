"""Packed samples and adapters of each family of the table of model families."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import model_families
from benchmarks.model_families import RUNS, Row, check_packing, line, write_page
from benchmarks.tiny_families import FAMILIES, UNPACKED, save_tiny_family
from rl_plugins.config.models import LoraConfig
from rl_plugins.models.lora import adapted_layers, add_adapter


@pytest.mark.parametrize("family", FAMILIES)
def test_family_packs_samples_or_refuses_packing_and_takes_an_adapter(family: str, tmp_path: Path) -> None:
    model, row = save_tiny_family(family, tmp_path), Row(family)
    check_packing(row, tmp_path)
    assert row.reasons == {}
    assert row.packing == row.shares_prompts == (family not in UNPACKED)
    # Experts are no linear layers, and have no adapter.
    names = adapted_layers(add_adapter(model, LoraConfig(rank=2)))
    assert names and not any(".experts." in name or "lm_head" in name for name in names)


def test_write_page_replaces_the_table_between_the_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- families -->\nold\n<!-- end families -->\nafter\n")
    rows = [Row("llama", packing=True, done=list(RUNS), gap=3e-6), Row("lfm2", reasons={"vllm": "a | b"})]
    for _ in range(2):
        write_page(rows, page)
    text = page.read_text()
    assert text.startswith("before\n<!-- families -->\n| family |") and text.endswith("<!-- end families -->\nafter\n")
    assert text.count(line(rows[0])) == 1 and "vllm: a / b |" in text and "old" not in text


def test_model_families_refuses_a_page_for_some_families(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["model_families", "--only", "qwen3", "--page", "docs/models.md"])
    with pytest.raises(SystemExit, match="2"):
        model_families.main()
    assert "leave --page or --only out" in capsys.readouterr().err
