"""Cost of an RL step beyond its parts: vLLM's `LLM.generate` alone and a plain DeepSpeed loop alone, on the same work.

`python -m benchmarks.bare_parts [--steps 8] [--threads 2] [--set rollout.max_num_seqs=64]` runs the GRPO recipe with
one worker and one engine on 28 M parameters. A second run with the same seeds keeps its samples. Then vLLM samples the
same prompts with the same settings, and DeepSpeed trains on the same packed rows, each in a process of its own. The
output is the median seconds of a step and of both parts, and the share of a step beyond the parts. The learning rate is
next to 0, so the policy and the lengths of the responses stay the same. `--set` takes the options of an engine in
`OF_ENGINE`, which reach vLLM alone, too.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.grpo_step import SIZES, prepare, run_alternative
from benchmarks.runs import run_grpo
from rl_plugins.config.recipe import parse_config
from rl_plugins.launch.compose import compose_config

if TYPE_CHECKING:
    from rl_plugins.data.experience import Experience
    from rl_plugins.rollout.vllm.config import VLLMConfig

PROMPTS, SAMPLES, MAX_TOKENS, PROMPT_TOKENS, MICRO_BATCH = SIZES["28m"]
BUDGET = MICRO_BATCH * (PROMPT_TOKENS + MAX_TOKENS)
WARM_UP = 2
OF_ENGINE = ("rollout.max_num_seqs", "rollout.prefix_caching", "rollout.cpu_kv_cache_gib")
"""Options of the recipe for which both sides do the same work."""


def samples_of(folder: Path) -> Iterator[Experience]:
    """Yield the samples of each step of the run `kept`."""
    from rl_plugins.data.experience import Experience
    from rl_plugins.rewards.trajectory import RECORDS

    for file in sorted((folder / "outputs" / "kept" / "rollouts").glob("step_*/draw_0_rank_0_of_1.pt")):
        yield Experience.load(file, RECORDS)


def engine_config(folder: Path, threads: int, further: Sequence[str]) -> VLLMConfig:
    """Return the settings of vLLM alone, which are those of the recipe's engine."""
    from rl_plugins.rollout.vllm.config import VLLMConfig

    recipe = parse_config(compose_config("grpo", [f"model.path={folder}/policy", "placement.device=cpu", *further]))
    return VLLMConfig(
        recipe.model.path,
        dtype=recipe.rollout_dtype,
        max_model_len=PROMPT_TOKENS + MAX_TOKENS,
        threads=threads,
        prefix_caching=recipe.rollout.prefix_caching,
        cpu_kv_cache_gib=recipe.rollout.cpu_kv_cache_gib,
        **recipe.engine_limits,
    )


