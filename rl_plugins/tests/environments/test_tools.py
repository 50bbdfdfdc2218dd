"""ToolEnvironment: tokens, masks, messages to the policy, counts, and bad input."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from rl_plugins.config.models import OptimizerConfig
from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.data.prompts import PromptBatch
from rl_plugins.environments.tools import _MOST_CALLS, KINDS, ToolEnvironment
from rl_plugins.errors import ConfigError, EngineLost
from rl_plugins.models.tiny import TOOL_CHAT_TEMPLATE, build_model, build_tokenizer, save_tiny_policy
from rl_plugins.rewards.conversations import Conversations, Opening
from rl_plugins.rewards.inline import InlineScorer
from rl_plugins.rewards.records import ScoringRequest
from rl_plugins.rollout.engine import Generations
from rl_plugins.rollout.tool_calls import read_call
from rl_plugins.rollout.transformers_engine import TransformersRollout
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.tests.environments import sample_tools
from rl_plugins.tests.loops import for_each
from rl_plugins.tests.patience import patient, wait_until
from rl_plugins.tests.rewards.test_conversations import Scripted
from rl_plugins.tests.stages import canned
from rl_plugins.tests.stages.test_scheduled_sampler import Loader

tokenizer: Any = build_tokenizer(tools=True)
PROMPT = "<|system|>add(a,b)wait_long(seconds)refuse()<|user|>2+3<|assistant|>"
OPENING = Opening(
    7,
    tokenizer.encode(PROMPT),
    5,
    about=ScoringRequest("s", "", None, {}, [{"role": "user", "content": "2+3"}]),
)
HERE = "rl_plugins.tests.environments.sample_tools"


def call(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


ADDING = call("add", '{"a": 2, "b": 3}') + "<|end|>"


class Speaker(Scripted):
    """A script in the vocabulary with tools. The response to a prompt without a line in the script is `5`."""

    def generate(self, prompts: list[list[int]], sampling: SamplingConfig, seeds: list[int] | None) -> Generations:
        (prompt,) = map(tokenizer.decode, prompts)
        self.prompts = [*getattr(self, "prompts", []), prompt]
        texts = self.said.get(prompt, ["5<|end|>"])[: sampling.num_samples]
        responses = [tokenizer.encode(text) for text in texts]
        reasons = ["stop" if text.endswith("<|end|>") else "length" for text in texts]
        return Generations.from_responses(responses, [[-1.0] * len(ids) for ids in responses], reasons, 3)


@pytest.fixture(scope="module")
def environment() -> Iterator[ToolEnvironment]:
    with closing(environment_of(deadline_s=patient(30))) as made:
        yield made


def environment_of(deadline_s: float) -> ToolEnvironment:
    tools = [f"{HERE}.{name}" for name in ("add", "wait_long", "refuse")]
    return ToolEnvironment(tools, parser=sample_tools.read_calls, max_turns=3, deadline_s=deadline_s)


def talk_with(environment: ToolEnvironment, engine: Speaker) -> Conversations:
    scorer = InlineScorer({"_target_": "rl_plugins.tests.rewards.sample_rewards.length"})
    return Conversations(environment.connect(scorer, tokenizer), tokenizer, environment.max_turns).by(engine)


def converse(
    environment: ToolEnvironment, said: dict[str, list[str]], max_tokens: int = 400, prompt: str = PROMPT
) -> Generations:
    talk = talk_with(environment, Speaker(said))
    opening = replace(OPENING, prompt=tokenizer.encode(prompt))
    talk.submit([opening], SamplingConfig(max_tokens=max_tokens, num_samples=len(said[prompt])))
    return talk.collect([7], 0)[7]


def test_results_come_back_as_tokens_of_the_tool_role_under_mask_0(environment: ToolEnvironment) -> None:
    first = call("add", '{"a": 2, "b": 3}') + call("add", '{"a": 1, "b": 1}') + "<|end|>"
    generations = converse(environment, {PROMPT: [first, "6<|end|>"]})
    (long, short), (mask, short_mask) = generations.responses(), generations.response_masks() or []
    results = "<|tool|>5<|tool|>2<|assistant|>"
    assert tokenizer.decode(long) == f"{first}{results}5<|end|>" and tokenizer.decode(short) == "6<|end|>"
    # What is trained on is what was sampled, and the rest is the text of the template.
    assert tokenizer.decode(np.array(long)[np.array(mask) == 0]) == results
    sampled = [*tokenizer.encode(first), *tokenizer.encode("5<|end|>")]
    assert np.array(long)[np.array(mask) == 1].tolist() == sampled and set(short_mask) == {1.0}
    ending = generations.endings[0]
    assert [(message["role"], message["content"]) for message in ending.said[1:]] == [
        ("tool", "5"), ("tool", "2"), ("assistant", "5"),
    ]  # fmt: skip
    assert (ending.turns, ending.score.value, ending.counts["tools/calls"]) == (2, 1.0, 2)
    called, last = ending.times
    assert [work.name for work in called.work] == ["add", "add"] and not last.work
    assert called.asked <= called.sampled <= called.work[0].start <= called.answered <= last.asked <= last.answered


def test_call_in_reasoning_that_the_prompt_opens_is_no_call() -> None:
    pytest.importorskip("vllm")
    prompt = "<|system|>add(a,b)<|user|>2+3<|assistant|><think>"
    said = {prompt: [f"{call('add', '{}')}</think>5<|end|>", f"hm</think>{ADDING}"]}
    with closing(ToolEnvironment([f"{HERE}.add"], parser="hermes", max_turns=3)) as environment:
        thought, called = converse(environment, said, prompt=prompt).endings
    assert thought.turns == 1 and thought.counts["tools/calls"] == 0
    assert called.turns == 2 and called.counts["tools/calls"] == 1


@for_each("lost", [1, 2])
def test_lost_engine_costs_only_the_turn_in_flight_and_repeats_no_call(environment: ToolEnvironment, lost: int) -> None:
    engine = Speaker({PROMPT: [ADDING, "6<|end|>"]}, loses=[lost])
    talk = talk_with(environment, engine)
    talk.submit([OPENING], SamplingConfig(max_tokens=400, num_samples=2))
    with pytest.raises(EngineLost):
        talk.collect([7], 0)
    assert talk.lost_tickets() == []
    (generations,) = talk.collect([7], 0).values()
    assert engine.prompts == [PROMPT, f"{PROMPT}{ADDING}<|tool|>5<|assistant|>"] and len(engine.asked) == 3
    long, short = generations.endings
    assert (long.turns, long.counts["tools/calls"], long.score.value) == (2, 1, 1.0)
    assert (short.turns, short.counts["tools/calls"], short.score.value) == (1, 0, 1.0)


def test_reward_of_a_tool_is_the_reward_of_the_turn_and_part_of_the_score() -> None:
    guess = call("guess", '{"number": 0.25}') + call("guess", '{"number": 0.5}') + "<|end|>"
    huge = call("guess", '{"number": 1e7}') + "<|end|>"
    prompt = "<|system|>guess(number)<|user|>2+3<|assistant|>"
    said = {prompt: [guess, "6<|end|>", huge]}
    with closing(ToolEnvironment([f"{HERE}.guess"], parser=sample_tools.read_calls, max_turns=3)) as environment:
        rewarded, plain, failed = converse(environment, said, prompt=prompt).endings
    # The reward function gives 1.
    assert rewarded.turn_rewards == (0.75, 1.0) and rewarded.score.value == 1.75
    assert plain.turn_rewards == (1.0,) and plain.score.value == 1.0
    assert failed.score.failure == "not_finite" and failed.score.message == "guess: reward: 'score' is inf"


@pytest.mark.parametrize(
    ("response", "kind", "said"),
    [
        ("<tool_call>{</tool_call>", "malformed", "error: Expecting property name enclosed in double quotes"),
        (call("add", "[1]"), "malformed", "error: the arguments of add must be a JSON object"),
        (call("add", '{"a": 1}'), "malformed", "error: add: 'b' is a required property"),
        (call("ad", "{}"), "unknown", "error: there is no tool 'ad', but add"),
        # A name in a loop does not fill the context.
        (call("a" * 100, "{}"), "unknown", f"error: there is no tool '{'a' * 80} [20 characters left out]', but add"),
        (call("refuse", "{}"), "raised", "error: ValueError: no"),
    ],
)
def test_failed_call_tells_the_policy_and_is_counted(
    environment: ToolEnvironment, response: str, kind: str, said: str
) -> None:
    check_failed_call(environment, response, kind, said)


def test_calls_after_the_largest_number_of_calls_of_a_response_do_not_run(environment: ToolEnvironment) -> None:
    response = "".join(call("add", f'{{"a": {place}, "b": 1}}') for place in range(_MOST_CALLS + 3)) + "<|end|>"
    (ending,) = converse(environment, {PROMPT: [response]}, max_tokens=4000).endings
    results = [message["content"] for message in ending.said if message["role"] == "tool"]
    assert results == [*map(str, range(1, _MOST_CALLS + 1)), *["error: a response has at most 32 calls"] * 3]
    assert (ending.counts["tools/calls"], ending.counts["tools/malformed"]) == (_MOST_CALLS + 3, 3)
    # Only calls with times have run.
    assert len(ending.times[0].work) == _MOST_CALLS


def test_late_call_tells_the_policy_and_is_counted() -> None:
    response = call("wait_long", '{"seconds": 1000000}')
    with closing(environment_of(deadline_s=0.1)) as environment:
        check_failed_call(environment, response, "late", "error: wait_long: no result within")


def check_failed_call(environment: ToolEnvironment, response: str, kind: str, said: str) -> None:
    (ending,) = converse(environment, {PROMPT: [f"{response}<|end|>"]}).endings
    assert ending.said[1]["content"].startswith(said)
    counted = {name.removeprefix("tools/"): count for name, count in ending.counts.items()}
    assert counted == {**dict.fromkeys(("unknown", "malformed", "late", "raised", "died"), 0), "calls": 1, kind: 1}
    assert ending.score.value == 1.0


def test_read_call_refuses_arguments_that_are_too_deep_for_json() -> None:
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"a": deep}
    for arguments in ("[" * 5000, '{"a": ' * 200 + "1" + "}" * 200, deep):
        assert read_call("add", arguments).fault == "the arguments of add must be a JSON object"


def test_conversation_ends_at_the_bound_on_turns_without_another_call(environment: ToolEnvironment) -> None:
    turn = f"{ADDING}<|tool|>5<|assistant|>"
    said = {PROMPT: [ADDING], f"{PROMPT}{turn}": [ADDING], f"{PROMPT}{turn}{turn}": [ADDING]}
    generations = converse(environment, said)
    assert tokenizer.decode(generations.responses()[0]) == f"{turn}{turn}{ADDING}"
    assert generations.endings[0].turns == 3 and generations.endings[0].counts["tools/calls"] == 2


def test_conversation_without_room_for_a_result_ends(environment: ToolEnvironment) -> None:
    generations = converse(environment, {PROMPT: [ADDING]}, max_tokens=len(tokenizer.encode(ADDING)) + 2)
    assert generations.finish_reasons == ["length"] and generations.endings[0].turns == 1
    assert tokenizer.decode(generations.responses()[0]) == ADDING


def test_prompt_without_the_tools_is_refused(environment: ToolEnvironment) -> None:
    scorer = InlineScorer({"_target_": "rl_plugins.tests.rewards.sample_rewards.length"})
    talk = Conversations(environment.connect(scorer, tokenizer), tokenizer, 2).by(Speaker({"hm": ["5<|end|>"]}))
    talk.submit([Opening(1, tokenizer.encode("hm"), 5, about=ScoringRequest("s", "", None, {}))], SamplingConfig())
    with pytest.raises(ConfigError, match=r"the prompts do not show the tool 'add'.*tools.template_options"):
        talk.collect([1], 0)


def test_stage_trains_on_conversations_with_tools_and_counts_calls(tmp_path: Path) -> None:
    stage = trained_with(ToolEnvironment([f"{HERE}.add"], parser=call_twice, max_turns=3), tmp_path)
    (experience,), (metrics,) = stage.trained_on, stage.metrics
    assert (experience.response_lengths > experience.response_mask.sum(dim=1)).any()
    # The trainer gives each token the log-prob from its sampling.
    assert metrics["train/rollout_gap_max"] < 1e-4 and metrics["train/turns"] > 1
    assert metrics["train/tools/calls"] == 2 * metrics["train/tools/unknown"] > 0 == metrics["train/tools/raised"]


def test_stage_trains_with_calls_that_hang_raise_flood_return_nothing_and_die(tmp_path: Path) -> None:
    before = child_processes()
    # The first response makes four calls, and the next response of its conversation, after five answers, the last call.
    acts = iter([["nothing", "long", "raise", "hang"], *[[]] * 5, ["die"]])

    def next_acts(text: str) -> list[dict[str, Any]]:
        return [{"name": "obey", "arguments": {"act": act}} for act in next(acts, [])]

    limits: dict[str, Any] = {"max_turns": 3, "deadline_s": patient(1.5), "max_characters": 40, "left_out": "end"}
    tools = ToolEnvironment([f"{HERE}.obey"], parser=next_acts, **limits)
    stage = trained_with(tools, tmp_path)
    (experience,), (metrics,) = stage.trained_on, stage.metrics
    counts = {kind: metrics[f"train/{kind}"] for kind in KINDS}
    failed = {"tools/late": 1, "tools/raised": 1, "tools/died": 1}
    assert counts == {**dict.fromkeys(KINDS, 0), "tools/calls": 5, **failed}
    said = [message["content"] for ending in experience.columns["ending"] for message in ending.said[1:]]
    assert said[:3] == ["null", "x" * 40 + " [9999960 characters left out]", "error: ValueError: no such act"]
    assert said[3].startswith("error: obey: no result within")
    assert said[5] == "error: obey: the process was ended by the signal SIGKILL"
    assert metrics["train/rollout_gap_max"] < 1e-4 and len(experience) == 6
    wait_until(lambda: child_processes() <= before, "the end of all processes")


def child_processes() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def trained_with(tools: ToolEnvironment, folder: Path) -> canned.Keeping:
    """A stage after a step with tools, which are closed."""
    plain: Any = build_tokenizer()
    plain.chat_template = TOOL_CHAT_TEMPLATE
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "initializer_range": 0.2}
    sizes["max_position_embeddings"] = 512
    save_tiny_policy(folder, **sizes)
    stage = canned.Keeping(
        build_model(**sizes),
        tokenizer=plain,
        scorer=InlineScorer({"_target_": "rl_plugins.tests.rewards.sample_rewards.length"}),
        # An untrained policy ends few responses.
        sampling=SamplingConfig(max_tokens=400, num_samples=3, stop_token_ids=tuple(range(60, 200))),
        environment=tools,
        optimizer=OptimizerConfig(lr=0.01),
        max_steps=1,
    )
    strategy = SingleDeviceRolloutStrategy(rollout=TransformersRollout(str(folder)))
    with closing(tools):
        canned.quiet_trainer(strategy).fit(stage, ToolLoader(["1+1", "12+30"]))
    return stage


class ToolLoader(Loader):
    """Batches of two prompts that show the tools."""

    def draw(self) -> PromptBatch:
        batch = super().draw()
        shown = canned.tokenizer.encode("add(a,b)obey(act)")
        return PromptBatch([[*shown, *ids] for ids in batch.prompt_ids], batch.rows, batch.columns, batch.epoch)


def call_twice(text: str) -> list[dict[str, Any]]:
    """Parser for a policy that knows no tools: a call of a tool, and a call of no tool."""
    return [{"name": "add", "arguments": {"a": len(text), "b": 1}}, {"name": "add_all"}]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_turns": 1}, "max_turns=1: the policy responds again after a call"),
        ({"tools": []}, "tools=[]: name at least one tool"),
        ({"deadline_s": 0.0}, "deadline_s=0.0: must be above 0"),
        ({"parser": f"{HERE}.read_call"}, "did you mean 'read_calls'"),
        ({"pass_env": ["NO_SUCH_KEY"]}, "pass_env=[NO_SUCH_KEY]: the environment has no NO_SUCH_KEY"),
    ],
)
def test_environment_refuses_bad_options_in_one_line(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        ToolEnvironment(**{"tools": [f"{HERE}.add"], **options})
    assert said in str(refused.value) and "\n" not in str(refused.value)
    # A recipe has options, and Python has arguments.
    assert "environment." not in str(refused.value) and "in Python" not in str(refused.value)
