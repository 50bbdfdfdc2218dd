"""Options for kernels: the callbacks of a run, and combinations without a trial."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from rl_plugins import extras
from rl_plugins.config.checks import check_device, check_options
from rl_plugins.errors import ConfigError
from rl_plugins.launch.algorithm_check import check_router_options
from rl_plugins.launch.training import TrainingRun
from rl_plugins.run_folder import RunFolder
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.tests.launch.configurations import configured, message_of
from rl_plugins.tests.loops import for_each

OPTIONS = ("model.path=model", "strategy.zero_stage=2")


@for_each(
    ("option", "expected"),
    [("", set()), ("model.compile=true", {"CompiledBlocks"}), ("model.liger=true", {"LigerKernels"})],
)
def test_callbacks_of_a_run_have_the_kernels_of_the_option(tmp_path: Path, option: str, expected: set[str]) -> None:
    config = configured("grpo", *OPTIONS, *([option] if option else []))
    run = TrainingRun(
        config=config,
        folder=RunFolder(tmp_path),
        strategy=SingleDeviceRolloutStrategy("cpu"),
        scorer=None,
        checkpoint=None,
        in_ray=False,
        redraw_s=0,
        started=0,
    )
    names = {type(callback).__name__ for callback in run.callbacks()}
    assert names & {"CompiledBlocks", "LigerKernels"} == expected


def test_liger_runs_on_gpus_and_not_with_compiled_or_cut_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: ModuleSpec(name, None))
    config = configured("grpo", *OPTIONS, "model.liger=true")
    check_options(config)
    check_device(config, "cuda")
    with pytest.raises(ConfigError, match=r"model\.liger=true: the kernels of Liger run on GPUs"):
        check_device(config, "cpu")
    compiled = configured("grpo", *OPTIONS, "model.liger=true", "model.compile=true")
    assert "and model.compile=true have not been tried together" in message_of(lambda: check_options(compiled))
    cut = configured("grpo", "model.path=model", "model.liger=true", "strategy.name=fsdp", "strategy.tensor_parallel=2")
    assert "and strategy.tensor_parallel=2 have not been tried together" in message_of(lambda: check_options(cut))


def test_router_replay_needs_experts_and_a_second_update() -> None:
    mixture, recompute = {"model_type": "qwen3_moe"}, (*OPTIONS, "model.router_replay=recompute")
    config = configured("grpo", *recompute)
    assert "model.router_replay=recompute: with one optimizer step" in message_of(
        lambda: check_router_options(config, mixture)
    )
    twice = configured("grpo", *recompute, "batch.updates_per_step=2")
    check_router_options(twice, mixture)
    assert "not a mixture of experts" in message_of(lambda: check_router_options(twice, {"model_type": "llama"}))
    sft = configured("sft", *recompute)
    assert "is for the stages policy_optimization and prime" in message_of(lambda: check_options(sft))


def test_router_replay_of_the_rollout_needs_an_engine_that_returns_experts() -> None:
    rollout = (*OPTIONS, "model.router_replay=rollout")
    config = configured("grpo", *rollout)
    check_router_options(config, {"model_type": "qwen3_moe"})
    check_options(config)
    check_device(config, "cuda")
    assert "vLLM returns experts on GPUs only" in message_of(lambda: check_device(config, "cpu"))
    check_device(configured("grpo", *rollout, "rollout.engine=transformers"), "cpu")
    uncached = configured("grpo", *rollout, "rollout.prefix_caching=false")
    assert "rollout.prefix_caching=true" in message_of(lambda: check_options(uncached))


def test_router_losses_refuse_a_model_that_reads_images() -> None:
    policy = {"model_type": "llava", "text_config": {"model_type": "qwen3_moe"}, "vision_config": {}}
    replay = configured("grpo", *OPTIONS, "model.router_replay=rollout")
    check_router_options(replay, policy)
    losses = configured("grpo", *OPTIONS, "model.router_losses.balance=0.01")
    message = message_of(lambda: check_router_options(losses, policy))
    assert "model.router_losses: losses of the routers of a vision-language model" in message
