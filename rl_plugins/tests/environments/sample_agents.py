"""Agents for tests, with the client of OpenAI: good agents, and agents that fail in every way."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import openai

Row = Mapping[str, Any]

# Without the client, whose import takes seconds.
PROGRAM = """
import json, os, urllib.request
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"messages": [{"role": "user", "content": "ask"}]}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
print(json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["message"]["content"])
"""

# A shell script with two calls, the second of which continues the first.
SCRIPT = r"""
set -e
ask() {
    curl --silent --fail --max-time 60 "$OPENAI_BASE_URL/chat/completions" \
        --header "Authorization: Bearer $OPENAI_API_KEY" --header 'Content-Type: application/json' \
        --data "{\"messages\": [$1]}" | sed 's/.*"content":"\([^"]*\)".*/\1/'
}
first='{"role": "user", "content": "ask"}'
answer=$(ask "$first")
ask "$first, {\"role\": \"assistant\", \"content\": \"$answer\"}, {\"role\": \"user\", \"content\": \"more\"}"
"""

ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


def client_of(base_url: str, api_key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)


def add_with_tool(row: Row, base_url: str, api_key: str) -> Any:
    """Call the tool until the policy answers; stream the answers if the row says so. The reward is the last answer."""
    is_streamed, said = row["extra_info"].get("stream", False), []
    with client_of(base_url, api_key) as client:
        assert [model.id for model in client.models.list()] == ["policy"]
        messages: list[Any] = [*row["prompt"]]
        while True:
            options: Any = {"model": "any", "messages": messages, "tools": [ADD], "temperature": 0.3}
            if is_streamed:
                with client.chat.completions.stream(**options) as events:
                    events.until_done()
                    choice: Any = events.get_final_completion().choices[0]
            else:
                choice = client.chat.completions.create(**options).choices[0]
            said.append(choice.finish_reason)
            if not choice.message.tool_calls:
                return {"score": float(choice.message.content.rpartition("</think>")[2]), "turns": len(said)}
            messages.append(choice.message.to_dict())
            for call in choice.message.tool_calls:
                numbers = json.loads(call.function.arguments)
                result = str(numbers["a"] + numbers["b"])
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            assert said[-1] == "tool_calls"


def add_with_items(row: Row, base_url: str, api_key: str) -> Any:
    """Do the same with the Responses API, with all items in each call."""
    return add_with_responses(row, base_url, api_key, with_items=True)


def add_with_previous_response(row: Row, base_url: str, api_key: str) -> Any:
    """Do the same with the Responses API, with the id of the response before in each call."""
    return add_with_responses(row, base_url, api_key, with_items=False)


def add_with_responses(row: Row, base_url: str, api_key: str, *, with_items: bool) -> Any:
    items: list[Any] = [*row["prompt"]]
    tool: Any = {"type": "function", "strict": None, **ADD["function"]}
    previous, turns = None, 0
    with client_of(base_url, api_key) as client:
        while True:
            options: Any = {"model": "any", "input": items, "tools": [tool], "temperature": 0.3}
            if previous is not None and not with_items:
                options["previous_response_id"] = previous
            if row["extra_info"].get("stream", False):
                with client.responses.stream(**options) as events:
                    heard = "".join(event.delta for event in events if event.type == "response.output_text.delta")
                    answer: Any = events.get_final_response()
                assert heard == answer.output_text
            else:
                answer = client.responses.create(**options, include=["message.output_text.logprobs"])
            turns, previous = turns + 1, answer.id
            assert answer.status == "completed" and answer.usage.output_tokens > 1
            calls = [item for item in answer.output if item.type == "function_call"]
            if not calls:
                return {"score": float(answer.output_text), "turns": turns}
            items = [*items, *answer.output] if with_items else []
            for call in calls:
                numbers = json.loads(call.arguments)
                result = str(numbers["a"] + numbers["b"])
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})


def break_rules_of_responses(row: Row, base_url: str, api_key: str) -> float:
    """Make calls of the Responses API beside the rules, and then a good call."""
    with client_of(base_url, api_key) as client:
        create, first = client.responses.create, [*row["prompt"]]
        wrong: dict[str, Any] = {
            "background": True, "top_logprobs": 3, "truncation": "auto", "max_output_tokens": 0,
            "previous_response_id": "resp_none", "text": {"format": {"type": "json_object"}},
            "tool_choice": "required", "tools": [{"type": "web_search"}], "max_tool_calls": 1,
        }  # fmt: skip
        kwargs = {"chat_template_kwargs": {"enable_thinking": False}}
        assert "chat_template_kwargs" in refused(create, model="m", input=first, extra_body=kwargs)
        for name, value in wrong.items():
            assert name in refused(create, model="m", input=first, **{name: value}), name
        assert "item_reference" in refused(create, model="m", input=[{"type": "item_reference", "id": "x"}])
        assert "text alone" in refused(
            create, model="m", input=[{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]
        )
        answer = create(model="m", input="ask", instructions="Be brief.", max_output_tokens=1)
        assert (answer.status, answer.output_text) == ("incomplete", "n")
        assert answer.incomplete_details is not None and answer.incomplete_details.reason == "max_output_tokens"
    return 1.0


def chain_responses(row: Row, base_url: str, api_key: str) -> float:
    """Continue responses by their ids, and at last without the instructions of the second chain."""
    with client_of(base_url, api_key) as client:
        create = client.responses.create
        brief: Any = {"role": "system", "content": "Be brief."}
        first = [*row["prompt"]]
        previous = create(model="m", input=[brief, *first]).id
        for text in ("more", "again"):
            previous = create(model="m", input=text, previous_response_id=previous).id
        instructed = create(model="m", input=[brief, *first], instructions="Be kind.").id
        create(model="m", input="more", instructions="Be kind.", previous_response_id=instructed)
        create(model="m", input="again", previous_response_id=instructed)
    return 1.0


async def talk(row: Row, base_url: str, api_key: str, *, turns: int = 2, max_tokens: int = 20) -> float:
    """Talk with the policy for some turns. The reward grows with the number of characters of the policy."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        messages: list[Any] = [*row["prompt"]]
        heard = 0
        for _ in range(turns):
            answer = await client.chat.completions.create(model="policy", messages=messages, max_tokens=max_tokens)
            text = answer.choices[0].message.content or ""
            heard += len(text)
            # Some clients send null for an empty text and for no calls, or name the answer after the agent.
            said = {"role": "assistant", "content": text or None, "tool_calls": None, "name": "solver"}
            messages += [said, {"role": "user", "content": "more"}]
    return 1.0 + heard


