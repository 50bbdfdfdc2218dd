"""The trial of an agent before a run: the agent makes its first call, and its faults are one line each."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

pytest.importorskip("vllm")

import rl_plugins.rollout.vllm.chat_protocol
import rl_plugins.rollout.vllm.tool_parser  # noqa: F401
from rl_plugins.data.parquet import Row
from rl_plugins.launch.task_environment import try_environment
from rl_plugins.models.tiny import build_tokenizer
from rl_plugins.tests.launch.configurations import configured, message_of

AGENTS = "rl_plugins.tests.environments.sample_agents"


def row_of(source: str, ground_truth: str) -> Row:
    row: Any = {
        "data_source": source,
        "prompt": [{"role": "user", "content": "ask"}],
        "reward_model": {"ground_truth": ground_truth},
        "extra_info": {},
    }
    return row


def test_try_environment_lets_an_agent_make_one_call_for_a_row_of_each_source() -> None:
    tokenizer: Any = build_tokenizer()
    for name, options, acts, said in (
        # The agent of the row 0 makes its call.
        ("obey", [], ["", "silent"], "the agent fails on a row of data_source '1' before its first call: raised: "),
        ("talk", ["data.max_prompt_tokens=1"], [""], "more than max_prompt_tokens=1 (data.max_prompt_tokens in a"),
        ("talk", ["environment.parser=herms"], [""], "environment.parser=herms: vLLM has no such tool parser: did you"),
    ):
        config = configured(
            "grpo", "environment=agent", f"environment.agent={AGENTS}.{name}", "model.path=model",
            "data.train_files=[train.parquet]", *options,
        )  # fmt: skip
        rows = {str(number): row_of(str(number), act) for number, act in enumerate(acts)}
        message = message_of(partial(try_environment, config, rows, tokenizer))
        assert said in message and "\n" not in message, message
