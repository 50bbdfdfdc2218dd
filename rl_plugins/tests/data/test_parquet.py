from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl_plugins.config.data import MixturePart
from rl_plugins.data import parquet
from rl_plugins.data.experience import ROUTED_EXPERTS
from rl_plugins.data.images import IMAGE_FAULT, IMAGE_INPUTS, PROMPT_IMAGES
from rl_plugins.data.orders import load_parts
from rl_plugins.data.parquet import COLUMNS, OWN_COLUMNS, UNSCORED_COLUMNS, ParquetRows, load_rows, prompt_row
from rl_plugins.errors import ConfigError, RowError
from rl_plugins.tests.loops import for_each


def test_load_rows_numbers_rows_over_all_files(row, write_rows):
    first = write_rows([row(0), row(1)], "a.parquet")
    second = write_rows([row(2), row(3)], "b.parquet")
    loaded = load_rows([first, str(second)])
    assert [entry["extra_info"]["index"] for entry in loaded] == [0, 1, 2, 3]
    assert loaded.location(1) == f"{first}, row 1"
    assert loaded.location(3) == f"{second}, row 1"
    assert len(loaded) == 4
    assert len(load_rows(first)) == 2


def numbers_of(rows):
    return [entry["extra_info"]["index"] for entry in rows]


def test_load_parts_chooses_a_row_of_each_stretch_of_the_files(row, write_rows):
    stretches = ((0, 30), (30, 32), (32, 80))
    paths = [write_rows([row(number) for number in range(*ends)], f"{ends[0]}.parquet") for ends in stretches]
    for limit in (4, 40):  # read one by one, and read with the rows between
        rows, firsts = load_parts(paths, COLUMNS, limit=limit)
        numbers = numbers_of(rows)
        assert [number * limit // 80 for number in numbers] == list(range(limit)) and firsts == [0]
        assert (
            numbers
            == [rows.rows[index]["extra_info"]["index"] for index in range(limit)]
            == numbers_of(next(rows.chunks(limit)))
        )
        assert numbers == numbers_of(load_parts(paths, COLUMNS, limit=limit)[0])
        assert rows.location(limit - 1) == f"{paths[2]}, row {numbers[-1] - 32}"
    # The rows of two sources may alternate.
    assert {number % 2 for number in numbers} == {0, 1}
    assert numbers_of(load_parts(paths, COLUMNS, limit=80)[0]) == list(range(80))


def test_load_parts_chooses_rows_of_the_parts_of_a_mixture_by_their_weights(row, write_rows):
    sizes = {"few": (0, 10), "many": (10, 200)}
    parts = {
        name: MixturePart(write_rows([row(number) for number in range(*ends)], f"{name}.parquet"), weight)
        for (name, ends), weight in zip(sizes.items(), (1.0, 3.0), strict=True)
    }
    for limit, few in ((20, 5), (80, 10)):
        rows, firsts = load_parts(parts, COLUMNS, limit=limit)
        numbers = numbers_of(rows)
        assert firsts == [0, few] and sum(number < 10 for number in numbers) == few
        assert len(numbers) == few + limit * 3 // 4 and numbers == sorted(set(numbers))
        assert rows.location(few).endswith(f"many.parquet, row {numbers[few] - 10}")


@for_each(
    ("change", "message"),
    [
        ({"prompt": "17+25="}, "column 'prompt': expected a list .* got str '17"),
        ({"prompt": []}, "column 'prompt': the prompt is empty"),
        ({"prompt": [{"role": "user", "content": " "}]}, "column 'prompt': the prompt is empty"),
        ({"prompt": [{"role": "user"}]}, "column 'prompt': message 0 has no string 'content'"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "video", "text": None}]}]},
            r"column 'prompt': message 0, part 0: expected \{type: text, text: ...} or \{type: image, image: path",
        ),
        ({"prompt": [{"role": 1, "content": "a"}]}, "column 'prompt': message 0 has no string 'role'"),
        ({"data_source": None}, r"column 'data_source': expected a string, got nothing \(null\)"),
        ({"ability": 3}, "column 'ability': expected a string, got int '3'"),
        ({"reward_model": "42"}, "column 'reward_model': expected a mapping"),
        ({"reward_model": {"style": "rule"}}, "column 'reward_model': it has no 'ground_truth'"),
        ({"reward_model": {"ground_truth": None}}, "column 'reward_model': 'ground_truth' is null: give the answer"),
        ({"reward_model": {"ground_truth": b"42"}}, "column 'reward_model': 'ground_truth' is bytes, b'42', which"),
        ({"extra_info": None}, "column 'extra_info': expected a mapping"),
    ],
)
def test_load_rows_names_a_bad_row(row, write_rows, change, message):
    bad = row(1, **change)
    with pytest.raises(ConfigError, match=f"list, row 1, {message}"):
        load_rows([row(0), bad])
    path = write_rows([bad])
    with pytest.raises(ConfigError, match=f"train.parquet, row 0, {message}"):
        load_rows(path)


