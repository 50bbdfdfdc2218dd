from __future__ import annotations

import json
import shlex
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl_plugins.data.parquet import load_rows, prompt_row
from rl_plugins.data.preferences import PreferenceDataModule
from rl_plugins.data.prepare.files import write_splits
from rl_plugins.data.prepare.tasks import addition_rows, gsm8k_answer, last_boxed
from rl_plugins.errors import ConfigError, StorageError
from rl_plugins.launch.compose import compose_config
from rl_plugins.tests.data.prepare_command import main
from rl_plugins.tests.loops import for_each


def write_raw(folder, records):
    folder.mkdir(exist_ok=True)
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    return folder


def test_addition_rows_splits_do_not_overlap():
    splits = addition_rows(below=10, num_train=80, num_test=20, seed=1)
    questions = [row["prompt"][0]["content"] for rows in splits.values() for row in rows]
    assert len(set(questions)) == 100
    for row in splits["train"]:
        left, right = row["prompt"][0]["content"].removesuffix("=").split("+")
        assert row["reward_model"]["ground_truth"] == str(int(left) + int(right))
    assert splits == addition_rows(below=10, num_train=80, num_test=20, seed=1)
    assert splits != addition_rows(below=10, num_train=80, num_test=20, seed=2)
    assert len(addition_rows(below=10**9, num_train=3, num_test=1, seed=0)["train"]) == 3
    with pytest.raises(ConfigError, match="there are only 100 different ones"):
        addition_rows(below=10, num_train=81, num_test=20, seed=1)
    with pytest.raises(ConfigError, match="below=1: choose 2"):
        addition_rows(below=1, num_train=8, num_test=1, seed=1)
    with pytest.raises(ConfigError, match="num_test=0"):
        addition_rows(below=10, num_train=8, num_test=0, seed=1)


def test_prepare_addition_writes_files_and_prints_the_next_command(tmp_path, capsys):
    output = tmp_path / "add"
    command = ["addition", "--output", str(output), "--num-train", "30", "--num-test", "5"]
    assert main(command) == 0
    assert len(load_rows([output / "train.parquet", output / "test.parquet"])) == 35
    printed = capsys.readouterr().out
    assert f"{output / 'train.parquet'}: 30 rows" in printed
    assert f"data.train_files=[{output / 'train.parquet'}]" in printed
    assert sorted(path.name for path in output.iterdir()) == ["test.parquet", "train.parquet"]


def test_prepare_addition_writes_pairs(tmp_path, tokenizer):
    output = tmp_path / "add"
    sizes = ["--below", "12", "--num-train", "80", "--num-test", "5", "--num-dev", "20"]
    assert main(["addition", "--output", str(output), *sizes, "--pairs"]) == 0
    assert main(["addition", "--output", str(tmp_path / "plain"), *sizes]) == 0
    for name in ("train", "test", "dev"):
        # The files written without pairs are the same with pairs.
        assert pq.read_table(output / f"{name}.parquet").equals(pq.read_table(tmp_path / "plain" / f"{name}.parquet"))
    assert not list((tmp_path / "plain").glob("*_pairs.parquet"))
    for name, size in {"train": 80, "dev": 20}.items():
        rows = [*load_rows(output / f"{name}_pairs.parquet")]
        assert [row["prompt"] for row in rows] == [row["prompt"] for row in load_rows(output / f"{name}.parquet")]
        assert len(rows) == size and len({row["margin"] for row in rows}) > 1
        for row in rows:
            right, wrong = int(row["reward_model"]["ground_truth"]), int(row["rejected"])
            assert int(row["chosen"]) == right and wrong >= 0 and row["margin"] == abs(right - wrong) > 0
    options = {"tokenizer": tokenizer, "prompts_per_step": 80, "margin_key": "margin"}
    data = PreferenceDataModule(str(output / "train_pairs.parquet"), **options)
    data.setup("fit")
    assert len(data.sources["train"]) == 80


@pytest.mark.parametrize("folder", ["add", "größe (it's #1)"])
def test_prepare_addition_prints_a_command_that_a_shell_accepts(tmp_path, capsys, folder):
    output = tmp_path / folder
    assert main(["addition", "--output", str(output), "--num-train", "9", "--num-test", "5"]) == 0
    command = capsys.readouterr().out.splitlines()[-1]
    config = compose_config("grpo", shlex.split(command)[3:])
    assert config.data.train_files == [f"{output}/train.parquet"]
    assert config.data.val_files == [f"{output}/test.parquet"]
    plain = f"'data.train_files=[{output}/train.parquet]' 'data.val_files=[{output}/test.parquet]'"
    assert command.endswith(f" model.path=MODEL {plain}") is (folder == "add")


@for_each(
    ("answer", "number"),
    [
        ("so\n#### 42", "42"),
        ("#### -1,234.5", "-1234.5"),
        ("#### 7.", "7"),
        ("#### 1\n#### 2", "2"),
        ("#### $5", "5"),
        ("#### -$1,000", "-1000"),
        ("#### $-5", "-5"),
        ("#### .5", ".5"),
    ],
)
def test_gsm8k_answer_reads_gsm8k_answers(answer, number):
    assert gsm8k_answer(answer) == number


def test_prepare_gsm8k_reads_jsonl_and_parquet(tmp_path):
    records = [{"question": "How many?", "answer": "Six times seven.\n#### 42"}]
    raw = write_raw(tmp_path / "raw", records)
    (raw / "test.jsonl").unlink()
    pq.write_table(pa.Table.from_pylist(records), raw / "test-00000.parquet")
    assert main(["gsm8k", "--input", str(raw), "--output", str(tmp_path / "out"), "--instruction", "Go."]) == 0
    rows = [*load_rows([tmp_path / "out" / "train.parquet", tmp_path / "out" / "test.parquet"])]
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["42", "42"]
    assert [row["extra_info"]["split"] for row in rows] == ["train", "test"]
    assert rows[0]["prompt"] == [{"role": "user", "content": "How many? Go."}]