def ask_in_program(row: Row, base_url: str, api_key: str) -> float:
    """Ask in a program, which finds address and key in its environment."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True)
    return float(done.stdout)


def ask_in_script(row: Row, base_url: str, api_key: str) -> float:
    """Ask in a shell script. The reward is the last answer."""
    done = subprocess.run(["sh", "-c", SCRIPT], check=True, capture_output=True, text=True)
    return float(done.stdout)


def obey(row: Row, base_url: str, api_key: str) -> Any:
    """Do what an agent must not do, by the ground truth of the row."""
    act = row["ground_truth"]
    if act == "silent":
        return 1.0
    with client_of(base_url, api_key) as client:
        client.chat.completions.create(model="policy", messages=row["prompt"])
    if act == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if act == "raise":
        raise ValueError("no such act")
    if act == "cancel":
        raise asyncio.CancelledError
    if act == "hang":
        time.sleep(1e6)
    return {"nothing": None, "nan": float("nan"), "text": "high"}.get(act, 0.5)


def refused(create: Any, kind: type[openai.APIStatusError] = openai.BadRequestError, **options: Any) -> str:
    try:
        create(**options)
    except kind as error:
        return f"{error.type}: {error}"
    raise AssertionError("the call was not refused")


def break_rules(row: Row, base_url: str, api_key: str) -> float:
    """Make all calls that the endpoint refuses, between calls that it answers."""
    with client_of(base_url, api_key) as client, client_of(base_url, f"{api_key}x") as stranger:
        create, first = client.chat.completions.create, [*row["prompt"]]
        unknown = refused(stranger.chat.completions.create, openai.AuthenticationError, model="m", messages=first)
        assert unknown.startswith("authentication_error: ") and "no trajectory has this key" in unknown
        for name, value in {
            "n": 4, "stop": ["x"], "top_logprobs": 3, "response_format": {"type": "json_object"},
            "tool_choice": "required", "max_tokens": 0, "messages": [],
        }.items():  # fmt: skip
            extra = {"logprobs": True} if name == "top_logprobs" else {"tools": [ADD]} if name == "tool_choice" else {}
            options: dict[str, Any] = {"model": "m", "messages": first, **extra, name: value}
            assert name in refused(create, **options), name
        assert "text alone" in refused(
            create,
            model="m",
            messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        )
        key = {"authorization": f"Bearer {api_key}"}
        deep = httpx.post(f"{base_url}/chat/completions", content="[" * 5000, headers=key, timeout=60)
        assert deep.status_code == 400 and "the body is no chat completion" in deep.text
        forms: list[dict[str, Any]] = [
            {
                "tools": [{"type": "function", "name": "x"}],
                "tool_choice": {"type": "function", "function": {"name": "x"}},
            },
            {"structured_outputs": "json"},
        ]
        for form in forms:
            body = {"model": "m", "messages": first, **form}
            wrong = httpx.post(f"{base_url}/chat/completions", json=body, headers=key, timeout=60)
            assert wrong.status_code == 400, wrong.text
        # The template shows the names of parameters, which this tool lacks.
        bare: Any = {"type": "function", "function": {"name": "bare"}}
        assert "parameters" in refused(create, model="m", messages=first, tools=[bare])
        assert "more than max_prompt_tokens" in refused(
            create, model="m", messages=[{"role": "user", "content": "x" * 500}]
        )
        answer: Any = create(model="m", messages=first, logprobs=True, max_tokens=2, n=1).choices[0]
        assert answer.finish_reason == "length" and answer.message.content == "no"
        assert [(one.token, one.logprob) for one in answer.logprobs.content] == [("n", -2.0), ("o", -2.0)]
        said, more = {"role": "assistant", "content": "no"}, {"role": "user", "content": "sure?"}
        for messages, reason in (
            ([*first, {**said, "content": "No"}, more], "the answer that was given has another content"),
            ([{"role": "user", "content": "other"}, said, more], "message 0 of the earlier call has another content"),
            ([*first, said], "the call has no message after the answer that was given"),
            (first, "the call has 1 messages, and the conversation has 2"),
        ):
            assert reason in refused(create, model="m", messages=messages)
        assert "tools are not those" in refused(create, model="m", messages=[*first, said, more], tools=[ADD])
        # A client that has lost an answer sends its call again, and gets the same answer.
        again = {"x-stainless-retry-count": "1", **key}
        body = {"model": "m", "messages": [*first, said, more]}
        texts = [
            httpx.post(f"{base_url}/chat/completions", json=body, headers=again, timeout=60).text for _ in range(2)
        ]
        assert len(set(texts)) == 1
        heard = [*first, said, more, json.loads(texts[0])["choices"][0]["message"], more]
        full = refused(create, model="m", messages=[*heard, {**more, "content": "x" * 100}])
        assert "raise max_tokens" in full and full.startswith("context_length_exceeded: ")
        create(model="m", messages=heard)
        last = [*heard, {"role": "assistant", "content": "5"}, more]
        ended = refused(create, model="m", messages=last)
        assert "max_turns=3" in ended and ended.startswith("context_length_exceeded: ")
    return 1.0


async def call_twice_at_once(row: Row, base_url: str, api_key: str) -> float:
    """Make the same call twice at once. The reward is the sum of the answers."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        calls = [client.chat.completions.create(model="m", messages=row["prompt"]) for _ in range(2)]
        return sum([float(answer.choices[0].message.content or "nan") for answer in await asyncio.gather(*calls)])


