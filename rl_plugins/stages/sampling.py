"""Sampling of responses to prompts with the policy's current weights, and scores of the responses."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable
from weakref import WeakMethod

import torch
from torch import Tensor

from rl_plugins.config.sampling import EnvironmentConfig, SamplingConfig
from rl_plugins.data.experience import ROUTED_EXPERTS, Experience
from rl_plugins.data.images import IMAGE_FAULT, IMAGE_INPUTS, PROMPT_IMAGES, inputs_of, thumbnail
from rl_plugins.data.prompts import PromptBatch
from rl_plugins.environments.agent import AgentEnvironment
from rl_plugins.environments.object_conversations import StatefulConversations
from rl_plugins.environments.stateful import StatefulEnvironment
from rl_plugins.environments.tools import ToolEnvironment
from rl_plugins.errors import ConfigError, EngineLost, RewardError
from rl_plugins.rewards.conversations import Conversations, Opening
from rl_plugins.rewards.inline import Reward, default_scorer
from rl_plugins.rewards.records import Score, ScoringRequest, failed, for_tokens, scoring_request
from rl_plugins.rewards.replies import ReplyingReward
from rl_plugins.rewards.trajectory import Ending
from rl_plugins.rollout.engine import (
    Generations,
    GroupRequest,
    GroupSampler,
    RolloutEngine,
    padded_routes,
    sample_seed,
)
from rl_plugins.stages.turns import sequences, timed_turns
from rl_plugins.strategies.contract import Strategy
from rl_plugins.strategies.phase_log import PhaseLog

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


AnyEnvironment = EnvironmentConfig | ToolEnvironment | StatefulEnvironment | AgentEnvironment
"""Environments of a stage."""


@dataclass
class ShownSamples:
    """Samples for callbacks to show, as rows of a table.

    Attributes:
        limit: number of kept samples of a training step on each rank.
        training: samples of the last training step.
        validation: samples of the last validation.
    """

    limit: int = 0
    training: list[dict[str, Any]] = field(default_factory=list)
    validation: list[dict[str, Any]] = field(default_factory=list)

    def show_training(self, samples: Experience, scores: Sequence[Score], prompts: PromptBatch) -> None:
        """Keep the first `limit` samples of a training step, with the further numbers of their rewards."""
        if self.limit:
            rows = sample_rows(samples, scores, prompts, self.limit)
            shown = zip(rows[: self.limit], scores, strict=False)
            self.training = [{**row, "rewards": dict(score.details)} for row, score in shown]


@dataclass(frozen=True)
class PromptSampler:
    """Samples responses of the policy, alone or in conversations with an environment.

    Attributes:
        strategy: owner of the rollout engine.
        tokenizer: tokenizer of the policy.
        seed: seed of the run. The seed of a sample depends on this seed, the prompt, and the step (`sample`) or the
            number of the prompt's batch (`ScheduledSampler`); it does not depend on the rank.
        conversations: conversations with the environment; None if the policy answers once.
    """

    strategy: Strategy
    tokenizer: PreTrainedTokenizerBase
    seed: int
    conversations: Conversations | None = None

    def sample(
        self, prompts: PromptBatch, sampling: SamplingConfig, step: int, seeds: list[int] | None = None
    ) -> Experience:
        """Sample responses to this rank's prompts. Collective.

        Policy optimization has `ScheduledSampler` for its training samples, which may sample ahead. Online preference
        optimization and validation use this function.

        Args:
            prompts: at least one prompt.
            sampling: sampling settings, equal on all ranks.
            step: step of the stage, which is also the version of the policy.
            seeds: seed of each prompt; None takes new seeds in each step.
        """
        seeds = seeds or [sample_seed(self.seed, step, row) for row in prompts.rows]
        generations = self.generate(prompts, sampling, seeds, step)
        return self.experience(prompts, generations, sampling.num_samples, prompts.rows)

    def generate(self, prompts: PromptBatch, sampling: SamplingConfig, seeds: list[int], step: int) -> Generations:
        """Sample responses to this rank's prompts, which may be none, with one seed for each prompt. Collective."""
        if self.conversations is None and PROMPT_IMAGES not in prompts.columns:
            return self.strategy.rollout_phases.run_sampling(
                step, lambda engine: engine.generate(prompts.prompt_ids, sampling, seeds)
            )
        # The tickets of groups ahead are not negative.
        requests = [self.request(-1 - place, prompts, place, seed) for place, seed in enumerate(seeds)]
        unsent, again, found = [requests], set[int](), dict[int, Generations]()

        def converse(engine: RolloutEngine) -> Generations:
            groups = self.group_sampler(engine)
            while unsent:
                groups.submit(unsent.pop(), sampling)
            again.update(groups.lost_tickets({request.ticket for request in requests}))
            if again:
                lost = [request for request in requests if request.ticket in again]
                again.clear()
                groups.submit(lost, sampling, together=False)
            if left := [request.ticket for request in requests if request.ticket not in found]:
                ended = groups.collect(left, 0)
                fetched = dict(zip(left, groups.fetch([ended[ticket] for ticket in left]), strict=True))
                found.update({ticket: samples for ticket, samples in fetched.items() if samples is not None})
                again.update(fetched.keys() - found.keys())
            if again:
                raise EngineLost(f"an engine was lost with the responses of {len(again)} prompts")
            if not requests:
                return Generations.from_responses([], [], [], 0)
            return Generations.concat([found[request.ticket] for request in requests])

        return self.strategy.rollout_phases.run_sampling(step, converse)

    def group_sampler(self, engine: RolloutEngine) -> GroupSampler:
        """Return the sampler of groups: the engine, or conversations over the engine."""
        return engine if self.conversations is None else self.conversations.by(engine)

    def request(self, ticket: int, prompts: PromptBatch, position: int, seed: int) -> GroupRequest:
        """Return the request for a group of responses to one prompt of a batch."""
        prompt, row = prompts.prompt_ids[position], {name: values[position] for name, values in prompts.columns.items()}
        images = row.get(PROMPT_IMAGES)
        if self.conversations is None:
            return GroupRequest(ticket, prompt, seed, images=images)
        return Opening(ticket, prompt, seed, about=scoring_request("", row), images=images)

    def experience(
        self, prompts: PromptBatch, generations: Generations, num_samples: int, numbers: Sequence[int]
    ) -> Experience:
        """Put prompts and responses together.

        Args:
            prompts: the prompts.
            generations: `num_samples` responses to each prompt, one after the other.
            num_samples: size of a group.
            numbers: number of each group; `groups` of the experience.
        """
        responses = generations.responses()
        of_prompts = {name: values for name, values in prompts.columns.items() if name != PROMPT_IMAGES}
        if PROMPT_IMAGES in prompts.columns:
            of_prompts[IMAGE_INPUTS] = inputs_of(prompts.columns[PROMPT_IMAGES])
        columns: dict[str, list[Any]] = {
            name: [value for value in values for _ in range(num_samples)] for name, values in of_prompts.items()
        }
        prompt_ids = [ids for ids in prompts.prompt_ids for _ in range(num_samples)]
        if generations.endings:
            for place, ending in enumerate(generations.endings):
                if ending.prompt is not None:
                    columns["prompt"][place], prompt_ids[place] = list(ending.prompt), list(ending.prompt_ids)
                    # All ranks keep the column: ranks with images wait for each other in the vision tower.
                    if IMAGE_INPUTS in columns:
                        columns[IMAGE_INPUTS][place] = None
            columns["ending"] = generations.endings
            columns["response"] = [ending.transcript() for ending in generations.endings]
        else:
            columns["response"] = self.tokenizer.batch_decode(responses, skip_special_tokens=True)
        columns["finish_reason"] = generations.finish_reasons
        if generations.experts:
            columns[ROUTED_EXPERTS] = [
                torch.from_numpy(padded_routes(experts, len(prompt) + len(response)))
                for experts, prompt, response in zip(generations.experts, prompt_ids, responses, strict=True)
            ]
        pad_token_id: Any = self.tokenizer.pad_token_id
        return Experience.from_samples(
            prompt_ids=prompt_ids,
            responses=responses,
            rollout_log_probs=generations.response_log_probs(),
            groups=[number for number in numbers for _ in range(num_samples)],
            policy_versions=generations.response_versions(),
            columns=columns,
            pad_token_id=pad_token_id,
            response_masks=generations.response_masks(),
        )


