"""Samples of the policy for readers: a table at each validation, and traces of training samples in MLflow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from rl_plugins.control_characters import json_without_controls
from rl_plugins.report.summary import read_samples
from rl_plugins.stages.stage import Stage
from rl_plugins.tracking.loggers import MLflowTracking, mlflow_loggers
from rl_plugins.tracking.run import TrackedRun
from rl_plugins.whole_file import only_printed, write_whole_text

if TYPE_CHECKING:
    from mlflow.entities import LiveSpan

_NOT_ATTRIBUTES = ("prompt", "response", "images", "rewards", "turns")


class SampleTable(Callback):
    """Write the first validation samples of rank 0 to a file such as `step_00000020.json`, and to a table in MLflow.

    Args:
        folder: folder of the files.
        rows: number of samples to write.
    """

    def __init__(self, folder: str | Path, *, rows: int = 32) -> None:
        self._folder, self._rows = Path(folder), rows

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero or not isinstance(pl_module, Stage) or pl_module.validation is None:
            return
        rows = pl_module.shown_samples.validation[: self._rows]
        file = self._folder / f"step_{pl_module.step:08d}.json"
        with only_printed():
            write_whole_text(file, json_without_controls(rows))
            for logger in mlflow_loggers(trainer.loggers):
                log_samples(logger, file)


def log_samples(tracking: MLflowTracking, file: Path) -> None:
    """Queue a file of `SampleTable` as a table in MLflow. A damaged file is left out, with a printed line."""
    rows: Sequence[Mapping[str, object]] | None = read_samples(file)
    if rows is None:
        print(f"{file} is damaged, and left out of MLflow", flush=True)
    elif rows:
        columns = {key: [row.get(key) for row in rows] for key in rows[0]}
        tracking.log_table(columns, f"samples/{file.name}")


class RolloutTraces(Callback):
    """Log the first training samples of rank 0 in every step as traces, which MLflow's pages show.

    Args:
        count: number of samples per step.
    """

    def __init__(self, count: int) -> None:
        self._count = count

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if isinstance(pl_module, Stage) and trainer.is_global_zero:
            pl_module.shown_samples.limit = self._count

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        if not isinstance(pl_module, Stage):
            return
        for sample in pl_module.shown_samples.training:
            for logger in mlflow_loggers(trainer.loggers):
                logger.offer(SampleTrace(pl_module.step, sample))


class SampleTrace:
    """Call of a sender that logs a sample as a trace.

    The prompt is the input, the response is the output, and other values are attributes. The score and the further
    numbers of the reward are assessments of the trace: `reward`, and `reward/NAME` each. The sender makes a failed call
    again: the call then adds what the store lacks, and MLflow has no trace and no assessment twice.

    Args:
        step: step of the stage's clock.
        sample: values of the sample: `prompt`, `response`, `score` and others, with `images` if the prompt has images,
            with `rewards`, the further numbers of the reward by their names, and with `turns` of a conversation, which
            get spans of their own.
    """

    def __init__(self, step: int, sample: Mapping[str, Any]) -> None:
        self._step, self._sample = step, sample
        self._trace_id: str | None = None

    def __call__(self, run: TrackedRun) -> None:
        """Log the trace and its assessments, but for those that a failed try has recorded."""
        import mlflow

        recorded = self._recorded_assessments(run)
        if recorded is None:
            self._trace_id, recorded = self._log_spans(run), set()
        assert self._trace_id is not None
        # An assessment belongs to a recorded trace.
        details = self._sample.get("rewards") or {}
        assessments = {"reward": self._sample["score"], **{f"reward/{key}": details[key] for key in details}}
        for name, value in assessments.items():
            if name not in recorded and isinstance(value, int | float):
                mlflow.log_feedback(trace_id=self._trace_id, name=name, value=value)

    def _recorded_assessments(self, run: TrackedRun) -> set[str] | None:
        """Return the names of the assessments in the store; None if the store does not have the whole trace."""
        if self._trace_id is None:
            return None
        whole = f"request_id = '{self._trace_id}' AND status = 'OK'"
        traces = run.client.search_traces(locations=[run.experiment_id], filter_string=whole, include_spans=False)
        return {assessment.name for assessment in traces[0].info.assessments} if traces else None

    def _log_spans(self, run: TrackedRun) -> str:
        """Log the trace without assessments, and return its id."""
        import mlflow

        sample, turns = self._sample, self._sample.get("turns", ())
        attributes: dict[str, Any] = {
            key: value for key, value in sample.items() if key not in _NOT_ATTRIBUTES and value is not None
        }
        attributes["step"] = self._step
        start_ns, end_ns = _limits_ns(turns)
        span = mlflow.start_span_no_context(
            "rollout",
            span_type="LLM",
            inputs={key: sample[key] for key in ("prompt", "images") if key in sample},
            attributes=attributes,
            tags={"step": str(self._step), "score": str(sample["score"])},
            metadata={"mlflow.sourceRun": run.run_id},
            experiment_id=run.experiment_id,
            start_time_ns=start_ns,
        )
        _add_turns(span, turns)
        span.end(outputs={"response": sample["response"]}, end_time_ns=end_ns)
        return span.trace_id


def _limits_ns(turns: Sequence[Mapping[str, Any]]) -> tuple[int | None, int | None]:
    """Return start and end of a conversation in ns of Unix time; None, which is now, without turns."""
    return (_ns(turns[0]["start"]), _ns(turns[-1]["end"])) if turns else (None, None)


def _add_turns(parent: LiveSpan, turns: Sequence[Mapping[str, Any]]) -> None:
    """Log each turn as a span of the policy, followed by spans of the environment.

    Args:
        parent: span of the conversation.
        turns: turns, as `timed_turns` returns them.
    """
    for number, turn in enumerate(turns, start=1):
        sampled = turn["start"] + turn["sampling_s"]
        _add_span(parent, "policy", "LLM", turn["start"], sampled, {"turn": number}, turn["messages"], turn["response"])
        for work in turn["work"] or [{"name": "environment", "start": sampled, "seconds": turn["environment_s"]}]:
            attributes = {"turn": number, "queue_s": turn["queue_s"]}
            _add_span(parent, work["name"], "TOOL", work["start"], work["start"] + work["seconds"], attributes)


def _add_span(
    parent: LiveSpan,
    name: str,
    kind: str,
    start: float,
    end: float,
    attributes: dict[str, Any],
    messages: object = None,
    response: object = None,
) -> None:
    import mlflow

    span = mlflow.start_span_no_context(
        name,
        span_type=kind,
        parent_span=parent,
        inputs=None if messages is None else {"messages": messages},
        attributes=attributes,
        start_time_ns=_ns(start),
    )
    span.end(outputs=None if response is None else {"response": response}, end_time_ns=_ns(end))


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
