"""The pool over real Ray actors: parallel, in order, and alive after scorers that hang, die or lie."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from rl_plugins.errors import ConfigError
from rl_plugins.rewards import RewardFailureError, RewardPool, Score, ScoringRequest, failure_counts

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("running_ray")]
HERE = "rl_plugins.tests.rewards.sample_rewards"


@pytest.fixture(scope="module")
def obeying_pool() -> Iterator[RewardPool]:
    """Scores a response by its length, unless the response asks for mischief."""
    with pool(f"{HERE}.obey", num_workers=2, deadline_s=1.0, grace_s=1.0) as shared:
        yield shared


def pool(target: str, **options: Any) -> RewardPool:
    defaults: dict[str, Any] = {"num_workers": 1, "deadline_s": 5.0, "max_failure_rate": 1.0}
    return RewardPool({"_target_": target}, **{**defaults, **options})


def requests(*solutions: str) -> list[ScoringRequest]:
    return [
        ScoringRequest(data_source="s", solution_str=solution, ground_truth="yes", extra_info={"index": row})
        for row, solution in enumerate(solutions)
    ]


def outcomes(scores: list[Score]) -> list[float | str | None]:
    return [score.failure or score.value for score in scores]


def test_many_samples_in_order(obeying_pool: RewardPool) -> None:
    lengths = [(7 * n) % 50 + 30 for n in range(300)]
    assert outcomes(obeying_pool.score(requests(*("x" * n for n in lengths)))) == lengths
    assert obeying_pool.score([]) == []


@pytest.mark.parametrize(
    ("deed", "failure"),
    [
        ("raise", "raised"),
        ("nan", "not_finite"),
        ("loop", "timeout"),
        ("swallow", "timeout"),
        ("deaf", "timeout"),
        ("die", "died"),
        ("segfault", "died"),
    ],
)
def test_only_the_culprit_fails(obeying_pool: RewardPool, deed: str, failure: str) -> None:
    scores = obeying_pool.score(requests("a", "bb", deed, "ccc", "dddd", "eeeee"))
    assert outcomes(scores) == [1.0, 2.0, failure, 3.0, 4.0, 5.0]
    assert scores[2].value is None and scores[2].message
    assert failure_counts(scores)[failure] == 1


def test_several_culprits_at_once(obeying_pool: RewardPool) -> None:
    scores = obeying_pool.score(requests("die", "a", "deaf", "bb", "die", "loop", "ccc"))
    assert outcomes(scores) == ["died", 1.0, "timeout", 2.0, "died", "timeout", 3.0]


def test_slow_samples_are_not_blamed_for_their_number(obeying_pool: RewardPool) -> None:
    started = time.monotonic()
    assert outcomes(obeying_pool.score(requests(*["slow"] * 40))) == [1.0] * 40
    assert time.monotonic() - started < 11  # 12 s of sleeping, shared by two workers


def test_workers_load_nothing_heavy(obeying_pool: RewardPool) -> None:
    assert outcomes(obeying_pool.score(requests("torch", "torch"))) == [0.0, 0.0]


def test_coroutines_are_concurrent_and_a_blocking_one_fails_alone() -> None:
    with pool(f"{HERE}.obey_async", deadline_s=1.0, grace_s=1.0) as workers:
        scores = workers.score(requests("a", "loop", "await", "bb", "die", "ccc"))
    assert outcomes(scores) == [1.0, "timeout", "timeout", 2.0, "died", 3.0]


def test_a_batched_reward_sees_chunks() -> None:
    with pool(f"{HERE}.batch_size", num_workers=2, chunk_size=4) as workers:
        assert outcomes(workers.score(requests(*"abcdefghij"))) == [4.0] * 8 + [2.0] * 2


def test_a_batch_that_kills_its_worker_is_taken_apart() -> None:
    with pool(f"{HERE}.obey_batch") as workers:
        assert outcomes(workers.score(requests("a", "die", "bb"))) == [1.0, "died", 2.0]


def test_too_many_failures_end_the_batch_early_and_the_pool_survives() -> None:
    with pool(f"{HERE}.obey", max_failure_rate=0.05, deadline_s=1.0) as workers:
        started = time.monotonic()
        with pytest.raises(RewardFailureError, match=r"of 40 rewards failed.*timeout.*no result within 1.0 s"):
            workers.score(requests(*["loop"] * 40))
        assert time.monotonic() - started < 15
        assert outcomes(workers.score(requests("a", "bb"))) == [1.0, 2.0]


def test_data_sources_are_routed_and_unknown_ones_refused() -> None:
    config = {"s": {"_target_": f"{HERE}.obey"}}
    with RewardPool(config, num_workers=1, deadline_s=5.0) as workers:
        assert outcomes(workers.score(requests("abc"))) == [3.0]
        stranger = ScoringRequest(data_source="t", solution_str="", ground_truth=None, extra_info={})
        with pytest.raises(ConfigError, match="data_source 't'"):
            workers.score([stranger])


def test_a_reward_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def f(solution_str, factor): return factor * len(solution_str)\n")
    with RewardPool({"path": str(path), "name": "f", "factor": 3}, num_workers=1, deadline_s=5.0) as workers:
        assert outcomes(workers.score(requests("ab"))) == [6.0]


def test_an_error_of_loading_arrives_as_it_is() -> None:
    with pool(f"{HERE}.obei") as workers, pytest.raises(ConfigError, match="did you mean 'obey'"):
        workers.score(requests("a"))


def test_a_worker_that_never_starts_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "endless.py"
    path.write_text("import time\ntime.sleep(600)\n")
    config = {"path": str(path), "name": "f"}
    with (
        RewardPool(config, num_workers=1, deadline_s=1.0, start_timeout_s=4.0) as workers,
        pytest.raises(TimeoutError, match="did not start and load its rewards within 4 s"),
    ):
        workers.score(requests("a"))


def test_a_worker_that_dies_while_loading_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "deadly.py"
    path.write_text("import os\nos._exit(1)\n")
    config = {"path": str(path), "name": "f"}
    with (
        RewardPool(config, num_workers=1, deadline_s=1.0) as workers,
        pytest.raises(RuntimeError, match="died while it loaded its rewards"),
    ):
        workers.score(requests("a"))


def test_a_closed_pool_says_so() -> None:
    workers = pool(f"{HERE}.obey")
    workers.close()
    workers.close()
    with pytest.raises(RuntimeError, match="closed"):
        workers.score(requests("a"))


def test_workers_need_no_free_processor() -> None:
    @ray.remote(num_cpus=2)
    class Greedy:
        def ready(self) -> bool:
            return True

    greedy: Any = Greedy
    holder = greedy.remote()
    assert ray.get(holder.ready.remote(), timeout=60)
    with pool(f"{HERE}.obey", start_timeout_s=30.0) as workers:
        assert outcomes(workers.score(requests("abc"))) == [3.0]
    ray.kill(holder)
