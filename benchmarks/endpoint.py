"""Time that the endpoint for agents adds to a call of the policy.

`python -m benchmarks.endpoint [--trajectories 16] [--calls 12] [--agents 16]` samples with a tiny policy in this
process. Agents with the client of OpenAI run one after the other. The time of a call has three parts:

- engine: the engine samples the answer. The time of the engine directly called with the same prompts is printed, too.
- client: the same call takes this time with a server of a few lines that answers at once. The client walks through all
  messages of a call.
- endpoint: the rest.

Further measurements have an engine that answers at once, with one agent and with several agents at a time. CPU times
depend less on other work on the machine than times do.
"""

from __future__ import annotations

import argparse
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from statistics import mean, median
from typing import Any, NamedTuple

import openai
from typing_extensions import override

from benchmarks.tool_turns import InstantEngine
from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.environments.agent import AgentEnvironment
from rl_plugins.environments.endpoint import listening_on
from rl_plugins.models.tiny import build_tokenizer, save_tiny_policy
from rl_plugins.rewards.conversations import Conversations, Opening
from rl_plugins.rewards.records import ScoringRequest
from rl_plugins.rollout.engine import GroupRequest
from rl_plugins.rollout.transformers_engine import TransformersRollout

TOKENS = 8
ANSWER = "29842"
QUESTION: list[Any] = [{"role": "user", "content": "347*86"}]
_LENGTH = b"content-length:"


class CallTimes(NamedTuple):
    """Times of each call but the first of each agent, in milliseconds.

    Attributes:
        call: time of the call.
        client: time of the same call with `bare_server`; 0 if not measured.
        client_cpu: CPU time of the agent in the call.
        server_cpu: CPU time of this process, divided by the number of all calls.
    """

    call: list[float]
    client: list[float]
    client_cpu: list[float]
    server_cpu: float


def ask(
    row: Mapping[str, Any], base_url: str, api_key: str, *, calls: int, answer: str, measures_client: bool
) -> dict[str, float]:
    """Call the policy several times; return the times of each call, in milliseconds.

    Args:
        row: row of the data.
        base_url: address of the policy.
        api_key: key of the trajectory.
        calls: number of calls.
        answer: body of the answer of `bare_server`.
        measures_client: make each call with `bare_server`, too.
    """
    messages, times = [*row["prompt"]], {"score": 1.0}
    with (
        bare_server(answer.encode()) as bare_url,
        openai.OpenAI(base_url=bare_url, api_key=api_key) as alone,
        openai.OpenAI(base_url=base_url, api_key=api_key) as client,
    ):
        for number in range(calls):
            options: dict[str, Any] = {"model": "policy", "messages": messages, "max_tokens": TOKENS}
            if measures_client:
                start = time.perf_counter()
                alone.chat.completions.create(**options)
                times[f"client_{number}"] = 1000 * (time.perf_counter() - start)
            start, start_cpu = time.perf_counter(), time.process_time()
            content = client.chat.completions.create(**options).choices[0].message.content
            times[f"call_{number}"] = 1000 * (time.perf_counter() - start)
            times[f"cpu_{number}"] = 1000 * (time.process_time() - start_cpu)
            messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "more"}]
    return times


@contextmanager
def bare_server(body: bytes) -> Iterator[str]:
    """Start a process that answers each call of one client with the same body, and give its address."""
    with listening_on("127.0.0.1") as listening:
        process = get_context("fork").Process(target=_answer_calls, args=(listening, body), daemon=True)
        process.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        finally:
            process.kill()
            process.join()


def _answer_calls(listening: socket.socket, body: bytes) -> None:
    answer = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    # A client makes a new connection after some seconds without a call.
    while True:
        connection, _ = listening.accept()
        received = b""
        with connection:
            while part := connection.recv(2**20):
                received += part
                head, end, rest = received.partition(b"\r\n\r\n")
                if end and len(rest) >= int(head.lower().partition(_LENGTH)[2].split()[0]):
                    received = b""
                    connection.sendall(answer)


class Recorder(TransformersRollout):
    """An engine that keeps its requests, and the time of each request in milliseconds."""

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self.requests: list[tuple[GroupRequest, SamplingConfig]] = []
        self.times: list[float] = []

    @override
    def submit(self, requests: Sequence[GroupRequest], sampling: SamplingConfig, *, together: bool = True) -> None:
        self.requests += [(request, sampling) for request in requests]
        start = time.perf_counter()
        super().submit(requests, sampling, together=together)
        self.times += [1000 * (time.perf_counter() - start) for _ in requests]