@runtime_checkable
class Scorer(Protocol):
    """Scores samples: `RewardPool` (in processes) or `InlineScorer`.

    Both find the reward function of a sample's data source with a `Router`. `RewardPool` ends a call at its deadline.
    `InlineScorer` interrupts Python code only, in the main thread and without a debugger.
    """

    def score(self, requests: Sequence[ScoringRequest]) -> list[Score]:
        """Return one score for each request, in order."""


@dataclass(frozen=True)
class SampleScorer:
    """Scores the samples of a rank with a reward function.

    Attributes:
        scorer: scorer of single responses; None if the environment scores conversations by itself.
        conversations: conversations of the samples, with scores of the environment; None without an environment.
        phase_log: log of times.
    """

    scorer: Scorer | None
    conversations: Conversations | None
    phase_log: PhaseLog

    def score(self, samples: Experience) -> list[Score]:
        """Fill `scores`, `token_level_scores` and `valid`; with a `StartingEnvironment` also `sequences`.

        A sample without a score is not valid, and its response mask becomes 0. A prompt without its images fails.
        """
        with self.phase_log.measure("reward"):
            scores = self._scores(samples)
        if faults := samples.columns.get(IMAGE_FAULT):
            scores = [failed("image", fault) if fault else score for fault, score in zip(faults, scores, strict=True)]
        # `valid` leaves out a failed score, so the 0.0 of a failed score is never read.
        samples.scores = torch.tensor([score.value or 0.0 for score in scores])
        samples.valid = torch.tensor([score.failure is None for score in scores])
        samples.token_level_scores = token_level_scores(samples, scores)
        samples.response_mask = samples.response_mask * samples.valid[:, None]
        if self.conversations is not None and self.conversations.starts_itself:
            samples.sequences = sequences(samples)
        return scores

    def _scores(self, samples: Experience) -> list[Score]:
        columns = samples.columns
        if self.conversations is not None:
            return self.conversations.scores(columns["ending"])
        names = ("data_source", "response", "reward_model", "extra_info", "prompt")
        rows = [
            dict(zip(names, values, strict=True)) for values in zip(*(columns[name] for name in names), strict=True)
        ]
        assert self.scorer is not None, "without conversations there is a scorer"
        requests = [scoring_request(row["response"], row) for row in rows]
        lengths = samples.response_lengths.tolist()
        ids_BT = samples.responses.to("cpu", torch.int32).numpy()
        return self.scorer.score(
            [
                replace(request, token_ids=array("i", ids_T[:length].tobytes()))
                for request, ids_T, length in zip(requests, ids_BT, lengths, strict=True)
            ]
        )


