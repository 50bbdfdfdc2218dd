"""Damaged files of text, JSON and YAML get one line with the file and the way out (`rl_plugins.text_file`)."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from rl_plugins.errors import ConfigError
from rl_plugins.tests.loops import for_each
from rl_plugins.text_file import REMOVE, read_json_object, read_text, read_yaml


@for_each(
    ("read", "content", "fault"),
    [
        (read_text, b"caf\xe9", "not a readable text ('utf-8' codec"),
        (read_json_object, b'{"a": ', "not valid JSON (Expecting value"),
        (read_json_object, b"{\xff}", "not valid JSON ('utf-8' codec"),
        (read_json_object, b"[" * 10**5, "not valid JSON (the JSON has more than"),
        (read_json_object, b"[1]", "not a JSON object, but of type list"),
        (read_yaml, b"a: [1", "not valid YAML (while parsing a flow sequence"),
        (read_yaml, b"a: caf\xe9", "not valid YAML ('utf-8' codec"),
        (read_yaml, b"a: \x00", "not valid YAML (unacceptable character"),
        (read_yaml, b"a: 1\na: 2", "not valid YAML (while constructing a mapping"),
        (read_yaml, b"a: '${'", "not valid YAML (no viable alternative"),
        (read_yaml, b"~: 1", "not valid YAML (Incompatible key type"),
        (read_yaml, b"!!int ''", "not valid YAML (string index out of range"),
        (read_yaml, b"!!timestamp x", "not valid YAML ("),
        (read_yaml, b"- " * 2000, "not valid YAML ("),
        (read_yaml, b"3", "not valid YAML (Invalid loaded object type: int"),
        (read_yaml, b"[1]", "not a YAML mapping, but a list"),
        (read_text, None, "not a readable text (No such file or directory)"),
        (read_json_object, None, "not valid JSON ("),
        (read_yaml, None, "not valid YAML (No such file or directory)"),
    ],
)
def test_readers_name_a_damaged_file_and_the_way_out(
    read: Callable[[Path, str], object], content: bytes | None, fault: str, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.unlink(missing_ok=True)
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"^{re.escape(f'{file}: {fault}')}.*: {REMOVE}$"):
        read(file, REMOVE)


def test_read_yaml_reads_numbers_as_options_do_and_resolves_nothing(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("lr: 1e-6\nname: ${oc.env:NOWHERE}\n")
    content = read_yaml(file, REMOVE)
    assert content.lr == 1e-6 and OmegaConf.to_yaml(content).endswith("name: ${oc.env:NOWHERE}\n")
    file.write_text("")
    assert read_yaml(file, REMOVE) == {}
