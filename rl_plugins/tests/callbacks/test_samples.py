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
