"""Alternative for comparison: a simple GRPO loop in one process, with Hugging Face generate and plain PyTorch.

`python -m benchmarks.plain_loop POLICY PARQUET --prompts 32 --samples 8 --max-tokens 6 --steps 10` prints one JSON
object: median seconds of a step and of each phase, samples/s and the peak resident size.
"""

from __future__ import annotations

import json
import resource
import time
from statistics import median
from typing import Any

import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from benchmarks.loop_options import loop_parser


def main() -> None:
    """Train and print."""
    options = loop_parser(__doc__).parse_args()
    torch.set_num_threads(options.threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(options.policy, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(options.policy, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0)
    rows = pq.read_table(options.parquet).to_pylist()
    times: dict[str, list[float]] = {"rollout": [], "update": [], "step": []}
    for step in range(options.steps):
        start = time.perf_counter()
        batch = [rows[(step * options.prompts + i) % len(rows)] for i in range(options.prompts)]
        prompts: Any = tokenizer.apply_chat_template(
            [row["prompt"] for row in batch],
            add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True,
        )  # fmt: skip
        width = prompts["input_ids"].shape[1]
        with torch.no_grad():
            sequences = model.generate(
                **prompts, do_sample=True, num_return_sequences=options.samples, max_new_tokens=options.max_tokens
            )
        responses = sequences[:, width:]
        ended = (responses == tokenizer.eos_token_id).int().cumsum(-1)
        mask = ((ended - (responses == tokenizer.eos_token_id).int()) == 0).float()
        texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
        truths = [row["reward_model"]["ground_truth"] for row in batch for _ in range(options.samples)]
        rewards = torch.tensor([float(text.strip() == truth) for text, truth in zip(texts, truths, strict=True)])
        groups = rewards.view(-1, options.samples)
        advantages = ((groups - groups.mean(1, True)) / (groups.std(1, keepdim=True) + 1e-6)).view(-1, 1)
        sampled = time.perf_counter()
        attention = torch.cat([prompts["attention_mask"].repeat_interleave(options.samples, 0), mask.long()], 1)
        for part in torch.arange(len(sequences)).split(options.micro_batch):
            logits = model(
                input_ids=sequences[part],
                attention_mask=attention[part],
                position_ids=(attention[part].cumsum(-1) - 1).clamp(min=0),
                logits_to_keep=responses.shape[1] + 1,
            ).logits[:, :-1]
            log_probs = logits.log_softmax(-1).gather(-1, responses[part].unsqueeze(-1)).squeeze(-1)
            ratio = (log_probs - log_probs.detach()).exp()
            loss = -(ratio * advantages[part] * mask[part]).sum() / mask.sum()
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        end = time.perf_counter()
        for name, seconds in (("rollout", sampled - start), ("update", end - sampled), ("step", end - start)):
            times[name].append(seconds)
    medians = {name: median(values[min(2, len(values) - 1) :]) for name, values in times.items()}
    samples = options.prompts * options.samples
    print(
        json.dumps(
            {
                "seconds": medians,
                "samples_per_s": samples / medians["step"],
                "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            }
        )
    )


if __name__ == "__main__":
    main()
