"""Policy optimization: sample, score, compute advantages, update. One RL step is one Lightning batch.

The algorithm is an `Algorithm`; the strategy owns models, rollout engine and memory; the scorer scores.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from typing_extensions import Unpack, override

from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.algorithms.regularization import Coefficient
from rl_plugins.config.models import CriticConfig, OptimizerConfig, RewardModelConfig, TeacherConfig
from rl_plugins.config.sampling import SamplingConfig, Schedule
from rl_plugins.data.experience import Experience
from rl_plugins.data.loaders import PromptSource
from rl_plugins.data.prompts import PromptBatch, foreign_batch
from rl_plugins.data.tokenization import check_same_tokens
from rl_plugins.errors import CheckpointError, ConfigError
from rl_plugins.models.dropout import turn_off_dropout
from rl_plugins.models.loading import options_for
from rl_plugins.models.lora import with_adapter
from rl_plugins.models.scalar_head import load_scalar_head
from rl_plugins.rewards.inline import Reward
from rl_plugins.router_replay import RouterReplay
from rl_plugins.stages.arguments import StageArguments
from rl_plugins.stages.critic_pool import CriticPool
from rl_plugins.stages.critic_training import CriticTraining, value_objective
from rl_plugins.stages.critics import Critic
from rl_plugins.stages.experience_maker import ExperienceMaker
from rl_plugins.stages.metrics import LearningSignal
from rl_plugins.stages.model_inputs import MODEL_INPUTS, check_model_inputs
from rl_plugins.stages.off_policy import check_comparable, check_recomputed_routes
from rl_plugins.stages.own_module import check_max_tokens
from rl_plugins.stages.policy_learner import PolicyLearner
from rl_plugins.stages.process_rewards import (
    PROCESS_REFERENCE,
    PROCESS_REWARD_MODEL,
    ProcessRewardConfig,
    ProcessRewards,
)
from rl_plugins.stages.rollouts import ModelScorer, Rollouts
from rl_plugins.stages.sampling import AnyEnvironment, SamplingSetup, Scorer, greedy, with_stop_token
from rl_plugins.stages.stage import Stage
from rl_plugins.stages.teachers import make_teachers
from rl_plugins.strategies.contract import (
    COST_CRITIC,
    COST_MODEL,
    CRITIC,
    POLICY,
    REFERENCE,
    REWARD_MODEL,
    TEACHER,
    Strategy,
)
from rl_plugins.vision_language import with_frozen_tower


class PolicyOptimization(Stage):
    """GRPO, PPO, PRIME, Safe RLHF and related algorithms.

    Attributes:
        prompt_source: prompts of the training data, since `setup`.
        rollouts: collects the samples of a step, since `setup`.
        experience_maker: adds log-probs, values and advantages to samples, since `setup`.
        updates: number of optimizer steps of an RL step.
        router_replay: replay of the policy's routes; None without replay.
        learner: updates policy and critics, since `setup`.

    Args:
        policy: see `Stage`.
        scorer: gives each sample its reward. A reward function, or its configuration, gets `default_scorer`. Left out
            with a stateful environment or an agent, which return the reward.
        sampling: sampling settings of training; `num_samples` is the size of a group. Without stop tokens, responses
            end at the tokenizer's end of sequence.
        algorithm: GRPO by default, PRIME with a process reward model.
        eval_sampling: sampling settings of validation; by default greedy with the same length.
        environment: tools, a stateful environment, an agent, or bounds on conversations if the scorer answers the
            policy; by default the policy answers once.
        schedule: how far sampling runs ahead of training; synchronous by default.
        reference: name or folder of the reference model, for algorithms that need it; the policy's own by default.
        teacher: name or folder of the teacher, or settings of several teachers or of a teacher that follows the policy,
            for algorithms that need its log-probs.
        critic: settings of the critic, for algorithms that need values.
        reward_model: reward model whose score is added to the score of the scorer.
        cost_critic: settings of the critic of the costs, for algorithms that need values and bound the mean cost.
        cost_model: cost model whose score is added to the cost of the scorer, for algorithms with a bound on the cost.
        process_reward_model: settings of the process reward model, for algorithms that need process rewards.
        updates_per_step: optimizer steps of one pass over the samples, among which the prompts of a step are divided.
            A step has `updates_per_step * passes_per_step` optimizer steps.
        passes_per_step: passes over the samples of a step.
        router_replay: in a mixture of experts, the experts of the tokens in the updates: `recompute` for the experts
            that computed the old log-probs, `rollout` for the experts of the rollout engine, in all passes of the
            policy; see `RouterReplay`. The metric `train/router_differing` is the share of these experts that the
            routers would have replaced.
        seed: seed of sampling and of random choices.
        **stage: arguments of `Stage`.

    Raises:
        ConfigError: the algorithm needs a model that is not named, or options contradict each other.
    """

    compares_log_probs = True

    policy: Any
    prompt_source: PromptSource
    rollouts: Rollouts
    experience_maker: ExperienceMaker
    learner: PolicyLearner

    def __init__(
        self,
        policy: str | nn.Module,
        *,
        scorer: Scorer | Reward | None = None,
        sampling: SamplingConfig,
        algorithm: Algorithm | None = None,
        eval_sampling: SamplingConfig | None = None,
        environment: AnyEnvironment | None = None,
        schedule: Schedule | None = None,
        reference: str | None = None,
        teacher: str | TeacherConfig | None = None,
        critic: CriticConfig | None = None,
        reward_model: RewardModelConfig | None = None,
        cost_critic: CriticConfig | None = None,
        cost_model: RewardModelConfig | None = None,
        process_reward_model: ProcessRewardConfig | None = None,
        updates_per_step: int = 1,
        passes_per_step: int = 1,
        router_replay: str | None = None,
        seed: int = 0,
        **stage: Unpack[StageArguments],
    ) -> None:
        for name, value, kind in (("sampling", sampling, SamplingConfig), ("algorithm", algorithm, Algorithm)):
            if not isinstance(value, kind | None):
                raise ConfigError(f"{name}={value!r}: pass rl.{kind.__name__}(...)")
        super().__init__(policy, **stage)
        self.algorithm = algorithm or (Algorithm(advantage="prime") if process_reward_model else Algorithm())
        self.sampling = with_stop_token(sampling, self.tokenizer)
        eval_sampling = eval_sampling or greedy(sampling)
        check_max_tokens(policy, sampling, eval_sampling)
        self.sampling_setup = SamplingSetup(scorer, self.tokenizer, eval_sampling, environment, seed)
        self.schedule = schedule or Schedule()
        self.updates_per_step, self.passes_per_step, self.seed = updates_per_step, passes_per_step, seed
        self.updates = updates_per_step * passes_per_step
        self.router_replay = RouterReplay(router_replay) if router_replay else None
        self.kl_controller = Coefficient(self.algorithm.kl)
        self.entropy_controller = Coefficient(self.algorithm.entropy)
        constraint = self.algorithm.constraint
        self.multiplier = None if constraint is None else constraint.multiplier()
        needs = self.algorithm.needs
        if "ref_log_probs_BT" in needs:
            self.add_reference(reference)
        self.teacher_config = teacher if isinstance(teacher, TeacherConfig) else TeacherConfig(teacher)
        teacher_path = self.teacher_config.path or (self.own_model.path if self.teacher_config.update_every else None)
        self._teacher_paths: list[str | None] = [*self.teacher_config.paths.values()] or [teacher_path]
        scoring = {REWARD_MODEL: reward_model, COST_MODEL: cost_model}
        self.scoring_configs = {name: config for name, config in scoring.items() if config is not None}
        critics = {CRITIC: critic or CriticConfig(), COST_CRITIC: cost_critic or CriticConfig()}
        # Critics with their paths: None if neither the settings nor the policy have one.
        self.critic_configs = {
            name: replace(config, path=config.path or self.own_model.path)
            for name, config in critics.items()
            if MODEL_INPUTS[name] & needs
        }
        for name, config in self.critic_configs.items():
            if config.lora.rank and config.lora.dropout:
                raise ConfigError(
                    f"{name}.lora.dropout={config.lora.dropout:g}: the loss compares values of two passes, and dropout "
                    f"would change both: leave {name}.lora.dropout out"
                )
        self.process_reward_config = (
            (process_reward_model or ProcessRewardConfig()) if "process_rewards_BT" in needs else None
        )
        self._process_path = (process_reward_model and process_reward_model.path) or self.own_model.path
        # A list of the models, or the pool of the only teacher.
        self.teacher: Any = None
        self.critic: Any = None
        self.cost_critic: Any = None
        self.reward_model: Any = None
        self.cost_model: Any = None
        self.process_reward_model: Any = None
        self.process_reference: Any = None
        self._loaded_batches = 0
        self._signal = LearningSignal()
        self._check(has_process_rewards=process_reward_model is not None)

    def _check(self, *, has_process_rewards: bool) -> None:
        chosen = {*self.scoring_configs, *({PROCESS_REWARD_MODEL} if has_process_rewards else ())}
        available = {
            REFERENCE: self._has_reference,
            TEACHER: all(self._teacher_paths),
            **{name: config.path for name, config in self.critic_configs.items()},
            COST_MODEL: COST_MODEL in self.scoring_configs,
            PROCESS_REWARD_MODEL: self._process_path,
        }
        check_model_inputs(
            self.algorithm,
            self.schedule,
            chosen=chosen,
            available={name for name, is_available in available.items() if is_available},
        )
        check_comparable(self.algorithm, self.schedule, self.sampling)
        if self.sampling.num_samples == 1 and self.algorithm.advantage == "grpo":
            rank_zero_warn(
                "num_samples=1: GRPO compares the samples of a prompt, and the advantage of a single sample is its "
                "score, never below 0 for scores from 0 to 1: set SamplingConfig(num_samples=8)"
            )
        if reshaping := self.sampling.reshaping:
            rank_zero_warn(
                f"sampling with {', '.join(reshaping)}: the loss uses the whole distribution of the policy, so samples "
                "come from another distribution (train/rollout_gap)"
            )
        if self.router_replay is not None and self.router_replay.source == "recompute":
            check_recomputed_routes(self.algorithm, self.schedule, self.updates)

    # Parts and models -------------------------------------------------------------------------------------------

    @override
    def make_parts(self, strategy: Strategy) -> None:
        super().make_parts(strategy)
        self.passes = replace(
            self.passes,
            temperature=self.sampling.temperature or 1.0,
            router_replay=self.router_replay,
        )
        self.prompt_source = PromptSource(lambda: self.trainer.train_dataloader, strategy.ranks)
        fields = {REWARD_MODEL: "scores", COST_MODEL: "costs"}
        critics = [
            Critic(
                name,
                config,
                value_objective(self.algorithm, self.updates, name),
                self.passes,
                self.optimize,
                partial(getattr, self, name),
            )
            for name, config in self.critic_configs.items()
        ]
        self.rollouts = Rollouts(
            self._sampler,
            self._scorer,
            self.algorithm,
            self.sampling,
            self.schedule,
            models=[
                ModelScorer(name, fields[name], config, self.passes) for name, config in self.scoring_configs.items()
            ],
            updates_per_step=self.updates_per_step,
            max_steps=self.max_steps,
            draw=self.prompt_source.draw,
            shown=self.shown_samples,
        )
        # A checkpoint may have been loaded before these parts were made.
        self.rollouts.scheduled_sampler.restart_groups(self._loaded_batches)
        process_rewards = None
        if self.process_reward_config is not None:
            process_rewards = ProcessRewards(
                self.process_reward_config, self.passes, self.optimize, self.updates_per_step
            )
        self.experience_maker = ExperienceMaker(
            self.algorithm,
            self.passes,
            self.schedule,
            self.kl_controller,
            updates=self.updates,
            critics=critics,
            multiplier=self.multiplier,
            process_rewards=process_rewards,
            teachers=make_teachers(self.teacher_config, self.algorithm, self.passes),
        )
        self.learner = PolicyLearner(
            self.algorithm,
            self.passes,
            self.optimize,
            critics,
            schedule=self.schedule,
            num_samples=self.sampling.num_samples,
            updates_per_step=self.updates_per_step,
            passes_per_step=self.passes_per_step,
            seed=self.seed,
            kl_controller=self.kl_controller,
            entropy_controller=self.entropy_controller,
        )

    @override
    def configure_model(self) -> None:
        for name in (CRITIC, COST_CRITIC):
            pool = getattr(self, name)
            if isinstance(pool, CriticPool):
                # The critic's processes start while models are loaded here.
                pool.begin(self._critic_training(name), self.strategy.ranks.gather)
        super().configure_model()
        if self.router_replay is not None:
            self.router_replay.install(self.policy)
        trust = {"trust_remote_code": self.loading["trust_remote_code"]}
        if self.algorithm.needs & MODEL_INPUTS[TEACHER] and self.teacher is None:
            self.teacher = nn.ModuleList()
            for name, path in zip(self.teacher_config.models.values(), map(str, self._teacher_paths), strict=True):
                check_same_tokens(self.tokenizer, path, "teacher", **trust)
                self.teacher.append(self.load_model(path, name))
        for name, critic_config in self.critic_configs.items():
            if getattr(self, name) is None:
                critic = self._load_scalar_head(str(critic_config.path), new_head=True)
                critic = with_adapter(critic, critic_config.lora)
                turn_off_dropout(critic)
                setattr(self, name, with_frozen_tower(critic, critic_config.optimizer.vision_lr))
        for name, config in self.scoring_configs.items():
            if getattr(self, name) is None:
                path = str(config.path)
                check_same_tokens(self.tokenizer, path, name.replace("_", " "), **trust)
                # A new head would score everything 0.
                setattr(self, name, self._load_scalar_head(path, new_head=False, frozen=name))
        if self.process_reward_config is not None and self.process_reward_model is None:
            path = str(self._process_path)
            check_same_tokens(self.tokenizer, path, "process reward model", **trust)
            vision_lr = self.process_reward_config.optimizer.vision_lr
            self.process_reward_model = with_frozen_tower(self.load_model(path), vision_lr)
            self.process_reference = self.load_model(path, PROCESS_REFERENCE)

    def _load_scalar_head(self, path: str, *, new_head: bool, frozen: str | None = None) -> nn.Module:
        with self.strategy.sharded_init(frozen):
            options = options_for(frozen, self.loading)
            return load_scalar_head(path, dtype=self.model_dtype, new_head=new_head, **options)

    @override
    def named_models(self) -> dict[str, nn.Module]:
        teachers = self.teacher if isinstance(self.teacher, nn.ModuleList) else [self.teacher]
        others = {
            CRITIC: self.critic,
            COST_CRITIC: self.cost_critic,
            REFERENCE: self.reference,
            **dict(zip(self.teacher_config.models.values(), teachers, strict=False)),
            REWARD_MODEL: self.reward_model,
            COST_MODEL: self.cost_model,
            PROCESS_REWARD_MODEL: self.process_reward_model,
            PROCESS_REFERENCE: self.process_reference,
        }
        return {POLICY: self.policy, **{name: model for name, model in others.items() if model is not None}}

    @property
    @override
    def optimizer_steps(self) -> int | None:
        configs = self.optimizer_configs()
        if any(config.warmup_steps for name, config in self.critic_configs.items() if name in configs):
            return None
        of_process_model = self.updates_per_step - self.updates if PROCESS_REWARD_MODEL in configs else 0
        return self.updates * len(configs) + of_process_model

    @override
    def optimizer_configs(self) -> dict[str, OptimizerConfig]:
        configs = super().optimizer_configs()
        for name, config in self.critic_configs.items():
            if not isinstance(getattr(self, name), CriticPool):
                configs[name] = config.optimizer
        if self.process_reward_config is not None:
            configs[PROCESS_REWARD_MODEL] = self.process_reward_config.optimizer
        return configs

    def _critic_training(self, name: str) -> CriticTraining:
        """Return the task of a critic's processes."""
        config = self.critic_configs.get(name)
        if config is None:
            raise ConfigError(f"the algorithm needs no values of the {name.replace('_', ' ')}: leave its pool out")
        return CriticTraining(
            path=str(config.path),
            config=config,
            gradient_clip=config.optimizer.gradient_clip if (bound := self.flags.gradient_clip) is None else bound,
            objective=value_objective(self.algorithm, self.updates, name),
            computes_in=self.model_dtype,
            loading=self.loading,
            tokens_per_micro_batch=self.tokens_per_micro_batch,
            packing=self.packing,
            seed=self.seed,
            patches_per_micro_batch=self.patches_per_micro_batch,
        )

    # The step ---------------------------------------------------------------------------------------------------

    @override
    def training_step(self, prompts: PromptBatch, batch_idx: int) -> None:
        """Take one RL step. The next rollout phase sends the new weights to the rollout engine."""
        if not isinstance(prompts, PromptBatch):
            raise foreign_batch(prompts, "PromptDataModule")
        start = time.perf_counter()
        samples = self.rollouts.collect(prompts, self.step)
        batch = self.experience_maker.make(samples, self.step)
        metrics = self.update(batch)
        seconds = time.perf_counter() - start
        metrics |= {f"train/{name}": value for name, value in self.experience_maker.metrics.items()}
        metrics |= self.rollouts.metrics(batch, self.step, seconds)
        self.end_step(metrics | self.prompt_source.update_curriculum(self.rollouts.sample_metrics.group_results()))
        self._signal.check(self.strategy.gradient_norm(POLICY), metrics)

    def update(self, batch: Experience) -> dict[str, float]:
        """Take the optimizer steps of an RL step; return its metrics, averaged over all ranks."""
        return self.learner.update(batch, self.step)

    # State ------------------------------------------------------------------------------------------------------

    def rank_share(self) -> list[dict[str, Any]] | None:
        """Return this rank's groups of later steps, for a checkpoint."""
        return self.rollouts.scheduled_sampler.state()

    def load_rank_shares(self, shares: Sequence[Any], *, same_world_size: bool) -> str:
        """Restore the groups of a checkpoint; return the number in words; see `GroupQueue.load`."""
        return self.rollouts.scheduled_sampler.load_state(shares, same_world_size=same_world_size)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["stage"]["num_batches"] = self.rollouts.scheduled_sampler.num_batches
        checkpoint["stage"]["kl_controller"] = self.kl_controller.state_dict()
        checkpoint["stage"]["entropy_controller"] = self.entropy_controller.state_dict()
        if self.multiplier is not None:
            checkpoint["stage"]["multiplier"] = self.multiplier.state_dict()

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self._loaded_batches = checkpoint["stage"]["num_batches"]
        if self._strategy_of_parts is not None:
            self.rollouts.scheduled_sampler.restart_groups(self._loaded_batches)
        self.kl_controller.load_state_dict(checkpoint["stage"]["kl_controller"])
        self.entropy_controller.load_state_dict(checkpoint["stage"]["entropy_controller"])
        if self.multiplier is not None:
            if "multiplier" not in checkpoint["stage"]:
                raise CheckpointError(
                    "the checkpoint is of a run without a bound on the mean cost (algorithm.constraint): resume with "
                    "the algorithm of the checkpoint"
                )
            self.multiplier.load_state_dict(checkpoint["stage"]["multiplier"])
