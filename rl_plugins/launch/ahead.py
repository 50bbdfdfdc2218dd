"""What can be said of a pipeline's stage before the stages ahead of it have run: all but what those are to make."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rl_plugins.errors import ConfigError
from rl_plugins.launch.config import RecipeConfig
from rl_plugins.launch.model_folder import check_model
from rl_plugins.launch.offload import check_offload
from rl_plugins.launch.resources import check_this_machine
from rl_plugins.launch.trials import columns_of
from rl_plugins.launch.values import generates
from rl_plugins.tracking.registry import is_in_mlflow


def check_ahead(config: RecipeConfig, folder: Path) -> None:
    """Look at the machine, the models and the files of a stage; no row is read, and no reward is called.

    Args:
        config: of the stage.
        folder: of the pipeline; what is to lie in it need not be there yet.

    Raises:
        ConfigError: names the option or file at fault and the way out.
    """

    def is_awaited(path: str) -> bool:
        return Path(path).absolute().is_relative_to(folder) and not Path(path).exists()

    check_offload(config)
    check_this_machine(config)
    check_model(config, lambda path: is_in_mlflow(path) or is_awaited(path))
    _check_data(config, is_awaited)
    _check_reward_files(config)


def _check_data(config: RecipeConfig, is_awaited: Callable[[str], bool]) -> None:
    """Open the files, which shows that they are there and have the columns."""
    from rl_plugins.data.parquet import ParquetRows

    data = config.data
    training = [path for part in data.mixture.values() for path in part.files] or data.train_files
    for paths, columns in zip((training, data.val_files), columns_of(config), strict=True):
        for path in paths:
            if not is_awaited(path):
                ParquetRows(Path(path), columns)


def _check_reward_files(config: RecipeConfig) -> None:
    for source, reward in config.reward.functions.items() if generates(config) else ():
        path = reward.get("path") if isinstance(reward, dict) and "_target_" not in reward else None
        if path and not Path(str(path)).is_file():
            raise ConfigError(f"reward.functions.{source}.path={path}: there is no such file")
