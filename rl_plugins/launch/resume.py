"""Start of a run: from the beginning, from the newest checkpoint, or not at all because the run is finished."""

from __future__ import annotations

import json

from omegaconf import OmegaConf

from rl_plugins.config.placement import CRITIC_POOLS
from rl_plugins.config.recipe import RecipeConfig
from rl_plugins.errors import ConfigError
from rl_plugins.run_folder import RunFolder
from rl_plugins.text_file import REPLACE, read_yaml
from rl_plugins.whole_file import write_whole_text


def check_resume(config: RecipeConfig, folder: RunFolder) -> None:
    """Check that the option `run.resume` fits the folder of the run.

    A folder without results does not matter: a start that failed has left the folder behind. A run without a
    checkpoint starts from the beginning, like workers after a failure before the first checkpoint.

    Raises:
        ConfigError: the folder has another content, has results although the run must be new, has an exported policy
            and no checkpoint, or does not exist although `run.resume=true`; or a model is quantised in another way
            than in the run.
    """
    resume = config.run.resume
    if folder.path.is_file() or (folder.has_content() and not (folder.has_results() or folder.config.is_file())):
        raise ConfigError(f"{folder.path} exists and is not the folder of a run: give another run.name")
    if not resume and folder.has_results():
        raise ConfigError(f"the run {folder.path} exists: continue it with run.resume=true, or give another run.name")
    if resume is True and not folder.path.is_dir():
        raise ConfigError(
            f"run.resume=true, but there is no folder {folder.path}: start it without run.resume, or with "
            "run.resume=auto"
        )
    if resume and folder.exported() is not None and folder.latest_checkpoint() is None:
        raise ConfigError(
            f"run.resume={str(resume).lower()}, but {folder.path} is complete and has no checkpoint left: give another "
            "run.name"
        )
    if resume and folder.latest_checkpoint() is not None and folder.config.is_file():
        _check_quantization(config, folder)


def _check_quantization(config: RecipeConfig, folder: RunFolder) -> None:
    # Workers compare the weights with the checkpoint, too. Then config.yaml, which exports read, is already another.
    before = read_yaml(folder.config, f"{REPLACE}, or give another run.name")
    for model in ("model", *CRITIC_POOLS):
        option, now = f"{model}.lora.quantization", getattr(config, model).lora.quantization
        if (saved := OmegaConf.select(before, option)) != now:
            saved, now = saved or "null", now or "null"
            raise ConfigError(
                f"{option}={now}: the adapter in the checkpoints of {folder.path} was trained over weights with "
                f"{option}={saved}: resume with {option}={saved}, or give another run.name"
            )


def note_end(config: RecipeConfig, folder: RunFolder, step: int) -> None:
    """Write that the run is finished.

    Args:
        config: options of the run.
        folder: folder of the run.
        step: last step.
    """
    write_whole_text(folder.finished, json.dumps({"step": step, **_goal(config)}))


def finished_step(config: RecipeConfig, folder: RunFolder) -> int | None:
    """Return the last step of a run that has nothing left to do; None for a run that must start or continue.

    A finished run continues if `run.steps` is larger or `run.target_reward` differs, or if its export is missing.
    """
    if not config.run.resume or not folder.finished.is_file() or (config.run.export and folder.exported() is None):
        return None
    try:
        end = json.loads(folder.finished.read_text(encoding="utf-8"))
        same_goal = all(end[name] == value for name, value in _goal(config).items())
        step = int(end["step"])
    except (ValueError, KeyError, TypeError):
        # A damaged note is no note: the checkpoints say where the run continues.
        return None
    return step if same_goal or step >= config.run.steps else None


def _goal(config: RecipeConfig) -> dict[str, float | None]:
    return {"steps": config.run.steps, "target_reward": config.run.target_reward}
