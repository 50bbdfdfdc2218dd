"""Matrix products of a rollout engine on CPU with packed copies of the weights, compared with unpacked weights.

`python -m benchmarks.packed_products [--threads 1]` runs the products of a decoding step of the 28 M model with several
numbers of tokens, and prints the ratio of medians and the time of packing.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.algorithm_functions import seconds
from rl_plugins.rollout.vllm.plugin import PackedProducts

LAYERS, HIDDEN, INTERMEDIATE, VOCAB = 8, 512, 1408, 8192
# Outer and inner widths: joint queries, keys and values; the projection after attention; the two products of the MLP.
BLOCK = [(2 * HIDDEN, HIDDEN), (HIDDEN, HIDDEN), (2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)]
METHOD = PackedProducts()


class Layer(nn.Module):
    """Part of a linear layer of vLLM that `METHOD` uses."""

    packed: Any

    def __init__(self, outer: int, inner: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outer, inner).to(dtype), requires_grad=False)


def plain(model: list[Layer], inputs: dict[int, Tensor]) -> None:
    """Multiply with unpacked weights."""
    for layer in model:
        nn.functional.linear(inputs[layer.weight.shape[1]], layer.weight)


def packed(model: list[Layer], inputs: dict[int, Tensor]) -> None:
    """Multiply with packed copies."""
    for layer in model:
        METHOD.apply(layer, inputs[layer.weight.shape[1]])


def pack(model: list[Layer], inputs: dict[int, Tensor]) -> None:
    """Pack the weights of all layers, and multiply."""
    for layer in model:
        METHOD.process_weights_after_loading(layer)
    packed(model, inputs)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"{'':10}{'tokens':>8}{'plain, ms':>12}{'packed, ms':>12}{'times as fast':>15}{'packing, ms':>13}")
    for dtype in (torch.bfloat16, torch.float32):
        model = [Layer(outer, inner, dtype) for outer, inner in BLOCK * LAYERS + [(VOCAB, HIDDEN)]]
        for layer in model:
            METHOD.process_weights_after_loading(layer)
        for tokens in (1, 32, 128, 1024):
            inputs = {width: torch.randn(tokens, width).to(dtype) for width in (HIDDEN, INTERMEDIATE)}
            one, other, both = (seconds(partial(run, model, inputs)) for run in (plain, packed, pack))
            times = f"{1e3 * one:12.2f}{1e3 * other:12.2f}{one / other:15.2f}{1e3 * (both - other):13.1f}"
            print(f"{str(dtype).removeprefix('torch.'):10}{tokens:8}{times}")


if __name__ == "__main__":
    main()
