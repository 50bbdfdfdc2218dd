"""Groups of the resident vLLM engine in float32: weights change in flight, groups are collected, fetched and dropped.

Tests of unfinished groups hold the engine: the speed of sampling changes nothing.
"""

from __future__ import annotations

import pickle
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np

from integration_tests.resident import change, go_on, hold_after, inside, load_policy, log_probs_of, steps_taken
from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.rollout.engine import Generations, GroupRequest
from rl_plugins.rollout.vllm.client import VLLMRollout
from rl_plugins.tests.patience import wait_until
from rl_plugins.weights.source import ModuleWeightSource

LONG = SamplingConfig(num_samples=2, max_tokens=200)
SHORT = SamplingConfig(num_samples=2, max_tokens=3)
# More than the tokens of a short group, and fewer than the tokens of a long group.
STEPS = 20


def requests(*tickets: int, max_tokens: int | None = None) -> list[GroupRequest]:
    return [GroupRequest(ticket, [5 + ticket, 6, 7], seed=ticket, max_tokens=max_tokens) for ticket in tickets]


def unfinished(rollout: VLLMRollout) -> int:
    """Return the unfinished groups of the engine."""
    return int(inside(rollout, lambda actor: len(actor._loop._running)))


def collected(rollout: VLLMRollout, required: list[int], count: int) -> dict[int, Generations]:
    """Return the finished groups, with their responses."""
    held = rollout.collect(required, count)
    fetched = rollout.fetch(list(held.values()))
    return {ticket: one for ticket, one in zip(held, fetched, strict=True) if one is not None}


def test_update_weights_in_flight_gives_each_token_the_version_of_the_weights(
    float32_engine: VLLMRollout, workplace: Path
) -> None:
    policy = load_policy(workplace)
    source, policies = ModuleWeightSource(policy), {}
    change(policy, seed=3)
    policies[3] = deepcopy(policy)
    float32_engine.update_weights(source, version=3)
    last = hold_after(float32_engine, STEPS)
    float32_engine.submit(requests(0, 1), LONG)
    wait_until(lambda: steps_taken(float32_engine) == last, f"{STEPS} steps of the engine")
    change(policy, seed=4)
    policies[4] = deepcopy(policy)
    float32_engine.update_weights(source, version=4)
    groups = collected(float32_engine, [0, 1], 2)

    mixed: list[tuple[list[int], list[int], list[float], list[int]]] = []
    for request in requests(0, 1):
        group = groups[request.ticket]
        for response, log_probs, versions in zip(
            group.responses(), group.response_log_probs(), group.response_versions(), strict=True
        ):
            # A response finished before the update has tokens of the old weights alone.
            assert versions == ([3] * STEPS + [4] * len(versions))[: len(versions)]
            mixed += [(request.prompt, response, log_probs, versions)] if len(set(versions)) == 2 else []
            # The new weights read the old tokens, too: the KV cache was computed again.
            for version, weights in policies.items():
                sampled = np.array(versions) == version
                exact = np.array(log_probs_of(weights, request.prompt + response)[len(request.prompt) - 1 :])
                np.testing.assert_allclose(np.array(log_probs)[sampled], exact[sampled], atol=2e-4)
    prompt, response, log_probs, versions = mixed[0]
    other = np.array(log_probs_of(policies[3], prompt + response)[len(prompt) - 1 :])
    late = np.array(versions) == 4
    assert np.abs(np.array(log_probs) - other)[late].max() > 0.01, "the weights hardly differ"


def test_groups_in_flight_continue_after_a_sleep_without_an_update(float32_engine: VLLMRollout) -> None:
    (request,) = requests(50)
    last = hold_after(float32_engine, STEPS)
    float32_engine.submit([request], LONG)
    wait_until(lambda: steps_taken(float32_engine) == last, f"{STEPS} steps of the engine")
    freed = float32_engine.sleep()
    assert freed is not None and freed.before > freed.after and unfinished(float32_engine) == 1
    float32_engine.wake_up(["weights"])
    float32_engine.wake_up(["kv_cache"])
    wait_until(lambda: not unfinished(float32_engine), "the end of the group")
    float32_engine.submit([replace(request, ticket=51)], LONG)
    groups = collected(float32_engine, [50, 51], 2)
    assert groups[50].responses() == groups[51].responses() and max(groups[50].lengths) > STEPS
    np.testing.assert_allclose(groups[50].log_probs, groups[51].log_probs, atol=1e-5)


