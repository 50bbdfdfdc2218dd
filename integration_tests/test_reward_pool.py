"""RewardPool over Ray actors: parallel, in order, and alive after rewards that hang, die or return no number."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from integration_tests.worker_start.sitecustomize import VARIABLE
from rl_plugins.errors import ConfigError, DataError, DeadlineExceeded, RewardError
from rl_plugins.rewards.limits import WorkerLimits
from rl_plugins.rewards.pool import RewardPool
from rl_plugins.rewards.records import Score, ScoringRequest, failure_counts
from rl_plugins.rewards.worker import LoadedRewards, WorkerTask
from rl_plugins.tests.patience import patient

pytestmark = pytest.mark.usefixtures("running_ray")
HERE = "rl_plugins.tests.rewards.sample_rewards"
# Deadlines for rewards that an alarm ends. A worker may be late by a minute before the pool kills the worker.
SOFT = {"deadline_s": patient(4.0), "grace_s": patient(60.0)}


@pytest.fixture(scope="module")
def obeying_pool() -> Iterator[RewardPool]:
    """Pool with the length of a response as score; a response may also name an act of the reward."""
    with pool(f"{HERE}.obey", num_workers=2, chunk_size=3, **SOFT) as shared:
        yield shared


def pool(target: str, **options: Any) -> RewardPool:
    return RewardPool({"_target_": target}, **{**DEFAULTS, **options})


DEFAULTS: dict[str, Any] = {"num_workers": 1, "deadline_s": patient(60.0), "max_failure_rate": 1.0}


def requests(*solutions: str) -> list[ScoringRequest]:
    return [
        ScoringRequest(data_source="s", solution_str=solution, ground_truth="yes", extra_info={"index": row})
        for row, solution in enumerate(solutions)
    ]


def outcomes(scores: list[Score]) -> list[float | str | None]:
    return [score.failure or score.value for score in scores]


def test_score_keeps_the_order_of_many_samples(obeying_pool: RewardPool) -> None:
    lengths = [(7 * n) % 50 + 30 for n in range(300)]
    assert outcomes(obeying_pool.score(requests(*("x" * n for n in lengths)))) == lengths
    assert obeying_pool.score([]) == []


def test_score_blames_the_culprits_of_a_chunk_alone(obeying_pool: RewardPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(obeying_pool, "chunk_size", 3)
    chunks = {
        ("a", "raise", "bb"): (1.0, "raised", 2.0),
        ("a", "nan", "bb"): (1.0, "not_finite", 2.0),
        ("a", "loop", "bb"): (1.0, "timeout", 2.0),
        ("a", "swallow", "bb"): (1.0, "timeout", 2.0),
        ("a", "die", "bb"): (1.0, "died", 2.0),
        ("a", "segfault", "bb"): (1.0, "died", 2.0),
        ("die", "ccc", "loop"): ("died", 3.0, "timeout"),
    }
    scores = obeying_pool.score(requests(*(solution for chunk in chunks for solution in chunk)))
    assert outcomes(scores) == [outcome for chunk in chunks.values() for outcome in chunk]
    assert all(score.value is None and score.message for score in scores if score.failure)
    counts = {"raised": 1, "not_finite": 1, "timeout": 3, "died": 3, "memory": 0, "image": 0}
    assert failure_counts(scores) == counts


@pytest.mark.extended
def test_score_kills_a_worker_that_no_alarm_interrupts_and_blames_no_slow_sample() -> None:
    with pool(f"{HERE}.obey") as workers:
        # No alarm comes so early. The slow samples take longer together than this hard deadline.
        workers.hard_deadline_s = patient(5.0)
        scores = workers.score(requests(*["slow"] * 18, "deaf"))
    assert outcomes(scores) == [*[1.0] * 18, "timeout"]


def test_workers_import_no_heavy_library() -> None:
    # In tests a worker is a fork with imported libraries; with its own variable a worker is a new interpreter.
    new_interpreter = {"env_vars": {VARIABLE: ""}}
    worker: Any = ray.remote(LoadedRewards).options(num_cpus=0, runtime_env=new_interpreter).remote()
    task = WorkerTask({"_target_": f"{HERE}.obey"}, WorkerLimits())
    ray.get(worker.load.remote(task), timeout=patient(60))
    scores = ray.get(worker.score.remote(requests("torch"), 10.0), timeout=patient(60))
    assert outcomes(scores) == [0.0]


def test_two_workers_score_at_the_same_time(tmp_path: Path) -> None:
    path = tmp_path / "meeting.py"
    path.write_text(
        "import pathlib, time\n"
        "def meet(solution_str, folder):\n"
        "    (pathlib.Path(folder) / solution_str).touch()\n"
        "    while len(list(pathlib.Path(folder).glob('here-*'))) < 2:\n"
        "        time.sleep(0.01)\n"
        "    return 1.0\n"
    )
    config = {"path": str(path), "name": "meet", "folder": str(tmp_path)}
    with RewardPool(config, **{**DEFAULTS, "num_workers": 2}) as workers:
        assert outcomes(workers.score(requests("here-1", "here-2"))) == [1.0, 1.0]


def test_coroutines_run_concurrently_and_a_blocking_coroutine_fails_alone() -> None:
    with pool(f"{HERE}.obey_async", **SOFT) as workers:
        scores = workers.score(requests("a", "expire", "await", "bb", "die", "ccc"))
    assert outcomes(scores) == [1.0, "timeout", "timeout", 2.0, "died", 3.0]


def test_coroutines_of_all_batches_run_in_one_event_loop() -> None:
    with pool(f"{HERE}.num_event_loops") as workers:
        assert [outcomes(workers.score(requests("a", "b"))) for _ in range(3)] == [[1.0, 1.0]] * 3


def test_batched_reward_is_called_with_chunks() -> None:
    with pool(f"{HERE}.batch_size", num_workers=2, chunk_size=4) as workers:
        assert outcomes(workers.score(requests(*"abcdefghij"))) == [4.0] * 8 + [2.0] * 2


def test_batch_that_kills_a_worker_is_scored_one_by_one() -> None:
    with pool(f"{HERE}.obey_batch") as workers:
        assert outcomes(workers.score(requests("a", "die", "bb"))) == [1.0, "died", 2.0]


def test_score_raises_above_max_failure_rate_at_once_and_the_pool_survives() -> None:
    with pool(f"{HERE}.obey", max_failure_rate=0.05, chunk_size=1) as workers:
        with pytest.raises(RewardError, match=r"^11 of 40 rewards failed.*timeout.*no result within \S+ s"):
            workers.score(requests(*["expire"] * 40))
        assert outcomes(workers.score(requests("a", "bb"))) == [1.0, 2.0]


def test_data_sources_are_routed_and_unknown_ones_refused() -> None:
    config = {"s": {"_target_": f"{HERE}.obey"}}
    with RewardPool(config, **DEFAULTS) as workers:
        assert outcomes(workers.score(requests("abc"))) == [3.0]
        stranger = ScoringRequest(data_source="t", solution_str="", ground_truth=None, extra_info={})
        with pytest.raises(DataError, match="data_source 't'"):
            workers.score([stranger])


def test_reward_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def f(solution_str, factor): return factor * len(solution_str)\n")
    with RewardPool({"path": str(path), "name": "f", "factor": 3}, **DEFAULTS) as workers:
        assert outcomes(workers.score(requests("ab"))) == [6.0]


def test_error_of_loading_a_reward_arrives_unchanged() -> None:
    with pool(f"{HERE}.obei") as workers, pytest.raises(ConfigError, match="did you mean 'obey'"):
        workers.score(requests("a"))


def test_new_worker_that_cannot_load_the_reward_raises_reward_error(tmp_path: Path) -> None:
    path = tmp_path / "fleeting.py"
    path.write_text("import os, pathlib\ndef f(solution_str):\n    pathlib.Path(__file__).unlink()\n    os._exit(1)\n")
    with (
        RewardPool({"path": str(path), "name": "f"}, **DEFAULTS) as workers,
        pytest.raises(RewardError, match=r"the new worker cannot load the rewards: reward file .* does not exist"),
    ):
        workers.score(requests("a"))


def test_score_raises_when_a_worker_never_starts(tmp_path: Path) -> None:
    path = tmp_path / "endless.py"
    path.write_text("import time\ntime.sleep(600)\n")
    config = {"path": str(path), "name": "f"}
    with (
        RewardPool(config, **DEFAULTS, start_timeout_s=0.5) as workers,
        pytest.raises(DeadlineExceeded, match=r"did not start and load its rewards within 0\.5 s"),
    ):
        workers.score(requests("a"))


def test_score_raises_when_a_worker_dies_while_loading_the_reward(tmp_path: Path) -> None:
    path = tmp_path / "deadly.py"
    path.write_text("import os\nos._exit(1)\n")
    config = {"path": str(path), "name": "f"}
    with (
        RewardPool(config, **DEFAULTS) as workers,
        pytest.raises(RewardError, match="died while it loaded its rewards"),
    ):
        workers.score(requests("a"))


def test_closed_pool_refuses_to_score() -> None:
    workers = pool(f"{HERE}.obey")
    workers.close()
    workers.close()
    with pytest.raises(RuntimeError, match="closed"):
        workers.score(requests("a"))


def test_workers_need_no_free_cpu_of_ray() -> None:
    @ray.remote(num_cpus=2)
    class Greedy:
        def ready(self) -> bool:
            return True

    greedy: Any = Greedy
    holder = greedy.remote()
    assert ray.get(holder.ready.remote(), timeout=patient(60))
    with pool(f"{HERE}.obey", start_timeout_s=patient(120.0)) as workers:
        assert outcomes(workers.score(requests("abc"))) == [3.0]
    ray.kill(holder)
