"""Command line: `python -m rl_plugins.data.prepare gsm8k --input raw/ --output data/gsm8k`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rl_plugins.data.prepare import addition, competition_math, gsm8k
from rl_plugins.data.prepare.writing import write_splits
from rl_plugins.errors import ConfigError

LAYOUTS = {"addition": addition.LAYOUT, "gsm8k": gsm8k.LAYOUT, "math": competition_math.LAYOUT}


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the files and say what was made; return 2 when the user has something to mend."""
    parser = argparse.ArgumentParser(prog="python -m rl_plugins.data.prepare", description="Make prompt files.")
    commands = parser.add_subparsers(dest="layout", required=True, metavar="layout")
    for name, layout in LAYOUTS.items():
        command = commands.add_parser(name, help=layout.summary, description=layout.summary)
        layout.add_arguments(command)
        command.add_argument("--output", type=Path, required=True, help="folder for train.parquet and test.parquet")
    options = parser.parse_args(arguments)
    try:
        splits = LAYOUTS[options.layout].build(options)
        paths = write_splits(splits, options.output)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for split, path in paths.items():
        print(f"{path}: {len(splits[split])} rows")
    print(f"\nA row of them:\n{json.dumps(splits['train'][0], indent=2, ensure_ascii=False)}")
    print(
        "\nNext:\n  python -m rl_plugins.recipes.grpo model.path=MODEL "
        f"'data.train_files=[{paths['train']}]' 'data.val_files=[{paths['test']}]'"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
