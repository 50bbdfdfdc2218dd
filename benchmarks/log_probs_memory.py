"""Memory and time of the log-probs of response tokens, forward and backward, with a vocabulary of 150 k.

`python -m benchmarks.log_probs_memory [--samples 8] [--tokens 128] [--threads 1]` prints, for float32 and bfloat16, the
peak memory without the loaded model (gradients included) and the processor seconds of the faster of two passes. Each of
three ways runs in a separate process: the logits of all positions in float32 with a log-softmax; the logits of the
response, converted to float32 in chunks; and `response_log_probs`, which applies the head to chunks of hidden states.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from torch import Tensor

VOCABULARY = 150_000
PROMPT_TOKENS = 64
PASSES = 2
DTYPES = ("float32", "bfloat16")
TIMEOUT_S = 900


def whole_logits(model: Any, ids_BS: Tensor, width: int) -> Tensor:
    """Return log-probs by the plain formula: float32 logits of the batch, log-softmax, gather."""
    distribution_BSV = model(input_ids=ids_BS, use_cache=False).logits.float().log_softmax(dim=-1)
    return distribution_BSV[:, -width - 1 : -1].gather(-1, ids_BS[:, -width:, None]).squeeze(-1)


def logits_of_the_response(model: Any, ids_BS: Tensor, width: int) -> Tensor:
    """Return log-probs as for models that change their logits after the head."""
    from rl_plugins.models.token_distributions import ColumnSpec, distribution_columns

    logits_BTV = model(input_ids=ids_BS, use_cache=False, logits_to_keep=width + 1).logits
    next_tokens_BT = ids_BS.roll(-1, dims=1)[:, -width - 1 :]
    columns_NC = distribution_columns(logits_BTV.flatten(0, 1), next_tokens_BT.flatten(), ColumnSpec())
    return columns_NC[:, 0].view_as(next_tokens_BT)[:, :-1]


def hidden_by_chunks(model: Any, ids_BS: Tensor, width: int) -> Tensor:
    """Return log-probs as for all other models."""
    import torch

    from rl_plugins.models.log_probs import response_log_probs

    return response_log_probs(
        model,
        input_ids_BS=ids_BS,
        attention_mask_BS=torch.ones_like(ids_BS),
        position_ids_BS=torch.arange(ids_BS.shape[1]).expand_as(ids_BS),
        response_width=width,
    ).log_probs_BT


WAYS = {
    "whole float32 logits": whole_logits,
    "response logits by chunks": logits_of_the_response,
    "hidden states by chunks": hidden_by_chunks,
}


def measure(way: str, dtype: str, samples: int, width: int, threads: int) -> dict[str, float]:
    """Run one way in this process, and return peak bytes, seconds and the sum of the log-probs."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, dtype))
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = Qwen2ForCausalLM(config)
    ids_BS = torch.randint(VOCABULARY, (samples, PROMPT_TOKENS + width))
    # The first pass loads libraries, and finds out which kind of head the model has.
    WAYS[way](model, ids_BS[:1, :4], 2).sum().backward()
    model.zero_grad()
    before = psutil.Process().memory_info().rss
    seconds = []
    for _ in range(PASSES):
        model.zero_grad()
        start = time.process_time()
        total = WAYS[way](model, ids_BS, width).sum()
        total.backward()
        seconds.append(time.process_time() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"bytes": peak - before, "seconds": min(seconds), "sum": total.item()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128, help="of each response")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--dtype", choices=DTYPES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way:
        result = measure(arguments.way, arguments.dtype, arguments.samples, arguments.tokens, arguments.threads)
        print(json.dumps(result))
        return
    print(f"{arguments.samples} samples of {PROMPT_TOKENS} + {arguments.tokens} tokens, vocabulary {VOCABULARY}")
    for dtype in DTYPES:
        print(f"\n{dtype:27}{'peak GB':>10}{'ratio':>8}{'CPU s':>8}{'ratio':>8}{'sum of log-probs':>20}")
        results = {}
        for way in WAYS:
            command = [
                sys.executable,
                "-m",
                "benchmarks.log_probs_memory",
                *sys.argv[1:],
                "--way",
                way,
                "--dtype",
                dtype,
            ]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S).stdout
            results[way] = json.loads(output.splitlines()[-1])
        ours = results["hidden states by chunks"]
        for way, result in results.items():
            gigabytes, seconds = result["bytes"] / 1e9, result["seconds"]
            ratios = [result[name] / ours[name] for name in ("bytes", "seconds")]
            print(f"{way:27}{gigabytes:10.2f}{ratios[0]:8.1f}{seconds:8.1f}{ratios[1]:8.1f}{result['sum']:20.1f}")


if __name__ == "__main__":
    main()
