"""Attention by matrix products compared with torch's own kernel, on CPU in bfloat16.

`python -m benchmarks.cpu_attention [--threads 1] [--repeats 20]` runs forward and backward passes of causal attention
with 8 query heads and 4 key heads of 64 numbers. Both implementations run in turn. The last sizes are sections of a row
with a shared prompt.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from rl_plugins.models.product_attention import product_attention, suits

HEADS, GROUPS, WIDTH = 8, 4, 64
SIZES = [(8, 192, 192), (2, 1024, 1024), (1, 4096, 4096), (7, 128, 192), (7, 64, 576)]
"""Samples, tokens that attend, tokens that they see."""


def main() -> None:
    """Print the times of both implementations and their ratio for each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if not suits(torch.empty(0, dtype=torch.bfloat16)):
        print("this processor does not multiply bfloat16 numbers: torch's own attention is used")
    for samples, own, whole in SIZES:
        heads = [
            torch.randn(samples, tokens, count, WIDTH).bfloat16().requires_grad_()
            for tokens, count in ((own, HEADS), (whole, GROUPS), (whole, GROUPS))
        ]
        ways = (product_attention, torch_attention)
        taken: list[list[float]] = [[], []]
        for _ in range(options.repeats + 1):
            for attend, times in zip(ways, taken, strict=True):
                start = time.perf_counter()
                attend(*heads).sum().backward()
                times.append(time.perf_counter() - start)
        # The first measurement of each implementation is a warm-up.
        ours, torchs = (median(times[1:]) * 1e3 for times in taken)
        print(
            f"{samples} samples, {own} of {whole} tokens: products {ours:.1f} ms, torch {torchs:.1f} ms; "
            f"{torchs / ours:.2f} times as fast"
        )


def torch_attention(query_NQHD: Tensor, key_NKGD: Tensor, value_NKGD: Tensor) -> Tensor:
    """Return the same attention by torch's kernel."""
    query, key, value = (heads.transpose(1, 2) for heads in (query_NQHD, key_NKGD, value_NKGD))
    bias = causal_lower_right(query.shape[2], key.shape[2])
    output: Tensor = torch.nn.functional.scaled_dot_product_attention(query, key, value, bias, enable_gqa=True)
    return output.transpose(1, 2)


if __name__ == "__main__":
    main()
