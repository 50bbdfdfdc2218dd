"""Kill of each kind of process, and signals to the command, at random moments: a run must end as a run left alone ends.

    python -m integration_tests.campaign                         # 20 times each kind: hours
    python -m integration_tests.campaign --times 1 --kinds engine driver
    python -m integration_tests.campaign --page docs/kills.md    # write the tables of all results so far

Each kill is a run of the tiny policy that loses one process by SIGKILL, or whose command gets other signals. A run that
cannot go on by itself is started again with `run.resume=auto`. Then weights and metrics are compared bit by bit with a
run left alone, and the machine is searched for processes, shared memory and temporary files of the run. Each result is
a line of `results.jsonl`. A campaign that was stopped goes on with the next kill.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median

import psutil

from integration_tests.command_server import run_command
from integration_tests.conftest import Recipe, recipes_in, save_workplace
from integration_tests.mlflow_server import Server
from rl_plugins.run_folder import RunFolder, read_metrics
from rl_plugins.tests.patience import wait_until
from rl_plugins.tests.shell_variables import ask_no_proxy_for_this_machine, forget_servers

STEPS = 8
STARTS = 6
"""Largest number of starts of a run, the first start included."""
MARK = "RL_PLUGINS_CAMPAIGN"
"""Environment variable of all processes of a run: the name of the run."""

_COMMON = (
    f"run.steps={STEPS}", "run.checkpoint_every=3", "run.eval_every=4", "run.deterministic=true",
    "batch.prompts_per_step=8", "batch.samples_per_prompt=4", "batch.updates_per_step=2", "optimizer.lr=1e-3",
    "algorithm.kl.coefficient=0.05", "placement.device=cpu", "placement.cpus_per_worker=0.5", "reward.num_workers=1",
)  # fmt: skip
ANSWERS = (
    "grpo", *_COMMON, "rollout.tensor_parallel_size=2", "placement.reference.actors=1", "placement.reference.cpus=0.5",
    "reward.functions.default={_target_: integration_tests.rewards.shortness}",
)  # fmt: skip
"""Recipe and options of runs with rewards, engines of two processes and a pool with the reference."""
CONVERSATIONS = (
    "ppo", *_COMMON, "placement.critic.actors=1", "placement.critic.cpus=0.5", "environment.max_turns=3",
    "data.max_prompt_tokens=8", "sampling.max_tokens=28",
    "sampling.stop=[a,b,c,d,e,f,g,h,i,j,k,l,m,n,o,p,q,r,s,t,u,v,w,x,y,z]",
    "reward.functions.default._target_=integration_tests.rewards.asks_back",
)  # fmt: skip
"""Recipe and options of runs with an environment, and a pool that trains the critic."""


# Kinds of processes -----------------------------------------------------------------------------------------------


def _with(title: str) -> Callable[[Recipe], list[psutil.Process]]:
    return lambda run: run.processes(title)


def _driver(run: Recipe) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return [psutil.Process(run.process.pid)]
    return []


def _processes_of_engines(run: Recipe) -> list[psutil.Process]:
    found = []
    for engine in run.processes("ray::VLLMActor"):
        with suppress(psutil.NoSuchProcess):
            found += [child for child in engine.children() if "resource_tracker" not in " ".join(child.cmdline())]
    return found


@dataclass(frozen=True)
class Kind:
    """A kind of process.

    Attributes:
        recipe: recipe and options of the runs.
        find: function that returns the living processes of this kind in a run.
        signals: signals to the first process, one after the other.
    """

    recipe: tuple[str, ...]
    find: Callable[[Recipe], list[psutil.Process]]
    signals: tuple[signal.Signals, ...] = (signal.SIGKILL,)

    @property
    def asks(self) -> bool:
        """True if the signals ask the command to end, which then ends in order."""
        return signal.SIGKILL not in self.signals


TRACKING_SERVER = "tracking server"
KINDS: Mapping[str, Kind] = {
    "driver": Kind(ANSWERS, _driver),
    "controller": Kind(ANSWERS, _with("ray::TrainController")),
    "training worker": Kind(ANSWERS, _with("ray::RayTrainWorker")),
    "engine": Kind(ANSWERS, _with("ray::VLLMActor")),
    "process of an engine": Kind(ANSWERS, _processes_of_engines),
    "reward worker": Kind(ANSWERS, _with("ray::LoadedRewards")),
    "environment worker": Kind(CONVERSATIONS, _with("ray::LoadedRewards")),
    "actor of the reference": Kind(ANSWERS, _with("ray::ModelActor")),
    "actor of the critic": Kind(CONVERSATIONS, _with("ray::CriticActor")),
    "raylet": Kind(ANSWERS, _with("/raylet/raylet")),
    "head": Kind(ANSWERS, _with("gcs_server")),
    TRACKING_SERVER: Kind(ANSWERS, lambda run: []),
    "SIGTERM": Kind(ANSWERS, _driver, (signal.SIGTERM,)),
    "SIGHUP": Kind(ANSWERS, _driver, (signal.SIGHUP,)),
    "SIGINT": Kind(ANSWERS, _driver, (signal.SIGINT,)),
    "SIGINT twice": Kind(ANSWERS, _driver, (signal.SIGINT, signal.SIGINT)),
}
_BETWEEN_S = 0.5
"""Seconds between two signals to one process."""


# Runs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moment:
    """Moment of a kill.

    Attributes:
        step: finished step before the kill; 0 is the start-up.
        delay_s: seconds after the step, or after the first process of the kind or connection to the server.
    """

    step: int
    delay_s: float


@dataclass(frozen=True)
class Outcome:
    """Result of a kill.

    Attributes:
        kind: kind of the killed process.
        number: number of the kill among the kills of the kind.
        moment: moment of the kill.
        statuses: exit status of each start of the run.
        killed: True if a process of the kind was found and killed.
        restart_s: seconds from the kill to the next row of metrics, of a new start if the first start has failed.
        end_s: seconds from the kill to the end of the first start.
        differences: metrics, steps and files that differ from a run left alone.
        left: processes, shared memory and temporary files left behind.
        faults: a status or a text that a signal must not cause.
    """

    kind: str
    number: int
    moment: Moment
    statuses: list[int]
    killed: bool
    restart_s: float
    end_s: float
    differences: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """True if a process was killed, nothing differs, and nothing is left."""
        return self.killed and self.statuses[-1] == 0 and not (self.differences or self.left or self.faults)


class Campaign:
    """Runs in one folder, with their results.

    Args:
        folder: folder of the runs and of `results.jsonl`.
        seed: seed of the moments.
        options: options of all runs, after the options of the recipe.
    """

    def __init__(self, folder: Path, seed: int = 0, options: Sequence[str] = ()) -> None:
        self._folder, self._seed, self._options = folder.absolute(), seed, tuple(options)
        self._workplace = self._folder / "workplace"
        if not (self._workplace / "tiny").is_dir():
            save_workplace(self._workplace)

    def results(self) -> list[Outcome]:
        """Return all results so far."""
        return read_results(self._folder)

    def run(self, kind: str, number: int, moment: Moment | None = None) -> Outcome:
        """Kill one process of a kind, and write the result down.

        Args:
            kind: name in `KINDS`.
            number: number of the kill.
            moment: moment of the kill; by default a random one, which depends on seed, kind, number, and the number of
                kills before that found no process.
        """
        recipe = (*KINDS[kind].recipe, *self._options)
        whole = self._left_alone(recipe)
        # The same moment would find no process again.
        missed = sum(
            (outcome.kind, outcome.number) == (kind, number) for outcome in self.results() if not outcome.killed
        )
        chance = random.Random(f"{self._seed}-{kind}-{number}" + (f"-{missed}" if missed else ""))
        moment = moment or Moment(chance.randrange(STEPS), round(chance.uniform(0, 2), 3))
        name = f"{kind.replace(' ', '-')}-{number}"
        shutil.rmtree(self._folder / "outputs" / name, ignore_errors=True)
        memory = set(os.listdir("/dev/shm"))
        with ExitStack() as stack:
            temporary = Path(tempfile.mkdtemp(prefix="kill"))
            stack.callback(shutil.rmtree, temporary, ignore_errors=True)
            start = stack.enter_context(self._starts(recipe, name, temporary))
            server = None
            if kind == TRACKING_SERVER:
                server = Server(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="server"))))
                stack.callback(server.close)
                server.start()
            outcome = _run_with_kill(start, kind, number, moment, server)
            differing = differences(self._folder / "outputs" / name, whole)
            if server is not None:
                differing += _missing_on(server, self._folder / "outputs" / name)
            outcome = replace(outcome, differences=differing, left=left_behind(name, temporary, memory))
        with (self._folder / "results.jsonl").open("a") as results:
            results.write(json.dumps(asdict(outcome)) + "\n")
        return outcome

    def _left_alone(self, recipe: tuple[str, ...]) -> Path:
        """Return the folder of a finished run without a kill, which the first call trains."""
        name = f"whole-{recipe[0]}"
        if not (self._folder / "outputs" / name / "policy").is_dir():
            shutil.rmtree(self._folder / "outputs" / name, ignore_errors=True)
            with self._starts(recipe, name, Path(tempfile.gettempdir())) as start:
                run = start()
                assert run.wait(1800) == 0, run.tail()
        return self._folder / "outputs" / name

    @contextmanager
    def _starts(self, recipe: tuple[str, ...], name: str, temporary: Path) -> Iterator[Callable[..., Recipe]]:
        with recipes_in(self._folder, self._workplace) as start:

            def begin(*overrides: str) -> Recipe:
                variables = {MARK: name, "TMPDIR": str(temporary)}
                options = (*recipe[1:], "run.resume=auto", *overrides)
                return start(recipe[0], name, *options, new_interpreter=True, **variables)

            yield begin


def _run_with_kill(
    start: Callable[..., Recipe], kind: str, number: int, moment: Moment, server: Server | None
) -> Outcome:
    """Start a run, kill a process, and start the run again until its end."""
    overrides = () if server is None else (f"tracking.uri={server.uri}", "tracking.experiment=kills")
    run = start(*overrides)
    if moment.step:
        run.wait_for_step(moment.step, 1800)
    elif server is None:
        run.wait_until(partial(KINDS[kind].find, run), kind, 1800)
    else:
        # The run has connected to the server.
        run.wait_until((run.run / "mlflow_run_id").is_file, "the run in MLflow", 1800)
    time.sleep(moment.delay_s)
    killed, killed_at = server is not None, time.monotonic()
    if server is not None:
        server.kill()
        server.start()
    else:
        # A process of the kind may be about to start again, or the run may have ended.
        with suppress(AssertionError, IndexError, psutil.NoSuchProcess):
            run.wait_until(partial(KINDS[kind].find, run), kind, 120)
            process = KINDS[kind].find(run)[0]
            killed_at = time.monotonic()
            for signal_number in KINDS[kind].signals:
                process.send_signal(signal_number)
                killed = True
                time.sleep(_BETWEEN_S if KINDS[kind].asks else 0)
    rows, first, statuses, restart_s, end_s = len(run.metrics()), run, list[int](), 0.0, 0.0
    while not statuses or (statuses[-1] and len(statuses) < STARTS):
        if statuses:
            run = start(*overrides)
            rows = _rows_of_earlier_starts(run)
        row_s = round(time.monotonic() - killed_at, 1) if not restart_s and _goes_on(run, rows) else 0.0
        statuses.append(run.wait(1800))
        end_s = end_s or round(time.monotonic() - killed_at, 1)
        # A run that ends by the kill may write a row before.
        if run is not first or not statuses[0]:
            restart_s = restart_s or row_s
    faults = _faults(first, statuses[0], KINDS[kind].signals[0]) if KINDS[kind].asks else []
    return Outcome(kind, number, moment, statuses, killed, restart_s, end_s, faults=faults)


def _faults(run: Recipe, status: int, number: signal.Signals) -> list[str]:
    """Return the status of a command that a signal must not cause, and the kinds of stacks that the command printed.

    Python ends itself by SIGINT if the signal interrupts code from a string.
    """
    said = run.tail(1_000_000)
    faults = [mark for mark in ("Traceback", "*** SIG", "Fatal Python error") if mark in said]
    return faults if status in (0, 75, 128 + number, -signal.SIGINT) else [*faults, f"status {status}"]


def _rows_of_earlier_starts(run: Recipe) -> int:
    """Wait until a new start continues the run, or has ended; return the number of rows of metrics until then.

    Workers of an earlier start may write rows after the end of their command.
    """
    folder = RunFolder(run.run)
    resumes, from_checkpoint = folder.times_resumed(), folder.latest_checkpoint() is not None

    def continues() -> bool:
        # Only a start from a checkpoint writes a line. Processes of earlier starts are no descendants.
        return folder.times_resumed() > resumes if from_checkpoint else bool(run.processes("ray::RayTrainWorker"))

    wait_until(lambda: continues() or run.process.poll() is not None, "the new start", 1800, run.tail)
    return len(run.metrics())


def _goes_on(run: Recipe, rows: int) -> bool:
    """Wait until a run has more rows of metrics or has ended; return False if the run must start again."""

    def has_more_rows() -> bool:
        return len(run.metrics()) > rows

    wait_until(lambda: has_more_rows() or run.process.poll() is not None, "metrics", 1800, run.tail)
    return not run.process.poll()


# Comparison ---------------------------------------------------------------------------------------------------------


def differences(run: Path, whole: Path) -> list[str]:
    """Return the metrics and files of a run that differ from those of a run left alone. Time and memory may differ."""
    found = []
    expected, seen = (read_metrics(folder / "metrics.jsonl") for folder in (whole, run))
    for name in sorted(expected):
        is_result = name.startswith(("train/", "val/")) and not {"time", "memory"} & set(name.split("/"))
        if is_result and seen.get(name) != expected[name]:
            found.append(name)
    for file in sorted(path.relative_to(whole) for path in (whole / "policy").rglob("*") if path.is_file()):
        if not (run / file).is_file() or (run / file).read_bytes() != (whole / file).read_bytes():
            found.append(str(file))
    return found


def _missing_on(server: Server, run: Path) -> list[str]:
    """Return the metrics that a tracking server lacks after `rl-plugins sync`."""
    run_command([sys.executable, "-m", "rl_plugins", "sync", str(run)], cwd=run.parent, check=True)
    _, metrics, points = server.metrics("kills")
    expected = read_metrics(run / "metrics.jsonl")
    found = [f"{name} in MLflow" for name in sorted(expected) if metrics.get(name) != expected[name]]
    return found + ([] if points == sum(map(len, metrics.values())) else ["points in MLflow came twice"])


def left_behind(name: str, temporary: Path, memory: set[str], patience_s: float = 30) -> list[str]:
    """Return processes, shared memory and temporary files of a run that has ended, and kill the processes.

    Args:
        name: value of `MARK` in the environment of the run.
        temporary: folder of the run's temporary files.
        memory: names in /dev/shm before the run.
        patience_s: seconds for processes to end.
    """

    def processes() -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == name:
                    found.append(process)
        return found

    with suppress(AssertionError):
        wait_until(lambda: not processes(), "the end of all processes", patience_s)
    left = []
    for process in processes():
        with suppress(psutil.Error):
            left.append(f"process {' '.join(process.cmdline())[:80]}")
            process.kill()
    left += [f"/dev/shm/{file}" for file in sorted(_without_owner(set(os.listdir("/dev/shm")) - memory))]
    # Ray keeps the logs of its sessions.
    sessions = temporary / f"ray-{os.geteuid()}" / "ray"
    for file in temporary.rglob("*"):
        if not sessions.is_relative_to(file) and not file.is_relative_to(sessions):
            left.append(str(file.relative_to(temporary)))
    return left


def _without_owner(files: set[str]) -> set[str]:
    """Return the files in /dev/shm that no process has mapped or opened. Other programs make such files, too."""
    for process in Path("/proc").glob("[0-9]*") if files else ():
        with suppress(OSError):
            held = (process / "maps").read_text() + "\n".join(map(os.readlink, (process / "fd").iterdir()))
            files = {file for file in files if f"/dev/shm/{file}" not in held}
    return {file for file in files if Path("/dev/shm", file).exists()}


# Results ------------------------------------------------------------------------------------------------------------


def read_results(folder: Path) -> list[Outcome]:
    """Return the results in a folder. A line that a stop has torn is left out."""
    outcomes = []
    file = folder / "results.jsonl"
    for line in file.read_text().splitlines() if file.is_file() else ():
        with suppress(json.JSONDecodeError):
            row = json.loads(line)
            outcomes.append(Outcome(**{**row, "moment": Moment(**row["moment"])}))
    return outcomes


def tables(outcomes: Sequence[Outcome]) -> str:
    """Return the results as two Markdown tables, of kills and of signals, with a line for each kind."""
    kills = [
        "| killed process | kills | same bits | nothing left | ended by itself | seconds to the next step |",
        "|---|---|---|---|---|---|",
    ]
    signals = [
        "| signal | times | same bits | nothing left | documented status, no stack | seconds to the end |",
        "|---|---|---|---|---|---|",
    ]
    for kind in KINDS:
        if found := [outcome for outcome in outcomes if outcome.kind == kind and outcome.killed]:
            same = sum(outcome.statuses[-1] == 0 and not outcome.differences for outcome in found)
            clean = sum(not outcome.left for outcome in found)
            asks = KINDS[kind].asks
            seconds = [outcome.end_s if asks else outcome.restart_s for outcome in found]
            third = sum(not outcome.faults if asks else len(outcome.statuses) == 1 for outcome in found)
            (signals if asks else kills).append(
                f"| {kind} | {len(found)} | {same} | {clean} | {third} | {median(seconds):.0f}, {max(seconds):.0f} |"
            )
    return "\n".join([*kills, "", *signals])


def write_page(outcomes: Sequence[Outcome], page: Path) -> None:
    """Write the tables between the two marks of the page."""
    marked = re.compile(r"(<!-- kills -->\n).*(<!-- end kills -->)", re.DOTALL)
    page.write_text(marked.sub(lambda match: f"{match[1]}{tables(outcomes)}\n{match[2]}", page.read_text()))


def main(arguments: list[str] | None = None) -> int:
    """Run the missing kills, and write the tables; return 1 if a run lost anything or left anything behind."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--times", type=int, default=20, help="kills of each kind (default: %(default)s)")
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS], default=[*KINDS], help="(default: all)")
    parser.add_argument("--folder", type=Path, default=Path("outputs/campaign"), help="(default: %(default)s)")
    parser.add_argument("--page", type=Path, help="page for the tables, such as docs/kills.md")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments (default: %(default)s)")
    options = parser.parse_args(arguments)
    forget_servers(os.environ)
    ask_no_proxy_for_this_machine(os.environ)
    campaign = Campaign(options.folder, options.seed)
    done = {(outcome.kind, outcome.number) for outcome in campaign.results() if outcome.killed}
    # All kinds in turn, so that a stopped campaign has results of each kind.
    for number in range(options.times):
        for kind in options.kinds:
            if (kind, number) not in done:
                print(json.dumps(asdict(campaign.run(kind, number))), flush=True)
    # A kill that found no process is repeated.
    last = {(outcome.kind, outcome.number): outcome for outcome in campaign.results()}
    outcomes = [outcome for outcome in last.values() if outcome.kind in options.kinds]
    print(tables(outcomes))
    if options.page is not None:
        write_page(campaign.results(), options.page)
    return 0 if all(outcome.good for outcome in outcomes) else 1


if __name__ == "__main__":
    raise SystemExit(main())
