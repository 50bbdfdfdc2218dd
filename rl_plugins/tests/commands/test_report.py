from __future__ import annotations

from pathlib import Path

import pytest

from rl_plugins.commands.main import main


def test_report_writes_the_page_into_the_folder_or_to_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": 0.5}\n')
    assert main(["report", str(tmp_path)]) == 0 and (tmp_path / "report.html").is_file()
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "other.html")]) == 0
    assert (tmp_path / "other.html").read_text().endswith("</html>\n")
    assert capsys.readouterr().out.splitlines()[1] == f"the report is in {tmp_path / 'other.html'}"


def test_report_names_a_damaged_file_and_the_way_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": 0.5}\n')
    for name, content in (("config.yaml", b"run: [1"), ("config.yaml", b"[1]"), ("git.json", b"\xff")):
        (tmp_path / name).write_bytes(content)
        assert main(["report", str(tmp_path)]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {tmp_path / name}: not ") and error.endswith(": mend or remove the file\n")
        (tmp_path / name).unlink()
    assert main(["report", str(tmp_path)]) == 0


def test_report_of_a_folder_of_runs_names_the_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "grpo").mkdir()
    (tmp_path / "grpo" / "metrics.jsonl").touch()
    assert main(["report", str(tmp_path)]) == 2
    assert "is not the folder of a run: it has no metrics.jsonl; there are runs in it: grpo" in capsys.readouterr().err
