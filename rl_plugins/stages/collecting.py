"""From prompts to experience: sample, score, log-probs, values, advantages, as far as the algorithm asks for them.

Every rank samples and scores for its own prompts. What crosses ranks then are a few sums, the samples that an algorithm
chooses among those of all ranks, and groups that make the ranks' work even.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Unpack, override

from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.algorithms.rollout_correction import diagnostics
from rl_plugins.data.experience import Experience
from rl_plugins.data.prompts import PromptBatch
from rl_plugins.data.tokenization import check_same_tokens
from rl_plugins.errors import ConfigError
from rl_plugins.models.log_probs import ResponseLogProbs, response_log_probs
from rl_plugins.models.lora import add_adapter
from rl_plugins.models.scalar_head import last_token_scores, load_scalar_head, response_scores, response_values
from rl_plugins.rewards.failures import check_failure_rate
from rl_plugins.rewards.records import Score
from rl_plugins.rewards.results import failed
from rl_plugins.rollout.engine import SamplingConfig
from rl_plugins.stages.comparable import check_comparable
from rl_plugins.stages.critic import CriticConfig, ValueObjective
from rl_plugins.stages.critic_learner import CriticTraining
from rl_plugins.stages.critic_pool import CriticPool
from rl_plugins.stages.dealing import GroupBuffer, resample_over_ranks
from rl_plugins.stages.fields import filled, named_tensors
from rl_plugins.stages.metrics import SampleMetrics
from rl_plugins.stages.micro_batches import Lengths
from rl_plugins.stages.optimizer import OptimizerConfig
from rl_plugins.stages.sampling import SamplingOptions, greedy
from rl_plugins.stages.schedule import Schedule
from rl_plugins.stages.scheduled import ScheduledStage
from rl_plugins.stages.stage import comes_with_adapter
from rl_plugins.strategies.contract import CRITIC, POLICY, REFERENCE, REWARD_MODEL, TEACHER


@dataclass(frozen=True)
class RewardModelConfig:
    """A trained reward model, run as a frozen engine on the tokens of the samples.

    Attributes:
        path: its folder or name; it has the policy's tokens.
        weight: of its score.
        rule_weight: of the scorer's; 0 leaves the scorer to validation.
        max_failure_rate: share of a rank's samples (0 to 1) above which scores that are not finite end the run.
    """

    path: str
    weight: float = 1.0
    rule_weight: float = 1.0
    max_failure_rate: float = 0.0


class CollectingStage(ScheduledStage):
    """Holds the models of an algorithm and makes its experience.

    Attributes:
        on_rollout: called with the samples of a batch of prompts, their scores, and how many batches the step drew
            before; what it is given changes later.
        replayed: gives the same, by that number, in place of sampling.

    Args:
        policy: see `Stage`.
        sampling: how training samples are drawn; `num_samples` is the group size. Stop tokens: see `SamplingStage`.
        algorithm: GRPO by default.
        eval_sampling: how `validate` samples; greedy with the same length by default.
        schedule: how far sampling runs ahead of training; synchronous by default.
        reference: name or folder of the reference model; needed with a KL coefficient, the policy's own by default.
        teacher: name or folder of a model whose log-probs the algorithm asks for.
        critic: for algorithms that ask for values; its own default then.
        reward_model: adds its score to that of the scorer.
        updates_per_step: optimizer steps per pass over the samples; the prompts of a step are dealt over them.
        passes_per_step: passes over the samples of a step.
        **sampling_stage: arguments of `SamplingStage`.
    """

    gives_process_rewards: ClassVar[bool] = False

    def __init__(
        self,
        policy: str | nn.Module,
        *,
        sampling: SamplingConfig,
        algorithm: Algorithm | None = None,
        eval_sampling: SamplingConfig | None = None,
        schedule: Schedule | None = None,
        reference: str | None = None,
        teacher: str | None = None,
        critic: CriticConfig | None = None,
        reward_model: RewardModelConfig | None = None,
        updates_per_step: int = 1,
        passes_per_step: int = 1,
        **sampling_stage: Unpack[SamplingOptions],
    ) -> None:
        super().__init__(
            policy,
            sampling=sampling,
            schedule=schedule,
            eval_sampling=eval_sampling or greedy(sampling),
            **sampling_stage,
        )
        self.algorithm = algorithm or Algorithm()
        self.updates_per_step, self.passes_per_step = updates_per_step, passes_per_step
        self.reference: Any = None
        self.teacher: Any = None
        self.critic: Any = None
        self.reward_model: Any = None
        needs = self.algorithm.needs
        group_filter = self.algorithm.group_filter
        if self.schedule.active and group_filter is not None and group_filter.oversampling > 1:
            raise ConfigError(
                f"algorithm.group_filter.oversampling={group_filter.oversampling} with a schedule: what runs ahead is "
                "what fills up: use oversampling=1, and schedule.ahead or schedule.max_staleness for more"
            )
        check_comparable(self.algorithm, self.schedule, sampling)
        if "process_rewards_BT" in needs and not self.gives_process_rewards:
            raise ConfigError("the algorithm needs process_rewards_BT, which the stage PRIME computes: use stage=prime")
        own_path = policy if isinstance(policy, str) else None
        self._reference_path, self._teacher_path, self._reward_model = reference or own_path, teacher, reward_model
        self.critic_config = (critic or CriticConfig()) if "values_BT" in needs else None
        self._critic_path = None if self.critic_config is None else self.critic_config.path or own_path
        self.kl_controller = self.algorithm.kl.controller()
        self.entropy_controller = self.algorithm.entropy.controller()
        self.on_rollout: Callable[[Experience, list[Score], int], None] | None = None
        self.replayed: Callable[[int], tuple[Experience, list[Score]]] | None = None
        self._draws = 0
        self._sampled = SampleMetrics()
        has_reference = self._reference_path or comes_with_adapter(policy)
        for wanted, there, what in (
            ("ref_log_probs_BT", has_reference, "reference model with reference=..."),
            ("teacher_log_probs_BT", self._teacher_path, "teacher with teacher=..."),
            ("teacher_top_log_probs_BTK", self._teacher_path, "teacher with teacher=..."),
            ("values_BT", self._critic_path, "model that the critic starts from with critic=CriticConfig(path=...)"),
        ):
            if wanted in needs and not there:
                raise ConfigError(f"the algorithm needs {wanted}: name the {what}")

    # Models -----------------------------------------------------------------------------------------------------

    @override
    def configure_model(self) -> None:
        if isinstance(self.critic, CriticPool):
            # Its processes start while models are loaded here.
            self.critic.begin(self._critic_training, self._strategy.gather)
        super().configure_model()
        needs = self.algorithm.needs
        if "ref_log_probs_BT" in needs and self.reference is None:
            self.reference = self.load_reference(self._reference_path)
        if needs & {"teacher_log_probs_BT", "teacher_top_log_probs_BTK"} and self.teacher is None:
            check_same_tokens(self.tokenizer, str(self._teacher_path), "teacher")
            self.teacher = self.load_model(str(self._teacher_path), TEACHER)
        if self._critic_path is not None and self.critic is None:
            critic = self._load_scalar_head(self._critic_path, new_head=True)
            lora = None if self.critic_config is None else self.critic_config.lora
            self.critic = critic if lora is None else add_adapter(critic, lora)
        if self._reward_model is not None and self.reward_model is None:
            check_same_tokens(self.tokenizer, self._reward_model.path, "reward model")
            # A language model would be given a head that says 0 of everything.
            self.reward_model = self._load_scalar_head(self._reward_model.path, new_head=False, frozen=REWARD_MODEL)

    def _load_scalar_head(self, path: str, *, new_head: bool, frozen: str | None = None) -> nn.Module:
        with self.sharded_init(frozen):
            return load_scalar_head(
                path, dtype=self.model_dtype, gradient_checkpointing=self._gradient_checkpointing, new_head=new_head
            )

    @override
    def engine_modules(self) -> dict[str, nn.Module]:
        others = {
            CRITIC: self.critic, REFERENCE: self.reference, TEACHER: self.teacher, REWARD_MODEL: self.reward_model
        }  # fmt: skip
        return {**super().engine_modules(), **{name: model for name, model in others.items() if model is not None}}

    @override
    def optimizer_configs(self) -> dict[str, OptimizerConfig]:
        configs = super().optimizer_configs()
        if self.critic_config is None or isinstance(self.critic, CriticPool):
            return configs
        return {**configs, CRITIC: self.critic_config.optimizer}

    @property
    def _value_objective(self) -> ValueObjective:
        algorithm = self.algorithm
        return ValueObjective(algorithm.value_clip, algorithm.aggregation, algorithm.scale_factor, self._updates)

    @property
    def _critic_training(self) -> CriticTraining:
        """What processes of its own do with the critic."""
        if self.critic_config is None or self._critic_path is None:
            raise ConfigError("the algorithm asks for no values: leave the critic's pool out")
        return CriticTraining(
            path=self._critic_path,
            config=self.critic_config,
            gradient_clip=self._bound_or(self.critic_config.optimizer),
            objective=self._value_objective,
            computes_in=self.model_dtype,
            gradient_checkpointing=self._gradient_checkpointing,
            tokens_per_micro_batch=self.tokens_per_micro_batch,
            packing=self.packing,
            seed=self.seed,
        )

    # Experience -------------------------------------------------------------------------------------------------

    def collect(self, prompts: PromptBatch) -> Experience:
        """Sample, score, and compute all that the update needs, on this rank's prompts."""
        self._draws, self._sampled = 0, SampleMetrics()
        self._of_step = len(prompts)
        if self.replayed is None:
            self.begin_schedule_metrics()
            self.offer(prompts)
        gather = self.rollout if self.algorithm.group_filter is None else self.informative_groups
        experience = gather(self._of_step)
        if self.algorithm.resampling is not None:
            experience = resample_over_ranks(
                experience,
                self.algorithm.resampling,
                self.sampling.num_samples,
                self.updates_per_step,
                self._step_seed,
                self._table,
            )
        self.shape_rewards(experience)
        self.compute_log_probs(experience)
        self.compute_values(experience)
        self.mask_old_tokens(experience)
        self.correct_for_rollout(experience)
        self.compute_advantages(experience)
        return experience

    def rollout(self, num_groups: int) -> Experience:
        """Samples with their scores, and the scores of greedy responses where they are the baseline. Collective."""
        experience, scores = self._scored(num_groups) if self.replayed is None else self.replayed(self._draws)
        if self.on_rollout is not None:
            self.on_rollout(experience, scores, self._draws)
        self._draws += 1
        self._sampled.add(experience, scores)
        return experience

    def _scored(self, num_groups: int) -> tuple[Experience, list[Score]]:
        # Where scores decide what is trained on, groups change ranks after that.
        chooses = self.algorithm.group_filter is not None or self.algorithm.resampling is not None
        prompts, experience = self.take_groups(num_groups, self._of_step, 0 if chooses else self.updates_per_step)
        scores = self.score(experience)
        if "baseline_rewards_B" in self.algorithm.needs:
            baseline = self.sample(prompts, greedy(self.sampling), self._seeds(prompts))
            self.score(baseline)
            self.shape_rewards(baseline)
            # Where the greedy response could not be scored, there is no baseline to learn from.
            experience.valid = experience.valid & baseline.valid.repeat_interleave(self.sampling.num_samples)
            experience.response_mask = experience.response_mask * experience.valid[:, None]
            experience.baseline_scores = filled(baseline.scores).repeat_interleave(self.sampling.num_samples)
        return experience, scores

    @override
    def score(self, experience: Experience) -> list[Score]:
        scores = super().score(experience)
        if self.trainer.training:
            self._keep_details(experience, scores)
        if self.trainer.training and self._reward_model is not None:
            with self._phase("reward_model"):
                model_scores_B = self._reward_model_scores(experience)
            rule_scores_B = filled(experience.scores)
            experience.scores = (
                self._reward_model.weight * model_scores_B + self._reward_model.rule_weight * rule_scores_B
            )
            scores = self._without_infinite(experience, scores, self._reward_model.max_failure_rate)
        return scores

    def _without_infinite(self, experience: Experience, scores: list[Score], max_failure_rate: float) -> list[Score]:
        """Samples of which the reward model gave no finite number are not valid, as where a reward function fails."""
        scores_B = filled(experience.scores)
        bad_B = experience.valid & ~scores_B.isfinite()
        experience.valid = experience.valid & ~bad_B
        experience.response_mask = experience.response_mask * experience.valid[:, None]
        experience.scores = scores_B.where(experience.valid, 0.0)
        failures = [
            failed("not_finite", f"the reward model: its score is {value}") if bad else None
            for bad, value in zip(bad_B.tolist(), scores_B.tolist(), strict=True)
        ]
        check_failure_rate(failures, max_failure_rate)
        return [failure or score for failure, score in zip(failures, scores, strict=True)]

    def _keep_details(self, experience: Experience, scores: list[Score]) -> None:
        """Those of the numbers returned beside the scores that the algorithm looks at."""
        if names := self.algorithm.reward_components:
            columns = [_detail(scores, name, "algorithm.reward_components") for name in names]
            experience.component_scores = torch.tensor(columns).T
        metric = self.algorithm.group_filter and self.algorithm.group_filter.metric
        if metric:
            experience.set_column("filtered_by", _detail(scores, metric, "algorithm.group_filter.metric"))

    def _reward_model_scores(self, experience: Experience) -> Tensor:
        engine = self._strategy.engine(REWARD_MODEL)

        def scores(micro: Experience) -> dict[str, Tensor]:
            return {"scores": response_scores(engine, **self.forward_inputs(micro))}

        return last_token_scores(self._per_token(experience, scores)["scores"], experience.response_lengths)

    def informative_groups(self, num_groups: int) -> Experience:
        """Take groups until enough teach something (dynamic sampling). Collective.

        What is missing is asked for at once. Synchronously that is a whole batch of prompts; with groups in flight for
        the steps to come it is as many groups as are missing, and the engine goes on with others.

        Raises:
            ConfigError: the batches that the filter allows did not yield enough groups, or the data loader cannot draw.
        """
        group_filter = self.algorithm.group_filter
        assert group_filter is not None
        world_size = self.trainer.world_size
        wanted = num_groups // group_filter.oversampling * world_size
        buffer = GroupBuffer(self._table, self.sampling.num_samples)
        taken, missing = 0, num_groups
        while True:
            experience = self.rollout(missing)
            taken += missing
            kept_B = group_filter.informative(
                scores_B=self._filtered_by(experience),
                groups_B=experience.groups,
                valid_B=experience.valid,
                truncated_B=experience.truncated,
            )
            groups = buffer.add(experience, kept_B, self._draws)
            if len(groups) >= wanted:
                return buffer.take(groups[:wanted], self.updates_per_step)
            if taken >= group_filter.max_batches * num_groups:
                raise ConfigError(
                    f"step {self.step}: {taken * world_size} prompts gave {len(groups)} groups that teach something, "
                    f"and the step needs {wanted}: the prompts are too easy or too hard for this policy. Change the "
                    "data, raise batch.samples_per_prompt or algorithm.group_filter.max_batches, or widen the filter"
                )
            if self.schedule.active:
                missing = -(-(wanted - len(groups)) // world_size)

    def _filtered_by(self, experience: Experience) -> Tensor:
        assert self.algorithm.group_filter is not None
        if self.algorithm.group_filter.metric is None:
            return filled(experience.scores)
        return torch.tensor(list(experience.columns["filtered_by"]))

    def shape_rewards(self, experience: Experience) -> None:
        """Change `scores` as the algorithm wants them."""
        experience.scores = self.algorithm.shaping.shaped(
            scores_B=filled(experience.scores),
            response_lengths_B=experience.response_lengths,
            groups_B=experience.groups,
            valid_B=experience.valid,
        )

    def compute_log_probs(self, experience: Experience) -> None:
        """Fill the log-probs of policy, reference and teacher where the algorithm or the update needs them."""
        needs = self.algorithm.needs
        bypasses = self._ratio_to_rollout
        if bypasses:
            experience.old_log_probs = experience.rollout_log_probs
        if "old_log_probs_BT" in needs or (self._updates > 1 and not bypasses):
            with self._phase("old_log_probs"):
                squares = "sum_pi_squared_BT" in needs
                old = self._per_token(experience, partial(self._log_probs, POLICY, squares=squares))
            experience.entropy, experience.sum_pi_squared = old["entropy"], old.get("sum_pi_squared")
            if not bypasses:
                experience.old_log_probs = old["log_probs"]
        for name, column in ((REFERENCE, "ref_log_probs"), (TEACHER, "teacher_log_probs")):
            if name in self.engine_modules() or (name == REFERENCE and self.reference_is_base):
                with self._phase(column):
                    log_probs = self._per_token(experience, partial(self._log_probs, name))
                setattr(experience, column, log_probs["log_probs"])
                if "top_ids" in log_probs:
                    experience.teacher_top_ids = log_probs["top_ids"]
                    experience.teacher_top_log_probs = log_probs["top_log_probs"]

    def compute_values(self, experience: Experience) -> None:
        """Fill `values` where there is a critic."""
        if self.critic is not None:
            with self._phase("values"):
                experience.values = self._per_token(experience, lambda micro: {"values": self._values(micro)})["values"]

    def mask_old_tokens(self, experience: Experience) -> None:
        """Take out of the response mask what an older policy sampled than the schedule trains on."""
        oldest, mask_BT = self.schedule.max_token_age, experience.response_mask
        if oldest is None:
            return
        experience.response_mask = mask_BT * (self.step - experience.policy_versions <= oldest)
        counts = torch.stack([mask_BT.sum(), experience.response_mask.sum()]).double()
        there, kept = self._strategy.sum_over_ranks(counts).tolist()
        self._sampled.numbers["rollout/too_old"] = 1 - kept / max(there, 1)

    def correct_for_rollout(self, experience: Experience) -> None:
        """Importance weights and rejection for the gap between the policy that sampled and the one that is trained."""
        correction = self.algorithm.rollout_correction
        if not correction.decoupled:
            return
        policies: dict[str, Tensor] = {
            "log_probs_BT": filled(experience.old_log_probs),
            "rollout_log_probs_BT": experience.rollout_log_probs,
        }
        mask_BT = experience.response_mask
        reduce = self._strategy.sum_over_ranks
        kept_BT, weights_BT = correction.correct(**policies, response_mask_BT=mask_BT, sum_over_ranks=reduce)
        self._sampled.numbers |= {
            f"rollout/{name}": value
            for name, value in diagnostics(
                **policies,
                response_mask_BT=mask_BT,
                weights_BT=weights_BT,
                sum_over_ranks=reduce,
                max_over_ranks=self._strategy.max_over_ranks,
            ).items()
        }
        kept, there = reduce(torch.stack([kept_BT.sum(), mask_BT.sum()]).double()).tolist()
        self._sampled.numbers["rollout/rejected"] = 1 - kept / max(there, 1)
        experience.response_mask, experience.rollout_weights = kept_BT, weights_BT

    def compute_advantages(self, experience: Experience) -> None:
        """Fill `token_level_rewards`, `advantages` and `returns`."""
        with self._phase("advantages"):
            experience.token_level_rewards, experience.advantages, experience.returns = self.algorithm.advantages(
                named_tensors(experience),
                kl_coefficient=self.kl_controller.coefficient,
                sum_over_ranks=self._strategy.sum_over_ranks,
            )

    @torch.no_grad()
    def _per_token(self, experience: Experience, run: Callable[[Experience], dict[str, Tensor]]) -> dict[str, Tensor]:
        """What `run` gives for each micro-batch, [B, T, ...] for the whole experience, without gradient."""
        dtype = torch.promote_types(self.model_dtype, torch.float32)
        columns: dict[str, Tensor] = {}
        for indices in self._micro_batches(experience):
            for name, values in run(experience[indices].trimmed().to(self.device)).items():
                kind = dtype if values.is_floating_point() else values.dtype
                shape = (*experience.rollout_log_probs.shape, *values.shape[2:])
                column = columns.setdefault(name, torch.zeros(shape, dtype=kind))
                column[indices, : values.shape[1]] = values.to(column)
        return columns

    def _run(
        self, name: str, batch: Experience, *, squares: bool = False, entropy_gradient: bool = False
    ) -> ResponseLogProbs:
        wants_tops = name == TEACHER and "teacher_top_log_probs_BTK" in self.algorithm.needs
        with self.running(name) as engine:
            return response_log_probs(
                engine,
                **self.forward_inputs(batch),
                temperature=self.sampling.temperature or 1.0,
                sum_pi_squared=squares,
                entropy_gradient=entropy_gradient,
                top_k=self.algorithm.teacher_top_k if wants_tops else 0,
                # The teacher's most likely tokens, where the policy learns from them.
                tokens_BTK=batch.teacher_top_ids if name == POLICY else None,
            )

    def _log_probs(self, name: str, batch: Experience, *, squares: bool = False) -> dict[str, Tensor]:
        result = self._run(name, batch, squares=squares)
        columns = {"log_probs": result.log_probs_BT, "entropy": result.entropy_BT}
        others = {
            "sum_pi_squared": result.sum_pi_squared_BT,
            "top_ids": result.top_ids_BTK,
            "top_log_probs": result.top_log_probs_BTK,
        }
        return {**columns, **{column: values for column, values in others.items() if values is not None}}

    def _values(self, batch: Experience) -> Tensor:
        return response_values(self._strategy.engine(CRITIC), **self.forward_inputs(batch))

    # What collecting and updating share -------------------------------------------------------------------------

    @property
    def _step_seed(self) -> int:
        """Of what is chosen at random in a step, the same on every rank."""
        return self.seed * 1_000_003 + self.step

    @property
    def _updates(self) -> int:
        return self.updates_per_step * self.passes_per_step

    @property
    def _ratio_to_rollout(self) -> bool:
        """Whether ratios are those to the policies that sampled: asked for, or nothing else corrects for their age."""
        correction = self.algorithm.rollout_correction
        return correction.bypass or (self.schedule.max_staleness > 0 and not correction.decoupled)

    def _micro_batches(self, experience: Experience) -> list[Tensor]:
        return self.cutter.indices(Lengths.of(experience))


def _detail(scores: list[Score], name: str, option: str) -> list[float]:
    """A number that the reward returns beside its score; 0 where the reward failed.

    Raises:
        ConfigError: the reward does not return it.
    """
    for score in scores:
        if score.failure is None and name not in score.details:
            there = ", ".join(score.details) or "nothing"
            raise ConfigError(f"{option} names {name!r}, and the reward returns {there} beside its score")
    return [score.details.get(name, 0.0) for score in scores]
