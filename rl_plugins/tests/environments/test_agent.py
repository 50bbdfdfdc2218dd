"""Agents: refused calls, failures by kind, rewards, options, and training."""

from __future__ import annotations

import json
import shutil
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest

pytest.importorskip("vllm")

from rl_plugins.commands.main import main
from rl_plugins.config.models import OptimizerConfig
from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.environments.agent import AgentEnvironment
from rl_plugins.environments.agent_conversations import AgentConversations, _Answered, _Tools, _TrajectoryState
from rl_plugins.environments.endpoint import CALLS, HttpAnswer, Received
from rl_plugins.environments.object_host import ObjectHost
from rl_plugins.errors import ConfigError, RewardError
from rl_plugins.models.tiny import build_model, build_tokenizer, save_tiny_policy
from rl_plugins.rewards.records import ScoringRequest
from rl_plugins.rewards.trajectory import Turn
from rl_plugins.rollout.tool_calls import ParsedResponse
from rl_plugins.rollout.transformers_engine import TransformersRollout
from rl_plugins.rollout.vllm.call_formats import FORMATS
from rl_plugins.stages.micro_batches import most_sequences
from rl_plugins.stages.policy_optimization import PolicyOptimization
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.tests.commands.test_generate import generate_command, write_recipe
from rl_plugins.tests.environments.agent_runs import ASK, ASKED, HERE, agent, run, tokenizer
from rl_plugins.tests.environments.sample_agents import ADD
from rl_plugins.tests.patience import kept_by, patient
from rl_plugins.tests.stages import canned
from rl_plugins.tests.stages.test_scheduled_sampler import Loader


def test_calls_beside_the_rules_are_refused_with_the_reason_and_counted() -> None:
    with closing(agent("break_rules", max_sequences=1)) as environment:
        (generations,) = run(environment, {ASKED: tokenizer.encode("nonono<|end|>")}, max_tokens=60)
    (score,) = [ending.score for ending in generations.endings]
    assert score.value == 1.0, score.message
    # Two answered calls, and a repetition that is no call of its own.
    assert score.details["agent/calls"] - score.details["agent/refused"] == 3
    assert (score.details["agent/refused"], score.details["agent/not_continued"]) == (20.0, 5.0)
    text = "no<|end|><|user|>sure?<|assistant|>5<|end|><|user|>sure?<|assistant|>5<|end|>"
    assert tokenizer.decode(generations.responses()[0]) == text


def test_each_repetition_of_equal_calls_takes_the_place_or_the_answer_of_another_call() -> None:
    def calls(retries: int) -> list[Received]:
        return [Received(0, CALLS[0], b"{}", retries) for _ in range(3)]

    answers: list[tuple[Received, HttpAnswer]] = []
    endpoint: Any = SimpleNamespace(answer=lambda *answer: answers.append(answer))
    limits: Any = SimpleNamespace(max_failure_rate=1.0)
    host: Any = None
    talk = AgentConversations(host, endpoint, tokenizer, limits)
    running, *waiting = calls(0)
    state = _TrajectoryState(received=running, is_sampling=True, waiting=deque(waiting))
    first, *others = calls(1)
    for call in (first, *others):
        talk._receive(0, state, call)
    assert state.received is first and list(state.waiting) == others

    state = _TrajectoryState(received=Received(0, CALLS[0], b"[]", 0), is_sampling=True)
    sent = [HttpAnswer(200, "", str(place).encode()) for place in range(3)]
    answered = zip(calls(0), sent, strict=True)
    state.sequences = [_Answered([], [], [], 0, received=call, sent=answer) for call, answer in answered]
    repeated = calls(1)
    for call in repeated:
        talk._receive(0, state, call)
    assert answers == list(zip(repeated, sent, strict=True)) and not state.waiting


class SpacedParser:
    """Parser of calls: strips the text before a call, and adds the text behind."""

    def parsed(self, response: Sequence[int], before: Sequence[int]) -> ParsedResponse:
        first, _, rest = tokenizer.decode(response).partition("<tool_call>")
        _, _, last = rest.partition("</tool_call>")
        return ParsedResponse(first.strip() + last, [("add", '{"a": 2, "b": 3}')])

    def text_before_calls(self, response: Sequence[int], before: Sequence[int]) -> str:
        text: str = tokenizer.decode(response)
        return text.partition("<tool_call>")[0]