@for_each(
    ("solution", "answer"),
    [
        (r"\boxed{1} then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{}", ""),
        (r"our answer is $\boxed 2$.", "2"),
        (r"\boxed{1}, and then \boxed 9", "9"),
        (r"$\boxed {3}$", "3"),
        (r"\[ \boxed 2 \]. Thus $x$ is", "2"),
    ],
)
def test_last_boxed_returns_the_last_boxed_answer(solution, answer):
    assert last_boxed(solution) == answer


def test_prepare_math_writes_rows(tmp_path):
    record = {"problem": "1+1?", "solution": r"It is $\boxed{2}$.", "level": "Level 1", "type": "Algebra"}
    raw = write_raw(tmp_path / "raw", [record])
    assert main(["math", "--input", str(raw), "--output", str(tmp_path / "out")]) == 0
    row = load_rows(tmp_path / "out" / "train.parquet").rows[0]
    assert row["reward_model"]["ground_truth"] == "2"
    assert row["extra_info"]["level"] == "Level 1"
    assert row["prompt"][0]["content"].endswith(r"within \boxed{}.")


def test_prepare_math_leaves_out_records_with_an_empty_box(tmp_path, capsys):
    raw = write_raw(tmp_path / "raw", [{"problem": "1+1?", "solution": rf"\boxed{{{box}}}"} for box in ("2", " ", "")])
    command = ["math", "--input", str(raw), "--output", str(tmp_path / "out")]
    assert main(command) == 0
    assert "2 records without an answer are left out, such as" in (printed := capsys.readouterr().out)
    assert "train.jsonl, line 2\n" in printed and "train.parquet: 1 rows" in printed
    (raw / "test.jsonl").write_text("")
    assert main(command) == 2
    assert "test.jsonl: there is no record with an answer" in capsys.readouterr().err


@for_each(
    ("second_line", "message"),
    [
        ('{"question": "a"}', "train.jsonl, line 2: no text under 'answer'; the record has question"),
        ('{"question": "a", "answer": "b"}', "train.jsonl, line 2: the answer has no '#### number': 'b'"),
        ('{"question": ', "train.jsonl, line 2: not valid JSON"),
        ("[1]", "train.jsonl, line 2: expected a JSON object"),
    ],
)
def test_prepare_gsm8k_names_a_bad_line_and_writes_nothing(tmp_path, capsys, second_line, message):
    raw = write_raw(tmp_path / "raw", [{"question": "a", "answer": "#### 1"}])
    with (raw / "train.jsonl").open("a") as file:
        file.write(second_line + "\n")
    assert main(["gsm8k", "--input", str(raw), "--output", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_prepare_jsonl_refuses_csv(tmp_path, capsys):
    table = tmp_path / "rows.csv"
    table.write_text("question,answer\n1+1=,2\n")
    options = ["--output", str(tmp_path / "out"), "--data-source", "math", "--prompt", "question"]
    assert main(["jsonl", "--train", str(table), *options, "--ground-truth", "answer"]) == 2
    assert "rows.csv: a table of texts" in (error := capsys.readouterr().err)
    assert "pandas.read_csv('rows.csv').to_parquet('rows.parquet')" in error


def test_prepare_math_names_a_missing_split(tmp_path, capsys):
    assert main(["math", "--input", str(tmp_path), "--output", str(tmp_path / "out")]) == 2
    assert "expected one train.jsonl or train.parquet, found none" in capsys.readouterr().err


def test_write_splits_writes_rows_with_empty_extra_info(tmp_path):
    files = write_splits({"train": [prompt_row("2+3=", "5"), prompt_row("4+4=", "8")]}, tmp_path)
    first, second = load_rows(files["train"])
    assert first["extra_info"] == {"split": "train", "index": 0} and second["extra_info"]["index"] == 1
    files = write_splits({"test": [prompt_row("2+3=", "5"), prompt_row("4+4=", "8", level=2)]}, tmp_path)
    assert [row["extra_info"] for row in load_rows(files["test"])] == [{"level": None}, {"level": 2}]


def test_write_splits_keeps_the_old_files_when_a_write_fails(tmp_path, row, monkeypatch):
    write_splits({"train": [row(0)], "test": [row(1)]}, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    original, calls = pq.write_table, []

    def fail_on_second(table, path):
        calls.append(path)
        if len(calls) == 2:
            raise OSError("the disk is full")
        original(table, path)

    monkeypatch.setattr(pq, "write_table", fail_on_second)
    with pytest.raises(StorageError, match="disk is full"):
        write_splits({"train": [row(2)], "test": [row(3)]}, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    with pytest.raises(ConfigError, match="train, row 0, column 'prompt'"):
        write_splits({"train": [row(0, prompt=[])]}, tmp_path)


def test_prepare_verifiers_names_the_way_to_the_package(monkeypatch, tmp_path, capsys):
    # No such package, whatever is installed.
    monkeypatch.setitem(sys.modules, "verifiers", None)
    monkeypatch.delitem(sys.modules, "rl_plugins.environments.verifiers_agent", raising=False)
    assert main(["verifiers", "--env", "my-env", "--output", str(tmp_path)]) == 2
    assert "pip install 'rl-plugins[verifiers]'" in capsys.readouterr().err
    for text, fault in (("[1]", "[1]: give an object"), ("{", "{: no JSON")):
        assert main(["verifiers", "--env", "my-env", "--args", text, "--output", str(tmp_path)]) == 2
        assert fault in capsys.readouterr().err
