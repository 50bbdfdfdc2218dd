"""Writes the pages of this folder from docstrings, signatures and recipes/conf/algorithm/*.yaml.

    python docs/algorithms/generate.py           # write them
    python docs/algorithms/generate.py --check   # exit with 1 where they differ from what would be written

Nothing about an algorithm or a function is typed here. A page says what the docstring of its function says, and the
first comment lines of an algorithm's YAML file are its title, its link, what it does, and when to use it.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import pkgutil
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import rl_plugins.algorithms
from rl_plugins.algorithms.advantages import ADVANTAGES
from rl_plugins.algorithms.aggregation import AGGREGATIONS, aggregate
from rl_plugins.algorithms.policy_losses import POLICY_LOSSES, SELECTIONS

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
ALGORITHMS = ROOT / "recipes" / "conf" / "algorithm"
COUNTS = "with D ranks, and N tokens and S sequences in the global mini-batch"
NOTE = "<!-- Written by docs/algorithms/generate.py from docstrings and recipes/conf/algorithm: change those. -->"
AXES = {
    "B": "samples (responses) of a batch",
    "T": "tokens of the longest response",
    "G": "groups (the samples of one prompt are a group)",
    "K": "rewards of one sample, where it has several",
    "N": "values or tokens in one row, whichever sample they belong to",
    "V": "vocabulary",
    "1": "one, kept for broadcasting",
}
"""What the last part of a tensor's name says; a letter that is used and is not here is an error."""


# Docstrings


@dataclass
class Docstring:
    """A Google docstring, cut into its sections."""

    summary: str = ""
    description: str = ""
    arguments: dict[str, str] = field(default_factory=dict)
    returns: str = ""
    raises: dict[str, str] = field(default_factory=dict)
    source: str = ""


def parse(documented: object) -> Docstring:
    """The sections of a docstring; of an object without one, empty ones."""
    parsed = Docstring()
    texts: dict[str, list[str]] = {"": []}
    section = ""
    for line in (inspect.getdoc(documented) or "").splitlines():
        heading = re.match(r"(Args|Attributes|Returns|Raises|Source):(.*)", line)
        if heading:
            section = heading[1]
            texts[section] = [heading[2].strip()] if heading[2] else []
        else:
            texts[section].append(line)
    parsed.description = _as_markdown("\n".join(texts[""]).strip())
    parsed.summary = " ".join(parsed.description.split("\n\n")[0].split())
    parsed.arguments = _named(texts.get("Args", []) + texts.get("Attributes", []))
    parsed.returns = _as_markdown(_one_line(texts.get("Returns", [])))
    parsed.raises = _named(texts.get("Raises", []))
    parsed.source = _one_line(texts.get("Source", []))
    return parsed


def _one_line(lines: Iterable[str]) -> str:
    return " ".join(" ".join(lines).split())


def _named(lines: Iterable[str]) -> dict[str, str]:
    """`name: text` with deeper continuation lines."""
    found: dict[str, str] = {}
    name = ""
    for line in lines:
        start = re.match(r" {4}(\w+): (.*)", line)
        if start:
            name = start[1]
            found[name] = start[2]
        elif line.strip():
            found[name] += " " + line.strip()
    return {name: _as_markdown(text) for name, text in found.items()}


def _as_markdown(text: str) -> str:
    """A docstring outside of code spans may use characters that Markdown takes for HTML."""
    spans = re.split(r"(`[^`]*`)", text)
    return "".join(span if span.startswith("`") else span.replace("<", "\\<") for span in spans)


