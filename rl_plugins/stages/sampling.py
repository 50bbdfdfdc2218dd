"""A stage that samples from its policy and scores the samples: what policy optimization and evaluation share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol, Required, runtime_checkable

import torch
from torch import nn
from typing_extensions import Unpack, override

from rl_plugins.data.experience import Experience
from rl_plugins.data.prompts import PromptBatch
from rl_plugins.data.sampler import StepLoader
from rl_plugins.evaluation.measures import final_answer, measure, summarize
from rl_plugins.models.lora import adapter_off, has_adapter
from rl_plugins.rewards.default import Reward, default_scorer
from rl_plugins.rewards.records import Score, ScoringRequest
from rl_plugins.rollout.engine import Generations, GroupRequest, GroupSampler, RolloutEngine, SamplingConfig
from rl_plugins.stages.conversations import Conversations, Opening
from rl_plugins.stages.environment import EnvironmentConfig
from rl_plugins.stages.metrics import SampleMetrics, interval_metrics, mean_details, mean_over_ranks, sum_details
from rl_plugins.stages.seeds import seed_of
from rl_plugins.stages.stage import Stage, StageOptions
from rl_plugins.strategies.contract import POLICY, REFERENCE


@runtime_checkable
class Scorer(Protocol):
    """Scores samples; see `rl_plugins.rewards`."""

    def score(self, requests: Sequence[ScoringRequest]) -> list[Score]:
        """One score per request, in order."""


class SamplingOptions(StageOptions, total=False):
    """Arguments that every sampling stage hands on to `SamplingStage`."""

    scorer: Required[Scorer | Reward]
    environment: EnvironmentConfig | None
    seed: int


class SamplingStage(Stage):
    """Adds sampling, scoring, and validation by generation to a stage.

    Args:
        policy: see `Stage`.
        scorer: gives each sample its reward; a bare reward function (or its configuration) gets `default_scorer`.
        eval_sampling: how `validate` samples; without stop tokens, responses end at the tokenizer's end of sequence.
        environment: how often the policy may speak, where the scorer answers; once by default.
        seed: of the samples; a sample's own seed follows from it, the step, and its prompt.
        **stage: arguments of `Stage`.
    """

    policy: Any

    def __init__(
        self,
        policy: str | nn.Module,
        *,
        scorer: Scorer | Reward,
        eval_sampling: SamplingConfig,
        environment: EnvironmentConfig | None = None,
        seed: int = 0,
        **stage: Unpack[StageOptions],
    ) -> None:
        super().__init__(policy, **stage)
        self.scorer: Scorer = scorer if isinstance(scorer, Scorer) else default_scorer(scorer)
        self.eval_sampling, self.seed = self.ending(eval_sampling), seed
        self._conversations: Conversations | None = None
        if environment is not None and environment.max_turns > 1:
            self._conversations = Conversations(self.scorer, self.tokenizer, environment)
        self.reference_is_base = False
        self.validation_samples: list[dict[str, Any]] = []
        # How many samples of a step are kept to be shown, and these; a callback that shows them says how many.
        self.shown_samples = 0
        self.training_samples: list[dict[str, Any]] = []
        self._val_scores: list[Score] = []
        self._val_measures: dict[int, tuple[str, dict[str, float]]] = {}

    def load_reference(self, path: str | None) -> nn.Module | None:
        """The reference model; None where it is the policy with its adapter off (see `running`).

        Args:
            path: name or folder; None is what the policy's adapter was added to.
        """
        if has_adapter(self.policy):
            start = getattr(self.policy.get_base_model(), "name_or_path", None)
            self.reference_is_base = path in (None, start)
        return None if self.reference_is_base else self.load_model(str(path), REFERENCE)

    @contextmanager
    def running(self, name: str) -> Iterator[Any]:
        """The engine that runs a model, whether it has one of its own or is the policy's base."""
        if name == REFERENCE and self.reference_is_base:
            with adapter_off(self.policy):
                yield self._strategy.engine(POLICY)
        else:
            yield self._strategy.engine(name)

    def ending(self, sampling: SamplingConfig) -> SamplingConfig:
        """The same, with the tokenizer's end of sequence as the stop token where none is named."""
        if sampling.stop_token_ids or self.tokenizer.eos_token_id is None:
            return sampling
        return replace(sampling, stop_token_ids=(self.tokenizer.eos_token_id,))

    def sample(self, prompts: PromptBatch, sampling: SamplingConfig, seeds: list[int]) -> Experience:
        """Responses to this rank's prompts with the policy's current weights. Collective.

        Args:
            prompts: one or more.
            sampling: how to sample.
            seeds: one for each prompt.
        """
        generations = self._generations(prompts, sampling, seeds)
        return self._experience(prompts, generations, sampling.num_samples, prompts.rows)

    def _generations(self, prompts: PromptBatch, sampling: SamplingConfig, seeds: list[int]) -> Generations:
        def generate(engine: RolloutEngine) -> Generations:
            return engine.generate(prompts.prompt_ids, sampling, seeds)

        conversations = self._conversations
        if conversations is None:
            return self._strategy.sampled(self.step, generate)
        # Those of groups that are sampled ahead are not negative.
        requests = [self.request(-1 - place, prompts, place, seed) for place, seed in enumerate(seeds)]
        tickets, new = [one.ticket for one in requests], [requests]

        def talk(engine: RolloutEngine) -> Generations:
            groups = conversations.by(engine)
            while new:
                groups.submit(new.pop(), sampling)
            groups.lost_tickets()
            if not tickets:
                return Generations.from_responses([], [], [], 0)
            ended = groups.collect(tickets, 0)
            return Generations.concat([ended[ticket] for ticket in tickets])

        return self._strategy.sampled(self.step, talk)

    def groups_of(self, engine: RolloutEngine) -> GroupSampler:
        """What samples groups: the engine, or conversations by it."""
        return engine if self._conversations is None else self._conversations.by(engine)

    def request(self, ticket: int, prompts: PromptBatch, position: int, seed: int) -> GroupRequest:
        """What is asked for a prompt of a batch."""
        prompt = prompts.prompt_ids[position]
        if self._conversations is None:
            return GroupRequest(ticket, prompt, seed)
        row = {name: values[position] for name, values in prompts.columns.items()}
        return Opening(ticket, prompt, seed, about=request_for("", row))

    def _experience(
        self, prompts: PromptBatch, generations: Generations, num_samples: int, numbers: Sequence[int]
    ) -> Experience:
        responses = generations.responses()
        columns: dict[str, list[Any]] = {
            name: [value for value in values for _ in range(num_samples)] for name, values in prompts.columns.items()
        }
        if generations.endings:
            columns["ending"] = generations.endings
            columns["response"] = [ending.transcript() for ending in generations.endings]
        else:
            columns["response"] = self.tokenizer.batch_decode(responses, skip_special_tokens=True)
        columns["finish_reason"] = generations.finish_reasons
        return Experience.from_samples(
            prompt_ids=[ids for ids in prompts.prompt_ids for _ in range(num_samples)],
            responses=responses,
            rollout_log_probs=generations.response_log_probs(),
            groups=[number for number in numbers for _ in range(num_samples)],
            policy_versions=generations.response_versions(),
            columns=columns,
            pad_token_id=self.tokenizer.pad_token_id,
            response_masks=generations.response_masks(),
        )

    def _seeds(self, prompts: PromptBatch) -> list[int]:
        # A sample's seed depends on what it is, not on the rank or batch it fell into.
        return [seed_of(self.seed, self.step, row) for row in prompts.rows]

    def score(self, experience: Experience) -> list[Score]:
        """Fill `scores` and `valid`; a sample whose reward failed is not valid and takes part in nothing."""
        with self._phase("reward"):
            scores = self._scores(experience.columns)
        experience.scores = torch.tensor([score.value or 0.0 for score in scores])
        experience.valid = torch.tensor([score.failure is None for score in scores])
        experience.response_mask = experience.response_mask * experience.valid[:, None]
        if self.shown_samples and self.trainer.training:
            self.training_samples = sample_rows(experience, scores)[: self.shown_samples]
        return scores

    def _scores(self, columns: Mapping[str, list[Any]]) -> list[Score]:
        if self._conversations is not None:
            return self._conversations.scores(columns["ending"])
        names = ("data_source", "response", "reward_model", "extra_info", "prompt")
        rows = [
            dict(zip(names, values, strict=True)) for values in zip(*(columns[name] for name in names), strict=True)
        ]
        return self.scorer.score([request_for(row["response"], row) for row in rows])

    def tell_curriculum(self, sampled: SampleMetrics) -> dict[str, float]:
        """Tell a curriculum, where there is one, how the prompts were rewarded; returns its metrics. Collective.

        Args:
            sampled: all samples of the step on this rank.
        """
        loader = self.trainer.train_dataloader
        if not isinstance(loader, StepLoader) or loader.curriculum is None:
            return {}
        told = self._strategy.gather(sampled.group_results())
        loader.curriculum.observe(result for theirs in told for result in theirs)
        return loader.curriculum.metrics()

    # Validation -------------------------------------------------------------------------------------------------

    @override
    def on_validation_epoch_start(self) -> None:
        self.validation_samples, self._val_scores, self._val_measures = [], [], {}

    @override
    def validation_step(self, prompts: PromptBatch, batch_idx: int) -> None:
        if not prompts.rows:
            # A rank without rows still takes its place in the collective.
            self._generations(prompts, self.eval_sampling, [])
            return
        experience = self.sample(prompts, self.eval_sampling, self._seeds(prompts))
        scores = self.score(experience)
        self._val_scores += scores
        said = [ending.last for ending in experience.columns.get("ending", ())] or experience.columns["response"]
        self._measure(prompts, scores, said)
        self.validation_samples += sample_rows(experience, scores)

    def _measure(self, prompts: PromptBatch, scores: list[Score], responses: list[str]) -> None:
        """Keep what the samples of each prompt say, under the number of its row."""
        size = self.eval_sampling.num_samples
        for position, (row, source) in enumerate(zip(prompts.rows, prompts.columns["data_source"], strict=True)):
            samples = slice(position * size, (position + 1) * size)
            values, answers = [score.value for score in scores[samples]], map(final_answer, responses[samples])
            self._val_measures[row] = source, measure(values, list(answers), [size])

    @override
    def on_validation_epoch_end(self) -> None:
        values = torch.tensor([score.value or 0.0 for score in self._val_scores], dtype=torch.float64)
        valid = torch.tensor([score.failure is None for score in self._val_scores], dtype=torch.bool)
        metrics = mean_over_ranks({"reward": (values, valid)}, self._strategy.sum_over_ranks)
        of_ranks = self._strategy.gather((self._val_measures, sum_details(self._val_scores)))
        # In the order of the rows, so that the intervals are the same for any number of ranks.
        measured = [entry for _, entry in sorted(row for rows, _ in of_ranks for row in rows.items())]
        metrics |= mean_details(details for _, details in of_ranks)
        metrics |= interval_metrics(summarize([source for source, _ in measured], [of for _, of in measured]))
        self.track({f"val/{name}": value for name, value in metrics.items()})
        self.track({f"val/{name}": value for name, value in self._strategy.phases.drain().items()})


def sample_rows(experience: Experience, scores: Sequence[Score]) -> list[dict[str, Any]]:
    """What a table shows of each sample."""
    columns = experience.columns
    return [
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


def request_for(response: str, row: Mapping[str, Any]) -> ScoringRequest:
    """What a reward is asked about a response to the prompt of a row."""
    ground_truth = (row["reward_model"] or {}).get("ground_truth")
    return ScoringRequest(row["data_source"], response, ground_truth, row["extra_info"] or {}, row["prompt"])


def greedy(sampling: SamplingConfig) -> SamplingConfig:
    """One most likely response per prompt, of the same length."""
    fields: Mapping[str, Any] = {**vars(sampling), "num_samples": 1, "temperature": 0.0, "top_p": 1.0, "top_k": -1}
    return SamplingConfig(**fields)
