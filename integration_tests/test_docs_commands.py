"""The shell blocks of `PAGES`, typed without change, in a folder with all files and models named by the pages.

Recipes get further options after their options: the runs are small, in one process. `LEFT_OUT` names the commands left
out, and `PAGES_LEFT_OUT` the pages, with the reasons.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from integration_tests.command_server import run_command
from rl_plugins.data.prepare.files import write_splits
from rl_plugins.data.prepare.tasks import addition_rows, preference_rows
from rl_plugins.models.tiny import save_tiny_policy
from rl_plugins.tests.patience import patient
from rl_plugins.tests.repository.documentation import ROOT, WRITTEN, blocks

pytestmark = pytest.mark.extended

RECIPES = "rl_plugins.recipes."
ITS_OWN = "model.path=MODEL 'data.train_files=[train.parquet]'"
"""Replacements of a reader's options."""
PAGES = (
    "docs/agent_recipes.md", "docs/callbacks.md", "docs/commands.md", "docs/custom_data.md", "docs/data.md",
    "docs/environments.md", "docs/existing_project.md", "docs/mlflow.md", "docs/own_algorithm.md", "docs/planning.md",
    "docs/recipes.md", "docs/rewards.md", "docs/sweeps.md",
)  # fmt: skip
PAGES_LEFT_OUT = {
    "CONTRIBUTING.md": "make targets",
    "README.md": "make targets, commands of docs/data.md and docs/recipes.md, and a machine of 8 GPUs",
    "docs/agents.md": "needs an agent of the reader; docs/agent_recipes.md and test_two_steps train agents",
    "docs/cluster.md": "needs a cluster; test_ray_job and test_cluster_files have their own",
    "docs/code.md": "needs programs as rows; the tests of rewards and of the sandbox have programs",
    "docs/gpus.md": "needs GPUs",
    "docs/hub.md": "needs the hub; test_hub has a stand-in",
    "docs/index.md": "a make target",
    "docs/judge.md": "needs a judge; test_judge_engine starts one, and the tests of rewards have a server",
    "docs/memory_and_speed.md": "benchmarks take minutes; results are in benchmarks/results",
    "docs/models.md": "benchmarks take minutes; test_images has rows with images",
    "docs/placement.md": "needs GPUs; test_model_pool and test_critic_pool place models on CPUs",
    "docs/references/README.md": "test_single_file_references runs both",
    "docs/serving.md": "needs a server that does not end; test_serving starts one",
    "docs/stateful.md": "needs an object of the reader; test_two_steps trains with objects",
    "docs/tools.md": "needs a tool of the reader; test_two_steps trains with tools",
    "examples/existing_project/README.md": "test_existing_project runs the project",
    "examples/existing_project_rl/README.md": "test_existing_project runs the project",
    "examples/lightning_cli/README.md": "test_projects types the commands",
    "examples/sums_from_scratch/README.md": "test_projects types the commands",
}
"""For each page with commands outside `PAGES`: the reason."""
LEFT_OUT = {
    "mlflow ui": "does not end",
    "export MLFLOW_TRACKING_URI=": "sets a variable of the shell",
    "mlflow artifacts": "names a run that the reader chooses; test_tracking gets a checkpoint back",
    "rl-plugins export run/best": "what the line before it has brought",
    "rl-plugins submit --dry-run": "refuses the links out of this folder; test_submit and test_ray_job have projects",
    "rl-plugins sync": "needs an outage; test_tracking_outage and test_pipeline_outage have one",
    "python examples/existing_project": "test_existing_project runs both",
    "python -m benchmarks.": "takes minutes; results are in benchmarks/results",
    "rl-plugins plan grpo model.path=MODEL --device cpu --calibration": "what the line before it has written",
    "rl-plugins prepare hf": "needs what the library `datasets` writes; test_conversion has one",
    "python -m rl_plugins.recipes.grpo model.path=s3://": "needs a bucket; test_storage has a server of S3",
    "cp -r outputs/grpo/checkpoint_00000040": "test_local_launcher continues a copied checkpoint",
    "python -m rl_plugins.recipes.grpo ... run.name=branch": "the same",
    "python -m rl_plugins.recipes.grpo ... run.name=again": "after a step by hand; test_rollout_dump replays a run",
    "python -m rl_plugins.recipes.grpo algorithm=rloo": "test_own_algorithm has it installed",
    "rl-plugins grpo model.path=MODEL": "the same as the module; test_init runs a recipe as a command",
    "rl-plugins evaluate outputs/first/policy": "two runs; docs/commands.md compares two policies",
    "rl-plugins doctor --imports": "installs nothing and says nothing of the pages; test_doctor runs it",
}
SMALL = [
    "launcher=local", "rollout.engine=transformers", "run.steps=2", "run.eval_every=1", "batch.prompts_per_step=4",
    "batch.samples_per_prompt=2", "sampling.max_tokens=16",
]  # fmt: skip
FEW_ROWS = ["--num-dev", "8", "--num-test", "8"]
"""Options of `rl-plugins prepare` for tasks with rows of their own: the runs validate three times."""
STAGES = [
    *(f"++common.{option}" for option in ("launcher=local", "rollout.engine=transformers", "run.steps=2")),
    "++common.batch.prompts_per_step=4", "++common.sampling.max_tokens=16",
    "++stages.ppo.options.critic.warmup_steps=1",
]  # fmt: skip


