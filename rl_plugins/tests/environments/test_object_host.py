"""ObjectHost: answers, isolation of failures, deadlines, the bound on objects, closing, and bad classes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rl_plugins.environments import object_host
from rl_plugins.environments.object_host import ObjectHost
from rl_plugins.environments.object_process import ObjectTask
from rl_plugins.environments.step_result import Answer
from rl_plugins.errors import ConfigError
from rl_plugins.rewards.limits import WorkerLimits
from rl_plugins.tests.environments import sample_environments
from rl_plugins.tests.patience import is_running, kept_by, patient, wait_until

HERE = "rl_plugins.tests.environments.sample_environments"
ROW = {"seed": 3, "ground_truth": "", "prompt": []}


def host_of(
    target: Any = f"{HERE}.Obey",
    *,
    max_objects: int = 8,
    deadline_s: float = 60.0,
    grace_s: float = 5.0,
    memory_mb: int | None = None,
    **options: Any,
) -> ObjectHost:
    limits = WorkerLimits.of((), memory_mb, "pass_env")
    task = ObjectTask({"_target_": target, **options}, limits, patient(deadline_s))
    return ObjectHost(task, max_objects, patient(30), grace_s=patient(grace_s))


def answers_of(host: ObjectHost, keys: list[int]) -> list[Answer]:
    """Return the next answer of each object."""
    found: dict[int, Answer] = {}

    def finish() -> bool:
        found.update(host.answers(0.1))
        return set(keys) <= set(found)

    wait_until(finish, "all objects have answered")
    return [found[key] for key in keys]


def steps(host: ObjectHost, *texts: str) -> list[Answer]:
    """Open an object for each text, and return the answers to one step."""
    keys = [*range(100, 100 + len(texts))]
    for key in keys:
        host.open(key, ROW)
    assert [answer.messages for answer in answers_of(host, keys)] == [[{"role": "user", "content": "go"}]] * len(keys)
    for key, text in zip(keys, texts, strict=True):
        host.call(key, "step", {"content": text})
    answers = answers_of(host, keys)
    host.leave(keys)
    return answers


@pytest.fixture(scope="module")
def host() -> Iterator[ObjectHost]:
    with closing(host_of(memory_mb=200)) as started:
        yield started


def test_failure_of_an_object_has_a_kind_and_touches_no_other_object(host: ObjectHost) -> None:
    acts = ("die", "exit", "raise", "cancel", "eat", "nan", "end", "hello")
    died, exited, raised, cancelled, eaten, not_finite, ended, well = steps(host, *acts)
    assert (died.failure, died.fault) == ("died", "the process of the object was ended by the signal SIGKILL")
    assert (exited.failure, exited.fault) == ("died", "the process of the object ended with exit status 3")
    assert raised.failure == "raised" and "Obey: step: ValueError: no such act (" in raised.fault
    assert cancelled.failure == "raised" and "Obey: step: asyncio.exceptions.CancelledError (" in cancelled.fault
    assert eaten.failure == "memory" and "may take no more memory" in eaten.fault
    assert not_finite.failure == "not_finite" and well.failure is None
    assert ended.score == 0.5 and ended.messages == []
    assert well.messages == [{"role": "user", "content": "ok"}] and host.starts == 1


def test_result_that_is_neither_message_nor_score_is_a_failure(host: ObjectHost) -> None:
    said = {
        "nothing": "'score' is of type NoneType, not a number",
        "empty": "step returned no message and no score",
        "text": "'score' is of type str, not a number",
        "half": "step returned a value of type dict with 'role' in place of a message with 'role' and 'content'",
        "object": "step returned a message that is not plain",
        "reward": "reward: 'score' is inf",
    }
    for answer, fault in zip(steps(host, *said), said.values(), strict=True):
        assert answer.failure and fault in answer.fault and answer.score is None


def test_objects_of_a_group_have_equal_random_numbers(host: ObjectHost) -> None:
    one, other = steps(host, "random", "random")
    assert one == other and one.failure is None


def test_late_and_blocking_objects_end_alone() -> None:
    # The deadline is also the time of a slow machine for the third object.
    with closing(host_of(deadline_s=1.5, grace_s=2.0)) as host:
        late, blocking, well = steps(host, "wait", "block", "hello")
    assert late.failure == blocking.failure == "timeout" and well.failure is None
    assert "step gave no result within" in late.fault and "blocked its process for more than" in blocking.fault


def test_objects_beyond_the_bound_wait_for_a_place() -> None:
    with closing(host_of(f"{HERE}.Judge", max_objects=2)) as host:
        for key in range(5):
            host.open(key, ROW)
        answers_of(host, [0, 1])
        assert host.answers(0.2) == {} and len(kept_by(host.pid).children()) == 2
        host.leave([0, 1, 4])
        answers_of(host, [2, 3])
        assert host.most == 2


def test_leave_closes_objects_and_ends_programs_of_objects(tmp_path: Path) -> None:
    with closing(host_of(folder=str(tmp_path))) as host:
        first, _ = steps(host, "program", "hello")
        program = int(first.messages[0]["content"])
        loader = kept_by(host.pid)
        wait_until(lambda: not host.answers(0.1) and not loader.children(), "all objects have closed")
        assert len(list(tmp_path.iterdir())) == 2
        wait_until(lambda: not is_running(program), "the program has ended")


def test_close_closes_objects_in_use_and_leaves_no_process_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Local(sample_environments.Obey):
        """A class of a function travels by value."""

    monkeypatch.setattr(object_host, "_CLOSE_S", patient(60))
    host = host_of(Local, folder=str(tmp_path))
    host.open(1, ROW)
    answers_of(host, [1])
    loader = kept_by(host.pid)
    (copy,) = loader.children()
    host.close()
    assert len(list(tmp_path.iterdir())) == 1 and not loader.is_running()
    wait_until(lambda: not is_running(copy.pid), "the copy has ended")


def test_object_that_cannot_close_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_host, "_CLOSE_S", patient(60))
    (folder := tmp_path / "broken").mkdir()
    with closing(host_of(folder=str(folder))) as host:
        steps(host, "hello")
    assert "An environment was not closed: " in caplog.text and "Obey: close: OSError: not closed" in caplog.text


def test_lost_process_of_the_class_is_replaced_and_all_objects_have_died() -> None:
    with closing(host_of()) as host:
        host.open(1, ROW)
        host.open(2, ROW)
        answers_of(host, [1, 2])
        host.call(2, "step", {"content": "program"})
        (started,) = answers_of(host, [2])
        program = int(started.messages[0]["content"])
        host.call(1, "step", {"content": "wait"})
        kept_by(host.pid).kill()
        (lost,) = answers_of(host, [1])
        host.call(2, "step", {"content": "hello"})
        (between,) = answers_of(host, [2])
        assert lost.failure == between.failure == "died" and "SIGKILL" in lost.fault and not is_running(program)
        assert [answer.failure for answer in steps(host, "hello")] == [None] and host.starts == 2


def test_process_of_the_class_that_ended_without_objects_is_replaced() -> None:
    with closing(host_of()) as host:
        kept_by(keeper := host.pid).kill()
        wait_until(lambda: not is_running(keeper), "the process has ended")
        assert [answer.failure for answer in steps(host, "hello", "hello")] == [None, None] and host.starts == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"target": f"{HERE}.Obye"}, "did you mean 'Obey'"),
        ({"target": f"{HERE}.ROW"}, "no 'ROW'"),
        ({"target": "sys.exit"}, "environment 'sys.exit' is no class: name a class with async reset, step and close"),
        ({"target": f"{HERE}.WithoutClose"}, "has no method close: write `async def close(self)`"),
        ({"target": f"{HERE}.PlainScore"}, "its score is not async: write `async def score(self)`"),
        ({"target": f"{HERE}.PlainStep"}, "its step is not async: write `async def step(self, message)`"),
        ({"target": f"{HERE}.OtherArguments"}, "its step takes other arguments (missing a required argument: 'more')"),
        ({"target": f"{HERE}.NeedsSize"}, "do not fit its constructor: missing a required argument: 'size'"),
        ({"target": f"{HERE}.Count", "size": 3}, "got an unexpected keyword argument 'size'"),
    ],
)
def test_host_refuses_a_bad_class_in_one_line(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        host_of(**options)
    assert said in str(refused.value) and "\n" not in str(refused.value)
