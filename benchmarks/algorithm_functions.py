"""Share of an RL step in the algorithm's own functions: advantages, corrections, losses and their derivatives.

`python -m benchmarks.algorithm_functions [--steps 8]` measures a step of the quickstart's GRPO with the recipe. Then it
measures the functions of every algorithm in this process on one thread, with the samples of one rank in such a step.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from hydra.utils import instantiate
from torch import Tensor

from benchmarks.grpo_step import prepare
from benchmarks.runs import run_grpo
from rl_plugins.algorithms.aggregation import GlobalCounts, local_counts
from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.algorithms.inputs import required_inputs
from rl_plugins.config.hydra_errors import CONFIG_FOLDER
from rl_plugins.launch.compose import compose_config

# Numbers of the quickstart: prompts and samples of a step, workers, tokens of a response, optimizer steps.
PROMPTS, SAMPLES, WORKERS, TOKENS, UPDATES = 64, 8, 2, 4, 2
LIMIT = 0.05


def alone(values: Tensor) -> Tensor:
    """Return the values of the only rank."""
    return values


def experience(algorithm: Algorithm) -> dict[str, Any]:
    """Return made-up samples of one rank with all inputs of all algorithms."""
    generator = torch.Generator().manual_seed(0)
    size = PROMPTS * SAMPLES // WORKERS
    old_BT = -torch.rand(size, TOKENS, generator=generator)
    scores_B = torch.rand(size, generator=generator).round()
    lengths_B = torch.randint(1, TOKENS + 1, (size,), generator=generator)
    mask_BT = (torch.arange(TOKENS) < lengths_B[:, None]).float()
    names = ("ref_log_probs", "teacher_log_probs", "entropy", "sum_pi_squared", "values", "process_rewards")
    return {
        **{f"{name}_BT": torch.rand(size, TOKENS, generator=generator) for name in names},
        "old_log_probs_BT": old_BT,
        "rollout_log_probs_BT": old_BT + 1e-3 * torch.randn(size, TOKENS, generator=generator),
        "scores_B": scores_B,
        "is_positive_B": scores_B > algorithm.modifiers.positive_above,
        "baseline_rewards_B": torch.rand(size, generator=generator).round(),
        "component_rewards_BK": torch.rand(size, max(1, len(algorithm.reward_components)), generator=generator),
        "groups_B": torch.arange(size) // SAMPLES,
        "valid_B": torch.ones(size, dtype=torch.bool),
        "response_lengths_B": lengths_B,
        "response_mask_BT": mask_BT,
        "ids_B": torch.arange(size),
    }


def one_step(algorithm: Algorithm, inputs: dict[str, Any]) -> None:
    """Call the functions of one RL step of one rank."""
    if "ref_log_probs_BT" not in algorithm.needs:
        inputs = {name: value for name, value in inputs.items() if name != "ref_log_probs_BT"}
    shaping = ("scores_B", "response_lengths_B", "groups_B", "valid_B")
    scores_B = algorithm.shaping.shaped(**{name: inputs[name] for name in shaping})
    _, advantages_BT, _ = algorithm.advantages({**inputs, "scores_B": scores_B}, kl_coefficient=0.01)
    everything = {**inputs, "advantages_BT": advantages_BT}
    for indices in torch.arange(len(scores_B)).chunk(UPDATES):
        batch = {name: value[indices] for name, value in everything.items()}
        counts = GlobalCounts(*local_counts(batch["response_mask_BT"]).tolist())
        selected_BT = algorithm.select(
            {**batch, "log_probs_BT": batch["old_log_probs_BT"]}, seed=0, sum_over_ranks=alone, gather_over_ranks=alone
        )
        log_probs_BT = batch["old_log_probs_BT"].clone().requires_grad_()
        loss, _ = algorithm.loss(
            {**batch, "log_probs_BT": log_probs_BT, "selected_BT": selected_BT},
            kl_coefficient=0.01,
            counts=counts,
            positive_counts=counts,
        )
        loss.backward()


def seconds(call: Callable[[], object], repeats: int = 30) -> float:
    """Return the median seconds of several calls, after a few calls for warm-up."""
    times = []
    for _ in range(repeats + 5):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return median(times[5:])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8, help="steps of the recipe; the median leaves out the first two")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare("quickstart", folder)
        run = run_grpo(
            folder, f"run.steps={arguments.steps}", f"batch.prompts_per_step={PROMPTS}",
            f"batch.samples_per_prompt={SAMPLES}", f"batch.updates_per_step={UPDATES}",
            f"sampling.max_tokens={TOKENS}", "data.max_prompt_tokens=28",
        )  # fmt: skip
    step_s = run.median("time/step")
    print(f"a step of {PROMPTS} x {SAMPLES} samples takes {step_s:.3f} s; the functions, of one of {WORKERS} ranks:")
    torch.set_num_threads(1)
    for name in sorted(path.stem for path in (CONFIG_FOLDER / "algorithm").glob("*.yaml")):
        algorithm = instantiate(compose_config("grpo", ["model.path=none", f"algorithm={name}"]).algorithm)
        if "top_log_probs_BTK" in required_inputs(algorithm.policy_loss_function, algorithm.policy_loss_options):
            continue
        inputs = experience(algorithm)
        taken_s = seconds(partial(one_step, algorithm, inputs))
        mark = "" if taken_s < LIMIT * step_s else f"  above {LIMIT:.0%}"
        print(f"  {name:30}{1000 * taken_s:8.2f} ms{taken_s / step_s:8.1%}{mark}")


if __name__ == "__main__":
    main()