def sample(folder: Path, threads: int, further: Sequence[str]) -> list[float]:
    """Sample the prompts of each step with vLLM alone; return the seconds of the steps."""
    config = engine_config(folder, threads, further)
    os.environ.update(config.environment)
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    from rl_plugins.rollout.vllm import plugin  # noqa: F401

    engine = LLM(**config.engine_arguments())
    parameters = SamplingParams(n=SAMPLES, max_tokens=MAX_TOKENS, logprobs=0, seed=0, detokenize=False)
    seconds = []
    for samples in samples_of(folder):
        rows = zip(samples.input_ids[::SAMPLES], samples.attention_mask[::SAMPLES], strict=True)
        width = samples.responses.shape[1]
        prompts = [ids_S[:-width][mask_S[:-width].bool()].tolist() for ids_S, mask_S in rows]
        # A weight update drops the prefixes of a step.
        engine.reset_prefix_cache()
        start = time.perf_counter()
        engine.generate([TokensPrompt(prompt_token_ids=prompt) for prompt in prompts], parameters, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
    return seconds


def train(folder: Path, threads: int) -> list[float]:
    """Train on the samples of each step with DeepSpeed alone; return the seconds of the steps."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    import deepspeed
    import torch
    from transformers import AutoModelForCausalLM

    from rl_plugins.models.packed_attention import use_packed_attention
    from rl_plugins.models.packing import pack
    from rl_plugins.stages.micro_batches import Cutter, Lengths
    from rl_plugins.strategies.zero import ZeroStrategy

    torch.set_num_threads(threads)
    deepspeed.init_distributed("gloo", verbose=False)
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "policy", dtype=torch.float32)
    use_packed_attention(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-12, fused=True)
    zero: Any = ZeroStrategy(stage=3).config
    config = {**zero, "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0}
    config["zero_force_ds_cpu_optimizer"] = False
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    cutter = Cutter(BUDGET, packing=True, shares_prompts=True, max_over_ranks=lambda values: values)
    seconds = []
    for samples in samples_of(folder):
        start = time.perf_counter()
        tokens = samples.response_mask.sum()
        micro_batches = cutter.indices(Lengths.of(samples))
        for number, indices in enumerate(micro_batches, 1):
            micro = samples[indices].trimmed()
            mask, width = micro.attention_mask, micro.responses.shape[1]
            row = pack(
                engine,
                input_ids_BS=micro.input_ids,
                attention_mask_BS=mask,
                position_ids_BS=micro.position_ids,
                response_width=width,
            )
            predicting = row.predicting(mask, width)
            logits_NV = row.inputs.run(engine, logits_to_keep=predicting, use_cache=False).logits[0]
            targets_N = micro.responses[micro.response_mask.bool()]
            loss = torch.nn.functional.cross_entropy(logits_NV, targets_N, reduction="sum") / tokens
            engine.set_gradient_accumulation_boundary(number == len(micro_batches))
            engine.backward(loss)
        engine.step()
        seconds.append(time.perf_counter() - start)
    return seconds


def alone(part: str, folder: Path, threads: int, further: Sequence[str]) -> float:
    """Return the median seconds of a part in a process of its own."""
    work = ["--part", part, str(folder), "--threads", str(threads), "--set", *further]
    seconds: list[float] = run_alternative(["benchmarks.bare_parts"], work)["seconds"]
    return median(seconds[WARM_UP:])


def main() -> None:
    """Run everything, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="options of the engine")
    parser.add_argument("--part", nargs=2, metavar=("PART", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if refused := [option for option in options.set if option.partition("=")[0] not in OF_ENGINE]:
        parser.error(f"--set {refused[0]}: the parts alone would do other work: use only {', '.join(OF_ENGINE)}")
    if options.part:
        part, folder = options.part[0], Path(options.part[1])
        alone_s = {
            "sample": lambda: sample(folder, options.threads, options.set),
            "train": lambda: train(folder, options.threads),
        }
        print(json.dumps({"seconds": alone_s[part]()}))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parameters = prepare("28m", folder)
        overrides = [
            f"run.steps={options.steps}", "placement.num_workers=1", f"placement.cpus_per_worker={options.threads}",
            f"batch.prompts_per_step={PROMPTS}", f"batch.samples_per_prompt={SAMPLES}", "batch.updates_per_step=1",
            f"batch.tokens_per_micro_batch={BUDGET}", f"sampling.max_tokens={MAX_TOKENS}",
            f"data.max_prompt_tokens={PROMPT_TOKENS}", "optimizer.lr=1e-12", *options.set,
        ]  # fmt: skip
        run_grpo(folder, *overrides, f"debug.dump_rollouts={options.steps}", name="kept")
        run = run_grpo(folder, *overrides)
        parts = {part: alone(part, folder, options.threads, options.set) for part in ("sample", "train")}
    step, together = run.median("time/step", WARM_UP), sum(parts.values())
    print(f"{parameters / 1e6:.1f} M parameters, {PROMPTS} x {SAMPLES} samples of {MAX_TOKENS} tokens")
    print("seconds of a step by phase: " + ", ".join(f"{phase} {value:.3f}" for phase, value in run.phases().items()))
    print(f"step {step:.3f} s; vLLM alone {parts['sample']:.3f} s, DeepSpeed alone {parts['train']:.3f} s")
    print(f"a step costs {step / together - 1:+.1%} beyond its parts")


if __name__ == "__main__":
    main()
