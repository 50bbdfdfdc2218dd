"""UserError: the message is one line without control characters, also with data in the message."""

from __future__ import annotations

import pickle

from rl_plugins.errors import ConfigError, RowError


def test_user_error_writes_control_characters_of_data_as_escapes() -> None:
    assert str(ConfigError("run.name=a\nb\x1b[2J\ud800: Größe 数学")) == r"run.name=a\nb\x1b[2J\ud800: Größe 数学"
    error = RowError("a.parquet, row 1", "column 'x\r'", "it is missing")
    assert str(pickle.loads(pickle.dumps(error))) == r"a.parquet, row 1, column 'x\r': it is missing"
