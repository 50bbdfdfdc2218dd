"""Values that a recipe derives from other options: the correction, the engine, frozen models, and paths."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_plugins.algorithms.inputs import required_inputs
from rl_plugins.algorithms.preference_losses import PREFERENCE_LOSSES
from rl_plugins.config.recipe import LOSSES_WITHOUT_REFERENCE
from rl_plugins.config.run import tracking_address
from rl_plugins.launch.placement import ENGINES, roles_of
from rl_plugins.tests.launch.configurations import configured
from rl_plugins.tests.loops import for_each

MODEL = "model.path=model"


@for_each(
    ("options", "device", "correction"),
    [
        (("rollout.dtype=float32",), "cuda", "token_tis"),
        (("rollout.dtype=float32",), "cpu", "none"),
        (("rollout.dtype=bfloat16",), "cuda", "none"),
        (("rollout.dtype=float32", "algorithm.correction=none"), "cuda", "none"),
    ],
)
def test_set_device_chooses_the_correction_of_the_device(
    options: tuple[str, ...], device: str, correction: str
) -> None:
    config = configured("grpo", MODEL, *options)
    config.set_device(device)
    assert config.algorithm["correction"] == correction


@for_each(
    ("recipe", "options", "samples"),
    [
        ("sft", (), False),
        ("preference_optimization", (), False),
        ("preference_optimization", ("data.val_files=[a]", "run.eval_every=0"), False),
        ("sft", ("data.val_files=[a]",), True),
        ("reward_modeling", ("data.val_files=[a]",), False),
        ("grpo", (), True),
        ("online_preference_optimization", (), True),
    ],
)
def test_roles_of_a_run_have_engines_if_the_run_samples(recipe: str, options: tuple[str, ...], samples: bool) -> None:
    roles = roles_of(configured(recipe, MODEL, "placement.device=cpu", *options))
    assert (ENGINES in [role.name for role in roles]) == samples


@for_each(
    ("recipe", "loss", "number"),
    [
        ("preference_optimization", "null", 1),
        ("preference_optimization", "simpo", 0),
        ("online_preference_optimization", "ipo", 1),
        ("online_preference_optimization", "orpo", 0),
    ],
)
def test_frozen_models_have_the_reference_of_a_preference_loss(recipe: str, loss: str, number: int) -> None:
    assert configured(recipe, MODEL, f"loss.name={loss}").frozen_models["reference"] == number


def test_losses_without_reference_are_the_losses_without_inputs_of_a_reference() -> None:
    without = [
        name
        for name, loss in PREFERENCE_LOSSES.items()
        if not any(needed.startswith("ref") for needed in required_inputs(loss, {}))
    ]
    assert sorted(without) == sorted(LOSSES_WITHOUT_REFERENCE)


def test_path_of_an_sqlite_store_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///of_shell.db")
    assert tracking_address(None) == f"sqlite:///{tmp_path}/of_shell.db"
    for uri in ("sqlite:///outputs/mlflow.db", f"sqlite:///{tmp_path}/outputs/mlflow.db"):
        assert tracking_address(uri) == f"sqlite:///{tmp_path}/outputs/mlflow.db"
    assert tracking_address("http://host:5000") == "http://host:5000"


def test_paths_of_rewards_in_a_sum_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rule = "{path: rewards.py, name: half}"
    parts = f"{{_target_: rl_plugins.rewards.mixing.WeightedSum, rewards: {{rule: {rule}}}}}"
    rewards = configured("grpo", MODEL, f"++reward.functions={{math: {parts}}}").reward.functions
    assert rewards["math"]["rewards"]["rule"]["path"] == f"{tmp_path}/rewards.py"
    # One reward for all data sources.
    assert configured("sft", MODEL, f"reward.functions={rule}").reward.functions["path"] == f"{tmp_path}/rewards.py"
