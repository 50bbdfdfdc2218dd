"""One of the ranks of FSDP2 on CPU, with its checks: what `test_fsdp.py` runs.

Two ranks train a policy and a critic beside a frozen reference, and every step is that of one device. They leave a
checkpoint of the first step, from which two ranks go on to the same bits, and one rank to the same numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rl_plugins.algorithms.algorithm import Algorithm, KLConfig
from rl_plugins.errors import ConfigError
from rl_plugins.models import log_probs
from rl_plugins.models.lora import LoraConfig
from rl_plugins.rollout.engine import SamplingConfig
from rl_plugins.stages.critic import CriticConfig
from rl_plugins.stages.optimizer import OptimizerConfig
from rl_plugins.stages.policy_optimization import PolicyOptimization
from rl_plugins.strategies.fsdp import FSDPStrategy
from rl_plugins.strategies.fsdp_checkpoint import read_weights
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.tests.stages import canned
from rl_plugins.tests.strategies.moving import WatchingRollout, moving

# Rows that two ranks cannot share evenly.
SIZES = {"hidden_size": 32, "intermediate_size": 49, "initializer_range": 0.2}
Weights = dict[str, Tensor]


class Damped(OptimizerConfig):
    """AdamW that does not make a large step of a gradient which is rounding."""

    def adamw(self, parameters: Any) -> dict[str, Any]:
        configured = super().adamw(parameters)
        configured["optimizer"].param_groups[0]["eps"] = 1e-3
        return configured


class Recorded(PolicyOptimization):
    """Keeps the weights and gradient norms of every step; may go on from a checkpoint, and leave one."""

    start: Path | None = None
    leave: Path | None = None

    def on_train_start(self) -> None:
        self.history: list[tuple[Weights, Weights, tuple[float, float]]] = []
        if self.start is not None:
            self.step = self.trainer.strategy.load_checkpoint(self.start)["stage"]["step"]

    def end_step(self, metrics: Any) -> None:
        super().end_step(metrics)
        strategy: Any = self.trainer.strategy
        norms = strategy.gradient_norm("policy"), strategy.gradient_norm("critic")
        self.history.append((weights_of(strategy, "policy"), weights_of(strategy, "critic"), norms))
        if self.leave is not None and len(self.history) == 1:
            self.trainer.save_checkpoint(self.leave)


def weights_of(strategy: Any, name: str) -> Weights:
    return {key: tensor.float().clone() for key, tensor in strategy.weight_source(name)}


def trained(strategy: Any, folder: Path, batches: list[Any], stage: type[Recorded] = Recorded, **options: Any) -> Any:
    """A stage that has been trained on batches of prompts, in several micro-batches and clipped updates."""
    attributes = {key: options.pop(key) for key in ("start", "leave", "place") if key in options}
    settings = {"lr": options.pop("lr", 0.01), "gradient_clip": 0.05}
    stage_options = {key: options.pop(key) for key in ("gradient_checkpointing", "packing", "lora") if key in options}
    critic_lora = options.pop("critic_lora", None)
    module = stage(
        str(folder / "policy"),
        tokenizer=canned.tokenizer,
        scorer=canned.CannedScorer(),
        sampling=SamplingConfig(max_tokens=20, num_samples=3, temperature=canned.TEMPERATURE),
        algorithm=Algorithm(advantage="gae", kl=KLConfig(0.1)),
        optimizer=Damped(**settings),
        critic=CriticConfig(None, Damped(**settings), lora=critic_lora),
        tokens_per_micro_batch=45,
        updates_per_step=2,
        **stage_options,
    )
    for key, value in attributes.items():
        setattr(module, key, value)
    trainer = canned.quiet_trainer(strategy, accelerator="cpu", **options)
    trainer.fit(module, canned.loader(batches))
    return module


def batches(rank: int, world_size: int, steps: int = 2, copies: int = 1) -> list[Any]:
    return [canned.prompt_batch((canned.PROMPTS * copies)[rank::world_size])] * steps


class Inspected(Recorded):
    """Looks at the engines before they are torn down."""

    place: Path

    def on_train_end(self) -> None:
        strategy: Any = self.trainer.strategy
        for model in (self.policy, self.critic, self.reference):
            layers = model.model.layers
            assert all(isinstance(module, FSDPModule) for module in (model, *layers))
            assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        assert not self.reference.training
        assert not any(parameter.requires_grad for parameter in self.reference.parameters())
        self.check_shards(strategy)
        self.check_blended(strategy)
        self.check_refusals(strategy)

    def check_shards(self, strategy: FSDPStrategy) -> None:
        """The shards of all ranks tile every tensor."""
        source = strategy.weight_source()
        metadata, whole = source.metadata(), weights_of(strategy, "policy")
        assert [meta.name for meta in metadata] == list(whole)
        everyones: list[Any] = [None] * self.trainer.world_size
        torch.distributed.all_gather_object(everyones, list(source.shards()))
        for index, meta in enumerate(metadata):
            tiled = torch.full((meta.numel,), torch.nan)
            for name, start, part in (shards[index] for shards in everyones):
                assert name == meta.name and part.dtype == meta.dtype
                assert tiled[start : start + len(part)].isnan().all()
                tiled[start : start + len(part)] = part
            assert torch.equal(tiled.view(meta.shape), whole[meta.name])
        # Some tensor has rows that the ranks do not share evenly.
        assert any(meta.shape[0] % self.trainer.world_size for meta in metadata)

    def check_blended(self, strategy: FSDPStrategy) -> None:
        """The reference moves towards the policy, and comes back with a checkpoint."""
        before, policy = weights_of(strategy, "reference"), weights_of(strategy, "policy")
        self.trainer.save_checkpoint(self.place / "before")
        strategy.blend_weights("policy", "reference", keep=0.25)
        moved = weights_of(strategy, "reference")
        for name, weight in moved.items():
            torch.testing.assert_close(weight, 0.25 * before[name] + 0.75 * policy[name])
        self.trainer.save_checkpoint(self.place / "moved")
        strategy.blend_weights("policy", "reference", keep=0.0)
        tokens = torch.arange(6)[None]
        logits = {name: strategy.engine(name)(input_ids=tokens).logits for name in ("policy", "reference")}
        assert torch.equal(logits["policy"], logits["reference"])
        strategy.load_checkpoint(self.place / "moved")
        restored = weights_of(strategy, "reference")
        assert all(torch.equal(restored[name], weight) for name, weight in moved.items())
        with pytest.raises(ConfigError, match="does not hold engine 'reference', which has moved"):
            strategy.load_checkpoint(self.place / "before")

    def check_refusals(self, strategy: FSDPStrategy) -> None:
        with pytest.raises(ConfigError, match=r"is not a checkpoint of this project: it has no lightning\.ckpt"):
            strategy.load_checkpoint(self.place)
        part = next((self.place / "moved" / "critic").glob("__0_*"))
        strategy.barrier()
        if strategy.is_global_zero:
            part.rename(self.place / "elsewhere")
        strategy.barrier()
        with pytest.raises(ConfigError, match=f"critic is not whole: {part.name} is missing"):
            strategy.load_checkpoint(self.place / "moved")
        strategy.barrier()
        if strategy.is_global_zero:
            (self.place / "moved" / "critic" / ".metadata").unlink()
        strategy.barrier()
        with pytest.raises(ConfigError, match="critic holds no shards of engine 'critic'"):
            strategy.load_checkpoint(self.place / "moved")


def assert_same_course(history: list[Any], expected: list[Any], *, exactly: bool = False) -> None:
    rtol, atol = (0.0, 0.0) if exactly else (1e-4, 1e-6)
    assert len(history) == len(expected)
    for (policy, critic, norms), (expected_policy, expected_critic, expected_norms) in zip(
        history, expected, strict=True
    ):
        assert norms == pytest.approx(expected_norms, rel=1e-4)
        for got, wanted in ((policy, expected_policy), (critic, expected_critic)):
            assert got.keys() == wanted.keys()
            for name, weight in wanted.items():
                torch.testing.assert_close(got[name], weight, rtol=rtol, atol=atol)


def strategy(**options: Any) -> FSDPStrategy:
    return FSDPStrategy(timeout_s=60, **{"rollout": canned.CannedRollout(), **options})


def train(rank: int, folder: Path) -> tuple[list[Any], list[Any]]:
    """One of two ranks; leaves a checkpoint of its first step, and returns its course and that of one device."""
    several_chunks_at_the_head()
    single = SingleDeviceRolloutStrategy(rollout=canned.CannedRollout())
    expected = trained(single, folder, batches(0, 1)).history
    assert max(max(norms) for _, _, norms in expected) > 0.05
    own = batches(rank, 2)
    ranks: dict[str, Any] = {"num_nodes": 2, "devices": 1}
    run = trained(strategy(), folder, own, Inspected, place=folder, leave=folder / "checkpoint" / "state", **ranks)
    assert run.trainer.strategy.rollout.calls.count("update_weights 1") == 1
    assert_same_course(run.history, expected)
    resumed = trained(strategy(), folder, own[1:], start=folder / "checkpoint" / "state", **ranks)
    assert_same_course(resumed.history, run.history[1:], exactly=True)
    saving = trained(
        moving(strategy(rollout=WatchingRollout(), accumulate_shards=True)), folder, own[:1],
        gradient_checkpointing=True, **ranks,
    )  # fmt: skip
    assert_same_course(saving.history, expected[:1])
    check_low_precision(folder, own[:1], ranks)
    return run.history, expected


def train_adapters(rank: int, folder: Path) -> None:
    """One of two ranks that train an adapter, and a critic's; its reference is the policy without it."""
    adapters: dict[str, Any] = {"lora": LoraConfig(rank=3), "critic_lora": LoraConfig(rank=2)}
    single = SingleDeviceRolloutStrategy(rollout=canned.CannedRollout())
    torch.manual_seed(0)
    expected = trained(single, folder, batches(0, 1), **adapters).history
    ranks: dict[str, Any] = {"num_nodes": 2, "devices": 1}
    start = folder / "adapters"
    # Ranks whose random numbers differ have one adapter all the same: rank 0's.
    torch.manual_seed(rank)
    run = trained(strategy(), folder, batches(rank, 2), leave=start, **adapters, **ranks)
    assert "reference" not in run.engine_modules()
    assert_same_course(run.history, expected)
    saved = read_weights(start / "policy")
    assert saved and all(".lora_" in name for name in saved)
    resumed = trained(strategy(), folder, batches(rank, 2)[1:], start=start, **adapters, **ranks)
    assert_same_course(resumed.history, run.history[1:], exactly=True)
    mixed = trained(strategy(), folder, batches(rank, 2), precision="bf16-mixed", **adapters, **ranks)
    trained_dtypes = {p.dtype for p in mixed.policy.parameters() if p.requires_grad}
    frozen_dtypes = {p.dtype for p in mixed.policy.parameters() if not p.requires_grad}
    assert trained_dtypes == {torch.float32} and frozen_dtypes == {torch.bfloat16}


