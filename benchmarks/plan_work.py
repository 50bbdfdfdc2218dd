"""Shared parts of the benchmarks of plans: the number of workers, the tiny model, and the work of a recipe."""

from __future__ import annotations

from pathlib import Path

from rl_plugins.commands.plan import workload_of
from rl_plugins.config.recipe import parse_config
from rl_plugins.launch.compose import compose_config
from rl_plugins.planning.workload import Workload

WORKERS = 2


def prepare_tiny(folder: Path) -> None:
    """Write the model of the quickstart, and sums to solve."""
    from rl_plugins.data.prepare.files import write_splits
    from rl_plugins.data.prepare.tasks import addition_rows
    from rl_plugins.models.tiny import save_tiny_policy

    write_splits(addition_rows(below=50, num_train=512, num_test=16, seed=0), folder / "data")
    save_tiny_policy(folder / "policy")


def work_of(policy: Path, overrides: list[str]) -> Workload:
    """Return the work of a step of the GRPO recipe with these options."""
    return workload_of(parse_config(compose_config("grpo", [f"model.path={policy}", *overrides])))
