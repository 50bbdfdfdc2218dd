"""The average equals a computation by hand, has no effect on training, and is part of checkpoints."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rl_plugins.callbacks.averages import PolicyAverage, read_average
from rl_plugins.callbacks.checkpoint import PolicyCheckpoint
from rl_plugins.callbacks.divergence_guard import DivergenceGuard
from rl_plugins.commands.export import export_checkpoint
from rl_plugins.config.models import LoraConfig
from rl_plugins.config.run import Bounds
from rl_plugins.errors import ConfigError
from rl_plugins.models.tiny import save_tiny_policy
from rl_plugins.run_folder import RunFolder
from rl_plugins.tests.callbacks.training import AfterStep, alter, build_policy, build_stage, sharded, train, weights
from rl_plugins.tests.files import rewrite_manifest
from rl_plugins.tests.ranks import run_ranks
from rl_plugins.tests.stages import canned

STEPS, KEEP = 4, 0.75


def averaged(trainer: Any, average: PolicyAverage) -> dict[str, Tensor]:
    """The whole weights of the average."""
    with average.swapped_in(trainer):
        return {name: tensor.clone() for name, tensor in trainer.strategy.weight_source()}


def by_hand(seen: list[dict[str, Tensor]], start: dict[str, Tensor]) -> dict[str, Tensor]:
    average = {name: tensor.float() for name, tensor in start.items()}
    for step in seen:
        average = {name: KEEP * tensor + (1 - KEEP) * step[name].float() for name, tensor in average.items()}
    return average


def run(folder: Path, stage: Any, **options: Any) -> tuple[Any, dict[str, Tensor], dict[str, Tensor]]:
    """Train; return the trainer, the average, and the average by hand."""
    seen: list[dict[str, Tensor]] = []

    def look(trainer: Any, module: Any) -> None:
        seen.append({name: tensor.clone() for name, tensor in trainer.strategy.weight_source()})

    average = PolicyAverage(keep=KEEP)
    start = {name: tensor.detach().clone() for name, tensor in build_policy().named_parameters()}
    callbacks = [AfterStep(range(STEPS + 1), look), average, PolicyCheckpoint(folder, every=2, keep_last=9)]
    trainer, _ = train(stage, callbacks, **options)
    return trainer, averaged(trainer, average), by_hand(seen, start)


def check_exported(folder: Path, average: dict[str, Tensor], out: Path) -> None:
    """Check that the export of a run's last checkpoint is the average, and not the trained weights."""
    model = save_tiny_policy(out / "model", hidden_size=32, intermediate_size=48)
    checkpoint = RunFolder(folder).checkpoint(STEPS)
    export_checkpoint(checkpoint, out / "average", str(model))
    exported = load_file(out / "average" / "model.safetensors")
    assert all(torch.equal(tensor, average[name]) for name, tensor in exported.items())
    for file in checkpoint.glob("callbacks_*.pt"):
        file.unlink()
    rewrite_manifest(checkpoint)
    export_checkpoint(checkpoint, out / "trained", str(model))
    trained = load_file(out / "trained" / "model.safetensors")
    assert exported.keys() == trained.keys()
    assert not all(torch.equal(tensor, exported[name]) for name, tensor in trained.items())


def test_policy_average_by_hand_and_without_effect_on_training(tmp_path: Path) -> None:
    stage, alone = build_stage(STEPS), build_stage(STEPS)
    _, average, expected = run(tmp_path, stage)
    train(alone, [])
    assert all(torch.equal(*pair) for pair in zip(weights(stage), weights(alone), strict=True))
    for name, tensor in average.items():
        torch.testing.assert_close(tensor, expected[name])
    moved = [not torch.equal(tensor, dict(stage.policy.named_parameters())[name]) for name, tensor in average.items()]
    assert any(moved)
    check_exported(tmp_path, average, tmp_path / "exported")


@pytest.mark.parametrize("saved_by", [1, 2])
def test_policy_average_resumes_with_the_same_bits(tmp_path: Path, saved_by: int) -> None:
    _, whole, _ = run(tmp_path / "whole", build_stage(STEPS))
    stage, average = build_stage(STEPS, seed=9), PolicyAverage(keep=KEEP)
    checkpoint = RunFolder(tmp_path / "whole").checkpoint(2)
    if saved_by == 2:
        # As with ZeRO-1 and ZeRO-2, where every rank holds the whole average.
        shutil.copy(checkpoint / "callbacks_0.pt", checkpoint / "callbacks_1.pt")
        rewrite_manifest(checkpoint)
    callbacks = [average, PolicyCheckpoint(tmp_path / "resumed", every=99)]
    (tmp_path / "resumed").mkdir()
    trainer, _ = train(stage, callbacks, resume=checkpoint)
    again = averaged(trainer, average)
    assert all(torch.equal(tensor, again[name]) for name, tensor in whole.items())
    assert "random states, average" in (tmp_path / "resumed" / "resumes.txt").read_text()


