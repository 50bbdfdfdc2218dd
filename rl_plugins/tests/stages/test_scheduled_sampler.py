"""A stage with sampling ahead: the groups of each step, their age, and late, lost and filtered groups."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typing_extensions import override

from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.algorithms.filtering import GroupFilter
from rl_plugins.config.models import CriticConfig, OptimizerConfig
from rl_plugins.config.sampling import SamplingConfig, Schedule
from rl_plugins.data.experience import Experience
from rl_plugins.data.images import PROMPT_IMAGES
from rl_plugins.data.prompts import PromptBatch
from rl_plugins.errors import ConfigError, EngineLost
from rl_plugins.models.tiny import build_model, save_tiny_policy
from rl_plugins.ranks import Ranks
from rl_plugins.rollout.engine import Generations, GroupRequest, RemoteSamples
from rl_plugins.rollout.transformers_engine import TransformersRollout
from rl_plugins.stages.sampling import PromptSampler
from rl_plugins.strategies.contract import Strategy
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.tests.loops import for_each
from rl_plugins.tests.stages import canned
from rl_plugins.weights.source import WeightSource


class Distant(canned.CannedRollout):
    """A rollout engine on another machine. The engine records its requests.

    Args:
        slow: prompts with an end only when `collect` requires their group, or has no other group to return.
        loses_at: calls of `collect` with the loss of the engine.
    """

    sleeps = False

    def __init__(self, slow: Sequence[str] = (), loses_at: Sequence[int] = ()) -> None:
        super().__init__()
        self.slow, self.loses_at = slow, loses_at
        self.version, self.collects = 0, 0
        self.asked: list[str] = []
        self.dropped: list[str] = []
        self._open: dict[int, tuple[str, Generations]] = {}
        self._gone: list[int] = []

    @override
    def update_weights(self, source: WeightSource, version: int) -> None:
        self.version = version

    @override
    def submit(self, requests: Sequence[GroupRequest], sampling: SamplingConfig, *, together: bool = True) -> None:
        for one in requests:
            text = canned.tokenizer.decode(one.prompt)
            made = self.generate([one.prompt], sampling, None)
            versions = torch.full((len(made.token_ids),), self.version).numpy()
            self._open[one.ticket] = text, Generations(**{**vars(made), "policy_versions": versions})
            self.asked.append(text)

    @override
    def collect(self, required: Sequence[int], count: int) -> Mapping[int, Generations | RemoteSamples]:
        self.collects += 1
        if self.collects in self.loses_at:
            self._gone, self._open = list(self._open), {}
            raise EngineLost("gone")
        done = [ticket for ticket, (text, _) in self._open.items() if text not in self.slow or ticket in required]
        done += [ticket for ticket in self._open if ticket not in done][: max(0, count - len(done))]
        assert len(done) >= count and set(required) <= set(done)
        return {ticket: self._open.pop(ticket)[1] for ticket in (required if required and not count else done)}

    @override
    def drop(self, tickets: Sequence[int]) -> None:
        self.dropped += [self._open.pop(ticket)[0] for ticket in tickets if ticket in self._open]

    @override
    def lost_tickets(self, among: Container[int] | None = None) -> list[int]:
        gone = [ticket for ticket in self._gone if among is None or ticket in among]
        self._gone = [ticket for ticket in self._gone if ticket not in gone]
        return gone

    @override
    def drop_lost_engines(self) -> int:
        return 1


class Remote(Distant):
    """An engine that keeps finished groups until `fetch`.

    Args:
        loses_fetched: calls of `fetch` without a group.
    """

    def __init__(self, slow: Sequence[str] = (), loses_fetched: Sequence[int] = ()) -> None:
        super().__init__(slow)
        self.loses_fetched, self.fetches = loses_fetched, 0
        self.kept: dict[int, Generations] = {}

    @override
    def collect(self, required: Sequence[int], count: int) -> Mapping[int, Generations | RemoteSamples]:
        finished = super().collect(required, count)
        self.kept |= {ticket: one for ticket, one in finished.items() if isinstance(one, Generations)}
        return {ticket: RemoteSamples(0, 0, ticket, one.lengths) for ticket, one in finished.items()}

    @override
    def fetch(self, finished: Sequence[Generations | RemoteSamples]) -> list[Generations | None]:
        self.fetches += 1
        if self.fetches in self.loses_fetched:
            self.kept.clear()
        return [self.kept.pop(one.ticket, None) if isinstance(one, RemoteSamples) else one for one in finished]

    @override
    def drop(self, tickets: Sequence[int]) -> None:
        super().drop(tickets)
        for ticket in tickets:
            self.kept.pop(ticket, None)


class Keeping(canned.Keeping):
    """A stage with a record of the prompts of each step, and of the age of the tokens."""

    @property
    def texts(self) -> list[list[str]]:
        """The prompts of each step."""
        return [[message[0]["content"] for message in one.columns["prompt"][::3]] for one in self.trained_on]

    @property
    def ages(self) -> list[list[int]]:
        """The ages of the tokens of each step, in policy versions."""
        return [
            sorted(set((step - one.policy_versions)[one.response_mask.bool()].tolist()))
            for step, one in enumerate(self.trained_on)
        ]


TEXTS = ["1+1", "12+30", "100+1", "1+1"]


class Loader:
    """Batches of two prompts, without an end."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts, self.drawn = texts, 0

    def __len__(self) -> int:
        return 1000

    def __iter__(self) -> Any:
        for _ in range(len(self)):
            yield self.draw()

    def draw(self) -> PromptBatch:
        """The next two prompts."""
        first = 2 * self.drawn % len(self.texts)
        self.drawn += 1
        return canned.prompt_batch([self.texts[first], self.texts[(first + 1) % len(self.texts)]])


