"""ModelReward: the input of the reward model, batches of any size, and wrong options."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForTokenClassification

from benchmarks.tiny_vision import processor, save_tiny_vision
from rl_plugins.errors import ConfigError
from rl_plugins.models.scalar_head import load_scalar_head
from rl_plugins.models.tiny import build_tokenizer, save_tiny_policy
from rl_plugins.rewards.inline import InlineScorer
from rl_plugins.rewards.model import ModelReward
from rl_plugins.rewards.records import ScoringRequest

TARGET = "rl_plugins.rewards.model.ModelReward"
RESPONSES = ["42", "", "a longer one than the others", "4", "it is 42", "x"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path of a reward model with a nonzero head."""
    folder = tmp_path_factory.mktemp("reward_model")
    policy = str(save_tiny_policy(folder / "policy", initializer_range=0.2))
    model: Any = load_scalar_head(policy, dtype=torch.float32)
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(2))
    model.save_pretrained(folder / "trained")
    build_tokenizer().save_pretrained(folder / "trained")
    return str(folder / "trained")


def request(response: str, question: str = "17+25") -> ScoringRequest:
    prompt = [{"role": "system", "content": "add"}, {"role": "user", "content": question}]
    return ScoringRequest("s", response, None, {}, prompt)


def plain_score(path: str, text: str) -> float:
    """Return the score at the end of a text under the class of transformers."""
    model = AutoModelForTokenClassification.from_pretrained(path).eval()
    with torch.no_grad():
        return float(model(torch.tensor([build_tokenizer().encode(text)])).logits[0, -1, 0])


def test_model_reward_refuses_a_vision_language_model(tmp_path: Path) -> None:
    save_tiny_vision("llava", tmp_path / "policy")
    model: Any = load_scalar_head(str(tmp_path / "policy"), dtype=torch.float32)
    model.save_pretrained(tmp_path / "reward_model")
    processor("llava").tokenizer.save_pretrained(tmp_path / "reward_model")
    with pytest.raises(ConfigError, match=r"is a vision-language model, and a reward function gets no images: name"):
        ModelReward(str(tmp_path / "reward_model"))


@pytest.mark.parametrize("batch_size", [1, 4, 32])
def test_model_reward_scores_the_end_of_the_conversation(path: str, batch_size: int) -> None:
    scorer = InlineScorer({"_target_": TARGET, "path": path, "batch_size": batch_size})
    requests = [request(response, "1" * (1 + row)) for row, response in enumerate(RESPONSES)]
    scores = scorer.score(requests)
    for row, (score, response) in enumerate(zip(scores, RESPONSES, strict=True)):
        text = f"<|system|>add<|user|>{'1' * (1 + row)}<|assistant|>{response}<|end|>"
        assert score.value == pytest.approx(plain_score(path, text), rel=1e-4, abs=1e-5)
    assert len({score.value for score in scores}) == len(scores)


def test_model_reward_batches_samples_of_similar_length(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reward = ModelReward(path, batch_size=2)
    widths = []
    padded = reward._padded

    def counted(sequences: Any) -> Any:
        inputs, last_B = padded(sequences)
        widths.append([len(sequence) for sequence in sequences])
        return inputs, last_B

    monkeypatch.setattr(reward, "_padded", counted)
    reward(["a", "a" * 40, "aa", "a" * 41], [request("").prompt] * 4)
    assert [max(lengths) - min(lengths) for lengths in widths] == [1, 1]


def test_model_reward_keeps_the_threads_and_the_gradient_mode_of_the_caller(path: str) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        ModelReward(path)(["1"], [request("").prompt])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def test_model_reward_fails_a_sample_without_a_prompt(path: str) -> None:
    scorer = InlineScorer({"_target_": TARGET, "path": path}, max_failure_rate=1.0)
    (score,) = scorer.score([ScoringRequest("s", "42", None, {})])
    assert score.failure == "raised" and "reads the prompt's messages" in score.message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"dtype": "float33"}, "dtype='float33'"),
        ({"device": "cuda:0"}, "device=cuda:0, but this process has no GPU"),
        ({"path": "./nowhere"}, "ModelReward: path=./nowhere: no such folder"),
    ],
)
def test_model_reward_refuses_wrong_options(
    path: str, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=message):
        InlineScorer({"_target_": TARGET, "path": path, **options})


def test_model_reward_refuses_a_policy(tmp_path: Path) -> None:
    policy = str(save_tiny_policy(tmp_path))
    with pytest.raises(ConfigError, match="has no scalar head"):
        InlineScorer({"_target_": TARGET, "path": policy})


def test_model_reward_module_is_imported_without_torch() -> None:
    code = "import sys, rl_plugins.rewards.model, rl_plugins.rewards.mixing; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
