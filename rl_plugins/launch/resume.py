"""Start of a run: from the beginning, from the newest checkpoint, or not at all because the run is finished."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from omegaconf import Container, OmegaConf

from rl_plugins.config.placement import CRITIC_POOLS
from rl_plugins.config.recipe import RecipeConfig
from rl_plugins.errors import ConfigError
from rl_plugins.hub.names import model_name
from rl_plugins.run_folder import RunFolder
from rl_plugins.text_file import REPLACE, read_yaml
from rl_plugins.whole_file import write_whole_text

_WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
_PLACES, _PLACE_BYTES = 256, 4096


def check_resume(config: RecipeConfig, folder: RunFolder) -> None:
    """Check that the option `run.resume` fits the folder of the run.

    A folder without results does not matter: a start that failed has left the folder behind. A run without a
    checkpoint starts from the beginning, like workers after a failure before the first checkpoint.

    Raises:
        ConfigError: the folder has another content, has results although the run must be new, has an exported policy
            and no checkpoint, or does not exist although `run.resume=true`; or the run has another stage, starts from
            another model, or scales an adapter or quantises a model in another way.
    """
    resume = config.run.resume
    # A start that failed may have left the versions alone.
    known = folder.has_results() or folder.config.is_file() or folder.pinned_versions.is_file()
    if folder.path.is_file() or (folder.has_content() and not known):
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
        # Workers compare weights with the checkpoint, too. Then config.yaml, which exports read, is already another.
        before = read_yaml(folder.config, f"{REPLACE}, or give another run.name")
        if (stage := OmegaConf.select(before, "stage")) not in (None, config.stage):
            raise ConfigError(
                f"stage={config.stage}: the checkpoints of {folder.path} are of stage={stage}: resume with the recipe "
                "of the run, or give another run.name"
            )
        _check_models(config, folder, before)
        _check_adapters(config, folder, before)


def _check_models(config: RecipeConfig, folder: RunFolder, before: Container) -> None:
    # A variable in the place of a path may be set no more: such a path is None, and its text is in `plain`.
    plain: Any = OmegaConf.to_container(before, resolve=False)
    for model in ("model", *CRITIC_POOLS):
        # The model of an adapter is not in the checkpoints, and gives reference, tokenizer and export of every policy.
        option, now = f"{model}.path", getattr(config, model).path
        saved = OmegaConf.select(before, option, throw_on_resolution_failure=False)
        if saved and now and _differ(saved, now):
            raise ConfigError(
                f"{option}={now}: the checkpoints of {folder.path} are of {option}={saved}, with other weights: resume "
                f"with {option}={saved}, or give another run.name"
            )
        # The start of an adapter gives the reference.
        option, start = f"{model}.lora.path", getattr(config, model).lora.path
        saved = OmegaConf.select(before, option, throw_on_resolution_failure=False)
        text = ((plain.get(model) or {}).get("lora") or {}).get("path")
        if bool(text) != bool(start) or (saved and start and _differ(saved, start)):
            saved, start = saved or text or "null", start or "null"
            raise ConfigError(
                f"{option}={start}: the checkpoints of {folder.path} are of {option}={saved}, another start of the "
                f"adapter: resume with {option}={saved}, or give another run.name"
            )


def _differ(one: str, other: str) -> bool:
    """Return True if two paths or names are surely of different models. A folder may be moved or copied."""
    if one == other:
        return False
    folders = Path(one), Path(other)
    if all(folder.is_dir() for folder in folders):
        return _sample(folders[0]) != _sample(folders[1])
    return model_name(one) is not None and model_name(other) is not None


def _sample(folder: Path) -> bytes:
    """Return a digest of the sizes of a model's weight files, and of bytes at many places in the files."""
    digest = hashlib.blake2b()
    for file in sorted(path for pattern in _WEIGHT_FILES for path in folder.glob(pattern)):
        size = file.stat().st_size
        digest.update(size.to_bytes(8))
        with file.open("rb") as content:
            for place in range(0, size, max(1, size // _PLACES)):
                content.seek(place)
                digest.update(content.read(_PLACE_BYTES))
    return digest.digest()


def _check_adapters(config: RecipeConfig, folder: RunFolder, before: Container) -> None:
    for model in ("model", *CRITIC_POOLS):
        # The checkpoints have the factors of the adapter without their scale.
        option, alpha = f"{model}.lora.alpha", getattr(config, model).lora.alpha
        saved_alpha = OmegaConf.select(before, option)
        if OmegaConf.select(before, f"{model}.lora.rank") and saved_alpha not in (None, alpha):
            raise ConfigError(
                f"{option}={alpha:g}: the adapter in the checkpoints of {folder.path} was trained with "
                f"{option}={saved_alpha:g}: resume with {option}={saved_alpha:g}, or give another run.name"
            )
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
    if not config.run.resume or (config.run.export and folder.exported() is None):
        return None
    end = _read_end(folder)
    if end is None:
        return None
    step, goal = end
    return step if goal == _goal(config) or step >= config.run.steps else None


def noted_step(folder: RunFolder) -> int | None:
    """Return the last step of a finished run; None for another run."""
    end = _read_end(folder)
    return None if end is None else end[0]


def _read_end(folder: RunFolder) -> tuple[int, dict[str, float | None]] | None:
    """Return the last step and the goal of a finished run; None without a note. A damaged note is no note."""
    if not folder.finished.is_file():
        return None
    try:
        end = json.loads(folder.finished.read_text(encoding="utf-8"))
        return int(end["step"]), {name: end[name] for name in ("steps", "target_reward")}
    except (ValueError, KeyError, TypeError):
        # The checkpoints say where the run continues.
        return None


def _goal(config: RecipeConfig) -> dict[str, float | None]:
    return {"steps": config.run.steps, "target_reward": config.run.target_reward}