def train(
    engine: Any,
    schedule: Schedule,
    steps: int = 4,
    texts: Sequence[str] = TEXTS,
    stage_class: type[Keeping] = Keeping,
    strategy_class: type[SingleDeviceRolloutStrategy] = SingleDeviceRolloutStrategy,
    **options: Any,
) -> Keeping:
    stage = stage_class(
        build_model(hidden_size=32, intermediate_size=48, initializer_range=0.2),
        tokenizer=canned.tokenizer,
        scorer=canned.CannedScorer(),
        sampling=SamplingConfig(max_tokens=20, num_samples=3),
        schedule=schedule,
        optimizer=OptimizerConfig(lr=0.01),
        max_steps=steps,
        **options,
    )
    trainer = canned.quiet_trainer(strategy_class(rollout=engine))
    trainer.fit(stage, Loader(texts))
    return stage


@for_each("staleness", [0, 1, 2])
def test_steps_train_on_prompts_in_order_with_tokens_as_old_as_max_staleness(staleness: int) -> None:
    engine = Distant()
    stage = train(engine, Schedule(staleness))
    assert stage.texts == [["1+1", "12+30"], ["100+1", "1+1"]] * 2
    assert stage.ages == [[min(step, staleness)] for step in range(4)]
    # Each requested group is trained on in some step.
    assert engine.asked == TEXTS * 2
    if staleness:
        assert [metrics["rollout/staleness"] for metrics in stage.metrics] == [min(s, staleness) for s in range(4)]


@for_each("schedule", [Schedule(), Schedule(1), Schedule(1, ahead=0.5), Schedule(0, ahead=0.5)])
def test_training_is_the_same_where_the_engine_holds_finished_groups_until_fetch(schedule: Schedule) -> None:
    engine = Remote(slow=["12+30"])
    kept, direct = train(engine, schedule), train(Distant(slow=["12+30"]), schedule)
    assert kept.texts == direct.texts
    assert all(torch.equal(a, b) for a, b in zip(kept.policy.parameters(), direct.policy.parameters(), strict=True))
    assert len(engine.kept) == 0


