from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl_plugins.data.parquet import load_rows
from rl_plugins.data.preferences import PreferenceDataModule
from rl_plugins.data.prepare import conversion
from rl_plugins.data.prepare.files import read_records, write_rows
from rl_plugins.data.process_rewards import ProcessRewardDataModule
from rl_plugins.data.sft import SFTDataModule
from rl_plugins.errors import ConfigError
from rl_plugins.tests.cases import case
from rl_plugins.tests.data.prepare_command import main
from rl_plugins.tests.loops import for_each

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "2+2?"}
ASSISTANT = {"role": "assistant", "content": "4"}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}


def write_lines(path: Path, *records: Any) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def convert(tmp_path: Path, records: list[Any], *options: str) -> list[Any]:
    path = write_lines(tmp_path / "raw.jsonl", *records)
    assert main(["jsonl", "--train", path, "--output", str(tmp_path / "out"), "--data-source", "mine", *options]) == 0
    return pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()


def test_prepare_jsonl_converts_answers_of_any_type(tmp_path, capsys):
    records = [{"q": "2+2?", "a": answer, "meta": {"level": 3}} for answer in ("4", 4, 4.5, ["4", "four"], True)]
    fields = ["--prompt", "q", "--ground-truth", "a", "--extra", "meta.level", "--instruction", "Go."]
    rows = convert(tmp_path, records, *fields)
    truths = [row["reward_model"]["ground_truth"] for row in rows]
    assert truths == ["4", "4", "4.5", '["4", "four"]', "true"]
    assert rows[1] == {
        "prompt": [{"role": "user", "content": "2+2? Go."}],
        "data_source": "mine",
        "ability": "general",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"split": "train", "index": 1, "meta.level": "3"},
    }
    out = tmp_path / "out" / "train.parquet"
    assert f"recipes.grpo model.path=MODEL 'data.train_files=[{out}]'" in capsys.readouterr().out
    assert len(load_rows(out)) == 5


@for_each("prompt", ["2+2?", [USER], [USER, ASSISTANT]])
@for_each("response", ["4", [USER, ASSISTANT]])
def test_prepare_jsonl_converts_responses_for_sft(tmp_path, tokenizer, capsys, prompt, response):
    convert(tmp_path, [{"p": prompt, "r": response}], "--prompt", "p", "--response", "r")
    assert "-m rl_plugins.recipes.sft model.path=MODEL data.response_key=response" in capsys.readouterr().out
    path = str(tmp_path / "out" / "train.parquet")
    data = SFTDataModule(path, tokenizer=tokenizer, prompts_per_step=1, response_key="response")
    data.setup("fit")
    (batch,) = data.train_dataloader()
    assert tokenizer.decode(batch["prompt_ids"][0]) == "<|user|>2+2?<|assistant|>"
    assert tokenizer.decode(batch["response_ids"][0]) == "4<|end|>"


def test_prepare_jsonl_splits_a_conversation_into_prompt_and_response(tmp_path):
    (row,) = convert(tmp_path, [{"m": [SYSTEM, USER, ASSISTANT]}], "--prompt", "m", "--response", "m")
    assert row["prompt"] == [SYSTEM, USER] and row["response"] == "4"
    # The response is the last message alone.
    first = {"role": "assistant", "content": "Let me see."}
    (row,) = convert(tmp_path, [{"m": [USER, first, ASSISTANT]}], "--prompt", "m", "--response", "m")
    assert row["prompt"] == [USER, first] and row["response"] == "4"


@for_each("options", [["--response", "m"], ["--chosen", "m", "--rejected", "r"]])
def test_prepare_jsonl_refuses_a_response_after_more_messages_than_the_prompt(tmp_path, capsys, options):
    for messages in ([USER, ASSISTANT, USER, ASSISTANT], [SYSTEM, USER, ASSISTANT]):
        path = write_lines(tmp_path / "raw.jsonl", {"p": "2+2?", "m": messages, "r": "5"})
        command = ["jsonl", "--train", path, "--output", str(tmp_path / "out"), "--data-source", "mine"]
        assert main([*command, "--prompt", "p", *options]) == 2
        said = capsys.readouterr().err
        assert (
            f"='m': {len(messages) - 1} messages are before the response, and --prompt has 1: name this field" in said
        )
        assert main([*command, "--prompt", "m", *options]) == 0


