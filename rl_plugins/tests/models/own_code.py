"""A model folder with Python code of its own, which leaves a file when it runs."""

from __future__ import annotations

import json
from pathlib import Path

from rl_plugins.models.tiny import save_tiny_policy

_CONFIGURATION = """
from pathlib import Path
from transformers import Qwen2Config
Path({ran!r}).touch()
class OwnConfig(Qwen2Config):
    model_type = "own"
"""
_MODEL = """
from transformers import Qwen2ForCausalLM
from .configuration_own import OwnConfig
class OwnForCausalLM(Qwen2ForCausalLM):
    config_class = OwnConfig
"""


def save_own_code(folder: Path) -> Path:
    """Write a tiny policy whose config.json names code of the folder.

    Returns:
        File that the code makes when it runs.
    """
    ran = folder.with_name(f"{folder.name}.ran")
    save_tiny_policy(folder)
    (folder / "configuration_own.py").write_text(_CONFIGURATION.format(ran=str(ran)))
    (folder / "modeling_own.py").write_text(_MODEL)
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "own"
    config["auto_map"] = {
        "AutoConfig": "configuration_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return ran
