"""Traces of samples in an SQLite store."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlflow
import pytest

from rl_plugins.callbacks.samples import SampleTrace, log_samples
from rl_plugins.data.images import thumbnail
from rl_plugins.tests.pictures import picture
from rl_plugins.tracking.run import TrackedRun


def test_sample_trace_records_a_rollout_in_the_run(run: TrackedRun) -> None:
    SampleTrace(3, {"prompt": "1+1=", "response": "2", "score": 1.0, "ground_truth": "2", "failure": None})(run)
    (trace,) = run.client.search_traces(locations=[run.experiment_id], run_id=run.run_id)
    assert trace.info.tags["step"] == "3"
    (span,) = trace.data.spans
    assert (span.inputs, span.outputs) == ({"prompt": "1+1="}, {"response": "2"})
    assert span.get_attribute("score") == 1.0
    assert {one.name: one.value for one in trace.info.assessments} == {"reward": 1.0}


def test_sample_trace_has_the_images_of_the_prompt_as_inputs(run: TrackedRun) -> None:
    images = [thumbnail(picture(number)) for number in range(2)]
    SampleTrace(3, {"prompt": "<image> or <image>?", "images": images, "response": "red", "score": 1.0})(run)
    (trace,) = run.client.search_traces(locations=[run.experiment_id], run_id=run.run_id)
    (span,) = trace.data.spans
    assert span.inputs.keys() == {"prompt", "images"} and span.get_attribute("images") is None
    # MLflow keeps each picture as an attachment.
    assert all(image.startswith("mlflow-attachment://") for image in span.inputs["images"])
    assert len(span.inputs["images"]) == 2 and "image%2Fjpeg" in span.inputs["images"][0]


def test_log_samples_has_a_column_of_images(tmp_path: Path) -> None:
    sample = {"response": "red", "score": 1.0, "ground_truth": "red", "failure": None}
    rows = [{"prompt": "<image>?", "images": [thumbnail(picture())], **sample}, {"prompt": "?", "images": [], **sample}]
    (tmp_path / "step_00000003.json").write_text(json.dumps(rows))
    tables: dict[str, Any] = {}
    tracking: Any = SimpleNamespace(log_table=lambda columns, name: tables.update({name: columns}))
    log_samples(tracking, tmp_path / "step_00000003.json")
    assert tables["samples/step_00000003.json"]["images"] == [rows[0]["images"], []]


def test_sample_trace_records_rewards_as_assessments(run: TrackedRun) -> None:
    sample = {"prompt": "1+1=", "response": "2", "score": 0.5, "rewards": {"format": 1.0, "length": 0.0}}
    SampleTrace(3, sample)(run)
    SampleTrace(4, {**sample, "score": None, "failure": "timeout", "rewards": {}})(run)
    failed, scored = run.client.search_traces(locations=[run.experiment_id], run_id=run.run_id)
    rewards = {"reward": 0.5, "reward/format": 1.0, "reward/length": 0.0}
    assert {one.name: one.value for one in scored.info.assessments} == rewards
    assert {one.source.source_type for one in scored.info.assessments} == {"CODE"}
    assert failed.info.assessments == [] and failed.data.spans[0].get_attribute("failure") == "timeout"


def test_sample_trace_has_spans_of_the_turns_and_calls_of_a_conversation(run: TrackedRun) -> None:
    call = {"name": "add", "start": 1002.25, "seconds": 0.5}
    seconds = {"sampling_s": 2.0, "environment_s": 0.5, "queue_s": 0.5}
    turns = [
        {"messages": [], "response": "add", "start": 1000.0, "end": 1003.0, "work": [call], **seconds},
        {"messages": [{"role": "tool", "content": "5"}], "response": "5", "start": 1003.0, "end": 1005.5, "work": [],
         **seconds},
    ]  # fmt: skip
    SampleTrace(3, {"prompt": "2+3", "response": "add 5", "score": 1.0, "turns": turns})(run)
    (trace,) = run.client.search_traces(locations=[run.experiment_id], run_id=run.run_id)
    (whole, *spans) = sorted(trace.data.spans, key=lambda span: (span.parent_id is not None, span.start_time_ns))
    assert [span.name for span in spans] == ["policy", "add", "policy", "environment"]
    assert {span.parent_id for span in spans} == {whole.span_id}
    times = [(span.start_time_ns / 1e9, span.end_time_ns / 1e9) for span in (whole, *spans)]
    assert times == [(1000.0, 1005.5), (1000.0, 1002.0), (1002.25, 1002.75), (1003.0, 1005.0), (1005.0, 1005.5)]
    assert (spans[2].inputs, spans[2].outputs) == ({"messages": turns[1]["messages"]}, {"response": "5"})
    assert spans[1].get_attribute("queue_s") == 0.5 and whole.get_attribute("turns") is None


@pytest.mark.parametrize("failed", ["before", "after", "without the trace"])
def test_sample_trace_is_recorded_once_after_a_failed_assessment(
    failed: str, run: TrackedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_feedback = mlflow.log_feedback

    def fail(*, trace_id: str, name: str, value: float) -> None:
        """Fail before or after the second assessment is recorded, or lose the trace, as MLflow's export may do."""
        if name == "reward" or failed == "after":
            log_feedback(trace_id=trace_id, name=name, value=value)
        if failed == "without the trace":
            run.client.delete_traces(run.experiment_id, trace_ids=[trace_id])
        if name != "reward" or failed == "without the trace":
            raise OSError("the server is away")

    trace = SampleTrace(3, {"prompt": "1+1=", "response": "2", "score": 0.5, "rewards": {"format": 1.0}})
    with monkeypatch.context() as outage, pytest.raises(OSError, match="away"):
        outage.setattr(mlflow, "log_feedback", fail)
        trace(run)
    # The sender makes a failed call again.
    trace(run)
    (recorded,) = run.client.search_traces(locations=[run.experiment_id], run_id=run.run_id)
    assert {one.name: one.value for one in recorded.info.assessments} == {"reward": 0.5, "reward/format": 1.0}
    assert len(recorded.info.assessments) == 2
