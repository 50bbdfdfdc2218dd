from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest

from rl_plugins.data.datamodule import PromptDataModule
from rl_plugins.data.prompts import PromptBatch
from rl_plugins.data.sft import SFTDataModule
from rl_plugins.errors import ConfigError
from rl_plugins.tests.loops import for_each


def test_prompt_data_module_tokenizes_with_the_chat_template_and_keeps_columns(row, write_rows, tokenizer):
    path = write_rows([row(number, level=number) for number in range(6)])
    data = PromptDataModule(str(path), tokenizer=tokenizer, prompts_per_step=3)
    data.setup("fit")
    for batch in data.train_dataloader():
        assert [tokenizer.decode(ids) for ids in batch.prompt_ids] == [
            f"<|user|>{number}+1=<|assistant|>" for number in batch.rows
        ]
        assert batch.columns["level"] == batch.rows
        assert batch.columns["prompt"] == [row(number)["prompt"] for number in batch.rows]
        assert set(batch.columns) == {*row(0), "level"}
        assert len(batch) == 3
    assert data.val_dataloader() == []


def test_prompt_data_module_drops_long_prompts_and_keeps_row_numbers(row, tokenizer, caplog):
    long = [{"role": "user", "content": "9" * 50}]
    rows = [row(0), row(1, prompt=long), row(2), row(3)]
    data = PromptDataModule(rows, rows, tokenizer=tokenizer, prompts_per_step=3, max_prompt_tokens=20)
    with caplog.at_level("INFO"):
        data.setup("fit")
    assert data.dropped_prompts == {"train": 1, "validation": 1}
    assert "train: 3 prompts, 1 dropped as too long" in caplog.text
    assert sorted(next(iter(data.train_dataloader())).rows) == [0, 2, 3]
    assert [batch.rows for batch in data.val_dataloader()] == [[0, 2, 3]]