def test_validation_samples_with_the_policy_average(tmp_path: Path) -> None:
    class Watching(canned.CannedRollout):
        def update_weights(self, source: Any, version: int) -> None:
            self.last = {name: tensor.clone() for name, tensor in source}

    from lightning.pytorch import Trainer

    from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy

    rollout, average, stage = Watching(), PolicyAverage(keep=KEEP), build_stage(STEPS)
    trainer = Trainer(
        strategy=SingleDeviceRolloutStrategy(rollout=rollout), callbacks=[average], logger=False, max_epochs=1,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    batch = canned.prompt_batch(canned.PROMPTS)
    trainer.fit(stage, canned.loader([batch] * 2), canned.loader([batch]))
    own, expected = dict(stage.policy.named_parameters()), averaged(trainer, average)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in rollout.last.items())
    assert not all(torch.equal(tensor, own[name]) for name, tensor in rollout.last.items())


def test_policy_average_of_a_bfloat16_policy_is_float32(tmp_path: Path) -> None:
    average = PolicyAverage(keep=0.999)
    stage = build_stage(STEPS, policy=str(save_tiny_policy(tmp_path)))
    train(stage, [average], precision="bf16-true")
    state = average.rank_state()
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in state.values())


def test_policy_average_of_an_adapter_holds_trained_weights_only(tmp_path: Path) -> None:
    average = PolicyAverage(keep=KEEP)
    stage = build_stage(2, policy=str(save_tiny_policy(tmp_path)), lora=LoraConfig(rank=2))
    train(stage, [average])
    assert all("lora" in name for name in average.rank_state())


@pytest.mark.parametrize("keep", [0.0, 1.0])
def test_policy_average_refuses_a_keep_of_0_or_1(keep: float) -> None:
    with pytest.raises(ConfigError, match=r"keep=.*: must be above 0 and below 1"):
        PolicyAverage(keep=keep)


def average_on_ranks(rank: int, folder: Path, name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    options = {"strategy": sharded(name), "accelerator": "cpu", "devices": 1, "num_nodes": 2}
    trainer, average, expected = run(folder / name, build_stage(STEPS), **options)
    after = {key: tensor.clone() for key, tensor in trainer.strategy.weight_source()}
    assert any(not torch.equal(tensor, average[key]) for key, tensor in after.items())
    return average, expected


@pytest.mark.parametrize("name", ["zero-2", "zero-3", "fsdp"])
def test_policy_average_of_shards_on_two_ranks(tmp_path: Path, name: str) -> None:
    for (average, expected), _ in run_ranks(average_on_ranks, tmp_path, name):
        for key, tensor in average.items():
            torch.testing.assert_close(tensor, expected[key])
    check_exported(tmp_path / name, average, tmp_path / "exported" / name)


def test_read_average_refuses_tensor_parallel_blocks(tmp_path: Path) -> None:
    for rank in range(2):
        torch.save({"PolicyAverage": {"down": torch.zeros(4, 3)}}, tmp_path / f"callbacks_{rank}.pt")
    with pytest.raises(ConfigError, match=r"tensor_parallel of the strategy.*let it end; the folder policy/"):
        read_average(tmp_path, {"down": torch.Size([4, 6])})


def test_policy_average_is_undone_by_a_roll_back(tmp_path: Path) -> None:
    stage, average, seen = build_stage(STEPS), PolicyAverage(keep=KEEP), list[dict[str, Tensor]]()
    alter(stage, {3: {"train/gradient_norm": math.nan}})
    guard = DivergenceGuard(Bounds(), action="roll_back", folder=tmp_path)

    def look(trainer: Any, module: Any) -> None:
        seen.append({name: tensor.clone() for name, tensor in average.rank_state().items()})

    callbacks = [guard, average, PolicyCheckpoint(tmp_path, every=1), AfterStep(range(STEPS + 1), look)]
    train(stage, callbacks)
    # The third step has diverged: its weights leave the average, too.
    assert len(seen) == STEPS + 1 and guard.rollbacks == 1
    assert all(torch.equal(seen[2][name], tensor) for name, tensor in seen[1].items())


def test_policy_average_counts_no_step_twice_after_a_roll_back() -> None:
    stage, average, seen = build_stage(STEPS), PolicyAverage(keep=KEEP), list[int]()

    def go_back(trainer: Any, module: Any) -> None:
        seen.append(module.step)
        if len(seen) == 3:
            module.step = 1
            before = {name: tensor.clone() for name, tensor in average.rank_state().items()}
            average.on_train_batch_end(trainer, module, None, None, 0)
            assert all(torch.equal(tensor, before[name]) for name, tensor in average.rank_state().items())

    train(stage, [AfterStep(range(STEPS + 1), go_back), average])
    assert seen == [1, 2, 3, 2, 3, 4]