def train_in_groups(rank: int, folder: Path, world_size: int) -> None:
    """One of several ranks, two of which share the blocks of their models; as `train`."""
    several_chunks_at_the_head()
    expected = trained(
        SingleDeviceRolloutStrategy(rollout=canned.CannedRollout()), folder, batches(0, 1, copies=2)
    ).history
    own = batches(rank, world_size, copies=2)
    ranks: dict[str, Any] = {"num_nodes": world_size, "devices": 1}
    run = trained(
        strategy(tensor_parallel=2),
        folder,
        own,
        Inspected,
        place=folder,
        leave=folder / "checkpoint" / "state",
        **ranks,
    )
    assert_same_course(run.history, expected)
    start = folder / "checkpoint" / "state"
    resumed = trained(strategy(tensor_parallel=2), folder, own[1:], start=start, **ranks)
    assert_same_course(resumed.history, run.history[1:], exactly=True)
    whole = trained(strategy(), folder, own[1:], start=start, **ranks)
    assert_same_course(whole.history, expected[1:])
    padded = trained(
        strategy(tensor_parallel=2, accumulate_shards=True), folder, own[:1],
        gradient_checkpointing=True, packing=False, **ranks,
    )  # fmt: skip
    assert_same_course(padded.history, expected[:1])
    check_low_precision(folder, own[:1], ranks, tensor_parallel=2)


