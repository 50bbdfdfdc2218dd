"""`python -m rl_plugins.tests.fuzz --minutes 30` prints the share of each outcome by target, and the faults."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter

from rl_plugins.tests.fuzz.runs import faults_of, fuzz_in_processes
from rl_plugins.tests.fuzz.target import OUTCOMES, Report


def main() -> int:
    """Print the share of each outcome by target, and the faults; return 1 if there is a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2.0, help="duration (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="(default: one for each core)")
    options = parser.parse_args()
    reports = fuzz_in_processes(options.processes, seconds=60 * options.minutes)
    print(f"{'target':<22}{'inputs':>9}" + "".join(f"{outcome:>18}" for outcome in OUTCOMES))
    reports["all"] = Report(sum((report.counts for report in reports.values()), Counter()))
    for name, report in reports.items():
        total = report.counts.total()
        shares = "".join(f"{report.counts[outcome] / max(total, 1):>18.2%}" for outcome in OUTCOMES)
        print(f"{name:<22}{total:>9}{shares}")
    faults = faults_of(reports)
    print("\n".join(faults))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
