"""Trained tokens per second of a mixture of experts and of a dense model with as many active parameters, under ZeRO-3.

`python -m benchmarks.experts [--experts 8] [--precision bf16-true] [--steps 5]` trains both models with two CPU workers
over gloo, one after the other, twice. The dense model has 28 M parameters. The mixture has the same layers, but each
token takes two experts of half the width. The output is the median step of each model, and the ratio of the rates.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.policies import save_28m
from benchmarks.zero_stages import SEQUENCES, TOKENS, WORKERS, train

CHOSEN = 2
ROUNDS = 2


def save_mixture(folder: Path, dense: Path, experts: int) -> tuple[int, int]:
    """Write a mixture of experts with random weights and the sizes of a dense Qwen2 model.

    Args:
        folder: folder of the mixture.
        dense: folder of the dense model.
        experts: number of experts in each layer.

    Returns:
        Number of parameters, and number of parameters that each token takes.
    """
    from transformers import AutoConfig, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = AutoConfig.from_pretrained(dense)
    same = (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "max_position_embeddings", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
    )  # fmt: skip
    options: dict[str, Any] = {name: getattr(sizes, name) for name in same}
    options |= {
        "intermediate_size": sizes.intermediate_size,
        "moe_intermediate_size": sizes.intermediate_size // CHOSEN,
        "head_dim": sizes.hidden_size // sizes.num_attention_heads,
        "num_experts": experts,
        "num_experts_per_tok": CHOSEN,
    }
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**options))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(dense).save_pretrained(folder)
    in_experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    whole = sum(p.numel() for p in model.parameters())
    return whole, whole - in_experts + in_experts * CHOSEN // experts


def main() -> None:
    """Train both models in turn, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--precision", default="bf16-true")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {"dense": [], "mixture": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dense = save_28m(folder / "dense")
        whole, active = save_mixture(folder / "mixture", folder / "dense", options.experts)
        print(
            f"dense: {dense / 1e6:.1f} M parameters; mixture: {whole / 1e6:.1f} M, {active / 1e6:.1f} M of them active "
            f"({options.experts} experts, {CHOSEN} for a token); {options.precision}, {WORKERS} workers"
        )
        for _ in range(ROUNDS):
            for model, each in seconds.items():
                arguments = ("--precision", options.precision, "--steps", str(options.steps))
                each += train(folder / model, 3, *arguments)["seconds"]
    tokens = WORKERS * SEQUENCES * TOKENS
    for model, each in seconds.items():
        print(
            f"{model:<8} {tokens / median(each):6.0f} tokens/s (median of {len(each)} steps, {min(each):.2f} to "
            f"{max(each):.2f} s)"
        )
    print(f"the mixture reaches {median(seconds['dense']) / median(seconds['mixture']):.0%} of the dense model's rate")


if __name__ == "__main__":
    main()
