"""Products of an engine on CPU use a packed copy of the weights: updates change the copy, and the copy can be freed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("vllm")

from rl_plugins.memory import MemoryChange, return_free_memory
from rl_plugins.rollout.vllm import plugin
from rl_plugins.rollout.vllm.plugin import (
    PackedProducts,
    PlainExperts,
    VLLMSharedMemoryReceiver,
    WorkerExtension,
    drop_packed,
)
from rl_plugins.weights.gloo import GlooReceiver


class Layer(nn.Module):
    """The parts of vLLM's linear layer used by the layer's method."""

    packed: Any

    def __init__(self, inner: int, outer: int, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(outer)
        self.weight = nn.Parameter(torch.randn(outer, inner, generator=generator).to(dtype), requires_grad=False)
        self.method = PackedProducts()
        self.method.process_weights_after_loading(self)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.method.apply(self, x, bias)


def close(found: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Return True if a product is right within the precision of its dtype."""
    bias = torch.zeros(len(weight)) if bias is None else bias
    expected = nn.functional.linear(x.double(), weight.double(), bias.double())
    summed = nn.functional.linear(x.double().abs(), weight.double().abs(), bias.double().abs())
    return bool(((found.double() - expected).abs() <= 4 * torch.finfo(x.dtype).eps * summed).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 3, 70])
def test_packed_products_equal_the_product_with_the_weight(dtype: torch.dtype, tokens: int) -> None:
    layer = Layer(48, 80, dtype)
    x, bias = torch.randn(tokens, 48).to(dtype), torch.randn(80).to(dtype)
    assert close(layer(x), x, layer.weight)
    assert close(layer(x, bias), x, layer.weight, bias)
    assert torch.equal(layer(x[None])[0], layer(x))


@pytest.mark.parametrize("tokens", [1, 70])
def test_packed_products_pack_nothing_without_avx512_bf16(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    layer, x = Layer(48, 80, torch.bfloat16), torch.randn(tokens, 48).bfloat16()
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight))
    assert layer.packed is None


def test_finish_weight_update_drops_the_packed_copies_of_old_weights() -> None:
    model: Any = nn.Sequential(Layer(48, 80, torch.bfloat16), nn.ReLU(), Layer(80, 16, torch.bfloat16))
    x = torch.randn(5, 48).bfloat16()
    before = model(x)
    for layer in (model[0], model[2]):
        layer.weight.copy_(torch.randn_like(layer.weight))
    engine: Any = VLLMSharedMemoryReceiver.__new__(VLLMSharedMemoryReceiver)
    engine.model = model
    engine.finish_weight_update()
    between = torch.relu(model[0](x))
    assert close(model(x), between, model[2].weight)
    assert not torch.equal(model(x), before)


def test_drop_packed_frees_the_memory_of_the_packed_copies() -> None:
    layers = [Layer(512, 2048, torch.float32) for _ in range(16)]
    model, x = nn.ModuleList(layers), torch.randn(4, 512)
    weights = sum(layer.weight.nbytes for layer in layers)
    # The memory kept by oneDNN exists after the first time.
    layers[0](x)
    drop_packed(model)

    def used() -> int:
        return_free_memory()
        # Without pages of files, which the kernel may take back at any time.
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return int(status.partition("RssAnon:")[2].split()[0]) * 1024

    without = used()
    for layer in layers:
        layer(x)
    packed = used()
    assert packed - without > 0.9 * weights
    expected = drop_packed(model)
    assert expected == weights
    MemoryChange(packed, used(), expected).check("sleep")
    assert drop_packed(model) == 0


def test_experts_keep_weights_and_use_packed_copies_until_the_next_update() -> None:
    def pack(copies: Any) -> None:
        for name in ("w13_weight", "w2_weight"):
            setattr(copies, name, nn.Parameter(-getattr(copies, name), requires_grad=False))

    method: Any = PlainExperts.__new__(PlainExperts)
    method.moe_kernel = SimpleNamespace(fused_experts=SimpleNamespace(process_weights_after_loading=pack))
    method.forward = lambda layer, **_: (layer.w13_weight, layer.w2_weight, layer.activation)
    layer: Any = nn.Module()
    layer.w13_weight, layer.w2_weight = (nn.Parameter(torch.full((2, 4, 4), value)) for value in (1.0, 2.0))
    layer.activation = "silu"
    method.process_weights_after_loading(layer)
    for value in (1.0, 5.0):
        layer.w13_weight.data.fill_(value)
        drop_packed(layer)
        for _ in range(2):
            w13, w2, activation = method.apply(layer, *[torch.zeros(1)] * 3, None, None)
            assert (w13 == -value).all() and (w2 == -2.0).all() and activation == "silu"
        assert (layer.w13_weight == value).all() and (layer.w2_weight == 2.0).all()
    assert {name for name, _ in layer.named_parameters()} == {"w13_weight", "w2_weight"}
    assert drop_packed(layer) == layer.w13_weight.nbytes + layer.w2_weight.nbytes and drop_packed(layer) == 0


