"""One rank of ZeRO on CPU, with its checks."""

from __future__ import annotations

import gc
import os
import shutil
import weakref
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.algorithms.regularization import KLConfig
from rl_plugins.config.models import CriticConfig, LoraConfig, OptimizerConfig
from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.errors import CheckpointError, StorageError
from rl_plugins.models.lora import MergedWeightSource
from rl_plugins.models.tiny import build_model, save_tiny_policy
from rl_plugins.run_folder import RunFolder
from rl_plugins.stages.policy_optimization import PolicyOptimization
from rl_plugins.stages.sft import SFT
from rl_plugins.strategies.zero import ZeroStrategy
from rl_plugins.strategies.zero_shards import TAG, ZeroShards
from rl_plugins.tests.stages import canned


class Inspect(PolicyOptimization):
    """A stage that checks the engines before the end of training, and a bitwise restore from a checkpoint."""

    folder: Path
    weights: dict[str, Tensor]

    def on_train_end(self) -> None:
        strategy = self.trainer.strategy
        assert isinstance(strategy, ZeroStrategy)
        assert set(strategy._model_engines) == {"policy", "critic", "reference"}
        assert set(strategy._trained) == {"policy", "critic"}
        assert not any(parameter.requires_grad for parameter in self.reference.parameters())
        self.weights = weights_of(strategy, "policy")
        reference = weights_of(strategy, "reference")
        assert reference.keys() == self.weights.keys()
        assert not torch.equal(reference["model.norm.weight"], self.weights["model.norm.weight"])
        self.check_blended(strategy)
        self.check_shards(strategy)
        self.check_checkpoint(strategy)

    def check_blended(self, strategy: ZeroStrategy) -> None:
        """The reference moves towards the policy, runs with the new weights, and comes back with a checkpoint."""
        before = weights_of(strategy, "reference")
        self.trainer.save_checkpoint(self.folder / "before")
        tokens = torch.arange(6)[None]
        strategy.model_engine("reference")(input_ids=tokens)  # Small parameters stay gathered after a pass.
        strategy.blended.blend("policy", "reference", keep=0.25, averages={})
        moved = weights_of(strategy, "reference")
        for name, weight in moved.items():
            torch.testing.assert_close(weight, 0.25 * before[name] + 0.75 * self.weights[name])
        logits = strategy.model_engine("reference")(input_ids=tokens).logits
        strategy.blended.blend("policy", "reference", keep=0.0, averages={})
        assert torch.equal(weights_of(strategy, "reference")["model.norm.weight"], self.weights["model.norm.weight"])
        copied = strategy.model_engine("reference")(input_ids=tokens).logits
        torch.testing.assert_close(copied, strategy.model_engine("policy")(input_ids=tokens).logits)
        assert not torch.equal(logits, copied)
        self.trainer.save_checkpoint(self.folder / "moved")
        weights = [getattr(parameter, "ds_tensor", parameter).data for parameter in self.reference.parameters()]
        for tensor in weights:
            tensor.zero_()
        strategy.load_checkpoint(self.folder / "moved")
        torch.testing.assert_close(strategy.model_engine("reference")(input_ids=tokens).logits, copied)
        with pytest.raises(CheckpointError, match="does not hold model 'reference', and training has changed"):
            strategy.load_checkpoint(self.folder / "before")

    def check_shards(self, strategy: ZeroStrategy) -> None:
        metadata = {meta.name: meta for meta in strategy.weight_source().metadata()}
        shards = list(strategy.weight_source().shards())
        assert [name for name, _, _ in shards] == list(metadata)
        for name, start, part in shards:
            assert start == 0
            assert torch.equal(part, self.weights[name].flatten())
            assert metadata[name].shape == self.weights[name].shape

    def check_checkpoint(self, strategy: ZeroStrategy) -> None:
        path = self.folder / "state"
        self.trainer.save_checkpoint(path)
        with pytest.raises(StorageError, match=r"is not saved: .*cannot be written"):
            self.trainer.save_checkpoint(path / "lightning.ckpt" / "below_a_file")
        expected = optimizer_state(strategy)
        assert expected
        with torch.no_grad():
            engine: Any = strategy.model_engine("policy")
            engine.optimizer.param_groups[0]["lr"] = 1e9
            weights = [getattr(parameter, "ds_tensor", parameter).data for parameter in self.policy.parameters()]
            for tensor in [*optimizer_tensors(strategy), *weights]:
                tensor.zero_()
        assert optimizer_state(strategy) != expected
        assert not any(tensor.any() for tensor in weights_of(strategy, "policy").values())
        loaded = strategy.load_checkpoint(path)
        assert loaded["stage"]["step"] == self.step
        assert optimizer_state(strategy) == expected
        restored = weights_of(strategy, "policy")
        assert all(torch.equal(restored[name], weight) for name, weight in self.weights.items())
        assert engine.optimizer.param_groups[0]["lr"] != 1e9
        with pytest.raises(CheckpointError, match=r"is the folder of a checkpoint, .*: name .*/state"):
            strategy.load_checkpoint(self.folder)
        shards = ZeroShards(path / "policy" / TAG)
        for other in (build_model(num_layers=1), build_model(num_layers=3), build_model(hidden_size=64)):
            with pytest.raises(CheckpointError, match=r"checkpoint belongs to another model: .* is in one of the two"):
                shards.check_model(other)
        self.check_retention()

    def check_retention(self) -> None:
        """The error names an engine missing in a checkpoint, and the newest checkpoint with all engines."""
        run = RunFolder(self.folder / "run")
        for step in (1, 2, 3):
            self.trainer.save_checkpoint(run.checkpoint(step) / "state")
        for step in (1, 3):
            shutil.rmtree(run.checkpoint(step) / "state" / "critic")
        message = "state/critic holds no shards of model 'critic': .*/checkpoint_00000002 is the newest that holds all"
        with pytest.raises(CheckpointError, match=message):
            self.trainer.strategy.load_checkpoint(run.checkpoint(1) / "state")


