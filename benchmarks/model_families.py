"""Which families of models train and sample: a table, made by runs of each family with a tiny model.

`python -m benchmarks.model_families [--only llama qwen3_moe | --page docs/models.md]` builds a tiny model of each
family from its configuration. The model runs packed samples and each sample alone, then SFT, and two steps of GRPO over
ZeRO-3, over FSDP2 and with LoRA: two workers, vLLM, and a check of the engine's weights after each update. The second
step over ZeRO-3 continues from the checkpoint of the first. Mixtures of experts replay routes, and take two steps with
experts divided over the workers, too. Transformers and vLLM load the exported policy. A failed run gives its reason.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.shared_workers import train_in_turn
from benchmarks.tiny_families import FAMILIES, RECURRENT, save_tiny_family
from rl_plugins.config.recipe import parse_config
from rl_plugins.errors import ConfigError
from rl_plugins.launch.compose import compose_config
from rl_plugins.run_folder import RunFolder, checkpoint_step, read_metrics

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

_DEADLINE_S = 600
RUNS = {
    "sft": ("sft", []),
    "zero": ("grpo", ["strategy.name=zero"]),
    "resume": ("grpo", ["strategy.name=zero"]),
    "fsdp": ("grpo", ["strategy.name=fsdp"]),
    "lora": ("grpo", ["strategy.name=zero", "model.lora.rank=4", "rollout.lora=merged", "optimizer.lr=1e-2"]),
}
EXPERTS = {"experts": ("grpo", ["strategy.name=fsdp", "strategy.expert_parallel=2"])}
"""A further run of mixtures of experts, which has no column in the table."""

_LARGEST_GAP = 1e-4
_PROMPT = list(range(10, 40))
"""Prompt for an exported policy, longer than the windows of attention."""


@dataclass
class Row:
    """Results of a family.

    Attributes:
        family: name of the family in transformers.
        model: class of the model.
        packing: True if a row of separate samples gives the numbers of each sample alone.
        shares_prompts: True if a prompt in such a row is computed once for all its samples.
        engine: rollout engine of the runs.
        done: names of the finished runs.
        gap: largest difference of log-probs between the policy and the engine.
        exported: True if the exported policy has the tensors of the start, and transformers loads them.
        served: True if vLLM loads the exported policy, and has the log-probs of transformers.
        reasons: reasons for a missing result, by its name.
        seconds: time of all runs.
    """

    family: str
    model: str = ""
    packing: bool = False
    shares_prompts: bool = False
    engine: str = "vllm"
    done: list[str] = field(default_factory=list)
    gap: float = float("nan")
    exported: bool = False
    served: bool = False
    reasons: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


def check_packing(row: Row, folder: Path) -> None:
    """Compare packed samples with samples that run alone."""
    import torch

    from rl_plugins.data.experience import Experience
    from rl_plugins.models.loading import load_causal_lm
    from rl_plugins.models.log_probs import response_log_probs
    from rl_plugins.models.packing import shares_prompts

    model = load_causal_lm(str(folder), dtype=torch.float32).eval()
    ids = torch.randint(250, (6, 20), generator=torch.Generator().manual_seed(0)).tolist()
    # Two samples have one prompt.
    pairs = [(ids[0], ids[1]), (ids[0], ids[2][:9]), (ids[3][:3], ids[4] + ids[5])]
    samples = Experience.from_responses([prompt for prompt, _ in pairs], [response for _, response in pairs], 0)
    try:
        packed_BT = response_log_probs(model, **samples.forward_inputs, packed=True).log_probs_BT
    except ConfigError:
        return
    for packed_T, (prompt, response) in zip(packed_BT, pairs, strict=True):
        difference = float((packed_T[: len(response)] - log_probs_alone(model, prompt, response)).abs().max())
        if difference > 1e-4:
            row.reasons["packing"] = f"packed samples differ by {difference:.1e}"
            return
    row.packing, row.shares_prompts = True, shares_prompts(model)


def log_probs_alone(model: PreTrainedModel, prompt: list[int], response: list[int]) -> Tensor:
    """Return the log-probs of a response, shape (T,), from a forward pass with this sample alone."""
    import torch

    with torch.no_grad():
        logits_TV = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
    return logits_TV.log_softmax(dim=-1).gather(-1, torch.tensor(response)[:, None]).squeeze(-1)


def runs_of(family: str) -> dict[str, tuple[str, list[str]]]:
    """Return the runs of a family by name, and the recipe and options of each."""
    from rl_plugins.launch.algorithm_check import can_divide

    return RUNS | EXPERTS if can_divide(family) else RUNS


def name_of(run: str) -> str:
    """Return the name of a run's folder."""
    return "zero" if run == "resume" else run


def steps_of(run: str) -> int:
    """Return the number of steps after which a run ends."""
    return 1 if run == "zero" else 2


