"""The ready-made reward for programs: the share of the tests that the program in the response passes.

A ground truth is JSON, or the value itself, in one of these forms:

    {"inputs": ["1 2"], "outputs": ["3"]}                         text for standard input, text of standard output
    {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}        arguments, and result of a function or a method
    [{"input": "1 2", "output": "3", "testtype": "stdin"}, ...]   one mapping for each test, as in LiveCodeBench
    ["assert add(1, 2) == 3", ...]                                statements, as in MBPP
    {"test_list": [...], "test_setup_code": "..."}                statements after a set-up, also with "test_imports"
    {"test": "def check(candidate): ...", "entry_point": "add"}   a function with statements, as in HumanEval

Each test is a run of its own in a CodeSandbox. Expected outputs and results stay outside the sandbox. Statements run
beside the program, in one process, so such a program can find its tests.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_plugins.config.judge import TOTAL_S
from rl_plugins.config.settings import AT_LEAST_1, NOT_NEGATIVE, SECONDS, check_ranges
from rl_plugins.errors import ConfigError
from rl_plugins.json_text import read_foreign_json
from rl_plugins.sandbox.records import SandboxResult
from rl_plugins.sandbox.sandbox import CodeSandbox

# A fence with the name of a language, and attributes of the block, opens a block, also after a block without an end.
# Other words are no such name.
_OPENS = r"\w[^\s`]*(?:[ \t]+(?:\{|\w+=)[^\n`]*)?[ \t]*\r?$"
_FENCED = re.compile(
    # Behind a text on its line, only a fence with the name of a language opens a block.
    r"^(?:[ \t]*```[^\n`]*|[^\n`]+```\w[^\s`]*[ \t]*\r?)\n"
    rf"((?:(?![ \t]*```).*\n)*)[ \t]*```(?!{_OPENS})",
    re.MULTILINE,
)
_FUNCTION_NAMES = ("fn_name", "func_name")
_SET_UPS = ("test_imports", "test_setup_code")

# The program runs in a module of its own, so `if __name__ == "__main__"` is false, and later lines do not see the names
# of the driver. `write` is fetched before the program can replace it. Prints of the program follow the mark if they
# waited in a buffer.
_DRIVER = """
import json, sys, types
from os import write
program, rest, mark = json.load(sys.stdin)
module = sys.modules["solution"] = types.ModuleType("solution")
names = module.__dict__
"""
_CALL = (
    _DRIVER
    + """
# As the testers of LiveCodeBench and APPS do. The names are builtins: `add` of operator is no function of the program.
sys.setrecursionlimit(50000)
shared = names["__builtins__"] = dict(vars(sys.modules["builtins"]))
modules = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics", "itertools",
    "functools", "operator", "io", "sys", "json",
)
for name in (*modules, "builtins", "typing"):
    exec(f"from {name} import *", shared)
for name in modules:
    exec(f"import {name}", shared)
exec(compile(program, "solution.py", "exec"), names)
name, arguments = rest
owner = names.get("Solution")
function = getattr(owner(), name) if hasattr(owner, name) else names[name]
result = function(*arguments)
text = json.dumps(result, default=lambda value: value.tolist() if hasattr(value, "tolist") else list(value))
write(1, f"\\n{mark}{text}\\n".encode())
"""
)
_ASSERT = (
    _DRIVER
    + """
exec(compile(program, "solution.py", "exec"), names)
for text in rest:
    exec(compile(text, "test.py", "exec"), names)
