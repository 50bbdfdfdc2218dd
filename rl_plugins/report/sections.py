"""The sections of the page about what was measured: figures, curves, times, memory, failures."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from rl_plugins.report.charts import area_chart, line_chart, stacked_bar
from rl_plugins.report.curves import Series, main_curves, other_curves
from rl_plugins.report.markup import Node, fold, node, table
from rl_plugins.report.points import number
from rl_plugins.report.summary import RunSummary

_FAILURES = {
    "raised": "the reward function raised an error",
    "timeout": "it did not answer in time",
    "not_finite": "it gave no finite number",
    "died": "its process died",
}
_VALIDATED = {"val/reward": "validation reward", "val/accuracy": "validation accuracy", "val/loss": "validation loss"}


def headline(series: Series, summary: RunSummary, steps: str, *, resumes: int, failures: int) -> Node:
    """The run in figures."""
    figures = {"steps": steps}
    for metric, name in _VALIDATED.items():
        values = list(series.get(metric, {}).values())
        if values:
            figures[name] = f"{values[0]:.3f} → {values[-1]:.3f}"
    if summary.step_s:
        figures["a step"] = f"{summary.step_s:.3g} s"
    if summary.samples_per_s:
        figures["samples per second"] = number(summary.samples_per_s)
    if "tokens_per_s" in series:
        figures["tokens per second"] = number(median(series["tokens_per_s"].values()))
    if "train/rollout_gap_max" in series:
        figures["log-prob gap"] = f"{summary.gap_max:.1e} nats"
    figures["resumed"] = {0: "never", 1: "once"}.get(resumes, f"{resumes} times")
    if failures:
        figures["workers restarted"] = {1: "once"}.get(failures, f"{failures} times")
    tiles = [node("div", node("span", name), node("b", value), class_="tile") for name, value in figures.items()]
    return node("div", *tiles, class_="tiles")


def curves(whole: Series) -> Node:
    """The main curves, and all others folded away.

    Args:
        whole: with values that are no finite numbers, which become gaps.
    """
    if not whole:
        return section("Curves", "No metrics were written.")
    main = [line_chart(title, found) for title, found in main_curves(whole).items()]
    found = section("Curves", node("div", *main, class_="charts"))
    others = [line_chart(title, curve) for title, curve in other_curves(whole).items()]
    if others:
        found.append(fold(f"{len(others)} further curves", node("div", *others, class_="charts")))
    return found


def times(series: Series) -> Node:
    """Where the seconds of a step go: in the middle of the run, and over it."""
    phases = _phases(series, "time/", leave_out="time/step")
    if not phases:
        return section("Time by phase", "No step was timed.")
    medians = {name: median(points.values()) for name, points in phases.items()}
    usual = sorted((name for name in phases if medians[name] >= 0.001), key=lambda name: -medians[name])
    if not usual:
        return section("Time by phase", "No phase took a millisecond.")
    steps = sorted({step for points in phases.values() for step in points})
    return section(
        "Time by phase",
        stacked_bar("Medians of the phases of a step", {name: medians[name] for name in usual}, "s"),
        area_chart("Seconds of each step", {name: phases[name] for name in usual}, steps, "s"),
    )


def memory(series: Series) -> Node:
    """What each phase had in use when it ended, or at its peak."""
    phases = _phases(series, "memory/")
    if not phases:
        return section("Memory by phase", "No phase was measured.")
    rows: list[list[Node | str]] = [
        [name, f"{median(points.values()):.3g}", f"{max(points.values()):.3g}"]
        for name, points in sorted(phases.items(), key=lambda item: -max(item[1].values()))
    ]
    explained = "GiB of rank 0's device, at the peak of a phase; on a CPU, what is resident when it ends."
    return section("Memory by phase", node("p", explained, class_="pale"), table(["phase", "median", "most"], rows))


def failures(series: Series) -> Node:
    """How many rewards failed, and how; a sample without a reward takes part in nothing."""
    known = {kind: series[name] for kind in _FAILURES if (name := f"train/reward_{kind}") in series}
    if not known:
        return section("Failed rewards", "This stage computes no rewards.")
    failed = {kind: points for kind, points in known.items() if sum(points.values())}
    if not failed:
        return section("Failed rewards", "None.")
    rows: list[list[Node | str]] = [
        [_FAILURES[kind], f"{sum(points.values()):.0f}", str(sum(value > 0 for value in points.values()))]
        for kind, points in failed.items()
    ]
    return section("Failed rewards", table(["what happened", "samples", "in steps"], rows))


def section(title: str, *content: Node | str) -> Node:
    """A heading with what belongs to it; a bare text becomes a pale line."""
    made = [node("p", part, class_="pale") if isinstance(part, str) else part for part in content]
    return node("section", node("h2", title), *made)


def _phases(series: Series, prefix: str, leave_out: str = "") -> dict[str, Mapping[int, float]]:
    return {
        name.removeprefix(prefix): points
        for name, points in series.items()
        if name.startswith(prefix) and name != leave_out
    }