@for_each("staleness", [0, 1])
def test_groups_lost_before_fetch_are_sampled_again(staleness: int) -> None:
    engine = Remote(loses_fetched=[2])
    stage = train(engine, Schedule(staleness))
    assert stage.texts == [["1+1", "12+30"], ["100+1", "1+1"]] * 2
    # The groups of the steps with samples there are requested twice, and the samples are new.
    assert stage.ages == [[0], [0], [0], [staleness]]
    assert len(engine.asked) == 8 + 2 * (1 + staleness)
    with pytest.raises(EngineLost, match="rollout engines were lost 5 times in one phase"):
        train(Remote(loses_fetched=range(1, 100)), Schedule(staleness))


def test_schedule_waits_for_slow_groups_only_before_max_staleness() -> None:
    stage = train(Distant(slow=["12+30"]), Schedule(1, ahead=0.5), steps=3)
    assert stage.texts == [["1+1", "100+1"], ["12+30", "1+1"], ["1+1", "12+30"]]
    assert stage.ages == [[0], [0, 1], [0, 1]]


def test_schedule_without_staleness_drops_late_groups() -> None:
    engine = Distant(slow=["12+30"])
    stage = train(engine, Schedule(0, ahead=0.5), steps=2)
    assert stage.texts == [["1+1", "100+1"], ["1+1", "1+1"]]
    assert engine.dropped == ["12+30", "12+30"]
    assert stage.ages == [[0], [0]]


@for_each("staleness", [0, 1])
def test_groups_of_a_lost_engine_are_sampled_again(staleness: int) -> None:
    engine = Distant(loses_at=[2])
    stage = train(engine, Schedule(staleness))
    assert stage.texts == [["1+1", "12+30"], ["100+1", "1+1"]] * 2
    assert [metrics["rollout/engines_lost"] for metrics in stage.metrics] == [0, 1, 0, 0]
    # The two groups in progress at the loss are requested twice.
    assert len(engine.asked) == 10


@for_each(("staleness", "ahead"), [(2, None), (3, 2.0)])
def test_no_group_is_older_than_max_staleness_if_many_groups_are_slow(staleness: int, ahead: float | None) -> None:
    stage = train(Distant(slow=["12+30", "100+1"]), Schedule(staleness, ahead=ahead), steps=9)
    assert max(age for ages in stage.ages for age in ages) == staleness


class Ending(Keeping):
    """A stage whose training ends after two steps, without a limit that the stage knows."""

    @override
    def end_step(self, metrics: Mapping[str, float]) -> None:
        super().end_step(metrics)
        self.trainer.should_stop = self.step % 2 == 0


class Forgetful(Distant):
    """An engine without the groups of the connection before."""

    @override
    def connect(self, rank: int, world_size: int) -> None:
        super().connect(rank, world_size)
        self._open.clear()


def test_second_fit_samples_the_groups_ahead_again() -> None:
    engine = Forgetful(slow=TEXTS)
    strategy = SingleDeviceRolloutStrategy(rollout=engine)
    stage = Ending(
        build_model(hidden_size=32, intermediate_size=48, initializer_range=0.2),
        tokenizer=canned.tokenizer,
        scorer=canned.CannedScorer(),
        sampling=SamplingConfig(max_tokens=20, num_samples=3),
        schedule=Schedule(1),
    )
    trainer = canned.quiet_trainer(strategy, max_epochs=-1)
    other = Keeping(
        build_model(), tokenizer=canned.tokenizer, scorer=canned.CannedScorer(), sampling=SamplingConfig(max_tokens=4)
    )
    for _ in range(2):
        trainer.fit(stage, Loader(TEXTS))
        # The engine is connected again for the other stage, and again for the first.
        trainer.validate(other, canned.loader([canned.prompt_batch(["1+1"])]), verbose=False)
    assert stage.step == 4 and stage.texts[2] == ["1+1", "12+30"]
    assert engine.asked[4:10] == ["1+1", "12+30"] * 3, "the third step's groups are sampled twice"


