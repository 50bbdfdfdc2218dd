from __future__ import annotations

import json
import subprocess
import sys
from copy import deepcopy

import pytest

from benchmarks.tiny_vision import save_tiny_vision
from rl_plugins.data.parquet import load_rows
from rl_plugins.data.validation import shared_prompts
from rl_plugins.tests.data.prepare_command import main
from rl_plugins.tests.loops import for_each
from rl_plugins.tests.pictures import encoded, picture


def problems(capsys, *arguments):
    """The report of `rl-plugins prepare validate --json`."""
    status = main(["validate", *map(str, arguments), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert status == (1 if found["bad_rows"] or found["shared"] else 0)
    return found


def test_prepare_validate_reports_every_bad_row(row, write_rows, capsys):
    empty = [{"role": "user", "content": " "}]
    rows = [row(number, **({"prompt": empty} if number in (3, 1500) else {})) for number in range(2000)]
    rows[7] = row(7, ability=None)
    first, second = write_rows(rows), write_rows([row(5000)], "b.parquet")
    found = problems(capsys, first, second)
    assert [(bad["row"], bad["field"]) for bad in found["bad_rows"]] == [
        (3, "column 'prompt'"),
        (7, "column 'ability'"),
        (1500, "column 'prompt'"),
    ]
    assert "the prompt is empty" in found["bad_rows"][0]["reason"]
    assert found["rows"] == {str(first): 2000, str(second): 1}
    assert main(["validate", str(first)]) == 1
    printed = capsys.readouterr().out
    assert f"{first}: 2000 rows, 3 bad, 0 duplicates" in printed and "1500" in printed


def test_prepare_validate_prints_markup_and_control_characters_of_data_as_text(row, write_rows, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "500")  # A cell of a table is one line.
    bad = write_rows([row(0, prompt="[bold]1+1=[/red]")], "[bold]a[red]\x1b[2J.parquet")
    train, test = write_rows([row(1)], "[b]train.parquet"), write_rows([row(1)], "[b]test.parquet")
    assert main(["validate", str(bad), str(train), "--test", str(test)]) == 1
    shown = capsys.readouterr().out
    assert f"{bad.parent}/[bold]a[red]␛[2J.parquet: 1 rows, 1 bad" in shown and "got str '[bold]1+1=[/red]'" in shown
    assert f"{test}, row 0 is also in {train}, row 0" in shown and "\x1b" not in shown


def test_prepare_validate_reports_unreadable_files_and_continues(row, write_rows, tmp_path, capsys):
    (tmp_path / "text.parquet").write_text("not parquet")
    bare = write_rows([{name: value for name, value in row(0).items() if name != "reward_model"}], "bare.parquet")
    bad = write_rows([row(0, data_source=None)], "bad.parquet")
    found = problems(capsys, tmp_path / "absent.parquet", tmp_path / "text.parquet", bare, bad)
    reasons = [(entry["row"], entry["reason"][:30]) for entry in found["bad_rows"]]
    assert reasons == [
        (None, "there is no such file. `rl-plu"),
        (None, "not a readable parquet file (P"),
        (None, "column 'reward_model' is missi"),
        (0, "expected a string, got nothing"),
    ]


@for_each(
    ("kind", "good", "bad", "options", "field"),
    [
        ("sft", {"response": "1"}, {"response": " "}, ["--response-key", "response"], "response_key='response'"),
        (
            "preferences",
            {"chosen": "1", "rejected": "2"},
            {"chosen": "1", "rejected": None},
            [],
            "rejected_key='rejected'",
        ),
        (
            "preferences",
            {"chosen": "1", "rejected": "2", "by": 1.0},
            {"chosen": "1", "rejected": "2", "by": None},
            ["--margin-key", "by"],
            "margin_key='by'",
        ),
        (
            "judged",
            {"response": "1", "label": True},
            {"response": "1", "label": None},
            ["--response-key", "response"],
            "label_key='label'",
        ),
        (
            "steps",
            {"steps": ["1"], "labels": [1.0]},
            {"steps": ["1", "2"], "labels": [1.0]},
            ["--steps-key", "steps", "--labels-key", "labels"],
            "labels_key='labels'",
        ),
    ],
)
def test_prepare_validate_checks_each_format(row, write_rows, capsys, kind, good, bad, options, field):
    path = write_rows([row(0, **good), row(1, **bad)])
    (found,) = problems(capsys, path, "--format", kind, *options)["bad_rows"]
    assert (found["row"], found["field"]) == (1, field)


def test_prepare_validate_reports_duplicates_and_rows_in_train_and_test(row, write_rows, capsys):
    train = write_rows([row(0), row(1), row(0), row(2)])
    test = write_rows([row(7), row(2), row(7)], "test.parquet")
    found = problems(capsys, train, "--test", test)
    assert found["duplicates"] == {str(train): 1, str(test): 1}
    assert found["shared"] == [{"test_file": str(test), "test_row": 1, "train_file": str(train), "train_row": 3}]
    assert main(["validate", str(train), "--test", str(test)]) == 1
    assert f"{test}, row 1 is also in {train}, row 3" in capsys.readouterr().out


def test_prepare_validate_compares_and_measures_whole_conversations(write_rows, tokenizer, tmp_path, capsys):
    def talk(reply, **columns):
        return {"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": reply}], **columns}

    plain = [talk("2"), talk("two"), talk("2")]
    train, test = write_rows(plain), write_rows([talk("three"), talk("two")], "test.parquet")
    found = problems(capsys, train, "--test", test, "--format", "conversations")
    assert found["duplicates"] == {str(train): 1, str(test): 0}
    assert [(shared["test_row"], shared["train_row"]) for shared in found["shared"]] == [(1, 1)]
    with_tools = deepcopy(tokenizer)
    with_tools.chat_template = "{% if tools %}{{ tools }}{% endif %}" + tokenizer.chat_template
    with_tools.save_pretrained(tmp_path)
    add = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    path = write_rows([talk("2", tools=None), talk("3", tools=json.dumps([add]))], "tools.parquet")
    tokens = problems(capsys, path, "--format", "conversations", "--tokenizer", tmp_path)["prompt_tokens"]
    assert tokens["max"] > tokens["min"] + len("add")


