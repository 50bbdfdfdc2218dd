"""From scored samples to experience: log-probs, values and advantages, as far as the algorithm needs them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.algorithms.constraint import LagrangeMultiplier, constrained_advantages, costs_as_rewards
from rl_plugins.algorithms.regularization import Coefficient
from rl_plugins.algorithms.rollout_correction import diagnostics
from rl_plugins.config.sampling import Schedule
from rl_plugins.data.experience import ROUTED_EXPERTS, Experience, computed
from rl_plugins.errors import DataError
from rl_plugins.stages.critics import Critic
from rl_plugins.stages.forward_passes import ForwardPasses
from rl_plugins.stages.off_policy import needs_old_log_probs
from rl_plugins.stages.process_rewards import ProcessRewards
from rl_plugins.stages.teachers import Teachers
from rl_plugins.stages.turns import add_turns
from rl_plugins.strategies.contract import POLICY, REFERENCE
from rl_plugins.strategies.rank_groups import refuse_joint_passes


class ExperienceMaker:
    """Adds the inputs of the update to samples.

    Args:
        algorithm: names the needed tensors.
        passes: forward passes of the models.
        schedule: bound on the age of tokens.
        kl_controller: coefficient of the KL penalty in the rewards.
        updates: number of optimizer steps of an RL step.
        critics: critics whose values are needed.
        multiplier: multiplier of a bound on the mean cost; None without a bound.
        process_rewards: rewards of a process reward model; None without such a model.
        teachers: teachers of a distillation; None without teachers.

    Attributes:
        metrics: metrics of the last experience, averaged over all ranks.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        passes: ForwardPasses,
        schedule: Schedule,
        kl_controller: Coefficient,
        *,
        updates: int,
        critics: Sequence[Critic],
        multiplier: LagrangeMultiplier | None,
        process_rewards: ProcessRewards | None,
        teachers: Teachers | None,
    ) -> None:
        self._algorithm, self._passes, self._schedule = algorithm, passes, schedule
        self._kl_controller, self._critics, self._multiplier = kl_controller, critics, multiplier
        self._process_rewards, self._teachers = process_rewards, teachers
        correction = algorithm.rollout_correction
        self._correction = correction if correction.decoupled else None
        self._needs_old_log_probs = needs_old_log_probs(algorithm, schedule, updates)
        self._strategy = passes.strategy
        self.metrics: dict[str, float] = {}

    def make(self, samples: Experience, step: int) -> Experience:
        """Fill the inputs of the update. Collective.

        Args:
            samples: scored samples; changed in place.
            step: number of finished steps, which is also the version of the policy.
        """
        self.metrics = {}
        self._check_routes(samples)
        if self._process_rewards is not None:
            # Before `shape_rewards`: whether a response is correct must not depend on its length.
            self._process_rewards.add_outcomes(samples, step)
        shape_rewards(samples, self._algorithm)
        if self._algorithm.needs & {"turns_BT", "states_BT"}:
            add_turns(samples)
        self._add_log_probs(samples)
        self._add_values(samples)
        self._mask_old_tokens(samples, step)
        self._correct_for_rollout(samples)
        self._add_advantages(samples)
        if self._multiplier is not None:
            self._update_multiplier(self._multiplier, samples, step)
            self._constrain_advantages(samples, self._multiplier.value)
        return samples

    def _check_routes(self, samples: Experience) -> None:
        replay = self._passes.router_replay
        if replay is None:
            return
        refuse_joint_passes(self._passes.named_models()[POLICY], "router_replay")
        # Conversations that failed before the first response have no routes.
        has_responses = bool(samples.response_lengths.any())
        if replay.source == "rollout" and has_responses and ROUTED_EXPERTS not in samples.columns:
            raise DataError(
                "router_replay=rollout: the rollout engine returns no experts: build the engine with "
                "return_experts=True, or use router_replay=recompute"
            )

    def _add_log_probs(self, samples: Experience) -> None:
        needs = self._algorithm.needs
        if "old_log_probs_BT" in needs or self._needs_old_log_probs:
            with self._strategy.phase_log.measure("old_log_probs"):
                old = self._old_log_probs(samples, sum_pi_squared="sum_pi_squared_BT" in needs)
            samples.old_log_probs = old["log_probs"]
            samples.entropy, samples.sum_pi_squared = old["entropy"], old.get("sum_pi_squared")
        if "ref_log_probs_BT" in needs:
            with self._strategy.phase_log.measure("ref_log_probs"):
                reference = self._passes.per_token(samples, partial(self._log_probs, REFERENCE))
            samples.ref_log_probs = reference["log_probs"]
        if self._teachers is not None:
            self._teachers.add(samples)

    def _old_log_probs(self, samples: Experience, *, sum_pi_squared: bool) -> dict[str, Tensor]:
        """Run the policy over the samples; record the experts of the tokens for a replay in the updates."""
        run = partial(self._log_probs, POLICY, sum_pi_squared=sum_pi_squared)
        replay = self._passes.router_replay
        if replay is None or replay.source == "rollout":
            return self._passes.per_token(samples, run)
        # The rows of a compact batch are numbered from 0.
        numbered, experts_of = samples.compact(), dict[int, Tensor]()

        def run_and_record(micro: Experience) -> dict[str, Tensor]:
            found = run(micro)
            experts_of.update(zip(computed(micro.row).tolist(), self._passes.experts(micro), strict=True))
            return found

        found = self._passes.per_token(numbered, run_and_record)
        samples.set_column(ROUTED_EXPERTS, [experts_of[place] for place in range(len(samples))])
        return found

    def _log_probs(self, name: str, micro: Experience, *, sum_pi_squared: bool = False) -> dict[str, Tensor]:
        result = self._passes.log_probs(name, micro, sum_pi_squared=sum_pi_squared, entropy=name == POLICY)
        columns = {
            "log_probs": result.log_probs_BT,
            "entropy": result.entropy_BT,
            "sum_pi_squared": result.sum_pi_squared_BT,
        }
        return {column: values for column, values in columns.items() if values is not None}

    def _add_values(self, samples: Experience) -> None:
        for critic in self._critics:
            critic.add_values(samples)
        if self._process_rewards is not None:
            self.metrics |= self._process_rewards.add(samples)

    def _mask_old_tokens(self, samples: Experience, step: int) -> None:
        """Mask tokens older than the schedule allows."""
        max_age, mask_BT = self._schedule.max_token_age, samples.response_mask
        if max_age is None:
            return
        samples.response_mask = mask_BT * (step - samples.policy_versions <= max_age)
        counts = torch.stack([mask_BT.sum(), samples.response_mask.sum()]).double()
        tokens, kept = self._strategy.ranks.sum(counts).tolist()
        self.metrics["rollout/too_old"] = 1 - kept / max(tokens, 1)

    def _correct_for_rollout(self, samples: Experience) -> None:
        """Weigh or reject samples by the gap between the sampler and the trained policy."""
        correction, ranks = self._correction, self._strategy.ranks
        if correction is None:
            return
        policies: dict[str, Tensor] = {
            "log_probs_BT": computed(samples.old_log_probs),
            "rollout_log_probs_BT": samples.rollout_log_probs,
        }
        mask_BT = samples.response_mask
        kept_BT, weights_BT = correction.correct(**policies, response_mask_BT=mask_BT, sum_over_ranks=ranks.sum)
        measured = diagnostics(
            **policies,
            response_mask_BT=mask_BT,
            weights_BT=weights_BT,
            sum_over_ranks=ranks.sum,
            max_over_ranks=ranks.max,
        )
        self.metrics |= {f"rollout/{name}": value for name, value in measured.items()}
        self._measure_gap(samples)
        kept, tokens = ranks.sum(torch.stack([kept_BT.sum(), mask_BT.sum()]).double()).tolist()
        self.metrics["rollout/rejected"] = 1 - kept / max(tokens, 1)
        samples.response_mask, samples.rollout_weights = kept_BT, weights_BT
        samples.rejected = mask_BT.bool().any(dim=-1) & ~kept_BT.bool().any(dim=-1)

    def _measure_gap(self, samples: Experience) -> None:
        """Measure the gap between sampler and trainer before tokens are rejected. The learner sees the kept tokens."""
        ranks, valid_BT = self._strategy.ranks, samples.response_mask.bool()
        gaps_N = (computed(samples.old_log_probs) - samples.rollout_log_probs).abs()[valid_BT].double()
        total, tokens = ranks.sum(torch.stack([gaps_N.sum(), valid_BT.sum().double()])).tolist()
        largest = ranks.max(torch.cat([gaps_N, gaps_N.new_zeros(1)]).max()[None]).item()
        if tokens:
            self.metrics |= {"rollout_gap": total / tokens, "rollout_gap_max": largest}

    def _add_advantages(self, samples: Experience) -> None:
        with self._strategy.phase_log.measure("advantages"):
            samples.token_level_rewards, samples.advantages, samples.returns = self._algorithm.advantages(
                samples.named_tensors(),
                kl_coefficient=self._kl_controller.coefficient,
                sum_over_ranks=self._strategy.ranks.sum,
            )

    def _update_multiplier(self, multiplier: LagrangeMultiplier, samples: Experience, step: int) -> None:
        """Let lambda follow the mean cost of the samples. While the policy waits for a critic, lambda waits, too."""
        costs_B = torch.where(samples.valid, computed(samples.costs), 0).double()
        sums = torch.stack([costs_B.sum(), samples.valid.sum().double()])
        sum_of_costs, num_samples = self._strategy.ranks.sum(sums).tolist()
        if not any(critic.warms_up(step) for critic in self._critics):
            multiplier.update(sum_of_costs, num_samples)
        self.metrics["cost"] = sum_of_costs / num_samples if num_samples else float("nan")
        self.metrics |= {"lambda": multiplier.value, "cost_in_window": multiplier.mean_cost}

    def _constrain_advantages(self, samples: Experience, multiplier: float) -> None:
        """Subtract the advantages of the costs, `multiplier` times, from the advantages of the rewards."""
        with self._strategy.phase_log.measure("advantages"):
            # A KL penalty in the reward raises the costs, so its weight in the difference of advantages without a scale
            # does not depend on lambda.
            _, cost_advantages_BT, samples.cost_returns = self._algorithm.advantages(
                costs_as_rewards(samples.named_tensors()),
                kl_coefficient=-self._kl_controller.coefficient,
                sum_over_ranks=self._strategy.ranks.sum,
            )
            samples.advantages = constrained_advantages(
                advantages_BT=computed(samples.advantages),
                cost_advantages_BT=cost_advantages_BT,
                multiplier=multiplier,
            )


def shape_rewards(samples: Experience, algorithm: Algorithm) -> None:
    """Fill `is_positive` from the scores, and then change `scores` as the algorithm's reward shaping says."""
    samples.is_positive = computed(samples.scores) > algorithm.modifiers.positive_above
    samples.scores = algorithm.shaping.shaped(
        scores_B=computed(samples.scores),
        response_lengths_B=samples.response_lengths,
        groups_B=samples.groups,
        valid_B=samples.valid,
    )