def test_load_state_samples_groups_of_another_schedule_or_size_again() -> None:
    scheduled = train(Distant(), Schedule(1), steps=1).rollouts.scheduled_sampler
    scheduled.offer(canned.prompt_batch(["1+1", "12+30"]))
    tickets = scheduled._queue.start(2, version=1)
    sizes = dict(zip(tickets, (3, 2), strict=True))
    scheduled._queue.finish(
        {
            ticket: Generations.from_responses([[5]] * size, [[-1.0]] * size, ["stop"] * size, 1)
            for ticket, size in sizes.items()
        }
    )
    share = scheduled.state()
    assert scheduled.load_state([share], same_world_size=True) == "2 groups of each worker's queue, 1 of them sampled"
    scheduled._schedule = Schedule()
    assert scheduled.load_state([share], same_world_size=True) == "2 groups of each worker's queue, 0 of them sampled"
    # The prompts are in no later batch of the data.
    rest = scheduled.state()
    assert rest is not None and len(rest) == 2


@for_each("sleeps", [False, True])
def test_checkpoint_sends_no_turns_of_conversations_to_a_sleeping_engine(sleeps: bool) -> None:
    engine = Distant(slow=TEXTS)
    stage = train(engine, Schedule(1), steps=2)
    scheduled, sent = stage.rollouts.scheduled_sampler, list[str]()
    engine.sleeps = sleeps

    class Conversations:
        """Conversations that send a turn to the engine in each `collect`."""

        def collect(self, required: Sequence[int], count: int) -> dict[int, Any]:
            sent.append("turn")
            return {}

        def fetch(self, finished: Sequence[Any]) -> list[Any]:
            return []

    conversations: Any = Conversations()
    sampler: Any = SimpleNamespace(conversations=conversations, group_sampler=lambda _: conversations)
    scheduled._sampler = sampler
    assert scheduled.state() is not None
    assert sent == ([] if sleeps else ["turn"])


def test_engines_lost_too_often_name_the_last_loss() -> None:
    with pytest.raises(EngineLost, match="read the engines' output") as raised:
        train(Distant(loses_at=range(1, 100)), Schedule(1))
    assert isinstance(raised.value.__cause__, EngineLost)


