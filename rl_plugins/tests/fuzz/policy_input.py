"""Targets for texts of policies, tools, agents, judges and servers: calls, results, answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from hypothesis import strategies as st

from rl_plugins.data.following_messages import TurnTokenizer
from rl_plugins.data.tokenization import encode_prompts
from rl_plugins.environments.tool_functions import Threads, Tool, tool_of
from rl_plugins.errors import ConfigError
from rl_plugins.models.tiny import build_tokenizer
from rl_plugins.rewards.code_tests import read_tests
from rl_plugins.rewards.judge_answers import read_score
from rl_plugins.rollout.chat import Refused, for_template
from rl_plugins.rollout.tool_calls import read_call
from rl_plugins.sandbox.external import RemoteSandbox
from rl_plugins.sandbox.records import SandboxError
from rl_plugins.tests.fuzz.inputs import TEXTS, VALUES, as_json, changed, damaged
from rl_plugins.tests.fuzz.target import Target

_LONGEST = 300
_ODD = st.sampled_from(["\ud800", "a\udfffb", "\x00", "<|endoftext|>", "\ufdd00\ufdd1"])
_DEEP = st.integers(1, 3000).flatmap(
    lambda depth: st.sampled_from(["[" * depth, "[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth])
)
_OUTSIDE = VALUES | _ODD
_CHAT: dict[str, Any] = {
    "model": "policy",
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "17+25="}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "search", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "42"},
    ],
    "tools": [{"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}],
    "tool_choice": "auto",
    "max_completion_tokens": 8,
    "stream": True,
    "stream_options": {"include_usage": True},
    "logprobs": True,
}
_RESULT = {"stdout": "42", "stderr": "", "exit_status": 0, "limit": "", "seconds": 0.5}
_FAULT = {"fault": "no memory"}
_TESTS = {
    "inputs": [[1, 2]], "outputs": [3], "fn_name": "add", "test": "assert True", "entry_point": "add",
    "test_list": ["assert True"], "test_setup_code": "",
}  # fmt: skip
_JUDGED = '{"reason": "so", "score": 0.5}\nScore: 7/10'


def search(query: str, count: int = 3) -> str:
    """Search.

    Args:
        query: words.
        count: number of results.
    """
    raise NotImplementedError


def _refuses(error: Exception) -> ConfigError:
    """Return the refusal of a text, which others than users read."""
    return ConfigError(f"refused: {ascii(str(error))[:_LONGEST]}")


def _check_call(call: tuple[Any, Any]) -> None:
    found = read_call(*call)
    if fault := found.fault or _search_tool().fault(found.arguments):
        raise _refuses(ValueError(fault))
    arguments = dict(found.arguments)
    query, count = arguments.pop("query", None), arguments.pop("count", 3)
    assert isinstance(query, str) and not arguments, "a call with wrong arguments"
    assert isinstance(count, int | float) and not isinstance(count, bool), "a count that is no number"


@cache
def _search_tool() -> Tool:
    return tool_of("search", search, {}, Threads())


def _result_check() -> Callable[[str], None]:
    tokenizer = build_tokenizer()
    turns = TurnTokenizer(tokenizer)

    def check(text: str) -> None:
        ids, plain = (turns.tokens([{"role": "user", "content": content}], 0, 10_000)[0] for content in (text, "a"))
        for special in tokenizer.all_special_ids:
            assert ids.count(special) == plain.count(special), "a text with a special token"

    return check


def _chat_check() -> Callable[[bytes], None]:
    tokenizer = build_tokenizer()

    def check(body: bytes) -> None:
        # The import loads vLLM, which takes seconds.
        from rl_plugins.rollout.vllm.chat_protocol import read_chat_call

        try:
            encode_prompts([for_template(read_chat_call(body).messages)], tokenizer, {})
        except (Refused, TypeError, ValueError) as error:
            raise _refuses(error) from error

    return check


def _check_tests(truth: Any) -> None:
    try:
        tests = read_tests(truth, {})
    except ValueError as error:
        raise _refuses(error) from error
    texts = [text for test in tests for text in test.job("", "mark")]
    assert texts and all(isinstance(text, str) for text in texts), "a test without a text"


def _check_answer(content: bytes) -> None:
    try:
        RemoteSandbox("http://sandbox", {})._result(content)
    except SandboxError as error:
        assert str(error).startswith("http://sandbox: "), "an error without the address"
        raise _refuses(error) from error


def _check_judged(text: str) -> None:
    if read_score(text) is None:
        raise ConfigError("refused: no score")


def policy_targets() -> Mapping[str, Target]:
    """Return the targets by name."""
    arguments = changed({"query": "a", "count": 3}, _OUTSIDE) | VALUES
    calls = st.tuples(st.just("search") | VALUES, arguments | arguments.map(json.dumps) | _DEEP | TEXTS)
    result, chat = (json.dumps(value).encode() for value in (_RESULT, _CHAT))
    deep = _DEEP.map(str.encode)
    return {
        "calls of tools": Target(calls, _check_call, ["refused"]),
        "results of tools": Target(TEXTS | st.text() | _ODD, _result_check(), []),
        "calls of agents": Target(
            as_json(changed(_CHAT, _OUTSIDE) | VALUES) | damaged(chat) | deep, _chat_check(), ["refused"]
        ),
        "tests of programs": Target(
            changed(_TESTS, _OUTSIDE) | changed(_TESTS, _OUTSIDE).map(json.dumps) | _DEEP | VALUES,
            _check_tests,
            ["refused"],
        ),
        "answers of sandboxes": Target(
            as_json(changed(_RESULT, _OUTSIDE) | changed(_FAULT, _OUTSIDE) | VALUES) | damaged(result) | deep,
            _check_answer,
            ["refused"],
        ),
        "answers of judges": Target(
            changed({"score": 1.0}).map(json.dumps) | damaged(_JUDGED.encode()).map(lambda text: text.decode("latin1")),
            _check_judged,
            ["refused"],
        ),
    }
