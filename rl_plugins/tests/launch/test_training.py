"""Arguments of stages, data modules and the trainer of a `TrainingRun` follow from the options."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import SimpleProfiler

from rl_plugins.callbacks.checkpoint import PolicyCheckpoint
from rl_plugins.environments.agent import AgentEnvironment
from rl_plugins.environments.stateful import StatefulEnvironment
from rl_plugins.environments.tools import ToolEnvironment
from rl_plugins.errors import ConfigError
from rl_plugins.launch.compose import override
from rl_plugins.launch.scorer import scorer_of
from rl_plugins.launch.task_environment import task_environment, try_environment
from rl_plugins.launch.training import TrainingRun
from rl_plugins.models.packed_attention import PACKED_SDPA
from rl_plugins.models.tiny import build_tokenizer, save_tiny_policy
from rl_plugins.recipes.grpo import build_stage
from rl_plugins.run_folder import RunFolder, append_metrics
from rl_plugins.strategies.contract import COST_CRITIC, CRITIC
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.tests.launch.configurations import configured
from rl_plugins.tests.quiet_trainer import quiet_trainer
from rl_plugins.tests.stages import canned
from rl_plugins.tracking.loggers import JsonLinesLogger


def training_run(folder: Path, *overrides: str) -> TrainingRun:
    """Return the run of the GRPO recipe in a folder, with a tiny tokenizer in the place of a model folder."""
    run = TrainingRun(
        config=configured("grpo", "model.path=model", *overrides),
        folder=RunFolder(folder),
        strategy=SingleDeviceRolloutStrategy("cpu"),
        scorer=None,
        checkpoint=None,
        in_ray=False,
        redraw_s=0,
        started=0,
    )
    vars(run)["processor"] = build_tokenizer()
    return run


def test_chat_template_kwargs_reach_data_modules_and_conversations(tmp_path: Path) -> None:
    run = training_run(tmp_path, "+data.chat_template_kwargs.enable_thinking=false")
    expected: dict[str, Any] = {"enable_thinking": False}
    assert run.data_options()["chat_template_kwargs"] == expected
    environment: Any = run.generation_options()["environment"]
    assert environment.template_options == expected


def test_each_environment_has_the_options_of_all_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    values: dict[str, Any] = {
        "max_turns": 3, "max_observation_tokens": 4, "max_sequences": 5, "max_objects": 6, "deadline_s": 7.0,
        "load_timeout_s": 8.0, "memory_mb": 9, "max_characters": 10, "left_out": "end", "parser": "xml",
        "pass_env": ["KEY"], "endpoint_host": "::1",
    }  # fmt: skip
    overrides = [
        *(override(f"environment.{name}", value) for name, value in values.items()), "model.path=model",
        "data.max_prompt_tokens=11", "reward.max_failure_rate=0.5", "+data.chat_template_kwargs.thinks=false",
    ]  # fmt: skip
    others = {"max_prompt_tokens": 11, "max_failure_rate": 0.5, "template_options": {"thinks": False}}
    for name, kind, argument in (
        ("tools", ToolEnvironment, "tools"),
        ("stateful", StatefulEnvironment, "environment"),
        ("agent", AgentEnvironment, "agent"),
    ):
        value: Any = ["a.b"] if name == "tools" else "a.b"
        config = configured("grpo", f"environment={name}", override(f"environment.{name}", value), *overrides)
        signature = inspect.signature(kind)
        monkeypatch.setattr(f"{kind.__module__}.{kind.__name__}", signature.bind)
        given: Any = task_environment(config)
        known = {**values, **others, argument: value}
        assert given.arguments == {each: known[each] for each in signature.parameters}


def test_try_environment_returns_the_template_variables_of_the_run_with_the_tools() -> None:
    options = ["model.path=model", "+data.chat_template_kwargs.thinks=false"]
    assert try_environment(configured("grpo", *options), {}, None) == {"thinks": False}
    tools = ["environment=tools", "environment.tools=[rl_plugins.tests.environments.sample_tools.add]"]
    variables = try_environment(configured("grpo", *options, *tools), {}, None)
    assert [tool["function"]["name"] for tool in variables["tools"]] == ["add"] and variables["thinks"] is False


def test_sampling_of_a_run_has_the_options_of_sampling(tmp_path: Path) -> None:
    run = training_run(tmp_path, "sampling.stop_token_ids=[3]", "sampling.min_p=0.1", "batch.samples_per_prompt=2")
    sampling = run.sampling()
    # The stage adds the end of the sequence.
    assert sampling.stop_token_ids == (3,)
    assert (sampling.min_p, sampling.num_samples) == (0.1, 2)
    assert run.generation_options()["eval_sampling"].min_p == 0


def test_validation_options_are_the_sampling_of_validation(tmp_path: Path) -> None:
    options = {"samples_per_prompt": 4, "temperature": 0.7, "top_p": 0.9, "top_k": 20}
    run = training_run(tmp_path, *(f"validation.{name}={value}" for name, value in options.items()))
    sampling = run.generation_options()["eval_sampling"]
    assert (sampling.num_samples, sampling.temperature, sampling.top_p, sampling.top_k) == tuple(options.values())


def test_sft_that_validates_on_responses_has_no_scorer_and_no_sampling(tmp_path: Path) -> None:
    options = "model.path=model", "data.messages_key=messages", "data.validate_on=responses"
    config = configured("sft", *options, "reward.num_workers=2")
    assert scorer_of(config) is None
    given = replace(training_run(tmp_path), config=config).validation_options()
    assert given == {"scorer": None, "eval_sampling": None, "environment": None, "seed": 0}


def test_reward_workers_have_time_to_start_before_the_time_to_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_plugins.launch.scorer.RewardPool", lambda rewards, **options: options)
    for load_s in (60, 600):
        options: Any = scorer_of(configured("grpo", "model.path=model", f"reward.load_timeout_s={load_s}"))
        assert options["start_timeout_s"] == 120 + load_s


def test_async_checkpoints_have_half_the_deadline_of_collectives(tmp_path: Path) -> None:
    options = ["run.async_checkpoints=true", "strategy.collective_timeout_s=100"]
    for overrides, deadline_s in ([], None), (options, 50):
        callbacks = training_run(tmp_path, *overrides).callbacks()
        checkpoint = next(callback for callback in callbacks if isinstance(callback, PolicyCheckpoint))
        assert checkpoint.files.deadline_s == deadline_s


def test_keep_checkpoints_of_critics_bounds_the_checkpoints_with_each_critic(tmp_path: Path) -> None:
    options = ["critic.keep_checkpoints=2", "cost_critic.keep_checkpoints=1"]
    for overrides, kept in ([], {}), (options[:1], {CRITIC: 2}), (options, {CRITIC: 2, COST_CRITIC: 1}):
        callbacks = training_run(tmp_path, *overrides).callbacks()
        checkpoint = next(callback for callback in callbacks if isinstance(callback, PolicyCheckpoint))
        assert checkpoint._keep_models == kept


def test_run_misses_a_validation_that_was_killed(tmp_path: Path) -> None:
    options = ["run.steps=7", "run.eval_every=2", "data.val_files=[test.parquet]"]
    run, folder = training_run(tmp_path, *options), RunFolder(tmp_path)
    assert not run._misses_validation()
    for step, misses in {2: True, 3: False, 4: True, 7: True}.items():
        resumed = replace(run, checkpoint=folder.checkpoint(step))
        append_metrics(folder.metrics, {"train/reward": 0.5}, step)
        assert resumed._misses_validation() == misses
        append_metrics(folder.metrics, {"val/reward": 0.5}, step)
        assert not resumed._misses_validation()
    without = training_run(tmp_path / "other", "run.steps=7", "run.eval_every=0", "data.val_files=[test.parquet]")
    assert not replace(without, checkpoint=folder.checkpoint(7))._misses_validation()


def test_attention_of_a_recipe_is_the_attention_of_the_model(tmp_path: Path) -> None:
    model = save_tiny_policy(tmp_path / "policy")
    for overrides, attention in ([], PACKED_SDPA), (["model.attention=eager"], "eager"):
        run = training_run(tmp_path, f"model.path={model}", "sampling.max_tokens=8", *overrides)
        run = replace(run, scorer=canned.CannedScorer())
        stage = build_stage(run)
        stage.trainer = quiet_trainer(run.strategy)
        stage.configure_model()
        assert stage.policy.config._attn_implementation == attention


def test_callbacks_loggers_and_profiler_are_built_from_targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = training_run(
        tmp_path,
        "+callbacks.timer={_target_: lightning.pytorch.callbacks.Timer, duration: '01:00:00:00'}",
        f"+tracking.loggers.csv={{_target_: lightning.pytorch.loggers.CSVLogger, save_dir: '{tmp_path}'}}",
        f"debug.profiler={{_target_: lightning.pytorch.profilers.SimpleProfiler, dirpath: '{tmp_path}'}}",
        "tracking.enabled=false",
    )
    assert isinstance(run.callbacks()[-1], Timer)
    monkeypatch.setattr("rl_plugins.launch.training.Trainer", lambda **options: options)
    options: Any = run.trainer()
    assert [type(logger) for logger in options["logger"]] == [JsonLinesLogger, CSVLogger]
    assert isinstance(options["profiler"], SimpleProfiler)
    wrong = training_run(tmp_path, "+callbacks.csv={_target_: lightning.pytorch.loggers.CSVLogger, save_dir: x}")
    with pytest.raises(ConfigError, match=r"callbacks\.csv: a CSVLogger is not a Callback of Lightning"):
        wrong.callbacks()
