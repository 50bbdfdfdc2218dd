"""The comparison with verl: loading of files, the status of cases, and our side of all cases."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from benchmarks.against_verl import DIFFERS, DOCUMENTED, EQUAL, KINDS, cases, inputs_of, run_case, table
from benchmarks.verl.case import EDGES, PLAIN, Case
from benchmarks.verl.functions import Verl

FILES = {
    "version/version": "1.2.3\n",
    "utils/groupwise.py": "from verl.utils.device import get_device_name\nas_torch_index = group_mean_std = len\n",
    "utils/torch_functional.py": "def masked_mean(values, mask): return 7\n",
    "trainer/ppo/core_algos.py": """
        import verl.utils.torch_functional as verl_F
        from verl.trainer.config import AlgoConfig
        from verl.utils import as_torch_index
        from verl.utils.import_utils import deprecated
        from verl.workers.config import ActorConfig
        @deprecated("another")
        def loss(config): return verl_F.masked_mean(0, 0), isinstance(config, ActorConfig), config.clip_ratio
    """,
    "trainer/ppo/rollout_corr_helper.py": "from verl.protocol import DataProto\nweights = DataProto.from_dict\n",
}


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Path]:
    """A checkout with the files that the comparison loads."""
    for name, text in FILES.items():
        file = tmp_path / "verl" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(line.removeprefix("        ") for line in text.splitlines()))
    with patch.dict(sys.modules):
        yield tmp_path


def test_verl_loads_files_of_a_checkout_with_empty_classes_for_annotations(checkout: Path) -> None:
    verl = Verl(checkout)
    assert verl.version == "1.2.3"
    assert verl.core.loss(verl.actor_config(clip_ratio=0.3)) == (7, True, 0.3)
    assert verl.core.as_torch_index is len and verl.core.AlgoConfig is not verl.core.ActorConfig
    assert verl.correction.weights(tensors={"a": 1}).batch == {"a": 1}


def case_of(theirs: Any, **documented: str) -> Case:
    return Case("kind", "name", "", lambda inputs: [inputs["advantages_BT"]], theirs, documented)


def refuse(inputs: Any) -> Any:
    raise NotImplementedError


def test_run_case_tells_equal_documented_and_other_differences() -> None:
    same = case_of(lambda inputs: [inputs["advantages_BT"] + 1e-9])
    other = case_of(lambda inputs: [2 * inputs["advantages_BT"]], **{PLAIN: "a reason"})
    refused = case_of(refuse, **dict.fromkeys(KINDS, "a reason"))
    outcomes = [run_case(case) for case in (same, other, refused)]
    assert [outcome.status for outcome in outcomes] == [EQUAL, DIFFERS, DOCUMENTED]
    text = table(outcomes)
    assert text.startswith("3 cases: 1 equal, 1 differs as documented, 1 DIFFERS.")
    assert text.count("verl: NotImplementedError") == 3 and "| equal | equal | equal | equal |" in text


def test_all_cases_of_the_comparison_give_finite_numbers_of_ours() -> None:
    verl: Any = SimpleNamespace(algorithm_config=dict)
    inputs, found = {kind: inputs_of(kind, 0) for kind in KINDS}, list(cases(verl))
    assert len(found) > 176 and {EDGES} <= {kind for case in found for kind in case.documented}
    for case in found:
        for kind in KINDS:
            assert all(bool(torch.isfinite(numbers).all()) for numbers in case.ours(inputs[kind])), (case, kind)
