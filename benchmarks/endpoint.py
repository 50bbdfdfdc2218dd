"""Time that the endpoint for agents adds to a call of the policy.

`python -m benchmarks.endpoint [--trajectories 16] [--calls 12] [--agents 16]` samples with a tiny policy in this
process. Agents with the client of OpenAI run one after the other, and the engine is then called directly with the same
prompts. A second measurement runs several agents at once, with an engine that answers at once: all their time is that
of the endpoint, the clients and the processes of the agents.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import openai
from typing_extensions import override

from benchmarks.tool_turns import InstantEngine
from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.environments.agent import AgentEnvironment
from rl_plugins.models.tiny import build_tokenizer, save_tiny_policy
from rl_plugins.rewards import ScoringRequest
from rl_plugins.rewards.conversations import Conversations, Opening
from rl_plugins.rollout.engine import GroupRequest
from rl_plugins.rollout.transformers_engine import TransformersRollout

TOKENS = 8
QUESTION: list[Any] = [{"role": "user", "content": "347*86"}]


def ask(row: Mapping[str, Any], base_url: str, api_key: str, *, calls: int) -> dict[str, float]:
    """Call the policy several times; return the time of each call, in milliseconds."""
    messages, times = [*row["prompt"]], {"score": 1.0}
    with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
        for number in range(calls):
            start = time.perf_counter()
            answer = client.chat.completions.create(model="policy", messages=messages, max_tokens=TOKENS)
            times[f"call_{number}"] = 1000 * (time.perf_counter() - start)
            content = answer.choices[0].message.content
            messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "more"}]
    return times


class Recorder(TransformersRollout):
    """An engine that keeps its requests."""

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self.requests: list[tuple[GroupRequest, SamplingConfig]] = []

    @override
    def submit(self, requests: Sequence[GroupRequest], sampling: SamplingConfig, *, together: bool = True) -> None:
        self.requests += [(request, sampling) for request in requests]
        super().submit(requests, sampling, together=together)


def times_of_agents(engine: Any, tokenizer: Any, trajectories: int, calls: int, agents: int) -> list[float]:
    """Return the time of each call but the first of each agent, in milliseconds."""
    environment = AgentEnvironment(
        {"_target_": "benchmarks.endpoint.ask", "calls": calls},
        max_turns=calls,
        max_objects=agents,
        load_timeout_s=600.0,
    )
    talk = Conversations(environment.connect(tokenizer), tokenizer, calls).by(engine)
    about = ScoringRequest("products", "", "29842", {}, QUESTION)
    sampling = SamplingConfig(max_tokens=calls * (TOKENS + 20), num_samples=trajectories)
    talk.submit([Opening(0, [1], 0, about=about)], sampling)
    (generations,) = talk.collect([0], 0).values()
    environment.close()
    scores = talk.scores(generations.endings)
    # The first call of an agent also makes its connection.
    return [score.details[f"call_{number}"] for score in scores for number in range(1, calls)]


def direct_times(engine: Recorder) -> list[float]:
    """Return the time of each recorded request, sent to the engine directly, in milliseconds."""
    times, requests = [], engine.requests
    engine.requests = []
    for request, sampling in requests:
        start = time.perf_counter()
        engine.submit([request], sampling)
        engine.fetch(list(engine.collect([request.ticket], 0).values()))
        times.append(1000 * (time.perf_counter() - start))
    return times


def main() -> None:
    """Print the added time of a call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=16)
    parser.add_argument("--calls", type=int, default=12)
    parser.add_argument("--agents", type=int, default=16)
    arguments = parser.parse_args()
    tokenizer: Any = build_tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        save_tiny_policy(folder)
        engine = Recorder(folder)
        engine.connect(0, 1)
        through = median(times_of_agents(engine, tokenizer, arguments.trajectories, arguments.calls, agents=1))
        direct = median(direct_times(engine))
    print(
        f"{arguments.trajectories} trajectories of {arguments.calls} calls, one agent at a time: {through:.2f} ms a "
        f"call through the endpoint, {direct:.2f} ms by the engine directly, {through - direct:.2f} ms added (medians)"
    )
    instant: Any = InstantEngine(tokenizer.encode("29842<|end|>"))
    for agents in (1, arguments.agents):
        times = times_of_agents(instant, tokenizer, arguments.trajectories, arguments.calls, agents)
        print(f"an engine that answers at once, {agents} agents at a time: {median(times):.2f} ms a call (median)")


if __name__ == "__main__":
    main()
