"""Alternative for comparison: TRL's GRPOTrainer, with Hugging Face generate or with vLLM engines.

`python -m benchmarks.trl_loop POLICY PARQUET --prompts 16 --samples 4 --max-tokens 128 --micro-batch 16 --steps 4
[--bf16] [--vllm]` prints one JSON object like `benchmarks.plain_loop`. With `--vllm`, vLLM engines sample on the GPUs
of the trainer, and `accelerate launch` may start a process for each GPU. TRL's own defaults with more work than the
recipe's, recomputed blocks and a correction of the rollout, are off. Needs `pip install trl accelerate datasets`: this
project does not depend on them.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from statistics import median
from typing import Any

import pyarrow.parquet as pq
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.loop_options import loop_parser


class Clock(TrainerCallback):
    """End times of the optimizer steps."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *arguments: Any, **keywords: Any) -> None:
        self.ends.append(time.perf_counter())


def grpo_config(options: argparse.Namespace, folder: str) -> GRPOConfig:
    """Return the options of a trainer for the work of the recipe: no block of the model is computed twice."""
    of_pass = options.micro_batch * int(os.environ.get("WORLD_SIZE", "1"))
    vllm = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_enable_sleep_mode": True,
        # A correction needs a further forward pass.
        "vllm_importance_sampling_correction": False,
    }
    return GRPOConfig(
        output_dir=folder,
        use_cpu=not torch.cuda.is_available(),
        bf16=options.bf16,
        gradient_checkpointing=False,
        per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=options.prompts * options.samples // of_pass,
        num_generations=options.samples,
        max_completion_length=options.max_tokens,
        max_steps=options.steps,
        learning_rate=1e-5,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        **(vllm if options.vllm else {}),
    )


def main() -> None:
    """Train and print."""
    parser = loop_parser(__doc__)
    parser.add_argument("--bf16", action="store_true", help="bf16 autocast in place of float32")
    parser.add_argument("--vllm", action="store_true", help="sample with vLLM engines on the GPUs of the trainer")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    samples = options.prompts * options.samples
    rows = pq.read_table(options.parquet).to_pylist()

    def reward(completions: list[Any], ground_truth: list[str], **others: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        return [float(text.strip() == truth) for text, truth in zip(texts, ground_truth, strict=True)]

    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(options.policy, dtype=torch.float32),
            reward_funcs=reward,
            args=grpo_config(options, folder),
            train_dataset=Dataset.from_list(
                [{"prompt": row["prompt"], "ground_truth": row["reward_model"]["ground_truth"]} for row in rows]
            ),
            processing_class=AutoTokenizer.from_pretrained(options.policy, padding_side="left"),
            callbacks=[clock],
        )
        trainer.train()
    seconds = [end - start for start, end in zip(clock.ends, clock.ends[1:], strict=False)]
    step = median(seconds[1:] or seconds)
    if not trainer.is_world_process_zero():
        return
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        json.dumps(
            {
                "seconds": {"step": step},
                "samples_per_s": samples / step,
                "peak_bytes": peak,
            }
        )
    )


if __name__ == "__main__":
    main()
