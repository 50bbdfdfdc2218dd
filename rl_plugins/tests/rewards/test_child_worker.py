"""RewardPool over child processes: alive after rewards that hang, end their process or take memory; nothing left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rl_plugins.errors import ConfigError, RewardError
from rl_plugins.rewards import pool
from rl_plugins.rewards.pool import RewardPool
from rl_plugins.rewards.records import Score, ScoringRequest
from rl_plugins.tests.patience import is_running, patient, wait_until

HERE = "rl_plugins.tests.rewards.sample_rewards"
DEFAULTS: dict[str, Any] = {"num_workers": 1, "deadline_s": patient(60.0), "max_failure_rate": 1.0}


@pytest.fixture(scope="module")
def obeying_pool() -> Iterator[RewardPool]:
    """Pool with the length of a response as score; a response may also name an act of the reward."""
    with RewardPool({"_target_": f"{HERE}.obey"}, **{**DEFAULTS, "num_workers": 2, "memory_mb": 300}) as shared:
        yield shared


def requests(*solutions: str) -> list[ScoringRequest]:
    return [ScoringRequest("s", solution, "yes", {"index": row}) for row, solution in enumerate(solutions)]


def outcomes(scores: list[Score]) -> list[float | str | None]:
    return [score.failure or score.value for score in scores]


def test_child_workers_keep_the_order_of_many_samples(obeying_pool: RewardPool) -> None:
    lengths = [(7 * n) % 50 + 30 for n in range(300)]
    assert outcomes(obeying_pool.score(requests(*("x" * n for n in lengths)))) == lengths


def test_child_workers_blame_the_culprits_of_a_chunk_alone(
    obeying_pool: RewardPool, caplog: pytest.LogCaptureFixture
) -> None:
    scores = obeying_pool.score(requests("a", "die", "bb", "segfault", "nan", "expire", "raise", "torch", "ccc"))
    assert outcomes(scores) == [1.0, "died", 2.0, "died", "not_finite", "timeout", "raised", 0.0, 3.0]
    assert "exit status 1" in scores[1].message and "SIGSEGV" in scores[3].message


def test_child_worker_fails_a_sample_that_takes_too_much_memory(obeying_pool: RewardPool) -> None:
    scores = obeying_pool.score(requests("a", "grow", "allocate", "bb"))
    assert outcomes(scores) == [1.0, "memory", "memory", 2.0]
    assert "raise memory_mb (in a recipe: reward.memory_mb)" in scores[1].message and "obey" in scores[1].message


def test_child_worker_that_cannot_be_interrupted_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "CHUNK_BUDGET_S", 0.0)
    deadlines = {"deadline_s": 0.1, "grace_s": 0.1}
    with RewardPool({"_target_": f"{HERE}.obey"}, **{**DEFAULTS, **deadlines}) as workers:
        assert outcomes(workers.score(requests("deaf"))) == ["timeout"]


def test_child_worker_ends_copies_of_a_process(obeying_pool: RewardPool) -> None:
    pids = [int(score.value or 0) for score in obeying_pool.score(requests("fork", "fork and end"))]
    assert pids[0] and not pids[1]
    copy = psutil.Process(pids[0])
    # Nobody waits for the copy.
    wait_until(lambda: copy.status() == psutil.STATUS_ZOMBIE, "the copy has ended")


def test_child_worker_keeps_numbers_beside_the_score_and_replies() -> None:
    with RewardPool({"_target_": f"{HERE}.haggle"}, **DEFAULTS) as workers:
        asked = [
            ScoringRequest("s", said, "", {}, turns_left=left) for said, left in (("no", 1), ("hm", 1), ("yes", 0))
        ]
        assert workers.answer(asked) == [
            Score(None, reply={"role": "user", "content": "sure?"}),
            Score(None, reply={"role": "tool", "content": "HM"}),
            Score(1.0, {"said": 1.0}),
        ]


SECRETS = {
    "HF_TOKEN": "1", "MLFLOW_TRACKING_PASSWORD": "2", "AWS_PROFILE": "3", "JUDGE_API_KEY": "4", "MY_CREDENTIALS": "5",
    "DATABASE": "postgres://me:word@host/db",
}  # fmt: skip


def test_child_worker_gets_no_secret_unless_passed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {**SECRETS, "TOKENIZERS_PARALLELISM": "false"}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "environment.py").write_text(
        "import os\nAT_START = open('/proc/self/environ').read()\n"
        "def f(solution_str): return float(solution_str in os.environ) + float(f'{solution_str}=' in AT_START)\n"
    )
    names = [*SECRETS, "TOKENIZERS_PARALLELISM", "PATH"]
    with RewardPool(
        {"path": str(tmp_path / "environment.py"), "name": "f"}, **DEFAULTS, pass_env=["HF_TOKEN"]
    ) as workers:
        assert outcomes(workers.score(requests(*names))) == [2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 2.0, 2.0]


def test_reward_pool_refuses_to_pass_a_variable_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match=r"reward.pass_env=\[NO_SUCH_KEY\].*the environment has no NO_SUCH_KEY"):
        RewardPool({"_target_": f"{HERE}.obey"}, **DEFAULTS, pass_env=["NO_SUCH_KEY"])


def test_child_worker_raises_the_errors_of_loading(tmp_path: Path) -> None:
    with RewardPool({"_target_": f"{HERE}.obei"}, **DEFAULTS) as workers, pytest.raises(ConfigError, match="'obey'"):
        workers.score(requests("a"))
    (tmp_path / "deadly.py").write_text("import os\nos._exit(3)\n")
    config = {"path": str(tmp_path / "deadly.py"), "name": "f"}
    with RewardPool(config, **DEFAULTS) as workers, pytest.raises(RewardError, match="ended with exit status 3"):
        workers.score(requests("a"))


def test_child_worker_gets_no_function_that_cannot_be_imported() -> None:
    with pytest.raises(ConfigError, match="cannot be sent to a reward worker"):
        RewardPool({"_target_": lambda solution_str: 1.0}, **DEFAULTS)


PROGRAM = f"""
import sys
from rl_plugins.rewards.pool import RewardPool
from rl_plugins.rewards.records import ScoringRequest
pool = RewardPool({{"_target_": "{HERE}.obey"}}, num_workers=1, deadline_s=1000)
print(pool._workers[0]._process.pid, flush=True)
pool.score([ScoringRequest("s", "deaf", "", {{}})])
"""


def test_child_worker_ends_with_the_process_that_started_the_worker() -> None:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = psutil.Process(int(process.stdout.readline()))
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    wait_until(lambda: not is_running(child.pid), "the end of the child")


@pytest.mark.extended
def test_breakpoint_in_a_child_worker_opens_the_debugger_without_deadline(tmp_path: Path) -> None:
    (tmp_path / "debugged.py").write_text(
        # The deadline of a call has no place for the import of the debugger.
        "import pdb\ndef f(solution_str):\n    breakpoint()\n    return len(solution_str)\n"
    )
    deadline_s = patient(3)
    program = f"""
from rl_plugins.rewards.pool import RewardPool
from rl_plugins.rewards.records import ScoringRequest
config = dict(path={str(tmp_path / "debugged.py")!r}, name="f")
with RewardPool(config, num_workers=1, deadline_s={deadline_s}, grace_s=0.5) as p:
    print("SCORE", p.score([ScoringRequest("s", "abc", None, dict())])[0].value)
"""
    session = f"import time; time.sleep({deadline_s + 1})\np 'value', solution_str\nc\n"
    # Ray sets PYTHONBREAKPOINT in a process that has started Ray as a driver.
    environment = {**os.environ, "PYTHONBREAKPOINT": ""}
    result = subprocess.run(
        [sys.executable, "-c", program],
        input=session,
        capture_output=True,
        text=True,
        timeout=patient(60),
        env=environment,
    )
    assert "('value', 'abc')" in result.stdout, result.stderr
    assert "SCORE 3.0" in result.stdout, result.stderr
