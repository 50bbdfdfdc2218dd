"""UserError: the message is one line without control characters, also with data in the message."""

from __future__ import annotations

import pickle

import pytest

from rl_plugins.errors import CheckpointError, ConfigError, RowError, config_errors


def test_user_error_writes_control_characters_of_data_as_escapes() -> None:
    assert str(ConfigError("run.name=a\nb\x1b[2J\ud800: Größe 数学")) == r"run.name=a\nb\x1b[2J\ud800: Größe 数学"
    error = RowError("a.parquet, row 1", "column 'x\r'", "it is missing")
    assert str(pickle.loads(pickle.dumps(error))) == r"a.parquet, row 1, column 'x\r': it is missing"


def test_config_errors_begins_the_message_of_a_config_error_alone() -> None:
    beginnings = config_errors("stage sft: "), config_errors("optimizer.")
    with pytest.raises(ConfigError, match=r"^stage sft: optimizer\.lr=-1$"), beginnings[0], beginnings[1]:
        raise ConfigError("lr=-1")
    with pytest.raises(CheckpointError, match=r"^damaged$"), config_errors("stage sft: "):
        raise CheckpointError("damaged")
