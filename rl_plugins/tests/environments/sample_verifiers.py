"""Environments of the package verifiers for tests, as authors write the environments: `load_environment` by kind."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset

QUESTIONS = [
    {"question": "2+3", "answer": "5", "info": {"low": 1}},
    {"question": "4+4", "answer": "8", "info": {"low": 2}},
]
PARTS = ("single", "tool", "session", "talk", "bad")
"""Parts of the environment `mixed`."""


def load_environment(kind: str = "single", **options: Any) -> vf.Environment:
    """Return an environment.

    Args:
        kind: name of the environment.
        options: arguments of the environment.
    """
    questions = Dataset.from_list(QUESTIONS)
    rubric = vf.Rubric(funcs=[right, length], weights=[1.0, 0.1])
    if kind == "tool":
        return vf.ToolEnv(tools=[add], dataset=questions, rubric=rubric, max_turns=4, **options)
    if kind == "session":
        return Session(tools=[], dataset=questions, rubric=rubric, max_turns=4, **options)
    if kind == "talk":
        return Talk(dataset=questions, eval_dataset=questions.select([1]), rubric=rubric, **options)
    if kind == "group":
        return vf.SingleTurnEnv(dataset=questions, rubric=vf.Rubric(funcs=[best]), **options)
    if kind == "mixed":
        parts = [load_environment(name) for name in PARTS]
        return vf.EnvGroup(parts, env_names=list(PARTS), **options)
    if kind == "bad":
        return vf.SingleTurnEnv(dataset=questions, rubric=vf.Rubric(funcs=[broken]), **options)
    return vf.SingleTurnEnv(dataset=questions, system_prompt="Add.", rubric=rubric, **options)


class Talk(vf.MultiTurnEnv):
    """Conversation that ends after a number of answers, or with an error after the answer `fail`."""

    def __init__(self, turns: int = 3, **options: Any) -> None:
        super().__init__(**options)
        self.turns = turns

    async def env_response(self, messages: Any, state: vf.State, **options: Any) -> Any:
        if messages[-1].content == "fail":
            raise vf.ToolError("the tool is away")
        return [{"role": "user", "content": "again"}]

    @vf.stop
    async def is_over(self, state: vf.State) -> bool:
        return len(state["trajectory"]) >= self.turns


class Session(vf.StatefulToolEnv):
    """Tool with a state of the rollout, which the policy does not see."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.add_tool(self.add_to_sum, args_to_skip=["sums"])

    async def setup_state(self, state: vf.State, **options: Any) -> Any:
        state["sums"] = []
        return await super().setup_state(state, **options)

    def update_tool_args(self, tool_name: str, tool_args: dict, messages: Any, state: vf.State, **options: Any) -> dict:
        return {**tool_args, "sums": state["sums"]}

    async def add_to_sum(self, a: int, b: int, sums: list) -> str:
        """Add two numbers to the sum.

        Args:
            a: first number.
            b: second number.
            sums: sums so far.
        """
        sums.append(a + b)
        return str(sum(sums))


async def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: first number.
        b: second number.
    """
    return a + b


def right(completion: Any, answer: str) -> float:
    return float(completion[-1]["content"] == answer)


def length(completion: Any, info: dict[str, int]) -> float:
    return float(len(completion) + 100 * info.get("low", 0))


def best(completions: Any) -> list[float]:
    return [1.0 for _ in completions]


def broken(completion: Any) -> float:
    raise ValueError("no such key")