def is_done(run: str, folder: Path) -> bool:
    """Return True if a run has ended after its last step, and has saved a checkpoint."""
    of_run = RunFolder(folder / name_of(run))
    return (of_run.path / "done").is_file() and steps_of(run) in map(checkpoint_step, of_run.checkpoints())


def options(run: str, row: Row, folder: Path) -> list[str]:
    """Return the configuration and the options of a run."""
    from rl_plugins.router_replay import has_routers

    config, extras = runs_of(row.family)[run]
    found = [
        config, f"run.name={name_of(run)}", f"run.output_dir={folder}", f"run.steps={steps_of(run)}",
        "run.eval_every=0", "run.eval_before=false", "run.export=true", "tracking.enabled=false",
        f"model.path={folder}/base", f"data.train_files=[{folder}/train.parquet]", "data.max_prompt_tokens=28",
        "batch.prompts_per_step=8", f"batch.packing={str(row.packing).lower()}", "optimizer.lr=1e-3",
        "placement.device=cpu", "sampling.max_tokens=8", "placement.num_workers=2", f"rollout.engine={row.engine}",
    ]  # fmt: skip
    if config != "sft":
        found += [
            "batch.samples_per_prompt=4", "rollout.check_updates=1",
            "reward.functions.default={_target_: integration_tests.rewards.shortness}",
        ]  # fmt: skip
        if has_routers(row.family):
            found += ["model.lora.experts=true"] if run == "lora" else []
            found += ["model.router_replay=recompute", "model.router_losses.balance=0.01", "batch.updates_per_step=2"]
    # vLLM caches no prefixes of models with recurrent layers, unless it prefills in chunks.
    if row.family in RECURRENT:
        found.append("rollout.prefix_caching=false")
    return [*found, *extras]


def train(row: Row, folder: Path) -> None:
    """Train all runs of a family. A run that fails ends the runs after it, which then start again."""
    left = list(runs_of(row.family))
    while left:
        try:
            configs = [
                parse_config(compose_config(name, words))
                for name, *words in (options(run, row, folder) for run in left)
            ]
            train_in_turn(configs, folder / "ray")
        # Whatever a library raises is the result of the family.
        except Exception as error:
            import ray

            ray.shutdown()
            reason = last_line(error)
            finished = [run for run in left if is_done(run, folder)]
            started = any(RunFolder(folder / name_of(run)).metrics.is_file() for run in left if run not in finished)
            left = [run for run in left if run not in finished]
            print(f"{row.family}: {left[0]}: {error}", file=sys.stderr)
            if row.engine == "vllm" and not finished and not started:
                row.reasons["vllm"], row.engine = reason, "transformers"
            else:
                row.reasons[left.pop(0)] = reason
        else:
            left = []
    row.done = [run for run in runs_of(row.family) if is_done(run, folder)]


def last_line(error: BaseException) -> str:
    """Return the innermost reason of an error of Ray or of an engine."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:300]


def check_export(row: Row, folder: Path) -> None:
    """Load the exported policy, and compare its tensors with those of the start."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    before = load_file(folder / "base" / "model.safetensors")
    for run in dict.fromkeys(map(name_of, row.done)):
        policy = folder / run / "policy"
        after = {name: tensor for file in policy.glob("*.safetensors") for name, tensor in load_file(file).items()}
        AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
        if {name: tensor.shape for name, tensor in before.items()} != {
            name: tensor.shape for name, tensor in after.items()
        }:
            row.reasons["export"] = f"{run}: the exported policy has other tensors than the start"
            return
        if all(torch.equal(before[name], after[name]) for name in before):
            row.reasons["export"] = f"{run}: the policy has not changed"
            return
    row.exported = bool(row.done)


def check_serving(row: Row, folder: Path) -> None:
    """Sample from an exported policy with vLLM, and compare the log-probs with those of transformers."""
    import torch

    from rl_plugins.models.loading import load_causal_lm

    if not row.exported or row.engine != "vllm":
        return
    policy = folder / name_of(row.done[-1]) / "policy"
    # vLLM changes some classes of transformers in its process.
    command = [sys.executable, "-m", "benchmarks.model_families", "--sample", str(policy)]
    sampling = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
    if sampling.returncode:
        row.reasons["serving"] = sampling.stderr.strip().splitlines()[-1][:300]
        return
    response, sampled = json.loads(sampling.stdout.splitlines()[-1])
    model = load_causal_lm(str(policy), dtype=torch.float32).eval()
    difference = float((log_probs_alone(model, _PROMPT, response) - torch.tensor(sampled)).abs().max())
    row.served = difference <= _LARGEST_GAP
    if not row.served:
        row.reasons["serving"] = f"the log-probs of vLLM differ by {difference:.1e}"


