"""`rl-plugins generate --recipe`: conversations with the environment of a run, and their measures."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf

from benchmarks.tiny_vision import save_tiny_vision
from rl_plugins.commands.main import main
from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.data.prepare.files import write_splits
from rl_plugins.data.prepare.tasks import addition_rows
from rl_plugins.errors import ConfigError
from rl_plugins.launch.policy_samples import recipe_with_conversations
from rl_plugins.models.tiny import save_tiny_policy
from rl_plugins.redaction import REMOVED
from rl_plugins.rollout.engine import Generations
from rl_plugins.rollout.transformers_engine import TransformersRollout
from rl_plugins.tests import pictures

OBJECTS = "rl_plugins.tests.environments.sample_environments"
TOOLS = "rl_plugins.tests.environments.sample_tools"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Configuration of a run; an untrained policy ends few responses by itself."""
    environment = {"stateful": f"{OBJECTS}.Lengths", "max_turns": 2, "max_objects": 4}
    return write_recipe(tmp_path, environment=environment)


def write_recipe(folder: Path, **groups: Any) -> Path:
    values = {
        "stage": "policy_optimization",
        "model": {"path": str(folder / "tiny")},
        "run": {"name": "talk"},
        "data": {"max_prompt_tokens": 40},
        "sampling": {"stop_token_ids": list(range(60, 200))},
        **groups,
    }
    file = folder / "config.yaml"
    file.write_text(OmegaConf.to_yaml(OmegaConf.create(values)), encoding="utf-8")
    return file


def generate_command(folder: Path, recipe: Path, **model: Any) -> list[str]:
    """Write a policy and rows; return the command for three conversations with each row, without the output."""
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "initializer_range": 0.2}
    save_tiny_policy(folder / "tiny", **sizes, **model)
    write_splits(addition_rows(below=20, num_train=4, num_test=1, seed=0), folder / "data")
    return [
        "generate", str(folder / "tiny"), "--data", str(folder / "data/train.parquet"), "--engine", "transformers",
        "--samples", "3", "--max-tokens", "60", "--save-every", "2", "--recipe", str(recipe), "--output",
    ]  # fmt: skip


def test_generate_holds_conversations_that_evaluate_measures(
    tmp_path: Path, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = generate_command(tmp_path, recipe)
    assert main([*command, str(tmp_path / "a.parquet")]) == 0, capsys.readouterr().err
    rows = pq.read_table(tmp_path / "a.parquet").to_pylist()
    assert len(rows) == 4 and all(len(row["scores"]) == 3 for row in rows)
    for row in rows:
        for place, text in enumerate(row["conversations"]):
            messages = json.loads(text)
            said = [message["content"] for message in messages if message["role"] == "assistant"]
            # The object starts with the prompt of the row and a message of its own.
            assert messages[0]["content"] == row["prompt"][0]["content"] and messages[1]["role"] == "user"
            assert row["scores"][place] == sum(1.0 + len(response) for response in said)
            assert row["turns"][place] == len(said) and row["answers"][place] == said[-1]
            assert row["failures"][place] is None
    assert max(max(row["turns"]) for row in rows) == 2
    # The same command gives the same conversations.
    assert main([*command, str(tmp_path / "b.parquet")]) == 0
    assert pq.read_table(tmp_path / "b.parquet").to_pylist() == rows
    # A kill after the last part leaves the folder of the parts.
    left = tmp_path / "b.parquet.parts"
    left.mkdir()
    assert main([*command, str(tmp_path / "b.parquet")]) == 0 and not left.exists()

    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "a.parquet")]) == 0
    content = json.loads((tmp_path / "a.evaluation.json").read_text())
    assert content["reward"] == "environment"
    mean = sum(sum(row["scores"]) for row in rows) / 12
    assert content["measures"]["addition"]["mean@3"]["value"] == pytest.approx(mean)
    assert main(["evaluate", str(tmp_path / "a.parquet"), "--reward", "exact_match"]) == 2
    assert "has conversations with the scores of their environment: leave --reward out" in capsys.readouterr().err

    write_recipe(tmp_path, environment={"stateful": f"{OBJECTS}.Lengths", "max_turns": 1})
    assert main([*command, str(tmp_path / "a.parquet")]) == 2
    assert "was made with other settings: environment was" in capsys.readouterr().err


