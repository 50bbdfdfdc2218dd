"""SFTDataModule with whole conversations: batches, limits and validation."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from rl_plugins.config.data import MixturePart
from rl_plugins.data.sft import SFTDataModule
from rl_plugins.errors import ConfigError, RowError
from rl_plugins.tests.loops import for_each


def talk(*texts: str) -> dict[str, Any]:
    """Return a row with a conversation; the user begins."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]}


def module(train: Any, tokenizer: Any, **options: Any) -> SFTDataModule:
    options = {"tokenizer": tokenizer, "prompts_per_step": 1, "messages_key": "messages", **options}
    return SFTDataModule(train, **options)


def test_sft_data_module_serves_the_replies_of_conversations_with_a_mask(tokenizer, write_rows):
    path = write_rows([talk("1+1", "2"), talk("1+1", "2", "2+2", "four"), talk("0", "1")])
    for train in (path, {"a": MixturePart(files=str(path))}):
        data = module(train, tokenizer)
        data.setup("fit")
        batch = data.sources["train"].batch([1, 0], 0)
        assert [tokenizer.decode(ids) for ids in batch["prompt_ids"]] == ["<|user|>1+1<|assistant|>"] * 2
        responses = ["2<|end|><|user|>2+2<|assistant|>four<|end|>", "2<|end|>"]
        assert [tokenizer.decode(ids) for ids in batch["response_ids"]] == responses
        assert batch["response_masks"] == [[1, 1, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1], [1, 1]]
        assert len(data.train_dataloader()) == 3


def test_sft_data_module_drops_or_refuses_long_conversations(tokenizer):
    rows = [talk("1+1", "2"), talk("a long question", "2"), talk("1+1", "2", "a long question", "2")]
    limits: dict[str, Any] = {"max_prompt_tokens": 8, "max_response_tokens": 8}
    data = module(rows, tokenizer, **limits)
    data.setup("fit")
    assert data.sources["train"].kept.tolist() == [0] and data.dropped_prompts["train"] == 2
    for number, option in ((1, "max_prompt_tokens=8"), (2, "max_response_tokens=8")):
        with pytest.raises(ConfigError, match=f"list, row 1: .* tokens, more than {option}"):
            module([rows[0], rows[number]], tokenizer, overlong_prompts="error", **limits).setup("fit")


def test_sft_data_module_splits_conversations_into_several_samples(tokenizer):
    own = copy.deepcopy(tokenizer)
    own.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content if loop.last else m.content[-1] }}"
        "{% if m.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    row = talk("a", "so 1", "b", "so 2")
    with pytest.raises(RowError, match=r"list, row 0, conversation: .* writes message 1 otherwise once"):
        module([row], own).setup("fit")
    data = module([row, talk("a", "1")], own, split_conversations=True)
    data.setup("fit")
    batch = data.sources["train"].batch([0, 1], 0)
    assert [own.decode(ids) for ids in batch["prompt_ids"]] == [
        "<|user|>a<|assistant|>1<|end|><|user|>b<|assistant|>",
        "<|user|>a<|assistant|>",
        "<|user|>a<|assistant|>",
    ]
    assert [own.decode(ids) for ids in batch["response_ids"]] == ["so 2<|end|>", "so 1<|end|>", "1<|end|>"]


def test_sft_data_module_validates_on_prompts_or_responses(row, tokenizer):
    conversations = [talk("1+1", "2")]
    data = module(None, tokenizer, validation=conversations, validate_on="responses")
    data.setup("validate")
    assert set(data.sources["validation"].batch([0], 0)) == {"prompt_ids", "response_ids", "response_masks"}
    data = module(conversations, tokenizer, validation=[row(0)])
    data.setup("fit")
    assert data.sources["validation"].batch([0], 0).columns["data_source"] == ["addition"]
    data = SFTDataModule(None, [row(0)], tokenizer=tokenizer, prompts_per_step=1, validate_on="responses")
    data.setup("validate")
    assert tokenizer.decode(data.sources["validation"].batch([0], 0)["response_ids"][0]) == "1<|end|>"
    with pytest.raises(ConfigError, match="validate_on='pairs': choose 'prompts' or 'responses'"):
        module(conversations, tokenizer, validate_on="pairs")


@for_each(
    ("changed", "said"),
    [
        (talk("1+1"), "list, row 1, messages_key='messages': no message has the role 'assistant'"),
        ({"prompt": "1+1"}, "list, row 1, messages_key='messages': leads nowhere at 'messages'; there is prompt"),
        ({**talk("1+1", "2"), "images": ["a.png"]}, "list, row 1, column 'images': a conversation of SFT has texts"),
    ],
)
def test_sft_data_module_names_the_row_of_a_malformed_conversation(tokenizer, changed, said):
    with pytest.raises(RowError) as caught:
        module([talk("1+1", "2"), changed], tokenizer).setup("fit")
    assert said in str(caught.value)


def test_sft_data_module_names_an_end_of_turns_at_which_sampling_goes_on(tokenizer, caplog):
    def said(template: str) -> str:
        caplog.clear()
        with caplog.at_level("INFO", logger="lightning.pytorch"):
            ending = copy.deepcopy(tokenizer)
            ending.chat_template = template
            module([talk("a", "b")], ending).setup("fit")
        return caplog.text

    def template(end: str) -> str:
        return (
            "{% for message in messages %}<|user|>{{ message.content }}" + end + "{% endfor %}"
            "{% if add_generation_prompt %}<|user|>{% endif %}"
        )

    end = tokenizer.convert_tokens_to_ids("<|assistant|>")
    assert f"end a turn with '<|assistant|>' ({end}), and sampling ends at" in said(template("<|assistant|>"))
    assert "end a turn" not in said(template(tokenizer.eos_token))
