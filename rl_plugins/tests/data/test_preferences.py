"""Pairs and judged responses: batches, dropped rows, and errors with file, row and field."""

from __future__ import annotations

import math
from typing import Any

import pytest

from benchmarks.tiny_vision import processor
from rl_plugins.data.images import IMAGE_INPUTS
from rl_plugins.data.preferences import PairBatch, PreferenceDataModule, UnpairedBatch
from rl_plugins.data.prompts import PromptBatch
from rl_plugins.errors import ConfigError
from rl_plugins.models.tiny import build_tokenizer
from rl_plugins.tests import pictures
from rl_plugins.tests.loops import for_each
from rl_plugins.tests.pictures import picture


@pytest.fixture
def pair_row(row):
    def make(number: int, **changes: Any) -> dict[str, Any]:
        return row(number, **{"chosen": f"it is {number + 1}", "rejected": str(number), "margin": 0.5, **changes})

    return make


@pytest.fixture
def judged_row(row):
    def make(number: int, **changes: Any) -> dict[str, Any]:
        return row(number, **{"response": f"it is {number}", "good": number % 2 == 0, **changes})

    return make


def train_batches(source: Any, tokenizer: Any, prompts_per_step: int = 1, **options: Any) -> list[Any]:
    data = PreferenceDataModule(source, tokenizer=tokenizer, prompts_per_step=prompts_per_step, **options)
    data.setup("fit")
    return list(data.train_dataloader())


def texts(tokenizer: Any, ragged: list[list[int]]) -> list[str]:
    return [tokenizer.decode(ids) for ids in ragged]


def test_preference_data_module_tokenizes_pairs_with_end_tokens(pair_row, write_rows, tokenizer):
    path = write_rows([pair_row(number) for number in range(3)])
    (batch,) = train_batches(str(path), tokenizer, 3)
    assert isinstance(batch, PairBatch) and len(batch) == 3 and sorted(batch.rows) == [0, 1, 2]
    assert texts(tokenizer, batch.prompt_ids) == [f"<|user|>{row}+1=<|assistant|>" for row in batch.rows]
    assert texts(tokenizer, batch.chosen_ids) == [f"it is {row + 1}<|end|>" for row in batch.rows]
    assert texts(tokenizer, batch.rejected_ids) == [f"{row}<|end|>" for row in batch.rows]
    assert batch.margins == [0.0] * 3


def test_preference_data_module_reads_keys_inside_columns_and_margins(row, tokenizer):
    source = [row(0, extra_info={"a": "good", "b": "bad", "by": 2})]
    keys: dict[str, Any] = {"chosen_key": "extra_info.a", "rejected_key": "extra_info.b", "margin_key": "extra_info.by"}
    (batch,) = train_batches(source, tokenizer, **keys)
    assert texts(tokenizer, batch.chosen_ids + batch.rejected_ids) == ["good<|end|>", "bad<|end|>"]
    assert batch.margins == [2.0] and isinstance(batch.margins[0], float)


def test_preference_data_module_with_label_key_serves_unpaired_responses(judged_row, write_rows, tokenizer):
    path = write_rows([judged_row(number) for number in range(3)])
    (batch,) = train_batches(str(path), tokenizer, 3, label_key="good")
    assert isinstance(batch, UnpairedBatch) and len(batch) == 3
    assert batch.labels == [row % 2 == 0 for row in batch.rows]
    assert texts(tokenizer, batch.response_ids) == [f"it is {row}<|end|>" for row in batch.rows]
    assert texts(tokenizer, batch.prompt_ids) == [f"<|user|>{row}+1=<|assistant|>" for row in batch.rows]


