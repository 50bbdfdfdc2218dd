"""Page of the functions: the inputs, every table of names, and every public function and class by module."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import ModuleType
from typing import Any

import rl_plugins.algorithms
from generator.docstrings import Docstring, parse
from generator.markdown import AXES, COUNTS, FOLDER, axes_of, page, sentence, table
from rl_plugins.algorithms.aggregation import AGGREGATIONS, aggregate
from rl_plugins.algorithms.inputs import INPUTS


def functions_page() -> str:
    """Return the Markdown of the page."""
    tables, sections = [], []
    for module in modules():
        own = {name: getattr(module, name) for name in _own_names(module)}
        tables += [
            table_of_names(name, module, known)
            for name, known in own.items()
            if isinstance(known, Mapping) and known is not INPUTS
        ]
        documented = [known for known in own.values() if inspect.isfunction(known) or inspect.isclass(known)]
        if documented:
            sections.append(_module_section(module, documented))
    example = (FOLDER / "example.py").read_text(encoding="utf-8").strip()
    return page([
        "# Functions",
        parse(rl_plugins.algorithms).description,
        f"```python\n{example}\n```",
        "The capitals at the end of a tensor's name are its axes:",
        table(("letter", "axis"), AXES.items()),
        "## Inputs",
        "A function receives the inputs that its arguments name. Log-probabilities are in nats; log-probabilities of "
        "responses (`_N`) are sums over the tokens.",
        table(("name", "axes", "meaning"), [(f"`{name}`", axes_of(name), text) for name, text in INPUTS.items()]),
        "## Tables of names",
        *tables,
        f"**`AGGREGATIONS`** of `rl_plugins.algorithms.aggregation`, {COUNTS}:",
        table(("name", "value"), [(f"`{mode}`", aggregation(mode)) for mode in AGGREGATIONS]),
        *sections,
    ])  # fmt: skip


def modules() -> list[ModuleType]:
    """Import the modules of the algorithms, in the order of their names."""
    package = rl_plugins.algorithms
    names = [info.name for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    return [importlib.import_module(name) for name in sorted(names)]


def aggregation(mode: str) -> str:
    """Return the formula of a mode from the table in `aggregate`'s docstring."""
    found = re.search(rf"^\| {mode} \| (.+) \|$", parse(aggregate).description, re.MULTILINE)
    assert found, f"aggregate's docstring has no row for {mode}"
    return f"`{found[1]}`"


def table_of_names(name: str, module: ModuleType, known: Mapping[str, Any]) -> str:
    """Return a table of functions or settings by name."""
    rows = []
    for key, value in known.items():
        if callable(value) and not value.__module__.startswith("rl_plugins."):
            continue  # from another package, which may not be installed
        if callable(value):
            is_global = "<locals>" not in value.__qualname__
            shown = f"[`{value.__name__}`](#{value.__name__.lower()})" if is_global else ""
            rows.append((f"`{key}`", shown, parse(value).summary))
        else:
            rows.append((f"`{key}`", f"`{_changed(value)}`", ""))
    if not any(row[2] for row in rows):
        return f"**`{name}`** of `{module.__name__}`:\n\n" + table(("name", "value"), [row[:2] for row in rows])
    return f"**`{name}`** of `{module.__name__}`:\n\n" + table(("name", "function", "summary"), rows)


def _own_names(module: ModuleType) -> Iterator[str]:
    """Yield the public names that a module defines, in their order in the source."""
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
            names = [target.id for target in targets if isinstance(target, ast.Name)]
        else:
            names = []
        yield from (name for name in names if not name.startswith("_"))


def _changed(value: object) -> str:
    """Format a dataclass by the fields that differ from their defaults."""
    if not is_dataclass(value):
        return repr(value)
    changed = [f"{f.name}={getattr(value, f.name)!r}" for f in fields(value) if getattr(value, f.name) != f.default]
    return f"{type(value).__name__}({', '.join(changed)})"


def _module_section(module: ModuleType, documented: list[Any]) -> str:
    docstring = parse(module)
    parts = [f"## {module.__name__}", docstring.description, *_outcome(docstring)]
    for known in documented:
        parts += [f"### {known.__name__}", *(_class(known) if inspect.isclass(known) else _function(known))]
    return "\n\n".join(parts)


def _function(function: Callable[..., Any]) -> list[str]:
    docstring = parse(function)
    signature = textwrap.fill(_signature(function), 110, subsequent_indent="    ", break_long_words=False)
    parts = [f"```python\n{signature}\n```", docstring.description]
    parts += [f"**When to use it.** {sentence(docstring.when)}"] if docstring.when else []
    parts += [_arguments(function, docstring)]
    return [part for part in (*parts, *_outcome(docstring)) if part]


def _class(known: type) -> list[str]:
    docstring = parse(known)
    parts = [docstring.description]
    if is_dataclass(known):
        rows = [(f"`{f.name}`", f"`{f.type}`", _default(f), docstring.arguments.get(f.name, "")) for f in fields(known)]
        parts.append(table(("attribute", "type", "default", "meaning"), rows))
    elif docstring.arguments:
        parts.append(_arguments(known, docstring))
    methods = [m for name, m in vars(known).items() if not name.startswith("_") and inspect.isfunction(m)]
    parts += ["\n".join(f"- `{_signature(method)}`: {parse(method).summary}" for method in methods)]
    return [part for part in (*parts, *_outcome(docstring)) if part]


def _default(attribute: Any) -> str:
    if attribute.default_factory is not MISSING:
        return f"`{attribute.default_factory.__name__}()`"
    return "" if attribute.default is MISSING else f"`{attribute.default!r}`"


def _outcome(docstring: Docstring) -> list[str]:
    """Return the sections Returns, Raises and Source that exist."""
    parts = []
    if docstring.returns:
        parts.append(f"**Returns** {docstring.returns}")
    if docstring.raises:
        parts.append("**Raises** " + " ".join(f"`{name}`: {text}" for name, text in docstring.raises.items()))
    if docstring.source:
        parts.append(f"**Source** {docstring.source}")
    return parts


def _type_of(name: str, annotation: object) -> str:
    kind = "" if annotation is inspect.Parameter.empty else str(annotation)
    return f"`{kind}` {axes_of(name)}".strip() if kind else axes_of(name)


def _value(value: object) -> str:
    if inspect.isfunction(value):
        return "..." if value.__name__ == "<lambda>" else value.__name__
    return repr(value)


def _signature(function: Callable[..., Any]) -> str:
    """Format names and defaults; the types are in the table of arguments."""
    parts: list[str] = []
    signature = inspect.signature(function)
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        if parameter.name != "self":
            default = "" if parameter.default is parameter.empty else f"={_value(parameter.default)}"
            parts.append(f"{parameter.name}{default}")
    returned = signature.return_annotation
    arrow = "" if returned is signature.empty else f" -> {returned}"
    return f"{function.__name__}({', '.join(parts)}){arrow}"


def _arguments(function: Callable[..., Any], docstring: Docstring) -> str:
    rows = [
        (
            f"`{parameter.name}`",
            _type_of(parameter.name, parameter.annotation),
            "" if parameter.default is parameter.empty else f"`{_value(parameter.default)}`",
            docstring.arguments.get(parameter.name) or INPUTS.get(parameter.name, ""),
        )
        for parameter in inspect.signature(function).parameters.values()
    ]
    headings = ("argument", "type", "default", "meaning")
    columns = len(headings) if any(meaning for *_, meaning in rows) else len(headings) - 1
    return table(headings[:columns], [row[:columns] for row in rows])
