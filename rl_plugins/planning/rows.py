"""How samples of average lengths fall into a worker's micro-batches, as `stages/micro_batches.py` cuts them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rl_plugins.planning.workload import COPY, Workload


@dataclass(frozen=True)
class Rows:
    """The rows that a worker runs in one pass over its samples.

    Attributes:
        tokens: of all rows: a prompt once for those of its samples that share a micro-batch.
        passes: micro-batches.
        largest: tokens of the largest one.
        copies: how often a token is in a sample, on average.
        context: tokens that each of them attends to on average.
    """

    tokens: float
    passes: int
    largest: float
    copies: float
    context: float


def rows_of(work: Workload, trainers: int) -> Rows:
    """Those of each of so many workers."""
    budget, prompts = max(work.micro_batch_tokens, work.max_tokens), work.prompts / trainers
    ways = []
    for most in (budget, budget / 2, budget / 4):
        copied = COPY * work.prompt_tokens
        room = (most - work.prompt_tokens + copied) / (work.response_tokens + copied)
        together = min(work.samples, max(1, int(room)))
        bundles = math.ceil(work.samples / together)
        each = work.samples / bundles
        size = work.prompt_tokens + each * work.response_tokens
        of_update = math.ceil(prompts / work.updates) * bundles
        passes = math.ceil(of_update / max(1, int(budget / (size + (each - 1) * copied))))
        ways.append((passes, prompts * bundles * size, math.ceil(of_update / passes) * size))
    passes, tokens, largest = min(ways)
    responses = prompts * work.samples * work.response_tokens
    attending = responses * (work.prompt_tokens + work.response_tokens / 2)
    attending += (tokens - responses) * work.prompt_tokens / 2
    return Rows(
        tokens=tokens,
        passes=passes * work.updates,
        # A sample that is longer than the others makes a micro-batch of its own.
        largest=max(largest, work.max_tokens),
        copies=prompts * work.samples * work.sample_tokens / tokens,
        context=attending / tokens,
    )
