"""Pages of the losses without a YAML file: losses of preferences, and of reward models."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from generator.docstrings import Docstring, parse
from generator.markdown import RECIPES, command, defaults_of, page, sentence, table, yaml_value
from rl_plugins.algorithms.preference_losses import PREFERENCE_LOSSES
from rl_plugins.algorithms.reward_model_losses import REWARD_MODEL_LOSSES
from rl_plugins.config.data import DataConfig

KINDS: tuple[tuple[str, Mapping[str, Callable[..., Any]], tuple[str, ...]], ...] = (
    ("preference", PREFERENCE_LOSSES, ("preference_optimization", "online_preference_optimization")),
    ("reward model", REWARD_MODEL_LOSSES, ("reward_modeling",)),
)
"""Kind of loss, losses of the kind, and the recipes with the option `loss.name`."""
COLUMNS = {
    "chosen": ("chosen_key", "rejected_key"),
    "margins": ("margin_key",),
    "desirable": ("label_key", "response_key", "chosen_key", "rejected_key"),
    "labels": ("steps_key", "labels_key"),
}
"""First word of a loss's argument, and the options below `data` that name the columns of the argument."""


@dataclass(frozen=True)
class Loss:
    """A loss with its name, kind, function and recipes."""

    name: str
    kind: str
    function: Callable[..., Any]
    recipes: tuple[str, ...]

    @property
    def docstring(self) -> Docstring:
        """Docstring of the function."""
        return parse(self.function)

    @property
    def what(self) -> str:
        """First sentence of the docstring without its formula."""
        return self.docstring.summary.split(": `")[0]

    @property
    def when(self) -> str:
        """Cases for which the loss is meant."""
        if not self.docstring.when:
            raise SystemExit(f"{self.function.__name__}: the docstring needs a line 'When: ...' after its description")
        return self.docstring.when


def losses() -> list[Loss]:
    """List the project's own losses, in the order of their tables."""
    return [
        Loss(name, kind, function, recipes)
        for kind, known, recipes in KINDS
        for name, function in known.items()
        if function.__module__.startswith("rl_plugins.")
    ]


def loss_page(loss: Loss) -> str:
    """Return the Markdown of one loss."""
    docstring, name = loss.docstring, loss.function.__name__
    parts = [f"# `{loss.name}`", docstring.description, f"**When to use it.** {sentence(loss.when)}"]
    parts += [f"Source: {docstring.source}"]
    for recipe in loss.recipes:
        parts += [_opening_comment(recipe), command(recipe, f"loss.name={loss.name}")]
    parts += [f"All arguments of the function: [{name}](functions.md#{name}).", "## Options"]
    meanings = docstring.arguments
    rows = [
        (f"`++loss.options.{option}`", f"`{yaml_value(default)}`", meanings.get(option, ""))
        for option, default in defaults_of(loss.function)
    ]
    parts += [table(("option", "default", "meaning"), rows) or "None."]
    parts += ["The signs `++` are needed, because the YAML file does not have the options."] if rows else []
    offline = f" of `{loss.recipes[0]}`" if len(loss.recipes) > 1 else ""
    parts += [f"## Columns of the data{offline}", table(("option", "default", "meaning"), _columns(loss.function))]
    parts += ["## Metrics and result", docstring.returns]
    return page(parts)


def _opening_comment(recipe: str) -> str:
    return (RECIPES / f"{recipe}.yaml").read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def _columns(function: Callable[..., Any]) -> Iterable[tuple[str, str, str]]:
    meanings, defaults = parse(DataConfig).arguments, {f.name: f.default for f in fields(DataConfig)}
    arguments = inspect.signature(function).parameters
    for begins, options in COLUMNS.items():
        if any(argument.startswith(begins) for argument in arguments):
            for option in options:
                yield f"`data.{option}`", f"`{yaml_value(defaults[option])}`", meanings[option]
