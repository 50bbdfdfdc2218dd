"""One live vLLM engine that samples group by group: weights change in flight, groups are left, taken and dropped."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import ray
import torch
from transformers import AutoModelForCausalLM

from rl_plugins.rollout.engine import Generations, GroupRequest, SamplingConfig
from rl_plugins.rollout.vllm.client import VLLMRollout
from rl_plugins.rollout.vllm.config import VLLMConfig
from rl_plugins.rollout.weights import ModuleWeightSource

pytestmark = pytest.mark.integration

LONG = SamplingConfig(num_samples=2, max_tokens=200)
SHORT = SamplingConfig(num_samples=2, max_tokens=3)


@pytest.fixture(scope="module")
def rollout(workplace: Path, running_ray: None) -> Iterator[VLLMRollout]:
    config = VLLMConfig(str(workplace / "tiny"), max_model_len=256, sleep="none", update_timeout_s=30)
    rollout = VLLMRollout(config)
    rollout.connect(0, 1)
    yield rollout
    rollout.stop()


@torch.no_grad()
def trained(policy: torch.nn.Module, seed: int) -> torch.nn.Module:
    """The policy after a step; returns a copy of it."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.parameters():
        parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return deepcopy(policy)


def requests(*tickets: int) -> list[GroupRequest]:
    return [GroupRequest(ticket, [5 + ticket, 6, 7], seed=ticket) for ticket in tickets]


def collected(rollout: VLLMRollout, required: list[int], count: int) -> dict[int, Generations]:
    """Finished groups, with their responses."""
    held = rollout.collect(required, count)
    fetched = rollout.fetch(list(held.values()))
    return {ticket: one for ticket, one in zip(held, fetched, strict=True) if one is not None}


def steps_taken(rollout: VLLMRollout) -> int:
    return int(ray.get(rollout._fleet.actors[0].progress.remote(), timeout=30))


def exact_log_probs(policy: torch.nn.Module, prompt: list[int], response: list[int]) -> np.ndarray:
    ids = torch.tensor([prompt + response])
    with torch.no_grad():
        log_probs = policy(input_ids=ids).logits[0].log_softmax(-1)
    chosen = log_probs[len(prompt) - 1 : -1].gather(-1, ids[0, len(prompt) :, None])
    return chosen.squeeze(-1).numpy()


def test_every_token_is_of_the_weights_that_it_says(rollout: VLLMRollout, workplace: Path) -> None:
    policy = AutoModelForCausalLM.from_pretrained(workplace / "tiny")
    source, policies = ModuleWeightSource(policy), {}
    policies[3] = trained(policy, 3)
    rollout.update_weights(source, version=3)
    before = steps_taken(rollout)
    rollout.submit(requests(0, 1), LONG)
    deadline = time.monotonic() + 30
    while steps_taken(rollout) < before + 20:
        assert time.monotonic() < deadline
    policies[4] = trained(policy, 4)
    rollout.update_weights(source, version=4)
    groups = collected(rollout, [0, 1], 2)

    mixed: list[tuple[list[int], list[int], list[float], list[int]]] = []
    for request in requests(0, 1):
        group = groups[request.ticket]
        for response, log_probs, versions in zip(
            group.responses(), group.response_log_probs(), group.response_versions(), strict=True
        ):
            # One that has ended before the update is of the old weights alone.
            assert versions == sorted(versions) and set(versions) <= {3, 4}
            mixed += [(request.prompt, response, log_probs, versions)] if len(set(versions)) == 2 else []
            # The new weights see the tokens of before through their own eyes: the KV cache was computed again.
            for version, weights in policies.items():
                theirs = np.array(versions) == version
                exact = exact_log_probs(weights, request.prompt, response)
                np.testing.assert_allclose(np.array(log_probs)[theirs], exact[theirs], atol=2e-4)
    prompt, response, log_probs, versions = mixed[0]
    other = exact_log_probs(policies[3], prompt, response)
    late = np.array(versions) == 4
    assert np.abs(np.array(log_probs) - other)[late].max() > 0.01, "the weights hardly differ"


