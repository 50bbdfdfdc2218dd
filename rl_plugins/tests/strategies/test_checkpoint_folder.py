"""Folder of a checkpoint of ZeRO and FSDP2."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_plugins.errors import CheckpointError
from rl_plugins.strategies.blending import BlendedModels
from rl_plugins.strategies.checkpoint_folder import read_lightning


def test_read_lightning_names_the_states_in_the_folder_of_a_policy_checkpoint(tmp_path: Path) -> None:
    blended = BlendedModels(lambda name: [])
    with pytest.raises(CheckpointError, match=rf"^{tmp_path} is not a checkpoint of this package"):
        read_lightning(tmp_path, {}, blended)
    (tmp_path / "state").mkdir()
    with pytest.raises(CheckpointError, match=rf"^{tmp_path} is the folder of a checkpoint.*: name {tmp_path}/state$"):
        read_lightning(tmp_path, {}, blended)
