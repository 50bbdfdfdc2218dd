"""The driver's parts of a run's report: changed options, the error of the run, the final page.

A worker writes the page when training ends. The driver writes the page again afterwards, because workers can be
killed, and because the exported model and the error exist only then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from traceback import format_exception_only

from rl_plugins.config.recipe import RecipeConfig
from rl_plugins.launch.config_difference import difference
from rl_plugins.run_folder import RunFolder


def write_changes(folder: RunFolder, recipe: str, before: object, config: RecipeConfig) -> None:
    """Write the changed options of the recipe.

    Args:
        folder: Folder of the run.
        recipe: Name of the recipe.
        before: Composed configuration of the recipe without overrides.
        config: Configuration of the run.
    """
    from omegaconf import OmegaConf

    changes = difference(before, OmegaConf.structured(config))
    folder.changes.write_text(f"# recipe: {recipe}\n{changes}\n", encoding="utf-8")


@contextmanager
def reported(folder: RunFolder) -> Iterator[None]:
    """Write the report when the block ends, also after an error. A run without metrics gets no report.

    Args:
        folder: Folder of the run.
    """
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
