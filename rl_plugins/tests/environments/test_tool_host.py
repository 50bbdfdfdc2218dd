"""ToolHost: results, concurrency, deadlines, lost processes, and bad tools."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from rl_plugins.environments import tool_host
from rl_plugins.environments.tool_functions import Threads, tool_of
from rl_plugins.environments.tool_host import Result, ToolHost
from rl_plugins.environments.tool_process import ToolTask
from rl_plugins.errors import ConfigError
from rl_plugins.rewards.limits import WorkerLimits
from rl_plugins.tests.environments import sample_tools
from rl_plugins.tests.loops import for_each
from rl_plugins.tests.patience import is_running, kept_by, patient, wait_until

HERE = "rl_plugins.tests.environments.sample_tools"


def host_of(
    *tools: Any,
    deadline_s: float = 60.0,
    grace_s: float = 5.0,
    max_characters: int = 100,
    left_out: str = "middle",
    memory_mb: int | None = None,
    place_s: float = 60.0,
) -> ToolHost:
    limits = WorkerLimits.of((), memory_mb)
    task = ToolTask(tools, limits, patient(deadline_s), max_characters, patient(30), left_out)
    return ToolHost(task, grace_s=patient(grace_s), place_s=patient(place_s))


@pytest.fixture(scope="module")
def host() -> Iterator[ToolHost]:
    names = [f"{HERE}.{name}" for name in ("add", "wait_long", "meet", "obey", "cancel", "cancel_in_thread")]
    shop, crowd = {"_target_": f"{HERE}.Shop", "prices": {"tea": 3}}, {"_target_": f"{HERE}.Crowd", "size": 100}
    started = host_of(*names, shop, crowd, {"_target_": f"{HERE}.Program"}, memory_mb=256)
    yield started
    started.close()


def results_of(host: ToolHost, *calls: tuple[str, Mapping[str, Any]]) -> list[Result]:
    """Start all calls, and return the results in the order of the calls."""
    numbers = [host.call(name, arguments) for name, arguments in calls]
    found: dict[int, Result] = {}

    def finish() -> bool:
        found.update(host.results(0.1))
        return set(numbers) <= set(found)

    wait_until(finish, "all calls have results")
    return [found[number] for number in numbers]


def has_ended(program: psutil.Process) -> bool:
    return not is_running(program.pid)


def test_call_returns_text_of_any_result(host: ToolHost) -> None:
    acts = ("nothing", "mapping", "object", "long")
    *short, long = results_of(host, *(("obey", {"act": act}) for act in acts))
    assert short == [Result("", "null"), Result("", '{"a": [1]}'), Result("", "{1}")]
    assert long == Result("", "x" * 50 + " [9999900 characters left out] " + "x" * 50)
    assert results_of(host, ("add", {"a": 1, "b": 2}), ("price", {"item": "tea"})) == [Result("", "3"), Result("", "3")]


def test_tuple_of_a_tool_is_text_but_for_a_result_of_a_verl_tool(host: ToolHost) -> None:
    of_verl, three, two = results_of(host, *(("obey", {"act": act}) for act in ("verl", "three", "two")))
    way_out = "a tool for verl returns (response, reward, metrics): return rl.ToolResult here"
    assert of_verl == Result("raised", f"TypeError: {way_out}")
    assert (three, two) == (Result("", '["4", 0.5, 1]'), Result("", '["4", {}]'))


def test_call_reports_errors_without_places_in_files(host: ToolHost) -> None:
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("add", {"a": 1}),
        ("add", {"a": 1, "b": "2"}),
        ("add", {"a": 1, "b": 2, "c": 3}),
    ]
    raised, ended, *malformed = results_of(host, ("obey", {"act": "raise"}), ("obey", {"act": "exit"}), *wrong)
    assert raised == Result("raised", "ValueError: no such act") and ended == Result("raised", "SystemExit: 3")
    assert malformed == [
        Result("malformed", "add: 'b' is a required property"),
        Result("malformed", "add: b: '2' is not of type 'integer'"),
        Result("malformed", "add: Additional properties are not allowed ('c' was unexpected)"),
    ]


def test_cancellation_by_the_tool_is_a_failed_call(host: ToolHost) -> None:
    starts = host.starts
    by_tool, *others = results_of(
        host, ("cancel", {"act": "raise"}), ("cancel", {"act": "task"}), ("cancel_in_thread", {})
    )
    assert by_tool == Result("raised", "CancelledError: by the tool")
    assert others == [Result("raised", "CancelledError")] * 2 and host.starts == starts


def test_calls_of_plain_functions_run_at_once(host: ToolHost) -> None:
    assert results_of(host, *[("meet", {})] * 3) == [Result("", "met")] * 3


def test_stacks_of_threads_take_no_memory_of_the_tools(host: ToolHost) -> None:
    # Each call runs once.
    assert results_of(host, *[("gather", {})] * 100) == [Result("", "100")] * 100


def test_process_that_died_between_two_steps_is_replaced_without_a_culprit(host: ToolHost) -> None:
    starts, keeper = host.starts, host.pid
    kept_by(keeper).kill()
    wait_until(lambda: not is_running(keeper), "the process has ended")
    assert results_of(host, *[("meet", {})] * 3) == [Result("", "met")] * 3
    assert results_of(host, ("add", {"a": 1, "b": 1})) == [Result("", "2")] and host.starts == starts + 1


def test_died_process_is_replaced_and_only_the_culprit_fails(host: ToolHost) -> None:
    starts, programs = host.starts, kept_by(host.pid).children()
    first, culprit, last = results_of(
        host, ("wait_long", {"seconds": 0.5}), ("obey", {"act": "die"}), ("wait_long", {"seconds": 0.5})
    )
    assert first == last == Result("", "waited")
    assert culprit == Result("died", "obey: the process was ended by the signal SIGKILL")
    assert host.starts == starts + 2
    assert len(programs) == 1
    wait_until(lambda: has_ended(programs[0]), "the program of the lost process has ended")


def test_call_of_a_tool_missing_in_a_new_process_has_died_before_the_deadline() -> None:
    """The host knows the tool from an earlier process, whose MCP server had the tool."""
    host = host_of(f"{HERE}.add")
    host._tools["gone"] = host._tools["add"]
    gone, added = results_of(host, ("gone", {"a": 1, "b": 1}), ("add", {"a": 1, "b": 1}))
    assert gone == Result("died", "gone: the MCP server no longer has this tool")
    # After a missed deadline, a new process would take over.
    assert added == Result("", "2") and host.starts == 1
    host.close()


def test_late_call_ends_and_hanging_threads_are_left_with_their_process() -> None:
    host = host_of(f"{HERE}.obey", f"{HERE}.wait_long", deadline_s=0.1, grace_s=30.0)
    with_hanging_threads = host.pid
    hanging = results_of(host, ("wait_long", {"seconds": 1e6}), *[("obey", {"act": "hang"})] * 20)
    assert {result.kind for result in hanging} == {"late"} and "no result within" in hanging[0].text
    results_of(host, ("obey", {"act": "nothing"}))
    assert host.starts == 2
    assert not psutil.pid_exists(with_hanging_threads)
    host.close()


def test_deadline_of_a_call_starts_after_the_wait_for_a_place() -> None:
    host = host_of({"_target_": f"{HERE}.Single"}, deadline_s=1.0, grace_s=0.2)
    assert results_of(host, *[("nap", {"seconds": patient(0.3)})] * 5) == [Result("", "slept")] * 5
    assert host.starts == 1
    host.close()


def test_wait_for_a_place_has_a_deadline_which_the_result_names() -> None:
    host = host_of({"_target_": f"{HERE}.Single"}, place_s=0.3)
    first, second = results_of(host, *[("nap", {"seconds": patient(0.6)})] * 2)
    late = f"nap: the call did not start within {patient(0.3):g} s: other calls ran all the time"
    assert first == Result("", "slept") and second == Result("late", late)
    host.close()


@for_each("count", [0, -1, True, 1.5, "2"])
def test_calls_at_once_is_a_whole_number_of_at_least_1(count: Any) -> None:
    single: Any = sample_tools.Single()
    single.calls_at_once = count
    with pytest.raises(ConfigError, match=r"tool 'Single': calls_at_once=.*: must be .*at least 1"):
        tool_of("Single", single, {}, Threads())


class BlockedProcess:
    """Process and outbox without tools: each call has a result at once, up to the call `block`."""

    pid = 0

    def __init__(self, names: list[list[str]], places: int | None) -> None:
        self.connection, self._tools = Pipe()
        self.ended, self._end = Pipe()
        self._names: list[str] = []
        names.append(self._names)
        tools = [({"function": {"name": "block"}}, places, True), ({"function": {"name": "add"}}, None, True)]
        self._tools.send_bytes(json.dumps({"tools": tools}).encode())

    def has_ended(self) -> bool:
        return False

    def kill(self) -> None:
        pass

    def put(self, message: bytes) -> None:
        call = json.loads(message)
        self._names.append(call["name"])
        if "block" not in self._names:
            result = {"number": call["number"], "kind": "", "text": call["name"], "reward": {"value": 0.0}}
            self._tools.send_bytes(json.dumps({**result, "start": 0.0, "seconds": 0.0, "stuck": 0}).encode())

    def close(self) -> None:
        for end in (self.connection, self._tools, self.ended, self._end):
            end.close()


class BlockedHost:
    """ToolHost with blocked processes, a clock of the test, and the names of the calls of each process."""

    def __init__(self, patch: pytest.MonkeyPatch, *, deadline_s: float, places: int | None, place_s: float) -> None:
        self.names: list[list[str]] = []
        self.clock = SimpleNamespace(now=0.0)
        self.clock.monotonic = lambda: self.clock.now

        def start(*_: Any) -> tuple[BlockedProcess, BlockedProcess]:
            process = BlockedProcess(self.names, places)
            return process, process

        patch.setattr(tool_host, "start_with_task", start)
        patch.setattr(tool_host, "time", self.clock)
        self.host = ToolHost(ToolTask([], WorkerLimits(), deadline_s, 100, 1.0), grace_s=1.0, place_s=place_s)

    def listen(self, seconds: float) -> dict[int, Result]:
        """Return the results of some seconds."""
        found, end = dict[int, Result](), self.clock.now + seconds
        while self.clock.now < end:
            self.clock.now += 0.4
            found |= self.host.results(0.0)
        return found


def test_suspect_runs_without_other_calls_and_blocks_only_one_more_process(monkeypatch: pytest.MonkeyPatch) -> None:
    blocked_host = BlockedHost(monkeypatch, deadline_s=2.0, places=None, place_s=600.0)
    host, names = blocked_host.host, blocked_host.names
    blocked = host.call("block", {})
    blocked_host.clock.now += 0.5
    added = [host.call("add", {}) for _ in range(2)]
    found = blocked_host.listen(20.0)
    host.close()
    assert found.pop(blocked) == Result("late", "block: no result within 2 s")
    assert found == dict.fromkeys(added, Result("", "add"))
    # The second process takes no call beside the suspect.
    assert names == [["block", "add", "add"], ["block"], ["add", "add"]]


def test_call_without_a_place_can_be_forgotten_and_is_no_suspect(monkeypatch: pytest.MonkeyPatch) -> None:
    blocked_host = BlockedHost(monkeypatch, deadline_s=2.0, places=2, place_s=600.0)
    host, names = blocked_host.host, blocked_host.names
    *blocked, forgotten = [host.call("block", {}) for _ in range(5)]
    added = host.call("add", {})
    # Calls of other tools pass.
    assert names == [["block", "block", "add"]]
    host.forget([forgotten])
    found = blocked_host.listen(40.0)
    host.close()
    assert found.pop(added) == Result("", "add")
    assert found == dict.fromkeys(blocked, Result("late", "block: no result within 2 s")) and list(found) == blocked
    first, later = ["block", "block", "add"], ["add", "block", "block"]
    # Each suspect ran alone, and all other calls waited.
    assert names == [first, ["block"], ["block"], later, ["block"], ["block"], []]


def test_malformed_call_has_a_result_without_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    blocked_host = BlockedHost(monkeypatch, deadline_s=2.0, places=1, place_s=5.0)
    blocked_host.host.call("block", {})
    wrong = blocked_host.host.call("block", {"x" * 100: 1})
    end = "' was unexpected)"
    beginning = "block: Additional properties are not allowed ('xxx"
    text = f"{beginning} [64 characters left out] {'x' * (50 - len(end))}{end}"
    (result,) = blocked_host.host.results(0.0).items()
    assert result == (wrong, Result("malformed", text)) and blocked_host.names == [["block"]]
    blocked_host.host.close()


def test_wait_for_a_place_leaves_out_the_time_between_readings_of_results(monkeypatch: pytest.MonkeyPatch) -> None:
    blocked_host = BlockedHost(monkeypatch, deadline_s=200.0, places=2, place_s=5.0)
    for _ in range(2):
        blocked_host.host.call("block", {})
    early = blocked_host.host.call("block", {})
    assert not blocked_host.listen(3.0)
    blocked_host.clock.now += 50.0
    last = blocked_host.host.call("block", {})
    late = Result("late", "block: the call did not start within 5 s: other calls ran all the time")
    assert not blocked_host.listen(1.0)
    assert blocked_host.listen(2.0) == {early: late}
    assert blocked_host.listen(3.0) == {last: late}
    blocked_host.host.close()


@pytest.mark.extended
def test_process_that_keeps_no_deadline_is_killed() -> None:
    host = host_of(sample_tools.block, sample_tools.add, deadline_s=1.0, grace_s=2.0)
    (blocked,) = results_of(host, ("block", {}))
    assert blocked.kind == "late" and host.starts == 2
    assert results_of(host, ("add", {"a": 1, "b": 1})) == [Result("", "2")]
    host.close()


def test_host_leaves_no_process_behind() -> None:
    def local() -> str:
        """Return a text. A function of a function travels by value."""
        return "here"

    host = host_of(local)
    assert results_of(host, ("local", {})) == [Result("", "here")]
    process = psutil.Process(host.pid)
    host.close()
    assert not process.is_running()


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        (
            [f"{HERE}.untyped"],
            "tool 'rl_plugins.tests.environments.sample_tools.untyped': Argument a is missing a type",
        ),
        ([f"{HERE}.silent"], "has no docstring"),
        ([f"{HERE}.adds"], "did you mean 'add'"),
        ([f"{HERE}.add", {"_target_": f"{HERE}.add"}], "there are two tools of the name 'add': rename one"),
        ([{"mcp": "python -c pass", "port": 3}], "the MCP server 'python -c pass' takes no option 'port'"),
    ],
)
def test_host_refuses_a_bad_tool_in_one_line(tools: list[Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        host_of(*tools)
    assert said in str(refused.value) and "\n" not in str(refused.value)
