"""Write train.jsonl and test.jsonl into a folder: words of three letters, and the words in reverse.

python words.py FOLDER
"""

from __future__ import annotations

import json
import random
import sys
from itertools import product
from pathlib import Path


def main(folder: Path) -> None:
    words = ["".join(letters) for letters in product("abcdefgh", repeat=3)]
    random.Random(0).shuffle(words)
    lines = [json.dumps({"question": word, "answer": word[::-1]}) + "\n" for word in words]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.jsonl").write_text("".join(lines[:448]))
    (folder / "test.jsonl").write_text("".join(lines[448:]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
