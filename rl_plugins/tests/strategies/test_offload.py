"""Places of engine states, in DeepSpeed's settings, and the refused options."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from rl_plugins.errors import ConfigError
from rl_plugins.strategies.offload import Offload, check_file_op

PLACES = Offload({"policy": "cpu", "critic": "nvme", "reference": "cpu", "teacher": "nvme", "prm": "stay"}, Path("/x"))


def test_offload_gives_each_engine_the_place_of_the_option() -> None:
    assert PLACES.of_trained("policy") == {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
    assert PLACES.of_trained("critic") == {"offload_optimizer": {"device": "nvme", "nvme_path": "/x/critic"}}
    assert PLACES.of_frozen("reference") == {"offload_param": {"device": "cpu", "pin_memory": True}}
    assert PLACES.of_frozen("teacher") == {"offload_param": {"device": "nvme", "nvme_path": "/x/teacher"}}
    assert PLACES.of_trained("prm") == PLACES.of_frozen("reward_model") == {}


def test_offload_moves_trained_models_by_default_and_frozen_models_on_demand() -> None:
    places = Offload({"policy": "cpu", "critic": "nvme", "prm": "stay", "reference": "while_sampling"})
    names = ("policy", "critic", "prm", "reference", "another")
    assert [name for name in names if places.moves(name, trained=True)] == ["reference", "another"]
    assert [name for name in names if places.moves(name, trained=False)] == ["reference"]


@pytest.mark.parametrize(
    ("places", "folder", "stage", "message"),
    [
        ({"policy": "disk"}, None, 3, "offload={'policy': 'disk'}: use stay"),
        ({"policy": "nvme"}, Path("/x"), 2, "needs stage=3, not stage=2"),
        ({"policy": "nvme"}, None, 3, "needs a folder"),
    ],
)
def test_offload_check_refuses_unknown_places_stage_2_and_no_folder(
    places: dict[str, str], folder: Path | None, stage: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Offload(places, folder).check(stage)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("compiler", r"no C\+\+ compiler c\+\+: install g\+\+, name a compiler in CXX, or offload to cpu"),
        ("toolkit", "needs the headers of the CUDA toolkit .*CUDA_HOME is not set: .*or offload to cpu"),
        ("libaio", "needs libaio.*install libaio-dev.*or offload to cpu"),
        ("", ""),
    ],
)
def test_check_file_op_names_the_missing_part(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, missing: str, message: str
) -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    compiler = tmp_path / "c++"
    compiler.touch(mode=0o755)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "" if missing == "compiler" else str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None if missing == "toolkit" else "/usr/local/cuda")
    monkeypatch.setattr(AsyncIOBuilder, "is_compatible", lambda builder: missing != "libaio")
    if not missing:
        check_file_op()
        return
    with pytest.raises(ConfigError, match=message):
        check_file_op()
