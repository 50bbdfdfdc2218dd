"""Options of 8-bit products: refused before a model is loaded, with the way out, and the correction by default."""

from __future__ import annotations

import json
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from rl_plugins import extras
from rl_plugins.config.checks import check_device, check_options
from rl_plugins.launch.preflight import check_models
from rl_plugins.model_json import EXPERT_COUNT_KEYS
from rl_plugins.models.tiny import save_tiny_policy
from rl_plugins.tests.launch.configurations import configured, message_of
from rl_plugins.tests.loops import for_each

BASE = ("model.path=model", "model.float8=tensorwise")
SHARDED = ("strategy.name=fsdp", "placement.num_workers=2")


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: ModuleSpec(name, None))


@for_each(
    ("recipe", "options"),
    [
        ("grpo", ("strategy.name=fsdp",)),
        ("grpo", ("strategy.name=fsdp", "model.float8=rowwise", "model.compile=true")),
        ("ppo", ("strategy.zero_stage=2",)),
        ("sft", ("model.gradient_checkpointing=true",)),
        ("grpo", ("launcher=local", "rollout.engine=transformers")),
    ],
)
def test_check_options_of_float8_allow(recipe: str, options: tuple[str, ...]) -> None:
    check_options(configured(recipe, *BASE, *options))


@for_each(
    ("options", "message"),
    [
        ((), "add model.gradient_checkpointing=true, strategy.zero_stage=2 or strategy.name=fsdp"),
        (
            ("model.lora.rank=4", "rollout.lora=merged"),
            "and model.lora.rank=4 have not been tried together: leave",
        ),
        (("critic.lora.rank=4",), "and critic.lora.rank=4 have not been tried together: leave one"),
        (("model.liger=true",), "model.float8=tensorwise and model.liger=true have not been tried together"),
        ((*SHARDED, "strategy.tensor_parallel=2"), "and strategy.tensor_parallel=2 have not been tried together"),
        ((*SHARDED, "strategy.expert_parallel=2"), "and strategy.expert_parallel=2 have not been tried together"),
        (
            ("model.precision=16-mixed", *SHARDED),
            "model.float8=tensorwise: products of 8 bits round more than bfloat16, so model.precision=16-mixed has no "
            "use: use bf16-mixed, or leave model.float8 out",
        ),
        (("placement.critic.actors=1",), "and placement.critic.actors=1 have not been tried together"),
    ],
)
def test_check_options_of_float8_name_the_way_out(options: tuple[str, ...], message: str) -> None:
    assert message in message_of(lambda: check_options(configured("ppo", *BASE, *options)))


def test_float8_needs_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    message = message_of(lambda: check_options(configured("grpo", *BASE)))
    assert message.startswith(
        "model.float8=tensorwise: torchao is not installed: pip install 'rl-plugins[torchao]', or"
    )


def test_float8_runs_on_gpus() -> None:
    config = configured("grpo", *BASE)
    check_device(config, "cuda")
    message = message_of(lambda: check_device(config, "cpu"))
    assert message == "model.float8=tensorwise: 8-bit products run on GPUs, and the run is on CPU: leave it out"


@for_each("key", EXPERT_COUNT_KEYS)
def test_float8_refuses_mixtures_of_experts(tmp_path: Path, key: str) -> None:
    folder = save_tiny_policy(tmp_path / key)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: 4}))
    config = configured("grpo", f"model.path={folder}", "model.float8=rowwise")
    message = message_of(lambda: check_models(config, lambda path: False))
    assert f"model.float8=rowwise has not been tried with mixtures of experts such as {folder}" in message


def test_float8_turns_on_the_correction() -> None:
    options = ("rollout.dtype=bfloat16", "model.precision=bf16-mixed", "model.path=model")
    for more, expected in ((), "none"), (("model.float8=rowwise",), "token_tis"):
        assert configured("grpo", *options, *more).algorithm["correction"] == expected