@for_each("too_long", ["prompt", "chosen", "rejected"])
def test_preference_data_module_drops_or_refuses_long_rows(pair_row, tokenizer, too_long):
    text = "9" * 50
    change = [{"role": "user", "content": text}] if too_long == "prompt" else text
    rows = [pair_row(0, **{too_long: change}), pair_row(1)]
    limits = {"max_prompt_tokens": 20, "max_response_tokens": 20}
    (batch,) = train_batches(rows, tokenizer, **limits)
    assert batch.rows == [1]
    option = "max_prompt_tokens" if too_long == "prompt" else "max_response_tokens"
    with pytest.raises(ConfigError, match=rf"list, row 0: 5\d tokens, more than {option}=20"):
        train_batches(rows, tokenizer, overlong_prompts="error", **limits)


def test_preference_data_module_refuses_data_without_short_rows(pair_row, tokenizer):
    rows = [pair_row(0, prompt=[{"role": "user", "content": "9" * 50}]), pair_row(1, chosen="2" * 50)]
    with pytest.raises(ConfigError, match="every row is longer than max_prompt_tokens=20 or max_response_tokens=20"):
        train_batches(rows, tokenizer, max_prompt_tokens=20, max_response_tokens=20)


def test_preference_data_module_drops_long_unpaired_responses(judged_row, tokenizer):
    rows = [judged_row(0, response="2" * 50), judged_row(1)]
    (batch,) = train_batches(rows, tokenizer, label_key="good", max_response_tokens=20)
    assert batch.rows == [1] and batch.labels == [False]


def validation_batch(rows: Any, tokenizer: Any, **options: Any) -> Any:
    data = PreferenceDataModule(None, rows, tokenizer=tokenizer, prompts_per_step=1, **options)
    data.setup("validate")
    (batch,) = data.val_dataloader()
    return batch


def test_preference_data_module_validates_on_prompts_or_responses(row, pair_row, judged_row, tokenizer):
    # Prompts for sampling need no responses.
    batch = validation_batch([row(0), row(1)], tokenizer)
    assert isinstance(batch, PromptBatch) and batch.rows == [0, 1]
    batch = validation_batch([pair_row(0), pair_row(1)], tokenizer, validate_on="responses")
    assert isinstance(batch, PairBatch) and batch.rows == [0, 1]
    judged = {"label_key": "good", "validate_on": "responses"}
    batch = validation_batch([judged_row(0), judged_row(1)], tokenizer, **judged)
    assert isinstance(batch, UnpairedBatch) and batch.rows == [0, 1]
    with pytest.raises(ConfigError, match="list, row 0, chosen_key='chosen': leads nowhere"):
        validation_batch([row(0)], tokenizer, validate_on="responses")


def test_preference_fingerprint_changes_with_texts_margins_labels_and_order(pair_row, judged_row, tokenizer):
    def fingerprint(rows: Any, **options: Any) -> str:
        data = PreferenceDataModule(rows, tokenizer=tokenizer, prompts_per_step=1, **options)
        data.setup("fit")
        return data.sources["train"].fingerprint

    def of_pairs(*rows: Any) -> str:
        return fingerprint(list(rows), margin_key="margin")

    def of_judged(*rows: Any) -> str:
        return fingerprint(list(rows), label_key="good")

    assert of_pairs(pair_row(0), pair_row(1)) == of_pairs(pair_row(0), pair_row(1))
    others = [pair_row(0, margin=0.25), pair_row(0, chosen="1"), pair_row(0, rejected="x"), pair_row(2)]
    assert len({of_pairs(other, pair_row(1)) for other in [pair_row(0), *others]}) == 5
    assert of_pairs(pair_row(0), pair_row(1)) != of_pairs(pair_row(1), pair_row(0))
    others = [judged_row(0, good=False), judged_row(0, response="x"), judged_row(2)]
    assert len({of_judged(other, judged_row(1)) for other in [judged_row(0), *others]}) == 4


