"""Page of one algorithm: the descriptions of its functions, and the options that differ from the common values."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from hydra.utils import instantiate
from omegaconf import OmegaConf

from generator.docstrings import Docstring, parse, parse_text
from generator.functions import aggregation
from generator.markdown import (
    COUNTS,
    NOT_IN_YAML,
    RECIPES,
    ROOT,
    command,
    defaults_of,
    page,
    sentence,
    table,
    yaml_value,
)
from rl_plugins.algorithms.advantages import ADVANTAGES
from rl_plugins.algorithms.constraint import constrained_advantages
from rl_plugins.algorithms.inputs import required_inputs
from rl_plugins.algorithms.policy_losses import POLICY_LOSSES, SELECTIONS
from rl_plugins.config.recipe import RecipeConfig
from rl_plugins.launch.compose import compose_config

ALGORITHMS = RECIPES / "algorithm"
POLICY_GRADIENT = "policy gradient"
HELPERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "costs_B": ("policy gradient with critics and cost model", ("cost_model", "critic", "cost_critic")),
    "values_BT": ("policy gradient with critic", ("critic",)),
    "process_rewards_BT": ("policy gradient with process reward model", ("process_reward_model",)),
    "teacher_log_probs_BT": ("distillation", ("teacher",)),
    "teacher_top_log_probs_BTK": ("distillation", ("teacher",)),
}
"""For each input that other models compute: the kind of algorithm, and the option groups of the models."""


@dataclass(frozen=True)
class Algorithm:
    """Opening comment of an algorithm's YAML file, recipe of the algorithm, and its composed configuration."""

    name: str
    title: str
    link: str
    what: str
    when: str
    recipe: str
    chosen: tuple[str, ...]
    recipe_config: Mapping[str, Any]

    @property
    def config(self) -> Mapping[str, Any]:
        """Configuration of the algorithm within the recipe."""
        part: Mapping[str, Any] = self.recipe_config["algorithm"]
        return part

    @property
    def functions(self) -> list[tuple[str, str, Callable[..., Any]]]:
        """Option, name and function of the advantage, the policy loss, and the selection of the loss, if any."""
        tables: tuple[tuple[str, Mapping[str, Callable[..., Any]]], ...] = (
            ("advantage", ADVANTAGES),
            ("policy_loss", POLICY_LOSSES),
        )
        found = [(option, self.config[option], known[self.config[option]]) for option, known in tables]
        loss = self.config["policy_loss"]
        return [*found, ("selection", loss, SELECTIONS[loss])] if loss in SELECTIONS else found

    @property
    def kind(self) -> str:
        """Kind of the algorithm in a few words."""
        return self._helper[0]

    @property
    def helpers(self) -> tuple[str, ...]:
        """Option groups of the models needed beside the policy."""
        return self._helper[1]

    @property
    def _helper(self) -> tuple[str, tuple[str, ...]]:
        needed = ["costs_B"] if self.config["constraint"] else []
        needed += [name for option, _, function in self.functions for name in self._inputs(option, function)]
        return next((HELPERS[name] for name in needed if name in HELPERS), (POLICY_GRADIENT, ()))

    def _inputs(self, option: str, function: Callable[..., Any]) -> list[str]:
        return required_inputs(function, self.config[f"{option}_options"])

    @property
    def kl(self) -> str:
        """KL term in a few words."""
        kl = instantiate(self.config["kl"])
        return f"{kl.coefficient} `{kl.estimator_name}` in the {kl.placement}" if kl.coefficient else "none"


def read_algorithm(path: Path) -> Algorithm:
    """Read an algorithm from its YAML file."""
    comment = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        comment.append(line.removeprefix("#").strip())
    head = re.fullmatch(
        r"(?P<title>.+?)(?:, (?P<link>https?://\S+?))?: (?P<what>.+?)\.? When: (?P<when>.+)", " ".join(comment)
    )
    if not head:
        raise SystemExit(f"{path}: open the file with '# Title, link: what it does.' and '# When: when to use it.'")
    recipe, *chosen = _recipe(path)
    composed = compose_config(recipe, [*chosen, "model.path=none"])
    config: Any = OmegaConf.to_container(composed, resolve=False)
    return Algorithm(path.stem, **head.groupdict(default=""), recipe=recipe, chosen=tuple(chosen), recipe_config=config)


def _recipe(path: Path) -> list[str]:
    """Return the recipe for an algorithm and the override that selects it.

    The recipe is the algorithm's own, else the recipe of the algorithm that it extends, else GRPO's.
    """
    own = {}
    for script in (ROOT / "recipes").glob("*.py"):
        recipe = RECIPES / f"{script.stem}.yaml"
        found = recipe.exists() and re.search(r"^ +- (?:override )?algorithm: (\w+)", recipe.read_text(), re.MULTILINE)
        if found:
            own[found[1]] = script.stem
    name = path.stem
    while name not in own:
        base = re.search(r"^ +- (\w+)@_here_", path.with_name(f"{name}.yaml").read_text(), re.MULTILINE)
        name = base[1] if base else "grpo"
    return [own[name]] if name == path.stem else [own[name], f"algorithm={path.stem}"]


