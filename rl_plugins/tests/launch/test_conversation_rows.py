"""Rows with conversations in the checks before a run: faults of rows, of the chat template, of lengths and options."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerFast

from rl_plugins.launch.dry_run import check_data, set_steps
from rl_plugins.launch.preflight import check_models
from rl_plugins.models.tiny import save_tiny_policy
from rl_plugins.tests.launch.configurations import configured, message_of
from rl_plugins.tests.loops import for_each

Check = Callable[..., str]
FORGETFUL = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content if loop.last or m.role == 'user' else m.content[-1:] }}"
    "{% if m.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Replies before the last are shortened."""


def talk(*texts: str) -> dict[str, Any]:
    """Return a row with a conversation; the user begins."""
    return {"messages": [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]}


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """Return the message of the checks of a run of SFT on some rows."""
    save_tiny_policy(tmp_path / "model", hidden_size=128, num_heads=4)

    def check(rows: list[dict[str, Any]], *overrides: str, template: str | None = None) -> str:
        if template is not None:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "model")
            tokenizer.chat_template = template
            tokenizer.save_pretrained(tmp_path / "model")
        columns = {name: None for row in rows for name in row}
        for name in ("rows", "held_out"):
            pq.write_table(pa.Table.from_pylist([columns | row for row in rows]), tmp_path / f"{name}.parquet")
        config = configured(
            "sft", f"model.path={tmp_path / 'model'}", f"data.train_files=[{tmp_path / 'rows.parquet'}]",
            "data.messages_key=messages", "launcher=local", "rollout.engine=transformers", "batch.prompts_per_step=2",
            "data.max_prompt_tokens=8", "sampling.max_tokens=16", f"run.output_dir={tmp_path}", *overrides,
        )  # fmt: skip
        return message_of(lambda: check_data(config, check_models(config)))

    return check


def test_check_data_accepts_conversations_in_training_and_validation(check: Check, tmp_path: Path) -> None:
    rows = [talk("1+1", "2"), talk("1+1", "2", "2+2", "4")]
    assert check(rows) == "nothing is refused"
    held_out = f"data.val_files=[{tmp_path / 'held_out.parquet'}]"
    assert check(rows, held_out, "data.validate_on=responses", "run.eval_every=1") == "nothing is refused"
    message = check(rows, held_out, "run.eval_every=1")
    assert "column 'prompt' is missing" in message and "For conversations, use data.validate_on=responses" in message


@for_each(
    ("row", "said"),
    [
        (talk("1+1"), "rows.parquet, row 1, data.messages_key='messages': no message has the role 'assistant'"),
        (talk("1+1", " "), "row 1, data.messages_key='messages': message 1 of the policy is empty"),
        ({"messages": None}, "row 1, data.messages_key='messages': holds nothing, not a list of messages"),
        ({**talk("1+1", "2"), "tools": [{"type": "function"}]}, "row 1, data.tools_key='tools': tool 0 is dict"),
        ({**talk("1+1", "2"), "images": ["a.png"]}, "row 1, column 'images': a conversation of SFT has texts alone"),
    ],
)
def test_check_data_names_the_row_of_a_malformed_conversation(check: Check, row: dict[str, Any], said: str) -> None:
    assert said in check([talk("1+1", "2"), row])


def test_check_data_refuses_a_tools_key_without_tools(check: Check) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    rows = [talk("1+1", "2"), {**talk("1+1", "2"), "functions": tools}]
    assert "does not show tools to the policy" in check(rows, "data.tools_key=functions")
    said = "data.tools_key=function: no row of the training data has tools there: correct the key, or leave it out"
    assert check(rows, "data.tools_key=function") == said


def test_check_data_tries_the_chat_template_on_each_kind_of_conversation(check: Check) -> None:
    rows = [talk("1+1", "2"), talk("1+1", "it is 2", "2+2", "4")]
    message = check(rows, template=FORGETFUL)
    assert "rows.parquet, row 1, conversation: the chat template of" in message
    assert "writes message 1 otherwise once messages follow" in message and "data.split_conversations" in message
    assert check(rows, "data.split_conversations=true") == "nothing is refused"


def test_check_data_measures_conversations(check: Check) -> None:
    rows = [talk("1+1", "2"), talk("1+1", "2", "a question", "a long answer")]
    assert "1 of 2 rows are within data.max_prompt_tokens=8 and sampling.max_tokens=16" in check(rows)
    message = check(rows, "data.overlong_prompts=error")
    assert "rows.parquet, row 1: 28 tokens, more than sampling.max_tokens=16" in message
    message = check(rows, "data.overlong_prompts=error", "sampling.max_tokens=29", "data.max_prompt_tokens=4")
    assert "5 tokens, more than data.max_prompt_tokens=4" in message


def test_set_steps_counts_conversations(check: Check, tmp_path: Path) -> None:
    check([talk("1+1", "2")] * 6)
    config = configured(
        "sft", f"model.path={tmp_path / 'model'}", f"data.train_files=[{tmp_path / 'rows.parquet'}]",
        "data.messages_key=messages", "batch.prompts_per_step=2", "run.epochs=2",
    )  # fmt: skip
    set_steps(config)
    assert config.run.steps == 6
