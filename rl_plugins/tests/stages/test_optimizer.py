from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, ExponentialLR, LinearLR, LRScheduler, SequentialLR
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from rl_plugins.config.models import OptimizerConfig
from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.errors import CheckpointError, ConfigError
from rl_plugins.models.tiny import build_model
from rl_plugins.stages.optimizer import build_optimizer, print_rates, try_optimizer
from rl_plugins.stages.policy_optimization import PolicyOptimization
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.tests.cases import case
from rl_plugins.tests.fake_cuda import FakeCuda
from rl_plugins.tests.loops import for_each
from rl_plugins.tests.stages import canned


def test_optimizer_config_factor_is_constant_by_default() -> None:
    assert [OptimizerConfig().factor(step) for step in (0, 1, 10**6)] == [1.0, 1.0, 1.0]


def test_optimizer_config_factor_rises_evenly_in_warmup_and_is_never_0() -> None:
    config = OptimizerConfig(warmup_steps=4)
    assert [config.factor(step) for step in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


def test_optimizer_config_factor_decays_after_warmup_to_lr_end() -> None:
    config = OptimizerConfig(schedule="linear", warmup_steps=2, decay_steps=4, lr_end=0.2)
    expected = [1 / 3, 2 / 3, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2]
    assert [config.factor(step) for step in range(9)] == pytest.approx(expected)
    rates = [OptimizerConfig(schedule="linear", decay_steps=3).factor(step) for step in range(5)]
    assert rates == pytest.approx([1.0, 2 / 3, 1 / 3, 0.0, 0.0])


def test_optimizer_config_makes_a_fused_adamw() -> None:
    optimizer = build_optimizer(OptimizerConfig(lr=0.1), torch.nn.LayerNorm(2))["optimizer"]
    assert isinstance(optimizer, torch.optim.AdamW) and optimizer.defaults["fused"] is True


class Operations(TorchDispatchMode):
    """Context with the names of all operations below the functions of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@for_each("device", ["cpu", "cuda"])
def test_step_of_the_default_optimizer_is_one_fused_operation_on_each_device(device: str) -> None:
    with FakeCuda() as gpu:
        weights = [torch.nn.Parameter(torch.ones(size, device=device)) for size in (2, 3)]
        model = torch.nn.ParameterList(weights)
        optimizer = build_optimizer(OptimizerConfig(lr=0.1), model)["optimizer"]
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        with Operations() as operations:
            optimizer.step()
        assert operations.names.count("aten::_fused_adamw_") == 1
        # The host does not wait for the number of steps.
        assert gpu.waits == []
        assert {gpu.device_of(state).type for state in optimizer.state[weights[0]].values()} == {device}


def test_vision_lr_needs_a_vision_tower_and_an_optimizer_with_groups() -> None:
    for config, message in (
        (OptimizerConfig(vision_lr=1e-3), "vision_lr: LayerNorm has no vision tower: leave vision_lr out"),
        (OptimizerConfig(name="Muon", vision_lr=1e-3), "vision_lr: Muon has one rate for all parameters: use 0"),
    ):
        with case(message), pytest.raises(ConfigError, match=message):
            build_optimizer(config, torch.nn.LayerNorm(2))
    try_optimizer(OptimizerConfig(vision_lr=1e-3))
    with pytest.raises(ConfigError, match="vision_lr: Muon has one rate"):
        try_optimizer(OptimizerConfig(name="Muon", vision_lr=1e-3))


@for_each(
    ("name", "options"),
    [
        ("SGD", {"momentum": 0.5}),
        ("torch.optim.SGD", {"momentum": 0.5}),
        ({"_target_": "torch.optim.sgd.SGD", "momentum": 0.5}, {}),
    ],
)
def test_build_optimizer_takes_a_name_a_path_or_a_target(name: Any, options: dict[str, Any]) -> None:
    config = OptimizerConfig(name=name, options=options, lr=0.1, weight_decay=0.2)
    optimizer = build_optimizer(config, torch.nn.LayerNorm(2))["optimizer"]
    assert isinstance(optimizer, torch.optim.SGD)
    assert [optimizer.defaults[key] for key in ("lr", "momentum", "weight_decay")] == [0.1, 0.5, 0.2]


@for_each(
    ("schedule", "options"),
    [
        ("StepLR", {"step_size": 2, "gamma": 0.5}),
        ({"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 2, "gamma": 0.5}, {}),
    ],
)
def test_build_optimizer_takes_a_schedule(schedule: Any, options: dict[str, Any]) -> None:
    config = OptimizerConfig(lr=1.0, schedule=schedule, schedule_options=options)
    built = build_optimizer(config, torch.nn.LayerNorm(2))
    rates = []
    for _ in range(5):
        rates.append(built["optimizer"].param_groups[0]["lr"])
        built["optimizer"].step()
        built["lr_scheduler"]["scheduler"].step()
    assert rates == [1.0, 1.0, 0.5, 0.5, 0.25]


def test_optimizer_config_factor_stays_at_the_full_rate_for_stable_steps() -> None:
    for schedule, middle in (("wsd", [0.75, 0.5, 0.25]), ("cosine", [0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5])):
        config = OptimizerConfig(schedule=schedule, warmup_steps=1, stable_steps=3, decay_steps=4)
        expected = [0.5, 1.0, 1.0, 1.0, 1.0, *middle, 0.0, 0.0]
        assert [config.factor(step) for step in range(10)] == pytest.approx(expected)


def test_optimizer_config_factor_falls_on_a_cosine() -> None:
    config = OptimizerConfig(schedule="cosine", warmup_steps=1, decay_steps=4, lr_end=0.2)
    expected = [0.5, 1.0, 0.2 + 0.8 * (2 + 2**0.5) / 4, 0.6, 0.2 + 0.8 * (2 - 2**0.5) / 4, 0.2, 0.2]
    assert [config.factor(step) for step in range(7)] == pytest.approx(expected)


@for_each(
    ("options", "message"),
    [
        (
            {"decay_steps": 4},
            "schedule=constant has no decay_steps: .*use schedule=linear or cosine or wsd",
        ),
        ({"lr_end": 0.5}, "lr_end=0.5: schedule=constant has no lr_end"),
        ({"schedule": "cosine"}, "decay_steps=0: schedule=cosine needs a number of steps: give it a value"),
        ({"schedule": "wsd", "decay_steps": 4}, "stable_steps=0: schedule=wsd needs a number of steps"),
        (
            {"schedule": "linear", "decay_steps": 4, "stable_steps": 2},
            "stable_steps=2: schedule=linear has no stable_steps: leave it out, or use schedule=cosine or wsd",
        ),
        ({"schedule": "StepLR", "warmup_steps": 1}, "schedule=StepLR has no warmup_steps: leave it out, or give"),
        ({"schedule_options": {"a": 1}}, "schedule_options: schedule=constant has the options warmup_steps: leave"),
    ],
)
def test_optimizer_config_refuses_options_without_an_effect(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OptimizerConfig(**options)


def announced(caplog: pytest.LogCaptureFixture, config: OptimizerConfig, name: str, **arguments: Any) -> str:
    caplog.clear()
    optimizer = build_optimizer(config, torch.nn.Linear(2, 2))["optimizer"]
    with caplog.at_level("INFO"):
        print_rates(optimizer, name, arguments.pop("owner", None), **arguments)
    return caplog.text


def test_print_rates_names_optimizer_rate_and_the_option_of_the_rate(caplog: pytest.LogCaptureFixture) -> None:
    text = announced(caplog, OptimizerConfig(), "policy", trained=True)
    assert "policy: AdamW, lr=1e-06 (change the rate with optimizer=OptimizerConfig(lr=...)" in text
    assert "1e-06 suits models of billions of parameters, and a small model needs more, such as 1e-4" in text
    # The first rate of a warm-up is not the rate of the settings.
    text = announced(caplog, OptimizerConfig(lr=0.5, warmup_steps=9), "policy", trained=True)
    assert "policy: AdamW, lr=0.5 (change" in text and "small model" not in text
    text = announced(caplog, OptimizerConfig(lr=1e-5, name="SGD"), "critic", trained=False)
    assert "critic: SGD, lr=1e-05 (change the rate with critic=...(optimizer=OptimizerConfig(lr=...))" in text
    assert "in a recipe critic.optimizer.lr" in text


def test_print_rates_names_the_module_that_made_the_optimizer(caplog: pytest.LogCaptureFixture) -> None:
    text = announced(caplog, OptimizerConfig(), "policy", owner=LightningModule(), trained=True)
    assert "policy: AdamW, lr=1e-06 (from LightningModule.configure_optimizers)" in text


# Resumed runs ---------------------------------------------------------------------------------------------------------

STEPS = 5
OPTIONS = {"lr", "betas", "weight_decay", "eps", "momentum", "dampening", "nesterov", "ns_steps"}


class Growing(SGD):
    """An optimizer with the number of its steps in its groups."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.param_groups[0]["k"] = 0

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["k"] += 1


def sgd(momentum: float, **further: Any) -> dict[str, Any]:
    return {"name": {"_target_": "torch.optim.SGD", "momentum": momentum}, "lr": 0.1, **further}


def chained(optimizer: Optimizer) -> LRScheduler:
    return ChainedScheduler([LinearLR(optimizer, 0.5, total_iters=4), ExponentialLR(optimizer, 0.9)])


def sequential(optimizer: Optimizer) -> LRScheduler:
    parts: list[LRScheduler] = [LinearLR(optimizer, 0.5, total_iters=3), ExponentialLR(optimizer, 0.9)]
    return SequentialLR(optimizer, parts, milestones=[3])


def groups_of_steps(
    options: dict[str, Any], steps: int, before: tuple[Any, Any] | None = None
) -> tuple[list[list[dict[str, Any]]], tuple[Any, Any]]:
    """Return the options of all groups in each step, and the states of the optimizer and the schedule after the steps.

    Args:
        options: options of the optimizer.
        steps: number of steps.
        before: states from which the steps go on.
    """
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    built = build_optimizer(OptimizerConfig(**options), model)
    optimizer, schedule = built["optimizer"], built["lr_scheduler"]["scheduler"]
    if before is not None:
        optimizer.load_state_dict(before[0])
        schedule.load_state_dict(before[1])
    groups = []
    for _ in range(steps):
        groups.append([{name: group[name] for name in OPTIONS & group.keys()} for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    return groups, (optimizer.state_dict(), schedule.state_dict())


ONE_CYCLE = {"schedule": "OneCycleLR", "schedule_options": {"max_lr": 0.4, "total_steps": 20}}
CYCLES = {
    "schedule": "CyclicLR",
    "schedule_options": {"base_lr": 0.1, "max_lr": 0.4, "step_size_up": 4, "cycle_momentum": False},
}
COSINE = {"schedule": "CosineAnnealingLR", "schedule_options": {"T_max": 20, "eta_min": 0.01}}


@for_each(
    ("before", "after"),
    [
        ({"lr": 0.1}, {"lr": 0.3}),
        ({"lr": 0.1, "warmup_steps": 8}, {"lr": 0.1, "warmup_steps": 2}),
        ({"schedule": "linear", "decay_steps": 8}, {"schedule": "linear", "decay_steps": 20}),
        ({"lr": 0.1, **COSINE}, {"lr": 0.3, **COSINE}),
        ({"lr": 0.1, **ONE_CYCLE}, {"lr": 0.3, **ONE_CYCLE}),
        ({"lr": 0.1, **CYCLES}, {"lr": 0.3, **CYCLES}),
        ({"lr": 0.1, **ONE_CYCLE}, {"lr": 0.3}),
        ({"lr": 0.1}, {"lr": 0.1, **ONE_CYCLE}),
        ({"lr": 0.1, "schedule": f"{__name__}.chained"}, {"lr": 0.3, "schedule": f"{__name__}.chained"}),
        ({"lr": 0.1, "schedule": f"{__name__}.sequential"}, {"lr": 0.3, "schedule": f"{__name__}.sequential"}),
        ({"lr": 0.1}, {"lr": 0.1, "weight_decay": 0.5, "betas": (0.8, 0.9), "options": {"eps": 1e-4}}),
        ({"options": {"eps": 1e-4}}, {}),
        (sgd(0.9), sgd(0.5)),
        (sgd(0.9, **ONE_CYCLE), sgd(0.9)),
        ({"name": "Muon", "options": {"momentum": 0.8, "eps": 1e-4}}, {"name": "Muon", "options": {"ns_steps": 3}}),
    ],
)
def test_options_of_a_resumed_run_hold_from_the_first_step(before: dict[str, Any], after: dict[str, Any]) -> None:
    _, states = groups_of_steps(before, STEPS)
    resumed, states = groups_of_steps(after, STEPS, states)
    whole, _ = groups_of_steps(after, 3 * STEPS)
    assert resumed == whole[STEPS : 2 * STEPS]
    # A second resume has the same options.
    assert groups_of_steps(after, STEPS, states)[0] == whole[2 * STEPS :]


def test_rates_of_a_schedule_with_max_lr_do_not_follow_lr_after_a_resume() -> None:
    for schedule in (ONE_CYCLE, CYCLES):
        with case(schedule["schedule"]):
            _, states = groups_of_steps({"lr": 0.1, **schedule}, STEPS)
            same, _ = groups_of_steps({"lr": 0.1, **schedule}, STEPS, states)
            assert groups_of_steps({"lr": 0.3, **schedule}, STEPS, states)[0] == same


def test_schedule_with_fewer_steps_than_the_checkpoint_is_refused() -> None:
    _, states = groups_of_steps({"lr": 0.1}, STEPS)
    short = {"schedule": "OneCycleLR", "schedule_options": {"max_lr": 0.4, "total_steps": 3}}
    with pytest.raises(ConfigError, match=r"schedule=OneCycleLR: the checkpoint has taken 5 steps, and OneCycleLR has"):
        groups_of_steps(short, 1, states)


def test_rate_of_a_tensor_holds_after_a_resume() -> None:
    options = {"options": {"lr": torch.tensor(0.3), "fused": False}}
    _, states = groups_of_steps({"lr": 0.1}, STEPS)
    resumed, _ = groups_of_steps({**options, "warmup_steps": 2}, STEPS, states)
    assert [float(group["lr"]) for (group,) in resumed] == pytest.approx([0.3] * STEPS)


def test_numbers_of_the_states_in_groups_are_restored_from_the_checkpoint() -> None:
    def built(lr: float) -> tuple[Optimizer, Any]:
        made = build_optimizer(OptimizerConfig(name=f"{__name__}.Growing", lr=lr), torch.nn.LayerNorm(2))
        return made["optimizer"], made["lr_scheduler"]["scheduler"]

    (before, schedule), (after, resumed) = built(0.1), built(0.3)
    before.step()
    after.load_state_dict(before.state_dict())
    resumed.load_state_dict(schedule.state_dict())
    assert (after.param_groups[0]["k"], after.param_groups[0]["lr"]) == (1, 0.3)


def test_resumed_stage_trains_with_the_rate_of_the_run_also_after_a_roll_back(tmp_path: Path) -> None:
    def stage(lr: float) -> PolicyOptimization:
        return PolicyOptimization(
            build_model(),
            tokenizer=canned.tokenizer,
            scorer=canned.CannedScorer(),
            sampling=SamplingConfig(max_tokens=8, num_samples=3),
            optimizer=OptimizerConfig(lr=lr),
        )

    file = str(tmp_path / "state.ckpt")
    for lr, resumed_from in ((0.1, None), (0.3, file)):
        trainer = canned.quiet_trainer(SingleDeviceRolloutStrategy(rollout=canned.CannedRollout()), max_epochs=2)
        trained = stage(lr)
        trainer.fit(trained, canned.loader([canned.prompt_batch(canned.PROMPTS)] * 2), ckpt_path=resumed_from)
        if resumed_from is None:
            trainer.save_checkpoint(file)
    (optimizer,) = trainer.optimizers
    assert optimizer.param_groups[0]["lr"] == 0.3
    trained.restore(Path(file))
    assert optimizer.param_groups[0]["lr"] == 0.3


class WithExponentialRate(canned.OwnPolicy):
    """A policy with a schedule of torch, which takes any state."""

    @override
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [ExponentialLR(optimizer, 0.9)]


def test_checkpoint_with_schedules_of_another_kind_is_refused(tmp_path: Path) -> None:
    def fit(policy: Any, resumed_from: Path | None) -> Trainer:
        stage = PolicyOptimization(
            policy,
            tokenizer=canned.tokenizer,
            scorer=canned.CannedScorer(),
            sampling=SamplingConfig(max_tokens=8, num_samples=3),
        )
        strategy = SingleDeviceRolloutStrategy(rollout=canned.CannedRollout())
        trainer = canned.quiet_trainer(strategy, max_epochs=1 if resumed_from is None else 2)
        trainer.fit(stage, canned.loader([canned.prompt_batch(canned.PROMPTS)]), ckpt_path=resumed_from)
        return trainer

    def from_settings() -> torch.nn.Module:
        return WithExponentialRate().model

    settings, own, earlier = tmp_path / "settings.ckpt", tmp_path / "own.ckpt", tmp_path / "earlier.ckpt"
    fit(from_settings(), None).save_checkpoint(settings)
    fit(WithExponentialRate(), None).save_checkpoint(own)
    checkpoint = torch.load(settings, weights_only=False)
    checkpoint["lr_schedulers"] = [state["schedule"] for state in checkpoint["lr_schedulers"]]
    torch.save(checkpoint, earlier)
    for policy, file, saved in (
        (from_settings(), own, 0),
        (from_settings(), earlier, 0),
        (WithExponentialRate(), settings, 1),
    ):
        with pytest.raises(CheckpointError, match=rf"the checkpoint has {saved} schedules made .*rl-plugins export"):
            fit(policy, file)
    fit(WithExponentialRate(), own)


def test_options_reach_an_optimizer_with_any_arguments() -> None:
    name = f"{__name__}.Growing"
    made = build_optimizer(OptimizerConfig(name=name, lr=0.1, weight_decay=0.1), torch.nn.Linear(2, 2))
    assert 0.1 in {group["weight_decay"] for group in made["optimizer"].param_groups}
    with pytest.raises(ConfigError, match="betas"):
        build_optimizer(OptimizerConfig(name=name, betas=(0.5, 0.9)), torch.nn.Linear(2, 2))
