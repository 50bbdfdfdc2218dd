"""Records that files of recipes/conf name in their defaults."""

from __future__ import annotations

from functools import cache

from rl_plugins.config.pipeline import PipelineConfig
from rl_plugins.config.recipe import RecipeConfig


@cache
def register_schemas() -> None:
    """Let Hydra know the records of recipes and pipelines, the first entries of the defaults of their files."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    for name, record in (("recipe_schema", RecipeConfig), ("pipeline_schema", PipelineConfig)):
        store.store(name=name, node=record)
    # For --help, Hydra copies all sources, each with the whole store, 67 times. That takes seconds.
    # The store copies every node that it loads, so all sources can share one store.
    setattr(store, "__deepcopy__", lambda memo: store)  # noqa: B010
