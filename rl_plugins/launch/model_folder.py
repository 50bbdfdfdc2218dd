"""Whether the named models exist, and take prompts and responses of the configured length. Reads JSON files only."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl_plugins.errors import ConfigError
from rl_plugins.launch.config import RecipeConfig

_HUB_TIMEOUT_S = 5.0


def check_model(config: RecipeConfig, is_left_out: Callable[[str], bool] = lambda path: False) -> None:
    """Check the policy and the other models that are named.

    Args:
        config: the run's.
        is_left_out: whether nothing can be said of a model yet, by its path.

    Raises:
        ConfigError: a folder is not a model's, a name is unknown to the hub, or the context window is too short.
    """
    from rl_plugins.models.loading import check_model_folder

    for group in ("model", "reference", "teacher", "critic", "reward_model"):
        path = getattr(config, group).path
        if not path or is_left_out(path):
            continue
        option = f"{group}.path"
        check_model_folder(option, path)
        limit = _context_window(_model_config(option, path))
        prompt, response = config.data.max_prompt_tokens, config.sampling.max_tokens
        if limit is not None and prompt + response > limit:
            raise ConfigError(
                f"data.max_prompt_tokens={prompt} and sampling.max_tokens={response} make {prompt + response} tokens, "
                f"and {option}={path} takes {limit}: lower one of them"
            )


def _model_config(option: str, path: str) -> dict[str, Any]:
    file = Path(path) / "config.json"
    if not Path(path).is_dir():
        import httpx2
        from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache

        try:
            # Asked once: a download would ask again and again for half a minute.
            if not isinstance(try_to_load_from_cache(path, "config.json"), str):
                get_hf_file_metadata(hf_hub_url(path, "config.json"), timeout=_HUB_TIMEOUT_S)
            file = Path(hf_hub_download(path, "config.json"))
        # A wrong name is a ValueError; what the hub or the network refuses is one of the others.
        except (OSError, ValueError, httpx2.HTTPError) as error:
            reason = str(error).strip().splitlines()[0].partition(". ")[0].rstrip(".:")
            raise ConfigError(
                f"{option}={path}: there is no such folder, and the Hugging Face hub does not give it "
                f"({reason}): correct the name, or download the model and name its folder"
            ) from None
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content


def _context_window(model: dict[str, Any]) -> int | None:
    """Most tokens that the model takes; None if its configuration does not say."""
    text = model.get("text_config") or model
    positions = text.get("max_position_embeddings")
    if not isinstance(positions, int):
        return None
    # Some models name the length before rotary scaling, some the one after it: the larger refuses nothing wrongly.
    scaling = text.get("rope_parameters") or text.get("rope_scaling") or {}
    return int(positions * max(1.0, scaling.get("factor") or 1.0))
