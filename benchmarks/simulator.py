"""Effect of schedules on a step: a discrete-event simulation of decoding engines and waiting trainers.

An engine decodes all its responses together. A decoding step takes `decode_step_s`, and `decode_sequence_s` for each
response. So a long response is sampled faster after shorter responses have ended, and delays the step that waits for
it. Events are the ends of responses; between two events the rate of an engine is constant.

A step trains on groups (the samples of a prompt) that were submitted at most `max_staleness` steps before. At its
start, groups are submitted until enough groups for the step and for `ahead` further steps are in flight.

- `ahead` >= `max_staleness`: steps take groups in the order of submission.
- `ahead` < `max_staleness`: a step waits for the groups whose training in the next step would be too late, and then
  takes the oldest finished groups.
- `max_staleness` = 0: a step takes the first finished groups, and drops the others.

New weights reach the engines between two decoding steps, and unfinished responses continue with the new weights.
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
"""Function that draws the number of tokens of a response."""


@dataclass(frozen=True)
class PhaseTimes:
    """Measured or planned seconds of phases.

    Attributes:
        decode_step_s: seconds of a decoding step without responses.
        decode_sequence_s: seconds of a decoding step for each response.
        prefill_token_s: seconds for each token of a prompt, for the whole group.
        train_token_s: seconds of training for each token of a trainer.
        train_fixed_s: seconds of training for each step, in addition to the tokens.
        update_weights_s: seconds of a weight transfer from the trainers to the engines.
        move_s: seconds in which colocated trainers and engines make room for each other.
    """

    decode_step_s: float
    decode_sequence_s: float
    prefill_token_s: float
    train_token_s: float
    train_fixed_s: float = 0.0
    update_weights_s: float = 0.0
    move_s: float = 0.0


@dataclass(frozen=True)
class Workers:
    """Workers and engines.

    Attributes:
        trainers: number of training workers.
        engines: number of rollout engines.
        colocated: engines and trainers use the same devices in turn.
        slots: responses that an engine decodes at the same time.
    """

    trainers: int
    engines: int
    colocated: bool = True
    slots: int = 256


@dataclass(frozen=True)
class SamplingSchedule:
    """Limits for sampling ahead of training.

    Attributes:
        max_staleness: largest number of policy updates between the submission of a group and its training; 0 is
            synchronous.
        ahead: steps whose groups are in flight in addition to the current step; None stands for `max_staleness`.
    """

    max_staleness: int = 0
    ahead: float | None = None

    @property
    def steps_ahead(self) -> float:
        """`ahead`, or its default."""
        return self.max_staleness if self.ahead is None else self.ahead


@dataclass(frozen=True)
class StepSamples:
    """Samples of a step.

    Attributes:
        prompts: prompts of a step.
        samples: samples of each prompt.
        prompt_tokens: tokens of a prompt.
        lengths: function that draws the length of a response.
    """

    prompts: int
    samples: int
    prompt_tokens: float
    lengths: Lengths


@dataclass(frozen=True)
class SimulatedStep:
    """Averages over the steps after the first steps.

    Attributes:
        step_s: seconds of a step.
        trainer_idle: share of the time in which trainers wait for samples.
        engine_idle: share of the time in which an engine has no response to decode.
        staleness: mean number of policy updates between the sampling of a token and its training.
        staleness_max: largest number of policy updates between the submission of a group and its training.
        dropped: share of the submitted groups without training.
        samples_per_s: trained samples per second.
    """

    step_s: float
    trainer_idle: float
    engine_idle: float
    staleness: float
    staleness_max: int
    dropped: float
    samples_per_s: float


def log_normal(mean: float, sigma: float, most: int) -> Lengths:
    """Return log-normal lengths, cut at the largest length.

    Args:
        mean: mean tokens before the cut.
        sigma: standard deviation of the logarithm. With 0 all responses have the same length; 1 is a tail like the tail
            of reasoning traces.
        most: largest number of tokens.
    """
    middle = math.log(mean) - sigma**2 / 2
    return lambda rng: max(1, min(most, round(rng.lognormvariate(middle, sigma))))


def measured(lengths: Sequence[int]) -> Lengths:
    """Return lengths that are drawn from measured lengths."""
    return lambda rng: rng.choice(lengths)


@dataclass
class _SampleGroup:
    """Samples of one prompt.

    Attributes:
        submitted: step at whose start the group was submitted.
        unfinished: number of unfinished responses.
        tokens: tokens of the responses by the version of the policy that sampled the tokens.
    """

    submitted: int
    unfinished: int
    tokens: dict[int, float] = field(default_factory=dict)


class _SimulatedEngine:
    """An engine whose rate depends on the number of its responses.

    All running responses advance together. `_progress` is the number of tokens decoded for a response that has run from
    the start.
    """

    def __init__(self, times: PhaseTimes, slots: int) -> None:
        self._times, self._slots = times, slots
        self.now = self.busy = 0.0
        self._progress = self._prefill_s = 0.0
        self._running: list[tuple[float, int, float, _SampleGroup]] = []
        self._waiting: deque[tuple[int, _SampleGroup]] = deque()
        # Progress at the first token of each version, and the version.
        self._versions: list[tuple[float, int]] = [(0.0, 0)]
        self._count = 0

    def submit(self, group: _SampleGroup, lengths: Sequence[int], prompt_tokens: float) -> None:
        """Add the responses of a group."""
        self._prefill_s += prompt_tokens * self._times.prefill_token_s
        self._waiting.extend((length, group) for length in lengths)
        self._fill()

    def next_end(self) -> float | None:
        """Return the time of the next end of a response; None without running responses."""
        return (
            self.now + self._prefill_s + (self._running[0][0] - self._progress) * self._rate if self._running else None
        )

    def run(self, until: float) -> list[_SampleGroup]:
        """Decode until a time, and return the groups that have finished."""
        finished = []
        while (end := self.next_end()) is not None and end <= until:
            self._advance(end)
            self._progress = self._running[0][0]
            _, _, start, group = heapq.heappop(self._running)
            self._end(start, group)
            if not group.unfinished:
                finished.append(group)
            self._fill()
        self._advance(until)
        return finished

    def pause(self, seconds: float) -> None:
        """Let time pass without decoding."""
        self.now += seconds

    def new_version(self, version: int) -> None:
        """Continue with the weights of a new version."""
        self._versions.append((self._progress, version))
        oldest = min((start for _, _, start, _ in self._running), default=self._progress)
        while len(self._versions) > 1 and self._versions[1][0] <= oldest:
            self._versions.pop(0)

    def abort(self) -> None:
        """Drop all unfinished responses."""
        self._running.clear()
        self._waiting.clear()
        self._prefill_s = 0.0

    @property
    def _rate(self) -> float:
        return self._times.decode_step_s + self._times.decode_sequence_s * len(self._running)

    def _advance(self, until: float) -> None:
        """Prefill and decode until a time before which no response ends."""
        seconds, self.now = until - self.now, until
        if not self._running:
            return
        self.busy += seconds
        prefilled = min(self._prefill_s, seconds)
        self._prefill_s -= prefilled
        self._progress += (seconds - prefilled) / self._rate

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._slots:
            length, group = self._waiting.popleft()
            self._count += 1
            heapq.heappush(self._running, (self._progress + length, self._count, self._progress, group))

    def _end(self, start: float, group: _SampleGroup) -> None:
        end = self._progress
        for version_start, version in reversed(self._versions):
            group.tokens[version] = group.tokens.get(version, 0.0) + max(0.0, end - max(version_start, start))
            end = min(end, version_start)
            if version_start <= start:
                break
        group.unfinished -= 1


def simulate(
    times: PhaseTimes,
    workers: Workers,
    schedule: SamplingSchedule,
    batch: StepSamples,
    *,
    steps: int = 12,
    seed: int = 0,
) -> SimulatedStep:
    """Simulate steps, and return averages over the steps after the first `max_staleness + 2` steps.

    Args:
        times: seconds of phases.
        workers: workers and engines.
        schedule: limits for sampling ahead of training.
        batch: samples of a step.
        steps: number of steps in the averages.
        seed: seed of the lengths.
    """
    rng = random.Random(seed)
    engines = [_SimulatedEngine(times, workers.slots) for _ in range(workers.engines)]
    groups: list[_SampleGroup] = []
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
            group = _SampleGroup(step, batch.samples)
            lengths = [batch.lengths(rng) for _ in range(batch.samples)]
            # Engines receive prompts in turn, as ranks do.
            engines[number % workers.engines].submit(group, lengths, batch.prompt_tokens)
            groups.append(group)
            number, submitted = number + 1, submitted + 1
        due = _due(groups, step, schedule, batch.prompts)
        arrived = _wait(engines, due, groups, step, schedule, batch.prompts, now)
        waited, now = waited + arrived - now, arrived
        chosen_ids = {id(group) for group in due}
        finished = (group for group in groups if not group.unfinished and id(group) not in chosen_ids)
        chosen = due + list(islice(finished, batch.prompts - len(due)))
        chosen_ids |= {id(group) for group in chosen}
        groups = [group for group in groups if id(group) not in chosen_ids]
        if not schedule.max_staleness:
            groups = []
            for engine in engines:
                engine.abort()
        tokens = sum(sum(group.tokens.values()) for group in chosen)
        all_tokens = tokens + len(chosen) * batch.samples * batch.prompt_tokens
        training = times.train_fixed_s + all_tokens / workers.trainers * times.train_token_s
        for engine in engines:
            if workers.colocated:
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
    return SimulatedStep(
        step_s=seconds / steps,
        trainer_idle=waited / seconds,
        engine_idle=1 - busy / (seconds * workers.engines),
        staleness=fmean(staleness),
        staleness_max=oldest,
        dropped=0.0 if schedule.max_staleness else 1 - trained / submitted,
        samples_per_s=trained * batch.samples / seconds,
    )


def _wait(
    engines: Sequence[_SimulatedEngine],
    must: Sequence[_SampleGroup],
    groups: Sequence[_SampleGroup],
    step: int,
    schedule: SamplingSchedule,
    needed: int,
    now: float,
) -> float:
    """Let the engines run until enough groups are finished, and return the time.

    Args:
        engines: all engines.
        must: groups that must be finished.
        groups: all groups in flight.
        step: number of the step.
        schedule: limits for sampling ahead of training.
        needed: smallest number of finished groups.
        now: time at the start.
    """
    pending = {id(group) for group in must if group.unfinished}
    missing = needed - sum(not group.unfinished for group in groups)
    ends = [(end, place) for place, engine in enumerate(engines) if (end := engine.next_end()) is not None]
    heapq.heapify(ends)
    while pending or missing > 0 or not _leaves_time(groups, step, schedule, needed):
        now, place = heapq.heappop(ends)
        for group in engines[place].run(now):
            missing -= 1
            pending.discard(id(group))
        if (end := engines[place].next_end()) is not None:
            heapq.heappush(ends, (end, place))
    for engine in engines:
        engine.run(now)
    return now


def _due(groups: Sequence[_SampleGroup], step: int, schedule: SamplingSchedule, needed: int) -> list[_SampleGroup]:
    """Return the groups that a step must take.

    If steps take groups in the order of submission, the groups are the first of all groups in flight. Otherwise the
    groups are at the limit of staleness.
    """
    if schedule.max_staleness and schedule.steps_ahead >= schedule.max_staleness:
        return list(groups[:needed])
    if not schedule.max_staleness:
        return []
    return [group for group in groups if group.submitted <= step - schedule.max_staleness]


def _leaves_time(groups: Sequence[_SampleGroup], step: int, schedule: SamplingSchedule, needed: int) -> bool:
    """Return True if the step leaves no group too old for later steps. See `GroupQueue.leaves_time`."""
    if schedule.steps_ahead >= schedule.max_staleness:
        return True
    for later in range(schedule.max_staleness + 1):
        old = [group for group in groups if group.submitted <= step + later - schedule.max_staleness]
        finished = sum(not group.unfinished for group in old)
        if finished < min(len(old) - later * needed, needed):
            return False
    return True
