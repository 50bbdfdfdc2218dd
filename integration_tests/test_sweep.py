"""The example of a sweep with Ray Tune."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from rl_plugins.commands.main import main
from rl_plugins.run_folder import RunFolder
from rl_plugins.tests.patience import patient

pytestmark = pytest.mark.extended

SWEEP = Path(__file__).parents[1] / "examples" / "sweep" / "sweep.py"


def test_sweep_compares_learning_rates_and_ends_bad_trials_early(tmp_path: Path) -> None:
    project = tmp_path / "project"
    assert main(["init", str(project)]) == 0
    options = [
        "launcher=local", "rollout.engine=transformers", f"model.path={project}/model", "reward=file",
        f"data.train_files=[{project}/data/train.parquet]", f"data.val_files=[{project}/data/test.parquet]",
        f"reward.functions.default.path={project}/reward.py", "batch.prompts_per_step=8", "sampling.max_tokens=4",
        "data.max_prompt_tokens=32", "run.export=false", "tracking.enabled=false",
    ]  # fmt: skip
    outcome = subprocess.run(
        [sys.executable, str(SWEEP), *options], cwd=tmp_path, capture_output=True, text=True, timeout=patient(400)
    )
    assert outcome.returncode == 0, outcome.stdout[-4000:] + outcome.stderr[-4000:]
    steps = {
        rate: int(step) for rate, step in re.findall(r"lr=(\S+): val/reward \S+ after (\d+) steps", outcome.stdout)
    }
    assert steps.keys() == {"0.01", "0.001", "1e-05", "1e-06"}
    assert max(steps.values()) == 20 and min(steps.values()) < 20
    best = re.search(r"best: lr=(\S+)", outcome.stdout)
    assert best is not None and steps[best[1]] == 20
    runs = [RunFolder(path.parent) for path in (tmp_path / "outputs" / "sweep").glob("*/metrics.jsonl")]
    assert len(runs) == 4


def test_search_of_optuna_suggests_rates_after_the_results_of_trials() -> None:
    pytest.importorskip("optuna", reason="an optional part of the example")
    spec = spec_from_file_location("sweep", SWEEP)
    assert spec is not None and spec.loader is not None
    sweep = module_from_spec(spec)
    spec.loader.exec_module(sweep)
    rates, searcher, trials = sweep.search_of("optuna")
    assert searcher.set_search_properties(None, None, {"lr": rates, "options": ["run.seed=1"]})
    for trial in map(str, range(trials)):
        assert 1e-6 <= searcher.suggest(trial)["lr"] <= 1e-2
        searcher.on_trial_complete(trial, {sweep.METRIC: 0.5})
