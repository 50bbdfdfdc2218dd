"""Writes the figures of docs/architecture.md: the packages of the package, and the calls of one step.

    python docs/figures.py           # write them
    python docs/figures.py --check   # exit with 1 where they differ from what would be written

The packages and their imports are read from the source. The calls are recorded in a step of GRPO of a tiny policy.
The printed numbers of the start are recorded from the command to `Trainer.fit`, with the launcher `local`.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FrameType
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
_PACKAGE = ("rl_plugins", "strategies", "callbacks", "recipes")
LAYERS = (
    ("recipes", "commands"),
    ("launch",),
    ("stages", "callbacks"),
    ("environments", "strategies", "rewards", "models", "evaluation"),
    ("rollout", "weights", "sandbox", "data", "config", "hub", "algorithms", "planning", "report", "tracking"),
)
"""Packages from the highest layer to the lowest."""
CALLS: dict[str, str | tuple[str, ...]] = {
    "PolicyOptimization.training_step": "prompts -> trained weights",
    "Rollouts.collect": "1. collect: prompts -> scored samples",
    "ScheduledSampler.take_groups": "prompts -> samples",
    "RolloutPhases.run_sampling": "sample(engine) -> its result",
    # A context manager: the first line is its start, the second line its end.
    "RolloutPhases.phase": ("start: device -> rollout engine", "end: device -> training"),
    "TrainingMemory.offload_optimizer": "optimizer states -> host",
    "TransformersRollout.wake_up": ("engine allocates weights", "engine allocates KV cache"),
    "TransformersRollout.update_weights": "policy's weights -> rollout engine",
    "TrainingMemory.offload_parameters": "parameters -> host",
    "SynchronousGroups.submit": "token ids -> responses with log-probs",
    "TransformersRollout.sleep": "engine frees both",
    "TrainingMemory.reload_parameters": "parameters -> device",
    "TrainingMemory.reload_optimizer": "optimizer states -> device",
    "SampleScorer.score": "responses -> scores",
    "ExperienceMaker.make": "2. make experience: scored samples -> experience",
    "ForwardPasses.per_token": "samples -> ref_log_probs_BT",
    "Algorithm.advantages": "scores_B -> advantages_BT",
    "PolicyLearner.update": "3. update: experience -> weights, metrics",
    "Stage.optimize": "losses of micro-batches -> one optimizer step",
    "ForwardPasses.log_probs": "micro-batch -> log_probs_BT",
    "Algorithm.loss": "log_probs_BT, ref_log_probs_BT, advantages_BT -> loss",
    "AutogradSteps.backward": "loss -> gradients",
    "AutogradSteps.optimizer_step": "clipped gradients -> weights",
    "RolloutPhases.weights_changed": "the next phase sends the weights",
    "Stage.end_step": "metrics -> loggers, callbacks",
}
"""The functions of the figure, and the data that moves in them. A tuple has a text for each line of the function."""


# The packages ------------------------------------------------------------------------------------------------------


def imports_of_packages() -> dict[str, set[str]]:
    """Return the packages that each package imports."""
    packages = {package for layer in LAYERS for package in layer}
    imported: dict[str, set[str]] = defaultdict(set)
    for package in packages:
        folder = ROOT / "rl_plugins" / package
        for file in folder.resolve().rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                module = node.module if isinstance(node, ast.ImportFrom) else None
                parts = (module or "").split(".")
                if parts[0] == "rl_plugins" and len(parts) > 1 and parts[1] in packages - {package}:
                    imported[package].add(parts[1])
    return imported


def packages_figure() -> str:
    """Return the layers with their packages, and the packages that each of them imports."""
    imported = imports_of_packages()
    lines = []
    for number, layer in zip(range(len(LAYERS), 0, -1), LAYERS, strict=True):
        for package in layer:
            if (ROOT / "rl_plugins" / package).is_dir():
                order = [name for lower in LAYERS for name in lower if name in imported[package]]
                others = [name for lower in LAYERS[-number + 1 :] for name in lower if name not in order]
                shown = f"all below but {', '.join(others)}" if len(others) < len(order) // 2 else ", ".join(order)
                lines.append(f"{number}  {package:<12} -> {shown or 'modules below only'}")
        lines.append("")
    return "\n".join(lines).rstrip()


# The calls of a step --------------------------------------------------------------------------------------------


@dataclass
class Call:
    """A call, and the calls that it makes."""

    name: str
    children: list[Call] = field(default_factory=list)

    def add(self, name: str) -> Call:
        """Return the child for a call; calls of the same function that follow each other are one child."""
        if self.children and self.children[-1].name == name:
            return self.children[-1]
        self.children.append(Call(name))
        return self.children[-1]


@cache
def file_of(path: str) -> str | None:
    """Return the path of a file of the package from the folder of the repository; None for other files and tests."""
    if ROOT not in Path(path).parents:
        return None
    # `rl_plugins/strategies` and others are links.
    file = Path(path).resolve().relative_to(ROOT)
    is_of_package = file.parts[0] in _PACKAGE and file.parts[:2] != ("rl_plugins", "tests")
    return str(file) if is_of_package else None


class FitReached(Exception):
    """The launcher has called `Trainer.fit`."""


class Recorder:
    """Records calls of functions of the package, as a profile function.

    Attributes:
        functions: for each file of the package, the functions that ran.
    """

    def __init__(self) -> None:
        self.root = Call("")
        self.functions: dict[str, set[CodeType]] = defaultdict(set)
        self._open: list[tuple[FrameType, Call]] = []

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Take note of an event."""
        if event == "call":
            path = file_of(frame.f_code.co_filename)
            # Bodies of modules and classes run at the import.
            if path is None or not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
                return
            self.functions[path].add(frame.f_code)
            name = frame.f_code.co_qualname
            if name in CALLS and not (self._open and self._open[-1][0].f_code is frame.f_code):
                parent = self._open[-1][1] if self._open else self.root
                self._open.append((frame, parent.add(name)))
        elif event == "return" and self._open and self._open[-1][0] is frame:
            self._open.pop()