# First commands of the pages: typed once, for all pages.
TYPED_BEFORE = ("rl-plugins prepare gsm8k --input raw/gsm8k --output data/gsm8k",)
PROGRAMS = {
    "python": [sys.executable],
    "rl-plugins": [sys.executable, str(Path(sys.executable).with_name("rl-plugins"))],
}
OF_A_SHELL = {"|", "||", "&&", ";", "&", ">", ">>", "<"}


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files and models with the names from the pages."""
    folder = tmp_path_factory.mktemp("reader")
    save_tiny_policy(folder / "MODEL", max_position_embeddings=4096)
    shutil.copytree(folder / "MODEL", folder / "Qwen" / "Qwen2.5-0.5B-Instruct")
    sums = addition_rows(below=50, num_train=32, num_test=8, seed=0)
    names = {"train": "train", "sft": "train", "test": "test"}
    pairs = {"pairs": preference_rows(sums["train"], seed=0)}
    write_splits({name: sums[split] for name, split in names.items()} | pairs, folder)
    for name in ("math", "code"):
        write_splits({name: [{**row, "data_source": name} for row in sums["train"]]}, folder)
    records = {split: [_asked(row) for row in rows] for split, rows in sums.items()}
    talks = [{**row, "messages": [*row["prompt"], _reply(row)]} for row in sums["train"]]
    write_splits(dict.fromkeys(("conversations", "held_out"), talks), folder)
    for split, asked in records.items():
        raw = [{"question": question, "answer": f"It is #### {answer}"} for question, answer in asked]
        _write_lines(folder / "raw" / "gsm8k" / f"{split}.jsonl", raw)
    _write_lines(folder / "math.jsonl", [{"question": q, "answer": a} for q, a in records["train"]])
    chosen = [{"prompt": q, "chosen": a, "rejected": "no"} for q, a in records["train"]]
    _write_lines(folder / "pairs.jsonl", chosen)
    for file, page in (("my_reward.py", "docs/rewards.md"), ("my_environment.py", "docs/environments.md")):
        functions = [block for block in blocks(WRITTEN[page], "python") if block.startswith("def ")]
        (folder / file).write_text("\n\n".join(functions))
    (folder / "my_data.py").write_text(blocks(WRITTEN["docs/custom_data.md"], "python")[0])
    for name in ("docs", "examples"):
        (folder / name).symlink_to(ROOT / name)
    for line in TYPED_BEFORE:
        _type(folder, line)
    lora = "model.lora.rank=2 run.name=run run.checkpoint_every=50"
    least = {"run.steps": 50, "run.eval_every": 50, "batch.prompts_per_step": 1, "sampling.max_tokens": 4}
    options = " ".join(f"{name}={value}" for name, value in least.items())
    train = "python -m rl_plugins.recipes.grpo model.path=MODEL 'data.train_files=[train.parquet]'"
    reward = "reward=file reward.functions.default.path=my_reward.py"
    _type(folder, f"{train} 'data.val_files=[test.parquet]' {reward} {lora} {options}", keep=tuple(least))
    _save_game(folder / "outputs")
    return folder


def _save_game(outputs: Path) -> None:
    """Save a run whose policy has conversations: another run with other options of the environment."""
    (outputs / "game").mkdir()
    (outputs / "game" / "policy").symlink_to(outputs / "run" / "policy")
    config = OmegaConf.load(outputs / "run" / "config.yaml")
    game = {"path": "my_environment.py", "name": "higher_lower"}
    options = {"environment": {"max_turns": 6}, "reward": {"functions": {"default": game}}}
    OmegaConf.save(OmegaConf.merge(config, options), outputs / "game" / "config.yaml")


def _asked(row: dict[str, object]) -> tuple[str, str]:
    prompt, reward_model = row["prompt"], row["reward_model"]
    assert isinstance(prompt, list) and isinstance(reward_model, dict)
    return prompt[-1]["content"], reward_model["ground_truth"]


def _reply(row: dict[str, Any]) -> dict[str, str]:
    return {"role": "assistant", "content": row["reward_model"]["ground_truth"]}


def _write_lines(file: Path, records: list[dict[str, str]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


def lines(page: str) -> Iterator[str]:
    for block in blocks(WRITTEN[page], "bash"):
        yield from (line for line in block.replace("\\\n", " ").splitlines() if shlex.split(line, comments=True))


def _type(folder: Path, line: str, keep: tuple[str, ...] = ()) -> None:
    """Run a line of a shell in the folder; a command of this project in a fork of the command server."""
    words = shlex.split(line.replace(" ... ", f" {ITS_OWN} ").replace("/shared", f"{folder}/shared"), comments=True)
    recipe = next((word.removeprefix(RECIPES) for word in words if word.startswith(RECIPES)), None)
    if recipe == "sft_rm_ppo":
        words += STAGES
    elif recipe is not None:
        # A recipe with a file of its own has the length of the responses of its rows.
        kept = {*keep, "sampling.max_tokens"} if "--config-name" in words else keep
        words += [option for option in SMALL if option.partition("=")[0] not in kept]
        if (folder / "outputs" / recipe).exists() and not any(word.startswith("run.name=") for word in words):
            # A page has the same recipe twice, and tells the reader to name the second run.
            words.append(f"run.name={recipe}{len(list(folder.glob('outputs/*')))}")
    elif words[:2] == ["rl-plugins", "prepare"] and words[2] in ("calculator", "game", "programs"):
        words += FEW_ROWS
    elif words[:2] in (["rl-plugins", "generate"], ["rl-plugins", "evaluate"]):
        # vLLM takes seconds to start. test_commands samples with vLLM by both commands.
        words += ["--max-tokens", "16", "--engine", "transformers"]
    variables = [word for word in words if re.match("[A-Z_]+=", word)]
    program, *arguments = words[len(variables) :]
    assert not OF_A_SHELL & set(arguments), f"{line}: needs a shell"
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    environment |= dict(variable.split("=", 1) for variable in variables)
    if program in PROGRAMS:
        run_command([*PROGRAMS[program], *arguments], cwd=folder, env=environment, check=True)
    else:
        subprocess.run([program, *arguments], cwd=folder, env=environment, check=True, timeout=patient(60))


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_page_run(page: str, readers: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(readers, tmp_path / "reader", symlinks=True)
    typed = [line for line in lines(page) if not any(" ".join(line.split()).startswith(start) for start in LEFT_OUT)]
    assert typed, f"{page} has nothing to type"
    for line in typed:
        if " ".join(line.split()) not in TYPED_BEFORE:
            _type(folder, line)