def test_batches_of_large_rows_are_small(row, write_rows, monkeypatch):
    monkeypatch.setattr(parquet, "_BATCH_BYTES", 4000)
    noise = np.random.default_rng(0)
    path = write_rows([row(number, images=[noise.bytes(1000)]) for number in range(8)])
    sizes = [batch.num_rows for batch, _ in ParquetRows(path).batches()]
    assert sum(sizes) == 8 and max(sizes) < 8
    assert len(load_rows(path)) == 8


def test_load_rows_names_a_missing_column(row, write_rows):
    bare = {name: value for name, value in row(0).items() if name != "data_source"}
    with pytest.raises(ConfigError, match=r"train.parquet: column 'data_source' is missing; the file has prompt"):
        load_rows(write_rows([bare]))
    with pytest.raises(ConfigError, match="list, row 1, column 'data_source': it is missing"):
        load_rows([row(0), bare])


def test_own_columns_have_the_names_of_all_columns_added_in_training():
    # The names are repeated, because the launcher reads data without torch.
    assert {IMAGE_FAULT, IMAGE_INPUTS, PROMPT_IMAGES, ROUTED_EXPERTS, "ending"} == OWN_COLUMNS


@for_each("name", sorted(OWN_COLUMNS))
def test_training_refuses_a_column_with_a_name_of_training_beside_rewards_alone(row, write_rows, name):
    # A data set may add columns in any row.
    rows = [row(0), row(1, **{name: "mine"})]
    message = f": training adds a column '{name}' of its own: rename the column of the data"
    with pytest.raises(ConfigError, match=f"^list{message}"):
        load_parts(rows, COLUMNS)
    path = write_rows(rows[1:])
    with pytest.raises(ConfigError, match=f"^{path}{message}"):
        load_parts({"part": MixturePart([str(path)])}, COLUMNS)
    for source in (path, rows):
        # Commands that sample or evaluate read any column.
        assert name in load_rows(source).columns
        assert name in load_parts(source, UNSCORED_COLUMNS)[0].columns
        assert len(load_parts(source, (), lambda row, location: {"prompt": row["prompt"]})[0]) > 0


def test_load_rows_fills_in_ability_and_extra_info(row, write_rows):
    bare = {name: value for name, value in row(0).items() if name not in ("ability", "extra_info")}
    for source in (write_rows([bare]), [bare]):
        (loaded,) = load_rows(source)
        assert loaded == {**bare, "ability": "general", "extra_info": {}}
        assert load_rows(source).rows[0] == loaded
    with pytest.raises(ConfigError, match="list, row 0, column 'extra_info': expected a mapping, got nothing"):
        load_rows([{**bare, "extra_info": None}])


