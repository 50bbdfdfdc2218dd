"""Effect of schedules on a step: a discrete-event simulation of decoding engines and waiting trainers.

An engine decodes all its responses together. A decoding step takes `decode_step_s`, and `decode_sequence_s` for each
response. So a long response is sampled faster after shorter responses have ended, and delays the step that waits for
it. Events are the ends of responses; between two events the rate of an engine is constant.

Each trainer has a queue of groups (the samples of a prompt): the queue of a run, `GroupQueue`. A step waits for the
trainer whose groups come last. Groups change trainers only after all trainers have theirs.

New weights reach the engines between two decoding steps, and unfinished responses continue with the new weights.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np

from rl_plugins.config.sampling import Schedule
from rl_plugins.data.prompts import PromptBatch
from rl_plugins.rollout.engine import RemoteSamples
from rl_plugins.rollout.vllm.fleet import assigned_range, split_prompts
from rl_plugins.stages.scheduled_sampler import Group, GroupQueue

Lengths = Callable[[random.Random], int]
"""Function that draws the number of tokens of a response."""

# A queue reads neither the tokens of a prompt nor those of a response.
_PROMPT, _RESPONSES = PromptBatch([[]], [0], {}, 0), RemoteSamples(0, 0, 0, np.zeros(0, dtype=np.int64))


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
        trainer: number of the trainer that asked for the group.
        ticket: ticket of the group in the trainer's queue.
        submitted: step at whose start the group was submitted.
        unfinished: number of unfinished responses.
        tokens: tokens of the responses by the version of the policy that sampled the tokens.
    """

    trainer: int
    ticket: int
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

    def abort(self, trainer: int) -> None:
        """Drop all unfinished responses of a trainer."""
        self._running = [running for running in self._running if running[-1].trainer != trainer]
        heapq.heapify(self._running)
        self._waiting = deque(waiting for waiting in self._waiting if waiting[-1].trainer != trainer)
        self._fill()
        if not self._running:
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


class _SimulatedTrainer:
    """A trainer with the queue of a rank.

    Args:
        number: number of the trainer.
        schedule: bounds on staleness and on groups in flight.
        per_step: groups of a step on this trainer.
    """

    def __init__(self, number: int, schedule: Schedule, per_step: int) -> None:
        self.number, self._schedule, self._per_step = number, schedule, per_step
        self._queue = GroupQueue(schedule)
        self._groups: dict[int, _SampleGroup] = {}
        self._submitted, self._due = 0, list[int]()

    def submit(self, step: int, samples: int) -> list[_SampleGroup]:
        """Return new groups, so that enough groups are in flight."""
        in_flight, new = self._schedule.in_flight(self._per_step), []
        while len(self._queue) < in_flight:
            # Tickets rise by one, so the position of a group is its ticket.
            self._queue.add(Group(_PROMPT, step, self._submitted))
            new.append(_SampleGroup(self.number, self._submitted, step, samples))
            self._submitted += 1
        self._groups |= {group.ticket: group for group in new}
        self._queue.start(in_flight, step)
        self._due = self._queue.due(step, self._per_step)
        return new

    def finish(self, group: _SampleGroup) -> None:
        """Note a finished group."""
        self._queue.finish({group.ticket: _RESPONSES})

    def may_train(self, step: int) -> bool:
        """Return True if the trainer waits for no further group. See `ScheduledSampler`."""
        queue, count = self._queue, self._per_step
        ready = not queue.unfinished(self._due) and queue.num_finished >= count
        return ready and queue.leaves_time(step, count, count)

    def take(self, step: int) -> list[_SampleGroup]:
        """Remove and return the groups of the step."""
        if self._schedule.drops:
            for ticket in self._queue.drop_started(keep=self._per_step):
                del self._groups[ticket]
        return [self._groups.pop(group.position) for group in self._queue.take(self._per_step, step)]


def simulate(
    times: PhaseTimes,
    workers: Workers,
    schedule: Schedule,
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
    trainers = [
        _SimulatedTrainer(number, schedule, len(range(number, batch.prompts, workers.trainers)))
        for number in range(workers.trainers)
    ]
    skipped = schedule.max_staleness + 2
    now = waited = began = busy_before = 0.0
    staleness: list[float] = []
    submitted = trained = oldest = 0
    for step in range(steps + skipped):
        if step == skipped:
            began, waited, submitted, trained = now, 0.0, 0, 0
            staleness, oldest = [], 0
            busy_before = sum(engine.busy for engine in engines)
        for trainer in trainers:
            new = trainer.submit(step, batch.samples)
            for place, share in split_prompts(trainer.number, len(trainers), len(engines), len(new)).items():
                for group in new[share.start : share.stop]:
                    lengths = [batch.lengths(rng) for _ in range(batch.samples)]
                    engines[place].submit(group, lengths, batch.prompt_tokens)
            submitted += len(new)
        arrived, chosen = _wait(engines, trainers, schedule, step, now)
        waited, now = waited + arrived - now, arrived
        tokens = sum(sum(group.tokens.values()) for group in chosen)
        all_tokens = tokens + len(chosen) * batch.samples * batch.prompt_tokens
        training = times.train_fixed_s + all_tokens / workers.trainers * times.train_token_s
        for engine in engines:
            if workers.colocated:
                engine.pause(training)
            else:
                _run(engine, now + training, trainers)
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
    trainers: Sequence[_SimulatedTrainer],
    schedule: Schedule,
    step: int,
    now: float,
) -> tuple[float, list[_SampleGroup]]:
    """Let the engines run until all trainers have their groups, and return the time and the groups.

    Args:
        engines: all engines.
        trainers: all trainers.
        schedule: limits for sampling ahead of training.
        step: number of the step.
        now: time at the start.
    """
    chosen: list[_SampleGroup] = []
    waiting = {trainer.number for trainer in trainers}
    changed, ends = set(waiting), list[tuple[float, int]]()

    def expect(place: int) -> None:
        if (end := engines[place].next_end()) is not None:
            heapq.heappush(ends, (end, place))

    for place in range(len(engines)):
        expect(place)
    while True:
        while changed:
            number = changed.pop()
            if number not in waiting or not trainers[number].may_train(step):
                continue
            waiting.remove(number)
            chosen += trainers[number].take(step)
            for place in assigned_range(number, len(trainers), len(engines)) if schedule.drops else ():
                # Groups of others may end at the same time.
                changed |= _run(engines[place], now, trainers)
                engines[place].abort(number)
                expect(place)
        if not waiting:
            break
        end, place = heapq.heappop(ends)
        # An engine is faster without dropped responses, and has a second entry.
        if end == engines[place].next_end():
            now = end
            changed |= _run(engines[place], now, trainers)
            expect(place)
    for engine in engines:
        _run(engine, now, trainers)
    return now, chosen


def _run(engine: _SimulatedEngine, until: float, trainers: Sequence[_SimulatedTrainer]) -> set[int]:
    """Let an engine decode until a time; return the numbers of the trainers with a finished group."""
    finished = engine.run(until)
    for group in finished:
        trainers[group.trainer].finish(group)
    return {group.trainer for group in finished}