@pytest.mark.parametrize(
    ("streamed", "response", "heard"),
    [
        ("\nLet me check.\n", "\nLet me check.\n<tool_call></tool_call>", "\nLet me check.\n"),
        ("I add.\n", "I add.\n<tool_call></tool_call>Done.", "I add.\n"),
        ("I add.", "I add.<tool_call></tool_call>Done.", "I add.Done."),
        ("\nLet me", "\nLet me check.\n<tool_call></tool_call>", "\nLet me"),
        # Another response, after the loss of an engine.
        ("\nLet me check.\n", "I add.<tool_call></tool_call>", None),
        ("I add.\n", "I add<tool_call></tool_call>", None),
    ],
    ids=["stripped", "text behind", "text behind at once", "part", "another response", "shorter response"],
)
def test_streamed_answer_with_a_call_ends_well_unless_the_response_is_another(
    streamed: str, response: str, heard: str | None
) -> None:
    events: list[bytes] = []
    refused: list[int] = []
    endpoint: Any = SimpleNamespace(
        send=lambda _, part: events.append(part),
        answer=lambda _, answer: events.append(answer.body),
        refuse=lambda *_, status: refused.append(status),
    )
    limits: Any = SimpleNamespace(max_failure_rate=1.0)
    host: Any = None
    talk = AgentConversations(host, endpoint, tokenizer, limits)
    body = json.dumps({"model": "m", "messages": ASK, "tools": [ADD], "stream": True}).encode()
    call = FORMATS[CALLS[0]].read(body)
    following: Any = None
    parser: Any = SpacedParser()
    talk._tools[json.dumps(call.tools)] = _Tools(parser, {}, following)
    received, sent = Received(0, CALLS[0], body, 0), FORMATS[CALLS[0]].events(call)
    talk._states[0] = state = _TrajectoryState(received=received, call=call, events=sent, is_sampling=True)
    talk.take_tokens(0, [tokenizer.encode(streamed)])
    ids = tokenizer.encode(response)
    talk._answer(state, Turn(ScoringRequest("s", response, None, {}), [*tokenizer.encode(ASKED), *ids], len(ids)))
    if heard is None:
        assert refused == [503]
        return
    assert refused == []
    lines = b"".join(events).decode().split("\n\n")[:-2]
    deltas = [choice["delta"] for line in lines for choice in json.loads(line.removeprefix("data: "))["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == heard
    assert [use["function"]["name"] for delta in deltas for use in delta.get("tool_calls", ())] == ["add"]
    # The agent continues the answer as sent.
    assert state.sequences[0].messages[-1]["content"] == heard


def test_wait_of_a_refused_call_is_not_time_of_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call may wait while the workers train."""
    went_on: list[int] = []
    go_on = ObjectHost.go_on

    def noting(host: ObjectHost, key: int) -> None:
        went_on.append(key)
        go_on(host, key)

    monkeypatch.setattr(ObjectHost, "go_on", noting)
    with closing(agent("ask_too_much", max_turns=4, max_sequences=3)) as environment:
        (generations,) = run(environment, {ASKED: tokenizer.encode("5<|end|>")}, max_tokens=40)
    details = generations.endings[0].score.details
    assert len(went_on) == details["agent/calls"] > details["agent/refused"] > 0


def test_calls_of_the_responses_api_beside_the_rules_are_refused_with_the_reason() -> None:
    asked = "<|system|>Be brief.<|user|>ask<|assistant|>"
    with closing(agent("break_rules_of_responses")) as environment:
        (generations,) = run(environment, {asked: tokenizer.encode("no<|end|>")})
    (score,) = [ending.score for ending in generations.endings]
    assert score.value == 1.0, score.message
    assert (score.details["agent/refused"], tokenizer.decode(generations.responses()[0])) == (12.0, "n")


def test_calls_at_once_and_calls_of_programs_belong_to_the_trajectory() -> None:
    texts = {"call_twice_at_once": f"5<|end|>{ASKED}5<|end|>", "ask_in_program": "5<|end|>"}
    for name, text in texts.items():
        with closing(agent(name)) as environment:
            (generations,) = run(environment, {})
        score = generations.endings[0].score
        assert score.value == 5.0 * (turns := text.count("5")), score.message
        assert score.details["agent/sequences"] == turns and score.details["agent/refused"] == 0
        assert tokenizer.decode(generations.responses()[0]) == text


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_shell_script_with_curl_is_an_agent() -> None:
    with closing(agent("ask_in_script", endpoint_host="127.0.0.2")) as environment:
        (generations,) = run(environment, {ASKED: tokenizer.encode("a<|end|>")})
    score = generations.endings[0].score
    assert score.value == 5.0, score.message
    assert (score.details["agent/calls"], score.details["agent/sequences"]) == (2.0, 1.0)
    assert tokenizer.decode(generations.responses()[0]) == "a<|end|><|user|>more<|assistant|>5<|end|>"


def test_agents_that_fail_lose_one_trajectory_each_and_are_counted_by_kind() -> None:
    kinds = {
        "silent": "raised", "die": "died", "raise": "raised", "cancel": "raised", "nothing": "raised",
        "nan": "not_finite", "text": "raised", "": None,
    }  # fmt: skip
    with closing(agent("obey", max_failure_rate=0.9, max_objects=4)) as environment:
        groups = run(environment, {}, list(kinds))
        assert environment.host.most <= 4
    scores = dict(zip(kinds, [group.endings[0].score for group in groups], strict=True))
    assert {act: score.failure for act, score in scores.items()} == kinds
    assert {score.value for score in scores.values()} == {None, 0.5}
    assert f"{HERE}.obey: the agent returned a reward without an answer of the policy" in scores["silent"].message
    assert "the agent returned no reward" in scores["nothing"].message
    assert "ValueError: no such act" in scores["raise"].message
    assert {act: score.details["agent/without_call"] for act, score in scores.items()} == {
        act: float(act == "silent") for act in kinds
    }
    assert groups[0].responses() == [[]] and groups[1].responses() == [tokenizer.encode("5<|end|>")]
    with (
        closing(agent("obey", deadline_s=0.5)) as environment,
        pytest.raises(
            RewardError, match=r"1 of 1 rewards failed.*timeout.*gave no reward within 0.5 s of its own time"
        ),
    ):
        run(environment, {}, ["hang"])


def test_agent_rewards_the_tokens_of_all_answers() -> None:
    with closing(agent("reward_tokens", max_failure_rate=0.5)) as environment:
        good, short = run(environment, {ASKED: tokenizer.encode("abc<|end|>")}, ["", "short"])
    score = good.endings[0].score
    # The second answer is `5`.
    assert (score.value, tuple(score.token_rewards or ())) == (21.0, (1.0, 2.0, 3.0, 4.0, 5.0, 6.0))
    assert good.endings[0].turn_rewards == (10.0, 11.0) and score.details["answers"] == 2.0
    failure = short.endings[0].score
    assert failure.failure == "raised" and "'token_rewards' has 5 numbers for 6 sampled tokens" in failure.message
    assert failure.details["agent/calls"] == 2.0


def test_agent_of_a_class_is_made_once_and_called_for_each_trajectory() -> None:
    config = {"_target_": f"{HERE}.Talker", "turns": 1}
    with closing(AgentEnvironment(config, deadline_s=patient(30))) as environment:
        found = run(environment, {ASKED: tokenizer.encode("55<|end|>")}, ["", ""])
        loader = kept_by(environment.host.pid).pid
    assert [one.endings[0].score.value for one in found] == [3.0, 3.0]
    assert {one.endings[0].score.details["made_in"] for one in found} == {float(loader)}


@pytest.mark.parametrize(
    ("name", "packing"), [("talk", True), ("delegate", True), ("delegate", False), ("choose", True), ("choose", False)]
)
def test_policy_learns_from_the_rewards_of_agents(name: str, packing: bool, tmp_path: Any) -> None:
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "initializer_range": 0.2}
    save_tiny_policy(tmp_path, **sizes)
    environment = agent(name, max_turns=6)
    stage = canned.Keeping(
        build_model(**sizes),
        tokenizer=canned.tokenizer,
        # An untrained policy ends few responses.
        sampling=SamplingConfig(max_tokens=160, num_samples=3, stop_token_ids=tuple(range(60, 200))),
        environment=environment,
        optimizer=OptimizerConfig(lr=0.01),
        packing=packing,
        max_steps=1,
    )
    strategy = SingleDeviceRolloutStrategy(rollout=TransformersRollout(str(tmp_path)))
    canned.quiet_trainer(strategy).fit(stage, Loader(["1+1", "12+30"]))
    environment.close()
    (samples,), (metrics,) = stage.trained_on, stage.metrics
    # The trainer gives each token the log-prob from its sampling.
    assert metrics["train/rollout_gap_max"] < 1e-4 and metrics["train/turns"] > 1
    # Three calls of `choose` have six choices.
    answers = metrics["train/turns"] / (2 if name == "choose" else 1)
    assert metrics["train/agent/calls"] >= answers and metrics["train/agent/seconds"] > 0
    assert metrics["train/agent/refused"] == metrics["train/reward_raised"] == 0
    assert (samples.response_mask.sum(dim=1) < samples.response_lengths).any()
    assert metrics["train/agent/sequences"] == most_sequences(samples) == {"talk": 1, "delegate": 3, "choose": 4}[name]


@pytest.mark.extended
def test_generate_lets_an_agent_converse_about_each_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tmp_path, environment={"agent": f"{HERE}.talk", "max_turns": 2, "max_objects": 4})
    command = generate_command(tmp_path, recipe)
    assert main([*command, str(tmp_path / "a.parquet")]) == 0, capsys.readouterr().err
    rows = pq.read_table(tmp_path / "a.parquet").to_pylist()
    for row in rows:
        for place, text in enumerate(row["conversations"]):
            said = [message["content"] for message in json.loads(text) if message["role"] == "assistant"]
            assert (row["turns"][place], row["answers"][place], row["failures"][place]) == (2, said[-1], None)
            assert row["scores"][place] == 1.0 + sum(map(len, said))
    assert main(["evaluate", str(tmp_path / "a.parquet")]) == 0, capsys.readouterr().err
    (measures,) = json.loads((tmp_path / "a.evaluation.json").read_text())["measures"].values()
    assert measures["mean@3"]["value"] == pytest.approx(sum(sum(row["scores"]) for row in rows) / 12)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_turns": 0}, "max_turns=0: must be at least 1"),
        ({"deadline_s": 0.0}, "deadline_s=0.0: must be above 0"),
        ({"pass_env": ["NO_SUCH_KEY"]}, "pass_env=[NO_SUCH_KEY]"),
        ({"endpoint_host": "0.0.0.0"}, "endpoint_host=0.0.0.0: agents need one address"),
        ({"endpoint_host": "home"}, "endpoint_host=home: is no address"),
        ({"agent": f"{HERE}.tlak"}, "did you mean 'talk'"),
        ({"agent": 3}, "agent: a value of type int is no function"),
        ({"agent": f"{HERE}.Solver"}, "Solver': the class has no method __call__"),
        ({"agent": {"_target_": f"{HERE}.Talker", "size": 3}}, "the options do not fit its constructor"),
        ({"agent": {"_target_": f"{HERE}.Talker", "turns": 0}}, "its constructor failed: ValueError: no turns"),
        ({"agent": f"{HERE}.other_arguments"}, "takes other arguments (too many positional arguments): write"),
        ({"agent": {"_target_": f"{HERE}.talk", "size": 3}}, "takes other arguments (got an unexpected keyword"),
    ],
)
def test_agent_refuses_bad_options_in_one_line(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        AgentEnvironment(**{"agent": f"{HERE}.talk", **options})
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_connect_refuses_a_tokenizer_without_a_template_and_an_unknown_parser() -> None:
    plain: Any = build_tokenizer()
    plain.chat_template = None
    for name, of, said in (("hermes", plain, "no chat template"), ("herms", tokenizer, "did you mean hermes")):
        with closing(agent("talk", parser=name)) as environment, pytest.raises(ConfigError, match=said):
            environment.connect(of)
    with closing(agent("talk")) as environment:
        options: dict[str, Any] = {"tokenizer": tokenizer, "sampling": SamplingConfig(max_tokens=8), "max_steps": 1}
        with pytest.raises(ConfigError, match="an agent returns the reward of its trajectory: leave scorer out"):
            PolicyOptimization(build_model(), scorer=len, environment=environment, **options)
