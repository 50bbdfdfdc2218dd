"""One RL step without sampling: fixed responses and scores, and an optimizer that records its gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra.utils import instantiate
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM
from typing_extensions import override

from rl_plugins.algorithms.aggregation import AGGREGATIONS
from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.config.hydra_errors import CONFIG_FOLDER
from rl_plugins.config.models import CriticConfig, OptimizerConfig, TeacherConfig
from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.data.experience import Experience
from rl_plugins.data.prompts import PromptBatch
from rl_plugins.launch.compose import compose_config
from rl_plugins.memory import MemoryChange
from rl_plugins.models.tiny import build_model, build_tokenizer, save_tiny_policy
from rl_plugins.owned_folder import owned_folder
from rl_plugins.ranks import Ranks
from rl_plugins.rewards.records import Score, ScoringRequest
from rl_plugins.rollout.engine import Generations
from rl_plugins.rollout.transformers_engine import SynchronousGroups
from rl_plugins.stages.policy_optimization import PolicyOptimization
from rl_plugins.stages.process_rewards import ProcessRewardConfig
from rl_plugins.strategies.rank_groups import JointPasses
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.tests.metrics_page import undocumented
from rl_plugins.tests.quiet_trainer import quiet_trainer
from rl_plugins.weights.source import WeightSource

# Prompt -> responses. `!` makes the reward fail; the responses of 4+4 all score alike; one response is empty.
RESPONSES = {
    "1+1": ["2", "twenty-two", ""],
    "12+30": ["42.", "4!", "forty"],
    "4+4": ["abc", "xyz", "klm"],
    "100+1": ["a longer one", "z", "it is 101"],
}
PROMPTS = list(RESPONSES)
TEMPERATURE = 0.7
BUDGET = 9.0
"""The constant of seq-mean-token-sum-norm."""

tokenizer: Any = build_tokenizer()


def score(response: str) -> float | None:
    """Return the reward of a response; None for a failure."""
    return None if "!" in response else 0.1 * len(response) + 0.25


PROCESS_REWARDS = ProcessRewardConfig(optimizer=OptimizerConfig(lr=0.01, gradient_clip=0.0), success_above=0.5)


class CannedRollout(SynchronousGroups):
    """A rollout engine with fixed responses and a record of its calls."""

    keeps_weights = True
    check_updates = 0
    log_prob_tolerance = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def connect(self, rank: int, world_size: int) -> None:
        self.calls.append(f"connect {rank}/{world_size}")

    @override
    def generate(self, prompts: list[list[int]], sampling: SamplingConfig, seeds: list[int] | None) -> Generations:
        texts = [tokenizer.decode(prompt) for prompt in prompts]
        responses = [tokenizer.encode(r) for text in texts for r in RESPONSES[text][: sampling.num_samples]]
        log_probs = [[-1.0] * len(response) for response in responses]
        self.calls.append("generate")
        return Generations.from_responses(responses, log_probs, ["stop"] * len(responses), 0)

    def update_weights(self, source: WeightSource, version: int) -> None:
        self.calls.append(f"update_weights {version}")

    def check_weights(self, source: WeightSource) -> None:
        raise AssertionError("a check was not expected")

    def prompt_log_probs(self, prompt: list[int]) -> list[float]:
        raise AssertionError("a check was not expected")

    def sleep(self) -> MemoryChange | None:
        self.calls.append("sleep")
        return None

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        self.calls.append(f"wake_up {','.join(tags or [])}")

    def close(self) -> None:
        self.calls.append("close")


class CannedScorer:
    def score(self, requests: Sequence[ScoringRequest]) -> list[Score]:
        failed = Score(None, failure="raised", message="!")
        values = [(score(request.solution_str), request.solution_str.isdigit()) for request in requests]
        return [failed if v is None else Score(v, {"correct": v, "format": float(form)}) for v, form in values]


class Recorder(torch.optim.SGD):
    """An optimizer with a record of the gradients of every step."""

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, lr=lr)
        self.gradients: list[list[Tensor]] = []

    @override
    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.gradients.append([p.grad.clone() for p in parameters])
        return result


class OwnPolicy(LightningModule):
    """A LightningModule with a model, by default a tiny float64 model, and the recording optimizer."""

    def __init__(self, seed: int = 0, *, model: Any = None, lr: float = 0.01) -> None:
        super().__init__()
        default = build_model(hidden_size=32, intermediate_size=48, initializer_range=0.2, seed=seed).double()
        self.model, self._lr = default if model is None else model, lr

    @override
    def configure_optimizers(self) -> Recorder:
        self.recorder = Recorder(self.model.parameters(), self._lr)
        return self.recorder


def mixture_policy(folder: Path, lr: float) -> OwnPolicy:
    """Return a policy with experts: the float32 model of a folder."""
    return OwnPolicy(model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), lr=lr)


class NoTokens(JointPasses):
    """The hook of a strategy with tensor or sequence parallelism, without other ranks."""

    def __init__(self, model: Any) -> None:
        model.register_forward_pre_hook(self._join)

    def _join(self, *_: Any) -> None:
        """Join nothing."""


class Keeping(PolicyOptimization):
    """A stage with a record of the samples and the metrics of every step."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.trained_on: list[Experience] = []
        self.metrics: list[dict[str, float]] = []

    @override
    def update(self, experience: Experience) -> dict[str, float]:
        self.trained_on.append(experience)
        return super().update(experience)

    @override
    def track(self, metrics: Any) -> None:
        assert undocumented(metrics) == [], "add a row to docs/metrics.md"
        self.metrics.append(dict(metrics))


