"""Responses with reasoning, whose beginning the chat template may write at the end of the prompt."""

from __future__ import annotations

from typing import Any

from rl_plugins import prompt_row
from rl_plugins.data.preferences import PreferenceDataModule
from rl_plugins.data.sft import SFTDataModule
from rl_plugins.models.tiny import build_tokenizer
from rl_plugins.tests.loops import for_each

THOUGHT = "<think>\n2 and 2\n</think>\n\n4"


@for_each(
    ("opening", "expected"),
    [
        ("<think>\n", "2 and 2\n</think>\n\n4<|end|>"),
        ("<think>", "\n2 and 2\n</think>\n\n4<|end|>"),
        ("", f"{THOUGHT}<|end|>"),
        ("<think>\n\n</think>\n\n", f"{THOUGHT}<|end|>"),
    ],
)
def test_tokenized_response_does_not_open_the_reasoning_opened_by_the_prompt(opening: str, expected: str) -> None:
    tokenizer: Any = build_tokenizer()
    # Jinja removes a new line at the end of a template.
    tokenizer.chat_template = "{{ messages[0].content }}<|assistant|>" + opening + "{{ '' }}"
    prompt = prompt_row("2+2=<think>", "4")
    options: dict[str, Any] = {"tokenizer": tokenizer, "prompts_per_step": 1}
    pair = {**prompt, "chosen": THOUGHT, "rejected": "<think>5"}
    answered = {**prompt, "response": THOUGHT, "label": True}
    for data, of_batch in (
        (SFTDataModule([answered], response_key="response", **options), lambda batch: batch["response_ids"]),
        (PreferenceDataModule([pair], **options), lambda batch: batch.chosen_ids),
        (PreferenceDataModule([answered], label_key="label", **options), lambda batch: batch.response_ids),
    ):
        data.setup("fit")
        (batch,) = data.train_dataloader()
        (response,) = of_batch(batch)
        assert tokenizer.decode(response) == expected
