"""VerifiersAgent: rollouts of environments of the package verifiers over the endpoint, and rewards of rubrics."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("verifiers")

from rl_plugins.config.models import OptimizerConfig
from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.data.parquet import check_row, load_rows
from rl_plugins.environments.agent import AgentEnvironment
from rl_plugins.environments.verifiers_agent import VerifiersAgent, dataset_rows, load_environment, rollout_input
from rl_plugins.errors import ConfigError
from rl_plugins.launch.compose import compose_config
from rl_plugins.models.tiny import build_model, save_tiny_policy
from rl_plugins.rewards.records import Score
from rl_plugins.rollout.transformers_engine import TransformersRollout
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.tests.data.prepare_command import main
from rl_plugins.tests.environments.agent_runs import run, tokenizer
from rl_plugins.tests.environments.sample_verifiers import PARTS
from rl_plugins.tests.patience import patient
from rl_plugins.tests.stages import canned
from rl_plugins.tests.stages.test_scheduled_sampler import Loader

SAMPLES = "rl_plugins.tests.environments.sample_verifiers"
AGENT = f"{VerifiersAgent.__module__}.VerifiersAgent"
ASKED, AGAIN = "<|user|>2+3<|assistant|>", "<|user|>again<|assistant|>"


def agent(kind: str) -> AgentEnvironment:
    config = {"_target_": AGENT, "env": SAMPLES, "args": {"kind": kind}}
    limits: dict[str, Any] = {"deadline_s": patient(60), "load_timeout_s": patient(120), "max_failure_rate": 1.0}
    return AgentEnvironment(config, **limits)


# Loading the package takes seconds.
@pytest.fixture(scope="module")
def mixed() -> Iterator[AgentEnvironment]:
    """Environment with all parts."""
    with closing(agent("mixed")) as environment:
        yield environment


@pytest.fixture(scope="module")
def talk() -> Iterator[AgentEnvironment]:
    """Environment with three answers in a trajectory."""
    with closing(agent("talk")) as environment:
        yield environment


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    """The first row of each part."""
    found = dataset_rows(load_environment(SAMPLES, {"kind": "mixed"}), "train")
    return {name: found[2 * place] for place, name in enumerate(PARTS)}


def play(
    environment: AgentEnvironment, row: dict[str, Any], said: dict[str, str], *, max_tokens: int = 400
) -> tuple[Score, str]:
    """Run a trajectory; return the score, and the texts after the first prompt."""
    encoded: dict[str, Sequence[int]] = {prompt: tokenizer.encode(text) for prompt, text in said.items()}
    truth, extra = row["reward_model"]["ground_truth"], row["extra_info"]
    (generations,) = run(environment, encoded, [truth], max_tokens=max_tokens, prompt=row["prompt"], **extra)
    return generations.endings[0].score, tokenizer.decode(generations.responses()[0])


def test_single_turn_is_scored_by_the_weighted_functions_of_the_rubric(
    mixed: AgentEnvironment, rows: dict[str, dict[str, Any]]
) -> None:
    score, text = play(mixed, rows["single"], {})
    # 5 is right, and the row has the number 1 in its column `info`.
    assert score.value == pytest.approx(1 + 0.1 * 101), score.message
    assert (score.details["right"], score.details["length"], score.details["num_turns"]) == (1.0, 101.0, 1.0)
    assert text == "5<|end|>" and score.details["agent/calls"] == 1


@pytest.mark.parametrize(("part", "tool"), [("tool", "add"), ("session", "add_to_sum")])
def test_tools_of_an_environment_run_between_the_answers(
    part: str, tool: str, mixed: AgentEnvironment, rows: dict[str, dict[str, Any]]
) -> None:
    start = f"<|system|>{tool}(a,b){ASKED}"
    call = f'<tool_call>{{"name": "{tool}", "arguments": {{"a": 2, "b": 3}}}}</tool_call><|end|>'
    between = "<|tool|>5<|assistant|>"
    score, text = play(mixed, rows[part], {start: call, f"{start}{call}{between}": "5<|end|>"})
    assert text == f"{call}{between}5<|end|>", score.message
    assert (score.details["right"], score.details["total_tool_calls"], score.details[f"{tool}_calls"]) == (1, 1, 1)
    # The second call continues the first.
    assert (score.details["agent/sequences"], score.details["agent/refused"]) == (1, 0)


def test_conversation_goes_on_until_the_environment_ends(
    mixed: AgentEnvironment, rows: dict[str, dict[str, Any]]
) -> None:
    # An empty answer is an answer.
    for first in ("4", ""):
        score, text = play(mixed, rows["talk"], {ASKED: f"{first}<|end|>"})
        assert text == f"{first}<|end|>{AGAIN}5<|end|>{AGAIN}5<|end|>", score.message
        assert score.value == pytest.approx(1 + 0.1 * 105) and score.details["agent/sequences"] == 1


def test_errors_of_the_environment_and_of_the_rubric_fail_the_trajectory(
    mixed: AgentEnvironment, rows: dict[str, dict[str, Any]]
) -> None:
    faults = {"talk": "the rollout ended with ToolError: the tool is away", "bad": "ValueError: no such key"}
    for part, fault in faults.items():
        score, _ = play(mixed, rows[part], {ASKED: "fail<|end|>"})
        assert (score.failure, score.value) == ("raised", None)
        assert fault in score.message


def test_rubric_scores_a_trajectory_without_room_for_a_further_call(
    talk: AgentEnvironment, rows: dict[str, dict[str, Any]]
) -> None:
    text = f"5<|end|>{AGAIN}5<|end|>"
    score, said = play(talk, rows["talk"], {}, max_tokens=len(tokenizer.encode(text)) + 1)
    assert said == text, score.message
    assert (score.details["num_turns"], score.details["right"], score.details["agent/refused"]) == (2.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("env", "args", "said"),
    [
        (SAMPLES, {"kind": "group"}, "the rubric compares the rollouts of a group"),
        (SAMPLES, {"kind": "mixed", "score_rollouts": False}, "the environment scores no rollouts"),
        (SAMPLES, {"kind": "single", "dataset": 3}, "load_environment failed: RuntimeError: Failed to load"),
        ("no-such-env", {}, "Could not import 'no-such-env' environment"),
    ],
)
def test_environment_that_cannot_be_played_is_refused_in_one_line(env: str, args: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        VerifiersAgent(env, args=args)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_dataset_rows_keep_all_columns_for_the_rollout() -> None:
    environment = load_environment(SAMPLES, {"kind": "talk"})
    rows = {split: dataset_rows(environment, split) for split in ("train", "test")}
    assert [len(found) for found in rows.values()] == [2, 1]
    assert len(dataset_rows(environment, "train", 1)) == 1
    for row in (*rows["train"], *rows["test"]):
        check_row(row, "row")
    row = rows["train"][1]
    assert rollout_input({**row, "ground_truth": "8"}) == environment.get_dataset()[1]
    other = {"prompt": row["prompt"], "ground_truth": "8", "extra_info": {"index": 4, "low": 2}}
    assert rollout_input(other) == {
        "prompt": row["prompt"], "answer": "8", "info": {"index": 4, "low": 2}, "example_id": 4,
    }  # fmt: skip


def test_prepare_writes_the_rows_and_prints_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["verifiers", "--env", SAMPLES, "--args", '{"kind": "talk"}', "--output", str(tmp_path)]
    assert main([*options, "--num-train", "1"]) == 0
    rows = load_rows([tmp_path / "train.parquet", tmp_path / "test.parquet"])
    assert [row["extra_info"]["split"] for row in rows] == ["train", "test"]
    (command,) = [line for line in capsys.readouterr().out.splitlines() if "rl_plugins.recipes.grpo" in line]
    overrides = shlex.split(command)[3:]
    agent = compose_config("grpo", [*overrides, "sampling.max_tokens=100"]).environment.agent
    assert agent == {"_target_": AGENT, "env": SAMPLES, "args": {"kind": "talk"}}


def test_policy_trains_on_the_rollouts_of_an_environment(talk: AgentEnvironment, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "initializer_range": 0.2}
    save_tiny_policy(tmp_path, **sizes)
    stage = canned.Keeping(
        build_model(**sizes),
        tokenizer=canned.tokenizer,
        # An untrained policy ends few responses.
        sampling=SamplingConfig(max_tokens=160, num_samples=3, stop_token_ids=tuple(range(60, 200))),
        environment=talk,
        optimizer=OptimizerConfig(lr=0.01),
        max_steps=1,
    )
    strategy = SingleDeviceRolloutStrategy(rollout=TransformersRollout(str(tmp_path)))
    canned.quiet_trainer(strategy).fit(stage, Loader(["1+1", "12+30"]))
    (samples,), (metrics,) = stage.trained_on, stage.metrics
    assert samples.valid.all() and metrics["train/rollout_gap_max"] < 1e-4
    assert metrics["train/turns"] == metrics["train/rewards/num_turns"] > 1
    assert metrics["train/reward"] == pytest.approx(
        metrics["train/rewards/right"] + 0.1 * metrics["train/rewards/length"]
    )