def test_what_is_finished_is_taken_and_the_rest_goes_on(rollout: VLLMRollout) -> None:
    rollout.submit(requests(10), LONG)
    rollout.submit(requests(11, 12), SHORT)
    first = rollout.collect([], 2)
    assert sorted(first) == [11, 12]
    assert all(group.lengths.tolist() == [3, 3] for group in first.values())
    # A call for all prompts of a step does not disturb it.
    assert len(rollout.generate([[9, 8]], SHORT, [1]).lengths) == 2
    (rest,) = rollout.collect([10], 0).values()
    assert max(rest.lengths) > 3


def test_groups_are_those_of_one_call_whatever_else_is_sampled(rollout: VLLMRollout) -> None:
    def flat(groups: dict[int, Generations]) -> list[list[int]]:
        return [response for ticket in sorted(groups) for response in groups[ticket].responses()]

    rollout.submit(requests(20, 21), SHORT)
    together = flat(collected(rollout, [20, 21], 2))
    once = rollout.generate([one.prompt for one in requests(20, 21)], SHORT, [20, 21])
    assert together == once.responses()


def test_finished_groups_stay_with_the_engine_until_somebody_fetches_them(rollout: VLLMRollout) -> None:
    rollout.submit(requests(25, 26, 27), SHORT)
    held = rollout.collect([25, 26, 27], 3)
    # Their lengths and where they are: that is all a rank hands on to another.
    assert len(pickle.dumps(list(held.values()))) < 1000
    rollout.drop([27])
    asked = [held[27], held[26], held[25]]
    dropped, second, first = rollout.fetch(asked)
    assert dropped is None and first is not None and second is not None
    assert [len(one) for one in first.responses()] == held[25].lengths.tolist() == [3, 3]
    apart = [rollout.generate([one.prompt], SHORT, [one.seed]) for one in requests(25, 26)]
    assert [first.responses(), second.responses()] == [one.responses() for one in apart]
    assert rollout.fetch(asked) == [None, None, None]
    # What is in this process stays as it is.
    assert rollout.fetch([first]) == [first]


def test_dropped_groups_end_and_leave_nothing(rollout: VLLMRollout) -> None:
    rollout.submit(requests(30, 31), LONG)
    rollout.submit(requests(32), SHORT)
    assert list(rollout.collect([32], 1)) == [32]
    rollout.drop([30, 31])
    rollout.submit(requests(33), SHORT)
    assert list(rollout.collect([], 1)) == [33]
    assert rollout.collect([], 0) == {}
    ended = steps_taken(rollout)
    time.sleep(0.3)
    assert steps_taken(rollout) == ended


def test_what_is_there_is_taken_without_waiting(rollout: VLLMRollout) -> None:
    rollout.submit(requests(40), SHORT)
    rollout.submit(requests(41), LONG)
    assert 41 not in rollout.collect([40], 1)
    start = time.monotonic()
    assert rollout.collect([], 0) == {}
    assert time.monotonic() - start < 5
    assert list(rollout.collect([41], 1)) == [41]


def test_what_a_lost_engine_had_is_gone_and_can_be_sampled_again(rollout: VLLMRollout, workplace: Path) -> None:
    rollout.submit(requests(50), SHORT)
    held = rollout.collect([50], 1)
    ray.kill(rollout._fleet.actors[0], no_restart=False)
    deadline = time.monotonic() + 30
    with pytest.raises(ray.exceptions.RayActorError):
        while time.monotonic() < deadline:
            steps_taken(rollout)
    assert rollout.fetch(list(held.values())) == [None]
    assert rollout.replace_lost() == 1
    # It is on its way back, and nobody asks it.
    assert rollout.fetch(list(held.values())) == [None]
    rollout.update_weights(ModuleWeightSource(AutoModelForCausalLM.from_pretrained(workplace / "tiny")), version=9)
    # The new process has never had them.
    assert rollout.fetch(list(held.values())) == [None]
    rollout.submit(requests(50), SHORT)
    (again,) = collected(rollout, [50], 1).values()
    assert again.lengths.tolist() == [3, 3]
