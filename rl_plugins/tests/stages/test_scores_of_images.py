"""Critics, reward models and process reward models of vision-language models, on samples with images."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.tiny_vision import processor
from rl_plugins.algorithms.aggregation import GlobalCounts, local_counts
from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.config.models import CriticConfig, OptimizerConfig, RewardModelConfig
from rl_plugins.data.image_prompts import ImagePromptEncoder, load_processor
from rl_plugins.data.images import IMAGE_INPUTS
from rl_plugins.data.preferences import PairBatch
from rl_plugins.data.process_rewards import ProcessRewardBatch
from rl_plugins.models.loading import load_causal_lm
from rl_plugins.models.scalar_head import load_scalar_head
from rl_plugins.stages.critic_training import CriticLearner, CriticTraining, ValueObjective
from rl_plugins.stages.process_rewards import ProcessRewardConfig
from rl_plugins.stages.reward_modeling import RewardModeling
from rl_plugins.strategies.fsdp import FSDPStrategy
from rl_plugins.strategies.zero import ZeroStrategy
from rl_plugins.tests.patience import patient
from rl_plugins.tests.pictures import picture
from rl_plugins.tests.ranks import run_ranks
from rl_plugins.tests.stages import canned
from rl_plugins.tests.stages.with_images import (
    EACH_FAMILY,
    FAMILIES,
    RESPONSES,
    assert_alike,
    batch_of,
    of_images,
    of_tower,
    sampled,
    saved_families,
    single_device,
)
from rl_plugins.tests.tiers import tiered

SGD = OptimizerConfig(name="SGD", lr=0.5)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return saved_families(tmp_path_factory.mktemp("families"))


def pairs_of(family: str, places: list[int]) -> PairBatch:
    batch = batch_of(family, places) if places else {"prompt_ids": [], "response_ids": [], IMAGE_INPUTS: []}
    rejected = [RESPONSES[place - 1] for place in places]
    margins = [0.0] * len(places)
    return PairBatch(batch["prompt_ids"], batch["response_ids"], rejected, margins, places, batch[IMAGE_INPUTS])


def reward_model_of(
    family: str, folder: Path, strategy: Any, rank: int = 0, world_size: int = 1
) -> tuple[dict[str, Tensor], float]:
    """Train a reward model for two steps; return the weights, and the accuracy of a rank 1 without pairs."""
    weights: dict[str, Tensor] = {}

    class Inspect(RewardModeling):
        def on_train_end(self) -> None:
            weights.update({name: tensor.clone() for name, tensor in self.strategy.weight_source("reward_model")})

    stage = Inspect(str(folder), tokenizer=processor(family), optimizer=SGD, max_steps=2)
    metrics = canned.metrics_of(stage)
    flags: dict[str, Any] = {"accelerator": "cpu", "precision": "32-true", "limit_val_batches": 1}
    if world_size > 1:
        flags |= {"devices": 1, "num_nodes": world_size}
    training = pairs_of(family, list(range(4))[rank::world_size])
    validation = pairs_of(family, [] if rank else [0, 1])
    trainer = canned.quiet_trainer(strategy, **flags)
    trainer.fit(stage, canned.loader([training] * 2), canned.loader([validation]))
    return weights, metrics["val/accuracy"]


def reward_model_of_rank(rank: int, family: str, folder: Path, name: str) -> tuple[dict[str, Tensor], float]:
    of_strategy: dict[str, Any] = {"rollout": canned.CannedRollout(), "timeout_s": patient(100)}
    strategy = FSDPStrategy(**of_strategy) if name == "fsdp" else ZeroStrategy(stage=3, **of_strategy)
    return reward_model_of(family, folder, strategy, rank, 2)


@pytest.mark.parametrize(
    ("family", "name"),
    tiered(product(FAMILIES, ("zero", "fsdp")), core={("qwen2_5_vl", "zero"), ("gemma3", "fsdp")}),
)
def test_reward_modeling_with_images_on_one_rank_alone_equals_one_process(
    family: str, name: str, folders: dict[str, Path]
) -> None:
    expected, accuracy = reward_model_of(family, folders[family], single_device())
    start = load_scalar_head(str(folders[family]), dtype=torch.float32).state_dict()
    assert any(not torch.equal(expected[name], start[name]) for name in of_images(expected))
    for (weights, other), _ in run_ranks(reward_model_of_rank, family, folders[family], name, world_size=2):
        assert_alike(weights, expected)
        assert other == accuracy


def test_export_of_a_reward_model_has_the_head_and_the_processor(folders: dict[str, Path], tmp_path: Path) -> None:
    stage: Any = RewardModeling(str(folders["gemma3"]), tokenizer=processor("gemma3"), optimizer=SGD, max_steps=2)
    canned.quiet_trainer(single_device()).fit(stage, canned.loader([pairs_of("gemma3", [0, 1])] * 2))
    stage.export(tmp_path / "reward_model")
    exported = str(tmp_path / "reward_model")
    again = dict(load_scalar_head(exported, dtype=torch.float32, new_head=False).named_parameters())
    assert again["score.weight"].any()
    assert all(torch.equal(again[name], weight) for name, weight in stage.reward_model.named_parameters())
    message = {"role": "user", "content": "<image>?"}
    wanted = ImagePromptEncoder(processor("gemma3")).encode([message], [picture()], {})[0]
    assert ImagePromptEncoder(load_processor(exported)).encode([message], [picture()], {})[0] == wanted


def test_reward_modeling_reads_the_images_of_labelled_steps(folders: dict[str, Path]) -> None:
    batch = batch_of("llava", [0, 1])
    labels = [[float("nan")] * (len(response) - 1) + [1.0] for response in batch["response_ids"]]

    def loss(images: Any) -> float:
        stage = RewardModeling(
            str(folders["llava"]), tokenizer=processor("llava"), optimizer=SGD, max_steps=2, loss="process_reward"
        )
        steps = ProcessRewardBatch(batch["prompt_ids"], batch["response_ids"], labels, [0, 1], images)
        metrics = canned.metrics_of(stage)
        canned.quiet_trainer(single_device()).fit(stage, canned.loader([steps] * 2))
        return metrics["train/loss"]

    other_image = batch_of("llava", [2])[IMAGE_INPUTS]
    assert loss(batch[IMAGE_INPUTS]) != loss([*other_image, None])


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("family", EACH_FAMILY)
def test_critic_and_reward_model_read_the_images_of_samples(
    family: str, packing: bool, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = folders[family]
    # The head of a reward model is trained; a new head is 0.
    reward_model: Any = load_scalar_head(str(folder), dtype=torch.float32)
    torch.nn.init.ones_(reward_model.score.weight)
    reward_model.save_pretrained(tmp_path)
    processor(family).tokenizer.save_pretrained(tmp_path)
    stage = sampled(
        family,
        folder,
        packing=packing,
        algorithm=Algorithm(advantage="gae", value_clip=None),
        critic=CriticConfig(path=str(folder), optimizer=SGD),
        reward_model=RewardModelConfig(path=str(tmp_path), rule_weight=0.0),
    )
    start = load_scalar_head(str(folder), dtype=torch.float32).state_dict()
    learnt = dict(stage.critic.named_parameters())
    assert learnt["score.weight"].any()
    assert any(not torch.equal(learnt[name], start[name]) for name in of_images(learnt))
    (samples,) = stage.trained_on
    for index in range(len(samples)):
        alone = samples[index : index + 1].trimmed()
        scores = stage.passes.scores("reward_model", alone)
        torch.testing.assert_close(samples.scores[index], scores[0, -1], rtol=1e-4, atol=1e-4)


def test_vision_lr_freezes_the_vision_tower_of_a_critic(folders: dict[str, Path]) -> None:
    folder = folders["llava"]
    frozen = OptimizerConfig(name="SGD", lr=0.5, vision_lr=0.0)
    critic = CriticConfig(path=str(folder), optimizer=frozen)
    stage = sampled("llava", folder, algorithm=Algorithm(advantage="gae"), critic=critic)
    start, learnt = load_scalar_head(str(folder), dtype=torch.float32).state_dict(), stage.critic.state_dict()
    changed = [name for name, weight in learnt.items() if not torch.equal(weight, start[name])]
    assert changed and not {*changed} & {*of_tower(learnt)}


def test_critic_learner_trains_on_samples_with_images(folders: dict[str, Path]) -> None:
    folder = str(folders["llava"])
    critic = CriticConfig(path=folder, optimizer=SGD)
    (samples,) = sampled("llava", folders["llava"], algorithm=Algorithm(advantage="gae"), critic=critic).trained_on
    learner = CriticLearner(
        CriticTraining(
            path=folder, config=critic, gradient_clip=0.0, objective=ValueObjective(None, "token-mean", None, 1),
            computes_in=torch.float32, loading={}, tokens_per_micro_batch=10**6, packing=True, seed=0,
            patches_per_micro_batch=1,
        )
    )  # fmt: skip
    start = {name: weight.clone() for name, weight in learner.weights.items()}
    counts = GlobalCounts(*local_counts(samples.response_mask).tolist())
    for _ in range(2):
        learner.update([samples, samples[:0]], counts, last=True)
    assert any(not torch.equal(learner.weights[name], start[name]) for name in of_tower(start))


def test_process_reward_model_of_prime_reads_images(folders: dict[str, Path]) -> None:
    folder = folders["llava"]
    config = ProcessRewardConfig(path=str(folder), optimizer=SGD, success_above=3.5)
    stage = sampled("llava", folder, algorithm=Algorithm(advantage="prime"), process_reward_model=config)
    start = load_causal_lm(str(folder), dtype=torch.float32).state_dict()
    learnt = stage.process_reward_model.state_dict()
    assert any(not torch.equal(learnt[name], start[name]) for name in of_tower(learnt))
