"""Policy optimization: sample, score, compute advantages, update. One RL step is one Lightning batch.

The algorithm is an `Algorithm`; the strategy owns models, rollout engine and memory; the scorer scores.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack, override

from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.algorithms.masked import sequence_means
from rl_plugins.algorithms.policy_losses.modifiers import top_entropy_mask
from rl_plugins.data.experience import Experience
from rl_plugins.data.prompts import PromptBatch
from rl_plugins.data.tokenization import check_same_tokens
from rl_plugins.errors import ConfigError
from rl_plugins.models.lora import add_adapter
from rl_plugins.models.scalar_head import load_scalar_head
from rl_plugins.rewards.default import Reward, default_scorer
from rl_plugins.rollout.engine import SamplingConfig
from rl_plugins.stages.comparable import check_comparable
from rl_plugins.stages.critic import CriticConfig, ValueObjective, explained_variance
from rl_plugins.stages.critic_learner import CriticTraining
from rl_plugins.stages.critic_pool import CriticPool
from rl_plugins.stages.environment import EnvironmentConfig
from rl_plugins.stages.experience_maker import ExperienceMaker
from rl_plugins.stages.fields import filled, named_tensors
from rl_plugins.stages.metrics import TokenMetrics, mean_over_ranks
from rl_plugins.stages.optimizer import OptimizerConfig
from rl_plugins.stages.process_rewards import (
    PROCESS_REFERENCE,
    PROCESS_REWARD_MODEL,
    ProcessRewardConfig,
    ProcessRewards,
)
from rl_plugins.stages.prompt_source import PromptSource
from rl_plugins.stages.rollouts import Rollouts, step_seed
from rl_plugins.stages.sampling import PromptSampler, conversations_with, greedy, with_stop_token
from rl_plugins.stages.schedule import Schedule
from rl_plugins.stages.scoring import RewardModelConfig, RewardModelScorer, SampleScorer, Scorer
from rl_plugins.stages.stage import Stage, StageArguments, comes_with_adapter
from rl_plugins.stages.validation import GenerationValidation
from rl_plugins.strategies.contract import CRITIC, POLICY, REFERENCE, REWARD_MODEL, TEACHER, Strategy


class PolicyOptimization(Stage):
    """GRPO, PPO, PRIME and related algorithms.

    Attributes:
        prompts: data loader of training, since `setup`.
        rollouts: collects the samples of a step, since `setup`.
        experience: adds log-probs, values and advantages to samples, since `setup`.

    Args:
        policy: see `Stage`.
        scorer: gives each sample its reward. A reward function, or its configuration, gets `default_scorer`.
        sampling: sampling settings of training; `num_samples` is the size of a group. Without stop tokens, responses
            end at the tokenizer's end of sequence.
        algorithm: GRPO by default, PRIME with a process reward model.
        eval_sampling: sampling settings of validation; by default greedy with the same length.
        environment: bounds on conversations, if the scorer answers the policy; by default the policy answers once.
        schedule: how far sampling runs ahead of training; synchronous by default.
        reference: name or folder of the reference model, for algorithms that need it; the policy's own by default.
        teacher: name or folder of the teacher, for algorithms that need its log-probs.
        critic: settings of the critic, for algorithms that need values.
        reward_model: reward model whose score is added to the score of the scorer.
        process_reward_model: settings of the process reward model, for algorithms that need process rewards.
        updates_per_step: optimizer steps for each pass over the samples; the prompts of a step are divided among them.
        passes_per_step: passes over the samples of a step.
        seed: seed of sampling and of random choices.
        **stage: arguments of `Stage`.

    Raises:
        ConfigError: the algorithm needs a model that is not named, or options contradict each other.
    """

    policy: Any
    prompts: PromptSource
    rollouts: Rollouts
    experience: ExperienceMaker

    def __init__(
        self,
        policy: str | nn.Module,
        *,
        scorer: Scorer | Reward,
        sampling: SamplingConfig,
        algorithm: Algorithm | None = None,
        eval_sampling: SamplingConfig | None = None,
        environment: EnvironmentConfig | None = None,
        schedule: Schedule | None = None,
        reference: str | None = None,
        teacher: str | None = None,
        critic: CriticConfig | None = None,
        reward_model: RewardModelConfig | None = None,
        process_reward_model: ProcessRewardConfig | None = None,
        updates_per_step: int = 1,
        passes_per_step: int = 1,
        seed: int = 0,
        **stage: Unpack[StageArguments],
    ) -> None:
        super().__init__(policy, **stage)
        self.algorithm = algorithm or (Algorithm(advantage="prime") if process_reward_model else Algorithm())
        self.scorer: Scorer = scorer if isinstance(scorer, Scorer) else default_scorer(scorer)
        self.sampling = with_stop_token(sampling, self.tokenizer)
        self.eval_sampling = with_stop_token(eval_sampling or greedy(sampling), self.tokenizer)
        self.schedule = schedule or Schedule()
        self.updates_per_step, self.passes_per_step, self.seed = updates_per_step, passes_per_step, seed
        self._conversations = conversations_with(self.scorer, self.tokenizer, environment)
        self.kl_controller = self.algorithm.kl.controller()
        self.entropy_controller = self.algorithm.entropy.controller()
        own_path = policy if isinstance(policy, str) else None
        needs = self.algorithm.needs
        self._reference_path, self._teacher_path = reference or own_path, teacher
        self._reward_model_config = reward_model
        self.critic_config = (critic or CriticConfig()) if "values_BT" in needs else None
        self._critic_path = None if self.critic_config is None else self.critic_config.path or own_path
        self.process_reward_config = (
            (process_reward_model or ProcessRewardConfig()) if "process_rewards_BT" in needs else None
        )
        self._process_path = (process_reward_model and process_reward_model.path) or own_path
        self.reference: Any = None
        self.teacher: Any = None
        self.critic: Any = None
        self.reward_model: Any = None
        self.process_reward_model: Any = None
        self.process_reference: Any = None
        self._first_slot = 0
        self._check(process_reward_model, has_reference=self._reference_path is not None or comes_with_adapter(policy))

    def _check(self, process_reward_model: ProcessRewardConfig | None, *, has_reference: bool) -> None:
        group_filter = self.algorithm.group_filter
        if self.schedule.active and group_filter is not None and group_filter.oversampling > 1:
            raise ConfigError(
                f"algorithm.group_filter.oversampling={group_filter.oversampling} cannot be combined with "
                "schedule.max_staleness or schedule.ahead, because the schedule already keeps extra groups in flight. "
                "Set oversampling=1"
            )
        check_comparable(self.algorithm, self.schedule, self.sampling)
        if process_reward_model is not None and "process_rewards_BT" not in self.algorithm.needs:
            raise ConfigError(
                f"algorithm.advantage={self.algorithm.advantage!r} does not use process rewards: choose "
                "algorithm=prime, or an advantage that takes process_rewards_BT"
            )
        for needed, available, model in (
            ("ref_log_probs_BT", has_reference, "reference model with reference=..."),
            ("teacher_log_probs_BT", self._teacher_path, "teacher with teacher=..."),
            ("teacher_top_log_probs_BTK", self._teacher_path, "teacher with teacher=..."),
            ("values_BT", self._critic_path, "model that the critic starts from with critic=CriticConfig(path=...)"),
            (
                "process_rewards_BT",
                self._process_path,
                "process reward model with process_reward_model=ProcessRewardConfig(path=...)",
            ),
        ):
            if needed in self.algorithm.needs and not available:
                raise ConfigError(f"the algorithm needs {needed}: name the {model}")

    # Parts and models -------------------------------------------------------------------------------------------

    @override
    def make_parts(self, strategy: Strategy) -> None:
        super().make_parts(strategy)
        self.passes = replace(
            self.passes,
            temperature=self.sampling.temperature or 1.0,
            teacher_top_k=self.algorithm.teacher_top_k if "teacher_top_log_probs_BTK" in self.algorithm.needs else 0,
        )
        self.prompts = PromptSource(lambda: self.trainer.train_dataloader, strategy.ranks)
        sampler = PromptSampler(strategy, self.tokenizer, self.seed, self._conversations)
        scorer = SampleScorer(self.scorer, self._conversations, strategy.phases)
        reward_model = None
        if self._reward_model_config is not None:
            reward_model = RewardModelScorer(self._reward_model_config, self.passes)
        self.rollouts = Rollouts(
            sampler,
            scorer,
            self.algorithm,
            self.sampling,
            self.schedule,
            reward_model=reward_model,
            updates_per_step=self.updates_per_step,
            max_steps=self.max_steps,
            first_slot=self._first_slot,
            draw=self.prompts.draw,
            shown=self.shown_samples,
        )
        process_rewards = None
        if self.process_reward_config is not None:
            process_rewards = ProcessRewards(
                self.process_reward_config, self.passes, self.optimize, self.updates_per_step
            )
        self.experience = ExperienceMaker(
            self.algorithm,
            self.passes,
            self.schedule,
            self.kl_controller,
            updates=self._updates,
            has_critic=self.critic_config is not None,
            process_rewards=process_rewards,
        )
        self.validation = GenerationValidation(sampler, scorer, self.eval_sampling)

    @override
    def configure_model(self) -> None:
        if isinstance(self.critic, CriticPool):
            # The critic's processes start while models are loaded here.
            self.critic.begin(self._critic_training, self.strategy.ranks.gather)
        super().configure_model()
        needs = self.algorithm.needs
        if "ref_log_probs_BT" in needs and self.reference is None:
            self.reference = self.load_reference(self._reference_path)
        if needs & {"teacher_log_probs_BT", "teacher_top_log_probs_BTK"} and self.teacher is None:
            check_same_tokens(self.tokenizer, str(self._teacher_path), "teacher")
            self.teacher = self.load_model(str(self._teacher_path), TEACHER)
        if self.critic_config is not None and self.critic is None:
            critic = self._load_scalar_head(str(self._critic_path), new_head=True)
            lora = self.critic_config.lora
            self.critic = critic if lora is None else add_adapter(critic, lora)
        if self._reward_model_config is not None and self.reward_model is None:
            path = self._reward_model_config.path
            check_same_tokens(self.tokenizer, path, "reward model")
            # A new head would score everything 0.
            self.reward_model = self._load_scalar_head(path, new_head=False, frozen=REWARD_MODEL)
        if self.process_reward_config is not None and self.process_reward_model is None:
            path = str(self._process_path)
            check_same_tokens(self.tokenizer, path, "process reward model")
            self.process_reward_model = self.load_model(path)
            self.process_reference = self.load_model(path, PROCESS_REFERENCE)

    def _load_scalar_head(self, path: str, *, new_head: bool, frozen: str | None = None) -> nn.Module:
        with self.sharded_init(frozen):
            return load_scalar_head(
                path, dtype=self.model_dtype, gradient_checkpointing=self._gradient_checkpointing, new_head=new_head
            )

    @override
    def named_models(self) -> dict[str, nn.Module]:
        others = {
            CRITIC: self.critic,
            REFERENCE: self.reference,
            TEACHER: self.teacher,
            REWARD_MODEL: self.reward_model,
            PROCESS_REWARD_MODEL: self.process_reward_model,
            PROCESS_REFERENCE: self.process_reference,
        }
        return {**super().named_models(), **{name: model for name, model in others.items() if model is not None}}

    @override
    def optimizer_configs(self) -> dict[str, OptimizerConfig]:
        configs = super().optimizer_configs()
        if self.critic_config is not None and not isinstance(self.critic, CriticPool):
            configs[CRITIC] = self.critic_config.optimizer
        if self.process_reward_config is not None:
            configs[PROCESS_REWARD_MODEL] = self.process_reward_config.optimizer
        return configs

    @property
    def _critic_training(self) -> CriticTraining:
        """Task of processes that hold the critic."""
        if self.critic_config is None or self._critic_path is None:
            raise ConfigError("the algorithm needs no values: leave the critic's pool out")
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

    @property
    def _value_objective(self) -> ValueObjective:
        algorithm = self.algorithm
        return ValueObjective(algorithm.value_clip, algorithm.aggregation, algorithm.scale_factor, self._updates)

    # The step ---------------------------------------------------------------------------------------------------

    @override
    def training_step(self, prompts: PromptBatch, batch_idx: int) -> None:
        start = time.perf_counter()
        samples = self.rollouts.collect(prompts, self.step)
        batch = self.experience.make(samples, self.step)
        metrics = self.update(batch)
        seconds = time.perf_counter() - start
        metrics |= {f"train/{name}": value for name, value in self.experience.metrics.items()}
        metrics |= self.rollouts.metrics(batch, self.step, seconds)
        self.end_step(metrics | self.prompts.report(self.rollouts.sampled))

    def update(self, batch: Experience) -> dict[str, float]:
        """Take the optimizer steps of a step; return its metrics, averaged over all ranks."""
        tokens = TokenMetrics()
        policy_learns = self.critic_config is None or self.step >= self.critic_config.warmup_steps
        for number, mini_batch in enumerate(self._mini_batches(batch), 1):
            if self.critic_config is not None:
                with self.strategy.phases.measure("update_critic"):
                    self._update_critic(mini_batch, tokens, last=number == self._updates)
            if policy_learns:
                with self.strategy.phases.measure("update_policy"):
                    self._choose_tokens(mini_batch)
                    self.optimize(self._policy_losses(mini_batch, tokens, first=number == 1))
        if not policy_learns:
            # The next samples carry the version of this step, though the weights have not changed.
            self.strategy.rollout.weights_changed()
        metrics = tokens.averages(self.strategy.ranks.sum, self.strategy.ranks.max)
        if isinstance(self.critic, CriticPool):
            # The critic has learnt while the policy learnt.
            with self.strategy.phases.measure("update_critic"):
                metrics |= self.critic.learnt()
        return metrics | self._adapt(batch, metrics)

    @property
    def _updates(self) -> int:
        return self.updates_per_step * self.passes_per_step

    def _mini_batches(self, batch: Experience) -> Iterator[Experience]:
        """Divide the prompts of the step among the optimizer steps.

        Ranks hold prompts in turn, so a mini-batch is the same set of prompts for any number of ranks.
        """
        if batch.shape[0] % (self.updates_per_step * self.sampling.num_samples):
            prompts = batch.shape[0] // self.sampling.num_samples
            raise ConfigError(
                f"updates_per_step={self.updates_per_step} does not divide the {prompts} prompts of a rank: "
                "change updates_per_step or prompts_per_step"
            )
        for _ in range(self.passes_per_step):
            yield from batch.chunk(self.updates_per_step)

    def _choose_tokens(self, mini_batch: Experience) -> None:
        """Fill `loss_mask` and `selected`, which depend on the whole mini-batch of all ranks."""
        modifiers, num_samples = self.algorithm.modifiers, self.sampling.num_samples
        if modifiers.top_entropy is not None:
            mini_batch.loss_mask = top_entropy_mask(
                entropy_BT=filled(mini_batch.entropy),
                response_mask_BT=mini_batch.response_mask,
                share=modifiers.top_entropy,
                gather_over_ranks=self._gather,
            )
        ids_B = mini_batch.groups * num_samples + torch.arange(len(mini_batch)) % num_samples
        mini_batch.selected = self.algorithm.select(
            {**named_tensors(mini_batch), "log_probs_BT": mini_batch.old_log_probs, "ids_B": ids_B},
            seed=step_seed(self.seed, self.step),
            sum_over_ranks=self.strategy.ranks.sum,
            gather_over_ranks=self._gather,
        )

    def _gather(self, values_N: Tensor) -> Tensor:
        return torch.cat(self.strategy.ranks.gather(values_N))

    def _policy_losses(
        self, mini_batch: Experience, metrics: TokenMetrics, *, first: bool
    ) -> Iterator[tuple[Tensor, bool]]:
        world_size = self.strategy.ranks.world_size
        ratio_to_rollout = self.experience.ratio_to_rollout
        # In the first update the policy is the old policy, and the ratio is 1.
        is_old = first and not ratio_to_rollout
        counts, positive_counts = self.passes.counts(mini_batch.response_mask), None
        if self.algorithm.modifiers.positive_nll:
            positive_B = self.algorithm.is_positive(filled(mini_batch.scores))
            positive_counts = self.passes.counts(mini_batch.response_mask * positive_B[:, None])
        micro_batches = self.passes.micro_batches(mini_batch)
        for position, indices in enumerate(micro_batches):
            micro = mini_batch[indices].trimmed().to(self.passes.device)
            current = self.passes.log_probs(POLICY, micro, entropy_gradient=self.algorithm.entropy.active)
            old_BT = current.log_probs_BT.detach() if is_old else filled(micro.old_log_probs)
            tensors = {
                **named_tensors(micro),
                "log_probs_BT": current.log_probs_BT,
                "old_log_probs_BT": old_BT,
                "entropy_BT": current.entropy_BT,
                "top_log_probs_BTK": current.log_probs_BTK,
            }
            loss, values = self.algorithm.loss(
                tensors,
                kl_coefficient=self.kl_controller.coefficient,
                entropy_coefficient=self.entropy_controller.coefficient,
                counts=counts,
                positive_counts=positive_counts,
            )
            has_old_log_probs = self._updates > 1 and not ratio_to_rollout
            before_BT = old_BT if has_old_log_probs else current.log_probs_BT.detach()
            gap = (before_BT - micro.rollout_log_probs).abs()
            metrics.add_each({**values, "entropy": current.entropy_BT}, micro.response_mask)
            metrics.add({"rollout_gap": gap}, micro.response_mask, maximum=True)
            # DeepSpeed averages gradients over ranks, so the loss of a rank is scaled up by their number.
            metrics.add_sum("loss", loss.detach() / (world_size * self._updates))
            yield loss, position == len(micro_batches) - 1

    def _update_critic(self, mini_batch: Experience, metrics: TokenMetrics, *, last: bool) -> None:
        counts = self.passes.counts(mini_batch.response_mask)
        if isinstance(self.critic, CriticPool):
            self.critic.learn(mini_batch, counts, last=last)
            return
        losses = self._value_objective.losses(
            mini_batch,
            self.passes.micro_batches(mini_batch),
            self.passes.values,
            counts,
            metrics,
            self.passes.device,
        )
        self.optimize(losses, CRITIC)

    def _adapt(self, batch: Experience, metrics: Mapping[str, float]) -> dict[str, float]:
        """Update the controllers; return their coefficients and the critic's explained variance."""
        ranks, mask_BT = self.strategy.ranks, batch.response_mask
        adapted: dict[str, float] = {}
        if self.algorithm.kl_is_in_reward:
            kl_B = sequence_means(
                self.algorithm.kl_to_reference(filled(batch.old_log_probs), filled(batch.ref_log_probs), mask_BT),
                mask_BT,
            )
            adapted |= mean_over_ranks({"train/kl": (kl_B, mask_BT.bool().any(dim=-1))}, ranks.sum)
        kl = {**metrics, **adapted}.get("train/kl")
        if kl is not None:
            self.kl_controller.update(kl, batch.shape[0] * ranks.world_size)
            adapted["train/kl_coefficient"] = self.kl_controller.coefficient
        if self.algorithm.entropy.active and "train/entropy" in metrics:
            self.entropy_controller.update(metrics["train/entropy"])
            adapted["train/entropy_coefficient"] = self.entropy_controller.coefficient
        if self.critic is not None:
            adapted["train/critic/explained_variance"] = explained_variance(
                filled(batch.values), filled(batch.returns), mask_BT, ranks.sum
            )
        return adapted

    # State ------------------------------------------------------------------------------------------------------

    def rank_share(self) -> list[dict[str, Any]] | None:
        """Return this rank's groups of later steps, for a checkpoint."""
        return self.rollouts.ahead.state()

    def load_rank_shares(self, shares: Sequence[Any], *, own: bool) -> str:
        """Restore the groups of a checkpoint; return their number in words; see `TrajectoryQueue.load`."""
        return self.rollouts.ahead.load_state(shares, own=own)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["stage"]["slots"] = self.rollouts.ahead.slots
        checkpoint["stage"]["kl_controller"] = self.kl_controller.state_dict()
        checkpoint["stage"]["entropy_controller"] = self.entropy_controller.state_dict()

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self._first_slot = checkpoint["stage"]["slots"]
        if self._parts_of is not None:
            self.rollouts.ahead.roll_back(self._first_slot)
        self.kl_controller.load_state_dict(checkpoint["stage"]["kl_controller"])
        self.entropy_controller.load_state_dict(checkpoint["stage"]["entropy_controller"])