def record_step() -> Recorder:
    """Return the calls of the second step of GRPO with a tiny policy."""
    from lightning.pytorch import Trainer

    from rl_plugins.algorithms.algorithm import Algorithm
    from rl_plugins.algorithms.regularization import KLConfig
    from rl_plugins.config.sampling import SamplingConfig
    from rl_plugins.data.datamodule import PromptDataModule
    from rl_plugins.data.prepare.tasks import addition_rows
    from rl_plugins.models.tiny import save_tiny_policy
    from rl_plugins.rollout.transformers_engine import TransformersRollout
    from rl_plugins.stages.policy_optimization import PolicyOptimization
    from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy

    recorder = Recorder()

    class Recorded(PolicyOptimization):
        def training_step(self, prompts: Any, batch_idx: int) -> None:
            sys.setprofile(recorder if self.step == 1 else None)
            try:
                super().training_step(prompts, batch_idx)
            finally:
                sys.setprofile(None)

    with TemporaryDirectory() as folder:
        path = str(save_tiny_policy(Path(folder)))
        rows = addition_rows(below=10, num_train=8, num_test=1, seed=0)["train"]
        stage = Recorded(
            path,
            scorer=lambda solution_str: float(len(solution_str)),
            sampling=SamplingConfig(max_tokens=4, num_samples=2),
            algorithm=Algorithm(kl=KLConfig(0.01)),
            max_steps=2,
        )
        trainer = Trainer(
            strategy=SingleDeviceRolloutStrategy(rollout=TransformersRollout(path)),
            max_epochs=-1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(stage, datamodule=PromptDataModule(rows, tokenizer=path, prompts_per_step=4))
    return recorder


def record_start() -> Recorder:
    """Return the calls from the command of GRPO to `Trainer.fit`, with a tiny policy."""
    from lightning.pytorch import Trainer

    from rl_plugins.data.prepare.files import write_splits
    from rl_plugins.data.prepare.tasks import addition_rows
    from rl_plugins.launch.command_line import recipe_main
    from rl_plugins.launch.compose import override
    from rl_plugins.models.tiny import save_tiny_policy

    recorder = Recorder()

    def fit(*arguments: Any, **options: Any) -> None:
        raise FitReached

    with TemporaryDirectory() as folder:
        save_tiny_policy(Path(folder) / "model")
        write_splits(addition_rows(below=10, num_train=8, num_test=1, seed=0), Path(folder) / "data")
        command = [
            "grpo",
            override("model.path", f"{folder}/model"),
            override("data.train_files", [f"{folder}/data/train.parquet"]),
            override("run.output_dir", folder),
            "data.val_files=[]",
            "data.max_prompt_tokens=32",
            "sampling.max_tokens=8",
            "batch.prompts_per_step=4",
            "batch.samples_per_prompt=2",
            "launcher=local",
            "rollout.engine=transformers",
            "reward.num_workers=0",
            "tracking.enabled=false",
        ]
        with patch.object(Trainer, "fit", fit), patch.object(sys, "argv", command), suppress(FitReached):
            sys.setprofile(recorder)
            try:
                recipe_main("grpo")
            finally:
                sys.setprofile(None)
    return recorder


def lines_of(functions: set[CodeType]) -> int:
    """Return the number of source lines of functions of one file; nested functions count once."""
    lines: set[int] = set()
    for code in functions:
        numbers = [line for _, _, line in code.co_lines() if line]
        lines |= set(range(code.co_firstlineno, max(numbers) + 1))
    return len(lines)


def step_figure(recorder: Recorder) -> str:
    """Return the calls as an indented tree, with the data that moves."""
    earlier_lines: Counter[str] = Counter()

    def lines(call: Call, depth: int) -> Iterator[str]:
        texts = CALLS[call.name]
        data = texts if isinstance(texts, str) else texts[earlier_lines[call.name]]
        earlier_lines[call.name] += 1
        name = "  " * depth + call.name
        yield f"{name:<58}{data}"
        for child in call.children:
            yield from lines(child, depth + 1)

    return "\n".join(line for call in recorder.root.children for line in lines(call, 0))


# The page -------------------------------------------------------------------------------------------------------


def with_figure(text: str, name: str, figure: str) -> str:
    """Return a page with a figure between its two marks."""
    marked = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
    return marked.sub(lambda match: f"{match[1]}```text\n{figure}\n```\n{match[2]}", text)


def main(arguments: list[str] | None = None) -> int:
    """Write or check the figures; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a figure differs")
    options = parser.parse_args(arguments)
    recorder = record_step()
    before = PAGE.read_text(encoding="utf-8")
    after = with_figure(with_figure(before, "packages", packages_figure()), "step", step_figure(recorder))
    for name, record in (("one step of GRPO", recorder), ("from the command to Trainer.fit", record_start())):
        functions = record.functions
        number, lines = sum(map(len, functions.values())), sum(map(lines_of, functions.values()))
        print(f"{name}, in one process: {number} functions with {lines} lines in {len(functions)} files")
        for file in sorted(functions):
            print(f"  {file}")
    if options.check and after != before:
        print("docs/architecture.md differs: run python docs/figures.py")
        return 1
    if not options.check:
        PAGE.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
