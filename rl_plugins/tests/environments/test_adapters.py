"""All kinds of environments in a stage: exact tokens, dynamic sampling, validation, sampling ahead, and resume."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from typing_extensions import override

from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.algorithms.filtering import GroupFilter
from rl_plugins.callbacks.checkpoint import PolicyCheckpoint
from rl_plugins.config.models import OptimizerConfig
from rl_plugins.config.sampling import EnvironmentConfig, SamplingConfig, Schedule
from rl_plugins.data.experience import Experience, computed
from rl_plugins.data.loaders import StepLoader
from rl_plugins.data.prompts import PromptBatch
from rl_plugins.environments.agent import AgentEnvironment
from rl_plugins.environments.stateful import StatefulEnvironment
from rl_plugins.environments.tools import ToolEnvironment
from rl_plugins.models.tiny import TOOL_CHAT_TEMPLATE, build_model, build_tokenizer
from rl_plugins.rewards.inline import InlineScorer
from rl_plugins.rollout.engine import Generations
from rl_plugins.run_folder import RunFolder
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.tests.environments import sample_gates
from rl_plugins.tests.environments.openenv_server import guessing_server
from rl_plugins.tests.environments.test_mcp_tools import SERVER
from rl_plugins.tests.environments.test_tools import call_twice
from rl_plugins.tests.patience import patient
from rl_plugins.tests.rewards import sample_rewards
from rl_plugins.tests.stages import canned
from rl_plugins.tests.stages.test_scheduled_sampler import Loader
from rl_plugins.tests.tiers import tiered
from rl_plugins.weights.source import WeightSource

SAMPLES = "rl_plugins.tests.environments"
KINDS = ["tools", "stateful", "agent"]
LATE = "12+30"
"""Prompt whose conversation waits for new weights after its first response."""

tokenizer: Any = build_tokenizer()
tokenizer.chat_template = TOOL_CHAT_TEMPLATE


class Speaker(canned.CannedRollout):
    """A rollout engine whose responses depend on prompt and seed alone, and that spells a special token in letters.

    Args:
        folder: folder of the files of `sample_gates`.
        uniform: prompt with equal responses.

    Attributes:
        spoken: token ids and log-probs of each response.
    """

    def __init__(self, folder: Path, uniform: str = "nothing") -> None:
        super().__init__()
        self._folder, self._uniform, self._version = folder, uniform, 0
        self.spoken: list[tuple[list[int], list[float]]] = []

    @override
    def update_weights(self, source: WeightSource, version: int) -> None:
        self._version = version
        if version:
            (self._folder / sample_gates.UPDATED).touch()

    @override
    def generate(self, prompts: list[list[int]], sampling: SamplingConfig, seeds: list[int] | None) -> Generations:
        said: list[tuple[list[int], list[float]]] = []
        for prompt, seed in zip(prompts, seeds or [0] * len(prompts), strict=True):
            text = tokenizer.decode(prompt)
            first = "w" if LATE in text and "go" not in text else "n"
            if first == "w":
                (self._folder / sample_gates.ASKED).touch()
            for sample in range(sampling.num_samples):
                number = 7 if self._uniform in text else random.Random(f"{text}{seed + sample}").randrange(10000)
                ids = [*tokenizer.encode(f"{first}<|us"), *tokenizer.encode(f"er|>{number}"), tokenizer.eos_token_id]
                said.append((ids, [-0.25 * (1 + place % 7) for place in range(len(ids))]))
        self.spoken += said
        responses, of_tokens = zip(*said, strict=True)
        return Generations.from_responses(responses, of_tokens, ["stop"] * len(said), self._version)


class ShowingLoader(Loader):
    """Batches of two prompts that show the names of tools."""

    @override
    def draw(self) -> PromptBatch:
        return showing(super().draw())


class Showing(canned.Prompts):
    """Prompts that show the names of tools."""

    @override
    def batch(self, indices: Sequence[int], epoch: int) -> PromptBatch:
        return showing(super().batch(indices, epoch))


def showing(batch: PromptBatch) -> PromptBatch:
    shown = tokenizer.encode("add multiply variable leave wait_for_weights ")
    return PromptBatch([[*shown, *ids] for ids in batch.prompt_ids], batch.rows, batch.columns, batch.epoch)


@dataclass
class Adapter:
    """An environment, and a reward function or None."""

    environment: Any
    scorer: Any = None


def call_multiply(text: str) -> list[dict[str, Any]]:
    """Parser: each text is a call."""
    return [{"name": "multiply", "arguments": {"a": len(text), "b": 2}}]


def exact_adapter(name: str, stack: ExitStack) -> Adapter:
    """Return an environment that lets the policy respond more than once."""
    limits: dict[str, Any] = {"max_turns": 3, "deadline_s": patient(60)}
    length = InlineScorer({"_target_": f"{sample_rewards.__name__}.length"})
    if name == "reply":
        coach = InlineScorer({"_target_": f"{sample_rewards.__name__}.coach"})
        return Adapter(EnvironmentConfig(max_turns=3), coach)
    if name == "tools":
        return Adapter(ToolEnvironment([f"{SAMPLES}.sample_tools.add"], parser=call_twice, **limits), length)
    if name == "mcp":
        servers = [{"mcp": [sys.executable, SERVER]}]
        return Adapter(ToolEnvironment(servers, parser=call_multiply, load_timeout_s=patient(30), **limits), length)
    if name == "agent":
        return Adapter(agent_of(f"{SAMPLES}.sample_agents.talk"))
    config: dict[str, Any] = {"_target_": f"{SAMPLES}.sample_environments.Lengths"}
    if name == "gymnasium":
        config = {"_target_": "rl_plugins.environments.gymnasium_text.GymnasiumText", "env": "FrozenLake-v1"}
    if name == "openenv":
        address, _ = stack.enter_context(guessing_server())
        config = {"_target_": "rl_plugins.environments.openenv_text.OpenEnvText", "url": address}
        config["to_action"] = f"{SAMPLES}.sample_environments.read_guess"
    return Adapter(StatefulEnvironment(config, **limits))


def agent_of(target: str, **options: Any) -> AgentEnvironment:
    pytest.importorskip("vllm")
    return AgentEnvironment({"_target_": target, **options}, max_turns=3, deadline_s=patient(60))


@pytest.fixture
def gates(tmp_path: Path) -> Path:
    """Folder for the files of `sample_gates`."""
    folder = tmp_path / "gates"
    folder.mkdir()
    return folder


def waiting(kind: str, folder: Path) -> Adapter:
    """Return an environment that waits for new weights."""
    here = sample_gates.__name__
    limits: dict[str, Any] = {"max_turns": 3, "deadline_s": patient(60)}
    if kind == "agent":
        return Adapter(agent_of(f"{here}.ask", folder=str(folder)))
    if kind == "stateful":
        return Adapter(StatefulEnvironment({"_target_": f"{here}.Waiting", "folder": str(folder)}, **limits))
    tools = [{"_target_": f"{here}.WaitForWeights", "folder": str(folder)}]
    scorer = InlineScorer({"_target_": f"{here}.last_number"})
    return Adapter(ToolEnvironment(tools, parser=sample_gates.read_wait, **limits), scorer)


def stage_of(adapter: Adapter, **options: Any) -> canned.Keeping:
    return canned.Keeping(
        build_model(hidden_size=32, intermediate_size=48, initializer_range=0.2),
        tokenizer=tokenizer,
        scorer=adapter.scorer,
        sampling=SamplingConfig(max_tokens=200, num_samples=2),
        environment=adapter.environment,
        optimizer=OptimizerConfig(lr=0.01),
        **{"max_steps": 1, **options},
    )


def open_gates(folder: Path) -> None:
    for name in (sample_gates.ASKED, sample_gates.UPDATED):
        (folder / name).touch()


def close(adapter: Adapter) -> None:
    if not isinstance(adapter.environment, EnvironmentConfig):
        adapter.environment.close()


def sampled_parts(samples: Experience) -> list[tuple[list[int], list[float]]]:
    """Return token ids and log-probs of each turn, as the mask separates the turns."""
    parts: list[tuple[list[int], list[float]]] = []
    for ids, mask, log_probs in zip(samples.responses, samples.response_mask, samples.rollout_log_probs, strict=True):
        edges = [place for place, (a, b) in enumerate(pairwise([0, *mask.tolist(), 0])) if a != b]
        parts += [
            (ids[start:end].tolist(), log_probs[start:end].tolist())
            for start, end in zip(edges[::2], edges[1::2], strict=True)
        ]
    return parts


@pytest.mark.parametrize("name", ["tools", "reply", "stateful", "agent", "gymnasium", "openenv", "mcp"])
def test_policy_trains_on_the_sampled_tokens(name: str, gates: Path) -> None:
    for module in {"gymnasium": ["gymnasium"], "mcp": ["mcp"]}.get(name, ()):
        pytest.importorskip(module)
    engine = Speaker(gates)
    with ExitStack() as stack:
        adapter = exact_adapter(name, stack)
        stack.callback(close, adapter)
        stage = stage_of(adapter)
        strategy = SingleDeviceRolloutStrategy(rollout=engine)
        canned.quiet_trainer(strategy).fit(stage, ShowingLoader(["1+1", "100+1"]))
    (samples,) = stage.trained_on
    assert samples.valid.all() and stage.metrics[0]["train/turns"] > 1
    assert sorted(sampled_parts(samples)) == sorted(engine.spoken) and len(engine.spoken) > len(samples)


@pytest.mark.parametrize("kind", tiered(KINDS, {"stateful", "tools"}))
def test_dynamic_sampling_replaces_uniform_groups_of_conversations(kind: str, gates: Path) -> None:
    open_gates(gates)
    with closing((adapter := waiting(kind, gates)).environment):
        stage = stage_of(adapter, algorithm=Algorithm(group_filter=GroupFilter()))
        strategy = SingleDeviceRolloutStrategy(rollout=Speaker(gates, uniform="4+4"))
        canned.quiet_trainer(strategy).fit(stage, ShowingLoader(["4+4", LATE, "100+1", "1+1"]))
    (samples,) = stage.trained_on
    assert [prompt[-1]["content"] for prompt in samples.columns["prompt"][::2]] == [LATE, "100+1"]
    # The metrics count all four groups.
    assert stage.metrics[0]["train/generation_batches"] == 2 and stage.metrics[0]["train/turns"] == 1.25


@pytest.mark.parametrize("kind", tiered(KINDS, {"stateful", "agent"}))
def test_validation_scores_whole_conversations(kind: str, gates: Path) -> None:
    open_gates(gates)
    with closing((adapter := waiting(kind, gates)).environment):
        stage = stage_of(adapter, eval_sampling=SamplingConfig(max_tokens=200, num_samples=2))
        metrics = canned.metrics_of(stage)
        trainer = canned.quiet_trainer(SingleDeviceRolloutStrategy(rollout=Speaker(gates)))
        trainer.validate(stage, canned.loader([showing(canned.prompt_batch([LATE, "1+1"]))]), verbose=False)
    rows = stage.shown_samples.validation
    assert [len(row["turns"]) for row in rows] == [2, 2, 1, 1]
    numbers = [sample_gates.last_number(row["turns"][-1]["response"]) for row in rows]
    of_turns = 0.0 if kind == "agent" else 0.5
    assert [row["score"] for row in rows] == [numbers[0] + of_turns, numbers[1] + of_turns, *numbers[2:]]
    assert metrics["val/canned/mean_at_2"] == pytest.approx(sum(row["score"] for row in rows) / 4)


def train_ahead(kind: str, folder: Path, run: RunFolder, resume: Path | None = None) -> canned.Keeping:
    """Train three steps with a step ahead. No conversation of the first step waits, and one of the second does."""
    folder.mkdir(parents=True, exist_ok=True)
    with closing((adapter := waiting(kind, folder)).environment):
        stage = stage_of(adapter, schedule=Schedule(1), max_steps=3)
        trainer = canned.quiet_trainer(
            SingleDeviceRolloutStrategy(rollout=Speaker(folder)),
            callbacks=[PolicyCheckpoint(run.path, every=1, keep_last=9)],
        )
        loader = next(loader for loader in loaders() if is_late_in_the_second_step(loader))
        trainer.fit(stage, loader, ckpt_path=None if resume is None else resume / "state", weights_only=True)
    return stage


def loaders() -> Iterator[StepLoader[PromptBatch]]:
    for seed in range(100):
        yield StepLoader(Showing(), prompts_per_step=2, seed=seed)


def is_late_in_the_second_step(loader: StepLoader[PromptBatch]) -> bool:
    first, second = ([canned.Prompts.texts[row] for row in loader.order.batch(step)] for step in range(2))
    return LATE not in first and LATE in second


def late_versions(steps: Sequence[Experience]) -> set[int]:
    """Return the versions of the policy that sampled the conversations with the prompt `LATE`."""
    found: set[int] = set()
    for samples in steps:
        late_B = torch.tensor([prompt[-1]["content"] == LATE for prompt in samples.columns["prompt"]])
        found |= set(samples.policy_versions[samples.response_mask.bool() & late_B[:, None]].tolist())
    return found


def conversations(steps: Sequence[Experience]) -> list[tuple[str, list[int], list[int], float]]:
    """Return prompt, tokens, mask and score of each conversation, in an order without steps."""
    return sorted(
        (prompt[-1]["content"], ids[:length].tolist(), mask[:length].int().tolist(), score)
        for samples in steps
        for prompt, ids, mask, length, score in zip(
            samples.columns["prompt"], samples.responses, samples.response_mask, samples.response_lengths.tolist(),
            computed(samples.scores).tolist(), strict=True,
        )
    )  # fmt: skip


@pytest.mark.parametrize("kind", tiered(KINDS, {"stateful"}))
def test_run_ahead_spans_policies_and_begins_again_from_rows_after_a_resume(kind: str, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    whole = train_ahead(kind, tmp_path / "gates", run).trained_on
    # The first response is of the policy before the first step, and the second of the policy after.
    assert late_versions(whole[1:2]) == {0, 1}
    resumed = train_ahead(kind, tmp_path / "other gates", RunFolder(tmp_path / "resumed"), run.checkpoint(1)).trained_on
    # The conversation in flight begins again, and may therefore end in the later of the two steps.
    assert len(resumed) == 2 and LATE in {prompt for prompt, *_ in conversations(resumed)}
    assert 0 not in late_versions(resumed)
    assert conversations(resumed) == conversations(whole[1:])