@for_each(
    ("changes", "message"),
    [
        ({"chosen": None}, "chosen_key='chosen': holds None, not a text"),
        ({"chosen": " "}, "chosen_key='chosen': holds ' ', not a text"),
        ({"rejected": 7}, "rejected_key='rejected': holds 7, not a text"),
        ({"rejected": "it is 2"}, "chosen_key='chosen' and rejected_key='rejected': they hold the same text 'it is 2'"),
        ({"margin": math.nan}, "margin_key='margin': holds nan, not a finite number"),
        ({"margin": True}, "margin_key='margin': holds True, not a finite number"),
        ({"margin": "1"}, "margin_key='margin': holds '1', not a finite number"),
    ],
)
def test_preference_data_module_names_a_bad_pair(pair_row, tokenizer, changes, message):
    with pytest.raises(ConfigError, match=f"list, row 1, {message}"):
        train_batches([pair_row(0), pair_row(1, **changes)], tokenizer, margin_key="margin")


@for_each(
    ("changes", "message"),
    [
        ({"response": ""}, "response_key='response': holds '', not a text"),
        ({"good": 1}, r"label_key='good': holds 1, not true \(desirable\) or false"),
        ({"good": None}, "label_key='good': holds None"),
    ],
)
def test_preference_data_module_names_a_bad_judged_row(judged_row, tokenizer, changes, message):
    with pytest.raises(ConfigError, match=f"list, row 1, {message}"):
        train_batches([judged_row(0), judged_row(1, **changes)], tokenizer, label_key="good")


def test_preference_data_module_names_the_file_of_a_missing_key(pair_row, write_rows, tokenizer):
    path = write_rows([pair_row(0)])
    message = (
        rf"{path}, row 0, rejected_key='extra_info.worse': leads nowhere at 'worse'; there is split, index, answer"
    )
    with pytest.raises(ConfigError, match=message):
        train_batches(str(path), tokenizer, rejected_key="extra_info.worse")


def test_preference_data_module_refuses_contradicting_options(tokenizer):
    options: dict[str, Any] = {"tokenizer": tokenizer, "prompts_per_step": 1}
    unknown: Any = "both"
    with pytest.raises(ConfigError, match="validate_on='both': choose"):
        PreferenceDataModule(None, validate_on=unknown, **options)
    with pytest.raises(ConfigError, match=r"label_key='good' is .* margin_key='margin' is for pairs"):
        PreferenceDataModule(None, margin_key="margin", label_key="good", **options)


def test_preference_data_module_refuses_a_tokenizer_without_end_token(pair_row):
    endless = build_tokenizer()
    endless.eos_token = None
    with pytest.raises(ConfigError, match="has no end-of-sequence token"):
        train_batches([pair_row(0)], endless)


def test_preference_data_module_needs_reward_model_only_for_prompts(pair_row, write_rows, tokenizer):
    rows = [{name: value for name, value in pair_row(number).items() if name != "reward_model"} for number in range(2)]
    path = str(write_rows(rows))
    assert len(train_batches(path, tokenizer)) == 2
    pairs = PreferenceDataModule(path, path, tokenizer=tokenizer, prompts_per_step=1, validate_on="responses")
    pairs.setup("fit")
    answered = PreferenceDataModule(path, path, tokenizer=tokenizer, prompts_per_step=1)
    with pytest.raises(ConfigError, match="column 'reward_model' is missing"):
        answered.setup("fit")


def test_preference_data_module_serves_the_images_of_pairs_and_of_judged_responses():
    responses = {"chosen": "red", "rejected": "green", "response": "red", "good": True}
    rows = [{**pictures.row("<image>a", picture(1)), **responses}, {**pictures.row("b"), **responses}]
    for options in ({}, {"label_key": "good"}):
        (batch,) = train_batches(rows, processor("llava"), 2, **options)
        assert [inputs is not None for inputs in batch.image_inputs] == [number == 0 for number in batch.rows]
        samples = batch.samples(pad_token_id=0)
        repeats = len(samples) // 2
        assert repeats == (1 if options else 2) and samples.columns[IMAGE_INPUTS] == repeats * batch.image_inputs
    batch = validation_batch(rows, processor("llava"), validate_on="responses")
    assert [inputs is not None for inputs in batch.image_inputs] == [True, False]
