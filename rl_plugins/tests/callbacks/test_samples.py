"""Traces of samples in an SQLite store."""

from __future__ import annotations

from rl_plugins.callbacks.samples import log_trace
from rl_plugins.tracking.run import TrackedRun


def test_log_trace_records_a_rollout_in_the_run(run: TrackedRun) -> None:
    log_trace(run, 3, {"prompt": "1+1=", "response": "2", "score": 1.0, "ground_truth": "2", "failure": None})
    (trace,) = run.client.search_traces(locations=[run.experiment_id], run_id=run.run_id)
    assert trace.info.tags["step"] == "3"
    (span,) = trace.data.spans
    assert (span.inputs, span.outputs) == ({"prompt": "1+1="}, {"response": "2"})
    assert span.get_attribute("score") == 1.0
    assert {one.name: one.value for one in trace.info.assessments} == {"reward": 1.0}


def test_log_trace_records_rewards_as_assessments(run: TrackedRun) -> None:
    sample = {"prompt": "1+1=", "response": "2", "score": 0.5, "rewards": {"format": 1.0, "length": 0.0}}
    log_trace(run, 3, sample)
    log_trace(run, 4, {**sample, "score": None, "failure": "timeout", "rewards": {}})
    failed, scored = run.client.search_traces(locations=[run.experiment_id], run_id=run.run_id)
    rewards = {"reward": 0.5, "reward/format": 1.0, "reward/length": 0.0}
    assert {one.name: one.value for one in scored.info.assessments} == rewards
    assert {one.source.source_type for one in scored.info.assessments} == {"CODE"}
    assert failed.info.assessments == [] and failed.data.spans[0].get_attribute("failure") == "timeout"
