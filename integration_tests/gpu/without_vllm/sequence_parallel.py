"""Section `sequence_parallel`: logits and gradients of rows cut over ranks, compared with whole rows on one rank.

One rank uses NCCL. Two ranks on one GPU use gloo, because NCCL refuses two ranks on a device.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, distributed
from transformers import AutoModelForCausalLM

from integration_tests.gpu.without_vllm.cases import Case, Place, seconds_of
from integration_tests.gpu.without_vllm.kernel import use_kernel_of_this_torch
from integration_tests.gpu.without_vllm.training import save_policy
from rl_plugins.connections import ListeningStore, StoreAddress, join_store
from rl_plugins.models.packed_attention import boundaries, use_packed_attention
from rl_plugins.strategies.sequence_parallel import SequenceShards

_TIMEOUT_S = 120.0
_STORE: list[ListeningStore] = []
"""Store of the process group in the process of rank 0."""
_LARGEST_DIFFERENCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}


@dataclass(frozen=True)
class Variant:
    """Options of a case.

    Attributes:
        dtype: dtype of the model.
        gradient_checkpointing: recompute activations.
    """

    dtype: torch.dtype
    gradient_checkpointing: bool = False


VARIANTS = {
    "float32": Variant(torch.float32),
    "bfloat16": Variant(torch.bfloat16),
    "gradient checkpointing": Variant(torch.bfloat16, gradient_checkpointing=True),
}


def cases(place: Place) -> Iterable[Case]:
    """Return the variants with one rank, and with two ranks."""
    save_policy(place, place.folder / "model")
    for name, variant in VARIANTS.items():
        yield Case(f"1 rank {name}", partial(_run_alone, place, variant))
    second = SecondRank(place)
    for name, variant in VARIANTS.items():
        yield Case(f"2 ranks {name}", partial(second.run, variant))


def _run_alone(place: Place, variant: Variant) -> Mapping[str, Any]:
    if not distributed.is_initialized():
        _join("nccl" if place.on_gpu else "gloo", rank=0, ranks=1, address=_listen())
    return compare(place, variant)


class SecondRank:
    """Process of the second rank. This process is the first rank.

    Args:
        place: place of the section.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._pipe: Connection | None = None

    def run(self, variant: Variant) -> Mapping[str, Any]:
        """Compare in both ranks, and return the figures of the first.

        Raises:
            AssertionError: a rank found a difference, or the second rank failed.
        """
        pipe = self._pipe or self._start()
        pipe.send(variant)
        figures = compare(self._place, variant)
        assert pipe.poll(_TIMEOUT_S), f"the second rank did not answer within {_TIMEOUT_S:g} s"
        fault = pipe.recv()
        assert not fault, fault
        return figures

    def _start(self) -> Connection:
        if distributed.is_initialized():
            distributed.destroy_process_group()
        context, address = multiprocessing.get_context("spawn"), _listen()
        self._pipe, theirs = context.Pipe()
        # A daemon ends with this process.
        context.Process(target=serve_second_rank, args=(theirs, self._place, address), daemon=True).start()
        # With no other copy of its end, the pipe ends with the process.
        theirs.close()
        _join("gloo", rank=0, ranks=2, address=address)
        return self._pipe


def serve_second_rank(pipe: Connection, place: Place, address: StoreAddress) -> None:
    """Compare each variant from the pipe, and answer with a traceback or an empty text. Process of the second rank."""
    _join("gloo", rank=1, ranks=2, address=address)
    while True:
        variant = pipe.recv()
        try:
            compare(place, variant)
        except Exception:
            # The table shows the traceback.
            pipe.send(traceback.format_exc())
        else:
            pipe.send("")


def _listen() -> StoreAddress:
    """Start the store of the next process group, and return its address."""
    _STORE[:] = [ListeningStore("127.0.0.1", _TIMEOUT_S)]
    return _STORE[0].address


def _join(backend: str, *, rank: int, ranks: int, address: StoreAddress) -> None:
    distributed.init_process_group(
        backend,
        store=join_store(address, _TIMEOUT_S),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=_TIMEOUT_S),
    )


def compare(place: Place, variant: Variant) -> Mapping[str, Any]:
    """Compare the logits of this rank's row, and the gradients of all rows. Collective.

    Returns:
        Relative differences, and milliseconds of a forward and backward pass of a cut row and of a whole row.

    Raises:
        AssertionError: a difference is too large.
    """
    use_kernel_of_this_torch()
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    model = _load(place, variant)
    rows = [_row(place, other, model.config.vocab_size) for other in range(ranks)]
    expected_logits = [_pass(model, row) for row in rows][rank]
    expected = _gradients(model)
    whole_s = seconds_of(place, lambda: _pass(model, rows[rank]), repeats=3 if place.on_gpu else 1)
    model.zero_grad()
    shards = SequenceShards(model, "policy", None)
    logits = _pass(model, rows[rank])
    gradients = _gradients(model)
    distributed.all_reduce(gradients)
    cut_s = seconds_of(place, lambda: _pass(model, rows[rank]), repeats=3 if place.on_gpu else 1)
    shards.remove()
    differences = {
        "logits_difference": _relative(logits, expected_logits),
        "gradients_difference": _relative(gradients, expected),
    }
    for name, difference in differences.items():
        assert difference < _LARGEST_DIFFERENCE[variant.dtype], f"{name} is {difference:.2g} of the norm"
    return {**differences, "cut_ms": 1e3 * cut_s, "whole_ms": 1e3 * whole_s}


def _load(place: Place, variant: Variant) -> Any:
    loaded: Any = AutoModelForCausalLM.from_pretrained(place.folder / "model", dtype=variant.dtype)
    model = loaded.to(place.device)
    use_packed_attention(model)
    if variant.gradient_checkpointing:
        model.gradient_checkpointing_enable()
        model.train()
    return model


def _row(place: Place, rank: int, vocabulary: int) -> dict[str, Any]:
    """Return the samples of a rank as one row. The first rank has most of the tokens."""
    unit = 100 if place.on_gpu else 1
    lengths = [19 * unit, 7 * unit, 2] if rank == 0 else [3 * unit]
    generator = torch.Generator().manual_seed(rank)
    ids_1M = torch.randint(vocabulary, (1, sum(lengths)), generator=generator).to(place.device)
    positions_M = torch.cat([torch.arange(length, device=place.device) for length in lengths])
    return {"input_ids": ids_1M, "position_ids": positions_M[None], **boundaries(positions_M)}


def _pass(model: Any, row: Mapping[str, Any]) -> Tensor:
    """Return the logits of a row [M, V], and add to the gradients."""
    logits_MV: Tensor = model(**row, use_cache=False).logits[0]
    logits_MV.float().square().sum().backward()
    return logits_MV.detach()


def _gradients(model: Any) -> Tensor:
    return torch.cat([parameter.grad.float().flatten() for parameter in model.parameters()])


def _relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())
