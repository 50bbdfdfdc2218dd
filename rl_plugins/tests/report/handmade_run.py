"""A handmade folder of a run with all parts of a report, with hostile texts and NaN."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from rl_plugins.run_folder import RunFolder

HOSTILE = "</div><script>alert('a&b')</script>\x1b[31m\x00 naïve ✓"
STEPS, VALIDATIONS = 40, (0, 20, 40)


def sample(prompt: str, response: str, score: float | None, failure: str | None = None) -> dict[str, Any]:
    return {"prompt": prompt, "response": response, "score": score, "ground_truth": "42", "failure": failure}


def handmade_run(path: Path) -> RunFolder:
    """Write a folder of a run with metrics, samples, configuration and versions."""
    folder = RunFolder(path)
    folder.samples.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, float]] = [{"step": 0, "val/reward": 0.25}]
    for step in range(1, STEPS + 1):
        phases = {"time/step": 1.0, "time/rollout": 0.6, "time/update_policy": 0.3, "memory/rollout": 1.5}
        broken = {12: math.nan, 13: math.inf}
        rows.append({
            "step": step, "time": 1e9 + step, "train/reward": broken.get(step, step / STEPS), "train/loss": -0.1,
            "train/reward_timeout": float(step == 7) * 3, "train/reward_raised": 0.0, "train/entropy": 0.5,
            "train/rollout_gap_max": 2e-6 * step, "samples_per_s": 1234.0, "my/metric": 1.0, **phases,
        })  # fmt: skip
        if step in VALIDATIONS:
            rows.append({"step": step, "val/reward": 0.25 + step / 100})
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 41, "train/rew')
    first = [sample("17+25=", "41", 0.0), sample("1+1=", HOSTILE, 0.0), sample("1+1=", "second of two", 0.0)]
    last = [sample("1+1=", "2", 1.0), sample("17+25=", "", None, "timeout"), sample("new", "3", 1.0)]
    for step, table in zip(VALIDATIONS, (first, first, last), strict=True):
        (folder.samples / f"step_{step:08d}.json").write_text(json.dumps(table), encoding="utf-8")
    config = "stage: policy_optimization\nrun:\n  steps: 50\nmodel:\n  path: <tiny>\n"
    folder.config.write_text(config)
    folder.changes.write_text("# recipe: grpo\noptimizer.lr: 0.001  # recipe: 1.0e-06\n")
    folder.resumes.write_text("went on from checkpoint_00000020\n")
    folder.installed_packages.write_text("# python 3.11\nnumpy==2\ntorch==2.13.0\nvllm-cpu==0.32.0\n")
    folder.tracking_run.write_text("0123abcd")
    return folder