def test_tokens_so_far_are_the_beginning_of_the_responses(float32_engine: VLLMRollout) -> None:
    reporting = GroupRequest(30, [5, 6, 7], seed=3, reports_tokens=True)
    last = hold_after(float32_engine, STEPS)
    float32_engine.submit([reporting, *requests(31)], LONG)
    wait_until(lambda: steps_taken(float32_engine) == last, f"{STEPS} steps of the engine")
    seen: dict[int, list[list[int]]] = {}
    wait_until(lambda: bool(seen.update(float32_engine.tokens_so_far([30, 31])) or seen), "a report of the engine")
    assert list(seen) == [30] and len(seen[30]) == 2 and all(0 < len(part) <= STEPS for part in seen[30])
    go_on(float32_engine)
    groups = collected(float32_engine, [30, 31], 2)
    assert [one[: len(part)] for one, part in zip(groups[30].responses(), seen[30], strict=True)] == seen[30]
    # A group has the same samples without reports.
    float32_engine.submit([replace(reporting, ticket=32, reports_tokens=False)], LONG)
    (again,) = collected(float32_engine, [32], 1).values()
    assert again.responses() == groups[30].responses()
    assert again.finish_reasons == groups[30].finish_reasons
    assert again.response_versions() == groups[30].response_versions()
    np.testing.assert_allclose(again.log_probs, groups[30].log_probs, atol=1e-5)


def test_collect_returns_finished_groups_while_another_goes_on(float32_engine: VLLMRollout) -> None:
    last = hold_after(float32_engine, STEPS)
    float32_engine.submit(requests(10), LONG)
    wait_until(lambda: steps_taken(float32_engine) == last, f"{STEPS} steps of the engine")
    float32_engine.submit(requests(11, 12), SHORT)
    wait_until(lambda: unfinished(float32_engine) == 3, "the groups to be submitted")
    hold_after(float32_engine, STEPS)
    first = float32_engine.collect([], 2)
    assert sorted(first) == [11, 12]
    assert all(group.lengths.tolist() == [3, 3] for group in first.values())
    go_on(float32_engine)
    # A call for all prompts of a step does not disturb the group.
    assert len(float32_engine.generate([[9, 8]], SHORT, [1]).lengths) == 2
    (rest,) = float32_engine.collect([10], 0).values()
    assert max(rest.lengths) > 3


def test_groups_have_the_responses_of_generate(float32_engine: VLLMRollout) -> None:
    float32_engine.submit(requests(20, 21), SHORT)
    groups = collected(float32_engine, [20, 21], 2)
    together = [response for ticket in sorted(groups) for response in groups[ticket].responses()]
    once = float32_engine.generate([one.prompt for one in requests(20, 21)], SHORT, [20, 21])
    assert together == once.responses()


def test_fetch_returns_collected_groups_once_and_no_dropped_group(float32_engine: VLLMRollout) -> None:
    float32_engine.submit(requests(25, 26, 27), SHORT)
    held = float32_engine.collect([25, 26, 27], 3)
    # A rank sends to another rank only the lengths and the places of groups.
    assert len(pickle.dumps(list(held.values()))) < 1000
    float32_engine.drop([27])
    asked = [held[27], held[26], held[25]]
    dropped, second, first = float32_engine.fetch(asked)
    assert dropped is None and first is not None and second is not None
    assert [len(one) for one in first.responses()] == held[25].lengths.tolist() == [3, 3]
    apart = [float32_engine.generate([one.prompt], SHORT, [one.seed]) for one in requests(25, 26)]
    assert [first.responses(), second.responses()] == [one.responses() for one in apart]
    assert float32_engine.fetch(asked) == [None, None, None]
    # Generations in this process are returned without a copy.
    assert float32_engine.fetch([first]) == [first]


def test_drop_ends_groups_and_leaves_nothing_in_the_engine(float32_engine: VLLMRollout) -> None:
    hold_after(float32_engine, STEPS)
    float32_engine.submit([*requests(30, 31), *requests(32, max_tokens=3)], LONG)
    assert list(float32_engine.collect([32], 1)) == [32]
    float32_engine.drop([30, 31])
    go_on(float32_engine)
    float32_engine.submit(requests(33), SHORT)
    assert list(float32_engine.collect([], 1)) == [33]
    assert float32_engine.collect([], 0) == {}
    float32_engine.drop([32, 33])
    of_vllm, left = inside(
        float32_engine,
        lambda actor: (
            actor._llm.llm_engine.has_unfinished_requests(),
            [*actor._loop._finished, *actor._collected, *(name for names in actor._groups.values() for name in names)],
        ),
    )
    assert not unfinished(float32_engine) and not of_vllm and left == []


def test_collect_of_nothing_does_not_wait_for_unfinished_groups(float32_engine: VLLMRollout) -> None:
    hold_after(float32_engine, STEPS)
    float32_engine.submit([*requests(40, max_tokens=3), *requests(41)], LONG)
    assert list(float32_engine.collect([40], 1)) == [40]
    # A waiting call would never return: the engine is held.
    assert float32_engine.collect([], 0) == {}
    go_on(float32_engine)
    assert list(float32_engine.collect([41], 1)) == [41]
