"""Limits of processes with code of the user."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_plugins.rewards import limits


def test_free_memory_of_a_container_includes_pages_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text(f"{2**20}\n")
    (tmp_path / "memory.current").write_text(f"{2**20 - 4096}\n")
    monkeypatch.setattr(limits, "_CGROUP", tmp_path)
    assert limits._free_bytes() == 4096
    (tmp_path / "memory.stat").write_text("anon 1000\nfile 9000\ninactive_file 8192\n")
    assert limits._free_bytes() == 4096 + 8192
    (tmp_path / "memory.max").write_text("max\n")
    assert limits._free_bytes() > 2**20