async def delegate(row: Row, base_url: str, api_key: str, *, max_tokens: int = 20) -> float:
    """Ask, ask another role, go on with the first, and go on with a summary of the first."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:

        async def answer(messages: list[Any], **options: Any) -> Any:
            call = client.chat.completions.create(model="m", messages=messages, max_tokens=max_tokens, **options)
            return (await call).choices[0].message.to_dict()

        more, main = {"role": "user", "content": "more"}, [*row["prompt"]]
        main += [await answer(main), more]
        other = [{"role": "user", "content": "other"}]
        other += [await answer(other), more]
        main += [await answer(main), more]
        await answer([*row["prompt"], {"role": "user", "content": "in short"}])
        last = await answer(other)
    return 1.0 + len(str(last["content"]))


def choose(row: Row, base_url: str, api_key: str, *, max_tokens: int = 4) -> Any:
    """Ask for choices, go on with the longest, and then with another. The reward of each token is its id."""
    rewards: list[float] = []
    more = {"role": "user", "content": "more"}

    def choices_of(create: Any, messages: list[Any], n: int) -> list[Any]:
        options: dict[str, Any] = {"model": "m", "messages": messages, "n": n, "max_tokens": max_tokens}
        options["extra_body"] = {"return_token_ids": True}
        if not (row["extra_info"] or {}).get("stream"):
            answer = create(**options)
            assert answer.usage.completion_tokens == sum(len(one.token_ids) for one in answer.choices)
            assert [one.index for one in answer.choices] == list(range(n)) and answer.prompt_token_ids
            rewards.extend(token for one in answer.choices for token in one.token_ids)
            return [one.message.to_dict() for one in answer.choices]
        said = [{"role": "assistant", "content": ""} for _ in range(n)]
        for chunk in create(**options, stream=True, stream_options={"include_usage": True}):
            for part in chunk.choices:
                said[part.index]["content"] += part.delta.content or ""
                rewards.extend(getattr(part, "token_ids", None) or [])
        assert chunk.usage.completion_tokens > n
        return said

    with client_of(base_url, api_key) as client:
        asked, create = [*row["prompt"]], client.chat.completions.create
        said = choices_of(create, asked, 3)
        longest = max(range(3), key=lambda place: len(said[place]["content"]))
        choices_of(create, [*asked, said[longest], more], 2)
        choices_of(create, [*asked, said[0 if longest else 1], more], 1)
    return {"token_rewards": rewards}


def listen(row: Row, base_url: str, api_key: str) -> Any:
    """Hear a stream of two choices, and let the engine go on after the first text. The reward of a token is its id."""
    info, texts, rewards, calls = row["extra_info"], ["", ""], [list[int](), list[int]()], list[Any]()
    options: dict[str, Any] = {"tools": [ADD]} if info["tools"] else {}
    events = 0
    with client_of(base_url, api_key) as client:
        for chunk in client.chat.completions.create(
            model="m", messages=row["prompt"], n=2, stream=True, extra_body={"return_token_ids": True}, **options
        ):
            for part in chunk.choices:
                texts[part.index] += part.delta.content or ""
                calls += part.delta.tool_calls or []
                rewards[part.index] += getattr(part, "token_ids", None) or []
                events += bool(part.delta.content)
            if all(texts):
                Path(info["heard"]).touch()
    assert texts == ["I add <tooé.", "no"], texts
    assert len(calls) == bool(info["tools"]), calls
    return {"token_rewards": [*rewards[0], *rewards[1]], "events": events}


def listen_again(row: Row, base_url: str, api_key: str) -> float:
    """Hear a stream up to its error, and ask again without a stream."""
    with client_of(base_url, api_key) as client:
        heard = ""
        try:
            for chunk in client.chat.completions.create(model="m", messages=row["prompt"], stream=True):
                heard += chunk.choices[0].delta.content or ""
        except openai.APIError as error:
            assert "the policy has answered again: repeat the call" in str(error)
        answer = client.chat.completions.create(model="m", messages=row["prompt"])
    return float((heard, answer.choices[0].message.content) == ("x", "abc"))


def ask_too_much(row: Row, base_url: str, api_key: str) -> float:
    """Ask for more choices than the limits allow, before and after good calls."""
    with client_of(base_url, api_key) as client:
        create, first = client.chat.completions.create, [*row["prompt"]]
        said: Any = {"role": "assistant", "content": "5"}
        more: Any = {"role": "user", "content": "more"}
        assert "n=0: must be at least 1" in refused(create, model="m", messages=first, n=0)
        assert "n=5: the policy has given 0 of max_turns=4" in refused(create, model="m", messages=first, n=5)
        assert "0 of max_sequences=3 sequences" in refused(create, model="m", messages=first, n=4)
        assert len(create(model="m", messages=first, n=2).choices) == 2
        assert "2 of max_sequences=3 sequences" in refused(create, model="m", messages=first, n=2)
        # The copy of the tokens before a second choice has no room.
        long = {"role": "user", "content": "x" * 12}
        assert "no tokens left" in refused(create, model="m", messages=[*first, said, long], n=2)
        create(model="m", messages=[*first, said, more])
    return 1.0


async def reward_tokens(row: Row, base_url: str, api_key: str) -> Any:
    """Ask twice, and number the tokens of both answers; one too few if the row says so."""
    count = 0
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        messages: list[Any] = [*row["prompt"]]
        for _ in range(2):
            answer = await client.chat.completions.create(model="m", messages=messages)
            assert answer.usage is not None
            count += answer.usage.completion_tokens
            messages += [answer.choices[0].message.to_dict(), {"role": "user", "content": "more"}]
    return {"token_rewards": range(1, count + 1)[row["ground_truth"] == "short" :], "answers": 2}


def other_arguments(row: Row, url: str) -> float:
    return 0.0


class Solver:
    """Class without a method for trajectories."""


class Talker:
    """Agent with turns of the constructor, which says in which process the object was made."""

    def __init__(self, turns: int) -> None:
        if not turns:
            raise ValueError("no turns")
        self.turns, self.made_in = turns, os.getpid()

    async def __call__(self, row: Row, base_url: str, api_key: str) -> dict[str, float]:
        return {"score": await talk(row, base_url, api_key, turns=self.turns), "made_in": self.made_in}
