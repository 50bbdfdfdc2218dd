"""A stage that asks for its samples ahead of the step that trains on them, as far as its schedule lets it.

While a step trains, the engine samples for those that follow; weights change in flight, and every token knows which
policy sampled it. Synchronous sampling is the same code with nothing ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from typing_extensions import Unpack, override

from rl_plugins.data.experience import Experience
from rl_plugins.data.prompts import PromptBatch
from rl_plugins.errors import ConfigError
from rl_plugins.rollout.engine import EngineLost, Generations, GroupRequest, GroupSampler, RolloutEngine, SamplingConfig
from rl_plugins.stages.dealing import Table, all_hands, deal_groups, even_turns
from rl_plugins.stages.sampling import SamplingOptions, SamplingStage
from rl_plugins.stages.schedule import Schedule
from rl_plugins.stages.seeds import seed_of
from rl_plugins.stages.trajectories import Group, TrajectoryQueue, together
from rl_plugins.strategies.contract import MOST_LOSSES, lost_too_often


class ScheduledStage(SamplingStage):
    """Holds the queue of the groups that were asked for.

    Args:
        policy: see `Stage`.
        sampling: how training samples are drawn.
        eval_sampling: see `SamplingStage`.
        schedule: how far ahead; synchronous by default.
        **sampling_stage: arguments of `SamplingStage`.
    """

    def __init__(
        self,
        policy: str | nn.Module,
        *,
        sampling: SamplingConfig,
        eval_sampling: SamplingConfig,
        schedule: Schedule | None = None,
        **sampling_stage: Unpack[SamplingOptions],
    ) -> None:
        super().__init__(policy, eval_sampling=eval_sampling, **sampling_stage)
        self.sampling = self.ending(sampling)
        self.schedule = schedule or Schedule()
        self._queue = TrajectoryQueue(self.schedule)
        # Batches of prompts that came so far.
        self._slots = 0
        self._busy_before_s, self._lost_before = 0.0, 0

    def offer(self, prompts: PromptBatch) -> None:
        """Put this rank's prompts of a batch into the queue."""
        trainer = self.trainer
        self._queue.offer(prompts, slot=self._slots, rank=trainer.global_rank, world_size=trainer.world_size)
        self._slots += 1

    def take_groups(self, count: int, of_step: int, mini_batches: int) -> tuple[PromptBatch, Experience]:
        """So many groups for this rank, as they were sampled, and their prompts. Collective.

        Args:
            count: the same on every rank.
            of_step: groups of this rank that a step takes in all.
            mini_batches: into how many they are cut; inside each, groups change ranks until all have about as many
                tokens. 0 leaves them where they are.
        """
        queue = self._queue
        in_flight = self._in_flight(count, of_step)
        self._draw_until(in_flight, of_step)
        earlier = queue.unfinished(queue.begun())
        new = queue.begin(in_flight, self.step)
        due = queue.due(self.step)
        # Ranks begin together: one that has nothing new, as after a restart, takes its place all the same.
        begun = not self._strategy.on_any_rank(bool(new))

        def sample(engine: RolloutEngine) -> None:
            nonlocal begun
            groups = self.groups_of(engine)
            if earlier and not begun:
                # Before the engine is busy with the next ones: it answers between two steps.
                queue.finish(groups.collect((), 0))
            if not begun:
                groups.submit(self._requests(new), self.sampling)
                begun = True
            self._ask_again(groups, groups.lost_tickets())
            queue.finish(groups.collect(queue.unfinished(due), max(0, count - queue.num_finished)))
            if self.schedule.drops:
                groups.drop(queue.drop_but(count))

        self._strategy.sampled(self.step, sample)
        groups = queue.take(count, self.step)
        if mini_batches and self.trainer.world_size > 1:
            with self._phase("balance"):
                groups = self._evened(groups, mini_batches)
        return self._experience_of(self._fetched(groups))

    def _evened(self, groups: list[Group], mini_batches: int) -> list[Group]:
        """As many groups, each in the mini-batch it was in, of about as many tokens as other ranks have. Collective."""
        table, size = self._table, self.sampling.num_samples
        keys = [(place * table.world_size + table.rank,) for place in range(len(groups))]
        tokens = [size * len(one.prompt.prompt_ids[0]) + int(one.sampled.lengths.sum()) for one in groups]
        return deal_groups(groups, even_turns(all_hands(keys, size, tokens, table), mini_batches, table), table)

    def _fetched(self, groups: list[Group]) -> list[Group]:
        """The same with their responses, which their engines have kept; what a lost one had is sampled again."""
        for _ in range(MOST_LOSSES):
            with self._phase("rollout"):
                responses = self.groups_of(self._strategy.rollout).fetch([one.sampled for one in groups])
            groups = [replace(one, generations=theirs) for one, theirs in zip(groups, responses, strict=True)]
            lost = [place for place, theirs in enumerate(responses) if theirs is None]
            if not self._strategy.on_any_rank(bool(lost)):
                return groups
            for place, group in zip(lost, self._sampled_again([groups[place] for place in lost]), strict=True):
                groups[place] = group
        raise lost_too_often()

    def _sampled_again(self, groups: Sequence[Group]) -> list[Group]:
        tickets = [self._queue.add(one) for one in groups]
        new = list(tickets)

        def sample(engine: RolloutEngine) -> None:
            sampler = self.groups_of(engine)
            self._ask_again(sampler, [*sampler.lost_tickets(), *new])
            new.clear()
            self._queue.finish(sampler.collect(self._queue.unfinished(tickets), 0) if tickets else {})

        self._strategy.sampled(self.step, sample)
        return self._queue.take_out(tickets)

    def _ask_again(self, sampler: GroupSampler, tickets: Sequence[int]) -> None:
        """Have groups sampled that went with a lost engine."""
        if tickets:
            self._queue.begun_anew(tickets, self.step)
            sampler.submit(self._requests(tickets), self.sampling, together=False)

    def _in_flight(self, count: int, of_step: int) -> int:
        """How many groups are to be in flight: not more than training will take to its end."""
        wanted = self.schedule.in_flight(of_step) - (of_step - count)
        if self.schedule.drops:
            return wanted
        steps_left = self.max_steps - self.step if self.max_steps else self.schedule.max_staleness + 2
        return max(count, min(wanted, steps_left * of_step))

    def _draw_until(self, in_flight: int, of_step: int) -> None:
        missing = max(0, -(-(in_flight - len(self._queue)) // of_step))
        if self.schedule.active:
            # After a restart with other ranks, some may hold a group more, and all draw in step.
            missing = int(self._strategy.max_over_ranks(torch.tensor([float(missing)])).item())
        for _ in range(missing):
            self.offer(self._next_prompts())

    def _next_prompts(self) -> PromptBatch:
        loader: Any = self.trainer.train_dataloader
        if not hasattr(loader, "draw"):
            raise ConfigError(
                f"dynamic sampling, and sampling ahead, draw further prompts, and {type(loader).__name__} has no "
                "`draw`: use PromptDataModule, or a loader with a method `draw() -> PromptBatch`"
            )
        prompts: PromptBatch = loader.draw()
        return prompts

    def _requests(self, tickets: Sequence[int]) -> list[GroupRequest]:
        groups = [self._queue[ticket] for ticket in tickets]
        # A sample's seed depends on what it is, not on the rank or the step it fell into.
        return [
            self.request(ticket, one.prompt, 0, seed_of(self.seed, one.slot, one.prompt.rows[0]))
            for ticket, one in zip(tickets, groups, strict=True)
        ]

    def _experience_of(self, groups: Sequence[Group]) -> tuple[PromptBatch, Experience]:
        prompts = together([group.prompt for group in groups])
        generations = Generations.concat([one for group in groups if isinstance(one := group.generations, Generations)])
        numbers = [group.number for group in groups]
        return prompts, self._experience(prompts, generations, self.sampling.num_samples, numbers)

    @property
    def _table(self) -> Table:
        return Table(self.trainer.global_rank, self.trainer.world_size, self._strategy.gather, self._strategy.exchange)

    # What is said of it -----------------------------------------------------------------------------------------

    def begin_schedule_metrics(self) -> None:
        """What is measured from now on belongs to a step."""
        self._busy_before_s = self._strategy.rollout.busy_s
        self._lost_before = self._strategy.engines_lost

    def schedule_metrics(self, experience: Experience, seconds: float) -> dict[str, float]:
        """Idle shares of a step on this rank, the age of what it trained on, and lost engines. Collective.

        Args:
            experience: of the step.
            seconds: that it took.
        """
        strategy = self._strategy
        busy_s = strategy.rollout.busy_s - self._busy_before_s
        metrics = {
            "idle/trainer": min(1.0, strategy.phases.seconds("rollout") / seconds),
            "idle/engine": min(1.0, max(0.0, 1 - busy_s / seconds)),
            "rollout/engines": float(strategy.rollout.num_living),
            "rollout/engines_lost": float(strategy.engines_lost - self._lost_before),
        }
        if self.schedule.max_staleness:
            mask_BT = experience.response_mask.double()
            age_BT = (self.step - experience.policy_versions) * mask_BT
            tokens, age = strategy.sum_over_ranks(torch.stack([mask_BT.sum(), age_BT.sum()])).tolist()
            metrics["rollout/staleness"] = age / max(tokens, 1)
            metrics["rollout/staleness_max"] = float(strategy.max_over_ranks(age_BT.max()[None]).item())
        return metrics

    # State ------------------------------------------------------------------------------------------------------

    def rank_share(self) -> list[dict[str, Any]] | None:
        """This rank's part of the queue, with all that is sampled by now."""
        if not self.schedule.active:
            return None
        queue, sampler = self._queue, self.groups_of(self._strategy.rollout)
        # Of a lost engine the next step finds out, and has its groups sampled again.
        with suppress(EngineLost):
            queue.finish(sampler.collect((), 0))
        held = queue.held()
        fetched = dict(zip(held, sampler.fetch(list(held.values())), strict=True))
        queue.finish({ticket: responses for ticket, responses in fetched.items() if responses is not None})
        queue.lose(ticket for ticket, responses in fetched.items() if responses is None)
        return queue.state()

    def load_rank_shares(self, shares: Sequence[Any], *, own: bool) -> str:
        """Go on with the queue of a checkpoint; see `TrajectoryQueue.load`."""
        return self._queue.load(shares, self.trainer.global_rank, self.trainer.world_size, own=own)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["stage"]["slots"] = self._slots

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        # A run that is rolled back goes on with the data behind the bad steps.
        self._slots = max(self._slots, checkpoint["stage"]["slots"])
        if begun := self._queue.begin_again():
            # The policy that was sampling them is no more.
            self.groups_of(self._strategy.rollout).drop(begun)
