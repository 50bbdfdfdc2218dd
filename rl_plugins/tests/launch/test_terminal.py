"""A progress bar is for a terminal."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from rl_plugins.launch.terminal import redraw_interval_s


def test_redraw_interval_is_0_in_a_file_and_half_a_second_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: False))
    assert redraw_interval_s() == 0
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    assert redraw_interval_s() == 0.5