@pytest.fixture
def extension(monkeypatch: pytest.MonkeyPatch) -> WorkerExtension:
    """Worker with four allocations, three of them asleep, on a GPU with 100 of 1000 bytes free."""
    from vllm.device_allocator import AllocationData

    # Tag, bytes, and True if the allocation is asleep.
    allocations = [("weights", 8, False), ("kv_cache", 16, True), ("kv_cache", 32, True), ("runtime", 64, True)]
    data = {n: AllocationData((0, size, n, 0), tag, None, asleep) for n, (tag, size, asleep) in enumerate(allocations)}
    allocator = type("Allocator", (), {"pointer_to_data": data})
    monkeypatch.setattr(plugin, "get_mem_allocator_instance", allocator)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (100, 1000))
    return WorkerExtension()


def test_device_memory_counts_the_allocations_that_are_awake(extension: WorkerExtension) -> None:
    cache = torch.zeros(6, dtype=torch.int16)
    # Layers share a cache.
    extension.model_runner = SimpleNamespace(kv_caches=[cache[:3], cache[3:]])
    assert extension.device_memory() == (900, 8, cache.nbytes)


def test_memory_to_wake_counts_the_sleeping_allocations_of_a_wake_up(extension: WorkerExtension) -> None:
    assert extension.memory_to_wake(["weights"]) == (64, 100)
    assert extension.memory_to_wake(["kv_cache"]) == extension.memory_to_wake(None) == (112, 100)


class _Worker(WorkerExtension):
    """The part of a worker of vLLM that the extension uses."""

    def __init__(self, model: torch.nn.Module, draft: torch.nn.Module | None = None) -> None:
        self.model_runner, self.model_config = SimpleNamespace(model=model), SimpleNamespace()
        self._weight_update_active, self._draft = True, draft

    def get_draft_model(self) -> torch.nn.Module | None:
        return self._draft

    def finish_weight_update(self) -> None:
        assert self._weight_update_active, "vLLM raises without an update"
        self._weight_update_active = False


def test_keep_unsent_weights_names_biases_of_routers_and_the_draft_model() -> None:
    model = torch.nn.Module()
    model.gate = torch.nn.Linear(2, 2)
    model.gate.e_score_correction_bias = torch.nn.Parameter(torch.ones(2))
    for draft, expected in (None, []), (torch.nn.Linear(1, 1), ["draft.*"]):
        worker = _Worker(model, draft)
        worker.keep_unsent_weights()
        assert worker.model_config.sleep_preserve_parameter_names == ["gate.e_score_correction_bias", *expected]


def test_keep_unsent_weights_makes_buffers_of_the_places_for_image_features() -> None:
    model, places = torch.nn.Module(), [torch.zeros(2), torch.zeros(2)]
    object.__setattr__(model, "deepstack_input_embeds", places)
    _Worker(model).keep_unsent_weights()
    # vLLM saves named buffers before a sleep and writes them back in place.
    kept = dict(model.named_buffers())
    assert [kept[name].data_ptr() for name in sorted(kept)] == [place.data_ptr() for place in places]
    assert not model.state_dict()


def test_keep_unsent_weights_copies_the_token_ids_of_the_thinking_budget() -> None:
    worker = _Worker(torch.nn.Module())
    names = ("reasoning_start_token_ids", "natural_reasoning_end_token_ids", "reasoning_end_token_ids")
    made = {name: torch.tensor([number]) for number, name in enumerate(names)}
    budget = SimpleNamespace(enabled=True, **made)
    worker.model_runner.sampler = SimpleNamespace(thinking_budget_state=budget)
    worker.keep_unsent_weights()
    for name, ids in made.items():
        copy = getattr(budget, name)
        assert copy.equal(ids) and copy.data_ptr() != ids.data_ptr()
    # A budget without the arguments of reasoning has no token ids.
    worker.model_runner.sampler.thinking_budget_state = SimpleNamespace(enabled=False)
    worker.keep_unsent_weights()


def test_end_weight_update_ends_a_running_update_alone() -> None:
    worker = _Worker(torch.nn.Module())
    for _ in range(2):
        worker.end_weight_update()
        assert not worker._weight_update_active


def test_give_back_frees_no_weights_of_a_gloo_receiver() -> None:
    worker = _Worker(Layer(4, 4, torch.float32))
    worker.model_runner.kv_caches = []
    worker.weight_transfer_engine = SimpleNamespace(receiver=GlooReceiver(lambda weights: None))
    *_, expected = worker.give_back(weights=True)
    assert expected == 0
