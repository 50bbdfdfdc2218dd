"""One process, a real Lightning trainer: the times of weight updates for the rollout engine, and the order of calls."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CUDAAccelerator
from torch import nn
from typing_extensions import override

from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.config.models import CriticConfig, OptimizerConfig
from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.errors import CheckpointError, ConfigError, StorageError
from rl_plugins.models.tiny import build_model, save_tiny_policy
from rl_plugins.ranks import Ranks
from rl_plugins.rollout.transformers_engine import TransformersRollout
from rl_plugins.rollout.vllm.config import VLLMConfig
from rl_plugins.stages.policy_optimization import PolicyOptimization
from rl_plugins.strategies.blending import BlendedModels
from rl_plugins.strategies.checkpoint_folder import read_lightning
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.tests.loops import for_each
from rl_plugins.tests.stages import canned

UPDATE = ["wake_up weights", "update_weights {}", "wake_up kv_cache", "generate", "sleep"]
NO_UPDATE = [UPDATE[0], *UPDATE[2:]]


def stage(model: nn.Module | str | None = None, **options: Any) -> PolicyOptimization:
    return PolicyOptimization(
        model or build_model(),
        tokenizer=canned.tokenizer,
        scorer=canned.CannedScorer(),
        sampling=SamplingConfig(max_tokens=8, num_samples=3),
        **options,
    )


def trainer_and_calls(**options: Any) -> tuple[Trainer, list[str]]:
    rollout = canned.CannedRollout()
    return canned.quiet_trainer(SingleDeviceRolloutStrategy(rollout=rollout), **options), rollout.calls


def loader(steps: int = 1) -> Any:
    return canned.loader([canned.prompt_batch(canned.PROMPTS)] * steps)


def take(calls: list[str]) -> list[str]:
    taken = list(calls)
    calls.clear()
    return taken


def updates(calls: list[str]) -> list[str]:
    return [call for call in take(calls) if call.startswith("update_weights")]


def test_update_weights_is_called_once_after_each_step() -> None:
    trainer, calls = trainer_and_calls(val_check_interval=1, num_sanity_val_steps=1)
    trainer.fit(stage(), loader(2), loader(3))
    first, second, last = ([line.format(version) for line in UPDATE] for version in (0, 1, 2))
    assert take(calls) == [
        "connect 0/1",
        *first,  # the sanity check ...
        *NO_UPDATE,  # ... and the first step sample from the same weights
        *(second + 2 * NO_UPDATE),  # the validation afterwards, three batches
        *NO_UPDATE,
        *(last + 2 * NO_UPDATE),
    ]


def test_update_weights_is_called_again_for_another_model() -> None:
    trainer, calls = trainer_and_calls()
    trainer.validate(stage(), loader(2), verbose=False)
    assert updates(calls) == ["update_weights 0"]
    # The same trainer and engine, another model.
    trainer.validate(stage(), loader(), verbose=False)
    assert updates(calls) == ["update_weights 0"]


def test_engine_is_connected_again_for_another_stage() -> None:
    """A sender of weights keeps its first source."""
    trainer, calls = trainer_and_calls()
    first = stage()
    trainer.validate(first, loader(), verbose=False)
    trainer.validate(first, loader(), verbose=False)
    assert [call for call in take(calls) if call in ("close", "connect 0/1")] == ["connect 0/1"]
    trainer.validate(stage(), loader(), verbose=False)
    assert [call for call in take(calls) if call in ("close", "connect 0/1")] == ["connect 0/1"]


def test_update_weights_is_called_after_a_checkpoint_is_loaded(tmp_path: Any) -> None:
    trainer, calls = trainer_and_calls()
    module = stage()
    trainer.fit(module, loader(1))
    trainer.save_checkpoint(tmp_path / "state.ckpt")
    take(calls)
    trainer.validate(module, loader(2), ckpt_path=tmp_path / "state.ckpt", weights_only=True, verbose=False)
    assert updates(calls) == ["update_weights 1"]


def test_load_checkpoint_refuses_a_checkpoint_of_another_model_or_algorithm(tmp_path: Path) -> None:
    trainer, _ = trainer_and_calls()
    trainer.fit(stage(), loader(1))
    trainer.save_checkpoint(tmp_path / "state.ckpt")
    differs = "the checkpoint belongs to another model: "
    critic: dict[str, Any] = {"algorithm": Algorithm(advantage="gae"), "critic": CriticConfig(canned.other_model())}
    others: list[tuple[PolicyOptimization, str]] = [
        (stage(build_model(num_layers=1)), r"policy\.model\.layers\.1\."),
        (stage(build_model(num_layers=3)), r"policy\.model\.layers\.2\."),
        (stage(build_model(hidden_size=64)), r"policy\."),
        (stage(**critic), r"critic\."),
    ]
    for other, message in others:
        with pytest.raises(CheckpointError, match=f"{differs}{message}.* resume with the models and the"):
            trainer_and_calls()[0].fit(other, loader(2), ckpt_path=tmp_path / "state.ckpt", weights_only=True)


def test_load_checkpoint_of_another_kind_of_strategy_is_refused_with_the_way_out(tmp_path: Path) -> None:
    shards = tmp_path / "state"
    shards.mkdir()
    (shards / "lightning.ckpt").touch()
    with pytest.raises(CheckpointError, match=r"state is a folder, which ZeroStrategy or FSDPStrategy has"):
        SingleDeviceRolloutStrategy().load_checkpoint(shards)
    (file := tmp_path / "state.ckpt").touch()
    with pytest.raises(CheckpointError, match=r"state\.ckpt is a file, which SingleDeviceRolloutStrategy or"):
        read_lightning(file, {}, BlendedModels(lambda name: iter(())))


@for_each("precision", ["bf16-mixed", "bf16-true"])
def test_resume_in_low_precision_continues_with_the_same_bits(tmp_path: Path, precision: str) -> None:
    """The steps are smaller than the rounding of bfloat16."""
    path = save_tiny_policy(tmp_path / "policy")

    def one(**options: Any) -> PolicyOptimization:
        trainer, _ = trainer_and_calls(precision=precision, max_epochs=2)
        module = stage(str(path), optimizer=OptimizerConfig(lr=1e-6), max_steps=2)
        trainer.fit(module, loader(1), **options)
        if not options:
            trainer.save_checkpoint(tmp_path / f"{precision}.ckpt")
        return module

    trainer, _ = trainer_and_calls(precision=precision, max_epochs=1)
    first = stage(str(path), optimizer=OptimizerConfig(lr=1e-6), max_steps=2)
    trainer.fit(first, loader(1))
    trainer.save_checkpoint(tmp_path / f"{precision}-1.ckpt")
    whole = one()
    resumed = one(ckpt_path=tmp_path / f"{precision}-1.ckpt", weights_only=True)
    assert resumed.step == whole.step == 2
    expected = whole.policy.state_dict()
    for name, weight in resumed.policy.state_dict().items():
        assert torch.equal(weight, expected[name]), name


class Unsaved(nn.Linear):
    """A layer whose weight is not in the state, such as a layer with 4-bit weights."""

    @override
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        pass

    @override
    def _load_from_state_dict(self, *arguments: Any) -> None:
        pass


def test_resume_in_mixed_precision_leaves_weights_outside_the_state_alone(tmp_path: Path) -> None:
    def one() -> PolicyOptimization:
        model: Any = build_model()
        layer = model.model.layers[0].mlp
        layer.up_proj = Unsaved(layer.up_proj.in_features, layer.up_proj.out_features, bias=False)
        return stage(model)

    trainer, _ = trainer_and_calls(precision="bf16-mixed", max_epochs=1)
    trainer.fit(one(), loader(1))
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    resumed = one()
    trainer, _ = trainer_and_calls(precision="bf16-mixed", max_epochs=2)
    trainer.fit(resumed, loader(1), ckpt_path=tmp_path / "one.ckpt", weights_only=True)
    assert resumed.step == 2


def test_save_checkpoint_makes_the_folder(tmp_path: Path) -> None:
    """A `ModelCheckpoint` of Lightning makes no folder."""
    trainer, _ = trainer_and_calls()
    trainer.fit(stage(), loader(1))
    trainer.save_checkpoint(tmp_path / "new" / "folder" / "state.ckpt")
    assert (tmp_path / "new" / "folder" / "state.ckpt").is_file()


def test_save_checkpoint_ends_with_the_reason_if_nothing_can_be_written(tmp_path: Path) -> None:
    """Without an error, training would go on without checkpoints."""
    (tmp_path / "file").touch()
    trainer, _ = trainer_and_calls()
    trainer.fit(stage(), loader(1))
    with pytest.raises(StorageError, match=r"state\.ckpt is not saved: .*file cannot be written"):
        trainer.save_checkpoint(tmp_path / "file" / "state.ckpt")


def test_rollout_error_passes_after_the_engine_sleeps() -> None:
    class Broken(canned.CannedRollout):
        def generate(self, *arguments: Any) -> Any:
            raise TimeoutError("no answer")

    rollout = Broken()
    strategy = SingleDeviceRolloutStrategy(rollout=rollout)
    with pytest.raises(TimeoutError, match="no answer"):
        canned.quiet_trainer(strategy).fit(stage(), loader())
    assert rollout.calls[-1] == "sleep"
    assert strategy.phase_log.current is None


def test_stage_without_a_rollout_engine_samples_by_a_copy_of_the_policy(caplog: pytest.LogCaptureFixture) -> None:
    strategies = [
        SingleDeviceRolloutStrategy(rollout=rollout) for rollout in (None, TransformersRollout(build_model()))
    ]
    weights = []
    for strategy in strategies:
        one = stage()
        with caplog.at_level("INFO"):
            canned.quiet_trainer(strategy).fit(one, loader())
        weights.append(one.policy.state_dict())
    assert caplog.text.count("the policy samples by a copy of itself in this process (TransformersRollout)") == 1
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0)


def test_copy_of_the_policy_is_made_again_for_another_stage() -> None:
    trainer = canned.quiet_trainer(SingleDeviceRolloutStrategy())
    for model in (build_model(), build_model(hidden_size=32, intermediate_size=48)):
        trainer.validate(stage(model), loader(), verbose=False)


def test_sampling_without_an_engine_is_refused_by_phases_that_make_no_engine() -> None:
    phases = SingleDeviceRolloutStrategy().rollout_phases
    phases._make_engine = None
    with pytest.raises(ConfigError, match=r"SingleDeviceRolloutStrategy has no rollout engine.*rollout=VLLMRollout"):
        phases.run_sampling(0, lambda engine: engine)


def test_rollout_engine_in_the_place_of_the_device_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"device=.* is no device: give the rollout engine by name, with rollout="):
        SingleDeviceRolloutStrategy(cast(Any, canned.CannedRollout()))


def test_name_class_or_configuration_of_a_rollout_engine_is_refused() -> None:
    for rollout in ("vllm", TransformersRollout, VLLMConfig("model")):
        message = rf"rollout={re.escape(repr(rollout)[:80])} is no rollout engine: pass rollout=VLLMRollout\(\.\.\.\)"
        with pytest.raises(ConfigError, match=message):
            SingleDeviceRolloutStrategy(rollout=cast(Any, rollout))


def test_rollout_engine_with_lacking_members_is_refused_before_the_start_of_the_engine() -> None:
    class Incomplete(canned.CannedRollout):
        def __dir__(self) -> list[str]:
            return sorted({*super().__dir__()} - {"shares_gpus", "num_living"})

    rollout = Incomplete()
    trainer = canned.quiet_trainer(SingleDeviceRolloutStrategy(rollout=rollout))
    message = r"the rollout engine Incomplete lacks num_living, shares_gpus: define all .*RolloutEngine"
    with pytest.raises(ConfigError, match=message):
        trainer.fit(stage(), loader())
    assert not rollout.calls


def test_sum_without_a_process_group_is_the_identity() -> None:
    values = torch.tensor([1.0, 2.0])
    assert Ranks(device=torch.device("cpu")).sum(values) is values


def test_device_cuda_without_an_index_is_the_first_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.cuda.set_device` checks the index before the first use of a GPU."""
    selected: list[int] = []
    monkeypatch.setattr(torch._C, "_cuda_setDevice", selected.append, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    strategy = SingleDeviceRolloutStrategy("cuda")
    strategy.accelerator = CUDAAccelerator()
    strategy.setup_environment()
    assert selected == [0]
    assert strategy.root_device == strategy.phase_log.device == torch.device("cuda", 0)
