"""Places of the tensors of a checkpoint, found in a recorded load."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from rl_plugins.weights.layout import Piece, map_shared, place_weights, share_parameters
from rl_plugins.weights.source import WeightMeta

Load = Callable[[Tensor, Tensor], object]


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 5), torch.nn.Linear(5, 3, bias=False)
        self.tied = self.second.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def test_share_parameters_keeps_values_and_ties_and_lets_another_mapping_write() -> None:
    model = Tied()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    identities = [id(parameter) for parameter in model.parameters()]
    memory = share_parameters(model)
    assert [id(parameter) for parameter in model.parameters()] == identities
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert all(parameter.data_ptr() % 64 == 0 for parameter in model.parameters())
    # As another process would, by the descriptor.
    other = map_shared(os.dup(memory.fd), memory.size)
    memory.close()
    other.zero_()
    assert model(torch.ones(1, 3)).eq(0).all() and model.tied.eq(0).all()


def place(load: Load) -> list[Piece]:
    """Return the pieces of a tensor "w" after `load` into a [8, 6] parameter of ones; staged pieces have no count."""
    model = torch.nn.Linear(6, 8, bias=False).requires_grad_(False)
    model.weight.data.fill_(1)
    memory = share_parameters(model)

    def load_weights(weights: Iterable[tuple[str, Tensor]]) -> None:
        for _, tensor in weights:
            load(model.weight, tensor)

    placement = place_weights(memory, [WeightMeta("w", torch.float32, (4, 6))], load_weights)
    assert model.weight.eq(1).all(), "watching must not write"
    assert bool(placement.direct) != bool(placement.staged)
    assert placement.staged_bytes == (128 if placement.staged else 0)
    return placement.direct


def test_place_weights_finds_slices_and_several_pieces() -> None:
    assert place(lambda p, t: p.data[2:6].copy_(t)) == [Piece("w", 0, 24, 2 * 6 * 4, "float32")]
    assert place(lambda p, t: p.data.narrow(0, 4, 4).copy_(t.view(4, 6))) == [Piece("w", 0, 24, 96, "float32")]
    padded = place(lambda p, t: (p.data[:4].copy_(t), p.data[4:].zero_(), p.data[8:].fill_(7)))
    assert padded == [Piece("w", 0, 24, 0, "float32")]
    halves = place(lambda p, t: (p.data[4:6].copy_(t[2:]), p.data[:2].copy_(t[:2])))
    assert halves == [Piece("w", 12, 12, 96, "float32"), Piece("w", 0, 12, 0, "float32")]


@pytest.mark.parametrize(
    "load",
    [
        lambda p, t: p.data[:6, :4].copy_(t.t()),  # transposed
        lambda p, t: p.data[:4].copy_(t * 2),  # computed
        lambda p, t: p.data[:4].copy_(t).mul_(2),  # changed afterwards
        lambda p, t: p.data[:2].copy_(t[:2]),  # in part
        lambda p, t: p.data[:, 0].fill_(0),  # something else
        lambda p, t: (p.data[:4].copy_(t), p.data[3:].fill_(0)),  # in part something else
        lambda p, t: (p.data[:4].copy_(t), p.data[4:].fill_(t.sum())),  # a sum computed during the load
        lambda p, t: None,  # nothing
        lambda p, t: torch.empty(4, 6).copy_(t),  # elsewhere
        lambda p, t: p.data[:4].copy_(t[:1].expand(4, 6)),  # repeated
    ],
)
def test_place_weights_stages_a_tensor_that_is_not_copied_unchanged(
    load: Load,
) -> None:
    assert place(load) == []
