"""Python code of a model's folder runs only if the user trusts the code, and nobody is asked on the terminal."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import dynamic_module_utils

from rl_plugins.commands.main import main
from rl_plugins.config.rollout import check_engine_arguments
from rl_plugins.data.tokenization import load_tokenizer
from rl_plugins.errors import ConfigError
from rl_plugins.models.folder import check_model_folder, check_model_type
from rl_plugins.models.loading import load_causal_lm
from rl_plugins.models.scalar_head import load_scalar_head
from rl_plugins.rewards.model import ModelReward
from rl_plugins.rollout.transformers_engine import TransformersRollout
from rl_plugins.rollout.vllm.config import VLLMConfig
from rl_plugins.tests.callbacks.training import build_stage
from rl_plugins.tests.models.own_code import save_own_code

REFUSED = r"names Python code of the model \(auto_map\).*trust_remote_code=true"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Questions on the terminal, each of which is answered with yes."""
    questions: list[str] = []

    def answer(question: str = "") -> str:
        questions.append(question)
        return "y"

    monkeypatch.setattr(builtins, "input", answer)
    # transformers copies the code to this folder before it runs the code.
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    return questions


def _transformers_engine(path: str) -> None:
    TransformersRollout(path).connect(0, 1)


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (lambda path: load_causal_lm(path, dtype=torch.float32), REFUSED),
        (lambda path: load_scalar_head(path, dtype=torch.float32), REFUSED),
        (lambda path: check_model_folder("policy", path), REFUSED),
        (lambda path: ModelReward(path), REFUSED),
        (_transformers_engine, "trust_remote_code=True"),
    ],
)
def test_code_of_a_model_does_not_run_without_trust(
    load: Callable[[str], Any], message: str, tmp_path: Path, asked: list[str]
) -> None:
    ran = save_own_code(tmp_path / "own")
    with pytest.raises(ConfigError if message == REFUSED else ValueError, match=message):
        load(str(tmp_path / "own"))
    assert not ran.exists() and not asked


def test_tokenizer_without_code_is_loaded_from_a_folder_with_code_of_a_model(tmp_path: Path, asked: list[str]) -> None:
    ran = save_own_code(tmp_path / "own")
    assert load_tokenizer(str(tmp_path / "own")).eos_token_id is not None
    assert build_stage(1, policy=str(tmp_path / "own")).loading["trust_remote_code"] is False
    assert not ran.exists() and not asked


def test_generate_refuses_code_of_a_model_without_trust(
    tmp_path: Path, asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    ran = save_own_code(tmp_path / "own")
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    assert main(["prepare", "jsonl", "--train", str(tmp_path / "rows.jsonl"), "--prompt", "question",
                 "--ground-truth", "answer", "--data-source", "sums", "--output", str(tmp_path)]) == 0  # fmt: skip
    capsys.readouterr()
    assert main(["generate", str(tmp_path / "own"), "--data", str(tmp_path / "train.parquet"),
                 "--output", str(tmp_path / "samples.parquet")]) == 2  # fmt: skip
    assert "commands: --trust-remote-code" in capsys.readouterr().err
    assert not ran.exists() and not asked


def test_code_of_a_model_runs_with_trust(tmp_path: Path, asked: list[str]) -> None:
    folder = tmp_path / "own"
    ran = save_own_code(folder)
    config = check_model_folder("policy", str(folder), trust_remote_code=True)
    check_model_type(str(folder), config or {})
    model: Any = load_causal_lm(str(folder), dtype=torch.float32, trust_remote_code=True)
    assert type(model).__name__ == "OwnForCausalLM" and ran.exists() and not asked
    assert load_tokenizer(str(folder), trust_remote_code=True).eos_token_id is not None
    engine = TransformersRollout(str(folder), trust_remote_code=True)
    engine.connect(0, 1)
    stage = build_stage(1, policy=str(folder), trust_remote_code=True)
    assert stage.loading["trust_remote_code"] is True
    # The folder of a trained policy has the code, too.
    model.save_pretrained(tmp_path / "exported")
    assert (tmp_path / "exported" / "modeling_own.py").is_file()


def test_model_of_transformers_runs_the_code_of_transformers_without_trust(tmp_path: Path, asked: list[str]) -> None:
    ran = save_own_code(tmp_path / "own")
    config = json.loads((tmp_path / "own" / "config.json").read_text())
    (tmp_path / "own" / "config.json").write_text(json.dumps({**config, "model_type": "qwen2"}))
    check_model_folder("policy", str(tmp_path / "own"))
    model = load_causal_lm(str(tmp_path / "own"), dtype=torch.float32)
    assert type(model).__name__ == "Qwen2ForCausalLM" and not ran.exists() and not asked


def test_vllm_config_gives_trust_to_the_engine() -> None:
    assert VLLMConfig("model").engine_arguments()["trust_remote_code"] is False
    assert VLLMConfig("model", trust_remote_code=True).engine_arguments()["trust_remote_code"] is True
    with pytest.raises(ConfigError, match=r"vllm.trust_remote_code: .*use model.trust_remote_code"):
        check_engine_arguments({"trust_remote_code": True})
