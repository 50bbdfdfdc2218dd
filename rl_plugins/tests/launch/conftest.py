"""A folder with good and bad files for runs, made without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from rl_plugins.tests.launch.configurations import compose_once
from rl_plugins.tests.models.own_code import save_own_code

CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}<|end|>"
USERS_ONLY = (
    "{% for m in messages %}{% if m['role'] in ('user', 'assistant') %}{{ m['content'] }}"
    "{% else %}{{ raise_exception('no role ' ~ m['role']) }}{% endif %}{% endfor %}<|end|>"
)
THINKS = CHAT_TEMPLATE + "{% if enable_thinking is not defined %}<think>{% endif %}"
REWARDS = """
def half(solution_str, ground_truth):
    return 0.5

def raises(solution_str, ground_truth):
    raise KeyError("no key")

def needs_text(solution_str):
    return float(solution_str[0] == "4")

def sees_gpus(solution_str):
    raise ValueError("CUDA_VISIBLE_DEVICES=" + repr(__import__("os").environ.get("CUDA_VISIBLE_DEVICES")))

def of_tokens(solution_str, token_ids):
    # The tokenizer of the folder has a token for each byte.
    return {"token_rewards": [1.0] * len(solution_str)}

def of_turns(token_ids):
    return {"token_rewards": [1.0] * (len(token_ids) + 1)}

def insists(solution_str):
    return "again"

def breaks(solution_str, turns_left):
    return {"role": "user", "content": 4} if turns_left else 0.0

def has_tools(solution_str, turns_left):
    return {"role": "tool", "content": "4"} if turns_left and solution_str != "42" else 0.0
"""


def row(question: str = "17+25=", **columns: Any) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": question}],
        "data_source": "addition",
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "42"},
        "extra_info": {"split": "train", "index": 0},
        **columns,
    }


def save_model(
    folder: Path,
    vocab_size: int = 257,
    chat_template: str | None = CHAT_TEMPLATE,
    eos_token: str | None = "<|end|>",
    **sizes: int,
) -> None:
    folder.mkdir()
    pieces = [*sorted(ByteLevel.alphabet()), "<|end|>"]
    tokenizer = Tokenizer(BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos_token, "chat_template": chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    model = {"model_type": "qwen2", "vocab_size": vocab_size, "max_position_embeddings": 256}
    model |= {"num_attention_heads": 12, "num_key_value_heads": 2, **sizes}
    (folder / "config.json").write_text(json.dumps(model))
    save_file({"model.embed_tokens.weight": np.zeros((vocab_size, 4), np.float32)}, folder / "model.safetensors")


@pytest.fixture(scope="session")
def workplace(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("workplace")

    def write(name: str, rows: list[dict[str, Any]]) -> None:
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")

    write("train", [row(f"{number}+1=") for number in range(64)])
    write("test", [row(f"{number}+2=") for number in range(8)])
    write("few", [row()])
    write("bad_row", [row(), row(data_source=None)])
    write("no_column", [{key: value for key, value in row().items() if key != "reward_model"}])
    system = {"role": "system", "content": "Add."}
    write("system", [row(prompt=[system] * (number == 40) + row()["prompt"]) for number in range(64)])
    write("one_long", [row("1+" * 40)] + [row() for _ in range(63)])
    pairs = [row(chosen=f"{number}", rejected="no", margin=0.5, good=True) for number in range(40)]
    talk = [{"role": "user", "content": "17+25="}, {"role": "assistant", "content": "42"}]
    write("talks", [{"messages": talk}] * 33)
    write("pairs", [{key: value for key, value in pair.items() if key != "reward_model"} for pair in pairs])
    write("equal_pair", [*pairs[:33], pairs[0] | {"chosen": "no"}])
    write("pair_of_nulls", [*pairs[:33], pairs[0] | {"rejected": None}])
    write("no_margin", [*pairs[:33], pairs[0] | {"margin": float("inf")}])
    write("wrong_label", [pair | {"good": 1} for pair in pairs])
    write("long_pairs", [pair | {"chosen": "9" * (60 + number)} for number, pair in enumerate(pairs)])
    write("one_long_pair", [*pairs[:33], pairs[0] | {"rejected": "9" * 60}])
    few = [pair | {"rejected": "9" * 60 * (number < 9)} for number, pair in enumerate(pairs)]
    write("few_short_pairs", [pair | {"rejected": pair["rejected"] or "no"} for pair in few])
    steps = [row(extra_info={"steps": ["1", "2"], "labels": [1.0, None]}) for _ in range(40)]
    write("steps", steps)
    write("label_of_2", [*steps[:32], row(extra_info={"steps": ["1", "2"], "labels": [1.0, 2.0]})])
    write("label_too_many", [*steps[:32], row(extra_info={"steps": ["1", "2"], "labels": [1.0, 0.0, 0.0]})])
    write("no_truth", [*(row() for _ in range(32)), row(reward_model={"style": "rule", "ground_truth": ""})])
    (folder / "text.parquet").write_text("hello")
    (folder / "rewards.py").write_text(REWARDS)
    save_model(folder / "model")
    save_model(folder / "few_embeddings", vocab_size=100)
    save_model(folder / "users_only", chat_template=USERS_ONLY)
    save_model(folder / "no_template", chat_template=None)
    save_model(folder / "no_end", eos_token=None)
    (folder / "template.jinja").write_text(CHAT_TEMPLATE)
    save_model(folder / "thinks", chat_template=THINKS)
    save_model(folder / "narrow_heads", hidden_size=12 * 16)
    save_own_code(folder / "own_code")
    (folder / "rows.csv").write_text("prompt,answer\n1+1=,2\n")
    (folder / "no_config").mkdir()
    save_model(folder / "half_weights")
    weights = folder / "half_weights" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])
    save_model(folder / "unknown_model")
    save_model(folder / "recurrent")
    for name, model_type in {"unknown_model": "qwen99", "recurrent": "qwen3_next"}.items():
        config = folder / name / "config.json"
        config.write_text(config.read_text().replace("qwen2", model_type))
    save_model(folder / "torn_tokenizer")
    tokenizer = folder / "torn_tokenizer" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"BPE"', '"no model"'))
    (folder / "outputs" / "old").mkdir(parents=True)
    (folder / "outputs" / "through" / "policy").mkdir(parents=True)
    (folder / "outputs" / "old" / "metrics.jsonl").write_text('{"step": 1, "time": 1.0}\n')
    (folder / "outputs" / "foreign").mkdir()
    (folder / "outputs" / "foreign" / "notes.txt").touch()
    return folder


@pytest.fixture
def _composed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compose_once(monkeypatch)