write(1, f"\\n{mark}\\n".encode())
"""
)


def program_of(response: str) -> str | None:
    """Return the text of the last whole fenced code block of a response, or None if there is none."""
    blocks = _FENCED.findall(response)
    return str(blocks[-1]) if blocks else None


class _Test(ABC):
    """One test of a program."""

    @abstractmethod
    def job(self, program: str, mark: str) -> tuple[str, str]:
        """Return the text to run, and its standard input.

        Args:
            program: program of the policy.
            mark: random text that only a complete run prints.
        """

    @abstractmethod
    def passes(self, stdout: str, mark: str, tolerance: float) -> bool:
        """Return True if the standard output of a good run is right."""


@dataclass(frozen=True)
class _OutputTest(_Test):
    stdin: str
    expected: str

    def job(self, program: str, mark: str) -> tuple[str, str]:
        return program, self.stdin

    def passes(self, stdout: str, mark: str, tolerance: float) -> bool:
        return same_output(stdout, self.expected, tolerance)


@dataclass(frozen=True)
class _CallTest(_Test):
    name: str
    arguments: Sequence[Any]
    expected: object

    def job(self, program: str, mark: str) -> tuple[str, str]:
        return _CALL, json.dumps([program, [self.name, self.arguments], mark])

    def passes(self, stdout: str, mark: str, tolerance: float) -> bool:
        _, found, text = stdout.rpartition(f"\n{mark}")
        try:
            result = read_foreign_json(text.partition("\n")[0]) if found else None
        except ValueError:
            return False
        wrapped = isinstance(self.expected, list) and len(self.expected) == 1
        wanted = [self.expected, *(self.expected if wrapped and isinstance(self.expected, list) else ())]
        return bool(found) and any(_same_value(result, value, tolerance) for value in wanted)


@dataclass(frozen=True)
class _AssertTest(_Test):
    texts: Sequence[str]

    def job(self, program: str, mark: str) -> tuple[str, str]:
        return _ASSERT, json.dumps([program, self.texts, mark])

    def passes(self, stdout: str, mark: str, tolerance: float) -> bool:
        return f"\n{mark}\n" in stdout


class CodeTests:
    """Share of the tests that the program in the response passes.

    Args:
        sandbox: way to isolate programs; see CodeSandbox.
        limits: limits of the run of one test; see SandboxLimits.
        headers: headers of requests to a server with the sandbox.
        interpreter: command before the name of the program's file; None is Python.
        file_name: name of the program's file.
        folders: further folders that programs may read.
        all_or_nothing: score 1 if all tests pass, else 0.
        max_tests: number of tests from the start that count; None is all.
        total_s: seconds for all tests of a program, less than `reward.deadline_s`. Further tests count as timeouts.
        tolerance: relative and absolute tolerance of numbers with a point or an exponent.

    Raises:
        ConfigError: an option is wrong, or there is no such sandbox on this machine.
    """

    def __init__(
        self,
        sandbox: str | Sequence[str] = "auto",
        limits: Mapping[str, float] | None = None,
        headers: Mapping[str, str] | None = None,
        interpreter: Sequence[str] | None = None,
        file_name: str = "main.py",
        folders: Sequence[str] = (),
        all_or_nothing: bool = False,
        max_tests: int | None = None,
        total_s: float = TOTAL_S,
        tolerance: float = 1e-6,
    ) -> None:
        check_ranges(float, SECONDS, total_s=total_s)
        check_ranges(float, NOT_NEGATIVE, tolerance=tolerance)
        if max_tests is not None:
            check_ranges(int, AT_LEAST_1, max_tests=max_tests)
        if not isinstance(all_or_nothing, bool):
            raise ConfigError(f"all_or_nothing={all_or_nothing!r}: must be true or false")
        self._all_or_nothing, self._max_tests = all_or_nothing, max_tests
        self._total_s, self._tolerance = total_s, tolerance
        self._python = interpreter is None
        self._sandbox = CodeSandbox(
            sandbox, limits=limits, headers=headers, interpreter=interpreter, file_name=file_name, folders=folders
        )

    def __call__(
        self, solution_str: str, ground_truth: object, extra_info: Mapping[str, Any] | None = None
    ) -> dict[str, float]:
        """Score the program of a response.

        Args:
            solution_str: text of the response.
            ground_truth: tests; see above.
            extra_info: may have `fn_name` or `func_name`.

        Returns:
            `score`; `passed`, the share of passed tests; `timeouts` and `errors`, the numbers of tests that were too
            slow or ended with an error; and `no_program`, 1 for a response without a program.

        Raises:
            ValueError: the ground truth has no tests.
            SandboxError: the sandbox failed.
        """
        tests = read_tests(ground_truth, extra_info or {})[: self._max_tests]
        if not self._python and not all(isinstance(test, _OutputTest) for test in tests):
            raise ValueError("tests with a function or with statements are for Python: leave out interpreter")
        program = program_of(solution_str)
        counts = {"passed": 0.0, "timeouts": 0.0, "errors": 0.0, "no_program": float(program is None)}
        end = time.monotonic() + self._total_s
        for test in tests if program is not None else ():
            outcome = self._outcome(test, program or "", end - time.monotonic())
            if outcome:
                counts[outcome] += 1
            if outcome != "passed" and self._all_or_nothing:
                break
        counts["passed"] /= len(tests)
        return {"score": float(counts["passed"] == 1.0) if self._all_or_nothing else counts["passed"], **counts}

    def _outcome(self, test: _Test, program: str, left_s: float) -> str:
        """Return the name of the count for a test; empty for a wrong output."""
        if left_s <= 0:
            return "timeouts"
        mark = secrets.token_hex(16)
        text, stdin = test.job(program, mark)
        limits = {"wall_s": min(self._sandbox.limits.wall_s, left_s)}
        result: SandboxResult = self._sandbox.run(text, stdin, limits=limits)
        if result.limit in ("cpu", "wall"):
            return "timeouts"
        if not result.ok:
            return "errors"
        return "passed" if test.passes(result.stdout, mark, self._tolerance) else ""


# Reading of tests ---------------------------------------------------------------------------------------------------


def read_tests(ground_truth: object, extra_info: Mapping[str, Any]) -> list[_Test]:
    """Return the tests in a ground truth.

    Args:
        ground_truth: tests as JSON, or as a value.
        extra_info: may have the name of the function.

    Raises:
        ValueError: the ground truth has no tests, or has another form.
    """
    value = _plain(ground_truth)
    if isinstance(value, str):
        try:
            value = read_foreign_json(value)
        except ValueError:
            value = [value] if "assert" in value else value
    sources: tuple[Any, ...] = (value, value[0] if isinstance(value, list) and value else None, extra_info)
    name = next((source[key] for source in sources for key in _FUNCTION_NAMES if _has(source, key)), None)
    tests: list[_Test] = []
    if _has(value, "inputs") and _has(value, "outputs"):
        inputs, outputs = _listed(value["inputs"]), _listed(value["outputs"])
        if len(inputs) != len(outputs):
            raise ValueError(f"the ground truth has {len(inputs)} inputs, but {len(outputs)} outputs")
        tests += [_pair_test(given, wanted, name) for given, wanted in zip(inputs, outputs, strict=True)]
    elif _has(value, "test") and _has(value, "entry_point"):
        entry_point = _text(value["entry_point"], "the entry point")
        tests.append(_AssertTest([_text(value["test"], "the test"), f"check({entry_point})"]))
    elif _has(value, "test_list"):
        setup = [_text(part, "the set-up") for key in _SET_UPS for part in _listed(value.get(key) or [])]
        tests += [_AssertTest([*setup, _text(text, "the test")]) for text in _listed(value["test_list"])]
    elif isinstance(value, list) and all(isinstance(item, str) for item in value):
        tests += [_AssertTest([text]) for text in value]
    elif isinstance(value, list) and all(_has(item, "input") and _has(item, "output") for item in value):
        for item in value:
            kind = item.get("testtype")
            if kind not in (None, "stdin") and name is None:
                raise ValueError(
                    f"the ground truth has a test with testtype={kind!r} and no name of a function: add fn_name to the "
                    "first test, or to extra_info"
                )
            tests.append(_pair_test(item["input"], item["output"], None if kind == "stdin" else name))
    if not tests:
        shown = str(ground_truth)
        raise ValueError(
            f"the ground truth {shown[:100]!r} has no tests: give inputs and outputs, or a list of assert statements"
        )
    return tests


def _plain(value: object) -> Any:
    """Return arrays as lists."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return value.decode()
    return _plain(value.tolist()) if hasattr(value, "tolist") else value


