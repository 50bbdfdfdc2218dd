"""The picture of the main curves."""

from __future__ import annotations

from rl_plugins.report.pictures import draw_curves


def test_draw_curves_draws_known_metrics_only(tmp_path):
    path = tmp_path / "curves.png"
    assert not draw_curves({"train/unknown": {1: 0.0}}, path) and not path.exists()
    rewards = {"val/reward": {0: 0.0, 5: 1.0}, "train/reward": {1: 0.5}}
    assert draw_curves({**rewards, "train/loss": {step: 1.0 / step for step in range(1, 90)}}, path)
    assert path.read_bytes().startswith(b"\x89PNG")
