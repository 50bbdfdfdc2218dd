"""One of two ranks of ZeRO-3 that loads scalar heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import torch
from transformers.integrations import HfDeepSpeedConfig

from rl_plugins.models.scalar_head import load_scalar_head


def config_of(precision: str) -> dict[str, Any]:
    low = {"bf16": {"enabled": True}} if precision == "bf16-true" else {}
    return {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1, **low}


def whole(model: Any, name: str) -> torch.Tensor:
    parameter = model.get_parameter(name)
    assert parameter.ds_tensor.numel() == -(-parameter.ds_numel // 2), f"{name} is not sharded"
    with deepspeed.zero.GatheredParameters([parameter]):
        return torch.Tensor(parameter.detach().clone())


def check_rank(rank: int, precision: str, policy: str, folder: Path) -> None:
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    keep_alive = HfDeepSpeedConfig(config_of(precision))
    # The head must not be made of old content of the memory.
    torch.manual_seed(rank)
    new = load_scalar_head(policy, dtype=dtype)
    trained = load_scalar_head(str(folder / "trained"), dtype=dtype, new_head=False)
    del keep_alive
    plain = load_scalar_head(str(folder / "trained"), dtype=dtype)
    for model in (new, trained):
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        for name, expected in plain.state_dict().items():
            found = whole(model, name)
            is_new = model is new and name.startswith("score.")
            assert torch.equal(found, torch.zeros_like(expected) if is_new else expected), name
    assert plain.get_parameter("score.weight").any()
    engine = deepspeed.initialize(model=new, config=config_of(precision), dist_init_required=False)[0]
    ids = torch.arange(6).reshape(1, 6)
    assert not engine(input_ids=ids, use_cache=False).logits.any()