def ppo(stage_class: type[PolicyOptimization], **options: Any) -> Any:
    """A stage of PPO, or of another `algorithm`, on the fixed responses: uneven micro-batches, two updates a step."""
    return stage_class(
        build_model(hidden_size=32, intermediate_size=48, initializer_range=0.2),
        tokenizer=tokenizer,
        sampling=SamplingConfig(max_tokens=20, num_samples=3),
        optimizer=OptimizerConfig(lr=0.01),
        updates_per_step=2,
        tokens_per_micro_batch=40,
        **{"scorer": CannedScorer(), "algorithm": Algorithm(advantage="gae", value_clip=0.02), **options},
    )


class AllReduceStrategy(SingleDeviceRolloutStrategy):
    """Several processes, each with the whole model; gradients are averaged before the step, as DDP and ZeRO do."""

    def __init__(self, rank: int, world_size: int, **options: Any) -> None:
        super().__init__(**options)
        self.global_rank, self.world_size = rank, world_size
        self.ranks = Ranks(rank, world_size, self.root_device)

    @property
    @override
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    @override
    def barrier(self, *arguments: Any, **options: Any) -> None:
        torch.distributed.barrier()

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: object = None) -> None:
        # All ranks have the same weights, and one file for them.
        if self.is_global_zero:
            super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                torch.distributed.all_reduce(parameter.grad)
                parameter.grad /= self.world_size
        return super().optimizer_step(optimizer, closure, model, **kwargs)


def prompt_batch(texts: list[str], sources: Sequence[str] | None = None) -> PromptBatch:
    """Return the prompts with their data sources, by default `canned`."""
    columns: dict[str, list[Any]] = {
        "prompt": [[{"role": "user", "content": text}] for text in texts],
        "data_source": list(sources or ["canned"] * len(texts)),
        "reward_model": [{"ground_truth": text} for text in texts],
        "extra_info": [{} for _ in texts],
    }
    return PromptBatch([tokenizer.encode(text) for text in texts], [PROMPTS.index(text) for text in texts], columns, 0)


class Prompts:
    """A data set with every prompt twice."""

    fingerprint = "canned"
    texts = 2 * PROMPTS
    kept = np.arange(len(texts))

    def __len__(self) -> int:
        return len(self.texts)

    def batch(self, indices: Sequence[int], epoch: int) -> PromptBatch:
        return prompt_batch([self.texts[index] for index in indices])


class DrawingLoader(DataLoader[Any]):
    """Loader of the given batches without change; `draw` returns the first batch again."""

    def __init__(self, batches: list[Any]) -> None:
        super().__init__(batches, batch_size=None)  # type: ignore[arg-type]
        self.first = batches[0]

    def draw(self) -> Any:
        return self.first


def loader(batches: list[Any]) -> Any:
    """Return a loader of the batches without change."""
    return DrawingLoader(batches)