@for_each("field", ["reasoning_content", "reasoning", "thinking"])
def test_prepare_jsonl_keeps_the_reasoning_of_a_response(tmp_path, field):
    thought = {**ASSISTANT, field: "2 and 2\nare 4.\n"}
    text = "<think>\n2 and 2\nare 4.\n</think>\n\n4"
    whole = {**thought, "content": text}
    for messages, response in (([USER, thought], text), ([USER, whole], text), ([USER, {**thought, field: ""}], "4")):
        (row,) = convert(tmp_path, [{"m": messages}], *CONVERSATION)
        assert row["response"] == response
        assert row["reward_model"]["ground_truth"] == "4"
    (row,) = convert(tmp_path, [{"m": [USER, thought, USER, ASSISTANT]}], *CONVERSATION)
    assert row["prompt"] == [USER, ASSISTANT, USER], "a template leaves the reasoning of earlier turns out"
    (row,) = convert(tmp_path, [{"m": [USER], "c": [thought], "r": [ASSISTANT]}], *PAIR)
    assert (row["chosen"], row["rejected"]) == (text, "4")


def test_prepare_jsonl_takes_the_response_as_the_ground_truth_for_sft_alone(tmp_path):
    record = {"p": "2+2?", "good": "4", "bad": "5", "ok": False, "steps": ["4"], "labels": [1]}
    for options, truth in (
        (["--response", "good"], "4"),
        (["--response", "bad", "--ground-truth", "good"], "4"),
        (["--response", "bad", "--label", "ok"], ""),
        (["--chosen", "good", "--rejected", "bad"], ""),
        (["--steps", "steps", "--labels", "labels"], ""),
    ):
        with case(" ".join(options)):
            convert(tmp_path, [record], "--prompt", "p", *options)
            (row,) = load_rows(tmp_path / "out" / "train.parquet")
            assert row["reward_model"]["ground_truth"] == truth


def test_prepare_jsonl_converts_pairs_judged_responses_and_steps(tmp_path, tokenizer, capsys):
    options: dict[str, Any] = {"tokenizer": tokenizer, "prompts_per_step": 1}
    path = str(tmp_path / "out" / "train.parquet")
    record = {"p": "2+2?", "good": [USER, ASSISTANT], "bad": "5", "by": 2}
    convert(tmp_path, [record], "--prompt", "p", "--chosen", "good", "--rejected", "bad", "--margin", "by")
    assert "recipes.reward_modeling model.path=MODEL data.margin_key=margin" in capsys.readouterr().out
    pairs = PreferenceDataModule(path, margin_key="margin", **options)
    convert(tmp_path, [{"p": "2+2?", "r": "4", "ok": True}], "--prompt", "p", "--response", "r", "--label", "ok")
    assert "loss.name=kto data.response_key=response data.label_key=label" in capsys.readouterr().out
    judged = PreferenceDataModule(path, response_key="response", label_key="label", **options)
    judged.setup("fit")
    record = {"p": "2+2?", "s": ["2+2", "4"], "l": [True, None]}
    convert(tmp_path, [record], "--prompt", "p", "--steps", "s", "--labels", "l")
    assert "loss.name=process_reward data.steps_key=steps data.labels_key=labels" in capsys.readouterr().out
    steps = ProcessRewardDataModule(path, steps_key="steps", labels_key="labels", **options)
    steps.setup("fit")
    with pytest.raises(ConfigError, match="chosen_key='chosen'"):
        pairs.setup("fit")


def test_prepare_jsonl_test_share_holds_out_prompts(tmp_path):
    records = [{"q": f"{number % 500}?", "a": "1"} for number in range(1000)]
    path, out = write_lines(tmp_path / "raw.jsonl", *records), tmp_path / "out"
    fields = ["--data-source", "m", "--prompt", "q", "--ground-truth", "a"]
    assert main(["jsonl", "--train", path, "--output", str(out), *fields, "--test-share", "0.2"]) == 0
    train, test = (load_rows(out / f"{split}.parquet") for split in ("train", "test"))
    assert len(train) + len(test) == 1000 and 120 < len(test) < 280
    assert not {row["prompt"][0]["content"] for row in train} & {row["prompt"][0]["content"] for row in test}
    assert {row["extra_info"]["split"] for row in test} == {"test"}
    assert main(["validate", str(out / "train.parquet"), "--test", str(out / "test.parquet")]) == 0
    # With a test file, all test rows come from the test file.
    both = ["jsonl", "--train", path, "--test", path, "--output", str(out), *fields, "--test-share", "0.2"]
    assert main(both) == 0
    assert [len(load_rows(out / f"{split}.parquet")) for split in ("train", "test")] == [1000, 1000]


def test_split_field_of_a_record_does_not_decide_the_file():
    # The command line refuses this field of `extra_info`.
    fields = conversion.Conversion(conversion.FieldNames("q", ground_truth="a"), "mine", extra=("split",))
    records = [("line 1", {"q": "2+2?", "a": "4", "split": "test"})]
    for share, file in ((0.0, "train"), (0.999999, "test")):
        ((target, row),) = conversion.convert({"train": records}, fields, share)
        assert target == row["extra_info"]["split"] == file


