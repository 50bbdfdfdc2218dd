"""Generate the pages of this folder from docstrings, signatures and recipes/conf.

    python docs/algorithms/generate.py           # write the pages
    python docs/algorithms/generate.py --check   # write nothing; exit with 1 if a page is out of date

No fact about an algorithm, a loss or a function is written here: a page shows the docstring of its function, and
`rl_plugins.algorithms.inputs` describes the tensors. The first comment lines of an algorithm's YAML file are its title,
its link, a summary, and when to use the algorithm; a loss without a YAML file has a line `When: ...` in its docstring.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from generator.algorithms import ALGORITHMS, HELPERS, POLICY_GRADIENT, Algorithm, algorithm_page, read_algorithm
from generator.common import common_options_page
from generator.functions import functions_page
from generator.losses import KINDS, Loss, loss_page, losses
from generator.markdown import FOLDER, page, sentence, table
from generator.options import options_page


def pages() -> dict[str, str]:
    """Return the text of every page by file name."""
    algorithms = [read_algorithm(path) for path in sorted(ALGORITHMS.glob("*.yaml"))]
    return {
        "README.md": overview(algorithms, losses()),
        "common_options.md": common_options_page(),
        "functions.md": functions_page(),
        "options.md": options_page(),
        **{f"{algorithm.name}.md": algorithm_page(algorithm) for algorithm in algorithms},
        **{f"{loss.name}.md": loss_page(loss) for loss in losses()},
    }


def overview(algorithms: list[Algorithm], losses: list[Loss]) -> str:
    """Return the page with the table of all algorithms and losses."""
    rows = [(a.name, a.title, a.kind, f"algorithm={a.name}", a.what, a.when) for a in algorithms]
    for loss in losses:
        rows.append((loss.name, f"`{loss.name}`", loss.kind, f"loss.name={loss.name}", loss.what, loss.when))
    kinds = [POLICY_GRADIENT, *(kind for kind, _ in HELPERS.values()), *(kind for kind, *_ in KINDS)]
    rows.sort(key=lambda row: kinds.index(row[2]))
    return page([
        "# Algorithms",
        "An algorithm of policy optimization is a choice of advantage, policy loss, aggregation and KL term, in a file "
        "of `recipes/conf/algorithm`. Each part can be replaced on the command line: `algorithm=rloo "
        "algorithm.policy_loss=cispo`. Preference optimization and reward modelling have a loss. Each page has the "
        "formula, its source, the command line and the options.",
        table(
            ("name", "kind", "option", "what it does", "when to use it"),
            [
                (f"[{title}]({name}.md)", kind, f"`{option}`", sentence(what), sentence(when))
                for name, title, kind, option, what, when in rows
            ],
        ),
        "- [common_options.md](common_options.md): options of every algorithm: KL, entropy bonus, rollout correction, "
        "reward shaping, dynamic sampling, a bound on costs, resampling.\n"
        "- [functions.md](functions.md): every function and its inputs, for use with plain tensors.\n"
        "- [options.md](options.md): all other options of a recipe.",
    ])  # fmt: skip


def differences(folder: Path, texts: Mapping[str, str]) -> list[str]:
    """List the pages in `folder` that are missing, out of date or superfluous."""
    present = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.md")}
    return sorted(name for name in {*present, *texts} if present.get(name) != texts.get(name))


def main(arguments: list[str]) -> int:
    """Write the pages, or print the pages that are out of date."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is out of date")
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
