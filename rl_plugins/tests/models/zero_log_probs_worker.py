"""One of two ranks of ZeRO-3 on CPU.

Each rank has its own samples. The sharded gradients, averaged over the ranks, equal the gradients of an unsharded
model.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any
from unittest import mock

import deepspeed
import torch
from deepspeed.utils import safe_get_full_grad
from torch import Tensor, nn

from rl_plugins.data.experience import computed
from rl_plugins.models import log_probs as module
from rl_plugins.models.packed_attention import has_packed_attention, use_packed_attention
from rl_plugins.tests.models.memory import at_once
from rl_plugins.tests.models.samples import VOCABULARY, batch_of, forward_arguments, random_samples, tiny

LENGTHS = [[(5, 4), (2, 6), (7, 1)], [(3, 2), (1, 0), (9, 7)]]
ZERO = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "overlap_comm": False},
    "zero_allow_untested_optimizer": True,
}


def plain_gradients(model: nn.Module, entropy_weight: float) -> dict[str, Tensor]:
    """Compute gradients from whole logits by autograd, averaged over the samples of both ranks."""
    model = copy.deepcopy(model)
    loss = torch.zeros(())
    for rank in range(2):
        for prompt, response in random_samples(*LENGTHS[rank], seed=rank):
            logits = model(input_ids=torch.tensor([prompt + response]), use_cache=False).logits[0].float()
            log_pi = (logits[len(prompt) - 1 : -1] / 0.7).log_softmax(dim=-1)
            chosen = log_pi.gather(-1, torch.tensor(response, dtype=torch.int64)[:, None])
            entropy = -(log_pi.exp() * log_pi).sum()
            loss = loss + (chosen.sum() + entropy_weight * entropy) / 2
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def check(rank: int, model: nn.Module, *, packed: bool = False, head_is_last: bool = True) -> None:
    """Run passes with several chunks and with one chunk at the head, with and without a gradient of the entropy."""
    expected = {weight: plain_gradients(model, weight) for weight in (0.0, 0.3)}
    if packed:
        use_packed_attention(model)
        assert has_packed_attention(model)
    engine = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=copy.deepcopy(ZERO)
    )[0]
    batch = batch_of(random_samples(*LENGTHS[rank], seed=rank))
    mask = batch.response_mask.bool()
    for rows, entropy_weight in itertools.product((3, 10**6), expected):
        options: dict[str, Any] = {"temperature": 0.7, "packed": packed, "entropy_gradient": entropy_weight > 0}
        with mock.patch.object(module, "logits_at_once", at_once(rows * VOCABULARY)):
            with torch.no_grad():
                before = module.response_log_probs(engine, **forward_arguments(batch), **options)
            result = module.response_log_probs(engine, **forward_arguments(batch), **options)
            assert torch.equal(before.log_probs_BT[mask], result.log_probs_BT[mask])
            head = engine.module.get_output_embeddings()
            assert "forward" not in head.__dict__
            assert module.last_linear_head(engine, {}) is (head if head_is_last else None)
            loss = result.log_probs_BT[mask].sum() + entropy_weight * computed(result.entropy_BT)[mask].sum()
            engine.backward(loss)
        got = {name: safe_get_full_grad(parameter) for name, parameter in engine.module.named_parameters()}
        assert got.keys() == expected[entropy_weight].keys()
        for name, gradient in got.items():
            wanted = expected[entropy_weight][name]
            assert torch.allclose(gradient, wanted, rtol=2e-4, atol=2e-4), (name, rows, entropy_weight)
        engine.zero_grad()
        engine.optimizer.zero_grad()
    engine.destroy()


def check_rank(rank: int, tied: bool, packed: bool) -> None:
    deepspeed.init_distributed("gloo", verbose=False)
    check(rank, tiny("Qwen2", tie_word_embeddings=tied).float(), packed=packed)


def check_capped_logits(rank: int) -> None:
    """Model with capped logits after the head."""
    deepspeed.init_distributed("gloo", verbose=False)
    check(rank, tiny("Gemma2", query_pre_attn_scalar=8, final_logit_softcapping=2.0).float(), head_is_last=False)
