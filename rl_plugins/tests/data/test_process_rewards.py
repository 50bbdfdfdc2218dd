"""Steps and labels: positions of labels, dropped rows, and errors with file, row and field."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rl_plugins.data.process_rewards import ProcessRewardBatch, ProcessRewardDataModule
from rl_plugins.errors import ConfigError
from rl_plugins.models.tiny import build_tokenizer
from rl_plugins.tests.loops import for_each

STEPS = ["7+5=12", "write 2", "so 42"]


@pytest.fixture
def steps_row(row):
    def make(number: int, steps: Any = STEPS, labels: Any = (1, 0, 0.25), **changes: Any) -> dict[str, Any]:
        labels = list(labels) if isinstance(labels, tuple) else labels
        return row(number, extra_info={"steps": steps, "labels": labels}, **changes)

    return make


def only_batch(source: Any, tokenizer: Any, **options: Any) -> ProcessRewardBatch:
    data = ProcessRewardDataModule(source, tokenizer=tokenizer, prompts_per_step=1, **options)
    data.setup("fit")
    (batch,) = data.train_dataloader()
    return batch


def test_process_reward_data_module_puts_labels_on_the_last_token_of_steps(steps_row, write_rows, tokenizer):
    batch = only_batch(str(write_rows([steps_row(17)])), tokenizer)
    assert tokenizer.decode(batch.prompt_ids[0]) == "<|user|>17+1=<|assistant|>"
    assert tokenizer.decode(batch.response_ids[0]) == "7+5=12\nwrite 2\nso 42<|end|>"
    assert len(batch.labels[0]) == len(batch.response_ids[0])
    labelled = {place: label for place, label in enumerate(batch.labels[0]) if not math.isnan(label)}
    assert labelled == {6: 1.0, 14: 0.0, 20: 0.25}
    assert [tokenizer.decode(batch.response_ids[0][place]) for place in labelled] == ["\n", "\n", "<|end|>"]
    assert (len(batch), batch.rows) == (1, [0])


def test_process_reward_data_module_accepts_keys_separator_and_missing_labels(row, tokenizer):
    source = [row(0, trace={"texts": ["a", "b"], "right": [None, True]})]
    options = {"steps_key": "trace.texts", "labels_key": "trace.right", "step_separator": ""}
    batch = only_batch(source, tokenizer, **options)
    assert tokenizer.decode(batch.response_ids[0]) == "ab<|end|>"
    assert math.isnan(batch.labels[0][0]) and math.isnan(batch.labels[0][1]) and batch.labels[0][2] == 1.0


@for_each(
    ("opening", "steps", "labels", "text", "labelled"),
    [
        ("<think>\n", ["<think>\nso", "4"], [0, 1], "so\n4<|end|>", {2: 0.0, 4: 1.0}),
        ("<think>", ["<think>so", "4"], [0, 1], "so\n4<|end|>", {2: 0.0, 4: 1.0}),
        # A step of `<think>` alone has no tokens, and its label no place.
        ("<think>\n", ["<think>", "so", "4"], [0.5, 0, 1], "so\n4<|end|>", {2: 0.0, 4: 1.0}),
        # Only the first step stands behind the prompt.
        ("<think>\n", ["so", "<think>4"], [0, 1], "so\n<think>4<|end|>", {2: 0.0, 11: 1.0}),
        ("", ["<think>so", "4"], [0, 1], "<think>so\n4<|end|>", {9: 0.0, 11: 1.0}),
    ],
)
def test_first_step_does_not_open_the_reasoning_opened_by_the_prompt(row, opening, steps, labels, text, labelled):
    tokenizer: Any = build_tokenizer()
    # Jinja removes a new line at the end of a template.
    tokenizer.chat_template = "{{ messages[0].content }}<|assistant|>" + opening + "{{ '' }}"
    batch = only_batch([row(0, extra_info={"steps": steps, "labels": labels})], tokenizer)
    assert tokenizer.decode(batch.response_ids[0]) == text
    assert len(batch.labels[0]) == len(batch.response_ids[0])
    assert {place: label for place, label in enumerate(batch.labels[0]) if not math.isnan(label)} == labelled


def test_process_reward_data_module_drops_or_refuses_long_rows(steps_row, tokenizer):
    long_prompt = steps_row(1, prompt=[{"role": "user", "content": "9" * 50}])
    long_steps = steps_row(2, steps=["2" * 50], labels=[1])
    limits = {"max_prompt_tokens": 20, "max_response_tokens": 30}
    batch = only_batch([long_prompt, steps_row(0), long_steps], tokenizer, **limits)
    assert batch.rows == [1]
    with pytest.raises(ConfigError, match="list, row 0: 51 tokens, more than max_response_tokens=30"):
        only_batch([long_steps], tokenizer, overlong_prompts="error", **limits)
    with pytest.raises(ConfigError, match="every row is longer than max_prompt_tokens=20 or max_response_tokens=30"):
        only_batch([long_prompt, long_steps], tokenizer, **limits)


def test_process_reward_data_module_validates_with_labels(steps_row, tokenizer):
    data = ProcessRewardDataModule(None, [steps_row(0), steps_row(1)], tokenizer=tokenizer, prompts_per_step=1)
    data.setup("validate")
    (batch,) = data.val_dataloader()
    assert isinstance(batch, ProcessRewardBatch) and batch.rows == [0, 1]


def test_process_reward_fingerprint_changes_with_labels(steps_row, tokenizer):
    def fingerprint(labels: Any) -> str:
        data = ProcessRewardDataModule([steps_row(0, labels=labels)], tokenizer=tokenizer, prompts_per_step=1)
        data.setup("fit")
        return data.sources["train"].fingerprint

    assert len({fingerprint(labels) for labels in ([1, 0, 0.25], [1, 0, 0.5], [1, 0, None])}) == 3


@for_each(
    ("changes", "message"),
    [
        ({"steps": "7+5"}, r"steps_key='extra_info.steps': holds '7\+5', not a list"),
        ({"steps": []}, r"steps_key='extra_info.steps': holds \[\], not a list"),
        ({"steps": ["a", " ", "b"]}, "steps_key='extra_info.steps': step 1 is ' ', not a text"),
        ({"labels": [1, 0]}, "labels_key='extra_info.labels': it has 2 labels for the 3 steps"),
        ({"labels": [1, 0, -1]}, "label 2 is -1, not a number between 0"),
        ({"labels": [1, 0, math.nan]}, "label 2 is nan, not a number between 0"),
        ({"labels": [1, 0, "+"]}, r"label 2 is '\+', not a number"),
        ({"labels": [None, None, None]}, "labels no step: remove the row"),
    ],
)
def test_process_reward_data_module_names_a_bad_row(steps_row, tokenizer, changes, message):
    with pytest.raises(ConfigError, match=f"list, row 1, .*{message}"):
        only_batch([steps_row(0), steps_row(1, **changes)], tokenizer)


def test_process_reward_data_module_names_the_file_of_a_missing_key(row, write_rows, tokenizer):
    path = write_rows([row(0)])
    message = rf"{path}, row 0, steps_key='extra_info.steps': leads nowhere at 'steps'; there is split, index, answer"
    with pytest.raises(ConfigError, match=message):
        only_batch(str(path), tokenizer)


def test_process_reward_data_module_refuses_a_tokenizer_without_end_token(steps_row):
    endless = build_tokenizer()
    endless.eos_token = None
    with pytest.raises(ConfigError, match="has no end-of-sequence token"):
        only_batch([steps_row(0)], endless)