def test_generate_completes_a_file_with_failed_conversations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(tmp_path, environment={"stateful": f"{OBJECTS}.Even", "max_turns": 1, "max_objects": 4})
    command = generate_command(tmp_path, recipe)
    samples = tmp_path / "a.parquet"
    assert main([*command, str(samples), "--max-tokens", "4"]) == 0, capsys.readouterr().err
    odd = 0
    for row in pq.read_table(samples).to_pylist():
        failed = int(row["reward_model"]["ground_truth"]) % 2 == 1
        assert all((failure is not None) == failed for failure in row["failures"])
        odd += failed
    assert 0 < odd < 4
    assert main(["evaluate", str(samples)]) == 2
    assert "rewards failed, more than max_failure_rate=0.1 allows" in capsys.readouterr().err
    assert main(["evaluate", str(samples), "--max-failure-rate", "1"]) == 0


@pytest.mark.extended
def test_generate_holds_conversations_with_tools_that_evaluate_measures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(
        tmp_path,
        environment={"tools": [f"{TOOLS}.add"], "parser": f"{TOOLS}.add_to_every_response", "max_turns": 2},
        reward={"functions": {"default": {"_target_": "rl_plugins.tests.rewards.sample_rewards.length"}}},
    )
    command = generate_command(tmp_path, recipe, tools=True)
    assert main([*command, str(tmp_path / "a.parquet")]) == 0, capsys.readouterr().err
    rows = pq.read_table(tmp_path / "a.parquet").to_pylist()
    places = [(row, place) for row in rows for place in range(3)]
    for row, place in places:
        first, *rest = json.loads(row["conversations"][place])
        assert [message["role"] for message in rest] == ["tool", "tool", "assistant"] * (row["turns"][place] == 2)
        results = [str(len(first["content"]) + number) for number in range(2)]
        assert not rest or [message["content"] for message in rest[:2]] == results
        last = rest[-1] if rest else first
        assert row["answers"][place] == last["content"] and row["scores"][place] == len(last["content"])
    assert 2 in {row["turns"][place] for row, place in places}
    assert main(["evaluate", str(tmp_path / "a.parquet")]) == 0
    (measures,) = json.loads((tmp_path / "a.evaluation.json").read_text())["measures"].values()
    scores = [row["scores"][place] for row, place in places]
    assert measures["mean@3"]["value"] == pytest.approx(sum(scores) / len(scores))