def _has(value: object, key: str) -> bool:
    """Return True if a mapping has a value. Columns of a table are null where a row has no such key."""
    return isinstance(value, Mapping) and value.get(key) is not None


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _pair_test(given: Any, wanted: Any, name: str | None) -> _Test:
    if name is None:
        return _OutputTest(_lines(given), _lines(wanted))
    name = _text(name, "the name of the function")
    if not isinstance(given, str):
        return _CallTest(name, _listed(given), wanted)
    # One line of JSON for each argument, as in LiveCodeBench.
    try:
        arguments = [read_foreign_json(line) for line in given.splitlines() if line.strip()]
        return _CallTest(name, arguments, read_foreign_json(wanted) if isinstance(wanted, str) else wanted)
    except ValueError:
        return _CallTest(name, [given], wanted)


def _text(value: Any, part: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{part} of the ground truth is {str(value)[:100]!r}, and not a text")
    return value


def _lines(value: object) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


# Comparison ---------------------------------------------------------------------------------------------------------


def same_output(given: str, wanted: str, tolerance: float) -> bool:
    """Return True if two outputs are equal, apart from white space and the last digits of numbers.

    Args:
        given: output of the program.
        wanted: right output.
        tolerance: relative and absolute tolerance of numbers with a point or an exponent.
    """
    given_lines, wanted_lines = ([line.split() for line in text.strip().splitlines()] for text in (given, wanted))
    if given_lines == wanted_lines:
        return True
    return len(given_lines) == len(wanted_lines) and all(
        len(line) == len(wanted_line)
        and all(_same_word(word, wanted_word, tolerance) for word, wanted_word in zip(line, wanted_line, strict=True))
        for line, wanted_line in zip(given_lines, wanted_lines, strict=True)
    )


def _same_word(given: str, wanted: str, tolerance: float) -> bool:
    if given == wanted:
        return True
    if not any(sign in f"{given}{wanted}" for sign in ".eE"):
        return False
    try:
        return _close(float(given), float(wanted), tolerance)
    except ValueError:
        return False


def _close(given: float, wanted: float, tolerance: float) -> bool:
    try:
        return math.isclose(given, wanted, rel_tol=tolerance, abs_tol=tolerance)
    except OverflowError:
        # A whole number beyond the largest float.
        return False


def _same_value(given: object, wanted: object, tolerance: float) -> bool:
    if isinstance(given, list) and isinstance(wanted, list):
        return len(given) == len(wanted) and all(
            _same_value(value, wanted_value, tolerance) for value, wanted_value in zip(given, wanted, strict=True)
        )
    if isinstance(given, dict) and isinstance(wanted, dict):
        right = {str(key): value for key, value in wanted.items()}
        return given.keys() == right.keys() and all(_same_value(given[key], right[key], tolerance) for key in given)
    if isinstance(given, bool) or isinstance(wanted, bool):
        return given is wanted
    if isinstance(given, int | float) and isinstance(wanted, int | float):
        exact = isinstance(given, int) and isinstance(wanted, int)
        return given == wanted if exact else _close(given, wanted, tolerance)
    return given == wanted