def train_one_group(rank: int, folder: Path) -> None:
    """One of two ranks, which share the blocks of their models."""
    single = SingleDeviceRolloutStrategy(rollout=canned.CannedRollout())
    expected = trained(single, folder, batches(0, 1, steps=1)).history
    run = trained(strategy(tensor_parallel=2), folder, batches(rank, 2, steps=1), num_nodes=2, devices=1)
    assert_same_course(run.history, expected)


def train_in_sequence(rank: int, folder: Path) -> None:
    """One of two ranks, which share the tokens of their micro-batches."""
    several_chunks_at_the_head()
    single = SingleDeviceRolloutStrategy(rollout=canned.CannedRollout())
    expected = trained(single, folder, batches(0, 1)).history
    ranks: dict[str, Any] = {"num_nodes": 2, "devices": 1}
    run = trained(strategy(sequence_parallel=2), folder, batches(rank, 2), **ranks)
    assert_same_course(run.history, expected)
    padded = trained(
        strategy(sequence_parallel=2), folder, batches(rank, 2, steps=1), packing=False, gradient_checkpointing=True,
        lora=LoraConfig(rank=3), **ranks,
    )  # fmt: skip
    assert len(padded.history) == 1


def go_on_alone(_: int, folder: Path, expected: list[Any]) -> None:
    """One rank goes on from the checkpoint of two."""
    several_chunks_at_the_head()
    resumed = trained(strategy(), folder, batches(0, 1, steps=1), start=folder / "checkpoint" / "state", devices=1)
    assert_same_course(resumed.history, expected[1:])