def weights_of(strategy: ZeroStrategy, name: str) -> dict[str, Tensor]:
    return {key: tensor.clone() for key, tensor in strategy.weight_source(name)}


def optimizer_tensors(strategy: ZeroStrategy) -> list[Tensor]:
    """Moments and master weights."""
    engine: Any = strategy.model_engine("policy")
    optimizer = engine.optimizer.optimizer
    tensors = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return [tensor for tensor in tensors if tensor.numel() > 1]


def optimizer_state(strategy: ZeroStrategy) -> list[list[float]]:
    return [tensor.flatten().tolist() for tensor in optimizer_tensors(strategy)]


def train_and_forget(_: int, stage: int, folder: Path) -> None:
    """Train with a reference twice, and look for the models."""
    path = str(save_tiny_policy(folder / "policy"))
    for _ in range(2):
        module = PolicyOptimization(
            path,
            tokenizer=canned.tokenizer,
            scorer=canned.CannedScorer(),
            sampling=SamplingConfig(max_tokens=20, num_samples=3, temperature=canned.TEMPERATURE),
            algorithm=Algorithm(kl=KLConfig(0.1)),
        )
        strategy = ZeroStrategy(stage=stage, rollout=canned.CannedRollout(), timeout_s=60)
        trainer = canned.quiet_trainer(strategy, accelerator="cpu", devices=1, precision="32-true")
        trainer.fit(module, canned.loader([canned.prompt_batch(canned.PROMPTS)]))
        models = {name: weakref.ref(model) for name, model in module.named_models().items()}
        assert models.keys() == {"policy", "reference"}
        del module, strategy, trainer
        # The first collection frees the strategy, and the second the engines.
        gc.collect()
        gc.collect()
        assert not [name for name, model in models.items() if model() is not None]


def train(_: int, stage: int, folder: Path) -> None:
    policy = str(save_tiny_policy(folder / "policy"))
    rollout = canned.CannedRollout()

    def trainer(**options: Any) -> Trainer:
        strategy = ZeroStrategy(stage=stage, rollout=rollout, timeout_s=60)
        return canned.quiet_trainer(strategy, accelerator="cpu", devices=1, precision="32-true", **options)

    module = Inspect(
        policy,
        tokenizer=canned.tokenizer,
        scorer=canned.CannedScorer(),
        sampling=SamplingConfig(max_tokens=20, num_samples=3, temperature=canned.TEMPERATURE),
        algorithm=Algorithm(advantage="gae", kl=KLConfig(0.1)),
        optimizer=OptimizerConfig(lr=0.01, gradient_clip=0.5),
        tokens_per_micro_batch=50,
    )
    module.folder = folder
    loader = canned.loader([canned.prompt_batch(canned.PROMPTS)] * 2)
    # Validating first must neither freeze the policy nor leave the next connection with old weights.
    trainer().validate(module, loader, verbose=False)
    trainer().fit(module, loader)
    calls = [call for call in rollout.calls if call.split()[0] in ("connect", "update_weights", "close")]
    once = ["connect 0/1", "update_weights 0", "close"]
    assert calls == [*once, *once[:2], "update_weights 1", "close"]