def test_evaluate_asks_for_the_reward_of_a_policy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "policy", "--data", "a.parquet", "--output", "b"]) == 2
    assert "name the reward of single responses with --reward" in capsys.readouterr().err
    two_rewards = ["--reward", "exact_match", "--recipe", "config.yaml"]
    assert main(["evaluate", "policy", "--data", "a.parquet", "--output", "b", *two_rewards]) == 2
    assert "conversations have the scores of their environment: leave --reward out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ({"stage": "sft"}, "its policy has no conversations: leave --recipe out"),
        ({}, "its policy has no conversations: leave --recipe out"),
        ({"environment": {"max_turn": 2}}, "max_turn"),
        ({"environment": {"tools": ["{}"], "memory_mb": 0}}, "memory_mb"),
        ({"environment": {"stateful": {"_target_": "a.B", "api_key": REMOVED}}}, "in place of a secret"),
    ],
)
def test_recipe_with_conversations_refuses_a_file_in_one_line(tmp_path: Path, groups: Any, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        recipe_with_conversations(write_recipe(tmp_path, **groups))
    assert said in str(refused.value) and "\n" not in str(refused.value)
    assert str(refused.value).startswith(f"--recipe {tmp_path / 'config.yaml'}: ")


def test_recipe_with_conversations_of_sft_on_responses_has_scores(tmp_path: Path) -> None:
    data = {"messages_key": "messages", "validate_on": "responses"}
    recipe = recipe_with_conversations(write_recipe(tmp_path, stage="sft", data=data, environment={"max_turns": 2}))
    assert recipe.scores


def test_recipe_with_conversations_names_a_missing_or_damaged_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\(No such file or directory\): name the config\.yaml of a run"):
        recipe_with_conversations(tmp_path / "none.yaml")
    (tmp_path / "none.yaml").write_text("[1")
    with pytest.raises(
        ConfigError, match=r"^--recipe .*none\.yaml: not valid YAML \(.*\): name the config\.yaml of a run"
    ):
        recipe_with_conversations(tmp_path / "none.yaml")


def test_generate_and_evaluate_take_prompts_with_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny_vision("llava", tmp_path / "llava")
    save_tiny_policy(tmp_path / "text", hidden_size=32, intermediate_size=48)
    images = [pictures.encoded(pictures.picture(n)) for n in range(2)]
    rows = [pictures.row("no picture"), *(pictures.row("<image>color?", image) for image in images)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")

    def generated(model: str, name: str) -> list[str]:
        return [
            "generate", str(tmp_path / model), "--data", str(tmp_path / "rows.parquet"), "--engine", "transformers",
            "--max-tokens", "4", "--save-every", "2", "--output", str(tmp_path / name),
        ]  # fmt: skip

    assert main(generated("llava", "a.parquet")) == 0, capsys.readouterr().err
    found = pq.read_table(tmp_path / "a.parquet").to_pylist()
    assert [len(one["responses"]) for one in found] == [1, 1, 1] and found[2]["images"] == rows[2]["images"]
    assert main(["evaluate", str(tmp_path / "a.parquet"), "--reward", "exact_match"]) == 0, capsys.readouterr().err
    assert main(generated("text", "b.parquet")) == 2
    assert "row 1, column 'images': the row has images, which a vision-language model reads" in capsys.readouterr().err


def test_generate_takes_chat_template_and_stops_from_the_run_of_the_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple[list[list[int]], SamplingConfig]] = []
    sample = TransformersRollout.sample_groups

    def record(engine: TransformersRollout, requests: Any, sampling: SamplingConfig) -> Generations:
        calls.append(([request.prompt for request in requests], sampling))
        return sample(engine, requests, sampling)

    monkeypatch.setattr(TransformersRollout, "sample_groups", record)
    policy = tmp_path / "run" / "policy"
    save_tiny_policy(policy, hidden_size=32, intermediate_size=48)
    template = (policy / "chat_template.jinja").read_text()
    (policy / "chat_template.jinja").write_text(template + "{% if thinks | default(true) %}123{% endif %}")
    write_recipe(policy.parent, data={"chat_template_kwargs": {"thinks": False}}, sampling={"stop_token_ids": [7]})
    shutil.copytree(policy, tmp_path / "copy")
    write_splits(addition_rows(below=20, num_train=1, num_test=1, seed=0), tmp_path / "data")
    command = ["--data", str(tmp_path / "data/train.parquet"), "--engine", "transformers", "--max-tokens", "2"]

    def sampled(name: str, *options: str) -> tuple[list[list[int]], tuple[int, ...]]:
        output = str(tmp_path / f"{len(calls)}.parquet")
        assert main(["generate", str(tmp_path / name), *command, *options, "--output", output]) == 0
        prompts, sampling = calls[-1]
        return prompts, sampling.stop_token_ids[1:]

    (with_thoughts,), no_stops = sampled("copy")
    as_run = sampled("run/policy")
    assert as_run == ([with_thoughts[:-3]], (7,)) and no_stops == ()
    assert "the stop strings are those of" in capsys.readouterr().out
    assert sampled("copy", "--like", str(policy.parent / "config.yaml")) == as_run

    write_recipe(policy.parent, sampling={"stop": ["###"]}, reward={"judge": {"api_key": "${oc.env:NO_SUCH_KEY}"}})
    assert main(["generate", str(policy), *command, "--output", str(tmp_path / "end.parquet")]) == 2
    assert "--engine transformers: sampling.stop=['###'] of the run ends responses" in capsys.readouterr().err
    write_recipe(policy.parent, sampling={"stop_token_ids": "x"})
    assert main(["generate", str(policy), *command, "--output", str(tmp_path / "end.parquet")]) == 2
    assert f"error: {policy.parent / 'config.yaml'}: option 'sampling.stop_token_ids'" in capsys.readouterr().err
    write_recipe(policy.parent, data={"chat_template": "chatml"})
    assert main(["generate", str(policy), *command, "--output", str(tmp_path / "end.parquet")]) == 2
    assert f"error: {policy.parent / 'config.yaml'}: chat_template='chatml': a Jinja" in capsys.readouterr().err


def test_generate_counts_the_window_after_the_scaling_of_rotary_positions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny_policy(tmp_path / "tiny", hidden_size=32, intermediate_size=48, max_position_embeddings=16)
    file = tmp_path / "tiny" / "config.json"
    scaling = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 16}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_parameters": scaling}))
    write_splits(addition_rows(below=20, num_train=1, num_test=1, seed=0), tmp_path / "data")
    command = [
        "generate", str(tmp_path / "tiny"), "--data", str(tmp_path / "data/train.parquet"), "--engine", "transformers",
        "--output",
    ]  # fmt: skip
    assert main([*command, str(tmp_path / "a.parquet"), "--max-tokens", "30"]) == 2
    assert "--max-tokens 30 more than the 32 that the model takes" in capsys.readouterr().err
    assert main([*command, str(tmp_path / "b.parquet"), "--max-tokens", "16"]) == 0, capsys.readouterr().err
