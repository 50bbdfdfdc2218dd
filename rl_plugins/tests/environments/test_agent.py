"""AgentEnvironment: tokens, continued calls, refused calls, failures by kind, and training on the tokens of agents."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pyarrow.parquet as pq
import pytest
from typing_extensions import override

pytest.importorskip("vllm")

import rl_plugins.rollout.vllm.chat_protocol
import rl_plugins.rollout.vllm.tool_parser  # noqa: F401
from rl_plugins.commands.main import main
from rl_plugins.config.models import OptimizerConfig
from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.data.experience import Experience
from rl_plugins.environments.agent import AgentEnvironment
from rl_plugins.environments.endpoint import Received
from rl_plugins.errors import ConfigError, RewardError
from rl_plugins.models.tiny import build_model, build_tokenizer, save_tiny_policy
from rl_plugins.rewards.conversations import Conversations, Opening
from rl_plugins.rewards.records import ScoringRequest
from rl_plugins.rewards.trajectory import Ending
from rl_plugins.rollout.engine import Generations, GroupRequest
from rl_plugins.rollout.transformers_engine import TransformersRollout
from rl_plugins.stages.policy_optimization import PolicyOptimization
from rl_plugins.stages.sequence_rows import SequenceRows, most_sequences
from rl_plugins.stages.turns import add_turns, sequences
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.tests.commands.test_generate import generate_command, write_recipe
from rl_plugins.tests.patience import patient, wait_until
from rl_plugins.tests.stages import canned
from rl_plugins.tests.stages.test_scheduled_sampler import Loader

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
    limits = {"max_turns": 3, "deadline_s": patient(30), "max_prompt_tokens": 60, **options}
    return AgentEnvironment({"_target_": f"{HERE}.{name}"}, **limits)


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


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["add_with_tool", "add_with_items", "add_with_previous_response"])
def test_tokens_of_the_engine_are_the_tokens_of_the_training_sequence(name: str, stream: bool) -> None:
    start = "<|system|>add(a,b)<|user|>2+3<|assistant|>"
    # The policy spells the mark of a call in letters, so its text would become other tokens.
    spelled = [*tokenizer.encode("I add.<tool_c"), *tokenizer.encode("all>"), *tokenizer.encode(CALL)]
    text = tokenizer.decode(spelled)
    assert tokenizer.encode(text) != spelled
    said = {start: spelled, f"{start}{text}<|tool|>5<|assistant|>": tokenizer.encode("5<|end|>")}
    with closing(agent(name)) as environment:
        (generations,) = run(environment, said, prompt=[{"role": "user", "content": "2+3"}], stream=stream)
    ending: Ending = generations.endings[0]
    assert ending.score.failure is None, ending.score.message
    (response,), (mask,) = generations.responses(), generations.response_masks() or []
    between, last = tokenizer.encode("<|tool|>5<|assistant|>"), tokenizer.encode("5<|end|>")
    assert response == [*spelled, *between, *last]
    assert mask == [1] * len(spelled) + [0] * len(between) + [1] * len(last)
    assert generations.response_versions() == [[1] * (len(spelled) + len(between)) + [2] * len(last)]
    (log_probs,) = generations.response_log_probs()
    assert log_probs == [-float(len(spelled))] * len(spelled) + [0.0] * len(between) + [-2.0] * 2
    assert tokenizer.decode(list(ending.prompt_ids)) == start and ending.turns == 2
    assert (ending.score.value, ending.score.details["turns"], ending.score.details["agent/calls"]) == (5.0, 2.0, 2.0)
    assert ending.transcript() == f"{text.removesuffix('<|end|>')}\n[tool] 5\n[assistant] 5"


def test_calls_beside_the_rules_are_refused_with_the_reason_and_counted() -> None:
    with closing(agent("break_rules", max_sequences=1)) as environment:
        (generations,) = run(environment, {ASKED: tokenizer.encode("nonono<|end|>")}, max_tokens=60)
    (score,) = [ending.score for ending in generations.endings]
    assert score.value == 1.0, score.message
    # Two answered calls, and a repetition that is no call of its own.
    assert score.details["agent/calls"] - score.details["agent/refused"] == 3
    assert (score.details["agent/refused"], score.details["agent/not_continued"]) == (18.0, 5.0)
    text = "no<|end|><|user|>sure?<|assistant|>5<|end|><|user|>sure?<|assistant|>5<|end|>"
    assert tokenizer.decode(generations.responses()[0]) == text


def test_calls_of_the_responses_api_beside_the_rules_are_refused_with_the_reason() -> None:
    asked = "<|system|>Be brief.<|user|>ask<|assistant|>"
    with closing(agent("break_rules_of_responses")) as environment:
        (generations,) = run(environment, {asked: tokenizer.encode("no<|end|>")})
    (score,) = [ending.score for ending in generations.endings]
    assert score.value == 1.0, score.message
    assert (score.details["agent/refused"], tokenizer.decode(generations.responses()[0])) == (11.0, "n")


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


def test_call_that_continues_no_call_begins_a_sequence_with_tokens_of_the_engine() -> None:
    short = "<|user|>ask<|user|>in short<|assistant|>"
    more, other = "<|user|>more<|assistant|>", "<|user|>other<|assistant|>"
    # Each text of the policy, by the prompt of the engine: the tokens of one sequence alone.
    said = {
        ASKED: "a<|end|>", other: "bb<|end|>", f"{ASKED}a<|end|>{more}": "c<|end|>", short: "d<|end|>",
        f"{other}bb<|end|>{more}": "eee<|end|>",
    }  # fmt: skip
    with closing(agent("delegate", max_turns=5)) as environment:
        (generations,) = run(environment, {prompt: tokenizer.encode(text) for prompt, text in said.items()})
    (ending,) = generations.endings
    assert ending.score.value == 4.0, ending.score.message
    (ids,), (mask,) = generations.responses(), generations.response_masks() or []
    parts = ["a<|end|>", other, "bb<|end|>", more, "c<|end|>", short, "d<|end|>", more, "eee<|end|>"]
    assert tokenizer.decode(ids) == "".join(parts)
    assert [int(one) for one in mask] == [int(part in said.values()) for part in parts for _ in tokenizer.encode(part)]
    lengths = [len(tokenizer.encode(part)) for part in parts]
    begins = [sum(lengths[:place]) for place in range(len(parts))]
    assert ending.sequence_changes == ((begins[1], 1), (begins[3], 0), (begins[5], 2), (begins[7], 1))
    assert ending.score.details["agent/sequences"] == 3 and ending.turns == 5


@pytest.mark.parametrize("stream", [False, True])
def test_choices_of_a_call_are_sequences_with_tokens_of_the_engine(stream: bool) -> None:
    more = "<|user|>more<|assistant|>"
    first, second = ("a<|end|>", "bb<|end|>", "b<|end|>"), ("5<|end|>", "77<|end|>")
    said = {ASKED: list(map(tokenizer.encode, first)), f"{ASKED}bb<|end|>{more}": list(map(tokenizer.encode, second))}
    with closing(agent("choose", max_turns=6, max_sequences=4)) as environment:
        (generations,) = run(environment, said, stream=stream)
    (ending,) = generations.endings
    assert ending.score.failure is None, ending.score.message
    (ids,), (mask,) = generations.responses(), generations.response_masks() or []
    # Choices but the first begin with all tokens before the choice, and the agent goes on with the second.
    parts = [
        first[0],
        ASKED,
        first[1],
        ASKED,
        first[2],
        more,
        second[0],
        f"{ASKED}bb<|end|>{more}",
        second[1],
        more,
        first[0],
    ]
    parts[-1] = "5<|end|>"
    assert tokenizer.decode(ids) == "".join(parts)
    sampled = {0, 2, 4, 6, 8, 10}
    assert mask == [float(place in sampled) for place, part in enumerate(parts) for _ in tokenizer.encode(part)]
    lengths = [len(tokenizer.encode(part)) for part in parts]
    begins = [sum(lengths[:place]) for place in range(len(parts))]
    assert ending.sequence_changes == ((begins[1], 1), (begins[3], 2), (begins[5], 1), (begins[7], 3), (begins[9], 0))
    assert (ending.turns, ending.score.details["agent/sequences"], ending.score.details["agent/calls"]) == (6, 4, 3)
    # The agent rewards each token by its id, as the endpoint has sent the ids.
    taught = [token for token, learned in zip(ids, mask, strict=True) if learned]
    assert ending.score.token_rewards is not None and list(ending.score.token_rewards) == taught
    (log_probs,) = generations.response_log_probs()
    assert {log_prob for log_prob, learned in zip(log_probs, mask, strict=True) if learned} == {-2.0, -3.0}
    samples = Experience.from_responses([list(ending.prompt_ids)], [ids], 0, response_masks=[mask])
    samples.set_column("ending", [ending])
    samples.sequences = sequences(samples)
    rows = SequenceRows.of(samples).samples
    seen = [tokenizer.decode(row[kept]) for row, kept in zip(rows.input_ids, rows.attention_mask, strict=True)]
    assert seen == [
        f"{ASKED}a<|end|>{more}5<|end|>",
        f"{ASKED}bb<|end|>{more}5<|end|>",
        f"{ASKED}b<|end|>",
        f"{ASKED}bb<|end|>{more}77<|end|>",
    ]
    # The choices of a call begin in the same state.
    add_turns(samples)
    states = [samples.states[0, end] for end in ending.turn_ends] if samples.states is not None else []
    assert states[0] == states[1] == states[2] != states[3] == states[4]


def test_choices_beyond_the_limits_are_refused_with_the_option() -> None:
    with closing(agent("ask_too_much", max_turns=4, max_sequences=3)) as environment:
        (generations,) = run(environment, {ASKED: tokenizer.encode("5<|end|>")}, max_tokens=40)
    score = generations.endings[0].score
    assert score.value == 1.0, score.message
    assert (score.details["agent/refused"], generations.endings[0].turns) == (5.0, 3)


@pytest.mark.parametrize("with_tools", [False, True])
def test_stream_comes_while_the_engine_samples_and_has_engine_tokens(with_tools: bool, tmp_path: Path) -> None:
    start = "<|system|>add(a,b)<|user|>ask<|assistant|>" if with_tools else ASKED
    call = f"<tool_call>{CALL}" if with_tools else "<|end|>"
    # The last letter has two tokens.
    choices = [tokenizer.encode(f"I add <tooé.{call}"), tokenizer.encode("no<|end|>")]
    engine = Reporting({start: choices}, tmp_path / "heard")
    heard = str(engine.goes_on)
    with closing(agent("listen", max_turns=2)) as environment:
        (generations,) = run(environment, {}, engine=engine, tools=with_tools, heard=heard)
    (ending,) = generations.endings
    assert ending.score.failure is None, ending.score.message
    # A possible beginning of a call waits for further letters, and a call comes at the end.
    assert ending.score.details["events"] > 8 and engine.reports >= len(choices[0])
    (ids,), (mask,) = generations.responses(), generations.response_masks() or []
    copied = tokenizer.encode(start)
    assert ids == [*choices[0], *copied, *choices[1]]
    assert mask == [1.0] * len(choices[0]) + [0.0] * len(copied) + [1.0] * len(choices[1])
    assert list(ending.score.token_rewards or ()) == [*choices[0], *choices[1]]


class Forgetful(Reporting):
    """A rollout engine with wrong tokens in its reports, as after the loss of an engine."""

    @override
    def tokens_so_far(self, tickets: Sequence[int]) -> dict[int, list[list[int]]]:
        found = super().tokens_so_far(tickets)
        return {ticket: [tokenizer.encode("x")] * len(responses) for ticket, responses in found.items()}


def test_stream_of_another_text_than_the_answer_ends_with_an_error(tmp_path: Path) -> None:
    (tmp_path / "heard").touch()
    engine = Forgetful({ASKED: tokenizer.encode("abc<|end|>")}, tmp_path / "heard")
    with closing(agent("listen_again", max_turns=2)) as environment:
        (generations,) = run(environment, {}, engine=engine)
    assert generations.endings[0].score.value == 1.0, generations.endings[0].score.message
    # The tokens of the first answer are those of the engine.
    assert tokenizer.decode(generations.responses()[0]) == f"abc<|end|>{ASKED}abc<|end|>"


def test_stream_of_a_trajectory_that_ends_ends_with_an_error(tmp_path: Path) -> None:
    from rl_plugins.environments.endpoint import Endpoint
    from rl_plugins.rollout.vllm.chat_protocol import error_body, models

    with closing(Endpoint("127.0.0.1", models(), error_body)) as endpoint:
        key, heard = endpoint.open(3), list[str]()

        def listen() -> None:
            with httpx.stream(
                "POST", f"{endpoint.base_url}/chat/completions", headers={"authorization": f"Bearer {key}"}, timeout=60
            ) as answer:
                for line in filter(None, answer.iter_lines()):
                    heard.append(line)
                    (tmp_path / "heard").touch()

        listener = threading.Thread(target=listen)
        listener.start()
        calls: list[Received] = []

        def has_call() -> bool:
            calls.extend(endpoint.take())
            return bool(calls)

        wait_until(has_call, "the call")
        endpoint.send(calls[0], b"data: 1\n\n")
        wait_until((tmp_path / "heard").exists, "the first event")
        endpoint.end(3)
        listener.join(patient(60))
        endpoint.send(calls[0], b"data: 2\n\n")
    assert heard[0] == "data: 1" and len(heard) == 2 and "trajectory 3 has ended" in heard[1]


def test_agents_that_fail_lose_one_trajectory_each_and_are_counted_by_kind() -> None:
    kinds = {
        "silent": "raised", "die": "died", "raise": "raised", "nothing": "raised", "nan": "not_finite",
        "text": "raised", "": None,
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


def test_call_after_the_end_of_a_trajectory_gets_a_clear_error() -> None:
    import openai

    from rl_plugins.environments.endpoint import Endpoint
    from rl_plugins.rollout.vllm.chat_protocol import error_body, models

    with closing(Endpoint("127.0.0.1", models(), error_body)) as endpoint:
        client = openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.open(3), max_retries=0)
        assert [model.id for model in client.models.list()] == ["policy"]
        endpoint.end(3)
        with pytest.raises(openai.APIStatusError, match="trajectory 3 has ended: an agent makes no call") as ended:
            client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "x"}])
        client.close()
    assert ended.value.status_code == 410


def test_empty_answer_that_a_client_sends_as_null_is_continued() -> None:
    with closing(agent("talk")) as environment:
        (generations,) = run(environment, {ASKED: tokenizer.encode("<|end|>")})
    (ending,) = generations.endings
    assert (ending.score.value, ending.score.details["agent/sequences"]) == (2.0, 1.0), ending.score.message
    assert tokenizer.decode(generations.responses()[0]) == "<|end|><|user|>more<|assistant|>5<|end|>"


def test_agent_of_a_class_is_made_once_and_called_for_each_trajectory() -> None:
    config = {"_target_": f"{HERE}.Talker", "turns": 1}
    with closing(AgentEnvironment(config, deadline_s=patient(30))) as environment:
        found = run(environment, {ASKED: tokenizer.encode("55<|end|>")}, ["", ""])
    assert [one.endings[0].score.value for one in found] == [3.0, 3.0]
    assert {one.endings[0].score.details["made_in"] for one in found} == {float(environment.host.pid)}


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