def test_prompt_data_module_takes_max_train_rows_and_max_val_rows(row, tokenizer):
    rows = [row(number) for number in range(9)]
    options = {"tokenizer": tokenizer, "prompts_per_step": 3}
    data = PromptDataModule(rows, rows, max_train_rows=3, max_val_rows=2, **options)
    data.setup("fit")
    columns = next(iter(data.train_dataloader())).columns
    assert sorted(entry["index"] * 3 // 9 for entry in columns["extra_info"]) == [0, 1, 2]
    validation = [entry["index"] for batch in data.val_dataloader() for entry in batch.columns["extra_info"]]
    assert [index * 2 // 9 for index in validation] == [0, 1]
    assert data.dropped_prompts == {"train": 0, "validation": 0}
    for name in ("max_train_rows", "max_val_rows"):
        with pytest.raises(ConfigError, match=f"{name}=0: must be at least 1, or null"):
            PromptDataModule(rows, **{name: 0, **options})


def test_prompt_data_module_refuses_long_prompts_on_request(row, tokenizer):
    rows = [row(0), row(1, prompt=[{"role": "user", "content": "9" * 50}])]
    options = {"tokenizer": tokenizer, "prompts_per_step": 1}
    data = PromptDataModule(rows, max_prompt_tokens=20, overlong_prompts="error", **options)
    with pytest.raises(ConfigError, match=r"list, row 1: 52 tokens, more than max_prompt_tokens=20 \(1 such"):
        data.setup("fit")
    data = PromptDataModule(rows, max_prompt_tokens=2, **options)
    with pytest.raises(ConfigError, match="every row has more tokens than max_prompt_tokens=2"):
        data.setup("fit")
    with pytest.raises(ConfigError, match="overlong_prompts='drop'"):
        PromptDataModule(rows, overlong_prompts="drop", **options)  # type: ignore[arg-type]


def test_prompt_data_module_reads_only_validation_data_for_validation(row, tokenizer):
    data = PromptDataModule("absent.parquet", [row(0)], tokenizer=tokenizer, prompts_per_step=1)
    data.setup("validate")
    assert len(data.val_dataloader()) == 1
    with pytest.raises(ConfigError, match="nothing to train on"):
        data.train_dataloader()


def test_prompt_data_module_refuses_a_tokenizer_without_a_chat_template(row, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", None)
    monkeypatch.setattr(tokenizer, "name_or_path", "")
    with pytest.raises(ConfigError, match=rf"the tokenizer \({type(tokenizer).__name__}\) has no chat template"):
        PromptDataModule([row(0)], tokenizer=tokenizer, prompts_per_step=1).setup("fit")


def test_prompt_data_module_passes_chat_template_kwargs_to_the_template(row, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", "{{ mood }}{{ messages[0]['content'] }}")
    mood = {"mood": "!"}
    data = PromptDataModule([row(0)], tokenizer=tokenizer, prompts_per_step=1, chat_template_kwargs=mood)
    data.setup("fit")
    assert tokenizer.decode(next(iter(data.train_dataloader())).prompt_ids[0]) == "!0+1="


def test_prompt_fingerprint_changes_with_order_and_limits(row, tokenizer):
    def fingerprint(rows, **options):
        data = PromptDataModule(rows, tokenizer=tokenizer, prompts_per_step=1, **options)
        data.setup("fit")
        return data.sources["train"].fingerprint

    rows = [row(0), row(1), row(10)]
    assert fingerprint(rows) == fingerprint([dict(entry) for entry in rows])
    assert fingerprint(rows) != fingerprint(rows[::-1])
    assert fingerprint(rows) != fingerprint(rows, max_prompt_tokens=6)


@for_each(("key", "expected"), [("reward_model.ground_truth", "1<|end|>"), ("extra_info.answer", "it is 1<|end|>")])
def test_sft_data_module_tokenizes_prompts_and_responses(row, tokenizer, key, expected):
    data = SFTDataModule([row(0)], tokenizer=tokenizer, prompts_per_step=1, response_key=key)
    data.setup("fit")
    (batch,) = data.train_dataloader()
    assert tokenizer.decode(batch["prompt_ids"][0]) == "<|user|>0+1=<|assistant|>"
    assert tokenizer.decode(batch["response_ids"][0]) == expected


def test_sft_data_module_drops_long_prompts_and_long_responses(row, tokenizer):
    long_prompt = row(1, prompt=[{"role": "user", "content": "9" * 50}])
    long_response = row(2, reward_model={"ground_truth": "2" * 50})
    options = {
        "tokenizer": tokenizer,
        "prompts_per_step": 1,
        "max_prompt_tokens": 20,
        "max_response_tokens": 20,
    }
    data = SFTDataModule([long_prompt, row(0), long_response], **options)
    data.setup("fit")
    assert data.dropped_prompts == {"train": 2}
    (batch,) = data.train_dataloader()
    assert tokenizer.decode(batch["response_ids"][0]) == "1<|end|>"
    data = SFTDataModule([long_response], overlong_prompts="error", **options)
    with pytest.raises(ConfigError, match="list, row 0: 51 tokens, more than max_response_tokens=20"):
        data.setup("fit")


def test_sft_data_module_needs_reward_model_only_for_validation(row, tokenizer):
    rows = [{name: value for name, value in row(0).items() if name != "reward_model"}]
    options = {"tokenizer": tokenizer, "prompts_per_step": 1, "response_key": "extra_info.answer"}
    data = SFTDataModule(rows, **options)
    data.setup("fit")
    (batch,) = data.train_dataloader()
    assert tokenizer.decode(batch["response_ids"][0]) == "it is 1<|end|>"
    with pytest.raises(ConfigError, match="list, row 0, column 'reward_model': it is missing"):
        SFTDataModule(None, rows, **options).setup("validate")


def test_sft_data_module_validates_on_prompts_alone(row, tokenizer):
    rows = [row(0), row(1, reward_model={"ground_truth": ""})]
    data = SFTDataModule(None, rows, tokenizer=tokenizer, prompts_per_step=1)
    data.setup("validate")
    (batch,) = data.val_dataloader()
    assert isinstance(batch, PromptBatch)
    assert batch.rows == [0, 1]


@for_each(
    ("key", "message"),
    [
        ("extra_info.solution", "list, row 0, .*: leads nowhere at 'solution'; there is split, index, answer"),
        ("data_source.x", "leads nowhere at 'x'; there is no further keys"),
        ("extra_info.index", "holds 0, not a text"),
    ],
)
def test_sft_data_module_names_the_row_without_a_response(row, tokenizer, key, message):
    data = SFTDataModule([row(0)], tokenizer=tokenizer, prompts_per_step=1, response_key=key)
    with pytest.raises(ConfigError, match=message):
        data.setup("fit")


def test_data_module_without_a_tokenizer_takes_the_tokenizer_of_the_stage(row, tokenizer):
    data = PromptDataModule([row(0)], prompts_per_step=1)
    with pytest.raises(ConfigError, match=r"PromptDataModule has no tokenizer, .* rows: pass tokenizer="):
        data.setup("fit")
    data.trainer = SimpleNamespace(lightning_module=SimpleNamespace(processor=tokenizer))  # type: ignore[assignment]
    data.setup("fit")
    assert data.sources["train"].batch([0], 0).prompt_ids == [tokenizer.encode("<|user|>0+1=<|assistant|>")]


def test_missing_validation_rows_give_no_warning_of_lightning(row, tokenizer):
    data = PromptDataModule([row(0)], tokenizer=tokenizer, prompts_per_step=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert data.val_dataloader() == []
        warnings.warn("Total length of `list` across ranks is zero. Please make sure of this.", stacklevel=1)
    assert caught == []
