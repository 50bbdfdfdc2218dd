"""A signal ends a whole run with one line and a documented status, at start-up, in a step and in validation."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from mlflow import MlflowClient

from integration_tests.conftest import Recipe
from integration_tests.pace import Pace

pytestmark = pytest.mark.extended

SMALL = (
    "batch.prompts_per_step=2", "batch.samples_per_prompt=2", "run.steps=6", "run.checkpoint_every=1",
    "run.eval_before=false", "tracking.enabled=false", "rollout.engine=transformers",
)  # fmt: skip
LOCAL = (*SMALL, "launcher=local")
AGAIN = "To continue, repeat the command with run.resume=auto"


@pytest.fixture
def pace(tmp_path: Path) -> Pace:
    return Pace(tmp_path / "pace", samples=4)


def assert_ended(run: Recipe, *statuses: int) -> str:
    """Check the status, and that the output has no traceback; return the output."""
    assert run.wait() in statuses, run.tail()
    said = run.tail(1_000_000)
    assert "Traceback" not in said and "*** SIG" not in said, said
    return said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_at_the_start_ends_the_run(start_recipe: Callable[..., Recipe], number: signal.Signals) -> None:
    run = start_recipe("grpo", "start", *LOCAL, "run.eval_every=0", new_interpreter=True)
    run.wait_for_words("RL steps of")
    run.process.send_signal(number)
    # The first steps may have begun, and then the run saves before the end.
    said = assert_ended(run, 128 + number, *([] if number == signal.SIGINT else [75]))
    assert f"interrupted by {number.name}" in said or AGAIN in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_request_in_validation_saves_and_ends(
    start_recipe: Callable[..., Recipe], pace: Pace, number: signal.Signals
) -> None:
    # The samples of two steps, and some of the validation.
    pace.allow(2)
    run = start_recipe("grpo", "validation", *LOCAL, "run.eval_every=2", *pace.overrides)
    pace.wait(run)
    run.process.send_signal(number)
    run.wait_until((run.run / "stop").is_file, "the end of the signal's handler")
    pace.allow_all()
    assert f"stopped after step 2: {number.name}. {AGAIN}" in assert_ended(run, 75)


@pytest.mark.parametrize(
    "launcher", [LOCAL, (*SMALL, "placement.num_workers=1", "placement.device=cpu", "tracking.enabled=true")]
)
def test_ctrl_c_in_a_step_names_the_newest_checkpoint(
    start_recipe: Callable[..., Recipe], pace: Pace, launcher: tuple[str, ...]
) -> None:
    pace.allow(2)
    run = start_recipe("grpo", "step", *launcher, "run.eval_every=0", *pace.overrides)
    pace.wait(run)
    if launcher != LOCAL:
        run.wait_until((run.run / "mlflow_run_id").is_file, "the MLflow run")
    run.process.send_signal(signal.SIGINT)
    said = assert_ended(run, 130)
    assert f"interrupted by SIGINT: step: the newest checkpoint is checkpoint_00000002. {AGAIN}" in said
    # Ray has killed the worker with the thread for MLflow.
    if launcher != LOCAL:
        store = MlflowClient(f"sqlite:///{run.folder}/outputs/mlflow.db")
        assert store.get_run((run.run / "mlflow_run_id").read_text()).info.status == "KILLED"
