"""Trial of rewards on a few samples before anything heavy starts, in a child process with hard deadlines.

A reward that hangs, ends its process, or takes too much memory ends the trial with one line. The child process and all
processes of its group are gone when the trial ends.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl_plugins.config.judge import key_variables, longest_timeout
from rl_plugins.errors import ConfigError
from rl_plugins.rewards.calling import check_routes, route_of
from rl_plugins.rewards.child_process import START_S
from rl_plugins.rewards.child_worker import ChildWorker
from rl_plugins.rewards.inline import InlineScorer
from rl_plugins.rewards.limits import WorkerLimits, withheld_names
from rl_plugins.rewards.loading import name_of, plain
from rl_plugins.rewards.records import Score, ScoringRequest
from rl_plugins.rewards.worker import WorkerLost, WorkerTask
from rl_plugins.user_code import REPEAT_S

DEADLINE_S = 10.0
"""Longest soft deadline of one call of a function in a trial, in seconds."""

LOAD_S = 12.0
"""Default for the seconds in which the rewards must load."""

_GRACE_S = 1.0


class RewardTrial:
    """Trial of rewards in a child process. Use the trial in a `with` block, or call `close`."""

    def __init__(
        self,
        reward_config: Mapping[str, Any],
        *,
        deadline_s: float = DEADLINE_S,
        load_timeout_s: float = LOAD_S,
        gpus: float = 0.0,
        memory_mb: int | None = None,
        pass_env: Sequence[str] = (),
        in_process: bool = False,
    ) -> None:
        """Start the process, and wait for the rewards.

        Args:
            reward_config: one reward, or a mapping from data source to reward (see `calling`).
            deadline_s: seconds for one call of a reward.
            load_timeout_s: seconds for the rewards to load, once the process has started.
            gpus: with 0, the process sees no GPU.
            memory_mb: memory of the process beyond a process without rewards, in MiB (see `WorkerLimits`).
            pass_env: names of environment variables with secrets for the rewards.
            in_process: trial of the rewards in this process, with the soft deadline only.

        Raises:
            ConfigError: the configuration is wrong, or a reward cannot be loaded.
        """
        self.reward_config, self.deadline_s = plain(reward_config), deadline_s
        check_routes(self.reward_config, ())
        self._limits = WorkerLimits.of(pass_env, memory_mb, keys=key_variables(self.reward_config))
        self._worker: ChildWorker | None = None
        self._scorer: InlineScorer | None = None
        if in_process:
            self._scorer = InlineScorer(self.reward_config, deadline_s=deadline_s, max_failure_rate=1.0)
            return
        self._worker = ChildWorker(
            WorkerTask(self.reward_config, self._limits, gpus), START_S + load_timeout_s, load_timeout_s
        )
        worker = self._worker

        def late() -> str:
            if not worker.loading:
                return f"did not start within {worker.start_timeout_s:g} s: try again when the machine has less work"
            return (
                f"was not loaded within {load_timeout_s:g} s: load less at the start, or raise load_timeout_s (in a "
                "recipe: reward.load_timeout_s)"
            )

        self._receive(
            worker,
            lambda: f"reward {worker.loading!r}" if worker.loading else "the process of the rewards",
            late,
            "while the reward was loaded: a reward must not end its process",
        )

    def __enter__(self) -> RewardTrial:
        """Return the trial. The end of the block ends the process."""
        return self

    def __exit__(self, *exception: object) -> None:
        """End the process."""
        self.close()

    def close(self) -> None:
        """End the process."""
        if self._worker is not None:
            self._worker.kill()

    def score(self, request: ScoringRequest) -> Score:
        """Score one sample.

        Raises:
            ConfigError: the data source has no reward, or the reward fails on the sample.
        """
        source = request.data_source
        check_routes(self.reward_config, [source])
        name = name_of(route_of(self.reward_config, source))
        score = self._score(request, name)
        if score.failure is not None:
            raise ConfigError(
                f"the reward fails on a sample of data_source {source!r}: {score.failure}: "
                f"{score.message}{self._missing_secret(score.message)}"
            )
        return score

    def _score(self, request: ScoringRequest, name: str) -> Score:
        if self._worker is None:
            assert self._scorer is not None, "a trial has a process or a scorer"
            return self._scorer.score([request])[0]
        self._worker.send(range(1), [request], self.deadline_s, self.deadline_s + REPEAT_S + _GRACE_S)
        (score,) = self._receive(
            self._worker,
            lambda: f"the reward fails on a sample of data_source {request.data_source!r}: {name}",
            lambda: (
                f"did not return within {self.deadline_s:g} s and could not be interrupted: give its own waits a "
                "deadline, and catch Exception, not BaseException"
            ),
            "in place of a score: a reward must return",
        )
        assert score is not None, "a single request has a score"
        return score

    def _receive(
        self, worker: ChildWorker, subject: Callable[[], str], late: Callable[[], str], lost: str
    ) -> list[Score | None]:
        try:
            while not worker.wait([worker], worker.remaining_s):
                if not worker.remaining_s:
                    raise ConfigError(f"{subject()} {late()}")
            return worker.receive()
        except WorkerLost as error:
            self.close()
            raise ConfigError(f"{subject()} {error.reason.removeprefix('the process ')} {lost}") from None
        except BaseException as error:
            self.close()
            if isinstance(error, ConfigError) and (hint := self._missing_secret(str(error))):
                raise ConfigError(f"{error}{hint}") from None
            raise

    def _missing_secret(self, message: str) -> str:
        """Return the way out if a message names a withheld variable."""
        names = [name for name in withheld_names(os.environ, self._limits.passed) if name in message]
        if not names:
            return ""
        return f"; rewards get this secret with pass_env=[{','.join(names)}] (in a recipe: reward.pass_env)"


def trial_deadline_s(reward_config: Mapping[str, Any], deadline_s: float) -> float:
    """Return the seconds for one call in a trial: enough for one answer of a judge.

    Args:
        reward_config: one reward, or a mapping from data source to reward.
        deadline_s: seconds for one call in the run.
    """
    return min(deadline_s, max(DEADLINE_S, 1.5 * longest_timeout(reward_config)))
