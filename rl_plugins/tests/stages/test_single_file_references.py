"""The stage and the single files of docs/references give the same numbers on the same samples."""

from __future__ import annotations

import ast
import copy
import importlib.util
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from torch import Tensor
from torch.optim import AdamW
from typing_extensions import override

from rl_plugins.config.models import CriticConfig, OptimizerConfig
from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.data.experience import Experience
from rl_plugins.launch.compose import compose_config
from rl_plugins.models.loading import load_causal_lm
from rl_plugins.models.scalar_head import load_scalar_head
from rl_plugins.stages.policy_optimization import PolicyOptimization
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.tests.stages import canned

FOLDER = Path(__file__).parents[3] / "docs" / "references"
STEPS, UPDATES, PASSES, SAMPLES = 2, 2, 2, 3
# Rates with ratios and values outside the clip ranges after a few updates, and a bound below the gradients' norms.
POLICY_RATE, CRITIC_RATE, GRADIENT_CLIP = 0.02, 0.05, 0.1
TOLERANCE = 1e-9

pytestmark = pytest.mark.usefixtures("own_random_numbers")


@pytest.fixture
def own_random_numbers() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        yield


@pytest.fixture
def single_file(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of docs/references named by the parameter."""
    name = f"single_file_{request.param}"
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{request.param}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look up the module.
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@dataclass
class StageRun:
    """The models of a stage after training, and the experience and metrics of each step."""

    policy: Any
    critic: Any
    experiences: list[Experience] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)

    def metric(self, name: str) -> list[float]:
        return [metrics[f"train/{name}"] for metrics in self.metrics]


def run_stage(name: str, policy: Any, overrides: list[str], critic: str | None = None) -> StageRun:
    """Two RL steps of the recipe's algorithm on the canned samples, in several mini-batches and micro-batches."""
    run = StageRun(copy.deepcopy(policy), None)

    class Keeping(PolicyOptimization):
        @override
        def update(self, experience: Experience) -> dict[str, float]:
            run.experiences.append(experience.clone())
            run.metrics.append(super().update(experience))
            return run.metrics[-1]

    stage = Keeping(
        run.policy,
        tokenizer=canned.tokenizer,
        scorer=canned.CannedScorer(),
        sampling=SamplingConfig(max_tokens=20, num_samples=SAMPLES, temperature=canned.TEMPERATURE),
        algorithm=instantiate(compose_config("grpo", ["model.path=none", f"algorithm={name}", *overrides]).algorithm),
        reference=canned.other_model(),
        critic=CriticConfig(critic, OptimizerConfig(CRITIC_RATE, gradient_clip=GRADIENT_CLIP)),
        optimizer=OptimizerConfig(POLICY_RATE, gradient_clip=GRADIENT_CLIP),
        tokens_per_micro_batch=45,
        updates_per_step=UPDATES,
        passes_per_step=PASSES,
        max_steps=STEPS,
    )
    canned.metrics_of(stage)
    strategy = SingleDeviceRolloutStrategy(rollout=canned.CannedRollout())
    trainer = canned.quiet_trainer(strategy, precision="64-true")
    trainer.fit(stage, canned.loader([canned.prompt_batch(canned.PROMPTS)] * STEPS))
    run.critic = stage.critic
    for engine in ("policy", "critic") if critic else ("policy",):
        norm = strategy.gradient_norm(engine)
        assert norm is not None and norm > GRADIENT_CLIP, "the gradient clip must be reached"
    return run


def samples_of(experience: Experience) -> dict[str, Tensor]:
    """The samples of the stage as arguments of `Samples` in the single files."""
    assert experience.scores is not None
    return {
        "tokens_BS": experience.input_ids,
        "attention_mask_BS": experience.attention_mask.long(),
        "response_mask_BT": experience.response_mask.double(),
        "scores_B": experience.scores.double().masked_fill(~experience.valid, torch.nan),
    }


def options(**others: Any) -> dict[str, Any]:
    """Settings of the single files, equal to the settings of `run_stage`."""
    return {
        "samples_per_prompt": SAMPLES,
        "temperature": canned.TEMPERATURE,
        "passes_per_step": PASSES,
        "updates_per_step": UPDATES,
        "micro_batch_size": 4,
        "gradient_clip": GRADIENT_CLIP,
        **others,
    }


def adamw(model: Any, lr: float) -> AdamW:
    return AdamW(model.parameters(), lr=lr, betas=(0.9, 0.999), weight_decay=0.0)


def assert_same(actual: Tensor, expected: Tensor, mask: Tensor | None = None) -> None:
    if mask is not None:
        actual, expected = actual[mask.bool()], expected[mask.bool()]
    assert expected.abs().max() > 0
    assert float((actual - expected).abs().max()) <= TOLERANCE * float(expected.abs().max())


def assert_same_weights(actual: Any, expected: Any, before: Any) -> None:
    """Compare the weights, and the change of each weight."""
    for one, other, start in zip(actual.parameters(), expected.parameters(), before.parameters(), strict=True):
        assert_same(one.detach(), other.detach())
        assert_same(one.detach() - start.detach(), other.detach() - start.detach())


@pytest.mark.parametrize("single_file", ["grpo"], indirect=True)
@pytest.mark.parametrize("kl_coefficient", [0.0, 0.05])
def test_policy_optimization_with_grpo_equals_the_single_file(single_file: Any, kl_coefficient: float) -> None:
    start = canned.OwnPolicy().model
    overrides = [f"algorithm.kl.coefficient={kl_coefficient}", "algorithm.policy_loss_options.clip_high=0.28"]
    run = run_stage("grpo", start, overrides)
    assert min(run.metric("clip_fraction")) > 0 and max(run.metric("dual_clip_fraction")) > 0

    settings = single_file.Settings(**options(clip_high=0.28, kl_coefficient=kl_coefficient))
    policy = copy.deepcopy(start)
    optimizer = adamw(policy, POLICY_RATE)
    reference = load_causal_lm(canned.other_model(), dtype=torch.float64)
    for experience, loss in zip(run.experiences, run.metric("loss"), strict=True):
        samples = single_file.Samples(**samples_of(experience))
        with torch.no_grad():
            mine = single_file.Experience(
                **vars(samples),
                advantages_B=single_file.group_advantages(samples.scores_B, SAMPLES),
                old_log_probs_BT=single_file.response_log_probs(policy, samples, canned.TEMPERATURE),
                ref_log_probs_BT=single_file.response_log_probs(reference, samples, canned.TEMPERATURE),
            )
        mask_BT = experience.response_mask
        assert experience.advantages is not None and experience.old_log_probs is not None
        assert_same(experience.advantages, mine.advantages_B[:, None] * mask_BT)
        assert_same(experience.old_log_probs, mine.old_log_probs_BT, mask_BT)
        losses = single_file.update(policy, optimizer, mine, settings)
        assert loss == pytest.approx(sum(losses) / (UPDATES * PASSES), rel=TOLERANCE)
    assert_same_weights(run.policy, policy, start)


@pytest.fixture
def critic_folder(tmp_path: Path) -> str:
    """A critic whose head is not 0: with a head of zeros all values before the first step would be 0."""
    critic = load_scalar_head(canned.other_model(), dtype=torch.float64)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in critic.score.parameters():  # type: ignore[union-attr]
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    critic.save_pretrained(tmp_path)
    canned.tokenizer.save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize("single_file", ["ppo"], indirect=True)
@pytest.mark.parametrize(("kl_coefficient", "gamma", "lam"), [(0.0, 1.0, 1.0), (0.05, 0.97, 0.9)])
def test_policy_optimization_with_ppo_equals_the_single_file(
    single_file: Any, critic_folder: str, kl_coefficient: float, gamma: float, lam: float
) -> None:
    start = canned.OwnPolicy().model
    overrides = [
        f"algorithm.kl.coefficient={kl_coefficient}",
        "algorithm.kl.placement=reward",
        "algorithm.kl.estimator=k1",
        f"algorithm.advantage_options.gamma={gamma}",
        f"algorithm.advantage_options.lam={lam}",
        "algorithm.value_clip=0.3",
    ]
    run = run_stage("ppo", start, overrides, critic_folder)
    for metric in ("clip_fraction", "dual_clip_fraction", "critic/value_clip_fraction"):
        assert max(run.metric(metric)) > 0, metric

    given = options(kl_coefficient=kl_coefficient, gamma=gamma, lam=lam, value_clip=0.3)
    del given["samples_per_prompt"]
    settings = single_file.Settings(**given)
    policy = copy.deepcopy(start)
    reference = load_causal_lm(canned.other_model(), dtype=torch.float64)
    scalar_head: Any = load_scalar_head(critic_folder, dtype=torch.float64)
    critic = single_file.Critic(scalar_head.model, scalar_head.config.hidden_size)
    critic.head = scalar_head.score
    critic_start = copy.deepcopy(critic)
    optimizers = [adamw(policy, POLICY_RATE), adamw(critic, CRITIC_RATE)]
    for step, experience in enumerate(run.experiences):
        samples = single_file.Samples(**samples_of(experience))
        with torch.no_grad():
            old_log_probs_BT = single_file.response_log_probs(policy, samples, canned.TEMPERATURE)
            ref_log_probs_BT = single_file.response_log_probs(reference, samples, canned.TEMPERATURE)
            old_values_BT = critic(samples)
        rewards_BT = single_file.token_rewards(samples, old_log_probs_BT - ref_log_probs_BT, kl_coefficient)
        advantages_BT, returns_BT = single_file.gae(rewards_BT, old_values_BT, samples.response_mask_BT, settings)
        mine = single_file.Experience(
            **vars(samples),
            advantages_BT=advantages_BT,
            returns_BT=returns_BT,
            old_log_probs_BT=old_log_probs_BT,
            old_values_BT=old_values_BT,
        )
        for name, expected_BT in {
            "old_log_probs": old_log_probs_BT,
            "values": old_values_BT,
            "token_level_rewards": rewards_BT,
            "advantages": advantages_BT,
            "returns": returns_BT,
        }.items():
            assert_same(getattr(experience, name), expected_BT, experience.response_mask)
        policy_losses, critic_losses = zip(*single_file.update(policy, critic, optimizers, mine, settings), strict=True)
        assert run.metric("loss")[step] == pytest.approx(sum(policy_losses) / (UPDATES * PASSES), rel=TOLERANCE)
        assert run.metric("critic/loss")[step] == pytest.approx(sum(critic_losses) / (UPDATES * PASSES), rel=TOLERANCE)
    assert_same_weights(run.policy, policy, start)
    assert_same_weights(run.critic, critic, critic_start)


@pytest.mark.parametrize("single_file", ["grpo"], indirect=True)
def test_group_advantages_keep_the_score_of_a_sample_without_a_group(single_file: Any) -> None:
    scores_B = torch.tensor([0.5, torch.nan, torch.nan, 1.0, 3.0, torch.nan], dtype=torch.float64)
    advantages_B = single_file.group_advantages(scores_B, 3)
    expected = [0.5 / (1 + 1e-6), 0, 0, -1 / (2**0.5 + 1e-6), 1 / (2**0.5 + 1e-6), 0]
    assert advantages_B.tolist() == pytest.approx(expected, rel=1e-12)


class SmallNumbers(random.Random):
    """Draw 0 or 1: sums of 0 and 1 are learned in fewer steps than sums of all digits."""

    @override
    def randrange(self, *_: Any) -> int:
        return super().randrange(2)


@pytest.mark.parametrize(
    ("single_file", "prompts_per_step"), [("grpo", 16), ("ppo", 64)], indirect=["single_file"], ids=["grpo", "ppo"]
)
def test_single_file_main_learns_small_sums(
    single_file: Any, prompts_per_step: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(single_file, "random", SimpleNamespace(Random=SmallNumbers))
    scores = single_file.main(steps=20, settings=single_file.Settings(prompts_per_step=prompts_per_step))
    assert len(scores) == 20
    # The factor is at least 3 for each of the seeds 0 to 4.
    assert sum(scores[-10:]) / 10 > 2 * sum(scores[:3]) / 3
    assert "step   20" in capsys.readouterr().out


@pytest.mark.parametrize("single_file", ["grpo", "ppo"], indirect=True)
def test_score_gives_half_for_right_digits_and_half_for_the_whole_sum(single_file: Any) -> None:
    end, encode = [single_file.END], single_file.encode
    for response, expected in (("12", 1.0), ("1", 0.25), ("13", 0.25), ("2", 0.0), ("120", 0.5)):
        assert single_file.score("7+5=", encode(response) + end) == expected, response
    assert single_file.score("7+5=", encode("12")) == 1.0


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_single_file_is_short_and_imports_only_torch_and_transformers(name: str) -> None:
    text = (FOLDER / f"{name}.py").read_text()
    assert len(text.splitlines()) < 310
    imported = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module).split(".")[0])
    assert imported - set(sys.stdlib_module_names) == {"torch", "transformers"}