def test_load_rows_refuses_a_file_with_two_columns_of_one_name(row, tmp_path):
    whole = pa.Table.from_pylist([row(0)])
    path = tmp_path / "twice.parquet"
    pq.write_table(whole.append_column("ability", pa.array(["other"])), path)
    with pytest.raises(ConfigError, match=r"twice.parquet: the file has several columns 'ability': rename or remove"):
        load_rows(path)


def test_load_rows_refuses_paths_without_prompts(tmp_path, row, write_rows):
    for name in ("text.parquet", "text.csv"):
        (tmp_path / name).write_text("not parquet at all")
    unreadable: list[tuple[Any, str]] = [
        (tmp_path / "absent.parquet", "there is no such file"),
        (tmp_path, "it is a folder"),
        (tmp_path / "text.parquet", "not a readable parquet file"),
        ([], "there are no prompts"),
        (tmp_path / "text.csv", "not a readable parquet file .*`rl-plugins prepare jsonl`"),
        (iter([row(0)]), r"data.dataset of a recipe\) is a list_iterator.*list\(...\)"),
    ]
    for path, message in unreadable:
        with pytest.raises(ConfigError, match=message):
            load_rows(path)


def test_load_rows_accepts_any_sequence_of_mappings(row):
    class Squares:
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return row(index**2)

    loaded = load_rows(Squares())
    assert [entry["extra_info"]["index"] for entry in loaded] == [0, 1, 4]
    assert loaded.location(2) == "Squares, row 2"
    with pytest.raises(ConfigError, match=r"list, row 0, row: expected a mapping .* got int"):
        load_rows([1])  # type: ignore[arg-type]


def test_load_rows_names_a_file_with_texts_that_are_not_utf_8(row, tmp_path):
    whole = pa.Table.from_pylist([row(0)])
    broken = pa.array([b"\xff"]).cast(pa.binary()).view(pa.binary()).cast(pa.string(), safe=False)
    path = tmp_path / "broken.parquet"
    pq.write_table(whole.set_column(whole.schema.get_field_index("ability"), "ability", broken), path)
    with pytest.raises(ConfigError, match=r"broken.parquet: not a readable parquet file \('utf-8' codec"):
        load_rows(path)


def test_load_rows_names_a_file_with_a_damaged_footer(row, write_rows):
    path = write_rows([row(0)])
    content = path.read_bytes()
    for position in range(len(content) - 300, len(content), 7):
        path.write_bytes(content[:position] + bytes([content[position] ^ 0xFF]) + content[position + 1 :])
        try:
            load_rows(path)
        except ConfigError as error:
            assert "train.parquet" in str(error)


def test_prompt_row_makes_a_row_with_all_columns(row):
    rows = load_rows([prompt_row("2+3=", "5"), prompt_row(row(1)["prompt"], "2", data_source="sums", level=3)])
    assert list(rows) == [
        {
            "prompt": [{"role": "user", "content": "2+3="}],
            "data_source": "default",
            "ability": "general",
            "reward_model": {"style": "rule", "ground_truth": "5"},
            "extra_info": {},
        },
        {
            "prompt": row(1)["prompt"],
            "data_source": "sums",
            "ability": "general",
            "reward_model": {"style": "rule", "ground_truth": "2"},
            "extra_info": {"level": 3},
        },
    ]


def test_prompt_row_refuses_a_number_as_ground_truth():
    with pytest.raises(ConfigError, match=r"ground_truth=5 is a number, .* a text, the response: pass '5'"):
        prompt_row("2+3=", 5)


@for_each(
    ("row", "message"),
    [
        (("2+3", "5"), "got tuple .*: rl.prompt_row"),
        ({"prompt": "2+3"}, "'data_source': it is missing; .*: rl.prompt_row"),
        ({**prompt_row("2+3", "5"), "prompt": "2+3"}, r"got str '2\+3': rl.prompt_row"),
    ],
)
def test_error_of_a_wrong_row_names_the_function_that_makes_rows(row, message):
    with pytest.raises(RowError, match=message):
        load_rows([row])
