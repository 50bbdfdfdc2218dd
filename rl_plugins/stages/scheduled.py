"""A stage that asks for its samples ahead of the step that trains on them, as far as its schedule lets it.

While a step trains, the engine samples for those that follow; weights change in flight, and every token knows which
policy sampled it. Synchronous sampling is the same code with nothing ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from typing_extensions import Unpack, override

from rl_plugins.data.experience import Experience
from rl_plugins.data.prompts import PromptBatch
from rl_plugins.errors import ConfigError
from rl_plugins.rollout.engine import EngineLost, Generations, GroupRequest, RolloutEngine, SamplingConfig
from rl_plugins.stages.sampling import SamplingOptions, SamplingStage
from rl_plugins.stages.schedule import Schedule
from rl_plugins.stages.seeds import seed_of
from rl_plugins.stages.trajectories import Group, TrajectoryQueue, together


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

    def take_groups(self, count: int, of_step: int) -> tuple[PromptBatch, Experience]:
        """So many groups of this rank, as they were sampled, and their prompts. Collective.

        Args:
            count: the same on every rank.
            of_step: groups of this rank that a step takes in all.
        """
        queue = self._queue
        in_flight = self._in_flight(count, of_step)
        self._draw_until(in_flight, of_step)
        earlier = queue.unfinished(queue.begun())
        new = queue.begin(in_flight, self.step)
        due = queue.due(self.step)

        def sample(engine: RolloutEngine) -> None:
            groups = self.groups_of(engine)
            if earlier and new:
                # Before the engine is busy with the next ones: it answers between two steps.
                queue.finish(groups.collect((), 0))
            if new:
                groups.submit(self._requests(new), self.sampling)
                new.clear()
            if lost := groups.lost_tickets():
                queue.begun_anew(lost, self.step)
                groups.submit(self._requests(lost), self.sampling, together=False)
            queue.finish(groups.collect(queue.unfinished(due), max(0, count - queue.num_finished)))
            if self.schedule.drops:
                groups.drop(queue.drop_but(count))

        self._strategy.sampled(self.step, sample)
        groups = queue.take(count, self.step)
        return self._experience_of(groups)

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
        generations = Generations.concat([one.generations for one in groups if one.generations is not None])
        numbers = [group.number for group in groups]
        return prompts, self._experience(prompts, generations, self.sampling.num_samples, numbers)

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
        # Of a lost engine the next step finds out, and has its groups sampled again.
        with suppress(EngineLost):
            self._queue.finish(self.groups_of(self._strategy.rollout).collect((), 0))
        return self._queue.state()

    def load_rank_shares(self, shares: Sequence[Any]) -> str:
        """Go on with the queue of a checkpoint; see `TrajectoryQueue.load`."""
        return self._queue.load(shares, self.trainer.global_rank, self.trainer.world_size)

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
