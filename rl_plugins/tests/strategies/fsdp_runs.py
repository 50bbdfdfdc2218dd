"""Runs of PPO under FSDP2 on CPU, by the ranks of a layout, for comparisons in `test_fsdp.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor

from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.algorithms.regularization import KLConfig
from rl_plugins.config.models import CriticConfig, LoraConfig, OptimizerConfig
from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.errors import CheckpointError, StorageError
from rl_plugins.models import log_probs
from rl_plugins.models.tiny import build_model
from rl_plugins.stages.policy_optimization import PolicyOptimization
from rl_plugins.stages.sft import SFT
from rl_plugins.strategies.fsdp import FSDPStrategy
from rl_plugins.strategies.fsdp_shards import load_model, read_weights
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.tests.models.memory import at_once
from rl_plugins.tests.quiet_trainer import precision_flags
from rl_plugins.tests.stages import canned
from rl_plugins.tests.strategies.moving import WatchingRollout, moving

# Rows without an even division between two ranks.
SIZES = {"hidden_size": 32, "intermediate_size": 49, "initializer_range": 0.2}
# Blocks with an even division between two ranks.
EVEN_SIZES = SIZES | {"intermediate_size": 50}
STEPS = 2

Weights = dict[str, Tensor]
Course = list[tuple[Weights, Weights, tuple[float, float]]]
"""Weights of policy and critic after each step, and the norms of the last gradients."""


@dataclass(frozen=True)
class Layout:
    """Number of training ranks, and the division of models and samples between them.

    Args:
        world_size: number of ranks.
        strategy: options of `FSDPStrategy`; None for a single device without the strategy.
        copies: number of copies of each prompt in a batch, large enough to give every rank a prompt.
        updates: updates in a step.
    """

    world_size: int
    strategy: dict[str, Any] | None = field(default_factory=dict)
    copies: int = 1
    updates: int = 2

    def on_single_device(self) -> Layout:
        """The same batches and updates without `FSDPStrategy`."""
        return replace(self, world_size=1, strategy=None)

    def batches(self, rank: int, steps: int) -> list[Any]:
        """The prompts of a rank in each step."""
        return [canned.prompt_batch((canned.PROMPTS * self.copies)[rank :: self.world_size])] * steps

    def with_options(self, **options: Any) -> Layout:
        """The same ranks with further options of `FSDPStrategy`."""
        return replace(self, strategy={**(self.strategy or {}), **options})

    def make_strategy(self, **options: Any) -> Any:
        rollout = canned.CannedRollout()
        if self.strategy is None:
            return SingleDeviceRolloutStrategy(rollout=rollout)
        return FSDPStrategy(timeout_s=60, **{"rollout": rollout, **self.strategy, **options})


ALONE = Layout(1)
TWO = Layout(2)
# Two groups of two ranks: the ranks of a group share the blocks of their models.
GROUPS = Layout(4, {"tensor_parallel": 2}, copies=2, updates=1)
ONE_GROUP = Layout(2, {"tensor_parallel": 2})
# Two copies of the models, each in the shards of two ranks.
COPIES = Layout(4, {"workers_per_copy": 2}, copies=2, updates=1)
# All models stay in host memory.
ON_HOST = Layout(2, {"offload": dict.fromkeys(("policy", "critic", "reference"), "cpu")})
SEQUENCE = Layout(2, {"sequence_parallel": 2})


# AdamW without large steps for gradients with rounding errors only.
DAMPED: Any = {"eps": 1e-3}


class Recorded(PolicyOptimization):
    """A stage that records its course; it may start from a checkpoint `start`, and save the first step in `leave`."""

    folder: Path
    start: Path | None = None
    leave: Path | None = None

    def on_train_start(self) -> None:
        self.course: Course = []
        if self.start is not None:
            self.step = self.trainer.strategy.load_checkpoint(self.start)["stage"]["step"]

    def end_step(self, metrics: Any) -> None:
        super().end_step(metrics)
        strategy: Any = self.trainer.strategy
        norms = strategy.gradient_norm("policy"), strategy.gradient_norm("critic")
        self.course.append((weights_of(strategy, "policy"), weights_of(strategy, "critic"), norms))
        if self.leave is not None and len(self.course) == 1:
            self.trainer.save_checkpoint(self.leave)


def weights_of(strategy: Any, name: str) -> Weights:
    return {key: tensor.float().clone() for key, tensor in strategy.weight_source(name)}


def trained(
    layout: Layout,
    rank: int,
    folder: Path,
    *,
    steps: int = STEPS,
    stage: type[Recorded] = Recorded,
    strategy: Any = None,
    start: Path | None = None,
    leave: Path | None = None,
    lr: float = 0.01,
    optimizer: str | dict[str, str] = "AdamW",
    critic_lora: LoraConfig | None = None,
    precision: Any = None,
    callbacks: Sequence[Callback] = (),
    validates: bool = False,
    **options: Any,
) -> Recorded:
    """Return a stage after training in several micro-batches and clipped updates; `options` are stage options."""
    settings: dict[str, Any] = {"name": optimizer, "lr": lr, "gradient_clip": 0.05}
    module = stage(
        str(folder / "policy"),
        tokenizer=canned.tokenizer,
        scorer=canned.CannedScorer(),
        sampling=SamplingConfig(max_tokens=20, num_samples=3, temperature=canned.TEMPERATURE),
        algorithm=Algorithm(advantage="gae", kl=KLConfig(0.1)),
        optimizer=OptimizerConfig(**settings, options=DAMPED),
        critic=CriticConfig(None, OptimizerConfig(**settings, options=DAMPED), lora=critic_lora or LoraConfig(rank=0)),
        tokens_per_micro_batch=45,
        updates_per_step=layout.updates,
        **options,
    )
    module.folder, module.start, module.leave = folder, start, leave
    nodes: dict[str, Any] = {} if layout.strategy is None else {"num_nodes": layout.world_size, "devices": 1}
    settings = {"accelerator": "cpu", **precision_flags(precision), "callbacks": list(callbacks)}
    trainer = canned.quiet_trainer(strategy or layout.make_strategy(), **settings, **nodes)
    # Several chunks at the head.
    with mock.patch.object(log_probs, "logits_at_once", at_once(3 * len(canned.tokenizer))):
        if validates:
            trainer.validate(module, canned.loader(layout.batches(rank, 1)), verbose=False)
        trainer.fit(module, canned.loader(layout.batches(rank, steps)))
    return module


class Inspected(Recorded):
    """A stage with checks of its engines in place of training."""

    check: str

    def configure_model(self) -> None:
        super().configure_model()
        self.loaded_bytes = {
            name: sum(p.nbytes for p in model.parameters() if not p.is_meta)
            for name, model in self.named_models().items()
        }

    def on_train_start(self) -> None:
        getattr(self, self.check)(self.trainer.strategy)
        self.trainer.should_stop = True

    def check_sharding(self, strategy: FSDPStrategy) -> None:
        """Check that all engines are sharded, block by block, and frozen engines only run."""
        for model in (self.policy, self.critic, self.reference):
            layers = model.model.layers
            assert all(isinstance(module, FSDPModule) for module in (model, *layers))
            assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        assert not self.reference.training
        assert not any(parameter.requires_grad for parameter in self.reference.parameters())
        groups = [group for optimizer in self.trainer.optimizers for group in optimizer.param_groups]
        # Tensors of a group have different shardings, which a fused or for-each kernel refuses.
        assert {group["fused"] for group in groups} == {strategy._group_size == 1}

    def check_offload(self, strategy: FSDPStrategy) -> None:
        """Check that FSDP fetches the blocks of a model with `offload=cpu`, and of no other model, from host memory."""
        for name, model in self.named_models().items():
            fetched = name != "critic"
            sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
            groups = [module._get_fsdp_state()._fsdp_param_group for module in sharded]
            assert len(groups) > 1
            for group in groups:
                assert group and isinstance(group.offload_policy, CPUOffloadPolicy) == fetched, name

    def check_loading(self, strategy: FSDPStrategy) -> None:
        """Rank 0 has loaded whole models, the other ranks nothing; now all ranks have shards of rank 0's weights."""
        models = {"policy": self.policy, "critic": self.critic, "reference": self.reference}
        whole = {name: sum(p.numel() * p.itemsize for p in model.parameters()) for name, model in models.items()}
        assert self.loaded_bytes == (whole if strategy.is_global_zero else dict.fromkeys(whole, 0))
        for model in models.values():
            assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
        assert self.policy.get_input_embeddings().weight is self.policy.get_output_embeddings().weight
        file = load_file(self.folder / "policy" / "model.safetensors")
        loaded = weights_of(strategy, "policy")
        assert all(torch.equal(loaded[name], weight) for name, weight in file.items())
        assert not any(head.any() for name, head in weights_of(strategy, "critic").items() if name.startswith("score"))
        frequencies = self.policy.model.rotary_emb.inv_freq
        assert frequencies[0] == 1 and frequencies.device == strategy.root_device

    def check_copies(self, strategy: FSDPStrategy) -> None:
        """Check that both copies are whole, and that two ranks hold the same shards."""
        own = {name: part.clone() for name, part in strategy.shards("policy")}
        of_all: list[Any] = [None] * self.trainer.world_size
        torch.distributed.all_gather_object(of_all, own)
        for name, weight in weights_of(strategy, "policy").items():
            for one, other in ((0, 2), (1, 3)):
                assert torch.equal(of_all[one][name], of_all[other][name])
            assert torch.equal(torch.cat([of_all[0][name], of_all[1][name]]), weight)
        self.check_weight_source(strategy)

    def check_weight_source(self, strategy: FSDPStrategy) -> None:
        """The shards of all ranks tile every tensor."""
        source = strategy.weight_source()
        metadata, whole = source.metadata(), weights_of(strategy, "policy")
        assert [meta.name for meta in metadata] == list(whole)
        all_shards: list[Any] = [None] * self.trainer.world_size
        torch.distributed.all_gather_object(all_shards, list(source.shards()))
        for index, meta in enumerate(metadata):
            tiled = torch.full((meta.numel,), torch.nan)
            for name, start, part in (shards[index] for shards in all_shards):
                assert name == meta.name and part.dtype == meta.dtype
                assert tiled[start : start + len(part)].isnan().all()
                tiled[start : start + len(part)] = part
            assert torch.equal(tiled.view(meta.shape), whole[meta.name])
        # Some tensor has rows without an even division between the ranks.
        assert any(meta.shape[0] % self.trainer.world_size for meta in metadata)

    def check_blend_weights(self, strategy: FSDPStrategy) -> None:
        """The reference moves towards the policy, and comes back with a checkpoint."""
        for _, part in strategy.shards("policy"):
            part.mul_(1.1)
        before, policy = weights_of(strategy, "reference"), weights_of(strategy, "policy")
        self.trainer.save_checkpoint(self.folder / "before")
        strategy.blended.blend("policy", "reference", keep=0.25, averages={})
        moved = weights_of(strategy, "reference")
        for name, weight in moved.items():
            torch.testing.assert_close(weight, 0.25 * before[name] + 0.75 * policy[name])
        assert not torch.equal(moved["model.norm.weight"], before["model.norm.weight"])
        self.trainer.save_checkpoint(self.folder / "moved")
        strategy.blended.blend("policy", "reference", keep=0.0, averages={})
        tokens = torch.arange(6)[None]
        logits = {name: strategy.model_engine(name)(input_ids=tokens).logits for name in ("policy", "reference")}
        assert torch.equal(logits["policy"], logits["reference"])
        strategy.load_checkpoint(self.folder / "moved")
        restored = weights_of(strategy, "reference")
        assert all(torch.equal(restored[name], weight) for name, weight in moved.items())
        with pytest.raises(CheckpointError, match="does not hold model 'reference', and training has changed"):
            strategy.load_checkpoint(self.folder / "before")

    def check_load_checkpoint(self, strategy: FSDPStrategy) -> None:
        """Folders without a checkpoint, or with an incomplete checkpoint, are refused."""
        saved = self.folder / "saved"
        self.trainer.save_checkpoint(saved)
        with pytest.raises(StorageError, match=r"is not saved: .*cannot be written"):
            self.trainer.save_checkpoint(saved / "lightning.ckpt" / "below_a_file")
        with pytest.raises(CheckpointError, match=r"not a checkpoint of this package: .*lightning\.ckpt"):
            strategy.load_checkpoint(self.folder)
        for other in (build_model(num_layers=1), build_model(num_layers=3), build_model(hidden_size=64)):
            with pytest.raises(CheckpointError, match=r"policy belongs to another model: .* is in one of the two"):
                load_model(saved / "policy", other, None)
        part = next((saved / "critic").glob("__0_*"))
        strategy.barrier()
        if strategy.is_global_zero:
            part.rename(self.folder / "elsewhere")
        strategy.barrier()
        with pytest.raises(CheckpointError, match=f"critic is incomplete: {part.name} is missing"):
            strategy.load_checkpoint(saved)
        strategy.barrier()
        if strategy.is_global_zero:
            (saved / "critic" / ".metadata").unlink()
        strategy.barrier()
        with pytest.raises(CheckpointError, match="critic holds no shards of model 'critic'"):
            strategy.load_checkpoint(saved)


