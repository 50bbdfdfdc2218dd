"""The page docs/metrics.md has the names of all metrics.

Tests of stages and integration tests check the logged metrics. This module checks the names in the code, also of
metrics of few runs.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from rl_plugins.tests.metrics_page import documented, names, undocumented
from rl_plugins.tests.repository.documentation import sources, syntax_tree, text_of

_PHASES = {"measure": "time/", "note": "memory/"}
"""Methods of `PhaseLog` to the beginnings of the logged names."""


def names_in(tree: ast.Module) -> Iterator[str]:
    """Yield texts of a module with the beginning of a metric, with … for inserted values, and the names of phases."""
    families = {name.partition("/")[0] for name in names() if not name.startswith("<")}
    # A text with a separator at the end is the beginning of a name.
    like_name = re.compile(rf"(?:{'|'.join(families)})/[\w…/]*[\w…](?<!_)")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _PHASES:
            phase = text_of(node.args[0])
            if phase is not None:
                yield _PHASES[node.func.attr] + phase
        elif isinstance(node, ast.expr) and (text := text_of(node)) is not None and like_name.fullmatch(text):
            yield text


def is_on_page(name: str) -> bool:
    """Return True if the page has a name, or a name like a text with inserted values."""
    # `PolicyOptimization` adds `train/` to the metrics of the experience maker.
    made = re.compile(f"(?:train/)?{name.replace('…', '.+')}")
    return documented(name) or any(map(made.fullmatch, names()))


def test_names_of_metrics_in_the_sources_are_on_the_page():
    missing = {name: path.name for path in sources() for name in names_in(syntax_tree(path)) if not is_on_page(name)}
    assert missing == {}, "add a row to docs/metrics.md"


def test_names_in_finds_texts_of_metrics_and_phases():
    tree = ast.parse(
        "metrics = {'train/loss': 1.0, f'train/{name}/lr': 2.0, 'data/train': 3.0}\n"
        "for name in names:\n    start = name.startswith('train/router_') or name.startswith('val/')\n"
        "with log.measure('reload'):\n    log.note('engine_awake', 1)\n"
    )
    assert sorted(names_in(tree)) == ["memory/engine_awake", "time/reload", "train/loss", "train/…/lr"]


def test_documented_fills_in_the_parts_of_names():
    logged = [
        "train/lr",
        "train/cost_critic/explained_variance",
        "val/hf_//datasets/math/best_at_8_low",
        "train/rewards/rule.judge/latency_s",
        "val/memory/update_weights",
        "system/node_1/gpu_0_power_usage_watts",
    ]
    assert undocumented(logged) == []
    unknown = ["train/nothing", "train/policy/lr", "time/nothing", "val/memory/nothing", "loss", "train/lr/x"]
    assert undocumented(unknown) == unknown


def test_page_has_each_name_once():
    assert len(names()) == len(set(names())) > 150
