"""Figures of how source and pages read: `python -m rl_plugins.tests.readability` prints prose, structure and imports.

Prose is docstrings, comments and the text of Markdown pages. A rate is a number of words in a thousand. Tests are left
out.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("rl_plugins", "strategies", "callbacks", "recipes")
WORDS = {
    "what": ("what",),
    "that": ("that",),
    "they": ("they", "them", "their", "those", "these"),
    "it": ("it", "its"),
}
"""Name of a rate, and the words in the rate."""
INDIRECT_STARTS = frozenset({"what", "whether", "how", "those", "who", "where", "which"})
# Words with a capital letter in mid-sentence.
_NAMES = frozenset(
    {"DeepSpeed", "False", "Hugging", "Hydra", "Liger", "Lightning", "None", "Python", "Ray", "True", "Unix"}
)
STAGE = "PolicyOptimization"

_WORD = re.compile(r"[A-Za-z']+")
_CODE = re.compile(r"`[^`]*`")
_FENCED_BLOCK = re.compile(r"^( *)(`{3,}).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
_MADE_TABLE = re.compile(r"<!-- (\w+) -->.*?<!-- end \1 -->", re.DOTALL)
_LINK_TARGET = re.compile(r"\]\([^)]*\)")
_ARGUMENT = re.compile(r"^\s{4,}\*{0,2}\w+(?: \([^)]*\))?: +(\S+)", re.MULTILINE)
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Prose:
    """Counts of the words of docstrings, comments and pages."""

    words: Counter[str] = field(default_factory=Counter)
    docstrings: int = 0
    indirect_starts: int = 0
    arguments: int = 0
    arguments_starting_with_of: int = 0
    arguments_in_capitals: int = 0

    def add(self, source: str) -> None:
        """Count the prose of a module."""
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Module | ast.ClassDef | Function) and (docstring := ast.get_docstring(node)):
                self._add_docstring(docstring)
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                self._add_words(token.string.lstrip("# "))

    def add_page(self, text: str) -> None:
        """Count a Markdown page, without blocks of code, tables made by commands, and targets of links."""
        for left_out in (_MADE_TABLE, _FENCED_BLOCK, _LINK_TARGET):
            text = left_out.sub("", text)
        self._add_words(text)

    def _add_docstring(self, docstring: str) -> None:
        self._add_words(docstring)
        self.docstrings += 1
        first = _WORD.search(docstring)
        self.indirect_starts += first is not None and first.group().lower() in INDIRECT_STARTS
        first_words = [match.group(1) for match in _ARGUMENT.finditer(docstring)]
        self.arguments += len(first_words)
        self.arguments_starting_with_of += first_words.count("of")
        self.arguments_in_capitals += sum(map(_starts_in_capitals, first_words))

    def _add_words(self, text: str) -> None:
        self.words.update(word.lower() for word in _WORD.findall(_CODE.sub("CODE", text)))

    def figures(self) -> dict[str, float]:
        """Return rates of words in a thousand, and shares of docstrings and arguments in percent."""
        total = max(self.words.total(), 1)
        rates = {name: 1000 * sum(self.words[word] for word in words) / total for name, words in WORDS.items()}
        return {
            **rates,
            "indirect starts %": 100 * self.indirect_starts / max(self.docstrings, 1),
            "arguments with of %": 100 * self.arguments_starting_with_of / max(self.arguments, 1),
            "arguments in capitals %": 100 * self.arguments_in_capitals / max(self.arguments, 1),
        }


class Source:
    """The modules of the package without tests.

    Args:
        root: folder of the repository.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    @cached_property
    def modules(self) -> dict[str, str]:
        """Path and text of each module."""
        files = [file for room in ROOMS for file in sorted((self._root / room).rglob("*.py"))]
        return {
            str(file.relative_to(self._root)): file.read_text(encoding="utf-8")
            for file in files
            if "tests" not in file.parts and not any(parent.is_symlink() for parent in file.parents)
        }

    @cached_property
    def trees(self) -> dict[str, ast.Module]:
        """Path and syntax tree of each module."""
        return {path: ast.parse(text) for path, text in self.modules.items()}

    def prose(self) -> dict[str, Prose]:
        """Return the prose of each room."""
        rooms: dict[str, Prose] = {}
        for path, text in self.modules.items():
            rooms.setdefault(room_of(path), Prose()).add(text)
        return rooms

    @cached_property
    def classes(self) -> dict[str, list[ast.ClassDef]]:
        """Name and definitions of each class."""
        found: dict[str, list[ast.ClassDef]] = {}
        for tree in self.trees.values():
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    found.setdefault(node.name, []).append(node)
        return found

    def depth(self, name: str) -> int:
        """Return the number of own classes from a class up to its highest own base, with both ends."""
        if name not in self.classes:
            return 0
        return 1 + max((self.depth(base) for base in _bases(self.classes[name][0])), default=0)

    def methods(self, name: str) -> set[str]:
        """Return the names of the methods of a class and its bases in the project."""
        if name not in self.classes:
            return set()
        definition = self.classes[name][0]
        own = {node.name for node in definition.body if isinstance(node, Function)}
        return own.union(*(self.methods(base) for base in _bases(definition)))

    def parameters(self) -> Iterator[ast.arg]:
        """Yield every annotated parameter."""
        for tree in self.trees.values():
            for node in ast.walk(tree):
                if isinstance(node, Function):
                    arguments = node.args
                    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
                    yield from (argument for argument in every if argument.annotation is not None)

    def lonely(self) -> list[str]:
        """Return the modules with only one importing module, if this module is in the same room."""
        names = {_module_name(path): path for path in self.modules}
        importers: dict[str, set[str]] = {}
        for path, tree in self.trees.items():
            for imported in _imports(tree):
                target = imported if imported in names else imported.rpartition(".")[0]
                if target in names and names[target] != path:
                    importers.setdefault(names[target], set()).add(path)
        return sorted(
            path for path, users in importers.items() if len(users) == 1 and room_of(path) == room_of(next(iter(users)))
        )

    def structure(self) -> dict[str, float]:
        """Return figures of modules, classes and parameters."""
        lines = [len(text.splitlines()) for text in self.modules.values()]
        annotations = [ast.unparse(argument.annotation) for argument in self.parameters() if argument.annotation]
        return {
            "modules": len(self.modules),
            "lines": sum(lines),
            "longest module": max(lines),
            "modules with one importer in their room": len(self.lonely()),
            "inheritance depth": max(map(self.depth, self.classes)),
            f"methods of {STAGE}": len(self.methods(STAGE)),
            "parameters annotated as Any %": 100 * annotations.count("Any") / len(annotations),
            "class names that exist twice": len(self.repeated_classes()),
        }

    def repeated_classes(self) -> list[str]:
        """Return the names of classes with two definitions."""
        return sorted(name for name, definitions in self.classes.items() if len(definitions) > 1)


