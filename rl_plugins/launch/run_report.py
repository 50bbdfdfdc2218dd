"""The driver's part of a run's report: what the run changes of its recipe, how it ended, and the page itself.

A worker writes the page when training ends. The driver writes it anew after that, because workers can be killed, and
because what was exported and the error that ended the run exist only then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from traceback import format_exception_only

from rl_plugins.launch.config import RecipeConfig
from rl_plugins.launch.config_difference import difference
from rl_plugins.run_folder import RunFolder


def write_changes(folder: RunFolder, recipe: str, before: object, config: RecipeConfig) -> None:
    """Write what differs from the recipe.

    Args:
        folder: of the run.
        recipe: its name.
        before: the recipe without overrides, as it was composed.
        config: what the run does.
    """
    from omegaconf import OmegaConf

    changes = difference(before, OmegaConf.structured(config))
    folder.changes.write_text(f"# recipe: {recipe}\n{changes}\n", encoding="utf-8")


@contextmanager
def reported(folder: RunFolder) -> Iterator[None]:
    """Around a run: its report is written however it ends, if it came as far as metrics."""
    from rl_plugins.report.page import write_report

    folder.error.unlink(missing_ok=True)
    try:
        yield
    except BaseException as error:
        folder.error.write_text("".join(format_exception_only(error)), encoding="utf-8")
        raise
    finally:
        if folder.metrics.is_file():
            print(f"{folder.path.name}: report in {write_report(folder)}", flush=True)
