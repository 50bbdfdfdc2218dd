from __future__ import annotations

import logging

import pytest
from ray.train import ControllerError, WorkerGroupError

from rl_plugins.errors import ConfigError
from rl_plugins.launch.worker_errors import StopOnConfigError, config_errors_unwrapped, without_traceback


class FromWorker(Exception):
    """What Ray Train makes of a worker's exception."""

    def __init__(self, error: Exception) -> None:
        self._base_exc = error


def test_a_config_error_of_any_worker_stops_the_run():
    errors = {0: FromWorker(RuntimeError("connection lost")), 1: FromWorker(ConfigError("row 3 is bad"))}
    with pytest.raises(ControllerError) as caught:
        StopOnConfigError().after_exception(None, errors)
    assert str(caught.value.controller_failure) == "row 3 is bad"


def test_other_errors_are_left_to_the_restarts():
    StopOnConfigError().after_exception(None, {0: FromWorker(ValueError("a bug"))})


def test_the_user_gets_the_config_error_itself():
    with pytest.raises(ConfigError, match=r"^row 3 is bad$"), config_errors_unwrapped():
        raise ControllerError(ConfigError("row 3 is bad"))


@pytest.mark.parametrize("error", [ControllerError(OSError("disk")), WorkerGroupError("failed", {0: OSError("disk")})])
def test_other_errors_of_ray_train_stay_as_they_are(error):
    with pytest.raises(type(error)) as caught, config_errors_unwrapped():
        raise error
    assert caught.value is error


def test_a_worker_says_nothing_about_a_config_error(monkeypatch):
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