def save_to_disk(folder: Path, rows: list[Any], files: int = 2) -> None:
    """Write the files of `Dataset.save_to_disk` in Hugging Face's `datasets`."""
    folder.mkdir(parents=True)
    table, names = pa.Table.from_pylist(rows), [f"data-{n:05d}-of-{files:05d}.arrow" for n in range(files)]
    for number, name in enumerate(names):
        part = table.slice(number * len(rows) // files, len(rows) // files)
        with pa.ipc.new_stream(folder / name, table.schema) as stream:
            stream.write_table(part, max_chunksize=2)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "f", "_split": folder.name}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")


def test_prepare_hf_converts_data_sets_of_save_to_disk(tmp_path, capsys):
    saved, out = tmp_path / "saved", tmp_path / "out"
    rows = [{"question": f"{number}+1?", "answer": number + 1} for number in range(8)]
    save_to_disk(saved / "train", rows)
    save_to_disk(saved / "validation", rows[:2])
    (saved / "dataset_dict.json").write_text('{"splits": ["train", "validation"]}')
    fields = ["--data-source", "m", "--prompt", "question", "--ground-truth", "answer"]
    command = ["hf", "--input", str(saved), "--output", str(out), *fields]
    assert main([*command, "--test-split", "test"]) == 2
    assert "there is no split 'test'; there is train, validation" in capsys.readouterr().err
    assert main([*command, "--test-split", "validation"]) == 0
    assert [row["reward_model"]["ground_truth"] for row in load_rows(out / "train.parquet")] == list("12345678")
    assert len(load_rows(out / "test.parquet")) == 2
    # A single split, and a folder without a data set.
    assert main(["hf", "--input", str(saved / "train"), "--output", str(out), *fields]) == 0
    assert main(["hf", "--input", str(tmp_path), "--output", str(out), *fields]) == 2
    assert "no data set written with save_to_disk" in capsys.readouterr().err
    (saved / "train" / "data-00001-of-00002.arrow").write_bytes(b"nothing")
    assert main([*command]) == 2
    assert "data-00001-of-00002.arrow: not a readable arrow file" in capsys.readouterr().err


def test_prepare_hf_names_a_missing_or_cut_file_of_a_saved_data_set(tmp_path, capsys):
    saved, out = tmp_path / "saved", tmp_path / "out"
    save_to_disk(saved / "train", [{"q": "1?", "a": 1}] * 2)
    splits, state = saved / "dataset_dict.json", saved / "train" / "state.json"
    splits.write_text('{"splits": ["train"]}')
    whole = state.read_text()
    for file, text in ((state, whole[:-4]), (state, ""), (state, "{}"), (state, None), (splits, '{"splits": ["tr')):
        file.unlink() if text is None else file.write_text(text)
        assert main(["hf", "--input", str(saved), "--output", str(out), "--data-source", "m", *PROMPTS]) == 2
        assert f"{file}: not readable (" in (error := capsys.readouterr().err) and "save the data set again" in error
        assert not list(out.glob("*"))


PROMPTS = ["--prompt", "q", "--ground-truth", "a"]
CONVERSATION = ["--prompt", "m", "--response", "m"]
PAIR = ["--prompt", "m", "--chosen", "c", "--rejected", "r"]


