"""Compare the functions that verl and rl_plugins both have, on random inputs, with values and gradients.

`python -m benchmarks.against_verl CHECKOUT [--output TABLE.md]` reads files of a checkout of https://github.com/volcengine/verl,
or of its unpacked wheel, without installing verl. A case runs on three kinds of inputs: `plain` (responses of several
lengths, groups of four), `observations` (also masked positions between tokens) and `edges` (groups of one sample,
responses without a token, equal rewards, log-ratios beyond 20). A case differs as documented if the docstring of our
function, or verl's own, gives the reason. The exit status is 1 if a case differs without such a reason.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.verl.advantages import advantages
from benchmarks.verl.case import EDGES, OBSERVATIONS, PLAIN, Case, Inputs
from benchmarks.verl.corrections import corrections
from benchmarks.verl.functions import Verl
from benchmarks.verl.other_functions import other_functions
from benchmarks.verl.policy_losses import bypass_losses, policy_losses
from rl_plugins.tests.algorithms.reference.inputs import make_inputs

EQUAL, DOCUMENTED, DIFFERS = "equal", "differs as documented", "DIFFERS"
KINDS = (PLAIN, OBSERVATIONS, EDGES)
SEEDS = range(4)
# verl computes some statistics in float32.
_RTOL, _ATOL = 1e-5, 1e-6


@dataclass(frozen=True)
class Outcome:
    """Result of a case.

    Attributes:
        case: the case.
        differences: description of the difference, by the kind of the inputs; empty for equal numbers.
    """

    case: Case
    differences: Mapping[str, str]

    @property
    def status(self) -> str:
        """Return `EQUAL`, `DOCUMENTED` or `DIFFERS`."""
        different = [kind for kind, difference in self.differences.items() if difference]
        if any(kind not in self.case.documented for kind in different):
            return DIFFERS
        return DOCUMENTED if different else EQUAL

    def row(self) -> str:
        """Return the row of the table."""
        marks = [self.differences[kind] or "equal" for kind in KINDS]
        reasons = dict.fromkeys(self.case.documented[kind] for kind in KINDS
                                if self.differences[kind] and kind in self.case.documented)  # fmt: skip
        cells = [self.case.kind, f"`{self.case.name}`", self.case.options, *marks, self.status, "; ".join(reasons)]
        return f"| {' | '.join(cells)} |"


def cases(verl: Verl) -> Iterator[Case]:
    """Yield all cases."""
    for group in (advantages, policy_losses, bypass_losses, corrections, other_functions):
        yield from group(verl)


def run_case(case: Case) -> Outcome:
    """Compare the numbers of a case on all inputs."""
    return Outcome(case, {kind: _difference(case, kind) for kind in KINDS})


def _difference(case: Case, kind: str) -> str:
    """Return the largest difference over all seeds in words, or an empty text."""
    largest = 0.0
    for seed in SEEDS:
        inputs = inputs_of(kind, seed)
        ours = case.ours(inputs)
        try:
            theirs = case.theirs(inputs)
        # Each function of verl has errors of its own.
        except Exception as error:
            return f"verl: {type(error).__name__}"
        assert len(ours) == len(theirs)
        for own, other in zip(ours, theirs, strict=True):
            largest = max(largest, _relative(own.double(), other.double()))
    return f"{largest:.2g}" if largest else ""


def _relative(own: Tensor, other: Tensor) -> float:
    """Return the largest difference as a part of the number of verl, or 0 for equal numbers."""
    assert own.shape == other.shape
    if torch.allclose(own, other, rtol=_RTOL, atol=_ATOL):
        return 0.0
    difference = (own - other).abs() / other.abs().clamp(min=_ATOL)
    return float(difference.nan_to_num(torch.inf).max())


def inputs_of(kind: str, seed: int) -> Inputs:
    """Return random inputs by name, in float64.

    Args:
        kind: one of `KINDS`.
        seed: the same seed gives the same inputs.
    """
    arrays = make_inputs(seed, extremes=kind == EDGES)
    inputs = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
    samples, width = inputs["response_mask_BT"].shape
    inputs["valid_B"] = torch.ones(samples, dtype=torch.bool)
    if kind == EDGES:
        return inputs
    generator = torch.Generator().manual_seed(seed)
    lengths_B = torch.randint(2, width + 1, (samples,), generator=generator)
    positions_T = torch.arange(width)
    mask_BT = positions_T < lengths_B[:, None]
    last_BT = positions_T == lengths_B[:, None] - 1
    if kind == OBSERVATIONS:
        mask_BT &= last_BT | (torch.rand(samples, width, generator=generator) < 0.7)
    rewards_BT = 0.05 * torch.randn(samples, width, dtype=torch.float64, generator=generator) * mask_BT
    rewards_BT += last_BT * torch.randn(samples, 1, dtype=torch.float64, generator=generator)
    return {
        **inputs,
        "response_mask_BT": mask_BT.double(),
        "response_lengths_B": lengths_B,
        "groups_B": torch.arange(samples) // 4,
        "token_level_rewards_BT": rewards_BT,
    }


def table(outcomes: Iterable[Outcome]) -> str:
    """Return the table of all cases, and the numbers of cases by status."""
    outcomes = list(outcomes)
    counts = Counter(outcome.status for outcome in outcomes)
    summary = ", ".join(f"{counts[status]} {status}" for status in (EQUAL, DOCUMENTED, DIFFERS))
    head = f"| kind | verl | options | {' | '.join(KINDS)} | status | reason |\n|{'---|' * 8}"
    return "\n".join([f"{len(outcomes)} cases: {summary}.", "", head, *(outcome.row() for outcome in outcomes)]) + "\n"


def main() -> int:
    """Compare, print the table, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.against_verl", description=__doc__)
    parser.add_argument("checkout", type=Path, help="folder of a checkout of verl")
    parser.add_argument("--output", type=Path, help="file for the table; default: print")
    arguments = parser.parse_args()
    verl = Verl(arguments.checkout)
    outcomes = [run_case(case) for case in cases(verl)]
    text = f"verl {verl.version}, torch {torch.__version__}.\n\n{table(outcomes)}"
    if arguments.output:
        arguments.output.write_text(text, encoding="utf-8")
        print(text.splitlines()[2])
    else:
        print(text)
    return 1 if any(outcome.status == DIFFERS for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