def sample(policy: str) -> tuple[list[int], list[float]]:
    """Return a response of vLLM, and the log-probs of its tokens."""
    from rl_plugins.config.sampling import SamplingConfig
    from rl_plugins.rollout.engine import GroupRequest
    from rl_plugins.rollout.vllm.config import VLLMConfig
    from rl_plugins.rollout.vllm.offline import OfflineVLLM

    engine = OfflineVLLM(VLLMConfig(policy, max_model_len=64))
    samples = engine.sample_groups([GroupRequest(0, _PROMPT, seed=0)], SamplingConfig(num_samples=1, max_tokens=8))
    return samples.responses()[0], samples.response_log_probs()[0]


def try_family(family: str, folder: Path) -> Row:
    """Return the results of a family."""
    from rl_plugins.data.prepare.files import write_splits
    from rl_plugins.data.prepare.tasks import addition_rows
    from rl_plugins.launch.terminal import quiet_libraries

    quiet_libraries()
    start, row = time.monotonic(), Row(family)
    row.model = type(save_tiny_family(family, folder / "base")).__name__
    write_splits({"train": addition_rows(below=50, num_train=64, num_test=1, seed=0)["train"]}, folder)
    check_packing(row, folder / "base")
    train(row, folder)
    check_export(row, folder)
    check_serving(row, folder)
    gaps = [
        max(series["train/rollout_gap_max"].values())
        for run in map(name_of, row.done)
        if "train/rollout_gap_max" in (series := read_metrics(folder / run / "metrics.jsonl"))
    ]
    row.gap = max(gaps, default=float("nan"))
    if row.gap > _LARGEST_GAP:
        row.reasons["vllm"] = "the log-probs of vLLM on CPU differ from those of transformers"
    row.reasons = {name: reason.replace(f"{folder}/", "") for name, reason in row.reasons.items()}
    row.seconds = time.monotonic() - start
    return row


def in_a_process(family: str, folder: Path) -> Row:
    """Return the results of a family, made in a process of its own."""
    result = folder / family / "row.json"
    if result.is_file():
        return Row(**json.loads(result.read_text(encoding="utf-8")))
    # The second step over ZeRO-3 would start from a checkpoint of a stopped command.
    shutil.rmtree(folder / family, ignore_errors=True)
    command = [sys.executable, "-m", "benchmarks.model_families", "--one", family, "--folder", str(folder)]
    with (folder / f"{family}.log").open("w", encoding="utf-8") as log:
        try:
            status = subprocess.run(command, stdout=log, stderr=log, timeout=_DEADLINE_S).returncode
            reason = f"the process ended with status {status}"
        except subprocess.TimeoutExpired:
            reason = f"the runs took longer than {_DEADLINE_S} s"
    if not result.is_file():
        return Row(family, reasons={"process": reason})
    return Row(**json.loads(result.read_text(encoding="utf-8")))


def line(row: Row) -> str:
    """Return the line of a family in the table."""

    def mark(holds: bool) -> str:
        return "yes" if holds else "no"

    reasons = "; ".join(f"{name}: {reason}" for name, reason in row.reasons.items()).replace("|", "/")
    cells = [
        f"`{row.family}`", mark(row.packing), mark(row.shares_prompts), *(mark(run in row.done) for run in RUNS),
        mark("vllm" not in row.reasons and bool(row.done)), f"{row.gap:.0e}", mark(row.exported), mark(row.served),
        f"{row.seconds:.0f}", reasons,
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


HEAD = (
    "| family | packed samples | shared prompts | SFT | GRPO, ZeRO-3 | checkpoint | GRPO, FSDP2 | GRPO, LoRA | vLLM | "
    "largest gap | export | vLLM loads the export | seconds | notes |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"
)


def write_page(rows: Sequence[Row], page: Path) -> None:
    """Write the table between the two marks of the page."""
    marked = re.compile(r"(<!-- families -->\n).*?(<!-- end families -->)", re.DOTALL)
    table = "\n".join([HEAD, *map(line, rows)])
    text = page.read_text(encoding="utf-8")
    page.write_text(marked.sub(lambda match: f"{match[1]}{table}\n{match[2]}", text), encoding="utf-8")


def main() -> None:
    """Try the families, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=FAMILIES, help="families; default: all")
    parser.add_argument("--page", type=Path, help="page for the table, such as docs/models.md")
    parser.add_argument("--folder", type=Path, help="keep runs and logs here, and go on from the runs that are there")
    parser.add_argument("--one", choices=FAMILIES, help=argparse.SUPPRESS)
    parser.add_argument("--sample", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.page and arguments.only:
        parser.error("--page: a table of some families would replace the table of all: leave --page or --only out")
    if arguments.sample:
        print(json.dumps(sample(arguments.sample)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder: Path = (arguments.folder or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        if arguments.one:
            result: Any = asdict(try_family(arguments.one, folder / arguments.one))
            (folder / arguments.one / "row.json").write_text(json.dumps(result), encoding="utf-8")
            return
        print(HEAD, flush=True)
        rows = []
        for family in arguments.only or FAMILIES:
            rows.append(in_a_process(family, folder))
            print(line(rows[-1]), flush=True)
        if arguments.page is not None:
            write_page(rows, arguments.page)


if __name__ == "__main__":
    main()