def token_level_scores(samples: Experience, scores: Sequence[Score]) -> Tensor:
    """Return the score of each sample, divided among its tokens, [B, T].

    A reward of a token is at the token, and a reward of a turn at the last token of the turn. The last sampled token
    also has the rest of the score. A failed sample has 0.

    Args:
        samples: the samples, with the sampled tokens as `response_mask`.
        scores: score of each sample.

    Raises:
        RewardError: the scorer returned another number of rewards of tokens than there are sampled tokens.
    """
    scores_BT = torch.zeros_like(samples.rollout_log_probs)
    endings: Sequence[Ending | None] = samples.columns.get("ending") or [None] * len(scores)
    for row_T, mask_T, score, ending in zip(scores_BT, samples.response_mask, scores, endings, strict=True):
        places_N = mask_T.nonzero().squeeze(-1)
        if score.value is None or not len(places_N):
            continue
        if score.token_rewards is not None:
            checked = for_tokens(score, len(places_N), "the scorer")
            if checked.failure is not None:
                raise RewardError(checked.message)
            row_T[places_N] = torch.tensor(score.token_rewards)
            row_T[places_N[-1]] += score.value - sum(score.token_rewards)
        elif ending is not None:
            for position, reward in zip(ending.turn_ends, ending.turn_rewards, strict=True):
                # A policy may end its turn without a token.
                if position >= 0:
                    row_T[position] += reward
        else:
            row_T[places_N[-1]] = score.value
    return scores_BT


class SamplingSetup:
    """Scorer, environment and seed of a stage: builds the parts with which the stage samples and scores.

    Args:
        scorer: scorer of responses. A reward function, or its configuration, gets `default_scorer`. None with an
            environment that scores conversations by itself.
        tokenizer: tokenizer of the policy.
        eval_sampling: sampling settings of validation.
        environment: bounds on conversations with the scorer, tools, a stateful environment, or an agent; None if the
            policy answers a prompt only once.
        seed: seed of sampling.

    Raises:
        ConfigError: the scorer cannot answer, or the chat template has no place for its answers or for tools; or there
            is no scorer, or a scorer beside a stateful environment or an agent.
    """

    def __init__(
        self,
        scorer: Scorer | Reward | None,
        tokenizer: PreTrainedTokenizerBase,
        eval_sampling: SamplingConfig,
        environment: AnyEnvironment | None,
        seed: int,
    ) -> None:
        _check_scorer(scorer, environment)
        self._scorer = scorer if scorer is None or isinstance(scorer, Scorer) else default_scorer(scorer)
        self.eval_sampling = with_stop_token(eval_sampling, tokenizer)
        self._tokenizer, self._seed = tokenizer, seed
        self.conversations: Conversations | None = None
        if isinstance(environment, StatefulEnvironment):
            objects = StatefulConversations(environment.host, tokenizer, environment)
            self.conversations = Conversations(objects, tokenizer, environment.max_turns)
        elif isinstance(environment, AgentEnvironment):
            self.conversations = Conversations(environment.connect(tokenizer), tokenizer, environment.max_turns)
        elif environment is not None and environment.max_turns > 1:
            answering = (
                ReplyingReward(self._scorer, tokenizer, environment)
                if isinstance(environment, EnvironmentConfig)
                else environment.connect(self._scorer, tokenizer)
            )
            self.conversations = Conversations(answering, tokenizer, environment.max_turns)

    def sampler(self, strategy: Strategy) -> PromptSampler:
        """Return a sampler of responses."""
        if self.conversations is not None:
            strategy.rollout_phases.on_closed.append(WeakMethod(self.conversations.forget_all))
        return PromptSampler(strategy, self._tokenizer, self._seed, self.conversations)

    def scorer(self, strategy: Strategy) -> SampleScorer:
        """Return a scorer of the sampler's responses."""
        return SampleScorer(self._scorer, self.conversations, strategy.phase_log)


