from __future__ import annotations

import json

from rl_plugins.control_characters import json_without_controls


def test_json_without_controls_escapes_controls_and_lone_surrogates_and_keeps_letters() -> None:
    value = {"response": "é 中 \x1b[2J \x9b2J \x7f \u2028 \ud800", "score": 0.5}
    text = json_without_controls(value)
    assert json.loads(text) == value and "é 中" in text
    assert all(letter.isprintable() or letter == "\n" for letter in text)
    # A file in UTF-8 cannot hold a lone surrogate.
    text.encode()
