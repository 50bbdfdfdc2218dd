"""One of two ranks of FSDP2 on CPU, for `test_log_probs_fsdp.py`.

The log-probs equal the log-probs of an unsharded model, bit for bit. The gradients of each rank's samples, averaged
over the ranks, equal the gradients of all samples.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from rl_plugins.data.experience import computed
from rl_plugins.models import log_probs as module
from rl_plugins.strategies.fsdp import Meshes, shard
from rl_plugins.tests.models.memory import at_once
from rl_plugins.tests.models.samples import VOCABULARY, batch_of, forward_arguments, random_samples, tiny
from rl_plugins.tests.models.zero_log_probs_worker import LENGTHS, plain_gradients


def check(rank: int, mesh: DeviceMesh, model: Any, *, head_is_last: bool = True, **options: Any) -> None:
    entropy_weight = 0.3 if options.get("entropy_gradient") else 0.0
    expected = plain_gradients(model, entropy_weight)
    batch = batch_of(random_samples(*LENGTHS[rank], seed=rank))
    arguments = forward_arguments(batch)
    mask = batch.response_mask.bool()
    with torch.no_grad():
        whole = module.response_log_probs(model, **arguments, temperature=0.7, **options)
    shard(model, Meshes(mesh, mesh), MixedPrecisionPolicy())
    for _ in range(2):
        result = module.response_log_probs(model, **arguments, temperature=0.7, **options)
        assert torch.equal(result.log_probs_BT[mask], whole.log_probs_BT[mask])
        head = model.get_output_embeddings()
        assert module.last_linear_head(model, {}) is (head if head_is_last else None)
        loss = result.log_probs_BT[mask].sum() + entropy_weight * computed(result.entropy_BT)[mask].sum()
        loss.backward()
        for name, parameter in model.named_parameters():
            assert isinstance(parameter.grad, DTensor)
            bound = 1e-5 * expected[name].abs().max()
            assert (parameter.grad.full_tensor() - expected[name]).abs().max() <= bound, name
        model.zero_grad()


def check_rank(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    # Several chunks at the head.
    with mock.patch.object(module, "logits_at_once", at_once(3 * VOCABULARY)):
        for tied, options in ((True, {"entropy_gradient": True}), (False, {}), (True, {"packed": True})):
            check(rank, mesh, tiny("Qwen2", tie_word_embeddings=tied).float(), **options)
        # A model whose logits are capped after the head.
        capped = tiny("Gemma2", query_pre_attn_scalar=8, final_logit_softcapping=2.0).float()
        check(rank, mesh, capped, head_is_last=False)