def times_of_agents(engine: Any, tokenizer: Any, trajectories: int, calls: int, agents: int) -> CallTimes:
    """Run agents, and return the times of their calls. With one agent at a time, the client is measured, too."""
    environment = AgentEnvironment(
        {
            "_target_": "benchmarks.endpoint.ask",
            "calls": calls,
            "answer": _body_of_an_answer(),
            "measures_client": agents == 1,
        },
        max_turns=calls,
        max_objects=agents,
        load_timeout_s=600.0,
    )
    talk = Conversations(environment.connect(tokenizer), tokenizer, calls).by(engine)
    about = ScoringRequest("products", "", ANSWER, {}, QUESTION)
    sampling = SamplingConfig(max_tokens=calls * (TOKENS + 20), num_samples=trajectories)
    start_cpu = time.process_time()
    talk.submit([Opening(0, [1], 0, about=about)], sampling)
    (generations,) = talk.collect([0], 0).values()
    server_cpu = 1000 * (time.process_time() - start_cpu) / (trajectories * calls)
    environment.close()
    scores = talk.scores(generations.endings)
    # The first call of an agent also makes its connection.
    call, client, cpu = (
        [score.details.get(f"{name}_{number}", 0.0) for score in scores for number in range(1, calls)]
        for name in ("call", "client", "cpu")
    )
    return CallTimes(call, client, cpu, server_cpu)


def _body_of_an_answer() -> str:
    """Return the body of an answer of the endpoint."""
    from rl_plugins.rollout.chat import ChatAnswer, ChatCall
    from rl_plugins.rollout.vllm.chat_protocol import completion

    call = ChatCall(
        messages=QUESTION,
        tools=[],
        may_call=False,
        one_call=False,
        max_tokens=TOKENS,
        logprobs=False,
        stream=False,
        stream_usage=False,
        model="policy",
    )
    tokens = list(range(TOKENS))
    return completion(call, [ChatAnswer(ANSWER, [], "stop", tokens, tokens, [], [])]).decode()


def direct_times(engine: Recorder) -> list[float]:
    """Return the time of each recorded request, sent to the engine directly, in milliseconds."""
    requests, engine.requests, engine.times = engine.requests, [], []
    for request, sampling in requests:
        engine.submit([request], sampling)
        engine.fetch(list(engine.collect([request.ticket], 0).values()))
    return engine.times


def main() -> None:
    """Print the added time of a call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=16)
    parser.add_argument("--calls", type=int, default=12)
    parser.add_argument("--agents", type=int, default=16)
    arguments = parser.parse_args()
    trajectories, calls = arguments.trajectories, arguments.calls
    tokenizer: Any = build_tokenizer()
    print(f"{trajectories} trajectories of {calls} calls; medians in ms a call, and means of CPU time in ms a call")
    with tempfile.TemporaryDirectory() as folder:
        save_tiny_policy(folder)
        engine = Recorder(folder)
        engine.connect(0, 1)
        times = times_of_agents(engine, tokenizer, trajectories, calls, agents=1)
        # One agent runs after the other, so the requests have the order of the calls.
        sampled = [time for place, time in enumerate(engine.times) if place % calls]
        direct = median(direct_times(engine))
    _print_row("tiny policy, 1 agent", times, sampled)
    print(f"the engine, directly called with the same prompts: {direct:.2f}")
    instant: Any = InstantEngine(tokenizer.encode(f"{ANSWER}<|end|>"))
    for agents in (1, arguments.agents):
        times = times_of_agents(instant, tokenizer, trajectories, calls, agents)
        _print_row(f"answer at once, agents at a time: {agents}", times, [0.0] * len(times.call))


def _print_row(name: str, times: CallTimes, engine: Sequence[float]) -> None:
    parts = f"call {median(times.call):.2f}"
    if any(times.client):
        endpoint = [
            call - client - sampled for call, client, sampled in zip(times.call, times.client, engine, strict=True)
        ]
        parts += f", engine {median(engine):.2f}, client {median(times.client):.2f}, endpoint {median(endpoint):.2f}"
    print(f"{name}: {parts}; CPU of the agent {mean(times.client_cpu):.2f}, of this process {times.server_cpu:.2f}")


if __name__ == "__main__":
    main()