def several_chunks_at_the_head() -> None:
    log_probs.CHUNK_ELEMENTS = 3 * len(canned.tokenizer)


def check_low_precision(folder: Path, own: list[Any], ranks: dict[str, Any], **options: Any) -> None:
    """Small steps arrive in the float32 shards of mixed precision; the engine is sent bfloat16."""
    mixed = trained(strategy(**options), folder, own, precision="bf16-mixed", lr=1e-6, leave=folder / "mixed", **ranks)
    assert {p.dtype for p in [*mixed.policy.parameters(), *mixed.critic.parameters()]} == {torch.float32}
    assert {p.dtype for p in mixed.reference.parameters()} == {torch.bfloat16}
    assert {meta.dtype for meta in mixed.trainer.strategy.weight_source().metadata()} == {torch.bfloat16}
    saved = read_weights(folder / "mixed" / "policy")
    fine = [(weight != weight.bfloat16().float()).float().mean() for weight in saved.values()]
    assert max(fine) > 0.9
    true = trained(strategy(**options), folder, own, precision="bf16-true", lr=1e-6, **ranks)
    assert {p.dtype for p in true.policy.parameters()} == {torch.bfloat16}
    # Both have the gradient of the same weights, one of them from float32 masters.
    assert true.history[0][2] == pytest.approx(mixed.history[0][2], rel=0.05)
