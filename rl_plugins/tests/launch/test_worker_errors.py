from __future__ import annotations

import logging

import pytest
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayActorError
from ray.train import ControllerError, WorkerGroupError
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError

from rl_plugins.errors import ConfigError, RewardError
from rl_plugins.launch.worker_errors import WorkerFailures, user_errors_unwrapped, without_traceback
from rl_plugins.run_folder import RunFolder


class FromWorker(Exception):
    """An exception of a worker as Ray Train wraps exceptions."""

    def __init__(self, error: Exception) -> None:
        self._base_exc = error


@pytest.mark.parametrize("error", [ConfigError("row 3 is bad"), RewardError("5 of 8 rewards failed")])
def test_after_exception_stops_the_run_for_a_user_error_of_any_worker(error, tmp_path):
    errors = {0: FromWorker(RuntimeError("connection lost")), 1: FromWorker(error)}
    with pytest.raises(ControllerError) as caught:
        WorkerFailures(RunFolder(tmp_path), 2).after_exception(None, errors)
    assert caught.value.controller_failure is error


def test_after_exception_writes_other_errors_down_while_restarts_are_left(tmp_path, capsys):
    folder = RunFolder(tmp_path / "run")
    (folder.path / "checkpoint_00000003").mkdir(parents=True)
    failures = WorkerFailures(folder, 1)
    errors = {1: FromWorker(ValueError("a bug\nof mine")), 0: FromWorker(OSError("disk"))}
    failures.after_exception(None, errors)
    said = "training worker 0 failed (OSError: disk). The workers start again, restart 1 of 1; the newest "
    said += "checkpoint is checkpoint_00000003"
    assert capsys.readouterr().out == f"run: {said}. For tracebacks see {folder.failures}\n"
    assert said in folder.failures.read_text() and "worker 1:" in folder.failures.read_text()
    # The next error ends the run, and Ray Train raises this error.
    failures.after_exception(None, errors)
    said = "run: training worker 0 failed (OSError: disk). No restart is left: placement.max_restarts=1\n"
    assert capsys.readouterr().out == said and folder.worker_restarts() == 1


def test_after_exception_tells_a_preempted_machine_once_without_a_count(tmp_path, capsys):
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    failures = WorkerFailures(folder, 1)
    for actor in ("first", "second"):
        loss = WorkerHealthCheckFailedError("no answer", RayActorError(actor, preempted=True))
        # The loss of one worker is a failure of other workers some seconds later.
        for errors in ({1: loss}, {1: loss}, {0: FromWorker(OSError("connection")), 1: loss}):
            failures.after_exception(None, errors)
        (line,) = capsys.readouterr().out.splitlines()
        assert "worker 1 ended with its preempted machine. The workers start again, which does not count; " in line
    assert folder.worker_restarts() == 2
    failures.after_exception(None, {0: FromWorker(OSError("disk"))})
    assert "(OSError: disk). The workers start again, restart 1 of 1" in capsys.readouterr().out
    assert folder.worker_restarts() == 3


def test_after_exception_names_the_cause_before_the_workers_that_miss_an_actor(tmp_path, capsys):
    errors = {0: FromWorker(ActorDiedError()), 1: FromWorker(OutOfMemoryError("the node has no memory"))}
    WorkerFailures(RunFolder(tmp_path), 0).after_exception(None, errors)
    assert "training worker 1 failed (OutOfMemoryError: the node has no memory)" in capsys.readouterr().out


def test_user_errors_unwrapped_raises_the_config_error():
    with pytest.raises(ConfigError, match=r"^row 3 is bad$"), user_errors_unwrapped():
        raise ControllerError(ConfigError("row 3 is bad"))


@pytest.mark.parametrize("error", [ControllerError(OSError("disk")), WorkerGroupError("failed", {0: OSError("disk")})])
def test_user_errors_unwrapped_leaves_other_errors_of_ray_train(error):
    with pytest.raises(type(error)) as caught, user_errors_unwrapped():
        raise error
    assert caught.value is error


def test_without_traceback_silences_the_log_of_ray_train_for_a_config_error(monkeypatch):
    logger = logging.getLogger("ray.train")
    monkeypatch.setattr(logger, "level", logging.ERROR)

    def train(arguments):
        raise arguments["error"]

    with pytest.raises(RuntimeError):
        without_traceback(train)({"error": RuntimeError("a bug")})
    assert logger.level == logging.ERROR
    with pytest.raises(ConfigError):
        without_traceback(train)({"error": ConfigError("row 3 is bad")})
    assert logger.level == logging.CRITICAL
