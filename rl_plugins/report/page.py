"""The report of a run: one HTML file without network access, scripts or other files.

The page shows the content of the folder of the run, and names each missing file. So a run killed in the first minute
has a report, too. This module computes the values, and the Jinja2 template `page.html` holds the markup.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from traceback import format_exception_only
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from rl_plugins.config.recipe import dotted_options
from rl_plugins.control_characters import without_controls
from rl_plugins.hub.names import model_name
from rl_plugins.redaction import redacted
from rl_plugins.report.charts import (
    COLOURS,
    Chart,
    Points,
    Series,
    area_chart,
    line_chart,
    main_curves,
    other_curves,
    short_number,
    stacked_bar,
)
from rl_plugins.report.summary import pair_samples, read_samples, summarize_metrics, validation_step
from rl_plugins.run_folder import RunFolder, count_damaged_lines, read_metrics
from rl_plugins.text_file import REMOVE, read_text, read_yaml
from rl_plugins.whole_file import only_printed, write_whole_text

_COMMIT_DIGITS = 8
_PACKAGES = re.compile(
    r"(rl-plugins|torch|lightning|ray|deepspeed|vllm(-cpu)?|transformers|peft|mlflow)==.*", re.IGNORECASE
)
"""Packages whose versions the page shows without a click."""
_FAILURES = {
    "raised": "the reward function raised an error",
    "timeout": "the reward function did not answer in time",
    "not_finite": "the reward was NaN or infinite",
    "died": "the process of the reward function died",
    "memory": "the reward function needed too much memory",
    "image": "an image of the prompt became bad after the start",
}
_VALIDATED = {"val/reward": "validation reward", "val/accuracy": "validation accuracy", "val/loss": "validation loss"}


def write_report(folder: RunFolder, path: Path | None = None) -> Path:
    """Write the report of a run. The run may still be going on.

    Args:
        folder: folder of the run.
        path: file to write; `report.html` in the folder by default.

    Returns:
        The path of the file.

    Raises:
        ConfigError: a file of the run is damaged.
        StorageError: the report cannot be written.
    """
    path = path or folder.report
    write_whole_text(path, _template().render(_values(folder)))
    return path


@contextmanager
def report_at_end(folder: RunFolder) -> Iterator[None]:
    """Write the report when the block ends, also after an error. A run without metrics gets no report.

    A worker writes the page when training ends. The driver writes the page again by this function, because workers can
    be killed, and because the exported model and the error exist only then.

    Args:
        folder: folder of the run.
    """
    folder.error.unlink(missing_ok=True)
    try:
        yield
    # Ctrl-C is no error of the run.
    except Exception as error:
        with only_printed():
            write_whole_text(folder.error, redacted("".join(format_exception_only(error))))
        raise
    finally:
        if folder.metrics.is_file():
            with only_printed():
                print(f"{folder.path.name}: report in {write_report(folder)}", flush=True)


def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, finalize=_shown,
    )  # fmt: skip
    return environment.get_template("page.html")


def _shown(value: object) -> object:
    return without_controls(value) if isinstance(value, str) else value


def _values(folder: RunFolder) -> dict[str, object]:
    """Return the variables of the template."""
    with_gaps, damaged = read_metrics(folder.metrics, finite=False), count_damaged_lines(folder.metrics)
    series = {name: finite for name, points in with_gaps.items() if (finite := _finite(points))}
    texts = {
        name: _text(file)
        for name, file in {
            "changes": folder.changes,
            "config": folder.config,
            "environment": folder.installed_packages,
            "git_state": folder.git_state,
        }.items()
    }
    options = _options(folder.config)
    return {
        "folder": folder,
        "name": folder.path.absolute().name,
        "about": _about(options, texts["changes"]),
        "notices": [
            title + text.strip()
            for title, file in (("Ended by an error: ", folder.error), ("Stopped: ", folder.stopped))
            if (text := _text(file)) is not None
        ]
        + [f"Left out: {damaged} damaged lines of {folder.metrics.name}"] * bool(damaged),
        "figures": _figures(series, folder, options.get("run.steps")),
        "colours": COLOURS,
        "has_metrics": bool(with_gaps),
        "main_charts": [line_chart(title, curves) for title, curves in main_curves(with_gaps).items()],
        "other_charts": [line_chart(title, curves) for title, curves in other_curves(with_gaps).items()],
        "phase_charts": _phase_charts(series),
        "memory": _memory_rows(series),
        "failed_rewards": _failed_rewards(series),
        **_samples(folder),
        "texts": texts,
        "places": _places(folder),
        "main_versions": _main_versions(texts["environment"] or ""),
    }


def _text(file: Path) -> str | None:
    return read_text(file, REMOVE) if file.is_file() else None


def _finite(points: Points) -> dict[int, float]:
    return {step: value for step, value in points.items() if math.isfinite(value)}


def _options(config: Path) -> dict[str, Any]:
    """Return the value of each option of a run by its dotted name; nothing without a configuration."""
    from omegaconf import OmegaConf

    return dict(dotted_options(OmegaConf.to_container(read_yaml(config, REMOVE)))) if config.is_file() else {}


def _about(options: Mapping[str, Any], changes: str | None) -> str:
    """Return the recipe, the stage and the model of the run."""
    parts = []
    if changes is not None:
        parts.append(changes.partition("\n")[0].removeprefix("# "))
    if (stage := options.get("stage")) and (model := options.get("model.path")):
        parts.append(f"{str(stage).replace('_', ' ')} of {_short_name(str(model))}")
    return ", ".join(parts)


def _short_name(model: str) -> str:
    """Return a name on the hub with the first digits of its commit, or the last two parts of a folder."""
    name = model_name(model)
    if name is None or name.revision is None:
        return "/".join(Path(model).parts[-2:])
    return f"{name.repository}@{name.revision[:_COMMIT_DIGITS]}"


def _figures(series: Series, folder: RunFolder, steps: object) -> dict[str, str]:
    """Return the figures at the top of the page by their titles."""
    last = max((step for points in series.values() for step in points), default=0)
    summary, resumes, failures = summarize_metrics(series), folder.times_resumed(), folder.worker_restarts()
    figures = {"steps": f"{last} of {steps}" if steps else str(last)}
    for metric, title in _VALIDATED.items():
        values = list(series.get(metric, {}).values())
        if values:
            figures[title] = f"{values[0]:.3f} → {values[-1]:.3f}"
    if summary.step_s:
        figures["a step"] = f"{summary.step_s:.3g} s"
    if summary.samples_per_s:
        figures["samples per second"] = short_number(summary.samples_per_s)
    if "tokens_per_s" in series:
        figures["tokens per second"] = short_number(median(series["tokens_per_s"].values()))
    if "train/rollout_gap_max" in series:
        figures["log-prob gap"] = f"{summary.gap_max:.1e} nats"
    figures["resumed"] = {0: "never", 1: "once"}.get(resumes, f"{resumes} times")
    if failures:
        figures["workers restarted"] = {1: "once"}.get(failures, f"{failures} times")
    return figures


def _phase_charts(series: Series) -> list[Chart] | str:
    """Return the charts of the seconds of each phase, or the reason why there are none."""
    phases = _phases(series, "time/", leave_out="time/step")
    if not phases:
        return "No step was timed."
    medians = {name: median(points.values()) for name, points in phases.items()}
    usual = sorted((name for name in phases if medians[name] >= 0.001), key=lambda name: -medians[name])
    if not usual:
        return "No phase took a millisecond."
    steps = sorted({step for points in phases.values() for step in points})
    return [
        stacked_bar("Medians of the phases of a step", {name: medians[name] for name in usual}, "s"),
        area_chart("Seconds of each step", {name: phases[name] for name in usual}, steps, "s"),
    ]


def _memory_rows(series: Series) -> list[list[str]]:
    """Return name, median GiB and largest GiB of each phase, the largest phase first."""
    phases = _phases(series, "memory/")
    return [
        [name, f"{median(points.values()):.3g}", f"{max(points.values()):.3g}"]
        for name, points in sorted(phases.items(), key=lambda item: -max(item[1].values()))
    ]


def _phases(series: Series, prefix: str, leave_out: str = "") -> dict[str, Points]:
    return {
        name.removeprefix(prefix): points
        for name, points in series.items()
        if name.startswith(prefix) and name != leave_out
    }


def _failed_rewards(series: Series) -> list[list[str]] | str:
    """Return the kind, the samples and the steps of failed rewards, or a text if no reward failed."""
    counted = {kind: series[name] for kind in _FAILURES if (name := f"train/reward_{kind}") in series}
    if not counted:
        return "This stage computes no rewards."
    rows = [
        [_FAILURES[kind], f"{sum(points.values()):.0f}", str(sum(value > 0 for value in points.values()))]
        for kind, points in counted.items()
        if sum(points.values())
    ]
    return rows or "None."


def _samples(folder: RunFolder) -> dict[str, object]:
    """Return the variables about samples of the first and of the last complete validation."""
    tables = {file: read_samples(file) for file in folder.sample_files()}
    complete = [(validation_step(file), samples) for file, samples in tables.items() if samples is not None]
    ends = [complete[0], complete[-1]][: len(complete)] if complete else []
    return {
        "sample_steps": [step for step, _ in ends],
        "sample_pairs": pair_samples(ends[0][1], ends[1][1] if len(ends) > 1 else []) if ends else [],
        "damaged_samples": [file.name for file, samples in tables.items() if samples is None],
    }


def _places(folder: RunFolder) -> dict[str, str]:
    places = {name: str(path.absolute()) for name, path in {"folder": folder.path, **folder.places()}.items()}
    if (run_id := _text(folder.tracking_run)) is not None:
        places["MLflow run"] = run_id.strip()
    return places


def _main_versions(environment: str) -> str:
    return "\n".join(line for line in environment.splitlines() if line.startswith("#") or _PACKAGES.fullmatch(line))