class NotesOrder(Distant):
    """An engine that records losses, and whether ranks submit together."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.order: list[str] = []

    @override
    def submit(self, requests: Sequence[GroupRequest], sampling: SamplingConfig, *, together: bool = True) -> None:
        self.order.append("together" if together else "alone")
        super().submit(requests, sampling, together=together)

    @override
    def drop_lost_engines(self) -> int:
        self.order.append("dropped")
        return super().drop_lost_engines()


def test_ranks_submit_together_also_if_an_engine_is_lost_before() -> None:
    """The second call of `collect` asks for finished groups before the submission of the second step."""
    engine = NotesOrder(slow=["12+30"], loses_at=[2])
    stage = train(engine, Schedule(1, ahead=0.5), steps=3)
    assert engine.order == ["together", "together", "dropped", "alone", "together"]
    assert [len(texts) for texts in stage.texts] == [2, 2, 2]


@for_each("engine", [lambda: Distant(loses_at=[1]), lambda: Remote(loses_fetched=[1]), lambda: Remote()])
def test_samples_with_images_of_a_lost_engine_are_sampled_again(engine: Callable[[], Distant]) -> None:
    used, sampling = engine(), SamplingConfig(max_tokens=20, num_samples=3)

    def run_sampling(step: int, sample: Callable[[Any], Generations]) -> Generations:
        while True:
            with suppress(EngineLost):
                return sample(used)

    strategy: Any = SimpleNamespace(rollout_phases=SimpleNamespace(run_sampling=run_sampling))
    prompts = canned.prompt_batch(["1+1", "12+30"])
    prompts.columns[PROMPT_IMAGES] = [None, None]
    # A group for a later training step stays with the engine, or with the lost groups.
    used.submit([GroupRequest(7, prompts.prompt_ids[0], 0)], sampling)
    found = PromptSampler(strategy, canned.tokenizer, 0).generate(prompts, sampling, [1, 2], 0)
    assert found.responses() == Distant().generate(prompts.prompt_ids, sampling, None).responses()
    assert used.lost_tickets() == [7] if used.loses_at else [*used.collect([], 0)] == [7]


def test_engine_lost_5_times_in_one_phase_ends_the_run() -> None:
    with pytest.raises(EngineLost, match="rollout engines were lost 5 times in one phase"):
        train(Distant(loses_at=range(1, 100)), Schedule())


def test_group_filter_replaces_uniform_groups_by_groups_in_flight() -> None:
    texts = ["1+1", "4+4", "12+30", "100+1"]
    engine = Distant()
    stage = train(engine, Schedule(1), steps=2, texts=texts, algorithm=Algorithm(group_filter=GroupFilter()))
    # The samples of 4+4 score alike: the third group in flight replaces this group.
    assert stage.texts[0] == ["1+1", "12+30"]
    assert stage.metrics[0]["train/generation_batches"] == 2
    assert engine.asked[:5] == ["1+1", "4+4", "12+30", "100+1", "1+1"]


class Silent(Distant):
    """An engine whose responses are all empty."""

    @override
    def generate(self, prompts: list[list[int]], sampling: SamplingConfig, seeds: list[int] | None) -> Generations:
        count = len(prompts) * sampling.num_samples
        return Generations.from_responses([[]] * count, [[]] * count, ["stop"] * count, 0)


def test_staleness_of_a_step_whose_responses_are_all_empty_is_0() -> None:
    stage = train(Silent(), Schedule(1), steps=2)
    assert [one.responses.shape[1] for one in stage.trained_on] == [0, 0]
    ages = [(metrics["rollout/staleness"], metrics["rollout/staleness_max"]) for metrics in stage.metrics]
    assert ages == [(0, 0), (0, 0)]


def test_max_token_age_masks_tokens_of_older_policies() -> None:
    stage = train(Distant(slow=["12+30"]), Schedule(1, ahead=0.5, max_token_age=0), steps=3)
    assert stage.texts == [["1+1", "100+1"], ["12+30", "1+1"], ["1+1", "12+30"]]
    # The groups started before are in the batch, and all tokens of the groups are masked.
    assert stage.ages == [[0], [0], [0]]
    shares = [metrics["train/rollout/too_old"] for metrics in stage.metrics]
    assert shares[0] == 0 and 0 < shares[1] < 1


class CriticElsewhere(Keeping):
    """A stage with its critic in another process: in the warm-up no optimizer of this process takes a step."""

    @override
    def make_parts(self, strategy: Strategy) -> None:
        super().make_parts(strategy)
        for critic in self.learner._critics:
            critic.update = lambda *_, **__: None  # type: ignore[method-assign]


def test_samples_do_not_age_while_the_critic_warms_up() -> None:
    stage = train(
        Distant(),
        Schedule(1, max_token_age=1),
        steps=5,
        stage_class=CriticElsewhere,
        algorithm=Algorithm(advantage="gae"),
        critic=CriticConfig(canned.other_model(), warmup_steps=4),
    )
    assert [metrics["train/rollout/too_old"] for metrics in stage.metrics] == [0] * 5
    assert stage.ages == [[0], [1], [1], [1], [1]]


@dataclass(frozen=True)
class RanksBesideAnother(Ranks):
    """One of two ranks; the other rank has groups to begin in each step."""

    begins: list[bool] = field(default_factory=list)

    @override
    def any(self, flag: bool) -> bool:
        return flag or bool(self.begins and self.begins.pop())


class BesideAnother(SingleDeviceRolloutStrategy):
    """One of two ranks."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.ranks = RanksBesideAnother()


