"""The report of a run: one HTML file that needs no network, no script and no other file.

It is made of what is in the run's folder. What is not there is said in its place, so that the report of a run that was
killed in its first minute is a report, too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_plugins.report import sections
from rl_plugins.report.markup import Node, document, fold, node, table
from rl_plugins.report.samples import compare, read_samples, validation_step
from rl_plugins.report.style import STYLE
from rl_plugins.report.summary import summary_of
from rl_plugins.run_folder import RunFolder, read_metrics
from rl_plugins.whole_file import write_whole_text

_PACKAGES = re.compile(
    r"(rl-plugins|torch|lightning|ray|deepspeed|vllm(-cpu)?|transformers|peft|mlflow)==.*", re.IGNORECASE
)


def write_report(folder: RunFolder, path: Path | None = None) -> Path:
    """Write the report of a run, of one that is going on too.

    Args:
        folder: of the run.
        path: of the file; `report.html` in the folder by default.

    Returns:
        The path of the file.
    """
    path = path or folder.report
    write_whole_text(path, document(_page(folder)))
    return path


def _page(folder: RunFolder) -> Node:
    whole, config = read_metrics(folder.metrics, finite=False), _read_config(folder)
    series = {name: kept for name, points in whole.items() if (kept := _finite(points))}
    name = folder.path.absolute().name
    stage, total = config.get("stage"), config.get("run", {}).get("steps")
    last = max((step for points in series.values() for step in points), default=0)
    body = node("body", node("h1", name))
    about = []
    if folder.changes.is_file():
        about.append(folder.changes.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# "))
    if stage:
        # A name of the hub as it is, and the end of a folder's.
        about.append(f"{stage.replace('_', ' ')} of {'/'.join(Path(config['model']['path']).parts[-2:])}")
    body.append(node("p", ", ".join(about), class_="pale"))
    for file, said in ((folder.error, "Ended by an error: "), (folder.stopped, "Stopped: ")):
        if file.is_file():
            body.append(node("p", said + file.read_text(encoding="utf-8").strip(), class_="bad"))
    steps = f"{last} of {total}" if total else str(last)
    times = {"resumes": folder.times_resumed(), "failures": folder.times_failed()}
    body.append(sections.headline(series, summary_of(series), steps, **times))
    body.append(sections.curves(whole))
    body.append(sections.times(series))
    body.append(sections.memory(series))
    body.append(sections.failures(series))
    body.append(_samples(folder))
    body.append(_config(folder))
    body.append(_places(folder))
    body.append(_versions(folder))
    head = node(
        "head",
        node("meta", charset="utf-8"),
        node("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        node("title", f"{name}: report of a run"),
        node("style", STYLE),
    )
    return node("html", head, body, lang="en")


def _finite(points: Mapping[int, float]) -> dict[int, float]:
    return {step: value for step, value in points.items() if math.isfinite(value)}


def _read_config(folder: RunFolder) -> dict[str, Any]:
    import yaml

    return yaml.safe_load(folder.config.read_text(encoding="utf-8")) if folder.config.is_file() else {}


def _samples(folder: RunFolder) -> Node:
    title, files = "Samples", folder.sample_files()
    tables = {file: read for file in files if (read := read_samples(file)) is not None}
    broken = [node("p", f"{file.name} is not whole.", class_="bad") for file in files if file not in tables]
    if not tables:
        return sections.section(title, f"There are none in {folder.samples.name}/.", *broken)
    first, last = next(iter(tables)), next(reversed(tables))
    rows: list[list[Node | str]] = []
    for pair in compare(tables[first], tables[last] if last != first else []):
        rows.append([_text(pair.prompt), _text(pair.ground_truth), _sample(pair.first)])
        if last != first:
            rows[-1].append(_sample(pair.last))
    head = ["prompt", "ground truth", *(f"step {validation_step(file)}" for file in dict.fromkeys([first, last]))]
    return sections.section(title, *broken, table(head, rows, class_="samples"))


def _sample(row: dict[str, Any] | None) -> Node:
    if row is None:
        return node("span", "no sample", class_="pale")
    if row["failure"]:
        score = node("span", f"reward failed: {row['failure']}", class_="worse")
    else:
        score = node("span", f"score {row['score']:.4g}", class_="better" if row["score"] > 0 else "pale")
    return node("div", score, "\n", str(row["response"]))


def _text(text: object) -> Node:
    return node("div", str(text))


def _config(folder: RunFolder) -> Node:
    found = sections.section("Configuration")
    for file, title in ((folder.changes, None), (folder.config, "All options")):
        if not file.is_file():
            found.append(_missing(file))
        else:
            shown = node("pre", file.read_text(encoding="utf-8").strip())
            found.append(fold(title, shown) if title else shown)
    return found


def _places(folder: RunFolder) -> Node:
    rows: list[list[Node | str]] = [
        [name, node("code", str(path.absolute()))] for name, path in {"folder": folder.path, **folder.places()}.items()
    ]
    if folder.tracking_run.is_file():
        rows.append(["MLflow run", node("code", folder.tracking_run.read_text(encoding="utf-8").strip())])
    return sections.section("Where things are", table(["what", "where"], rows))


def _versions(folder: RunFolder) -> Node:
    found = sections.section("Versions")
    if folder.environment.is_file():
        lines = folder.environment.read_text(encoding="utf-8").splitlines()
        main = [line for line in lines if line.startswith("#") or _PACKAGES.fullmatch(line)]
        found.append(node("pre", "\n".join(main)))
        found.append(fold(f"All of {folder.environment.name}", node("pre", "\n".join(lines))))
    else:
        found.append(_missing(folder.environment))
    if folder.git_state.is_file():
        found.append(fold("State of the code", node("pre", folder.git_state.read_text(encoding="utf-8"))))
    return found


def _missing(file: Path) -> Node:
    return node("p", f"There is no {file.name} in this folder.", class_="pale")
