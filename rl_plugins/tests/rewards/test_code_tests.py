"""The reward for programs: forms of tests, outcomes, programs that cheat, and failures of the sandbox."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from rl_plugins.errors import ConfigError
from rl_plugins.rewards.code_tests import CodeTests, program_of, read_tests, same_output
from rl_plugins.rewards.inline import InlineScorer
from rl_plugins.rewards.pool import RewardPool
from rl_plugins.rewards.records import ScoringRequest
from rl_plugins.sandbox.records import SandboxError
from rl_plugins.tests.loops import for_each
from rl_plugins.tests.sandbox.machine import skip_without_namespaces

ADD = "def add(a, b):\n    return a + b\n"
METHOD = "class Solution:\n    def add(self, a: int, b: int) -> List[int]:\n        return a + b\n"
SUM = "print(sum(map(int, input().split())))\n"
PAIRS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
CALLS = {"inputs": [[1, 2], [3, 4]], "outputs": [3, [7]], "fn_name": "add"}
ONE_CALL = {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}
STATEMENTS = ["assert add(1, 2) == 3", "assert add(3, 4) == 7"]


def answer(program: str) -> str:
    return f"I think so:\n```python\n{program}\n```\nDone."


@pytest.fixture(scope="module")
def reward() -> Iterator[CodeTests]:
    skip_without_namespaces()
    yield CodeTests("namespaces", limits={"wall_s": 60}, total_s=120)


def test_program_of_takes_the_last_whole_block() -> None:
    assert program_of("```py\na = 1\n```\ntext\n  ```\nb = 2\n  ```") == "b = 2\n"
    assert program_of("```python\na = 1\n```\n```python\nb =") == "a = 1\n"
    assert program_of("```python\na =\n...\n```python\na = 1\n```\nDone") == "a = 1\n"
    assert program_of("```python\r\na =\r\n```python\r\na = 1\r\n```\r\nDone") == "a = 1\r\n"
    assert program_of("```python\na = 1\n```This sets a.\n") == "a = 1\n"
    assert program_of("```python\na = 1\nno end\n```python title=x\nb = 2\n```") == "b = 2\n"
    assert program_of("<answer>```python\nb\n```python\na = 1\n```</answer>") == "a = 1\n"
    assert program_of("<answer>```python\na = 1\n```</answer>") == "a = 1\n"
    assert program_of("Code: ```python\na = 1\n```\nIt sets a.\n") == "a = 1\n"
    assert program_of("Words ``` in a text\n```\na = 1\n```\n") == "a = 1\n"
    assert program_of("no program") is None and program_of("```python\na = 1") is None


@for_each(
    ("program", "truth", "score"),
    [
        (SUM, PAIRS, 1.0),
        (SUM, json.dumps(PAIRS), 1.0),
        ("print(3)", PAIRS, 0.5),
        (SUM, {"inputs": [["1 2", "x"]], "outputs": [["3"]]}, 1.0),
        (SUM, {**PAIRS, "fn_name": None}, 1.0),
        (SUM, [{"input": "1 2", "output": "3", "testtype": "stdin"}], 1.0),
        (ADD, CALLS, 1.0),
        (METHOD, CALLS, 1.0),
        (f"{ADD}print(add(1, 2))", CALLS, 1.0),
        (f"{ADD}print(add(1, 2))", STATEMENTS, 1.0),
        ("def add(a, b): return (a, b)", {"inputs": [[1, 2]], "outputs": [[1, 2]], "fn_name": "add"}, 1.0),
        (ADD, {"inputs": ["1\n2", '"a"\n"b"'], "outputs": ["3", '"ab"'], "fn_name": "add"}, 1.0),
        (ADD, [{"input": "1\n2", "output": "3", "testtype": "functional", "func_name": "add"}], 1.0),
        ("class Solution:\n def add(self, a, b):\n  h = [a, b]; heapq.heapify(h); return sum(h)", ONE_CALL, 1.0),
        (
            "def add(a, b): return [1, 2, 3][bisect.bisect_left([1, 2], b) + 1] * int(math.inf > Counter()[0])",
            ONE_CALL,
            1.0,
        ),
        ("def add(a, b, n=5000): return add(a, b, n - 1) if n else a + b", ONE_CALL, 1.0),
        ("def add(a: List[int], b): return a + b", ONE_CALL, 1.0),
        ("def other(): pass", CALLS, 0.0),
        ("def power(): return 10**400", {"inputs": [[]], "outputs": [0.5], "fn_name": "power"}, 0.0),
        (ADD, STATEMENTS, 1.0),
        ("def add(a, b): return 3", STATEMENTS, 0.5),
        (ADD, {"test_list": STATEMENTS, "test_setup_code": "import math"}, 1.0),
        (ADD, {"test_list": ["assert math.pi > add(1, 2)"], "test_imports": ["import math"]}, 1.0),
        (ADD, {"test": "def check(f):\n    assert f(1, 2) == 3", "entry_point": "add"}, 1.0),
        (ADD, "assert add(1, 2) == 3", 1.0),
    ],
)
def test_code_tests_scores_each_form_of_tests(reward: CodeTests, program: str, truth: Any, score: float) -> None:
    assert reward(answer(program), truth)["score"] == score


def test_code_tests_finds_the_name_of_the_function_in_extra_info(reward: CodeTests) -> None:
    truth = [{"input": "1\n2", "output": "3", "testtype": "functional"}]
    assert reward(answer(ADD), truth, {"func_name": "add"})["score"] == 1.0


def test_read_tests_refuses_a_function_without_a_name() -> None:
    for key in ("functional", "call_based"):
        with pytest.raises(ValueError, match=f"the ground truth has a test with testtype='{key}' and no name"):
            read_tests([{"input": "1\n2", "output": "3", "testtype": key}], {})
    read_tests([{"input": "1\n2", "output": "3"}], {})


def test_code_tests_counts_timeouts_errors_and_missing_programs(reward: CodeTests) -> None:
    nothing = {"score": 0.0, "passed": 0.0, "timeouts": 0.0, "errors": 0.0, "no_program": 0.0}
    assert reward("no program", PAIRS) == {**nothing, "no_program": 1.0}
    assert reward(answer("1 / 0"), PAIRS) == {**nothing, "errors": 2.0}
    assert reward(answer("print(5)"), PAIRS) == nothing
    quick = CodeTests("namespaces", limits={"cpu_s": 0.2, "wall_s": 60}, total_s=120)
    assert quick(answer("while True: pass"), PAIRS) == {**nothing, "timeouts": 2.0}
    late = CodeTests("namespaces", total_s=1e-9)
    assert late(answer(SUM), PAIRS) == {**nothing, "timeouts": 2.0}


def test_code_tests_gives_all_or_nothing(reward: CodeTests) -> None:
    strict = CodeTests("namespaces", limits={"wall_s": 60}, total_s=120, all_or_nothing=True)
    assert strict(answer("print(3)"), PAIRS)["score"] == 0.0
    assert strict(answer("print(3)"), PAIRS)["passed"] == 0.5
    assert strict(answer(SUM), PAIRS)["score"] == 1.0
    assert (
        CodeTests("namespaces", limits={"wall_s": 60}, max_tests=1, total_s=120)(answer("print(3)"), PAIRS)["score"]
        == 1.0
    )


@for_each(
    "program",
    [
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "raise SystemExit",
        "import atexit, os\natexit.register(os._exit, 0)",
        "print('passed')",
        "import json\njson.dumps = lambda *_, **__: '3'\nadd = None",
        "class Equal:\n    def __eq__(self, other): return True\ndef add(a, b): return Equal()",
        "import builtins\nbuiltins.AssertionError = SystemExit\ndef add(a, b): return 0",
        "import __main__, os\nos.write(1, f'\\n{__main__.mark}{chr(91) * 10**5}'.encode())\nos._exit(0)",
    ],
)
def test_code_tests_gives_nothing_to_a_program_that_cheats(reward: CodeTests, program: str) -> None:
    assert reward(answer(program), CALLS)["score"] == 0.0
    if "__eq__" not in program:  # An object of the program may say that it equals anything.
        assert reward(answer(program), STATEMENTS)["score"] == 0.0


@for_each(
    ("given", "wanted", "same"),
    [
        ("1  2\n3 ", "1 2\n3\n", True),
        ("1\n2", "1 2", False),
        ("0.3333333", "0.33333333333", True),
        ("0.34", "0.33", False),
        ("1000000", "1000001", False),
        ("1.0", "1", True),
        ("nan", "nano", False),
        ("", "1", False),
    ],
)
def test_same_output(given: str, wanted: str, same: bool) -> None:
    assert same_output(given, wanted, 1e-6) is same


@for_each("truth", [{}, [], None, 4, "[]", "text", {"inputs": []}, [1], {"inputs": ["1"], "outputs": []}, "[" * 10**5])
def test_read_tests_refuses_a_ground_truth_without_tests(truth: object) -> None:
    with pytest.raises(ValueError, match="the ground truth"):
        read_tests(truth, {})


@for_each(
    "truth",
    [
        {"test": 5, "entry_point": "add"},
        {"test": "def check(c): ...", "entry_point": 6},
        {"test_list": ["assert True", 1]},
        {"test_list": ["assert True"], "test_setup_code": [1]},
        {"inputs": [[1]], "outputs": [1], "fn_name": 7},
    ],
)
def test_read_tests_refuses_statements_and_names_that_are_no_text(truth: object) -> None:
    with pytest.raises(ValueError, match=r"of the ground truth is '.*', and not a text"):
        read_tests(truth, {})


def test_code_tests_scores_in_a_reward_worker() -> None:
    skip_without_namespaces()
    config: dict[str, Any] = {
        "_target_": "rl_plugins.rewards.code_tests.CodeTests",
        "sandbox": "namespaces",
        "total_s": 120,
    }
    config["limits"] = {"wall_s": 60}
    pool = RewardPool(config, num_workers=1, deadline_s=120, memory_mb=256)
    try:
        requests = [ScoringRequest("code", answer(text), PAIRS, extra_info={}) for text in (SUM, "print(3)")]
        assert [score.value for score in pool.score(requests)] == [1.0, 0.5]
    finally:
        pool.close()


def test_failed_sandbox_is_a_failure_and_no_score(reward: CodeTests, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise SandboxError("the sandbox ended in the run of a program")

    monkeypatch.setattr(reward._sandbox, "run", fail)
    scorer = InlineScorer({"_target_": reward}, max_failure_rate=1.0)
    (score,) = scorer.score([ScoringRequest("code", answer(SUM), PAIRS, extra_info={})])
    assert score.failure == "raised" and score.value is None and "the sandbox ended" in score.message


@for_each(
    ("options", "message"),
    [
        ({"total_s": 0}, "total_s=0: must be above 0"),
        ({"tolerance": -1}, "tolerance=-1: must be 0 or more"),
        ({"max_tests": 0}, "max_tests=0: must be at least 1"),
        ({"all_or_nothing": "yes"}, "all_or_nothing='yes': must be true or false"),
        ({"limits": {"cpu": 2}}, "there is no limit 'cpu'"),
        ({"sandbox": "docker"}, "sandbox='docker': use auto, namespaces"),
    ],
)
def test_code_tests_refuses_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CodeTests(**options)
