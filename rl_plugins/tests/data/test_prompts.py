from __future__ import annotations

from rl_plugins.data.prompts import PromptBatch


def test_concat_joins_prompt_batches() -> None:
    first, second = (PromptBatch([[row, row]], [row], {"data_source": [f"s{row}"]}, 0) for row in (1, 2))
    joined = PromptBatch.concat([first, second])
    assert (joined.rows, joined.prompt_ids) == ([1, 2], [[1, 1], [2, 2]])
    assert joined.columns == {"data_source": ["s1", "s2"]}