def setup_of_validation(
    scorer: Scorer | Reward | None,
    tokenizer: PreTrainedTokenizerBase,
    eval_sampling: SamplingConfig | None,
    environment: AnyEnvironment | None,
    seed: int,
) -> SamplingSetup | None:
    """Return the setup of a stage that samples in validation alone; None without scorer and settings.

    Args:
        scorer: see `SamplingSetup`.
        tokenizer: see `SamplingSetup`.
        eval_sampling: see `SamplingSetup`; None without validation.
        environment: see `SamplingSetup`.
        seed: see `SamplingSetup`.

    Raises:
        ConfigError: some of the arguments for a validation are missing.
    """
    if scorer is None and environment is None and eval_sampling is None:
        return None
    if eval_sampling is None:
        raise ConfigError(
            "eval_sampling=None: validation samples the answers that it scores: pass "
            "eval_sampling=rl.SamplingConfig(max_tokens=...), or leave scorer and environment out"
        )
    return SamplingSetup(scorer, tokenizer, eval_sampling, environment, seed)


def _check_scorer(scorer: Scorer | Reward | None, environment: AnyEnvironment | None) -> None:
    scores_itself = isinstance(environment, StatefulEnvironment | AgentEnvironment)
    if scores_itself and scorer is not None:
        kind = "an agent returns the reward of its trajectory"
        if isinstance(environment, StatefulEnvironment):
            kind = "a stateful environment scores its conversations by itself"
        raise ConfigError(f"scorer: {kind}: leave scorer out")
    if not scores_itself and scorer is None:
        raise ConfigError(
            "scorer=None: name a reward function, or an environment=rl.StatefulEnvironment(...) or "
            "rl.AgentEnvironment(...)"
        )


def with_stop_token(sampling: SamplingConfig, tokenizer: PreTrainedTokenizerBase) -> SamplingConfig:
    """Return settings with the tokenizer's end of sequence among the stop tokens."""
    end: Any = tokenizer.eos_token_id
    if end is None or end in sampling.stop_token_ids:
        return sampling
    return replace(sampling, stop_token_ids=(end, *sampling.stop_token_ids))


def greedy(sampling: SamplingConfig) -> SamplingConfig:
    """Return settings for one most likely response of the same length."""
    return replace(sampling, num_samples=1, temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0, vllm={})


def sample_rows(
    samples: Experience, scores: Sequence[Score], prompts: PromptBatch, with_images: int
) -> list[dict[str, Any]]:
    """Return a row of a table for each sample.

    Args:
        samples: the samples, those of a prompt one after the other.
        scores: score of each sample.
        prompts: prompts of the samples.
        with_images: number of samples with images in their rows, as thumbnails.
    """
    columns = samples.columns
    rows = [
        {
            "prompt": prompt[-1]["content"],
            "response": response,
            "score": score.value,
            "ground_truth": (reward_model or {}).get("ground_truth"),
            "failure": score.failure,
        }
        for prompt, response, reward_model, score in zip(
            *(columns[name] for name in ("prompt", "response", "reward_model")), scores, strict=True
        )
    ]
    for row, ending in zip(rows, columns.get("ending", ()), strict=False):
        row["turns"] = timed_turns(ending)
    if PROMPT_IMAGES in prompts.columns:
        for place, row in enumerate(rows):
            of_prompt = place * len(prompts) // len(rows)
            found = prompts.columns[PROMPT_IMAGES][of_prompt] if place < with_images else None
            row["images"] = [] if found is None else list(map(thumbnail, found.images))
    return rows