def course(rank: int, layout: Layout, folder: Path, options: dict[str, Any]) -> Course:
    """The course of a rank, see `trained`."""
    module = trained(layout, rank, folder, **options)
    rollout: Any = module.trainer.strategy.rollout_phases.engine  # type: ignore[attr-defined]
    # Each step samples with the weights of the last one.
    assert [call for call in rollout.calls if call.startswith("update_weights")] == [
        f"update_weights {module.step - len(module.course) + step}" for step in range(len(module.course))
    ]
    return module.course


def inspect(rank: int, layout: Layout, folder: Path, check: str) -> None:
    """Run a check of `Inspected` on a rank."""
    trained(layout, rank, folder, stage=type("Inspected", (Inspected,), {"check": check}))


def course_with_moved_memory(rank: int, layout: Layout, folder: Path, options: dict[str, Any]) -> Course:
    """Return `course`; trained engines move to the host while the rollout engine samples."""
    strategy = moving(layout.make_strategy(rollout=WatchingRollout()))
    return trained(layout, rank, folder, strategy=strategy, **options).course


def course_with_adapters(rank: int, layout: Layout, folder: Path, options: dict[str, Any]) -> Course:
    """Return the course of a rank with adapters of policy and critic; the reference is the policy without adapter."""
    # The random numbers of ranks differ, but all ranks get the adapter of rank 0.
    torch.manual_seed(rank)
    module = trained(layout, rank, folder, **ADAPTERS, **options)
    assert "reference" not in module.named_models()
    return module.course


