"""One of two ranks of ZeRO-3 that trains an adapter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import peft
import torch
from torch import Tensor
from transformers.integrations import HfDeepSpeedConfig

from rl_plugins.config.models import LoraConfig
from rl_plugins.models.loading import load_causal_lm
from rl_plugins.models.lora import MergedWeightSource, adapter_off, add_adapter
from rl_plugins.models.scalar_head import load_scalar_head
from rl_plugins.strategies.blocks import gather_by_block
from rl_plugins.strategies.weight_sources import ZeroWeightSource
from rl_plugins.tests.models.random_adapter import with_random_adapter
from rl_plugins.weights.source import ModuleWeightSource

CONFIG = LoraConfig(rank=3, alpha=6.0)
EXPERTS = LoraConfig(rank=3, alpha=6.0, experts=True)
ZERO: dict[str, Any] = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 1000},
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


@contextmanager
def sharded_loading() -> Iterator[None]:
    keep_alive = HfDeepSpeedConfig(ZERO)
    yield
    del keep_alive


def engine_of(model: peft.PeftModel) -> Any:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.5)
    gather_by_block(model)
    return deepspeed.initialize(
        model=model, optimizer=optimizer, model_parameters=trained, config=ZERO, dist_init_required=False
    )[0]


def check_merged(engine: Any, whole: peft.PeftModel, atol: float = 1e-6) -> None:
    """Compare the shards and the gathered weights with the weights of the unsharded model."""
    rank = torch.distributed.get_rank()
    expected = dict(MergedWeightSource(ModuleWeightSource(whole), whole))
    source = MergedWeightSource(ZeroWeightSource(engine.module, rank, 2), engine.module)
    assert [(meta.name, meta.shape) for meta in source.metadata()] == [(n, tuple(w.shape)) for n, w in expected.items()]
    # Small parameters stay gathered after a pass.
    with torch.no_grad():
        engine(input_ids=torch.arange(6)[None])
    for name, tensor in source:
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=atol)
    own_shards = {name: (start, part.clone()) for name, start, part in source.shards()}
    all_shards: list[Any] = [None, None]
    torch.distributed.all_gather_object(all_shards, own_shards)
    for name, weight in expected.items():
        (first, head), (second, tail) = (shards[name] for shards in all_shards)
        assert first == 0 and second == head.numel() and head.numel() + tail.numel() == weight.numel()
        torch.testing.assert_close(torch.cat([head, tail]), weight.flatten(), rtol=1e-5, atol=atol)


def trained_weights(engine: Any) -> dict[str, Tensor]:
    source = MergedWeightSource(ZeroWeightSource(engine.module, torch.distributed.get_rank(), 2), engine.module)
    return {name: tensor.clone() for name, tensor in source.adapter().items()}


def loss(model: Any) -> Tensor:
    ids = torch.arange(12).reshape(2, 6)
    return torch.nn.functional.cross_entropy(model(input_ids=ids).logits.flatten(0, 1), ids.flatten() + 1)


def check_training(engine: Any, whole: peft.PeftModel, base: Tensor) -> None:
    """Compare training steps, with passes of the base model between, with one process. The base does not change."""
    parameters = {name: p for name, p in whole.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(parameters.values(), lr=0.5)
    for _ in range(2):
        with torch.no_grad(), adapter_off(engine.module):
            torch.testing.assert_close(engine(input_ids=torch.arange(6)[None]).logits, base, rtol=1e-5, atol=1e-5)
        engine.backward(loss(engine))
        engine.step()
        optimizer.zero_grad()
        loss(whole).backward()
        optimizer.step()
    for name, weight in trained_weights(engine).items():
        torch.testing.assert_close(weight, parameters[name].detach(), rtol=1e-4, atol=1e-5)


def check_checkpoint(engine: Any, folder: Path) -> None:
    """Check that the checkpoint has only the adapter, and restores the adapter bit for bit."""
    before = trained_weights(engine)
    engine.save_checkpoint(str(folder), tag="zero", exclude_frozen_parameters=True)
    state = torch.load(next((folder / "zero").glob("*rank_0_*model_states.pt")), weights_only=False)
    # DeepSpeed keeps a second name of a frozen weight. Under stage 3, the second name has no data.
    assert set(state["module"]) - {"base_model.model.lm_head.weight"} == set(before)
    assert not state["frozen_param_shapes"]
    engine.backward(loss(engine))
    engine.step()
    assert not all(torch.equal(weight, before[name]) for name, weight in trained_weights(engine).items())
    engine.load_checkpoint(str(folder), tag="zero", load_module_strict=False)
    assert all(torch.equal(weight, before[name]) for name, weight in trained_weights(engine).items())


def check_rank(rank: int, policy: str, folder: Path) -> None:
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    # Ranks with different random states have the same adapter, the adapter of rank 0.
    torch.manual_seed(rank)
    with sharded_loading():
        model = with_random_adapter(add_adapter(load_causal_lm(policy, dtype=torch.float32), CONFIG))
        reward_model = add_adapter(load_scalar_head(policy, dtype=torch.float32), CONFIG)
        new = add_adapter(load_causal_lm(policy, dtype=torch.float32), CONFIG)
    plain: Any = load_causal_lm(policy, dtype=torch.float32)
    base = plain(input_ids=torch.arange(6)[None]).logits.detach()
    whole = with_random_adapter(add_adapter(plain, CONFIG))
    engine = engine_of(model)
    for name, parameter in engine.module.named_parameters():
        assert parameter.ds_tensor.numel() == -(-parameter.ds_numel // 2), f"{name} is not sharded"
    check_merged(engine, whole)
    check_training(engine, whole, base)
    # A merged weight adds 2 x 3 products of two adapter weights, each adapter weight within the tolerance of the steps.
    check_merged(engine, whole, atol=5e-5)
    check_checkpoint(engine, folder)
    torch.testing.assert_close(engine_of(new)(input_ids=torch.arange(6)[None]).logits, base, rtol=1e-5, atol=1e-5)
    adapters: list[Any] = [None, None]
    torch.distributed.all_gather_object(adapters, trained_weights(engine_of(reward_model)))
    assert adapters[0].keys() == adapters[1].keys()
    assert all(torch.equal(weight, adapters[1][name]) for name, weight in adapters[0].items())
    assert any("score" in name for name in adapters[0])


def check_experts(rank: int, mixture: str) -> None:
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    with sharded_loading():
        model = with_random_adapter(add_adapter(load_causal_lm(mixture, dtype=torch.float32), EXPERTS))
    plain: Any = load_causal_lm(mixture, dtype=torch.float32)
    base = plain(input_ids=torch.arange(6)[None]).logits.detach()
    whole = with_random_adapter(add_adapter(plain, EXPERTS))
    engine = engine_of(model)
    check_merged(engine, whole)
    check_training(engine, whole, base)
    check_merged(engine, whole, atol=5e-5)
