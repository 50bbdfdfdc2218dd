"""Rollout engine with scripted answers, and trajectories of the agents in `sample_agents`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

pytest.importorskip("vllm")

import rl_plugins.rollout.vllm.chat_protocol
import rl_plugins.rollout.vllm.tool_parser  # noqa: F401
from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.environments.agent import AgentEnvironment
from rl_plugins.models.tiny import build_tokenizer
from rl_plugins.rewards.conversations import Conversations, Opening
from rl_plugins.rewards.records import ScoringRequest
from rl_plugins.rollout.engine import Generations, GroupRequest
from rl_plugins.tests.patience import patient
from rl_plugins.tests.stages import canned

HERE = "rl_plugins.tests.environments.sample_agents"
tokenizer: Any = build_tokenizer(tools=True)
ASK = [{"role": "user", "content": "ask"}]
ASKED = "<|user|>ask<|assistant|>"
CALL = '{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call><|end|>'


class Script(canned.CannedRollout):
    """A rollout engine with token ids, or several choices, for each prompt, and a policy version for each request."""

    def __init__(self, said: Mapping[str, Sequence[Any]]) -> None:
        super().__init__()
        self.said, self.version = said, 0

    @override
    def submit(self, requests: Sequence[GroupRequest], sampling: SamplingConfig, *, together: bool = True) -> None:
        for one in requests:
            super().submit([one], one.shortened(sampling))

    @override
    def generate(self, prompts: list[list[int]], sampling: SamplingConfig, seeds: list[int] | None) -> Generations:
        (prompt,) = map(tokenizer.decode, prompts)
        self.version += 1
        found = self.said.get(prompt, tokenizer.encode("5<|end|>"))
        wholes = [found] * sampling.num_samples if isinstance(found[0], int) else found[: sampling.num_samples]
        assert len(wholes) == sampling.num_samples
        responses = [list(whole)[: sampling.max_tokens] for whole in wholes]
        reasons = ["stop" if len(ids) == len(whole) else "length" for ids, whole in zip(responses, wholes, strict=True)]
        log_probs = [[-float(len(ids))] * len(ids) for ids in responses]
        return Generations.from_responses(responses, log_probs, reasons, self.version)


class Reporting(Script):
    """A rollout engine with one new token in each report. The second token of a response waits for `goes_on`.

    Args:
        said: token ids by prompt, as of `Script`.
        goes_on: file whose existence lets the engine go on.
    """

    def __init__(self, said: Mapping[str, Sequence[Any]], goes_on: Path) -> None:
        super().__init__(said)
        self.goes_on, self.reports = goes_on, 0
        self._open: dict[int, tuple[Generations, int]] = {}

    @override
    def submit(self, requests: Sequence[GroupRequest], sampling: SamplingConfig, *, together: bool = True) -> None:
        super().submit(requests, sampling)
        for request in requests:
            if request.reports_tokens:
                self._open[request.ticket] = (self._finished.pop(request.ticket), 0)

    def tokens_so_far(self, tickets: Sequence[int]) -> dict[int, list[list[int]]]:
        found = {}
        for ticket in set(tickets) & self._open.keys():
            whole, count = self._open[ticket]
            count += count < 1 or self.goes_on.exists()
            found[ticket] = [response[:count] for response in whole.responses()]
            self._open[ticket] = (whole, count)
            self.reports += 1
            if count > max(whole.lengths):
                self._finished[ticket] = self._open.pop(ticket)[0]
        return found


def agent(name: str, **options: Any) -> AgentEnvironment:
    limits = {"max_turns": 3, "deadline_s": patient(30), "max_prompt_tokens": 60, "max_failure_rate": 0.0}
    return AgentEnvironment({"_target_": f"{HERE}.{name}"}, **{**limits, **options})


def run(
    environment: AgentEnvironment,
    said: Mapping[str, Sequence[Any]],
    acts: Sequence[str] = ("",),
    *,
    max_tokens: int = 400,
    prompt: Any = ASK,
    engine: Script | None = None,
    **extra: Any,
) -> list[Generations]:
    """Run a trajectory for each act."""
    engine = Script(said) if engine is None else engine
    talk = Conversations(environment.connect(tokenizer), tokenizer, environment.max_turns).by(engine)
    openings = [
        Opening(number, tokenizer.encode("row"), 5, about=ScoringRequest("s", "", act, extra, prompt))
        for number, act in enumerate(acts)
    ]
    talk.submit(openings, SamplingConfig(max_tokens=max_tokens))
    groups = talk.collect(range(len(acts)), 0)
    talk.scores([ending for group in groups.values() for ending in group.endings])
    return [groups[number] for number in range(len(acts))]
