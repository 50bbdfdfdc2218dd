"""Programs per second in a sandbox, against a new interpreter for each program.

`python -m benchmarks.sandbox [--programs 200] [--threads 2] [--sandbox namespaces]` runs a program that reads a number
and prints its double. The sandbox and the plain subprocess run in turns. CPU time is the time of all processes.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median

from rl_plugins.sandbox.sandbox import CodeSandbox

REPEATS = 5
PROGRAM = "print(int(input()) * 2)"


def plain(stdin: str) -> str:
    """Return the output of the program in a new interpreter without protection."""
    command = [sys.executable, "-c", PROGRAM]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, check=True).stdout


def cpu_s() -> float:
    """Return the CPU time of this process and of its ended children."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def measured(run: Callable[[str], str], programs: int, threads: int) -> float:
    """Return the seconds of a number of programs."""
    start = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        outputs = list(pool.map(run, map(str, range(programs))))
    assert outputs == [f"{2 * number}\n" for number in range(programs)]
    return time.perf_counter() - start


def main() -> None:
    """Print programs per second, and CPU time of a program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sandbox", default="namespaces")
    arguments = parser.parse_args()
    share = max(1, arguments.programs // REPEATS)
    seconds: dict[str, list[float]] = {"sandbox": [], "plain": []}
    cpu = {"sandbox": 0.0, "plain": 0.0}
    for _ in range(REPEATS):
        # The CPU time of a sandbox is known after its end.
        start = cpu_s()
        with CodeSandbox(arguments.sandbox, limits={"wall_s": 600}, parallel=arguments.threads) as sandbox:
            seconds["sandbox"].append(
                measured(lambda text: sandbox.run(PROGRAM, text).stdout, share, arguments.threads)
            )
        cpu["sandbox"] += cpu_s() - start
        start = cpu_s()
        seconds["plain"].append(measured(plain, share, arguments.threads))
        cpu["plain"] += cpu_s() - start
    for name, label in (("sandbox", f"sandbox={arguments.sandbox}"), ("plain", "plain subprocess")):
        rate, of_program = share / median(seconds[name]), 1000 * cpu[name] / (share * REPEATS)
        print(f"{label:<24}{rate:8.1f} programs/s{of_program:10.1f} ms of CPU time each")


if __name__ == "__main__":
    main()
