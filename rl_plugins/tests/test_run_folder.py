"""RunFolder: paths in the folder of a run."""

from __future__ import annotations

import pickle
from pathlib import Path

from rl_plugins.run_folder import RunFolder


def test_run_folder_takes_a_path_or_a_text() -> None:
    folder = RunFolder("outputs/grpo")
    assert folder == RunFolder(Path("outputs") / "grpo") == pickle.loads(pickle.dumps(folder))
    assert folder.checkpoint(3) == Path("outputs/grpo/checkpoint_00000003")