class NotesBegins(Keeping):
    """A stage that records in the strategy's ranks when groups begin."""

    @override
    def make_parts(self, strategy: Strategy) -> None:
        super().make_parts(strategy)
        ahead, ranks = self.rollouts.scheduled_sampler, strategy.ranks
        assert isinstance(ranks, RanksBesideAnother)
        take_groups = ahead.take_groups

        def take(count: int, **options: Any) -> tuple[PromptBatch, Experience]:
            ranks.begins.append(True)
            return take_groups(count, **options)

        ahead.take_groups = take  # type: ignore[method-assign]


class NotesSubmits(Distant):
    """An engine that records the number of groups of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.submits: list[int] = []

    @override
    def submit(self, requests: Sequence[GroupRequest], sampling: SamplingConfig, *, together: bool = True) -> None:
        self.submits.append(len(requests))
        super().submit(requests, sampling, together=together)


def test_submit_is_called_without_groups_when_only_another_rank_begins_groups() -> None:
    alone, beside = NotesSubmits(), NotesSubmits()
    train(alone, Schedule(1), steps=2)
    assert alone.submits == [4]
    train(beside, Schedule(1), steps=2, stage_class=NotesBegins, strategy_class=BesideAnother)
    assert beside.submits == [4, 0]


def test_group_filter_oversampling_with_a_schedule_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"group_filter.oversampling=2 cannot be combined with schedule"):
        train(Distant(), Schedule(1), algorithm=Algorithm(group_filter=GroupFilter(oversampling=2)))


def test_ratio_without_correction_is_relative_to_the_rollout_policy() -> None:
    fresh, stale = train(Distant(), Schedule(), steps=1), train(Distant(), Schedule(1), steps=1)
    # The engine gives each token the log-prob -1.
    assert fresh.metrics[0]["train/ppo_kl"] == pytest.approx(0, abs=1e-6)
    assert abs(stale.metrics[0]["train/ppo_kl"]) > 0.1


class SamplesDirectly(Keeping):
    """The synchronous mode in one function: one call of the engine for the prompts of the step."""

    @override
    def make_parts(self, strategy: Strategy) -> None:
        super().make_parts(strategy)
        ahead = self.rollouts.scheduled_sampler

        def take(count: int, *, step: int, **_: Any) -> tuple[PromptBatch, Experience]:
            queue = ahead._queue
            groups = [queue[ticket] for ticket in queue.start(count, step)]
            queue.drop_started(keep=0)
            prompts = PromptBatch(
                [one.prompt.prompt_ids[0] for one in groups],
                [one.prompt.rows[0] for one in groups],
                {name: [one.prompt.columns[name][0] for one in groups] for name in groups[0].prompt.columns},
                0,
            )
            return prompts, ahead._sampler.sample(prompts, self.sampling, step)

        ahead.take_groups = take  # type: ignore[method-assign]


def test_schedule_without_sampling_ahead_equals_direct_sampling_bit_for_bit(tmp_path: Any) -> None:
    folder = save_tiny_policy(tmp_path, hidden_size=32, intermediate_size=48, initializer_range=0.2)

    def weights(kind: type[Keeping]) -> list[torch.Tensor]:
        stage = kind(
            str(folder),
            scorer=canned.CannedScorer(),
            sampling=SamplingConfig(max_tokens=8, num_samples=3),
            optimizer=OptimizerConfig(lr=0.01),
            max_steps=3,
        )
        trainer = canned.quiet_trainer(SingleDeviceRolloutStrategy(rollout=TransformersRollout(str(folder))))
        trainer.fit(stage, Loader(["1+1", "12+30"]))
        return [parameter.detach() for parameter in stage.policy.parameters()]

    scheduled, direct = weights(Keeping), weights(SamplesDirectly)
    assert all(torch.equal(one, other) for one, other in zip(scheduled, direct, strict=True))
    start = build_model(hidden_size=32, intermediate_size=48, initializer_range=0.2)
    assert not all(torch.equal(a, b) for a, b in zip(scheduled, start.parameters(), strict=True))
