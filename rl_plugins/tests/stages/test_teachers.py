"""Several teachers, and a teacher that follows the policy: log-probs and gradients equal the definitions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.callbacks.averages import ReferenceUpdate
from rl_plugins.config.models import OptimizerConfig, TeacherConfig
from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.errors import ConfigError, DataError
from rl_plugins.models.tiny import build_model
from rl_plugins.strategies.contract import TEACHER
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.tests.loops import for_each
from rl_plugins.tests.ranks import run_ranks
from rl_plugins.tests.stages import canned

K = 4
FORWARD_KL = Algorithm(policy_loss="forward_kl_top_k", teacher_top_k=K)
# Ranks hold prompts in turn: with two ranks, each rank has a teacher of its own.
SOURCES = ["sums", "words", "sums", "words"]
SEEDS = {"sums": 5, "words": 6}


def teachers(*names: str, weights: dict[str, float] | None = None) -> TeacherConfig:
    paths = {name: canned.other_model(SEEDS.get(name, 6)) for name in names}
    return TeacherConfig(paths=paths, weights=weights or {})


def log_probs(model: Any, prompt: str, response: str) -> Tensor:
    """Log-probs [T, V] at the places of the response tokens."""
    prompt_ids, ids = canned.tokenizer.encode(prompt), canned.tokenizer.encode(response)
    logits = model(torch.tensor([prompt_ids + ids])).logits[0] / canned.TEMPERATURE
    return logits[len(prompt_ids) - 1 : -1].log_softmax(-1)


def defined_gradient(weights_of_source: dict[str, dict[str, float]]) -> list[Tensor]:
    """Gradient of the mean over tokens of the weighted sum of the forward KLs, one response after the other."""
    policy = canned.OwnPolicy().model
    models = {
        name: build_model(hidden_size=32, intermediate_size=48, initializer_range=0.2, seed=seed).double()
        for name, seed in SEEDS.items()
    }
    terms = []
    for source, (prompt, responses) in zip(SOURCES, canned.RESPONSES.items(), strict=True):
        for response in responses:
            if not response or canned.score(response) is None:
                continue
            of_policy = log_probs(policy, prompt, response)
            total = torch.zeros(len(of_policy)).double()
            for name, weight in weights_of_source[source].items():
                of_teacher, ids = log_probs(models[name], prompt, response).detach().topk(K)
                total = total + weight * (of_teacher.exp() * (of_teacher - of_policy.gather(-1, ids))).sum(dim=-1)
            terms.append(total.clamp(min=0))
    return list(torch.autograd.grad(torch.cat(terms).mean(), list(policy.parameters())))


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).abs().max()) <= 1e-6 * float(other.abs().max())


BY_SOURCE = {"sums": {"sums": 1.0}, "words": {"words": 1.0}}
WEIGHTS = {"sums": 0.25, "words": 0.75}


@for_each(
    ("names", "weights", "weights_of_source"),
    [
        (("sums", "words"), {}, BY_SOURCE),
        (("sums", "default"), {}, BY_SOURCE),
        (("sums", "words"), WEIGHTS, dict.fromkeys(SOURCES, WEIGHTS)),
    ],
)
def test_gradient_of_several_teachers_equals_the_definition(
    names: tuple[str, ...], weights: dict[str, float], weights_of_source: Any
) -> None:
    (found,), metrics = canned.gradients(
        FORWARD_KL, teacher=teachers(*names, weights=weights), sources=SOURCES, tokens_per_micro_batch=40
    )
    assert_close(found, defined_gradient(weights_of_source))
    assert 0 < metrics["train/teacher_mass"] < 1


def gradient_of_rank(rank: int, config: TeacherConfig) -> list[Tensor]:
    (gradient,), _ = canned.gradients(
        FORWARD_KL,
        reference=config.paths["sums"],
        teacher=config,
        sources=SOURCES,
        tokens_per_micro_batch=40,
        rank=rank,
        world_size=2,
    )
    return gradient


def test_gradient_of_several_teachers_is_the_same_on_two_ranks_with_one_teacher_each() -> None:
    for found, _ in run_ranks(gradient_of_rank, teachers("sums", "words")):
        assert_close(found, defined_gradient(BY_SOURCE))


def stage_of(policy: Any, **options: Any) -> canned.Keeping:
    return canned.Keeping(
        policy,
        tokenizer=canned.tokenizer,
        scorer=canned.CannedScorer(),
        sampling=SamplingConfig(max_tokens=20, num_samples=3),
        optimizer=OptimizerConfig(lr=0.01),
        **options,
    )


def train(stage: canned.Keeping, steps: int = 1, *callbacks: Any) -> canned.Keeping:
    strategy = SingleDeviceRolloutStrategy(rollout=canned.CannedRollout())
    trainer = canned.quiet_trainer(strategy, callbacks=list(callbacks), precision="64-true")
    trainer.fit(stage, canned.loader([canned.prompt_batch(canned.PROMPTS, SOURCES)] * steps))
    return stage


def collected(stage: canned.Keeping) -> Tensor:
    found = stage.trained_on[0].teacher_log_probs
    assert found is not None
    return torch.where(stage.trained_on[0].response_mask.bool(), found, 0)


def test_teacher_log_probs_of_weighted_teachers_are_the_weighted_sum() -> None:
    alone = [
        collected(
            train(
                stage_of(
                    build_small(), algorithm=Algorithm(advantage="reverse_kl"), teacher=canned.other_model(SEEDS[name])
                )
            )
        )
        for name in WEIGHTS
    ]
    weighted = stage_of(
        build_small(), algorithm=Algorithm(advantage="reverse_kl"), teacher=teachers(*WEIGHTS, weights=WEIGHTS)
    )
    expected = sum(weight * one for weight, one in zip(WEIGHTS.values(), alone, strict=True))
    torch.testing.assert_close(collected(train(weighted)), expected)


def build_small() -> Any:
    return build_model(hidden_size=32, intermediate_size=48, initializer_range=0.2)


@for_each(("keep", "share"), [(0.0, 1.0), (0.75, 0.25)])
def test_teacher_that_follows_the_policy_is_an_earlier_self(keep: float, share: float) -> None:
    def distil(steps: int) -> canned.Keeping:
        stage = stage_of(
            canned.other_model(), algorithm=Algorithm(advantage="reverse_kl"), teacher=TeacherConfig(update_every=2)
        )
        return train(stage, steps, ReferenceUpdate(TEACHER, every=2, keep=keep))

    start = list(canned_start().parameters())
    for steps, moved in ((1, False), (3, True)):
        stage = distil(steps)
        (teacher,) = stage.teacher
        after_two = distil(2).policy if moved else None
        goals = list(after_two.parameters()) if after_two else start
        for found, first, goal in zip(teacher.parameters(), start, goals, strict=True):
            torch.testing.assert_close(found, first + share * (goal - first))


def canned_start() -> Any:
    return build_model(hidden_size=32, intermediate_size=48, initializer_range=0.2, seed=5).double()


def test_teachers_refuse_a_data_source_without_a_teacher() -> None:
    stage = stage_of(build_small(), algorithm=FORWARD_KL, teacher=teachers("sums"))
    with pytest.raises(DataError, match=r"teacher\.paths: no teacher for data_source 'words': .* 'sums'; add the"):
        train(stage)


def test_teacher_of_an_own_module_needs_a_path() -> None:
    with pytest.raises(ConfigError, match=r"needs teacher_log_probs_BT: name the teacher with teacher="):
        stage_of(build_small(), algorithm=Algorithm(advantage="reverse_kl"), teacher=TeacherConfig(update_every=2))


def test_reference_update_refuses_other_models_and_a_stage_without_a_teacher() -> None:
    with pytest.raises(ConfigError, match=r"model='critic'\): use one of reference, teacher"):
        ReferenceUpdate("critic")
    with pytest.raises(ConfigError, match="the stage has no teacher model: use a distillation"):
        train(stage_of(build_small(), algorithm=Algorithm()), 1, ReferenceUpdate(TEACHER))


@for_each(
    ("settings", "message"),
    [
        ({"path": "a", "paths": {"x": "b"}}, "path=a: paths names several teachers"),
        ({"paths": {"x": "b"}, "update_every": 2}, "update_every=2: paths names several teachers"),
        ({"paths": {"x": "a", "y": "b"}, "weights": {"x": 1.0}}, "'y' is in only one of weights and paths"),
        ({"weights": {"x": 1.0}}, "'x' is in only one of weights and paths"),
        ({"paths": {"x": "a", "y": "b"}, "weights": {"x": 1.5, "y": -0.5}}, r"weights\.y=-0\.5: must be above 0"),
        ({"paths": {"x": "a", "y": "b"}, "weights": {"x": 0.5, "y": 0.4}}, r"the sum is 0\.9: make the sum 1"),
        ({"update_every": -1}, "update_every=-1: must be 0 or more"),
        ({"keep": 1.0}, r"keep=1\.0: must be from 0 to below 1"),
    ],
)
def test_teacher_config_refuses_settings_that_do_not_fit(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TeacherConfig(**settings)