def table(headings: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table; a bar within a cell is escaped, which is right inside of code spans too."""
    cells = [tuple(cell.replace("|", "\\|") for cell in row) for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in (headings, ("---",) * len(headings), *cells))


# Signatures


def _axes_of(name: str) -> str:
    axes = re.search(r"_([A-Z1]+)$", name)
    if not axes or name.isupper():
        return ""
    unexplained = set(axes[1]) - set(AXES)
    if unexplained:
        letters = ", ".join(sorted(unexplained))
        raise SystemExit(f"axis {letters} of {name} is not explained: add it to AXES in {__file__}")
    return f"[{', '.join(axes[1])}]"


def _type_of(name: str, annotation: Any) -> str:
    kind = "" if annotation is inspect.Parameter.empty else str(annotation)
    return f"`{kind}` {_axes_of(name)}".strip() if kind else _axes_of(name)


def _value(value: Any) -> str:
    return value.__name__ if inspect.isfunction(value) else repr(value)


def _signature(function: Callable[..., Any]) -> str:
    """Names and defaults; the types are in the table of arguments."""
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
            docstring.arguments.get(parameter.name, ""),
        )
        for parameter in inspect.signature(function).parameters.values()
    ]
    headings = ("argument", "type", "default", "meaning")
    columns = len(headings) if docstring.arguments else len(headings) - 1
    return table(headings[:columns], [row[:columns] for row in rows]) if rows else ""


def _outcome(docstring: Docstring) -> list[str]:
    """Returns, raises and source, as far as there are any."""
    parts = []
    if docstring.returns:
        parts.append(f"**Returns** {docstring.returns}")
    if docstring.raises:
        parts.append("**Raises** " + " ".join(f"`{name}`: {text}" for name, text in docstring.raises.items()))
    if docstring.source:
        parts.append(f"**Source** {docstring.source}")
    return parts


# Pages of the algorithms


@dataclass(frozen=True)
class Page:
    """One algorithm: the comment that opens its YAML file, and its composed configuration."""

    name: str
    title: str
    link: str
    what: str
    when: str
    config: Mapping[str, Any]

    @property
    def functions(self) -> list[tuple[str, str, Callable[..., Any]]]:
        """Option, name and function of the advantage, the policy loss, and the selection if the loss has one."""
        tables: tuple[tuple[str, Mapping[str, Callable[..., Any]]], ...] = (
            ("advantage", ADVANTAGES),
            ("policy_loss", POLICY_LOSSES),
        )
        found = [(option, self.config[option], known[self.config[option]]) for option, known in tables]
        loss = self.config["policy_loss"]
        return [*found, ("selection", loss, SELECTIONS[loss])] if loss in SELECTIONS else found

    @property
    def kl(self) -> str:
        """The KL term in a few words."""
        kl = self.config["kl"]
        return f"{kl['coefficient']} `{kl['estimator']}` in the {kl['placement']}" if kl["coefficient"] else "none"


def read_page(path: Path) -> Page:
    """An algorithm from its YAML file."""
    from omegaconf import OmegaConf

    from rl_plugins.launch.command_line import compose_config

    comment = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        comment.append(line.removeprefix("#").strip())
    head = re.fullmatch(
        r"(?P<title>.+?)(?:, (?P<link>https?://\S+?))?(?:: (?P<what>.+?))?\.? When: (?P<when>.+)", " ".join(comment)
    )
    if not head:
        raise SystemExit(f"{path}: open the file with '# Title, link: what it does.' and '# When: when to use it.'")
    composed = compose_config("grpo", [f"algorithm={path.stem}", "model.path=none"])
    config: Any = OmegaConf.to_container(composed.algorithm, resolve=False)
    return Page(path.stem, **head.groupdict(default=""), config=config)


def algorithm_page(page: Page) -> str:
    """The Markdown of one algorithm."""
    parts = [NOTE, f"# {page.title}"]
    parts += [_sentence(page.what)] if page.what else []
    parts += [f"**When to use it.** {_sentence(page.when)}"]
    parts += [f"**Paper.** {page.link}"] if page.link else []
    parts += [_command(page)]
    for option, name, function in page.functions:
        docstring, module = parse(function), parse(sys.modules[function.__module__])
        parts += [f"## {option.replace('_', ' ').capitalize()}: `{name}`", docstring.description]
        parts += [f"Source: {docstring.source or module.source}"]
        parts += [f"All of its arguments: [{function.__name__}](functions.md#{function.__name__})."]
    aggregation = page.config["aggregation"]
    parts += ["## Aggregation and KL", f"`{aggregation}`: {_aggregation(aggregation)}, {COUNTS}."]
    parts += [f"KL to the reference: {page.kl}."]
    parts += ["## Options", table(("option", "value", "meaning"), _options(page))]
    parts += ["An option with `++` is not in the algorithm's YAML file: on the command line it needs these two signs."]
    return "\n\n".join(parts) + "\n"


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:].removesuffix(".") + "."


def _command(page: Page) -> str:
    return (
        "```bash\n"
        f"python -m rl_plugins.recipes.grpo algorithm={page.name} model.path=MODEL \\\n"
        "    'data.train_files=[TRAIN.parquet]' 'data.val_files=[VAL.parquet]'\n"
        "```"
    )


def _aggregation(mode: str) -> str:
    """The row of the mode in the table of `aggregate`'s docstring."""
    found = re.search(rf"^\| {mode} \| (.+) \|$", parse(aggregate).description, re.MULTILINE)
    assert found, f"aggregate's docstring has no row for {mode}"
    return f"`{found[1]}`"


def _options(page: Page) -> Iterator[tuple[str, str, str]]:
    """Every option below `algorithm`, with those of the functions that the YAML file does not name."""
    functions = {f"{option}_options": function for option, _, function in page.functions}
    yield from _flat(page.config, "algorithm", functions)


def _flat(
    node: Mapping[str, Any], prefix: str, functions: Mapping[str, Callable[..., Any]]
) -> Iterator[tuple[str, str, str]]:
    documented: object = functions.get(prefix.rpartition(".")[2])
    if "_target_" in node:
        module, _, name = node["_target_"].rpartition(".")
        documented = getattr(importlib.import_module(module), name)
    meanings = parse(documented).arguments if documented else {}
    order = list(meanings)
    for key in sorted(node, key=lambda key: order.index(key) if key in order else len(order)):
        if isinstance(node[key], Mapping):
            yield from _flat(node[key], f"{prefix}.{key}", functions)
        elif key != "_target_":
            yield f"`{prefix}.{key}`", f"`{_yaml(node[key])}`", meanings.get(key, "")
    if inspect.isfunction(documented):
        for parameter in inspect.signature(documented).parameters.values():
            is_option = parameter.default is not parameter.empty and not callable(parameter.default)
            if is_option and parameter.name not in node and not _axes_of(parameter.name):
                shown = f"`{_yaml(parameter.default)}`"
                yield f"`++{prefix}.{parameter.name}`", shown, meanings.get(parameter.name, "")


def _yaml(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def overview(pages: list[Page]) -> str:
    """The table of all algorithms."""
    rows = [
        (
            f"[{page.title}]({page.name}.md)",
            f"`{page.name}`",
            *(f"[`{name}`](functions.md#{function.__name__})" for _, name, function in page.functions[:2]),
            f"`{page.config['aggregation']}`",
            page.kl,
            f"[paper]({page.link})" if page.link else "",
            _sentence(page.when),
        )
        for page in pages
    ]
    headings = (
        "algorithm",
        "`algorithm=`",
        "advantage",
        "policy loss",
        "aggregation",
        "KL",
        "source",
        "when to use",
    )
    parts = [
        NOTE,
        "# Algorithms",
        "An algorithm is a choice of advantage, policy loss, aggregation and KL term, in a file of "
        "`recipes/conf/algorithm`. Any part of it can be exchanged on the command line: "
        "`algorithm=rloo algorithm.policy_loss=cispo`.",
        table(headings, rows),
        "Every function, for use without the rest: [functions.md](functions.md).",
    ]
    return "\n\n".join(parts) + "\n"


# The page of the functions


def modules() -> list[ModuleType]:
    """The modules of the algorithms, in the order of their names."""
    package = rl_plugins.algorithms
    names = [info.name for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    return [importlib.import_module(name) for name in sorted(names)]


def _own_names(module: ModuleType) -> Iterator[str]:
    """Public names that a module defines itself, as they stand in it."""
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
            names = [target.id for target in targets if isinstance(target, ast.Name)]
        else:
            names = []
        yield from (name for name in names if not name.startswith("_"))


def functions_page() -> str:
    """Every table of names, then every public function and class by module."""
    tables, sections = [], []
    for module in modules():
        own = {name: getattr(module, name) for name in _own_names(module)}
        tables += [_table_of_names(name, module, known) for name, known in own.items() if isinstance(known, Mapping)]
        documented = [known for known in own.values() if inspect.isfunction(known) or inspect.isclass(known)]
        if documented:
            sections.append(_module_section(module, documented))
    example = (FOLDER / "example.py").read_text(encoding="utf-8").strip()
    parts = [
        NOTE,
        "# Functions",
        parse(rl_plugins.algorithms).description,
        f"```python\n{example}\n```",
        "The capitals that end a tensor's name are its axes:",
        table(("letter", "axis"), AXES.items()),
        "## Tables of names",
        *tables,
        f"**`AGGREGATIONS`** of `rl_plugins.algorithms.aggregation`, {COUNTS}:",
        table(("name", "value"), [(f"`{mode}`", _aggregation(mode)) for mode in AGGREGATIONS]),
        *sections,
    ]
    return "\n\n".join(parts) + "\n"


def _table_of_names(name: str, module: ModuleType, known: Mapping[str, Any]) -> str:
    rows = []
    for key, value in known.items():
        if callable(value) and not value.__module__.startswith("rl_plugins."):
            continue  # of another package, which not everybody has installed
        if callable(value):
            is_global = "<locals>" not in value.__qualname__
            shown = f"[`{value.__name__}`](#{value.__name__.lower()})" if is_global else ""
            rows.append((f"`{key}`", shown, parse(value).summary))
        else:
            rows.append((f"`{key}`", f"`{_settings(value)}`", ""))
    if not any(row[2] for row in rows):
        return f"**`{name}`** of `{module.__name__}`:\n\n" + table(("name", "value"), [row[:2] for row in rows])
    return f"**`{name}`** of `{module.__name__}`:\n\n" + table(("name", "function", "what it is"), rows)


def _settings(value: Any) -> str:
    """A dataclass by what differs from its defaults."""
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
    parts = [f"```python\n{signature}\n```", docstring.description, _arguments(function, docstring)]
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


# The command


def pages() -> dict[str, str]:
    """Name and text of every page."""
    algorithms = [read_page(path) for path in sorted(ALGORITHMS.glob("*.yaml"))]
    texts = {"README.md": overview(algorithms), "functions.md": functions_page()}
    return texts | {f"{page.name}.md": algorithm_page(page) for page in algorithms}


def differences(folder: Path, texts: Mapping[str, str]) -> list[str]:
    """Names of the pages in `folder` that are missing, out of date or of no algorithm."""
    present = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.md")}
    return sorted(name for name in {*present, *texts} if present.get(name) != texts.get(name))


def main(arguments: list[str]) -> int:
    """Write the pages, or say which ones differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a page differs")
    only_check = parser.parse_args(arguments).check
    texts = pages()
    for name in (stale := differences(FOLDER, texts)):
        if only_check:
            print(f"docs/algorithms/{name} differs: run python docs/algorithms/generate.py")
        elif name in texts:
            (FOLDER / name).write_text(texts[name], encoding="utf-8")
        else:
            (FOLDER / name).unlink()
    return int(only_check and bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