def course_with_expert_adapters(rank: int, layout: Layout, folder: Path) -> Course:
    """Return the course of a rank with an adapter of attention and experts."""
    return trained(layout, rank, folder, lora=LoraConfig(rank=3, experts=True), gradient_checkpointing=True).course


class LastLayer(canned.OwnPolicy):
    """A policy with an optimizer of the last layer alone."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.model.model.layers[-1].parameters(), lr=0.01)


def norms_of_last_layer(rank: int, layout: Layout) -> list[float]:
    """Return the gradient norm of each of three steps that train the last layer."""
    norms = []

    class Recording(SFT):
        def end_step(self, metrics: Any) -> None:
            super().end_step(metrics)
            norms.append(self.strategy.gradient_norm("policy") or 0.0)

    policy = LastLayer(model=build_model(hidden_size=32, initializer_range=0.2))
    stage = Recording(policy, tokenizer=canned.tokenizer, optimizer=OptimizerConfig(gradient_clip=0.1))
    batch = {"prompt_ids": [[5, 6, 7], [8, 9]], "response_ids": [[20, 21], [22, 23, 24]]}
    own = {name: rows[rank :: layout.world_size] for name, rows in batch.items()}
    trainer = canned.quiet_trainer(layout.make_strategy(), accelerator="cpu", devices=1, num_nodes=layout.world_size)
    trainer.fit(stage, canned.loader([own] * 3))
    assert all(parameter.grad is None for parameter in policy.model.parameters())
    return norms


def check_dtypes_after_validation(rank: int, layout: Layout, folder: Path) -> None:
    """A validation before a fit in mixed precision changes neither the memory of shards nor the dtype of passes."""
    module = trained(layout, rank, folder, steps=1, precision="bf16-mixed", validates=True)
    models = {"policy": torch.float32, "critic": torch.float32, "reference": torch.bfloat16}
    for name, dtype in models.items():
        model = module.named_models()[name]
        assert {p.dtype for p in model.parameters()} == {dtype}
        with torch.no_grad():
            assert model(input_ids=torch.arange(6)[None]).logits.dtype == torch.bfloat16


ADAPTERS: dict[str, Any] = {"lora": LoraConfig(rank=3), "critic_lora": LoraConfig(rank=2)}


def check_dtypes_of_adapters(rank: int, layout: Layout, folder: Path) -> None:
    module = trained(layout, rank, folder, steps=1, precision="bf16-mixed", **ADAPTERS)
    trained_dtypes = {p.dtype for p in module.policy.parameters() if p.requires_grad}
    frozen_dtypes = {p.dtype for p in module.policy.parameters() if not p.requires_grad}
    assert trained_dtypes == {torch.float32} and frozen_dtypes == {torch.bfloat16}
    # With one update, the first forward pass is the pass of the reference, without the adapter.
    for precision in ("bf16-mixed", "bf16-true"):
        one_update = replace(layout, updates=1)
        module = trained(one_update, rank, folder, steps=1, precision=precision, **ADAPTERS)
        states = [part._get_fsdp_state() for part in module.policy.modules() if isinstance(part, FSDPModule)]
        groups = [state._fsdp_param_group for state in states if state._fsdp_param_group is not None]
        learning = [group for group in groups if any(one.sharded_param.requires_grad for one in group.fsdp_params)]
        assert learning and {group._reduce_dtype for group in learning} == {torch.float32}


# Steps too small for bfloat16 weights.
SMALL: dict[str, Any] = {"steps": 1, "lr": 1e-6}


def bf16_mixed_course(rank: int, layout: Layout, folder: Path) -> Course:
    """Small steps arrive in the float32 shards of mixed precision; the rollout engine is sent bfloat16."""
    module = trained(layout, rank, folder, precision="bf16-mixed", leave=folder / "mixed", **SMALL)
    assert {p.dtype for p in [*module.policy.parameters(), *module.critic.parameters()]} == {torch.float32}
    assert {p.dtype for p in module.reference.parameters()} == {torch.bfloat16}
    strategy: Any = module.trainer.strategy
    assert {meta.dtype for meta in strategy.weight_source().metadata()} == {torch.bfloat16}
    saved = read_weights(folder / "mixed" / "policy")
    fine = [(weight != weight.bfloat16().float()).float().mean() for weight in saved.values()]
    assert max(fine) > 0.9
    return module.course


def bf16_true_course(rank: int, layout: Layout, folder: Path) -> Course:
    module = trained(layout, rank, folder, precision="bf16-true", **SMALL)
    assert {p.dtype for p in module.policy.parameters()} == {torch.bfloat16}
    return module.course


def assert_same_course(got: Course, expected: Course, *, exactly: bool = False) -> None:
    rtol, atol = (0.0, 0.0) if exactly else (1e-4, 1e-6)
    assert len(got) == len(expected)
    for (policy, critic, norms), (expected_policy, expected_critic, expected_norms) in zip(got, expected, strict=True):
        assert norms == pytest.approx(expected_norms, rel=1e-4)
        for weights, wanted in ((policy, expected_policy), (critic, expected_critic)):
            assert weights.keys() == wanted.keys()
            for name, weight in wanted.items():
                torch.testing.assert_close(weights[name], weight, rtol=rtol, atol=atol)