class GathersAhead(ZeroStrategy):
    """Releases parameters after each use, and gathers a few ahead, as DeepSpeed does in the layers of a large model."""

    def _init_config_if_needed(self) -> None:
        super()._init_config_if_needed()
        assert isinstance(self.config, dict)
        limits = {"param_persistence_threshold": 0, "max_reuse_distance": 0, "prefetch_bucket_size": 10_000}
        self.config["zero_optimization"] |= {f"stage3_{name}": limit for name, limit in limits.items()}


class Reads(SFT):
    """Reads weights and shards after passes without gradient."""

    def on_train_end(self) -> None:
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        strategy = self.trainer.strategy
        assert isinstance(strategy, GathersAhead)
        engine, source = (cast(Any, found) for found in (strategy.model_engine("policy"), strategy.weight_source()))
        reads = [lambda: weights_of(strategy, "policy"), lambda: dict(strategy.shards("policy"))]
        reads.append(lambda: {name: part for name, _, part in source.shards()})
        reads += [source.adapter] if isinstance(source, MergedWeightSource) else []
        for read in reads:
            for _ in range(2):
                with torch.no_grad():
                    engine(input_ids=torch.arange(6)[None], use_cache=False)
            statuses = {parameter.ds_status for parameter in engine.module.parameters()}
            assert ZeroParamStatus.INFLIGHT in statuses
            assert all(tensor.numel() for tensor in read().values())


def read_after_passes(_: int, folder: Path) -> None:
    """Train, run passes without gradient, and read the weights."""
    policy = str(save_tiny_policy(folder / "policy"))
    rows = {"prompt_ids": [[5, 6, 7], [8, 9]], "response_ids": [[20, 21], [22, 23, 24]]}
    for lora in (None, LoraConfig(rank=4)):
        module = Reads(policy, tokenizer=canned.tokenizer, packing=False, lora=lora)
        trainer = canned.quiet_trainer(GathersAhead(timeout_s=60), accelerator="cpu", devices=1, precision="32-true")
        trainer.fit(module, canned.loader([rows] * 3))


class Kept(Callback):
    """Saves the models at the end of a training, and compares models after a load with the saved models."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.compared = folder, False

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        if pl_module.step:
            self.compare(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.compare(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        if self.compared:
            return
        trainer.save_checkpoint(self._folder / "state")
        weights = {name: models_weights(trainer, name) for name in ("policy", "critic")}
        if trainer.is_global_zero:
            torch.save(weights, self._folder / "weights.pt")
            for name, kept in weights.items():
                saved = ZeroShards(self._folder / "state" / name / TAG).whole_weights()
                assert all(torch.equal(saved[key], weight) for key, weight in kept.items())

    def compare(self, trainer: Trainer) -> None:
        for name, weights in torch.load(self._folder / "weights.pt").items():
            for key, weight in models_weights(trainer, name).items():
                assert torch.equal(weight, weights[key]), (name, key)
        self.compared = True


def models_weights(trainer: Trainer, name: str) -> dict[str, Tensor]:
    strategy = trainer.strategy
    assert isinstance(strategy, ZeroStrategy)
    return weights_of(strategy, name)


def run_with_frozen_weights(_: int, kind: str, stage: int, folder: Path, seed: int) -> None:
    """Train and save, or resume, or validate the checkpoint, with a policy whose first layer is frozen."""
    policy = build_model(num_layers=2, seed=seed)
    policy.get_submodule("model.layers.0").requires_grad_(False)
    module = PolicyOptimization(
        policy,
        tokenizer=canned.tokenizer,
        scorer=canned.CannedScorer(),
        sampling=SamplingConfig(max_tokens=20, num_samples=3, temperature=canned.TEMPERATURE),
        algorithm=Algorithm(advantage="gae"),
        critic=CriticConfig(str(folder / f"critic-{seed}")),
        optimizer=OptimizerConfig(lr=0.01),
        max_steps=2 if kind == "resume" else 1,
    )
    kept = Kept(folder)
    trainer = canned.quiet_trainer(
        ZeroStrategy(stage=stage, rollout=canned.CannedRollout(), timeout_s=60),
        max_epochs=-1,
        accelerator="cpu",
        devices=1,
        num_nodes=int(os.environ["WORLD_SIZE"]),
        precision="32-true",
        callbacks=[kept],
    )
    loader = canned.loader([canned.prompt_batch(canned.PROMPTS)])
    if kind == "train":
        trainer.fit(module, loader)
        return
    run: Any = {"resume": trainer.fit, "validate": partial(trainer.validate, verbose=False)}[kind]
    run(module, loader, ckpt_path=folder / "state", weights_only=True)
    assert kept.compared
