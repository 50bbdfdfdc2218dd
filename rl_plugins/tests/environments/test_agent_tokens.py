"""Tokens of agents: continued calls, sequences, choices and streams have the tokens of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
from typing_extensions import override

pytest.importorskip("vllm")

from rl_plugins.data.experience import Experience
from rl_plugins.errors import RewardError
from rl_plugins.models.tiny import TOOL_CHAT_TEMPLATE
from rl_plugins.rewards.trajectory import Ending
from rl_plugins.stages.forward_passes import SequenceRows
from rl_plugins.stages.turns import add_turns, sequences
from rl_plugins.tests.environments.agent_runs import ASKED, CALL, Reporting, agent, run, tokenizer
from rl_plugins.tests.loops import for_each


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


@for_each("stream", [False, True])
def test_call_in_reasoning_that_the_template_opens_is_text(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = "{% if add_generation_prompt %}{{ '<|assistant|>"
    opening = TOOL_CHAT_TEMPLATE.replace(begin, f"{begin}<think>")
    assert opening != TOOL_CHAT_TEMPLATE
    monkeypatch.setattr(tokenizer, "chat_template", opening)
    start = "<|system|>add(a,b)<|user|>2+3<|assistant|><think>"
    idea = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 1}}</tool_call>'
    first, last = f"{idea}</think>I add.<tool_call>{CALL}", "</think>5<|end|>"
    said = {start: first, f"{start}{first}<|tool|>5<|assistant|><think>": last}
    with closing(agent("add_with_tool")) as environment:
        texts = {prompt: tokenizer.encode(text) for prompt, text in said.items()}
        (generations,) = run(environment, texts, prompt=[{"role": "user", "content": "2+3"}], stream=stream)
    ending: Ending = generations.endings[0]
    assert ending.score.value == 5.0, ending.score.message
    assert (ending.turns, ending.score.details["agent/sequences"], ending.score.details["agent/malformed"]) == (2, 1, 0)
    assert tokenizer.decode(generations.responses()[0]) == f"{first}<|tool|>5<|assistant|><think>{last}"


@for_each("stream", [False, True])
def test_template_with_one_call_in_a_turn_gives_the_agent_the_first_call(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    single = (
        "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length > 1 %}"
        "{{ raise_exception('single calls only') }}{% endif %}{% endfor %}"
    )
    monkeypatch.setattr(tokenizer, "chat_template", single + TOOL_CHAT_TEMPLATE)
    start = "<|system|>add(a,b)<|user|>2+3<|assistant|>"
    first = f"I add.<tool_call>{CALL.removesuffix('<|end|>')}<tool_call>{CALL}"
    said = {start: first, f"{start}{first}<|tool|>5<|assistant|>": "5<|end|>"}
    with closing(agent("add_with_tool")) as environment:
        texts = {prompt: tokenizer.encode(text) for prompt, text in said.items()}
        (generations,) = run(environment, texts, prompt=[{"role": "user", "content": "2+3"}], stream=stream)
    ending: Ending = generations.endings[0]
    assert ending.score.value == 5.0, ending.score.message
    assert (ending.turns, ending.score.details["agent/sequences"]) == (2, 1)
    assert tokenizer.decode(generations.responses()[0]) == f"{first}<|tool|>5<|assistant|>5<|end|>"


@for_each("stream", [False, True])
def test_half_a_character_in_a_call_reaches_the_agent_as_a_whole_character(stream: bool) -> None:
    start = "<|system|>add(a,b)<|user|>2+3<|assistant|>"
    half = '<tool_call>{"name": "add\\ud83d", "arguments": {"a": 1, "b": "\\ud83d"}}</tool_call><|end|>'
    with closing(agent("add_with_tool")) as environment:
        texts = {start: tokenizer.encode(half)}
        # The agent adds 1 and a text.
        with pytest.raises(RewardError, match=r"add_with_tool: TypeError: unsupported operand type\(s\) for \+"):
            run(environment, texts, prompt=[{"role": "user", "content": "2+3"}], stream=stream)


def test_previous_response_stands_for_all_messages_except_instructions() -> None:
    brief, more, again = "<|system|>Be brief.", "<|user|>more<|assistant|>", "<|user|>again<|assistant|>"
    with closing(agent("chain_responses", max_turns=6)) as environment:
        (generations,) = run(environment, {}, max_tokens=800)
    (ending,) = generations.endings
    assert ending.score.value == 1.0, ending.score.message
    text = tokenizer.decode([*ending.prompt_ids, *generations.responses()[0]])
    asked, answer = f"{brief}{ASKED}", "5<|end|>"
    assert text == "".join(
        [
            *(asked, answer, more, answer, again, answer),
            *(f"<|system|>Be kind.{asked}", answer, more, answer),
            *(f"{asked}{answer}{again}", answer),
        ]
    )


def test_empty_answer_that_a_client_sends_as_null_is_continued() -> None:
    with closing(agent("talk")) as environment:
        (generations,) = run(environment, {ASKED: tokenizer.encode("<|end|>")})
    (ending,) = generations.endings
    assert (ending.score.value, ending.score.details["agent/sequences"]) == (2.0, 1.0), ending.score.message
    assert tokenizer.decode(generations.responses()[0]) == "<|end|><|user|>more<|assistant|>5<|end|>"


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