def algorithm_page(algorithm: Algorithm) -> str:
    """Return the Markdown of one algorithm."""
    paths = {"teacher": "teacher.path=TEACHER", "cost_model": "cost_model.path=COST_MODEL"}
    chosen = [*algorithm.chosen, *(path for helper, path in paths.items() if helper in algorithm.helpers)]
    parts = [f"# {algorithm.title}", sentence(algorithm.what), f"**When to use it.** {sentence(algorithm.when)}"]
    parts += [f"**Paper.** {algorithm.link}"] if algorithm.link else []
    parts += [command(algorithm.recipe, *chosen)]
    for option, name, function in algorithm.functions:
        docstring, module = parse(function), parse(sys.modules[function.__module__])
        parts += [f"## {option.replace('_', ' ').capitalize()}: `{name}`", docstring.description]
        parts += [f"Source: {docstring.source or module.source}"]
        parts += [f"All arguments of the function: [{function.__name__}](functions.md#{function.__name__})."]
    if algorithm.config["constraint"]:
        bound = parse(sys.modules[constrained_advantages.__module__])
        parts += ["## Bound on the mean cost", bound.description, f"Source: {bound.source}"]
    mode = algorithm.config["aggregation"]
    parts += ["## Aggregation and KL", f"`{mode}`: {aggregation(mode)}, {COUNTS}."]
    parts += [f"KL to the reference: {algorithm.kl}.", "## Options"]
    parts += ["Options with common values: [common options](common_options.md)."]
    parts += [table(("option", "value", "meaning"), _options(algorithm))]
    for helper in algorithm.helpers:
        parts += [f"## Options of the {helper.replace('_', ' ')}"]
        parts += [table(("option", "value", "meaning"), _helper_options(algorithm, helper))]
    return page([*parts, NOT_IN_YAML])


def _options(algorithm: Algorithm) -> Iterator[tuple[str, str, str]]:
    """Yield the options that differ from the common values, and all options of the functions."""
    functions = {f"{option}_options": function for option, _, function in algorithm.functions}
    yield from _flat(algorithm.config, "algorithm", functions, common_values())


def common_values() -> Mapping[str, Any]:
    """Load the values that the algorithms share."""
    values: Any = OmegaConf.to_container(OmegaConf.load(ALGORITHMS / "parts" / "base.yaml"))
    return dict(values)


def _flat(
    node: Mapping[str, Any], prefix: str, functions: Mapping[str, Callable[..., Any]], common: Mapping[str, Any]
) -> Iterator[tuple[str, str, str]]:
    function = functions.get(prefix.rpartition(".")[2])
    documented = parse(function or target(node["_target_"])) if function or "_target_" in node else Docstring()
    meanings = documented.arguments
    order = list(meanings)
    for key in sorted(node, key=lambda key: order.index(key) if key in order else len(order)):
        value, usual = node[key], common.get(key)
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}.{key}", functions, usual if isinstance(usual, Mapping) else {})
        elif key != "_target_" and (key not in common or value != usual):
            yield f"`{prefix}.{key}`", f"`{yaml_value(value)}`", meanings.get(key, "")
    if function:
        for name, default in defaults_of(function):
            if name not in node:
                yield f"`++{prefix}.{name}`", f"`{yaml_value(default)}`", meanings.get(name, "")


def target(path: str) -> Any:
    """Import the object that a `_target_` names."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _helper_options(algorithm: Algorithm, helper: str) -> Iterator[tuple[str, str, str]]:
    """Yield the options of a model beside the policy, with their values in the recipe."""
    node = algorithm.recipe_config[helper]
    if "_target_" not in node:
        yield from _schema_options(get_type_hints(RecipeConfig)[helper], helper, node)
        return
    meanings, defaults = _class_in_source(node["_target_"])
    for name, meaning in meanings.items():
        option, value = (helper, node[name]) if name in node else (f"++{helper}", defaults[name])
        yield f"`{option}.{name}`", f"`{yaml_value(value)}`", meaning


def _schema_options(schema: type, prefix: str, node: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for name, meaning in parse(schema).arguments.items():
        if isinstance(node[name], Mapping):
            yield from _schema_options(get_type_hints(schema)[name], f"{prefix}.{name}", node[name])
        else:
            yield f"`{prefix}.{name}`", f"`{yaml_value(node[name])}`", meaning


def _class_in_source(path: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Read meanings and defaults of a dataclass from its source; an import of a stage would load the engines."""
    module, _, name = path.rpartition(".")
    source = (ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
    found = next(node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == name)
    fields = [node for node in found.body if isinstance(node, ast.AnnAssign)]
    defaults = {ast.unparse(node.target): _default_in_source(node.value) for node in fields if node.value}
    return parse_text(ast.get_docstring(found) or "").arguments, defaults


def _default_in_source(value: ast.expr) -> Any:
    """Return a constant, or the source text of the value that `field(default_factory=lambda: ...)` would make."""
    if isinstance(value, ast.Constant):
        return value.value
    bodies = [node.body for node in ast.walk(value) if isinstance(node, ast.Lambda)]
    return ast.unparse(bodies[0] if bodies else value)
