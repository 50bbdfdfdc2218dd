"""Tools over the real vLLM: the resident engine samples conversations, and vLLM's own parsers read calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from integration_tests.resident import load_policy, log_probs_of
from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.environments.object_conversations import StatefulConversations
from rl_plugins.environments.stateful import StatefulEnvironment
from rl_plugins.environments.tools import ToolEnvironment
from rl_plugins.errors import ConfigError
from rl_plugins.models.tiny import TOOL_CHAT_TEMPLATE, build_tokenizer
from rl_plugins.rewards.conversations import Conversations, Opening
from rl_plugins.rewards.inline import InlineScorer
from rl_plugins.rewards.records import ScoringRequest
from rl_plugins.rollout.engine import Generations, RemoteSamples
from rl_plugins.rollout.tool_calls import ToolCall
from rl_plugins.rollout.vllm.client import VLLMRollout
from rl_plugins.rollout.vllm.tool_parser import VLLMToolParser

HERE = "rl_plugins.tests.environments.sample_tools"
QWEN3_TEMPLATE = (
    "{{ tools }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for call in m.tool_calls or [] %}"
    "<tool_call>\n<function={{ call.function.name }}>\n{% for name, value in call.function.arguments | items %}"
    "<parameter={{ name }}>\n{{ value }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}"
    "{% if m.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class Recorder:
    """A rollout engine and its responses."""

    def __init__(self, rollout: VLLMRollout) -> None:
        self._rollout, self.responses = rollout, list[list[int]]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rollout, name)

    def fetch(self, finished: Sequence[Generations | RemoteSamples]) -> list[Generations | None]:
        fetched = self._rollout.fetch(finished)
        self.responses += [ids for group in fetched if group is not None for ids in group.responses()]
        return fetched


@pytest.fixture(scope="module")
def environment() -> Iterator[ToolEnvironment]:
    made = ToolEnvironment([f"{HERE}.add"], parser=f"{HERE}.add_to_every_response", max_turns=3, deadline_s=60)
    yield made
    made.close()


def test_conversations_with_tools_train_on_the_tokens_of_the_engine(
    float32_engine: VLLMRollout, workplace: Path, environment: ToolEnvironment
) -> None:
    tokenizer: Any = build_tokenizer()
    tokenizer.chat_template = TOOL_CHAT_TEMPLATE
    question: list[Any] = [{"role": "user", "content": "2+3"}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_dict=False, **environment.template_options
    )
    scorer, recorder = (
        InlineScorer({"_target_": "rl_plugins.tests.rewards.sample_rewards.length"}),
        Recorder(float32_engine),
    )
    talk = Conversations(environment.connect(scorer, tokenizer), tokenizer, 3).by(recorder)
    about = ScoringRequest("s", "", None, {}, question)
    # An untrained policy ends few responses.
    sampling = SamplingConfig(max_tokens=200, num_samples=4, stop_token_ids=tuple(range(60, 200)))
    talk.submit([Opening(7, prompt, 5, about=about)], sampling)
    generations = talk.collect([7], 0)[7]

    policy, trained_on = load_policy(workplace), []
    masks, log_probs = generations.response_masks() or [], generations.response_log_probs()
    for ids, mask, of_engine in zip(generations.responses(), masks, log_probs, strict=True):
        of_policy = np.array(log_probs_of(policy, [*prompt, *ids])[len(prompt) - 1 :])
        sampled = np.array(mask) == 1
        assert np.abs(of_policy - np.array(of_engine))[sampled].max() < 1e-4
        starts = np.flatnonzero(np.diff([0, *mask]) == 1)
        ends = np.flatnonzero(np.diff([*mask, 0]) == -1) + 1
        trained_on += [ids[start:end] for start, end in zip(starts, ends, strict=True)]
    assert sorted(trained_on) == sorted(recorder.responses) and len(trained_on) > 4
    assert {ending.turns for ending in generations.endings} == {3}
    assert [ending.counts["tools/calls"] for ending in generations.endings] == [4] * 4


def test_objects_of_a_stateful_environment_start_and_reward_conversations(
    float32_engine: VLLMRollout, workplace: Path
) -> None:
    tokenizer: Any = build_tokenizer()
    recorder = Recorder(float32_engine)
    environment = StatefulEnvironment("rl_plugins.tests.environments.sample_environments.Lengths", max_turns=3)
    objects = StatefulConversations(environment.host, tokenizer, environment)
    talk = Conversations(objects, tokenizer, 3).by(recorder)
    about = ScoringRequest("s", "", None, {}, [{"role": "user", "content": "2+3"}])
    # An untrained policy ends few responses.
    sampling = SamplingConfig(max_tokens=200, num_samples=4, stop_token_ids=tuple(range(60, 200)))
    talk.submit([Opening(7, tokenizer.encode("row"), 5, about=about)], sampling)
    generations = talk.collect([7], 0)[7]
    environment.close()

    policy, trained_on = load_policy(workplace), []
    masks, log_probs = generations.response_masks() or [], generations.response_log_probs()
    samples = zip(generations.responses(), masks, log_probs, generations.endings, strict=True)
    for ids, mask, of_engine, ending in samples:
        prompt = list(ending.prompt_ids)
        assert tokenizer.decode(prompt) == "<|user|>2+3<|user|>5<|assistant|>"
        of_policy = np.array(log_probs_of(policy, [*prompt, *ids])[len(prompt) - 1 :])
        sampled = np.array(mask) == 1
        assert np.abs(of_policy - np.array(of_engine))[sampled].max() < 1e-4
        # The reward of a turn is 1 and the length of its text, at the last token of the turn.
        ends = np.flatnonzero(np.diff([*mask, 0]) == -1)
        assert list(ending.turn_ends) == ends.tolist()
        texts = [message["content"] for message in ending.said if message["role"] == "assistant"]
        assert list(ending.turn_rewards) == [1.0 + len(text) for text in texts]
        assert ending.score.value == sum(ending.turn_rewards)
        starts = np.flatnonzero(np.diff([0, *mask]) == 1)
        trained_on += [ids[start : end + 1] for start, end in zip(starts, ends, strict=True)]
    assert sorted(trained_on) == sorted(recorder.responses) and len(trained_on) > 4


def parser_of(name: str, template: str = TOOL_CHAT_TEMPLATE) -> tuple[VLLMToolParser, Any]:
    tokenizer: Any = build_tokenizer(tools=True)
    tokenizer.chat_template = template
    properties = {"a": {"type": "integer"}, "b": {"type": "integer"}}
    schema = {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": properties}}
    tools = [{"type": "function", "function": schema}]
    return VLLMToolParser(name, tokenizer, tools, {"tools": tools}), tokenizer


@pytest.mark.parametrize(
    ("name", "template", "call"),
    [
        ("hermes", TOOL_CHAT_TEMPLATE, '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'),
        (
            "qwen3_xml",
            QWEN3_TEMPLATE,
            "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n"
            "</function>\n</tool_call>",
        ),
    ],
)
def test_parser_of_vllm_reads_calls_from_tokens(name: str, template: str, call: str) -> None:
    parser, tokenizer = parser_of(name, template)
    once = ToolCall("add", {"a": 1, "b": 2})
    for text, calls in ((f"I add.{call}<|end|>", [once]), (f"{call}{call}<|end|>", [once, once]), ("3<|end|>", [])):
        assert parser.calls(tokenizer.encode(text), []) == calls
    # A parser may read a broken call, but never overlooks it.
    (broken,) = parser.calls(tokenizer.encode("<tool_call>{<|end|>"), [])
    assert broken.fault or not broken.arguments


def test_parser_of_vllm_refuses_names_and_tokenizers_in_one_line() -> None:
    for name, said in {
        "herms": "parser=herms: vLLM has no such tool parser: did you mean hermes",
        "llama3_json": "parser=llama3_json does not fit the tokenizer",
        "pythonic": r"parser=pythonic does not read the calls of the chat template .* use .*hermes",
    }.items():
        with pytest.raises(ConfigError, match=said):
            parser_of(name)
