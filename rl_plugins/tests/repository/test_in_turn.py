"""The runs that integration tests share end with the tests."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from integration_tests import in_turn


def test_runs_in_turn_end_with_a_failed_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        monkeypatch.setattr(in_turn, "start_command", lambda command, **streams: process)
        try:
            with pytest.raises(AssertionError, match="of a test"), in_turn.runs_in_turn([["grpo"]], tmp_path):
                raise AssertionError("of a test")
            assert process.poll() == -9
        finally:
            process.kill()