def prose_of_pages(root: Path) -> dict[str, Prose]:
    """Return the prose of each Markdown page in the folder of the repository, in docs and in examples."""
    pages = {}
    for file in sorted(
        file for name in ("*", "docs/*", "docs/references/*", "examples/*/*") for file in root.glob(f"{name}.md")
    ):
        pages[str(file.relative_to(root))] = counts = Prose()
        counts.add_page(file.read_text(encoding="utf-8"))
    return pages


def _starts_in_capitals(text: str) -> bool:
    # Names of axes have one letter.
    return text.istitle() and len(text.strip("[],")) > 1 and text not in _NAMES


def room_of(path: str) -> str:
    """Return the room of a module: the top-level folder, or the folder in `rl_plugins`."""
    parts = Path(path).parts
    return parts[1] if parts[0] == "rl_plugins" and len(parts) > 2 else parts[0]


def _bases(definition: ast.ClassDef) -> list[str]:
    return [ast.unparse(base).split("[")[0].split(".")[-1] for base in definition.bases]


def _module_name(path: str) -> str:
    parts = list(Path(path).with_suffix("").parts)
    parts = parts if parts[0] == "rl_plugins" else ["rl_plugins", *parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def main() -> None:
    """Print all figures."""
    source = Source(ROOT)
    prose = source.prose()
    everything = Prose()
    for text in source.modules.values():
        everything.add(text)
    columns = list(everything.figures())
    print(f"{'room':<14}" + "".join(f"{column:>21}" for column in columns))
    for room, counts in [*sorted(prose.items()), ("all", everything)]:
        print(f"{room:<14}" + "".join(f"{value:>21.1f}" for value in counts.figures().values()))
    print(f"\n{'page':<26}" + "".join(f"{name:>8}" for name in WORDS))
    for page, counts in prose_of_pages(ROOT).items():
        print(f"{page:<26}" + "".join(f"{counts.figures()[name]:>8.1f}" for name in WORDS))
    print()
    for name, value in source.structure().items():
        print(f"{name:<44}{value:>10.6g}")


if __name__ == "__main__":
    main()
