"""How schedules change a step: a discrete-event simulation of engines that decode and trainers that wait for them.

An engine decodes all responses that it has at once; a step of decoding takes `decode_step_s`, and `decode_sequence_s`
for each of them. So a response that is longer than the others is sampled faster when they are through, and holds up
whoever waits for it. Events are the ends of responses; between two of them an engine's rate does not change.

A step trains on groups (the samples of a prompt) that were submitted at most `max_staleness` steps before. When it
begins, groups are submitted until as many are under way as it and `ahead` further steps train on. With `ahead` as large
as `max_staleness`, steps take groups in the order in which they were submitted. With a smaller one a step waits for
those that would be too stale in the next, and takes the oldest of those that are finished. With `max_staleness=0` it
takes what is finished first, and what is left over is dropped. New weights reach the engines between two steps of
decoding, and what is unfinished goes on with them.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from statistics import fmean

Lengths = Callable[[random.Random], int]
"""Draws the number of tokens of a response."""


@dataclass(frozen=True)
class PhaseTimes:
    """What phases take, measured or planned.

    Attributes:
        decode_step_s: seconds of a step of decoding without responses.
        decode_sequence_s: the same, of each response in it.
        prefill_token_s: of each token of a prompt, for its whole group.
        train_token_s: of each token that a trainer trains on.
        train_fixed_s: of a step's training besides.
        update_weights_s: from the trainers to the engines.
        move_s: of trainers and engines that make room for each other.
    """

    decode_step_s: float
    decode_sequence_s: float
    prefill_token_s: float
    train_token_s: float
    train_fixed_s: float = 0.0
    update_weights_s: float = 0.0
    move_s: float = 0.0


@dataclass(frozen=True)
class Layout:
    """Who there is.

    Attributes:
        trainers: training workers.
        engines: rollout engines.
        colocated: engines and trainers take turns on the same devices.
        slots: responses that an engine decodes at once.
    """

    trainers: int
    engines: int
    colocated: bool = True
    slots: int = 256


@dataclass(frozen=True)
class Schedule:
    """When samples are drawn and trained on.

    Attributes:
        max_staleness: by how many versions of the policy a group may be older than the one that it trains; 0 is
            synchronous.
        ahead: how many steps' worth of groups are under way beyond those of the step; None is `max_staleness`.
    """

    max_staleness: int = 0
    ahead: float | None = None

    @property
    def steps_ahead(self) -> float:
        """`ahead`, or what it is by default."""
        return self.max_staleness if self.ahead is None else self.ahead


@dataclass(frozen=True)
class Batch:
    """The samples of a step.

    Attributes:
        prompts: of a step.
        samples: to each prompt.
        prompt_tokens: of a prompt.
        lengths: of the responses.
    """

    prompts: int
    samples: int
    prompt_tokens: float
    lengths: Lengths


@dataclass(frozen=True)
class Outcome:
    """Averages over the steps after the first ones.

    Attributes:
        step_s: seconds of a step.
        trainer_idle: share of the time in which trainers wait for samples.
        engine_idle: share of the time in which an engine has nothing to sample.
        staleness: by how many versions the tokens that are trained on are older than the policy.
        staleness_max: the same, of the oldest group's first tokens.
        dropped: share of the groups that were submitted and never trained on.
        samples_per_s: that are trained on.
    """

    step_s: float
    trainer_idle: float
    engine_idle: float
    staleness: float
    staleness_max: int
    dropped: float
    samples_per_s: float


def log_normal(mean: float, sigma: float, most: int) -> Lengths:
    """Lengths with a long tail, cut at the longest that is sampled; `mean` is that before the cut.

    Args:
        mean: tokens.
        sigma: of the logarithm; 0 makes all equally long, 1 is a tail such as that of reasoning.
        most: tokens.
    """
    middle = math.log(mean) - sigma**2 / 2
    return lambda rng: max(1, min(most, round(rng.lognormvariate(middle, sigma))))


def measured(lengths: Sequence[int]) -> Lengths:
    """Lengths as they were seen."""
    return lambda rng: rng.choice(lengths)


@dataclass
class _Group:
    """The samples of a prompt.

    Attributes:
        submitted: the step at whose beginning that was.
        left: responses that are unfinished.
        tokens: of its responses, by the version that sampled them.
    """

    submitted: int
    left: int
    tokens: dict[int, float] = field(default_factory=dict)


class _Engine:
    """Decodes at a rate that depends on how many responses it has. `progress` counts the tokens of one of them."""

    def __init__(self, times: PhaseTimes, slots: int) -> None:
        self._times, self._slots = times, slots
        self.now = self.busy = 0.0
        self._progress = self._debt = 0.0
        self._running: list[tuple[float, int, float, _Group]] = []
        self._waiting: deque[tuple[int, _Group]] = deque()
        # The progress at which a version began.
        self._versions: list[tuple[float, int]] = [(0.0, 0)]
        self._count = 0

    def submit(self, group: _Group, lengths: Sequence[int], prompt_tokens: float) -> None:
        """Take on the responses of a group."""
        self._debt += prompt_tokens * self._times.prefill_token_s
        self._waiting.extend((length, group) for length in lengths)
        self._fill()

    def next_end(self) -> float | None:
        """When the next response ends; None without any."""
        return self.now + self._debt + (self._running[0][0] - self._progress) * self._rate if self._running else None

    def run(self, until: float) -> list[_Group]:
        """Decode, and end what ends on the way; returns the groups that are finished by it."""
        finished = []
        while (end := self.next_end()) is not None and end <= until:
            self._pass(end)
            self._progress = self._running[0][0]
            _, _, start, group = heapq.heappop(self._running)
            self._end(start, group)
            if not group.left:
                finished.append(group)
            self._fill()
        self._pass(until)
        return finished

    def pause(self, seconds: float) -> None:
        """Stand still."""
        self.now += seconds

    def new_version(self, version: int) -> None:
        """Go on with other weights."""
        self._versions.append((self._progress, version))
        oldest = min((start for _, _, start, _ in self._running), default=self._progress)
        while len(self._versions) > 1 and self._versions[1][0] <= oldest:
            self._versions.pop(0)

    def abort(self) -> None:
        """Drop what is unfinished."""
        self._running.clear()
        self._waiting.clear()
        self._debt = 0.0

    @property
    def _rate(self) -> float:
        return self._times.decode_step_s + self._times.decode_sequence_s * len(self._running)

    def _pass(self, until: float) -> None:
        """Let time go by in which nothing ends."""
        seconds, self.now = until - self.now, until
        if not self._running:
            return
        self.busy += seconds
        paid = min(self._debt, seconds)
        self._debt -= paid
        self._progress += (seconds - paid) / self._rate

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._slots:
            length, group = self._waiting.popleft()
            self._count += 1
            heapq.heappush(self._running, (self._progress + length, self._count, self._progress, group))

    def _end(self, start: float, group: _Group) -> None:
        end = self._progress
        for begun, version in reversed(self._versions):
            group.tokens[version] = group.tokens.get(version, 0.0) + max(0.0, end - max(begun, start))
            end = min(end, begun)
            if begun <= start:
                break
        group.left -= 1


def simulate(
    times: PhaseTimes, layout: Layout, schedule: Schedule, batch: Batch, *, steps: int = 12, seed: int = 0
) -> Outcome:
    """Run steps, and average over those after the first `max_staleness + 2`."""
    rng = random.Random(seed)
    engines = [_Engine(times, layout.slots) for _ in range(layout.engines)]
    groups: list[_Group] = []
    skipped = schedule.max_staleness + 2
    target = round(batch.prompts * (1 + schedule.steps_ahead))
    now = waited = began = busy_before = 0.0
    staleness: list[float] = []
    submitted = trained = oldest = number = 0
    for step in range(steps + skipped):
        if step == skipped:
            began, waited, submitted, trained = now, 0.0, 0, 0
            staleness, oldest = [], 0
            busy_before = sum(engine.busy for engine in engines)
        for _ in range(target - len(groups)):
            group = _Group(step, batch.samples)
            lengths = [batch.lengths(rng) for _ in range(batch.samples)]
            # Engines take prompts in turn, as ranks do.
            engines[number % layout.engines].submit(group, lengths, batch.prompt_tokens)
            groups.append(group)
            number, submitted = number + 1, submitted + 1
        due = _due(groups, step, schedule, batch.prompts)
        arrived = _wait(engines, due, groups, batch.prompts, now)
        waited, now = waited + arrived - now, arrived
        taken = {id(group) for group in due}
        finished = (group for group in groups if not group.left and id(group) not in taken)
        chosen = due + list(islice(finished, batch.prompts - len(due)))
        taken |= {id(group) for group in chosen}
        groups = [group for group in groups if id(group) not in taken]
        if not schedule.max_staleness:
            groups = []
            for engine in engines:
                engine.abort()
        tokens = sum(sum(group.tokens.values()) for group in chosen)
        every = tokens + len(chosen) * batch.samples * batch.prompt_tokens
        training = times.train_fixed_s + every / layout.trainers * times.train_token_s
        for engine in engines:
            if layout.colocated:
                engine.pause(training)
            else:
                engine.run(now + training)
            engine.pause(times.update_weights_s + times.move_s)
            engine.new_version(step + 1)
        now += training + times.update_weights_s + times.move_s
        staleness.append(sum(n * (step - v) for group in chosen for v, n in group.tokens.items()) / max(tokens, 1.0))
        oldest = max(oldest, *(step - group.submitted for group in chosen))
        trained += len(chosen)
    seconds = now - began
    busy = sum(engine.busy for engine in engines) - busy_before
    return Outcome(
        step_s=seconds / steps,
        trainer_idle=waited / seconds,
        engine_idle=1 - busy / (seconds * layout.engines),
        staleness=fmean(staleness),
        staleness_max=oldest,
        dropped=0.0 if schedule.max_staleness else 1 - trained / submitted,
        samples_per_s=trained * batch.samples / seconds,
    )


def _wait(
    engines: Sequence[_Engine], must: Sequence[_Group], groups: Sequence[_Group], needed: int, now: float
) -> float:
    """Let the engines run until `must` and as many groups as are needed are finished; returns when that is."""
    musts = {id(group) for group in must if group.left}
    missing = needed - sum(not group.left for group in groups)
    ends = [(end, place) for place, engine in enumerate(engines) if (end := engine.next_end()) is not None]
    heapq.heapify(ends)
    while musts or missing > 0:
        now, place = heapq.heappop(ends)
        for group in engines[place].run(now):
            missing -= 1
            musts.discard(id(group))
        if (end := engines[place].next_end()) is not None:
            heapq.heappush(ends, (end, place))
    for engine in engines:
        engine.run(now)
    return now


def _due(groups: Sequence[_Group], step: int, schedule: Schedule, needed: int) -> list[_Group]:
    """Groups that a step must take: with as many under way as staleness allows, the first; else those of its limit."""
    if schedule.max_staleness and schedule.steps_ahead >= schedule.max_staleness:
        return list(groups[:needed])
    if not schedule.max_staleness:
        return []
    return [group for group in groups if group.submitted <= step - schedule.max_staleness]
