"""Records that files of recipes/conf name in their defaults."""

from __future__ import annotations

from functools import cache

from rl_plugins.config.pipeline import PipelineConfig
from rl_plugins.config.recipe import RecipeConfig

# The recipes print their own messages.
_SILENT = ({"override /hydra/hydra_logging": "none"}, {"override /hydra/job_logging": "none"}, "_self_")
# Hydra makes no folder: all files are in the folder of the run or of the pipeline.
_NO_FOLDER = {"hydra": {"run": {"dir": "."}, "output_subdir": None}}


@cache
def register_schemas() -> None:
    """Let Hydra know the records of recipes and pipelines, the first entries of the defaults of their files."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    for name, record in (("recipe", RecipeConfig), ("pipeline", PipelineConfig)):
        store.store(name=f"{name}_record", node=record)
        schema = {"defaults": [f"{name}_record", *_SILENT], **_NO_FOLDER}
        store.store(name=f"{name}_schema", node=schema, package="_global_")
    # For --help, Hydra copies all sources, each with the whole store, 67 times. That takes seconds.
    # The store copies every node that it loads, so all sources can share one store.
    setattr(store, "__deepcopy__", lambda memo: store)  # noqa: B010