def test_shared_prompts_compares_messages_and_images(row, write_rows):
    asked, image = [{"role": "user", "content": "<image>?"}], {"bytes": b"1", "path": None}
    train = [row(0), row(1), row(0), *(row(2, prompt=asked, images=[{**image, "bytes": b}]) for b in (b"1", b"2"))]
    test = [row(7), row(0), row(2, prompt=asked, images=[{**image, "bytes": b"2"}]), row(0), row(2, prompt=asked)]
    assert shared_prompts(load_rows(train), load_rows(test)) == {1: 0, 3: 0, 2: 4}
    assert shared_prompts(load_rows(write_rows([row(1)])), load_rows([row(2)])) == {}
    # A row of a data set in Python may have values without a form in JSON.
    odd = row(0, prompt=[{"role": "user", "content": "?", "seen": {1}}], images=3)
    assert shared_prompts(load_rows([row(0), odd]), load_rows([odd])) == {0: 1}


def test_prepare_validate_measures_prompts_in_tokens(row, write_rows, tokenizer, tmp_path, capsys):
    tokenizer.save_pretrained(tmp_path)
    long = [{"role": "user", "content": "9" * 50}]
    path = write_rows([row(number) for number in range(9)] + [row(9, prompt=long)])
    found = problems(capsys, path, "--tokenizer", tmp_path, "--max-prompt-tokens", 20)
    assert found["too_long"] == 1
    assert found["prompt_tokens"] == {"min": 6.0, "median": 6.0, "mean": 10.6, "p95": pytest.approx(31.3), "max": 52.0}
    assert main(["validate", str(path), "--tokenizer", str(tmp_path), "--max-prompt-tokens", "20"]) == 0
    assert "longer than 20 tokens: 1 prompts" in capsys.readouterr().out


def test_prepare_validate_measures_prompts_with_another_chat_template(row, write_rows, tokenizer, tmp_path, capsys):
    without = deepcopy(tokenizer)
    without.chat_template = None
    without.save_pretrained(tmp_path)
    file = tmp_path / "long.jinja"
    file.write_text("{{ '9' * 20 }}{{ messages[0]['content'] }}")
    path = write_rows([row(1)])
    found = problems(capsys, path, "--tokenizer", tmp_path, "--chat-template", file)
    assert found["prompt_tokens"]["min"] > 20
    assert main(["validate", str(path), "--chat-template", str(file)]) == 2
    assert "--chat-template needs a tokenizer: add --tokenizer MODEL, or leave" in capsys.readouterr().err


def test_prepare_validate_reports_prompts_refused_by_the_chat_template(row, write_rows, tokenizer, tmp_path, capsys):
    tokenizer.save_pretrained(tmp_path)
    template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{{ messages[0].content + (1 if messages[0].content == 'late' else '') }}"
    )
    (tmp_path / "chat_template.jinja").write_text(template)
    system = [{"role": "system", "content": "Add."}, *row(0)["prompt"]]
    late = [{"role": "user", "content": "late"}]
    prompts = {0: late, 2: system, 4: system, 5: late}
    path = write_rows([row(number, prompt=prompts.get(number, row(number)["prompt"])) for number in range(7)])
    found = problems(capsys, path, "--tokenizer", tmp_path)
    assert {(bad["row"], bad["field"]) for bad in found["bad_rows"]} == {
        (number, "column 'prompt'") for number in prompts
    }
    reasons = {bad["row"]: bad["reason"] for bad in found["bad_rows"]}
    assert list(reasons) == list(prompts)
    assert all("the roles system, user: no system" in reasons[row] for row in (2, 4))
    assert all("the roles user: can only concat" in reasons[row] for row in (0, 5))
    assert problems(capsys, path)["bad_rows"] == []


def test_prepare_validate_reads_images_and_measures_image_tokens(row, write_rows, tmp_path, capsys):
    save_tiny_vision("llava", tmp_path / "model")
    capsys.readouterr()  # DeepSpeed writes a line when it is imported.
    asked = [{"role": "user", "content": "<image>?"}]
    images = [encoded(picture(1)), encoded(picture(2)), b"text", encoded(picture(1))]
    rows = [row(number, prompt=asked, images=[image]) for number, image in enumerate(images)]
    path = write_rows([*rows, row(4, images=[])])
    for options in ((), ("--tokenizer", tmp_path / "model")):
        found = problems(capsys, path, *options)
        (bad,) = found["bad_rows"]
        assert (bad["row"], bad["field"]) == (2, "column 'images'") and "no image that PIL knows" in bad["reason"]
        # Rows with one question and two images are not the same.
        assert list(found["duplicates"].values()) == [1]
    assert found["prompt_tokens"]["max"] == 16 + len("?") + 2


def test_load_rows_and_prepare_validate_import_no_heavy_library(row, write_rows):
    path = write_rows([row(0)])
    code = (
        "import sys\n"
        "import rl_plugins.data.parquet, rl_plugins.commands.prepare\n"
        "from rl_plugins.tests.data.prepare_command import main\n"
        f"main(['validate', {str(path)!r}])\n"
        "print(sorted({'torch', 'transformers', 'lightning', 'ray', 'pandas'} & set(sys.modules)))"
    )
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout.splitlines()[-1] == "[]"
