"""The work of vLLM alone is the work of the recipe's engine."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import bare_parts
from benchmarks.bare_parts import engine_config
from rl_plugins.config.rollout import default_max_num_seqs


def test_engine_config_of_vllm_alone_has_the_options_of_the_recipe(tmp_path: Path) -> None:
    config = engine_config(tmp_path, 2, ["rollout.max_num_seqs=64", "rollout.prefix_caching=false"])
    assert (config.max_num_seqs, config.prefix_caching, config.dtype, config.threads) == (64, False, "float32", 2)
    assert engine_config(tmp_path, 2, []).max_num_seqs == default_max_num_seqs(on_gpus=False)


def test_bare_parts_refuses_options_with_other_work_in_the_recipe_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bare_parts", "--set", "rollout.max_num_seqs=64", "model.precision=bf16-true"])
    with pytest.raises(SystemExit, match="2"):
        bare_parts.main()
    assert "--set model.precision=bf16-true: the parts alone" in capsys.readouterr().err


def test_alone_gives_a_part_the_options_and_returns_the_median_after_the_warm_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[list[str]] = []
    monkeypatch.setattr(bare_parts, "sample", lambda folder, threads, further: [threads, *further])
    monkeypatch.setattr(sys, "argv", ["bare_parts", "--part", "sample", "folder", "--set", "rollout.max_num_seqs=64"])
    bare_parts.main()
    assert json.loads(capsys.readouterr().out) == {"seconds": [2, "rollout.max_num_seqs=64"]}

    def run(module: list[str], work: list[str]) -> dict[str, list[float]]:
        given.append(work)
        return {"seconds": [9.0, 9.0, 1.0, 2.0, 3.0]}

    monkeypatch.setattr(bare_parts, "run_alternative", run)
    assert bare_parts.alone("sample", tmp_path, 2, ["rollout.max_num_seqs=64"]) == 2.0
    assert given == [["--part", "sample", str(tmp_path), "--threads", "2", "--set", "rollout.max_num_seqs=64"]]