@for_each(
    ("record", "options", "message"),
    [
        ({"q": "1?"}, PROMPTS, "raw.jsonl, line 2, --ground-truth='a': leads nowhere at 'a'; there is q"),
        ({"q": "1?", "a": None}, PROMPTS, "line 2, --ground-truth='a': holds nothing"),
        ({"q": " ", "a": "1"}, PROMPTS, "line 2, column 'prompt': the prompt is empty"),
        ({"q": 7, "a": "1"}, PROMPTS, "line 2, column 'prompt': expected a list"),
        ({"q": [ASSISTANT], "a": "1"}, PROMPTS, "line 2, column 'prompt': the prompt is empty"),
        ({"q": "1?", "a": "1"}, [*PROMPTS, "--extra", "level"], "line 2, --extra='level': leads nowhere"),
        (
            {"q": "1?", "a": 1},
            ["--prompt", "q", "--response", "a"],
            "line 2, response_key='response': holds 1, not a",
        ),
        (
            {"q": "1?", "a": "1", "b": "1"},
            ["--prompt", "q", "--chosen", "a", "--rejected", "b"],
            "line 2, chosen_key='chosen' and rejected_key='rejected': they hold the same text",
        ),
        # No float has 401 digits.
        (
            {"q": "1?", "a": "1", "b": "2", "by": 10**400},
            ["--prompt", "q", "--chosen", "a", "--rejected", "b", "--margin", "by"],
            f"line 2, margin_key='margin': holds {10**400}, not a finite number",
        ),
        ({"m": [USER, ASSISTANT, USER]}, CONVERSATION, "line 2, --response='m': the last message has the role 'user'"),
        (
            {"m": [USER, {**ASSISTANT, "thinking": ["2"]}]},
            CONVERSATION,
            "line 2, --response='m': a message has the reasoning \"['2']\": write a text",
        ),
        ({"m": [USER, CALL]}, CONVERSATION, "line 2, --response='m': a message has tool_calls"),
        ({"m": [USER, CALL, ASSISTANT]}, CONVERSATION, "line 2, --prompt='m': a message has tool_calls"),
        (
            {"m": [{"role": "user", "content": [{"type": "text", "text": "2+2?"}]}, ASSISTANT]},
            [*CONVERSATION, "--instruction", "Think."],
            "line 2, --prompt='m': a message has the content \"[{'type': 'text'",
        ),
        (
            {"m": [{"role": "user", "content": None}, ASSISTANT]},
            [*CONVERSATION, "--instruction", "Think."],
            "line 2, --prompt='m': a message has the content 'None': write a text",
        ),
        ({}, ["--prompt", "q"], "no field makes no file: give --ground-truth for prompts; --response for sft"),
        ({}, ["--prompt", "q", "--chosen", "a"], "--chosen makes no file"),
        ({}, [*PROMPTS, "--margin", "m"], "--ground-truth, --margin makes no file"),
        ({}, [*PROMPTS, "--extra", "level", "split"], "--extra split: extra_info has a field of this name already"),
        ({}, [*PROMPTS, "--extra", "index"], "--extra index: extra_info has a field of this name already: rename"),
        ({}, [*PROMPTS, "--test-share", "1"], "--test-share=1.0: must be from 0 to below 1"),
    ],
)
def test_prepare_jsonl_names_a_bad_record_and_writes_nothing(tmp_path, capsys, record, options, message):
    good = {"q": "0?", "a": "0", "b": "1", "by": 1, "level": 1, "m": [USER, ASSISTANT]}
    path = write_lines(tmp_path / "raw.jsonl", good, record)
    assert main(["jsonl", "--train", path, "--output", str(tmp_path / "out"), "--data-source", "m", *options]) == 2
    assert message in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("*"))


def test_prepare_jsonl_names_a_missing_file(tmp_path, capsys):
    path = str(tmp_path / "absent.jsonl")
    assert main(["jsonl", "--train", path, "--output", str(tmp_path), "--data-source", "m", *PROMPTS]) == 2
    assert "absent.jsonl: there is no such file" in capsys.readouterr().err


def test_prepare_jsonl_refuses_a_split_without_records_and_writes_nothing(tmp_path, capsys):
    empty, good = (write_lines(tmp_path / f"{name}.jsonl", *rows) for name, rows in
                   {"empty": [], "good": [{"q": "0?", "a": "0"}]}.items())  # fmt: skip
    for train, test, split in ((empty, good, "train"), (good, empty, "test")):
        files = ["--train", train, "--test", test, "--output", str(tmp_path / "out")]
        assert main(["jsonl", *files, "--data-source", "m", *PROMPTS]) == 2
        assert f"the input of the split '{split}' has no records" in capsys.readouterr().err
        assert not list((tmp_path / "out").glob("*"))


def test_write_rows_keeps_the_old_files_when_a_row_does_not_fit(tmp_path):
    schema = pa.schema({"a": pa.int64()})
    write_rows([("train", {"a": 1})], schema, tmp_path)
    with pytest.raises(ConfigError, match="train, row 2"):
        write_rows([("train", {"a": 1}), ("train", {"a": "x"})], schema, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["train.parquet"]
    assert pq.read_table(tmp_path / "train.parquet").to_pylist() == [{"a": 1}]


def test_read_records_names_a_line_with_half_of_a_character(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text('{"a": "\\ud83d\\ude00"}\n{"a": ["\\ud83d"]}\n')
    with pytest.raises(ConfigError, match=r"train.jsonl, line 2: \\ud83d is half of a character"):
        list(read_records(path))


def test_read_records_names_a_line_that_is_not_utf_8_or_too_deep(tmp_path):
    path = tmp_path / "train.jsonl"
    for line in (b'{"a": "\xff"}', b"[" * 10**5, b"1" * 5000):
        path.write_bytes(b'{"a": 1}\n' + line)
        with pytest.raises(ConfigError, match=r"train.jsonl, line 2: not valid JSON"):
            list(read_records(path))
    path.write_bytes('\ufeff{"a": 1}'.encode())
    assert [record for _, record in read_records(path)] == [{"a": 1}]


def test_read_records_names_a_line_with_a_key_twice(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text('{"a": {"b": 1}, "c": {"b": 2}}\n{"a": [{"b": 1, "c": 2, "b": 1}]}\n')
    with pytest.raises(
        ConfigError, match=r"train.jsonl, line 2: not valid JSON \(an object has several values under the key 'b'\)"
    ):
        list(read_records(path))