@cache
def other_model(seed: int = 5) -> str:
    """Folder of a model other than the policy: reference, teacher, or start of the critic."""
    # The processes of ranks are killed.
    folder = owned_folder("canned-")
    return str(save_tiny_policy(folder, hidden_size=32, intermediate_size=48, initializer_range=0.2, seed=seed))


def metrics_of(stage: Any) -> dict[str, float]:
    """Metrics of a stage, not through Lightning's log, which takes as long as the rest of a small step."""
    metrics: dict[str, float] = {}

    def track(new: Mapping[str, float]) -> None:
        assert undocumented(new) == [], "add a row to docs/metrics.md"
        metrics.update(new)

    stage.track = track
    return metrics


def gradients(
    algorithm: Algorithm,
    *,
    tokens_per_micro_batch: int = 10**6,
    updates_per_step: int = 1,
    rank: int = 0,
    world_size: int = 1,
    reference: str | None = None,
    teacher: TeacherConfig | None = None,
    sources: Sequence[str] | None = None,
    process_reward_model: ProcessRewardConfig = PROCESS_REWARDS,
    **options: Any,
) -> tuple[list[list[Tensor]], dict[str, float]]:
    """Return the gradients of each update of one RL step, first the policy's, then other models', and the metrics."""
    own = OwnPolicy()
    of_others: list[list[Tensor]] = []

    def keep(optimizer: Any, *_: Any) -> None:
        if isinstance(optimizer, torch.optim.AdamW):
            of_others.append([p.grad.clone() for group in optimizer.param_groups for p in group["params"]])

    if "process_rewards_BT" in algorithm.needs:
        options["process_reward_model"] = replace(process_reward_model, path=other_model())
    stage = PolicyOptimization(
        own,
        tokenizer=tokenizer,
        scorer=CannedScorer(),
        sampling=SamplingConfig(max_tokens=20, num_samples=3, temperature=TEMPERATURE),
        algorithm=algorithm,
        reference=reference or other_model(),
        teacher=teacher or other_model(),
        critic=CriticConfig(other_model(), OptimizerConfig(lr=0.01, gradient_clip=0.0)),
        cost_critic=CriticConfig(other_model(), OptimizerConfig(lr=0.01, gradient_clip=0.0)),
        optimizer=OptimizerConfig(gradient_clip=0.0),
        tokens_per_micro_batch=tokens_per_micro_batch,
        updates_per_step=updates_per_step,
        max_steps=1,
        **options,
    )
    metrics = metrics_of(stage)
    if world_size == 1:
        strategy = SingleDeviceRolloutStrategy(rollout=CannedRollout())
    else:
        strategy = AllReduceStrategy(rank, world_size, rollout=CannedRollout())
    trainer = quiet_trainer(strategy, precision="64-true")
    # Prompts are dealt to ranks in turn.
    hook = register_optimizer_step_pre_hook(keep)
    try:
        trainer.fit(stage, loader([prompt_batch(PROMPTS[rank::world_size], sources and sources[rank::world_size])]))
    finally:
        hook.remove()
    return own.recorder.gradients + of_others, metrics


RECIPES = sorted(path.stem for path in (CONFIG_FOLDER / "algorithm").glob("*.yaml"))
"""The algorithms of recipes/conf/algorithm."""
CASES = [*AGGREGATIONS, "batch scale", *RECIPES]
"""Arguments of `algorithm_of`."""


@cache
def algorithm_of(case: str) -> tuple[Algorithm, int]:
    """Return an algorithm for an aggregation, a scale or a recipe, and the number of updates in a step."""
    if case in AGGREGATIONS:
        return Algorithm(aggregation=case, scale_factor=BUDGET), 1
    if case == "batch scale":
        return Algorithm(advantage_options={"scale": "batch"}), 1
    costs = ["algorithm.constraint.cost=format"] if case == "safe_rlhf" else []
    config = compose_config("grpo", ["model.path=none", f"algorithm={case}", *costs])
    # In the second update the ratios are not 1.
    return instantiate(config.algorithm), 2


def rank_gradients(rank: int, algorithm: Algorithm, updates: int) -> tuple[list[list[Tensor]], dict[str, float]]:
    """Return `gradients` of one of two ranks. Each rank alone would cut its tokens into other micro-batches."""
    return gradients(algorithm, tokens_per_micro_batch=45, updates_per_step=updates, rank=rank, world_size=2)
