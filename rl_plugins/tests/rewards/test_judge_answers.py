"""Scores in answers of a judge, and the folder with answers."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from rl_plugins.rewards.judge_answers import AnswerFolder, JudgeAnswer, read_score
from rl_plugins.tests.loops import for_each

WRITER = """
import sys
from rl_plugins.rewards.judge_answers import JudgeAnswer, AnswerFolder
folder = AnswerFolder(sys.argv[1])
for number in range(200):
    folder.write({"number": number % 5}, JudgeAnswer("long " * 20000, number % 5))
"""
QUESTION = {"url": "http://host", "body": {"messages": ["a"]}, "vote": 0}


@for_each(
    ("text", "score"),
    [
        ('{"reason": "right", "score": 7}', 7.0),
        ('{"score": "7.5"}', 7.5),
        ('First {"score": 1}, then ```json\n{"score": 2, "why": {"a": 1}}\n```', 2.0),
        ('Score: 3, as JSON {"score": 4}', 4.0),
        ('{"score": 9, "criteria": {"style": {"score": 2}}}', 9.0),
        ('{not JSON} {"score": 3, "why": {"score": 2}} {"a": {"score": 1}}', 3.0),
        ("Reason first.\n**Score:** 7/10", 7.0),
        ("Score: 1. No, Score: 2", 2.0),
        ("score = -3.5", -3.5),
        ("Score (from 0 to 10): 8", 8.0),
        ("The score is 6.", 6.0),
        ("Score: 1e-2", 0.01),
        ("", None),
        ("7", None),
        ('{"score": null}', None),
        ('{"score": true}', None),
        ('{"score": "seven"}', None),
        ("scores of 7 teams", None),
        ("{" * 5000, None),
        ('{"a":' * 5000, None),
    ],
)
def test_read_score_reads_the_last_json_object_or_the_last_line(text: str, score: float | None) -> None:
    assert read_score(text) == score


@for_each(
    ("text", "score"),
    [
        ("The score is 10 if the answer is correct. Let me check the", None),
        ('{"score": 3}. No, {"score": 10, "reason": "it', None),
        ('{"criteria": {"style": {"score": 2}}, "sco', None),
        ('{"reason": "right", "score": 7} and', 7.0),
    ],
)
def test_read_score_of_a_cut_answer_reads_whole_objects_only(text: str, score: float | None) -> None:
    assert read_score(text, was_cut=True) == score


def test_answer_folder_returns_the_answer_to_the_same_question_only(tmp_path: Path) -> None:
    folder, answer = AnswerFolder(str(tmp_path)), JudgeAnswer("Score: 1", 5, 6)
    folder.write(QUESTION, answer)
    assert AnswerFolder(str(tmp_path)).read(QUESTION) == answer
    for other in ({**QUESTION, "vote": 1}, {**QUESTION, "url": "http://other"}, {**QUESTION, "body": {}}):
        assert folder.read(other) is None
    assert AnswerFolder(None).read(QUESTION) is None


def test_answer_folder_ignores_damaged_files(tmp_path: Path) -> None:
    folder = AnswerFolder(str(tmp_path))
    folder.write(QUESTION, JudgeAnswer("Score: 1"))
    (file,) = tmp_path.rglob("*.json")
    for damaged in ("", '{"text": "Sco', "[1]", '{"other": 1}'):
        file.write_text(damaged)
        assert folder.read(QUESTION) is None


def test_answer_folder_has_whole_answers_while_processes_write(tmp_path: Path) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)]) for _ in range(2)]
    seen = set[int]()
    while len(seen) < 5 or any(writer.poll() is None for writer in writers):
        for number in range(5):
            answer = AnswerFolder(str(tmp_path)).read({"number": number})
            if answer is not None:
                assert answer == JudgeAnswer("long " * 20000, number)
                seen.add(number)
        assert all(writer.poll() in (None, 0) for writer in writers)
    assert {file.suffix for file in tmp_path.rglob("*") if file.is_file()} == {".json"}


def test_answer_folder_logs_a_folder_without_rights_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    folder = AnswerFolder(str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        folder.write(QUESTION, JudgeAnswer("a"))
        folder.write(QUESTION, JudgeAnswer("a"))
    assert len(caplog.records) == 1 and "not kept" in caplog.text
